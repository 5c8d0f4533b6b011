"""Record the numbers that a rank draws from `random` and `numpy.random`, and give one device those of all ranks.

The n-th array of a place is joined from the n-th arrays of the ranks, along the samples. Other draws are one for each
sample: one device gets those of the first rank, then those of the next.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import pickle
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import torch

from mgpu_check.compare.joining import NotJoinedError, SampleRows
from mgpu_check.compare.replay_draws import joint_draw
from mgpu_check.compare.tape import Tape, Tapes, Unstored, place
from mgpu_check.torch_hooks.patches import Patches

MOST = 2**12
"""Draws of a rank at one place of a micro-batch that are recorded. More, such as those of a data set, take long."""
_OF_STATE = {"seed", "getstate", "setstate", "get_state", "set_state", "get_bit_generator", "set_bit_generator"}
_ONE = "it is one number for all samples, and another one on each rank"


def generators() -> Iterator[tuple[ModuleType, Any]]:
    """Yield `random` and `numpy.random`, if it is imported, each with the generator that its functions draw from."""
    yield random, getattr(random, "_inst", None)
    numpy: Any = sys.modules.get("numpy.random")
    if numpy is not None:
        yield numpy, getattr(numpy.mtrand, "_rand", None)


def install(around: Callable[[str, Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace each function that draws by `around` of its name and the function."""
    with contextlib.suppress(ImportError):  # a name that the script imports from it later is then the new function
        importlib.import_module("numpy.random")
    patches = Patches()
    for module, owner in generators():
        for name in module.__all__:
            function = getattr(module, name)
            if owner is not None and getattr(function, "__self__", None) is owner and name not in _OF_STATE:
                patches.set(module, name, around(f"{module.__name__}.{name}", function))


class RecordedNumbers:
    """Writes the numbers of a rank to its tape."""

    def __init__(self, tape: Tape) -> None:
        self._tape = tape
        self._counts: Counter[str] = Counter()

    def take(self, name: str, own: Any, micro: int) -> Any:
        """Record a draw, and return it. A function that shuffles in place returns None."""
        where = f"{name} {place()} {micro}"
        self._counts[where] += 1
        if self._counts[where] <= MOST:
            why = "it shuffles in place" if own is None else f"a rank draws {MOST} times there"
            unstored = own is None or self._counts[where] == MOST
            self._tape.put("number", where, Unstored(why) if unstored else own)
        return own


class ReplayedNumbers:
    """Gives one device the numbers of the ranks.

    Args:
        missing: called with the function, the line that called it, and the reason, for each draw that could not be
            given.
        line: returns the line of the user that is running.
        counts: returns whether a draw that could not be given counts now.
    """

    def __init__(
        self,
        tapes: Tapes,
        rows: SampleRows,
        missing: Callable[[str, str, str], None],
        line: Callable[[], str],
        counts: Callable[[], bool],
    ) -> None:
        self._tapes, self._rows, self._missing, self._line, self._counts = tapes, rows, missing, line, counts
        self._ranks: dict[tuple[str, int], list[list[Any]]] = {}
        self._dealt: dict[tuple[str, int], tuple[str, str, list[int]]] = {}
        self._taken: Counter[tuple[str, int]] = Counter()

    def take(self, name: str, own: Any, micro: int) -> Any:
        """Return the draw of the ranks in place of one device's own."""
        key = f"{name} {place()}", micro
        if key not in self._ranks:
            self._ranks[key] = self._tapes.all("number", *key)
        number = self._taken[key]
        self._taken[key] += 1
        try:
            return self._value(key, name, own, number)
        except NotJoinedError as error:
            if self._counts():
                self._missing(name, self._line(), str(error))
            return own

    def _value(self, key: tuple[str, int], name: str, own: Any, number: int) -> Any:
        ranks = self._ranks[key]
        if not ranks or not all(ranks):
            raise NotJoinedError("not every rank draws there")
        if unstored := [value for some in ranks for value in some if isinstance(value, Unstored)]:
            raise NotJoinedError(unstored[0].why)
        if _is_array(own) and number < min(map(len, ranks)):
            parts = [some[number] for some in ranks]
            if all(_is_array(part) and part.dtype == own.dtype for part in parts) and own.shape != parts[0].shape:
                known = "randperm" if name.endswith(".permutation") else name
                tensors = [torch.from_numpy(part) for part in parts]
                return joint_draw(known, tensors, torch.from_numpy(own), self._rows).clone().numpy()
        values = [value for some in ranks for value in some]
        if number >= len(values):
            raise NotJoinedError("the ranks draw fewer numbers there")
        if key not in self._dealt and self._counts():
            self._dealt[key] = name, self._line(), self._rows.sizes
        return copy.copy(values[number])  # the script may change an array or a list

    def end_step(self) -> None:
        """Report the numbers of this step that were dealt to samples, if that was wrong, or a guess."""
        for key, (name, line, sizes) in self._dealt.items():
            ranks = self._ranks[key]
            counts = [len(some) for some in ranks]
            if len({pickle.dumps(some) for some in ranks}) == 1:
                continue
            if self._taken[key] != sum(counts):
                self._missing(name, line, _ONE)
            elif counts != sizes and (sizes or max(counts) > 1):
                self._missing(name, line, "a rank draws several numbers for each sample, in an order that is not known")
        self._dealt.clear()


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and getattr(value, "ndim", 0) > 0 and value.dtype.kind in "biuf"
