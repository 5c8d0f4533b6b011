"""`compare --against` on refactorings as people make them: each right, and with a mistake that it may bring."""

from __future__ import annotations

import re
import subprocess
from typing import NamedTuple

import pytest

from tests.compare.conftest import script

pytestmark = pytest.mark.slow  # each takes six processes


class Refactoring(NamedTuple):
    """The lines that are replaced, the right ones, and wrong ones with words of their report."""

    old: str
    right: str
    wrong: str
    said: str


PRODUCTS = """\
        weights = (query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1])).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).flatten(2))
"""
FUSED = """\
        mixed = F.scaled_dot_product_attention(query, key, value{})
        return self.out(mixed.transpose(1, 2).flatten(2))
"""
GROUPS = """\
decayed = [one for one in parameters if one.dim() > 1]
others = [one for one in parameters if one.dim() == 1]
"""
BY_NAME = """\
NORMS = "before", "between", "norm"
names = dict(model.named_parameters())
others = [one for name, one in names.items() if name.endswith("bias"){}]
decayed = [one for one in parameters if all(one is not other for other in others)]
"""
REDUCE = """\
    for parameter in parameters:
        dist.all_reduce(parameter.grad)
        parameter.grad /= world
"""
IN_A_BUCKET = """\
    bucket = torch.cat([one.grad.flatten() for one in parameters])
    dist.all_reduce(bucket)
    for one, part in zip(parameters{}, bucket.split([one.numel() for one in parameters]), strict=False):
        one.grad.copy_(part.view_as(one) / world)
"""
PARTS = """\
        loss = loss_of(model(part), part)
        (loss / PARTS).backward()
"""
CLIP = "    nn.utils.clip_grad_norm_(parameters, 0.5)\n"
CLIP_BY_HAND = """\
    norm = torch.stack([one.grad.norm() for one in parameters]).{}
    for one in parameters:
        one.grad.mul_(min(1.0, 0.5 / (float(norm) + 1e-6)))
"""
BLOCKS = "            x = block(x)\n"
IN_THE_BACKWARD = "            x = {}torch.utils.checkpoint.checkpoint(block, {}, use_reentrant=False)\n"
LOSS = """\
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
"""
LOSS_IN_CHUNKS = """\
    logits, labels = logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    chunks = list(zip(logits.split(4), labels.split(4), strict=True))
    return {}
"""
RATE = "schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)\n"
TWO_SCHEDULES = """\
warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, 1.0, 1)
cold = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
schedule = torch.optim.lr_scheduler.{}
"""
BLOCK = """\
        x = x + self.attention(self.before(x))
        return x + self.down(F.gelu(self.up(self.between(x))))
"""
BATCH = "    batch = data[step * 8 : (step + 1) * 8][rank::world]\n"

A_BLOCK = """\
        x = x + self.attention({})
        return torch.add({}, self.down(F.gelu(self.up(self.between(x)))))
"""
A_HELPER = "{}        loss = loss_of(model(part), part) / PARTS\n        loss.backward()\n"
BY_INDEX = "    batch = data[torch.arange(rank, 8, world) + step * {}]\n"
SUMS = "sum(F.cross_entropy(*one, reduction='sum') for one in chunks) / len(labels)"
MEANS = "sum(F.cross_entropy(*one) for one in chunks) / len(chunks)"
CHAIN, SEQUENCE = "ChainedScheduler([warm, cold])", "SequentialLR(optimizer, [warm, cold], [1])"
FORWARD = "the first output that differs is that of blocks.0.attention.out"
IN_THE_LOSS = "so the error is in the loss, the backward pass or a reduction"


def refactored(old: str, new: str, right: tuple[str, ...], wrong: tuple[str, ...], said: str) -> Refactoring:
    """Fill the gaps of the new lines."""
    return Refactoring(old, new.format(*right), new.format(*wrong), said)


REFACTORINGS = {
    "fused attention": refactored(PRODUCTS, FUSED, ("",), (", is_causal=True",), FORWARD),
    "groups by name": refactored(GROUPS, BY_NAME, (" or name.split('.')[-2] in NORMS",), ("",), "the weight decay of"),
    "gradients in a bucket": refactored(REDUCE, IN_A_BUCKET, ("",), ("[:-1]",), "head.bias"),
    "accumulation in a helper": refactored(
        PARTS, A_HELPER, ("",), ("        optimizer.zero_grad()\n",), "the gradient of"
    ),
    "clipping by hand": refactored(CLIP, CLIP_BY_HAND, ("norm()",), ("max()",), "the gradient of"),
    "checkpointed blocks": refactored(BLOCKS, IN_THE_BACKWARD, ("", "x"), ("x + ", "x"), "that of blocks.1"),
    "the loss in chunks": refactored(LOSS, LOSS_IN_CHUNKS, (SUMS,), (MEANS,), IN_THE_LOSS),
    "two schedules": refactored(RATE, TWO_SCHEDULES, (CHAIN,), (SEQUENCE,), "the learning rate of"),
    "a block in one function": refactored(BLOCK, A_BLOCK, ("self.before(x)", "x"), ("x", "self.before(x)"), "blocks.0"),
    "batches by index": refactored(BATCH, BY_INDEX, ("8",), ("4",), "the batches differ"),
}


@pytest.fixture
def against(python, tmp_path):
    """Return what `compare --against=HEAD` says about the script with a passage replaced."""

    def against(old: str, new: str) -> tuple[int, str]:
        before = script("transformer")
        assert before.count(old) == 1
        tmp_path.joinpath("train.py").write_text(before)
        for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "--allow-empty", "--message=before"]):
            subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *command], cwd=tmp_path, check=True)
        tmp_path.joinpath("train.py").write_text(before.replace(old, new))
        words = ("-m", "mgpu_check", "compare", "--against=HEAD", "--gpus=2", "--", "train.py")
        code, stdout, stderr = python(*words, processes=6)
        return code, (stdout + stderr).decode()

    return against


@pytest.mark.parametrize("name", REFACTORINGS)
def test_a_right_refactoring_is_equal_and_a_wrong_one_differs(name, against):
    old, right, wrong, said = REFACTORINGS[name]
    code, text = against(old, right)
    assert code == 0 and re.search(r"^equal: 3 steps on 2 ranks", text, re.MULTILINE), text
    code, text = against(old, wrong)
    assert code == 1 and said in text, text
