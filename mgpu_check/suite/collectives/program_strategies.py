"""Draw collective programs; list shapes of meshes."""

from __future__ import annotations

import math

from hypothesis import strategies as st

from mgpu_check.suite.collectives.program_cases import BUFFERS, GROUPS, OF_GROUPS, STEPS, CollectiveStep


class _Machine:
    """Draws a program step by step, and tracks the existing groups."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        self._alive: list[int] = []
        self.steps: list[CollectiveStep] = []

    def take(self, kind: str) -> None:
        """Add a step of this kind, or the steps of a phrase.

        With no group to destroy, create one instead; with too many groups, destroy one instead.
        """
        if kind in _PHRASES:
            _PHRASES[kind](self)
        elif kind not in OF_GROUPS:
            self._move(kind)
        elif (kind == "new_group" and len(self._alive) < GROUPS) or not self._alive:
            self._new_group()
        else:
            self._destroy_group()

    def _move(
        self,
        kind: str,
        *,
        target: int | None = None,
        source: int | None = None,
        group: int | None = None,
        asynchronous: bool | None = None,
    ) -> CollectiveStep:
        """Add a step that moves data; draw the arguments that are not given."""
        if target is None:
            target = self._draw(st.integers(0, BUFFERS - 1))
        if source is None:
            source = (target + self._draw(st.integers(1, BUFFERS - 1))) % BUFFERS
        if asynchronous is None:
            asynchronous = self._draw(st.booleans())
        if group is None:
            group = self._draw(st.sampled_from((0, *self._alive)))
        op = self._draw(st.sampled_from(("SUM", "MIN", "MAX")))
        step = CollectiveStep(kind, target, source, self._draw(st.integers(0, 63)), op, asynchronous, group)
        self.steps.append(step)
        return step

    def _new_group(self) -> int:
        """Create a group, with at least two ranks if the world has two."""
        group: int = min({*range(1, GROUPS + 1)} - {*self._alive})
        first = self._draw(st.integers(0, 62))
        others = self._draw(st.lists(st.integers(0, 63), max_size=6, unique=True))
        self._alive.append(group)
        members = dict.fromkeys((first, first + 1, *others))
        self.steps.append(CollectiveStep("new_group", group=group, members=tuple(members)))
        return group

    def _destroy_group(self) -> None:
        group = self._alive.pop(self._draw(st.integers(0, len(self._alive) - 1)))
        self.steps.append(CollectiveStep("destroy_group", group=group))

    def _overlap(self) -> None:
        """Start two collectives in different groups before waiting for either."""
        if not self._alive:
            self._new_group()
        one, other, *sources = self._draw(st.permutations(range(BUFFERS)))
        groups = self._draw(st.permutations((0, *self._alive)))
        for target, source, group in zip((one, other), sources, groups, strict=False):
            kind = self._draw(st.sampled_from(_LATE))
            self._move(kind, target=target, source=source, group=group, asynchronous=True)

    def _renew(self) -> None:
        """Destroy a group, then create and use a new one."""
        if not self._alive:
            self._new_group()
        self._destroy_group()
        self._move("all_reduce", group=self._new_group())

    def _repeat(self) -> None:
        """Take each kind of step twice, the second time with different data in the same tensors."""
        for kind in self._draw(st.permutations(_LATE)):
            step = self._move(kind)
            for changed in (step.source, step.target):
                self._move("add", target=changed, group=0)
            self._move(kind, target=step.target, source=step.source, group=step.group)


_LATE = tuple(kind for kind in STEPS if kind not in ("add", "shift"))
"""Kinds of steps that can be asynchronous."""
_PHRASES = {"overlap": _Machine._overlap, "renew": _Machine._renew, "repeat": _Machine._repeat}


@st.composite
def programs(draw: st.DrawFn) -> list[CollectiveStep]:
    """Draw programs of some 30 to 60 steps: every kind of step and every phrase in random order, then some more."""
    machine = _Machine(draw)
    all_kinds = (*STEPS, *_PHRASES)
    for kind in (
        *draw(st.permutations(all_kinds)),
        *draw(st.lists(st.sampled_from((*all_kinds, *OF_GROUPS)), max_size=8)),
    ):
        machine.take(kind)
    return machine.steps


def mesh_shapes(size: int) -> list[tuple[int, ...]]:
    """Return all mesh shapes for `size` ranks with one to three dimensions above 1, and ``(1, size)``."""
    found: list[tuple[int, ...]] = [(size,), (1, size)]
    for first in range(2, size):
        if size % first == 0:
            found.append((first, size // first))
            rest = size // first
            found += [(first, second, rest // second) for second in range(2, rest) if rest % second == 0]
    return [shape for shape in found if math.prod(shape) == size]
