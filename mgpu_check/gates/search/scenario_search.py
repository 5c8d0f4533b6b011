"""Draw the cases that a step is tried on, from ordinary to provoking ones, and search for the smallest one that fails.

Imports Hypothesis: not for ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import hypothesis
from hypothesis import HealthCheck, Phase
from hypothesis import strategies as st
from hypothesis.errors import Flaky, Unsatisfiable
from hypothesis.reporting import with_reporter

from mgpu_check.errors import RankHang
from mgpu_check.gates.search.scenarios import CHANGES, Mesh, Scenario, samples_in

# Batch sizes to try, as a user specifies them.
Sizes = st.SearchStrategy[int] | int | Iterable[int] | str | Callable[[int], "st.SearchStrategy[int]"] | None

SEVERAL_STEPS = "several steps"  # the family that is skipped if the step does not change the model

_KINDS = ("divisible", "uneven", "below")
_DIVISIBLE = "divisible"
_SEEDS = 3
_MOST_STEPS = 3
_MOST_PER_RANK = 4  # most samples per rank in batch sizes that the gate chooses


@dataclass(frozen=True)
class Family:
    """Scenarios of one kind, with the number of examples to try."""

    name: str
    scenarios: st.SearchStrategy[Scenario]
    examples: int


def families(
    worlds: Sequence[tuple[int, Mesh]],
    sizes: Sizes,
    drawn: st.SearchStrategy[Any] | None,
    max_examples: int,
    micro_batches: int = 1,
) -> list[Family]:
    """Return the families of scenarios, from ordinary cases to provoking ones.

    Args:
        worlds: world sizes to try, each with the mesh that divides it, or with ().
        sizes: batch sizes; None for sizes below, at and above the world size, divisible by it and not.
        drawn: strategy of batches, which bring their own sizes.
        micro_batches: number of micro-batches of each rank; "divisible" sizes are divisible by it, too.
    """
    size_strategy = _sizes(sizes, micro_batches)

    @st.composite
    def scenario(
        draw: st.DrawFn,
        size_kind: str = "",
        changes: Sequence[str] = ("",),
        steps: tuple[int, int] = (1, 1),
        among: Sequence[tuple[int, Mesh]] = worlds,
        first_per_rank: int = 1,
    ) -> Scenario:
        world_size, mesh = draw(st.sampled_from(among))
        samples = 0
        batches: tuple[Any, ...] = ()
        count = draw(st.integers(*steps))
        if drawn is None:
            samples = draw(size_strategy(world_size, size_kind, first_per_rank))
        else:
            batches = tuple(draw(drawn) for _ in range(count))
            samples = samples_in(batches[0])
        change = draw(st.sampled_from(changes))
        seed = draw(st.integers(0, _SEEDS - 1))
        return Scenario(world_size, samples, count, change, seed=seed, batches=batches, mesh=mesh)

    shares: list[tuple[str, st.SearchStrategy[Scenario], float]] = []
    for world in worlds:  # one family per world, so that every world is tried
        if drawn is not None:
            shares.append(("batches as drawn", scenario(among=(world,)), 0.45 / len(worlds)))
            continue
        kinds = (("divisible", 0.2), ("uneven", 0.2), ("below", 0.1))
        for size_kind, share in (("divisible", 0.5),) if sizes == _DIVISIBLE else kinds:
            shares.append((size_kind, scenario(size_kind, among=(world,)), share / len(worlds)))
    shares.sort(key=lambda entry: _KINDS.index(entry[0]) if entry[0] in _KINDS else 0)
    # Hypothesis tries the simplest case first (hypothesis/internal/conjecture/engine.py, generate_new_test_cases,
    # Hypothesis 6.170), so a small family may try no size but the first: give each family another first size.
    shares.append((SEVERAL_STEPS, scenario(steps=(2, _MOST_STEPS), first_per_rank=2), 0.15))
    for number, change in enumerate(CHANGES):
        shares.append((change, scenario(changes=(change,), first_per_rank=1 + (number + 2) % _MOST_PER_RANK), 0.08))
    return [Family(name, strategy, max(1, round(share * max_examples))) for name, strategy, share in shares]


def _sizes(sizes: Sizes, micro_batches: int) -> Callable[[int, str, int], st.SearchStrategy[int]]:
    """Return a function from world size, kind, and samples per rank of the first size, to a strategy of sizes."""
    if sizes is None:
        return _any_size
    if sizes == _DIVISIBLE:
        return lambda world, size_kind, first_per_rank: _any_size(world * micro_batches, "divisible", first_per_rank)
    strategy_of = _given(sizes)
    return lambda world, size_kind, first_per_rank: (
        strategy_of(world).filter(functools.partial(_is_of_kind, world, size_kind)) if size_kind else strategy_of(world)
    )


def _any_size(world: int, size_kind: str, first_per_rank: int) -> st.SearchStrategy[int]:
    """Return the gate's own sizes of a kind; all kinds but "below" for ""."""
    per_rank = [first_per_rank, *(count for count in range(1, _MOST_PER_RANK + 1) if count != first_per_rank)]
    divisible = st.sampled_from([count * world for count in per_rank])
    if size_kind == "divisible":
        return divisible
    if size_kind == "below":
        return st.integers(1, world - 1) if world > 1 else st.nothing()
    if world == 1:
        return st.nothing() if size_kind == "uneven" else divisible
    uneven = st.integers(world + 1, 4 * world + 3).filter(lambda n: n % world != 0)
    return uneven if size_kind == "uneven" else st.one_of(divisible, uneven)


def _is_of_kind(world: int, size_kind: str, size: int) -> bool:
    if size_kind == "divisible":
        return size % world == 0
    if size_kind == "below":
        return 0 < size < world
    return size > world and size % world != 0  # uneven


def _given(sizes: Sizes) -> Callable[[int], st.SearchStrategy[int]]:
    wanted = (
        'give a strategy of integers, an integer, several of them, "divisible" (by the world size), or a function from '
        "the world size to a strategy"
    )
    if isinstance(sizes, st.SearchStrategy):
        strategy = sizes
        return lambda world: strategy
    if isinstance(sizes, (bool, str)):
        raise ValueError(f"sizes={sizes!r} is no batch size; {wanted}")
    if isinstance(sizes, int):
        sizes = (sizes,)
    if isinstance(sizes, Iterable):
        several = list(sizes)
        if not several or not all(isinstance(n, int) and not isinstance(n, bool) and n > 0 for n in several):
            raise ValueError(f"sizes={several!r} are not all positive integers; {wanted}")
        ascending = sorted(set(several))
        return lambda world: st.sampled_from(ascending)
    if callable(sizes):
        of_world = sizes

        def made(world: int) -> st.SearchStrategy[int]:
            sizes_of_world = of_world(world)
            if callable(sizes_of_world) and not isinstance(sizes_of_world, st.SearchStrategy):
                raise ValueError(
                    f"sizes({world}) is {sizes_of_world!r}; let the function return a strategy, or integers"
                )
            return _given(sizes_of_world)(world)

        return made
    raise ValueError(f"sizes={sizes!r} is no batch size; {wanted}")


_MOST_SHRINKS = 40  # most cases that are run after a failure to find a smaller failing case

Case = TypeVar("Case", contravariant=True)
Failed = TypeVar("Failed", covariant=True)


class Tries(Protocol[Case, Failed]):
    def knows(self, scenario: Case) -> bool: ...

    def run(self, scenario: Case) -> Failed | None: ...


def smallest_failure(
    trials: Tries[Case, Failed], scenarios: st.SearchStrategy[Case], examples: int, most_shrinks: int = _MOST_SHRINKS
) -> Failed | None:
    """Return the smallest failure that Hypothesis finds; None if all scenarios pass, or none can be drawn."""
    failures: list[Failed] = []
    shrinks_left = most_shrinks

    @hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=True,  # a gate must give the same verdict for the same code each time
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
        report_multiple_bugs=False,
        print_blob=False,
    )
    @hypothesis.given(scenarios)
    def try_one(scenario: Case) -> None:
        nonlocal shrinks_left
        if failures:
            shrinks_left -= 1
            if shrinks_left < 0 and not trials.knows(scenario):
                return
        try:
            trial = trials.run(scenario)
        except RankHang:
            if not failures:
                raise
            shrinks_left = 0  # stop shrinking: each hang takes the whole deadline
            return
        if trial is not None:
            failures.append(trial)
            raise _ScenarioFailed

    with with_reporter(lambda text: None):  # the gate reports the failing example in more detail
        try:
            try_one()
        except Unsatisfiable:
            return None
        except (_ScenarioFailed, Flaky):  # an intermittent failure is a failure
            if not failures:
                raise
            return failures[-1]
    return None


class _ScenarioFailed(AssertionError):
    """A scenario failed; Hypothesis then searches for a smaller one."""
