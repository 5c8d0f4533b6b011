"""Check that copies between GPUs, and between GPUs and host, arrive unchanged and write nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_check.acceptance.node import Node, drawn
from mgpu_check.engine.rank_side.rank import NamedFunction
from mgpu_check.oracles.devices.cases import Copies, Laps, Path
from mgpu_check.settings import active

_PATHS: tuple[Path, ...] = ("engine", "casting")
_BETWEEN_GPUS, _WITH_HOST = (
    NamedFunction(f"mgpu_check.oracles.devices.copies:{name}") for name in ("examine_copies", "examine_host_copies")
)
PATHS = ("engine", "strided", "casting")

_SMALL = st.one_of(st.integers(37, 5000), st.integers(1, 36))
_LARGEST = {"quick": 64 << 20, "standard": 256 << 20, "long": 2 << 30}
_MEASURED = {"quick": (32 << 20, 5), "standard": (128 << 20, 15), "long": (256 << 20, 51)}
"""Bytes of the copies that are measured, and how often, at each level."""
_LAPS = {"quick": 400, "standard": 3200, "long": 25_600}
_LAPS_SIMULATED = {"quick": 120, "standard": 1600, "long": 6400}

_REACHES = (2 << 30, 4 << 30)  # offsets in memory that need 32 and 33 bits

_MANY = {
    "quick": ((4 << 10, 320),),
    "standard": ((4 << 10, 3200), (64 << 10, 1600), (1 << 20, 320)),
    "long": ((4 << 10, 32_000), (64 << 10, 16_000), (1 << 20, 3200)),
}
"""Bytes and number of the copies of each size class. n copies on a link miss a fault of one in n/3 with a probability
of 5 %: 320 find one in 100."""
_MANY_SIMULATED = {
    "quick": ((1 << 10, 80),),
    "standard": ((1 << 10, 800), (64 << 10, 64)),
    "long": ((1 << 10, 3200), (64 << 10, 64)),
}


@st.composite
def sizes(draw: st.DrawFn) -> tuple[int, ...]:
    """Draw sizes in bytes: a small one, some around limits where implementations change, and a large one."""
    level = active().depth
    around = st.integers(-70, 70)
    borders = [64 << 10, 2 << 20] if level == "quick" else [4 << 10, 64 << 10, 1 << 20, 2 << 20, 16 << 20]
    # Above the border, so that a fault that starts there shows.
    drawn_sizes = [draw(_SMALL), *(border + abs(draw(around)) + 1 for border in borders)]
    if level != "quick":
        drawn_sizes += [border - abs(draw(around)) for border in borders]
    if level != "quick" or not active().simulate:
        drawn_sizes.append(_LARGEST[level] + draw(around))
    return tuple(drawn_sizes)


ALIGNMENTS = st.one_of(st.sampled_from((0, 1, 2, 4, 8, 16, 128)), st.integers(0, 255))


@pytest.mark.parametrize("path", PATHS)
@drawn(quick=1, standard=6, long=40)
@given(sizes=sizes(), source=ALIGNMENTS, destination=ALIGNMENTS, seed=st.integers(0, 2**30))
def test_copies_between_gpus(
    node: Node, path: Path, sizes: tuple[int, ...], source: int, destination: int, seed: int
) -> None:
    """Copies of each ordered pair arrive unchanged, one pair after the other and all pairs at once."""
    # The only example of a quick run has zero offsets, so the second call uses other alignments.
    node.in_node_process("links", _BETWEEN_GPUS, Copies(path, sizes, source, destination, seed=seed))
    together = Copies(path, sizes, source ^ 5, destination ^ 9, together=True, seed=seed + 1)
    node.in_node_process("links", _BETWEEN_GPUS, together)


@pytest.mark.parametrize("pinned", [True, False], ids=["pinned", "pageable"])
@drawn(quick=1, standard=8, long=60)
@given(
    sizes=sizes(), source=ALIGNMENTS, destination=ALIGNMENTS, path=st.sampled_from(PATHS), seed=st.integers(0, 2**30)
)
def test_copies_from_and_to_the_host(
    node: Node, pinned: bool, sizes: tuple[int, ...], source: int, destination: int, path: Path, seed: int
) -> None:
    """Copies to each GPU and back arrive unchanged, one GPU after the other and all GPUs at once."""
    alone = Copies(path, sizes, source, destination, pinned=pinned, seed=seed)
    node.in_node_process("links", _WITH_HOST, alone)
    together = Copies(path, sizes, source ^ 5, destination ^ 9, together=True, pinned=pinned, seed=seed + 1)
    node.in_node_process("links", _WITH_HOST, together)


@pytest.mark.glance(only=True)
@drawn(quick=1, standard=1, long=1)
@given(seed=st.integers(0, 2**30), destination=ALIGNMENTS)
def test_each_link_once(node: Node, seed: int, destination: int) -> None:
    """A few copies in each direction arrive: between GPUs by both paths, from and to pinned memory of the host."""
    size = (64 << 10 if node.simulated else 2 << 20) + 1
    for path in _PATHS:
        node.in_node_process("links", _BETWEEN_GPUS, Copies(path, (37, size), 0, destination, pieces=4, seed=seed))
    node.in_node_process("links", _WITH_HOST, Copies("engine", (37, size), 0, destination, pieces=4, seed=seed))


@drawn(quick=1, standard=1, long=1)
@given(seed=st.integers(0, 2**30))
def test_many_copies(node: Node, seed: int) -> None:
    """Each of many copies of each size class arrives, between GPUs and from and to the host: faults may be rare."""
    for path in _PATHS:
        for size, pieces in (_MANY_SIMULATED if node.simulated else _MANY)[node.depth]:
            case = Copies(path, (size * pieces,), pieces=pieces, seed=seed)
            for examine in (_BETWEEN_GPUS, _WITH_HOST):
                node.in_node_process("links", examine, case)


def reaches(node: Node) -> list[int]:
    """Return the offsets that fit into a quarter of each GPU's memory, or else the largest power of two."""
    most = min(node.gpus[number].memory for number in node.numbers) // 4
    return [reach for reach in _REACHES if reach <= most] or [1 << max(1, most).bit_length() - 1]


@drawn(quick=1, standard=4, long=16)
@given(
    size=st.integers((64 << 10) + 1, 128 << 10),
    source=ALIGNMENTS,
    destination=ALIGNMENTS,
    seed=st.integers(0, 2**30),
)
def test_copies_at_far_addresses(node: Node, size: int, source: int, destination: int, seed: int) -> None:
    """Copies from and to places gigabytes into an allocation arrive there, and change nothing at its start."""
    for reach in reaches(node):
        case = Copies("engine", (size,), source, destination, pinned=False, reach=reach, seed=seed)
        node.in_node_process("links", _WITH_HOST, case)
        for path in _PATHS:
            node.in_node_process("links", _BETWEEN_GPUS, replace(case, path=path))


def test_speed_of_copies(node: Node) -> None:
    """Measure bandwidth and latency of each copy direction; the check of performance judges them."""
    size, repeats = _MEASURED[node.depth]
    laps = Laps(_LAPS_SIMULATED[node.depth], 1 << 10) if node.simulated else Laps(_LAPS[node.depth], 4 << 20)
    measure = NamedFunction("mgpu_check.acceptance.links.speed:measure_copies")
    node.in_node_process("links", measure, size, repeats, laps)
