"""`assert_bitwise`: wrong functions are refuted with the first operator, right ones pass, arguments are checked."""

from __future__ import annotations

import fnmatch
import re
from typing import Any

import pytest
import torch

from mgpu_check import Rank, ScalingMismatch, assert_bitwise
from tests.gates import bit_programs
from tests.gates.bit_programs import RIGHT, WRONG, Case, batch, in_batch

pytestmark = pytest.mark.gpus(4)


def examine(ranks: Any, case: Case) -> None:
    assert_bitwise(ranks, case.run, batch=case.batch, unchanged=case.unchanged, others=case.others)


@pytest.mark.parametrize("name", WRONG)
def test_bits_that_change_are_refuted(ranks, name):
    case = WRONG[name]
    with pytest.raises(ScalingMismatch) as caught:
        examine(ranks, case)
    message = str(caught.value)
    assert fnmatch.fnmatch(message.replace("[", "("), f"*{case.words.replace('[', '(')}*"), message
    assert re.search(r"\d+ of \d+ elements differ, by at most", message)
    assert caught.value.site.startswith(str(bit_programs.__file__).rpartition("/")[2].join(["tests/gates/", ":"]))


@pytest.mark.parametrize("name", RIGHT)
def test_bits_that_stay_pass(ranks, name):
    examine(ranks, RIGHT[name])


def test_a_failure_says_what_deterministic_algorithms_do(ranks):
    with pytest.raises(ScalingMismatch, match=r"use_deterministic_algorithms\(True\) two calls have equal bits"):
        examine(ranks, WRONG["experts combined by atomics"])
    with pytest.raises(ScalingMismatch, match=r"use_deterministic_algorithms\(True\) two calls differ, too"):
        examine(ranks, WRONG["a counter between calls"])


def with_loss(x: torch.Tensor, rank: Rank) -> dict[str, torch.Tensor]:
    return {"rows": x.to(rank.device) * 2, "loss": x.sum()}


def test_what_was_not_compared_is_said(ranks, monkeypatch):
    lines: list[str] = []
    monkeypatch.setattr(type(ranks), "_not_seen", lambda self, gate, line: lines.append(f"{gate}: {line}"))
    assert_bitwise(ranks, with_loss, batch=batch, unchanged=["batch_size"])
    assert set(lines) == {
        "assert_bitwise: loss with other samples: its first dimension is not that of the 8 samples",
    }


def nothing(x: torch.Tensor, rank: Rank) -> None:
    return None


def only_a_loss(x: torch.Tensor, rank: Rank) -> torch.Tensor:
    return x.sum()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"run": 3}, r"run=3 is not a function; give one, as in run\(batch, rank\)"),
        ({"others": {"packed": None}}, r"others\['packed'\]=None is not a function"),
        (
            {"unchanged": ["batch"]},
            "unchanged has 'batch'; choose some of repeated, order, batch_size, position, ranks",
        ),
        ({"unchanged": []}, "nothing is declared; give unchanged some of"),
        ({"others": {"order": in_batch}}, "others has 'order', which is a name of unchanged"),
        ({"unchanged": "ranks", "world_sizes": [1]}, "'ranks' needs a world size above 1"),
        ({"run": nothing}, "returned None on all ranks of world size 1"),
        (
            {"run": only_a_loss, "unchanged": "position"},
            r"no result of run has 8 as its first dimension.*the result \(\)",
        ),
        (
            {"run": with_loss, "batch": lambda: torch.ones(4, 16), "unchanged": "batch_size"},
            r"at least 8 samples at world size 4; batch\(\) returned 4",
        ),
        (
            {"run": with_loss, "batch": lambda: torch.ones(()), "unchanged": "position"},
            "all have the samples as their first dimension",
        ),
    ],
)
def test_wrong_arguments_are_refused(ranks, options, message):
    arguments = {"run": in_batch, "batch": batch, "unchanged": ["repeated"], **options}
    with pytest.raises(ValueError, match=message):
        assert_bitwise(ranks, arguments.pop("run"), **arguments)
