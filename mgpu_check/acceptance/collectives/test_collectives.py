"""Run collectives on exact data over all GPUs, halves and pairs, and compare every iteration on every rank bit for
bit."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_check.acceptance.node import Node, drawn
from mgpu_check.settings import active
from mgpu_check.torch_hooks.collective_table import TRANSFERS

if TYPE_CHECKING:
    from mgpu_check.oracles.collectives.repeated_calls import RepeatedCollective

DTYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int8", "uint8")
REDUCTIONS = ("sum", "avg", "product", "min", "max")
OPERATIONS = (
    *((name, reduction) for name, row in TRANSFERS.items() if row.reduces for reduction in REDUCTIONS),
    *((name, "sum") for name, row in TRANSFERS.items() if not row.reduces),
    ("send_recv", "sum"),
)
MEASURED = tuple(name for name, row in TRANSFERS.items() if row.takers == "all" and name != "scatter")
"""Collectives of training that give every rank a result: their speed over all GPUs is measured."""

_BORDERS = {
    "quick": (4 << 10, 64 << 10),
    "standard": (4 << 10, 64 << 10, 1 << 20, 4 << 20),
    "long": (4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20),
}
"""Sizes in bytes around which libraries switch their protocol or algorithm."""
_LARGEST = {"quick": 32 << 20, "standard": 128 << 20, "long": 512 << 20}
_MANY = {"quick": 400, "standard": 1200, "long": 10_000}
"""Iterations at 1 MiB: a fault that shows once in 300 is seen at the level "standard" with a probability of 0.98."""
_MANY_SIMULATED = {"quick": 100, "standard": 400, "long": 1200}
_MEASURED = {"quick": 5, "standard": 15, "long": 51}
_LAPS = {"quick": 400, "standard": 3200, "long": 12_800}
_LAPS_SIMULATED = {"quick": 120, "standard": 800, "long": 1600}
"""Calls that are timed one by one."""
_MOST_ROUNDS = {"quick": 7, "standard": 15, "long": 31}
"""Rounds of pairs that are measured: all pairs of up to 8, 16 or 32 GPUs."""
_MOST_PAIRS = {"quick": 28, "standard": 496, "long": 2016}


def fits(node: Node, size: int) -> bool:
    return size * 12 <= min(node.gpus[number].memory for number in node.numbers)


def look(node: Node, cases: Sequence[RepeatedCollective]) -> None:
    from mgpu_check.acceptance.collectives.checks import examine_collectives
    from mgpu_check.oracles.collectives.repeated_calls import Cases

    node.on_ranks("collectives", examine_collectives, Cases(tuple(cases)))


@pytest.mark.parametrize(("operation", "reduction"), OPERATIONS, ids=["-".join(pair) for pair in OPERATIONS])
@drawn(quick=1, standard=2, long=12)
@given(data=st.data())
def test_each_operation(node: Node, operation: str, reduction: str, data: st.DataObject) -> None:
    """Each operation is right in each dtype and size over all GPUs, with a different root for each case."""
    from mgpu_check.oracles.collectives.repeated_calls import RepeatedCollective

    usable = [dtype for dtype in DTYPES if reduction != "avg" or "float" in dtype]
    chosen: Sequence[str] = usable
    place_of_operation = OPERATIONS.index((operation, reduction))
    if node.depth == "quick" and (operation, reduction) != ("all_reduce", "sum"):
        # The only example of a quick run is the simplest one, so rotate the dtypes to cover others in each operation.
        start = place_of_operation * 2 % len(usable)
        chosen = data.draw(st.permutations([*usable[start:], *usable[:start]]), label="dtypes")[:2]
    seed, root = data.draw(st.integers(0, 2**30), label="seed"), data.draw(st.integers(0, 63), label="root")
    around = st.integers(-100, 100)
    cases: list[RepeatedCollective] = []
    for index, dtype in enumerate(chosen):
        borders = [border for border in _BORDERS[node.depth] if fits(node, border)]
        for border in borders[index % 2 :: 2] if node.depth == "quick" else borders:
            size = border + data.draw(around, label="bytes around the border")
            turned = (root + place_of_operation + len(cases)) % len(node.numbers)
            cases.append(RepeatedCollective(operation, dtype, size, (), reduction, turned, 3, seed=seed + index))
    if operation in ("all_reduce", "all_to_all") and reduction == "sum" and fits(node, _LARGEST[node.depth]):
        cases.append(RepeatedCollective(operation, "float32", _LARGEST[node.depth], iterations=5, seed=seed))
    look(node, cases)


@drawn(quick=1, standard=2, long=10)
@given(seed=st.integers(0, 2**30), delta=st.integers(-50, 50))
def test_pairs_and_halves(node: Node, seed: int, delta: int) -> None:
    """Collectives are right over pairs, threes, halves, and every second GPU: three of them over all pairs, or as many
    as the level has time for, and each operation over groups that have every GPU."""
    from mgpu_check.oracles.collectives.repeated_calls import RepeatedCollective

    cases: list[RepeatedCollective] = []
    for members in groups(node):
        # A GPU that receives wrong data is right as a root, so each of a pair is the root once.
        roots = range(len(members)) if len(members) == 2 else [len(cases) % len(members)]
        for operation, root in (("all_reduce", 0), ("all_gather", 0), *(("broadcast", root) for root in roots)):
            size, number = (64 << 10) + delta, seed + len(cases)
            case = RepeatedCollective(operation, "float32", size, members, root=root, iterations=3, seed=number)
            cases.append(case)
    for turn, (operation, reduction) in enumerate(OPERATIONS):
        dtype = DTYPES[turn % 2]  # which each reduction has
        for members in covering_groups(len(node.numbers), turn % 2):  # few: NCCL takes long to connect a group
            for root in roots_of(operation, len(members)):
                size, number = (4 << 10) + delta, seed + len(cases)
                cases.append(RepeatedCollective(operation, dtype, size, members, reduction, root, seed=number))
    look(node, cases)


def roots_of(operation: str, count: int) -> range:
    """Return roots in a group of `count` ranks, so that each rank gets a result once: as the root, or from it."""
    row = TRANSFERS.get(operation)
    return range(1 if row is None or not row.root else count if row.takers == "root" else 2)


def covering_groups(count: int, turn: int) -> list[tuple[int, ...]]:
    """Return groups of two, of three and of half of the ranks, with each rank in at least one of each size. `turn`
    rotates them."""
    sizes = sorted(size for size in {2, 3, count // 2} if 1 < size < count)
    return [
        tuple(sorted((start + turn + place) % count for place in range(size)))
        for size in sizes
        for start in range(0, count, size)
    ]


def groups(node: Node) -> list[tuple[int, ...]]:
    """Return groups of ranks: the halves, every second rank, and pairs, those of different hosts first."""
    count = len(node.numbers)
    hosts = [node.gpus[number].host for number in node.numbers]
    pairs = sorted(itertools.combinations(range(count), 2), key=lambda pair: hosts[pair[0]] == hosts[pair[1]])
    candidates = {tuple(range(count // 2)), tuple(range(count // 2, count)), tuple(range(0, count, 2))}
    larger = sorted(members for members in candidates if 2 < len(members) < count)
    return [*larger, *(pairs[: _MOST_PAIRS[active().depth]] if count > 2 else [])]


@drawn(quick=1, standard=1, long=4)
@given(seed=st.integers(0, 2**30), burst=st.sampled_from((1, 4)))
def test_many_iterations(node: Node, seed: int, burst: int) -> None:
    """Collectives of each size class are right in every one of many iterations, above all an all_reduce of exactly
    1 MiB, where protocols change."""
    from mgpu_check.oracles.collectives.repeated_calls import RepeatedCollective

    times = (_MANY_SIMULATED if node.simulated else _MANY)[node.depth]
    look(node, [RepeatedCollective("all_reduce", "float32", 1 << 20, iterations=times, burst=burst, seed=seed)])
    if node.simulated and node.depth == "quick":
        return
    for operation in MEASURED:
        sizes = (4 << 10, 64 << 10, 1 << 20)
        look(node, [RepeatedCollective(operation, "float32", n, (), "sum", 0, times // 4, burst, seed) for n in sizes])


def test_speed_of_collectives(node: Node) -> None:
    """Measure bandwidth and latency of each collective over all GPUs and over pairs; the check of performance judges
    them."""
    from mgpu_check.acceptance.collectives.checks import LATENCY_BYTES, measure_collectives
    from mgpu_check.oracles.collectives.repeated_calls import Cases, RepeatedCollective

    numbers = node.numbers
    # Simulated time has no noise, so few repeats are enough.
    repeats, inner = (3, 1) if node.simulated else (_MEASURED[node.depth], 4)
    if len(numbers) < 2:
        return
    sizes = [size for size in (LATENCY_BYTES, 1 << 20, _LARGEST[node.depth]) if fits(node, size)]
    cases = [
        RepeatedCollective(operation, "float32", size, pair, root=root, iterations=inner)
        for operation in TRANSFERS
        for size in (sizes[0], sizes[-1])
        for pair in itertools.chain(*tournament_rounds(len(numbers))[: _MOST_ROUNDS[node.depth]])
        for root in range(2 if TRANSFERS[operation].root else 1)
    ]
    if len(numbers) > 2:
        every = itertools.product(MEASURED, sizes)
        cases += [RepeatedCollective(operation, "float32", size, iterations=inner) for operation, size in every]
    node.on_ranks("collectives", measure_collectives, Cases(tuple(cases)), repeats)


def test_collectives_do_not_stall(node: Node) -> None:
    """Measure the second longest of many all_reduces, over all GPUs and over pairs; performance judges it."""
    from mgpu_check.acceptance.collectives.checks import measure_collectives
    from mgpu_check.oracles.collectives.repeated_calls import Cases, RepeatedCollective

    count, size = (_LAPS_SIMULATED, 1 << 10) if node.simulated else (_LAPS, 4 << 20)
    rounds = tournament_rounds(len(node.numbers))[: _MOST_ROUNDS[node.depth]]
    groups = [*itertools.chain(*rounds), *([()] if len(node.numbers) > 2 else [])]
    cases = Cases(tuple(RepeatedCollective("all_reduce", "float32", size, members) for members in groups))
    if groups:
        node.on_ranks("collectives", measure_collectives, cases, count[node.depth], True)


def tournament_rounds(count: int) -> list[list[tuple[int, int]]]:
    """Divide the pairs of `count` ranks into rounds, as of a tournament: a round has each rank in one pair at most."""
    ring = [*range(count), -1][: count + count % 2]
    rounds = []
    for _ in ring[1:]:
        pairs = zip(ring, ring[::-1], strict=True)
        rounds.append([(min(pair), max(pair)) for pair in itertools.islice(pairs, len(ring) // 2) if min(pair) >= 0])
        ring = [ring[0], ring[-1], *ring[1:-1]]
    return rounds
