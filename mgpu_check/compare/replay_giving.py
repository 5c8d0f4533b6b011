"""Give one device what all ranks were given, joined along the samples."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from mgpu_check.compare.joining import NotJoinedError, SampleRows, join
from mgpu_check.compare.replay_draws import ReplayedDraws
from mgpu_check.compare.replay_origins import Origin
from mgpu_check.compare.replay_outside import ReplayedData
from mgpu_check.compare.replay_points import Points, RecordedScript, tensors_of
from mgpu_check.compare.replay_recording import LoaderEnd
from mgpu_check.compare.tape import Tapes, Unstored, place
from mgpu_check.processes.collective_records import relative
from mgpu_check.processes.tracebacks import calling_line
from mgpu_check.torch_hooks.nested import leaves
from mgpu_check.torch_hooks.tensors import plain

_NEAR = 1e-3
"""Relative to the largest element: rounding in batches of another size changes results by less."""


class RankReplaying(Points):
    """Gives one device what the ranks were given."""

    outside: ReplayedData

    def __init__(self, recorder: RecordedScript, until: int, tapes: Tapes) -> None:
        super().__init__(recorder, until)
        self._tapes = tapes
        self._told: set[tuple[str, ...]] = set()
        self._rows = SampleRows(tapes.turned)
        self.outside = ReplayedData(self, tapes, self._rows, self._give, self._missing)
        self.draws = ReplayedDraws(self, tapes, self._missing, self.outside)

    def _tell(self, event: str, what: str, why: str = "", line: str = "") -> None:
        told = f"{what}{line or _line()}"
        if (event, told) not in self._told:
            self._told.add((event, told))
            self.recorder.note(event, what=told, why=why)

    def _missing(self, what: str, why: str, line: str = "") -> None:
        self._tell("unreplayed", what, why, line)

    def _give(self, what: str) -> None:
        self._tell("given", what)

    def start(self, module: nn.Module, place: str) -> None:
        kept = self._tapes.first("start", place)
        if kept is None:
            return
        own = tensors_of(module)
        prints = self._tapes.turn("buffers", place)
        if any(rank != prints[0] for rank in prints):
            self._missing(f"the buffers of {type(module).__name__}", "ranks start with other values")
        if isinstance(kept, Unstored):
            self._tell("unreplayed", f"the start of {type(module).__name__}", kept.why)
            return
        if {name: value.shape for name, value in kept.items()} != {name: value.shape for name, value in own.items()}:
            self._tell("unreplayed", f"the start of {type(module).__name__}", "it has other tensors on rank 0")
            return
        with torch.no_grad():
            for name, value in kept.items():
                own[name].copy_(value)

    def inputs(self, kind: str, own: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        parts = self._tapes.turn("call", f"{kind} {place()}", self.micro())
        if not own and not any(parts):
            return []
        if not parts or any(isinstance(part, Unstored) or len(part) != len(own) for part in parts):
            self._tell("unreplayed", f"the call of {kind}", "not every rank makes it with as many tensors")
            return [None] * len(own)
        return [self._input(kind, value, [part[i] for part in parts]) for i, value in enumerate(own)]

    def _input(self, kind: str, own: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        known = self.outside.origins.of(own) is Origin.KNOWN
        guesses: list[str] = []
        self.outside.learn(own, parts)
        try:
            value = self.outside.joint(own, parts, guesses, input_=True)
        except NotJoinedError as error:
            if not known:
                self._missing(f"an argument of {kind}", str(error))
            return None
        if value is None or (known and _same_rows(plain(own), value)):
            return None
        for guess in guesses:
            self._missing(f"an argument of {kind}", guess)
        self.outside.ordered = self.outside.ordered or not known
        self._give(f"the inputs of {kind}")
        return value

    def before_step(self, optimizer: Any) -> None:
        self.outside.judge("code outside of a backward pass", self.gradients())
        if self._rows.ambiguous:
            self.recorder.note("ambiguous")
        if self.outside.ordered:
            self.recorder.note("ordered")
        where, number = self._rates_of(optimizer)
        rates = self._tapes.first("rate", where, number) or []
        if len(rates) != len(optimizer.param_groups):
            return
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            own = group.get("lr")
            if isinstance(rate, (int, float)) and isinstance(own, (int, float)) and rate != own:
                self._tell("rate", f"{own:g}", f"{rate:g}")
                group["lr"] = rate

    def around_iter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def iterate(loader: Any) -> Any:
            where = place(of_a_loop=True)
            self._kinds[where] += 1
            where = f"{where} {self._kinds[where]}"
            if self.active() and self._tapes.first("batch", where) is not None:
                return self._batches(where)
            with self.paused():
                return original(loader)

        return iterate

    def _batches(self, where: str) -> Iterator[Any]:
        while parts := self._tapes.turn("batch", where):
            parts = [part for part in parts if not isinstance(part, LoaderEnd)]
            if not parts:
                return
            if unstored := [part for part in parts if isinstance(part, Unstored)]:
                self._tell("unreplayed", "a batch", unstored[0].why)
                return
            guesses: list[str] = []
            try:
                batch = join(parts, guesses)
                self._rows.saw(parts)
            except NotJoinedError as error:
                self._tell("unreplayed", "a batch", str(error))
                return
            for guess in guesses:
                self._tell("unreplayed", "a batch", guess)
            self._give("the batches of the DataLoader")
            self.know(leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))
            yield batch

    def around_next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def following(iterator: Any) -> Any:
            with self.paused():
                return original(iterator)

        return following

    def around_len(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def length(loader: Any) -> int:
            if self.active() and (known := self._tapes.first("length", place())) is not None:
                return int(known)
            return int(original(loader))

        return length


def _line() -> str:
    """Return the line of the user that is running, as the end of a clause, or ""."""
    file, line = calling_line()
    return f" at {relative(file)}:{line}" if file else ""


def _same_rows(own: torch.Tensor, joined: torch.Tensor) -> bool:
    """Return whether two tensors have the same rows up to rounding, in any order: the script may have ordered views."""
    if own.shape != joined.shape or own.dtype != joined.dtype:
        return False
    if not own.is_floating_point():
        return torch.equal(own, joined)
    rows = [tensor.double().reshape(len(tensor), -1) for tensor in (own, joined)]
    first, second = (row @ torch.arange(1.0, row.shape[1] + 1, dtype=row.dtype).sin() for row in rows)
    return bool((first.sort().values - second.sort().values).abs().max() <= _NEAR * second.abs().max())
