"""Record what a rank is given: batches, tensors of calls, initial parameters and learning rates."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from mgpu_check.compare.fingerprint import fingerprint
from mgpu_check.compare.replay_draws import RecordedDraws
from mgpu_check.compare.replay_outside import RecordedData
from mgpu_check.compare.replay_points import Points, RecordedScript, tensors_of
from mgpu_check.compare.tape import Tape, place
from mgpu_check.torch_hooks.nested import leaves, named_buffers
from mgpu_check.torch_hooks.tensors import is_distributed, plain

_LISTED = 2**14
"""Indices of a rank in the trace: a sampler that overlaps shows in any part of a dataset."""
_LONGEST = 2**24  # entries of an epoch, to bound the time


class LoaderEnd:
    """The end of an iteration over a loader."""


class RankRecording(Points):
    """Writes what a rank is given to its tape."""

    def __init__(self, recorder: RecordedScript, until: int, rank: int, tape: Tape) -> None:
        super().__init__(recorder, until)
        self._rank, self._tape = rank, tape
        self.outside = RecordedData(self, tape)
        self.draws = RecordedDraws(self, tape, self.outside)
        self._loaders: list[tuple[Any, int]] = []

    def active(self) -> bool:
        return not self._tape.full and super().active()

    def finish(self) -> None:
        """Record an epoch of each loader, when nothing else of the script counts."""
        self._tape.full = True
        for loader, seed in self._loaders:
            if (epoch := epoch_of(loader, self.recorder.world)) is not None:
                self.recorder.note("epoch", seed=seed, **epoch)
        self._loaders = []

    def start(self, module: nn.Module, place: str) -> None:
        if not self._rank:
            self._tape.put("start", place, tensors_of(module))
        dense = [(name, buffer) for name, buffer in named_buffers(module) if not is_distributed(buffer)]
        prints = {name: fingerprint(plain(buffer)) for name, buffer in dense if not buffer.is_meta}
        self._tape.put("buffers", place, prints)

    def inputs(self, kind: str, own: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        self._tape.put("call", f"{kind} {place()} {self.micro()}", [tensor.detach() for tensor in own])
        return [None] * len(own)

    def before_step(self, optimizer: Any) -> None:
        if not self._rank:
            where, _ = self._rates_of(optimizer)
            self._tape.put("rate", where, [group.get("lr") for group in optimizer.param_groups])

    def around_iter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def iterate(loader: Any) -> Any:
            if not self.active():
                return original(loader)
            with self.paused():
                own = original(loader)
            if torch.is_grad_enabled() and all(loader is not other for other, _ in self._loaders):
                self._loaders.append((loader, int(getattr(own, "_base_seed", 0))))
            where = place(of_a_loop=True)
            self._kinds[where] += 1
            own._mgpu_check_place = f"{where} {self._kinds[where]}"
            return own

        return iterate

    def around_next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def following(iterator: Any) -> Any:
            where = getattr(iterator, "_mgpu_check_place", None)
            if where is None or not self.active() or not torch.is_grad_enabled():
                return original(iterator)
            with self.paused():
                try:
                    batch = original(iterator)
                except StopIteration:
                    self._tape.put("batch", where, LoaderEnd())
                    raise
                self._tape.put("batch", where, batch)
            self.know(leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))
            return batch

        return following

    def around_len(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def length(loader: Any) -> int:
            own: int = original(loader)
            if self.active():
                self._tape.put("length", place(), own)
            return own

        return length


def epoch_of(loader: Any, world: int) -> dict[str, Any] | None:
    """Return the indices of an epoch of a loader, for an event; None for a loader without indices.

    After the last recorded step this changes nothing. Of a large dataset it has every n-th index. An endless sampler
    has no epoch: the event has the first indices, as many as the share of a rank.
    """
    try:
        length = len(loader.dataset)
        stride = -(-length // _LISTED)
        most = min(4 * length + _LISTED, _LONGEST)  # no epoch is so long
        entries = itertools.chain.from_iterable(
            one if isinstance(one, (list, tuple)) else [one] for one in loader._index_sampler
        )
        share: list[int] = []
        indices: list[int] = []
        number = 0
        for number, index in enumerate(itertools.islice(entries, most), 1):
            if int(index) % stride == 0:
                indices.append(int(index))
            if number == length // world:
                share = list(indices)
        data = fingerprint(loader.dataset)
    except Exception:  # a sampler or a dataset of the user that has no epoch by itself
        return None
    return {
        "length": -(-length // stride),
        "endless": number == most,
        "indices": share if number == most else indices,
        "workers": loader.num_workers,
        "data": data,
    }
