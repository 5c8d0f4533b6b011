"""Steps that divide the sequence by ``context_parallel``: right ones pass, and mistakes of positions, order and sums do
not."""

from __future__ import annotations

import contextlib
import importlib

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from mgpu_check import ScalingMismatch, assert_step_scales

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.gpus(4)]  # the functions are experimental, and say so

TOKENS = 256  # the memory-efficient kernel wants a multiple of 32 for each half of the part of one of 4 ranks
WIDTH, HEADS, WORDS = 16, 2, 11


class Transformer(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.mixed, self.out, self.head = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens, positions):
        x = self.words(tokens) + self.places(positions)
        query, key, value = self.mixed(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.head(x + self.out(attended.transpose(1, 2).flatten(2)))


def batch(n):
    return torch.randint(WORDS, (n, TOKENS)), torch.randint(WORDS, (n, TOKENS))


def loss_of(model, tokens, positions, labels, count):
    return F.cross_entropy(model(tokens, positions).flatten(0, 1).float(), labels.flatten(), reduction="sum") / count


def everywhere(tokens):
    return torch.arange(TOKENS, device=tokens.device).expand(len(tokens), -1).contiguous()


def whole(model, batch):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    tokens, labels = batch
    loss_of(model, tokens, everywhere(tokens), labels, tokens.numel()).backward()
    optimizer.step()


def parallel():
    for name in ("_context_parallel._attention", "_attention"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"torch.distributed.tensor.experimental.{name}")
    raise AssertionError("torch has no ring attention")


def step_of(mistake="", rotate="allgather", narrow=False):
    def step(model, batch, rank):
        ring = parallel()
        ring.set_rotate_method(rotate)
        mesh = importlib.import_module("torch.distributed.device_mesh").init_device_mesh("cuda", (rank.size,))
        model.to(rank.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        tokens, labels = (part.to(rank.device) for part in batch)
        positions, count = everywhere(tokens), tokens.numel()
        divided = [tokens, labels, positions]
        if mistake == "labels in order":  # the ring has dealt out the tokens so that all ranks have as much to do
            divided, labels = [tokens, positions], labels.chunk(rank.size, 1)[rank.index]
        elif mistake == "positions from zero":
            divided, positions = [tokens, labels], positions[:, : TOKENS // rank.size]
        with ring.context_parallel(mesh, buffers=divided, buffer_seq_dims=[1] * len(divided)):
            with torch.autocast("cuda", torch.bfloat16, enabled=narrow):
                loss = loss_of(model, tokens, positions, labels, count)
            loss.backward()
        for name, parameter in model.named_parameters():
            if mistake != "gradient of a rank" or not name.startswith("mixed"):
                dist.all_reduce(parameter.grad)
        optimizer.step()

    return step


def check(ranks, step, **options):
    given = {"sizes": [1, 2], "world_sizes": [2, 4], "max_examples": 8, **options}
    assert_step_scales(ranks, step, build=Transformer, batch=batch, **given)


@pytest.mark.slow
@pytest.mark.parametrize(("rotate", "narrow"), [("alltoall", False), ("allgather", False), ("allgather", True)])
def test_a_right_step_passes(ranks, rotate, narrow):
    check(ranks, step_of(rotate=rotate, narrow=narrow))


@pytest.mark.slow
def test_a_right_step_passes_beside_a_reference_without_a_ring(ranks):
    check(ranks, step_of(), reference=whole, world_sizes=[4], sizes=[1], max_examples=1)


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["labels in order", "positions from zero", "gradient of a rank"])
@pytest.mark.parametrize("reference", [None, whole])
def test_wrong_twins_are_refuted(ranks, mistake, reference):
    for size in (2, 4):
        with pytest.raises(ScalingMismatch) as caught:
            check(ranks, step_of(mistake), reference=reference, world_sizes=[size])
        if (mistake, size, reference) == ("gradient of a rank", 2, None):
            assert caught.value.mistakes[0] == "gradients-not-synchronized"
