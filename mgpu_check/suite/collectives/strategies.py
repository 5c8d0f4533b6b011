"""Lists of collective calls, by seed; strategies of worlds and groups for them, and of programs."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from mgpu_check import settings
from mgpu_check.oracles.collectives.cases import (
    BUFFERS,
    COALESCED,
    COPIED,
    COPYING,
    FLOATING,
    FUNCTIONS,
    GROUPS,
    OF_GROUPS,
    OPERATIONS,
    REDUCED,
    REDUCING,
    ROOTED,
    STEPS,
    CollectiveCall,
    CollectiveStep,
    Message,
    left_out,
)
from mgpu_check.oracles.pairs import in_pairs, some_rows
from mgpu_check.oracles.strategies import first_of, world_sizes
from mgpu_check.oracles.strategies import seeds as tensor_seeds
from mgpu_check.torch_hooks.collective_table import TRANSFERS

PLACES = ("device", "cpu")
LARGE = {
    "all_reduce": "float32",
    "broadcast": "float32",
    "all_gather_into_tensor": "int8",
    "reduce_scatter_tensor": "float16",
    "all_gather": "int8",
    "all_to_all": "int8",
    "all_to_all_single": "int8",
    "gather": "int8",
    "reduce": "float16",
    "scatter": "int8",
}
"""Dtypes of the calls with more than 1 Mi elements, chosen so that each rank's part has 1 to 4 MiB.

A run has every second of them, by the seed.
"""
_FUNCTIONS = (*REDUCING, *COPYING)
_IN_A_ROW = 3
_SPECIAL = (*FLOATING, "complex64", "complex128")


@st.composite
def worlds(draw: st.DrawFn, least: int = 1) -> int:
    """Draw world sizes, the whole world first, so that the first example finds errors of large worlds.
    One rank alone, which exchanges nothing, is rare: at the level quick it would be the only example of a check."""
    total = settings.active().gpus or 0
    two = max(least, min(2, total))
    return draw(world_sizes(draw(first_of((*[max(least, total)] * 3, *[two] * 4, least)))))


seeds = tensor_seeds()
members = st.integers(0, 62)  # a rank of the world, modulo its size


OBJECTS = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text("aé✓"), st.binary()),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(st.sampled_from("ab"), inner),
    max_leaves=8,
)
"""Python objects that equal their copies."""


@st.composite
def messages(draw: st.DrawFn) -> list[Message]:
    """Draw messages between any ranks, of any dtype, with up to 9 elements or about 4,096 or 64 Ki."""
    elements = st.integers(0, 9) | st.sampled_from((4097, 65537))
    drawn = st.tuples(members, members, st.integers(0, 4), st.sampled_from(COPIED), elements)
    return [Message(*fields, number) for number, fields in enumerate(draw(st.lists(drawn, min_size=1, max_size=12)))]


def _right(calls: Iterable[CollectiveCall]) -> list[CollectiveCall]:
    return [call for call in calls if not left_out(call)]


def _reductions(functions: Sequence[str], places: Sequence[str], values: str, seed: int) -> list[CollectiveCall]:
    combinations = itertools.product(functions, places, REDUCED, OPERATIONS)
    return _right(
        CollectiveCall(function, dtype, op=op, values=values, place=placement, root=seed + number + 1, seed=seed)
        for number, (function, placement, dtype, op) in enumerate(combinations)
    )


def all_reduces(seed: int) -> list[CollectiveCall]:
    """Return an all_reduce for every dtype and operation, on devices and the CPU."""
    return _reductions(("all_reduce",), PLACES, "borders", seed)


def other_reductions(seed: int) -> list[CollectiveCall]:
    """Return `reduce` and `reduce_scatter_tensor` for every dtype and operation on devices.
    Also a third, by seed, of `reduce_scatter` with lists on devices, and a fifth of all three functions on the CPU."""
    turns = ("reduce_scatter", "reduce_scatter_tensor", "reduce")
    return [
        *_reductions(("reduce", "reduce_scatter_tensor"), ("device",), "borders", seed),
        *_reductions(("reduce_scatter",), ("device",), "borders", seed)[seed % 3 :: 3],
        *(
            call
            for turn, function in enumerate(turns)
            for call in _reductions((function,), ("cpu",), "borders", seed)[(seed + turn) % 5 :: 5]
        ),
    ]


def special(seed: int) -> list[CollectiveCall]:
    """Return reductions of NaN, infinities, zeros and subnormals for each floating-point dtype and operation."""
    return [
        call
        for number, call in enumerate(_reductions(REDUCING, PLACES, "special", seed))
        if call.dtype in _SPECIAL and (call.function == "all_reduce" or (number + seed) % 8 == 0)
    ]


def rounding(seed: int) -> list[CollectiveCall]:
    return _right(
        CollectiveCall(function, dtype, 997, op=op, values="random", place=placement, root=seed, seed=seed)
        for function in REDUCING
        for placement in PLACES
        for dtype in _SPECIAL
        for op in ("SUM", "AVG", "PRODUCT")
        if function == "all_reduce" or (op == "SUM" and placement == "device")
    )


def copies(seed: int) -> list[CollectiveCall]:
    """Return every copying collective for every dtype on devices, and for half of the dtypes on the CPU."""
    return _right(
        CollectiveCall(function, dtype, place=placement, values="bits", root=seed + number, seed=seed)
        for function in COPYING
        for placement in PLACES
        for number, dtype in enumerate(COPIED)
        if placement == "device" or (number + seed) % 2 == 0
    )


def _drawn(
    function: str,
    number: int,
    seed: int,
    *,
    placement: str | None = None,
    dtype: str | None = None,
    op: str | None = None,
    **attributes: Any,
) -> CollectiveCall:
    """Return a call; derive what is not given from a number. The dtype is the next one that the backend supports."""
    turn = number + seed
    placement = placement or PLACES[turn % 2]
    if function in REDUCING:
        dtypes = REDUCED if placement == "device" else tuple(dtype for dtype in REDUCED if dtype != "bool")
        op = op or ("SUM", "MAX", "MIN", "PRODUCT", "SUM")[turn // 3 % 5]
    else:
        dtypes = COPIED if placement == "device" else REDUCED[:-2]
        op = "SUM"
    offset = turn * 5 % len(dtypes)
    values = "exact" if function in REDUCING else "bits"
    attributes |= {"values": values, "place": placement, "root": turn, "seed": turn}
    for name in [dtype] if dtype else [*dtypes[offset:], *dtypes[:offset]]:
        call = CollectiveCall(function, name, op=op, **attributes)
        if left_out(call):
            call = replace(call, op="SUM")
        if not left_out(call):
            break
    return call


def sizes(seed: int) -> list[CollectiveCall]:
    """Return calls with no elements, with few, and with about 4,096, 64 Ki and 1 Mi elements."""
    calls = []
    for number, function in enumerate(_FUNCTIONS):
        for elements in (0, 1, 3, 63 + 2 * (seed % 30)):
            calls.append(_drawn(function, number + elements, seed, elements=elements))
        borders = [((1 << 12) + 1, "float32"), ((1 << 16) + 1, "float32")]
        if function in LARGE:
            borders.append(((1 << 20) + 1, LARGE[function]))
        for elements, dtype in borders:
            calls.append(_drawn(function, number, seed, elements=elements, dtype=dtype, placement="device"))
        calls.append(
            _drawn(function, number, seed, elements=(1 << (12, 16)[(number + seed) % 2]) - 1 + (number + seed) // 2 % 2)
        )
    for number, dtype in enumerate((*FLOATING, "int64", "uint8")):
        calls.append(_drawn("all_reduce", number, seed, elements=(1 << 16) + 1, dtype=dtype, placement="device"))
    return calls


def layouts(seed: int) -> list[CollectiveCall]:
    """Return calls on views, of several dimensions, in place, and with parts of different sizes; half asynchronous."""
    calls = []
    for number, function in enumerate(_FUNCTIONS):
        for turn, layout in enumerate(_shapes(function)):
            dtype = FLOATING[(turn + seed) % 4] if layout == "channels_last" else None
            for placement in PLACES if layout in ("in place", "stacked", "uneven", "matrix") else PLACES[:1]:
                which = number + turn + (placement == "cpu")
                attributes: dict[str, Any] = {"dtype": dtype, "placement": placement, "layout": layout, "elements": 24}
                calls.append(_drawn(function, which, seed, asynchronous=bool((which + seed) % 2), **attributes))
        calls.append(_drawn(function, number, seed, elements=1, layout="scalar"))
        for placement in PLACES if FUNCTIONS[function].does == "all_to_all" else ():
            calls.append(_drawn(function, number, seed, elements=0, layout="uneven", placement=placement))
    return _right(calls)


_VIEWS = ("matrix", "channels_last", "transposed", "gaps")


def _shapes(function: str) -> tuple[str, ...]:
    row = FUNCTIONS[function]
    transfer = TRANSFERS[row.does]
    exchanges = transfer.divides and transfer.joins
    lists = row.lists and not transfer.root
    shapes: tuple[str, ...] = ("uneven", "uneven") if exchanges or lists else ()
    if row.lists or row.in_place:
        return (*shapes, *_VIEWS)
    if exchanges:
        return shapes
    return ("in place", "stacked") if transfer.joins else ("in place",)  # gloo refuses to divide a stacked tensor


_OPTIONS: Mapping[str, Sequence[Any]] = {
    "function": _FUNCTIONS,
    "dtype": COPIED,
    "op": (None, *OPERATIONS),
    "place": PLACES,
    "layout": ("dense", "scalar", "in place", "stacked", "uneven", *_VIEWS),
    "elements": (24, 0, 1, 4100, 65540),
    "root": (None, "first, global", "first, group", "last, global", "last, group"),
    "coalesced": (False, True),
    "asynchronous": (False, True),
    "group": ("world", "without the first", "without the last"),
}
"""Options of a collective call. Only reductions have an `op`, and only transfers with one giver or taker a `root`."""

_FITS: Mapping[str, Callable[[CollectiveCall, Any], bool]] = {
    "op": lambda call, op: call.op == op if call.function in REDUCING else op is None,
    "elements": lambda call, count: count == 1 if call.layout == "scalar" else count > 1 or call.layout not in _VIEWS,
    "root": lambda call, root: (call.function in ROOTED) == (root is not None),
    "coalesced": lambda call, coalesced: not coalesced or (
        (call.place, call.layout) == ("device", "dense") and call.function in COALESCED
    ),
    "asynchronous": lambda call, asynchronous: True,
    "group": lambda call, group: True,
}  # fmt: skip
"""Tests whether a call may have the value of an option. The other options are attributes of the call."""


@functools.cache
def option_rows() -> list[dict[str, Any]]:
    """Return rows of `_OPTIONS` that together have each pair of values that occurs in a call."""
    calls = _right(
        CollectiveCall(function, dtype, op=op, place=placement, layout=layout)
        for function in _FUNCTIONS
        for op in (OPERATIONS if function in REDUCING else ("SUM",))
        for layout in dict.fromkeys(("dense", "scalar", *_shapes(function)))
        for placement in (PLACES if layout not in _VIEWS[1:] else PLACES[:1])
        for dtype in COPIED
    )
    # For each value, the calls that may have it, as the bits of a number.
    fits = {name: _FITS.get(name, lambda call, value, name=name: getattr(call, name) == value) for name in _OPTIONS}
    having = {
        (name, value): int("".join("01"[fits[name](call, value)] for call in calls), 2)
        for name, values in _OPTIONS.items()
        for value in values
    }
    return in_pairs(_OPTIONS, lambda row: functools.reduce(int.__and__, map(having.__getitem__, row.items()), -1) != 0)


def options(size: int, seed: int, *, complete: bool) -> list[CollectiveCall]:
    """Return calls that together have each pair of options; if not `complete`, an eighth of them by the seed, and a few
    more, so that each option has each of its values."""
    groups = {"world": (), "without the first": tuple(range(1, size)), "without the last": tuple(range(size - 1))}
    rows = option_rows()
    calls = []
    for number, row in enumerate(map(dict, rows if complete else some_rows(rows, seed, 8))):
        end, _, by = (row.pop("root") or "first, global").partition(", ")
        members, op = groups[row.pop("group")], row.pop("op")
        root = 0 if end == "first" else (len(members) or size) - 1
        row |= {"op": op or "SUM", "values": "exact" if op else "bits", "members": members}
        calls.append(CollectiveCall(**row, root=root, root_by=by, seed=seed + number))
    return calls


def asynchronous(seed: int) -> list[CollectiveCall]:
    """Return every collective as an asynchronous call, with few, more than 4,096 and more than 64 Ki elements.

    The largest calls are only on devices, the others also on the CPU. Each reduction occurs as a sum at least once. The
    small calls of a function come three times in a row on each place, and are all under way at once.
    """
    calls = []
    rows = ((37, PLACES, _IN_A_ROW), (5003, PLACES, 1), ((1 << 16) + 1, PLACES[:1], 1))
    for turn, (elements, places, times) in enumerate(rows):
        for number, function in enumerate(_FUNCTIONS):
            op = "SUM" if turn == 0 else None
            for repeat, placement in itertools.product(range(times), places):
                attributes: dict[str, Any] = {"elements": elements, "placement": placement, "asynchronous": True}
                calls.append(_drawn(function, number + turn + repeat, seed, op=op, **attributes))
    return calls


@st.composite
def partitions(draw: st.DrawFn, size: int) -> list[tuple[int, ...]]:
    """Draw groups: a random partition of the ranks, and three groups that overlap it, two of them without one rank."""
    order = draw(st.permutations(range(size)))
    cuts = sorted({0, size, *draw(st.lists(st.integers(1, max(1, size - 1)), max_size=3))})
    groups = [tuple(sorted(order[start:end])) for start, end in itertools.pairwise(cuts)]
    groups += [tuple(sorted(order[:-1])), tuple(sorted(order[1:])), tuple(sorted(order[:2]))]
    return sorted({group for group in groups if group})


def in_groups(groups: Sequence[tuple[int, ...]], seed: int) -> list[CollectiveCall]:
    """Return every collective in each group, with roots named by their rank in the group and in the world.
    Half of the reductions are means, whose divisor must be the size of the group."""
    calls = []
    for turn, members in enumerate(groups):
        for number, function in enumerate(_FUNCTIONS):
            odd = (turn + number + seed) % 2
            mean = bool(odd) and function in REDUCING
            if odd and not mean and function not in ROOTED:
                continue
            attributes: dict[str, Any] = {"elements": 41, "members": members, "root_by": ("global", "group")[odd]}
            attributes["placement"] = PLACES[(turn // 2 + number) % 2]
            attributes["op"] = "AVG" if mean else None if turn % 3 == 2 else "SUM"
            attributes["dtype"] = FLOATING[(turn + number + seed) // 2 % 4] if mean else None
            calls.append(_drawn(function, number + turn, seed, **attributes))
    return calls


class _Machine:
    """Draws a program step by step, and tracks the existing groups."""

    def __init__(self, draw: st.DrawFn) -> None:
        self._draw = draw
        self._alive: list[int] = []
        self.steps: list[CollectiveStep] = []

    def take(self, operation: str) -> None:
        """Add a step of this kind, or the steps of a phrase.
        With no group to destroy, create one instead; with too many groups, destroy one instead."""
        if operation in _PHRASES:
            _PHRASES[operation](self)
        elif operation not in OF_GROUPS:
            self._move(operation)
        elif (operation == "new_group" and len(self._alive) < GROUPS) or not self._alive:
            self._new_group()
        else:
            self._destroy_group()

    def _move(
        self,
        operation: str,
        *,
        target: int | None = None,
        source: int | None = None,
        group: int | None = None,
        asynchronous: bool | None = None,
    ) -> CollectiveStep:
        if target is None:
            target = self._draw(st.integers(0, BUFFERS - 1))
        if source is None:
            source = (target + self._draw(st.integers(1, BUFFERS - 1))) % BUFFERS
        if asynchronous is None:
            asynchronous = self._draw(st.booleans())
        if group is None:
            group = self._draw(st.sampled_from((0, *self._alive)))
        op = self._draw(st.sampled_from(("SUM", "MIN", "MAX")))
        step = CollectiveStep(operation, target, source, self._draw(st.integers(0, 63)), op, asynchronous, group)
        self.steps.append(step)
        return step

    def _new_group(self) -> int:
        group: int = min({*range(1, GROUPS + 1)} - {*self._alive})
        member = self._draw(st.integers(0, 62))
        others = self._draw(st.lists(st.integers(0, 63), max_size=6, unique=True))
        self._alive.append(group)
        members = dict.fromkeys((member, member + 1, *others))
        self.steps.append(CollectiveStep("new_group", group=group, members=tuple(members)))
        return group

    def _destroy_group(self) -> None:
        group = self._alive.pop(self._draw(st.integers(0, len(self._alive) - 1)))
        self.steps.append(CollectiveStep("destroy_group", group=group))

    def _overlap(self) -> None:
        """Start two collectives in different groups before waiting for either."""
        if not self._alive:
            self._new_group()
        first_target, second_target, *sources = self._draw(st.permutations(range(BUFFERS)))
        groups = self._draw(st.permutations((0, *self._alive)))
        for target, source, group in zip((first_target, second_target), sources, groups, strict=False):
            self._move(self._draw(st.sampled_from(_LATE)), target=target, source=source, group=group, asynchronous=True)

    def _renew(self) -> None:
        if not self._alive:
            self._new_group()
        self._destroy_group()
        self._move("all_reduce", group=self._new_group())

    def _repeat(self) -> None:
        """Take each kind of step twice, the second time with different data in the same tensors."""
        for operation in self._draw(st.permutations(_LATE)):
            step = self._move(operation)
            for changed in (step.source, step.target):
                self._move("add", target=changed, group=0)
            self._move(operation, target=step.target, source=step.source, group=step.group)


_LATE = tuple(operation for operation in STEPS if operation not in ("add", "shift"))
"""Kinds of steps that can be asynchronous."""
_PHRASES = {"overlap": _Machine._overlap, "renew": _Machine._renew, "repeat": _Machine._repeat}


@st.composite
def programs(draw: st.DrawFn) -> list[CollectiveStep]:
    """Draw programs of some 30 to 60 steps: every kind of step and every phrase in random order, then some more."""
    machine = _Machine(draw)
    all_kinds = (*STEPS, *_PHRASES)
    for operation in (
        *draw(st.permutations(all_kinds)),
        *draw(st.lists(st.sampled_from((*all_kinds, *OF_GROUPS)), max_size=8)),
    ):
        machine.take(operation)
    return machine.steps
