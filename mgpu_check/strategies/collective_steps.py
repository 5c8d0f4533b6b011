"""Strategies of messages, of programs of collectives, and of the shapes of meshes."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from mgpu_check.specs.collective_calls import COPIED, REDUCED
from mgpu_check.specs.collective_steps import BUFFERS, STEPS, CollectiveStep
from mgpu_check.specs.messages import Message

__all__ = ["mesh_shapes", "messages", "programs"]


@st.composite
def programs(draw: st.DrawFn, most: int = 24) -> list[CollectiveStep]:
    """Draw programs; each begins with one step of every kind, in a drawn order."""
    number = st.integers(0, BUFFERS - 1)
    steps = []
    for kind in [
        *draw(st.permutations(STEPS)),
        *draw(st.lists(st.sampled_from(STEPS), min_size=8, max_size=most - len(STEPS))),
    ]:
        target = draw(number)
        source = (target + draw(st.integers(1, BUFFERS - 1))) % BUFFERS
        op = draw(st.sampled_from(("SUM", "MIN", "MAX")))
        steps.append(CollectiveStep(kind, target, source, draw(st.integers(0, 63)), op, draw(st.booleans())))
    return steps


def messages(size: int, seed: int, place: str, *, tags: bool = True, alike: bool = False) -> list[Message]:
    """Return messages between all pairs of ranks: two each way, of any dtype, of no elements to above 64 Ki.

    Where they are `alike`, both have one dtype and size, so that only their tags tell them apart.
    """
    found: list[Message] = []
    dtypes = COPIED if place == "device" else REDUCED
    sizes = (1, 0, 4097, 33, 65537, 7)
    for source in range(size):
        for target in range(size):
            if source == target:
                continue
            for turn in range(2):
                number = len(found) + 2 * seed
                tag = (number * 7 + turn) % 5 if tags else 0
                kind = number // 2 + seed if alike else number
                dtype, elements = dtypes[kind * 5 % len(dtypes)], sizes[kind % len(sizes)]
                found.append(Message(source, target, tag, dtype, elements, number))
    return found


def mesh_shapes(size: int) -> list[tuple[int, ...]]:
    """Return every shape of one to three dimensions above 1 that has `size` ranks, and one with a dimension of 1."""
    found: list[tuple[int, ...]] = [(size,), (1, size)]
    for first in range(2, size):
        if size % first == 0:
            found.append((first, size // first))
            rest = size // first
            found += [(first, second, rest // second) for second in range(2, rest) if rest % second == 0]
    return [shape for shape in found if math.prod(shape) == size]
