"""The README's code does what the README says."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
GPUS = ("-p", "no:cacheprovider", "--gpus=4", "--simulate", "--hypothesis-seed=0")


TRAIN = """
import torch
from torch import nn

def build():
    return nn.Linear(6, 1)

def batch(n):
    return torch.randn(n, 6)

def step(model, batch, rank):
    ddp = nn.parallel.DistributedDataParallel(model.to(rank.device))
    (ddp(batch[rank.index :: rank.size].to(rank.device)).sum() * rank.size / len(batch)).backward()
"""


def blocks(language: str) -> list[str]:
    """The fenced blocks of that language, in order."""
    parts = re.split(r"^```(.*)\n", README.read_text(), flags=re.MULTILINE)
    # Text, then in turn: the opening fence's language, the block, the closing fence's nothing, text.
    return [block for opening, block in zip(parts[1::4], parts[2::4], strict=True) if opening == language]


def test_the_first_test_is_refuted_as_shown(pytester, monkeypatch):
    code, *_ = blocks("python")
    shown = next(block for block in blocks("") if "test_mean_over_ranks[ranks=2]" in block)
    pytester.makepyfile(test_mean=code)
    monkeypatch.setenv("PATH", os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    result = pytester.run("pytest", *GPUS)
    result.assert_outcomes(failed=2)
    printed = [_of_any_hypothesis(line.rstrip()) for line in result.outlines]
    wanted = [_of_any_hypothesis(line) for line in shown.splitlines()]
    start = printed.index(wanted[0])
    assert printed[start : start + len(wanted)] == wanted


def _of_any_hypothesis(line: str) -> str:
    return re.sub(r"--gpu-replay=[\d.]+:", "--gpu-replay=", line)


def test_the_other_examples_pass(pytester):
    _, gate, sizes, node = blocks("python")
    pytester.makepyfile(
        train=TRAIN,
        test_gate=gate,
        test_sizes="import torch, torch.distributed as dist\nfrom hypothesis import given, strategies as st\n" + sizes,
        test_node="def test_it():\n    import torch\n    class Net(torch.nn.Linear):\n"
        "        def __init__(self): super().__init__(2, 3)\n"
        + "".join(f"    {line}\n" for line in node.splitlines())
        + "        assert net(torch.ones(7, 2)).shape == (7, 3)\n",
    )
    pytester.runpytest_subprocess(*GPUS).assert_outcomes(passed=3)


def test_the_report_of_the_gate_is_that_of_its_page():
    shown = next(block for block in blocks("") if "does not scale" in block)
    assert shown in (README.parent / "docs" / "gate.md").read_text()


@pytest.mark.parametrize(
    "name",
    ["README.md", "CHANGELOG.md", "docs/architecture.md", "docs/compare.md", "docs/gate.md", "benchmarks/README.md"],
)
def test_links_between_pages_lead_somewhere(name):
    page = README.parent / name
    for link in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / link).exists(), link
