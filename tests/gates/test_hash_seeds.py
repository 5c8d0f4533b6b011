"""One case of each gate has different hash seeds on its ranks, where the code under test uses sets."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import types
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mgpu_check import (
    ScalingMismatch,
    assert_evaluation_agrees,
    assert_loader_covers,
    assert_resume_continues,
    assert_step_scales,
)
from mgpu_check.errors import RankFailure
from mgpu_check.gates.search.hash_seeds import sets_used, with_seeds_apart
from mgpu_check.processes import environments

NAMES = ("alpha", "beta", "gamma", "delta", "epsilon", "zeta")


def in_order(ordered: bool) -> list[str]:
    return sorted(set(NAMES)) if ordered else list(set(NAMES))


def build() -> nn.Module:
    return nn.Linear(6, 1)


def batch(n: int) -> torch.Tensor:
    return torch.randn(n, 6)


def scaled(model: nn.Module, batch: torch.Tensor, rank: Any, *, ordered: bool) -> dict[str, torch.Tensor]:
    """Sum six values over the ranks, in the order of their names."""
    values = {name: torch.tensor(float(number), device=rank.device) for number, name in enumerate(NAMES)}
    for name in in_order(ordered):
        dist.all_reduce(values[name])
    return {name: value / rank.size for name, value in values.items()}


def trained(model: nn.Module, batch: torch.Tensor, rank: Any, *, ordered: bool) -> None:
    weight = 1.0 + in_order(ordered).index("alpha")
    model.to(rank.device)
    (weight * model(batch.to(rank.device)).square().mean()).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()


def loader(rank: Any, *, ordered: bool) -> list[list[str]]:
    return [[name] for name in in_order(ordered)[rank.index :: rank.size]]


def resumed(rank: Any, directory: Any, start: int, stop: int, *, ordered: bool) -> dict[str, Any]:
    """Save on rank 0 the position in an order, and continue from it on each rank."""
    order = in_order(ordered)
    at = order.index(torch.load(directory / "name.pt")) if start else 0
    dist.barrier()
    name = order[(at + stop - start) % len(order)]
    if rank.index == 0:
        torch.save(name, directory / "name.pt")
    dist.barrier()
    return {"at": (at + stop - start) % len(order)}


STEPS: dict[str, Any] = {"build": build, "batch": batch, "world_sizes": [2]}
GATES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "assert_step_scales": (assert_step_scales, scaled, {"max_examples": 1, "sizes": 4, **STEPS}),
    "assert_loader_covers": (assert_loader_covers, loader, {"epochs": 1, "world_sizes": [2]}),
    "assert_resume_continues": (assert_resume_continues, resumed, {"steps": 2, "world_sizes": [2]}),
    "assert_evaluation_agrees": (assert_evaluation_agrees, trained, {"steps": 1, **STEPS}),
}


@pytest.mark.gpus(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "assert_step_scales" else name for name in GATES]
)
def test_a_gate_finds_what_depends_on_the_order_of_a_set_and_passes_what_sorts_it(ranks, name):
    gate, judged, options = GATES[name]
    with pytest.raises(ScalingMismatch) as info:
        gate(ranks, functools.partial(judged, ordered=False), **options)
    assert info.value.mistakes == ("set-order",)
    text = str(info.value)
    assert text.startswith(f"{name}: ranks with different hash seeds fail, as they have them under torchrun: ")
    assert "sets are used in in_order (" in text and "with one hash seed on all ranks the same case passes" in text
    gate(ranks, functools.partial(judged, ordered=True), **options)


class Ranks:
    """The fixture, with what it was asked for."""

    _seeds_apart = False
    size = 2

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.remarks: list[str] = []

    def run(self, *args: Any, **how: Any) -> list[Any]:
        self.asked.append(how.get("environment"))
        return []

    def _remark(self, line: str) -> None:
        self.remarks.append(line)


def judge_by(verdicts: list[bool]) -> Any:
    """A judgement that comes out as the next of `verdicts`."""
    rest = iter(verdicts)

    def judge(ranks: Any) -> None:
        ranks.run(None, size=2)
        if not next(rest):
            raise RankFailure("rank 1 of 2 raised KeyError: 'a'\nmore", ranks=[1])

    return judge


def test_a_failure_counts_that_follows_the_seeds(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    ranks: Any = Ranks()
    with pytest.raises(ScalingMismatch, match="a seed for each rank, rank 1 of 2 raised KeyError: 'a'; sets"):
        with_seeds_apart(ranks, "gate", (in_order,), {}, judge_by([False, True, False]))
    assert ranks.asked == [environments.APART, None, environments.APART]
    with_seeds_apart(ranks, "gate", (in_order,), {}, judge_by([True]))
    with_seeds_apart(ranks, "gate", (in_order,), {}, judge_by([False, True, True]))  # now and then, whatever the seeds
    with pytest.raises(RankFailure):  # with one seed, too: it is no matter of seeds
        with_seeds_apart(ranks, "gate", (in_order,), {}, judge_by([False, False]))
    assert not ranks.remarks


def test_code_without_sets_is_not_tried_and_a_seed_of_the_user_is_told(monkeypatch):
    ranks: Any = Ranks()
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    with_seeds_apart(ranks, "gate", (batch,), {}, judge_by([]))
    assert not ranks.remarks
    with_seeds_apart(ranks, "gate", (in_order,), {}, judge_by([]))
    assert ranks.remarks == [
        "gate: different hash seeds on ranks were not tried, because PYTHONHASHSEED=7 fixes the seed"
    ]
    monkeypatch.delenv("PYTHONHASHSEED")
    ranks._seeds_apart = True
    with_seeds_apart(ranks, "gate", (in_order,), {}, judge_by([]))
    assert not ranks.asked


@pytest.mark.gpus(3)
def test_ranks_have_one_hash_seed_or_different_ones(ranks):
    def seeds(rank: Any, child: bool = False) -> tuple[int, str | None, str]:
        line = [sys.executable, "-c", "print(hash('a'))"]
        return hash("a"), os.environ.get("PYTHONHASHSEED"), subprocess.check_output(line, text=True) if child else ""

    alike = ranks.run(seeds, child=True)
    assert len({own for own, _, _ in alike}) == 1 and {variable for _, variable, _ in alike} == {None}
    assert len({of_child for _, _, of_child in alike}) == 3  # what a rank starts draws its own, as everywhere
    apart = ranks.run(seeds, environment=environments.APART)
    assert apart[0][0] == apart[2][0] != apart[1][0]
    assert ranks.run(lambda rank: rank.index) == [0, 1, 2]


def comprehension(names: list[str]) -> object:
    return {name for name in names}  # noqa: C416


def difference(one: dict[str, int], other: dict[str, int]) -> object:
    return one.keys() - other.keys()


def member(name: str) -> bool:
    return name in {"a", "b"}


class Holder:
    def chosen(self) -> object:
        return frozenset(NAMES)


def by_class() -> object:
    return Holder()


def by_default(how: Any = comprehension) -> object:
    return how([])


def by_closure() -> Any:
    def inner() -> object:
        return comprehension([])

    return inner


def by_module() -> object:
    return helpers.named()


helpers = types.ModuleType("helpers")
helpers.__file__ = "/home/user/helpers.py"
exec(compile("def named():\n    return set()\n", helpers.__file__, "exec"), vars(helpers))


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (comprehension, ["comprehension"]),
        (difference, ["difference"]),
        (by_class, ["chosen"]),
        (Holder().chosen, ["chosen"]),
        (by_default, ["comprehension"]),
        (by_closure(), ["comprehension"]),
        (by_module, ["named"]),
        (functools.partial(in_order, True), ["in_order"]),
        (member, []),
        (batch, []),
        (build, []),
        (None, []),
    ],
)
def test_sets_are_found_in_what_a_function_reaches(function, names):
    assert [place.partition(" ")[0] for place in sets_used([function])] == names
