"""Record the batches, calls and draws of a rank, or give one device those of all ranks, joined along the samples.

The ranks write tapes, and a later run on one device replays them: `install` starts either in the script's process. A
batch is replayed where a DataLoader gives it; else at the outermost module or loss that gets it. The initial parameters
and buffers are those of rank 0, and so are the learning rates.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import importlib
import itertools
import operator
import os
import random
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as loaders

from mgpu_check.compare.in_script.errors import Guard
from mgpu_check.compare.in_script.fingerprint import fingerprint
from mgpu_check.compare.in_script.joining import NotJoinedError, SampleRows, join
from mgpu_check.compare.in_script.models import unwrapped
from mgpu_check.compare.in_script.replay_outside import (
    InterceptedDraws,
    Origin,
    OutsideData,
    RecordedData,
    RecordedDraws,
    ReplayedData,
    ReplayedDraws,
)
from mgpu_check.compare.in_script.script_calls import Note
from mgpu_check.compare.in_script.tape import STEPS, Tape, Tapes, Unstored, place
from mgpu_check.processes.collective_records import relative
from mgpu_check.processes.tracebacks import calling_line
from mgpu_check.simulated.tensor import tensors_in
from mgpu_check.torch_hooks.nested import leaves, named_buffers, named_modules, named_parameters
from mgpu_check.torch_hooks.patches import Patches
from mgpu_check.torch_hooks.tensors import is_capturing, is_distributed, is_transforming, plain


class RecordedScript(Protocol):
    """The part of `mgpu_check.compare.in_script.recorder.ScriptRecorder` that is used."""

    @property
    def note(self) -> Note:
        """Record an event."""

    guard: Guard
    world: int
    done: int
    backwards: int
    passes: int
    finish: Callable[[], None]


class Points(abc.ABC):
    """Watches a script, for recording and for replaying."""

    draws: InterceptedDraws
    outside: OutsideData

    def __init__(self, recorder: RecordedScript, until: int) -> None:
        self.recorder, self.until = recorder, until
        self._thread = threading.get_ident()
        self._depth = 0  # calls of modules and losses
        self._paused = 0  # calls that are not followed
        self._seen: set[int] = set()
        self._held: list[Any] = []  # keeps objects alive whose ids are keys
        self._kinds: Counter[str] = Counter()
        self._rates: dict[int, list[int]] = {}
        self._optimizers: list[Any] = []
        self._stepping = False
        self._differentiating = False  # within a backward pass

    def active(self) -> bool:
        """Return whether the script's own thread runs within the recorded steps."""
        return self.recorder.done < self.until and threading.get_ident() == self._thread and not self._paused

    def micro(self) -> int:
        """Return the number of the micro-batch."""
        return self.recorder.passes

    def follows(self) -> bool:
        """Return whether operators are followed now: not those of a backward pass or an optimizer."""
        computes = self._stepping or self._differentiating  # with gradients: a closure, or a checkpointed part
        return torch.is_grad_enabled() or not computes

    def gradients(self) -> Iterator[torch.Tensor]:
        """Yield the gradients of the parameters of all optimizers."""
        for optimizer in self._optimizers:
            yield from (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)

    def leave(self) -> None:
        """Do nothing in a forked child, such as a worker of a loader."""
        self.until = -1

    def around_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._depth or not self._enters():
                return original(module, *args, **kwargs)
            operation = type(unwrapped(module)).__name__
            if id(module) not in self._seen:
                self._seen.add(id(module))
                self._held.append(module)
                with self.paused():
                    self.start(unwrapped(module), f"{operation} {self._kinds[operation]}")
                self._kinds[operation] += 1
                self.know([value for _, value in (*named_parameters(module), *named_buffers(module))])
            with self._call(operation, args, kwargs):
                return original(module, *args, **kwargs)

        return call

    def around_loss(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth or not self._enters():
                return original(*args, **kwargs)
            with self._call(original.__name__, args, kwargs):
                return original(*args, **kwargs)

        return call

    def around_attention(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Let attention with dropout draw its mask by an operator of its own: fused kernels do not return it."""

        @functools.wraps(original)
        def call(
            query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *args: Any, **kwargs: Any
        ) -> Any:
            if not dropout_p or not self.active():
                return original(query, key, value, attn_mask, dropout_p, *args, **kwargs)
            with sdpa_kernel(SDPBackend.MATH):
                return original(query, key, value, attn_mask, dropout_p, *args, **kwargs)

        return call

    def around_optimizer(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            self._optimizers.append(optimizer := args[0])
            self.know(p for group in optimizer.param_groups for p in group["params"])

        return make

    def around_apply(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Follow the forward pass of a `torch.autograd.Function`, which runs without gradients."""

        @functools.wraps(original)
        def apply(*args: Any, **kwargs: Any) -> Any:
            if self.outside.applying or not (self.active() and self.follows() and torch.is_grad_enabled()):
                return original(*args, **kwargs)
            return self.outside.apply(lambda: original(*args, **kwargs), args[0].__name__, args[1:])

        return apply

    def around_backward(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Replace the gradients that the script gives to `torch.autograd.backward` or `grad`."""

        @functools.wraps(original)
        def backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            if not self.active() or self._differentiating:
                return original(outputs, *args, **kwargs)
            self._differentiating = True
            try:
                with self._call(original.__name__, args, kwargs):
                    result = original(outputs, *args, **kwargs)
            finally:
                self._differentiating = False
            self.know(tensors_in([result]))
            return result

        return backward

    def around_hook(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Follow the hooks of gradients, and judge their results."""

        @functools.wraps(original)
        def register(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
            @functools.wraps(hook)
            def followed(gradient: torch.Tensor) -> Any:
                if not self.active():
                    return hook(gradient)
                before, self._differentiating = self._differentiating, False
                try:
                    with self.outside.origins.known([gradient]):
                        result = hook(gradient)
                        self.recorder.guard(self.outside.judge)("a hook", tensors_in([gradient, result]))
                finally:
                    self._differentiating = before
                return result

            return original(tensor, followed)

        return register

    def around_numpy(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Take note of tensors that share their memory with an array: the script may change it unseen."""

        @functools.wraps(original)
        def numpy(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if self.active() and not tensor.requires_grad:
                self.know([tensor], None)
            return original(tensor, *args, **kwargs)

        return numpy

    def _enters(self) -> bool:
        return self.active() and not self.recorder.backwards and not is_capturing() and not is_transforming()

    @contextlib.contextmanager
    def _call(self, operation: str, args: Any, kwargs: Any) -> Iterator[None]:
        """Replace the tensors of an outermost call that were not computed with parameters; let them be known in it."""
        inputs = (
            self.recorder.guard(self._kept_inputs)(operation, args, kwargs) or [] if torch.is_grad_enabled() else []
        )
        self._depth += 1
        try:
            with self.outside.origins.known(inputs):
                yield
        finally:
            self._depth -= 1

    def know(self, tensors: Iterable[torch.Tensor], origin: Origin | None = Origin.KNOWN) -> None:
        """Set the origin of tensors; the objects of the user among them may raise any error."""
        self.recorder.guard(self.outside.origins.set)(tensors, origin)

    def _kept_inputs(self, operation: str, args: Any, kwargs: Any) -> list[torch.Tensor]:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if _is_input(leaf)]
        with self.paused():
            for tensor, value in zip(inputs, self.inputs(operation, inputs), strict=True):
                self.outside.keep(tensor, value)
        return inputs

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Follow neither a loader, whose batches are replayed, nor this recording itself."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def unfollowed(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """Return a hook of this package whose operators do not count."""

        @functools.wraps(hook)
        def call(*args: Any, **kwargs: Any) -> Any:
            with self.paused():
                return hook(*args, **kwargs)

        return call

    def _rates_of(self, optimizer: Any) -> tuple[str, int]:
        """Return the place of an optimizer's learning rates, and the number of its step."""
        if id(optimizer) not in self._rates:
            self._held.append(optimizer)
        entry = self._rates.setdefault(id(optimizer), [len(self._rates), -1])
        entry[1] += 1
        return str(entry[0]), entry[1]

    def step_begins(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.active():
            self.outside.end()
            self.before_step(optimizer)
        self._stepping = True

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._stepping = False
        if not self.active() and _get_current_dispatch_mode() is self.draws:
            self.draws.__exit__(None, None, None)  # it costs time

    @abc.abstractmethod
    def start(self, module: nn.Module, location: str) -> None:
        """Record the parameters of a model before its first call, or set them."""

    @abc.abstractmethod
    def inputs(self, operation: str, own: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """Record the tensors of a call, or return those to take their places; None for a tensor that stays."""

    @abc.abstractmethod
    def before_step(self, optimizer: Any) -> None:
        """Record the learning rates of an optimizer, or set them."""

    @abc.abstractmethod
    def around_iter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that begins an iteration over a DataLoader."""

    @abc.abstractmethod
    def around_next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that gives the next batch."""

    @abc.abstractmethod
    def around_len(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that gives the number of batches."""


def _is_input(leaf: Any) -> bool:
    """Return whether an argument is a dense tensor that was not computed with parameters."""
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or is_distributed(leaf):
        return False
    return not leaf.requires_grad or (leaf.grad_fn is None and not isinstance(leaf, nn.Parameter))


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers by their names without wrappers, which one device may lack."""
    wrappers = [
        f"{name}.module." for name, submodule in named_modules(module) if name and unwrapped(submodule) is not submodule
    ]
    named = [*named_parameters(module), *named_buffers(module)]
    return {
        _without(name, wrappers): tensor
        for name, tensor in named
        if not nn.parameter.is_lazy(tensor) and not is_distributed(tensor) and not tensor.is_meta
    }


def _without(name: str, wrappers: Sequence[str]) -> str:
    for prefix in reversed(wrappers):  # inner ones first: their names have those of outer ones
        if name.startswith(prefix):
            name = prefix.removesuffix("module.") + name.removeprefix(prefix)
    return name


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

    def start(self, module: nn.Module, location: str) -> None:
        if not self._rank:
            self._tape.put("start", location, tensors_of(module))
        dense = [(name, buffer) for name, buffer in named_buffers(module) if not is_distributed(buffer)]
        prints = {name: fingerprint(plain(buffer)) for name, buffer in dense if not buffer.is_meta}
        self._tape.put("buffers", location, prints)

    def inputs(self, operation: str, own: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        self._tape.put("call", f"{operation} {place()} {self.micro()}", [tensor.detach() for tensor in own])
        return [None] * len(own)

    def before_step(self, optimizer: Any) -> None:
        if not self._rank:
            location, _ = self._rates_of(optimizer)
            self._tape.put("rate", location, [group.get("lr") for group in optimizer.param_groups])

    def around_iter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def iterate(loader: Any) -> Any:
            if not self.active():
                return original(loader)
            with self.paused():
                own = original(loader)
            if torch.is_grad_enabled() and all(loader is not recorded for recorded, _ in self._loaders):
                self._loaders.append((loader, int(getattr(own, "_base_seed", 0))))
            location = place(of_a_loop=True)
            self._kinds[location] += 1
            own._mgpu_check_place = f"{location} {self._kinds[location]}"
            return own

        return iterate

    def around_next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def following(iterator: Any) -> Any:
            location = getattr(iterator, "_mgpu_check_place", None)
            if location is None or not self.active() or not torch.is_grad_enabled():
                return original(iterator)
            with self.paused():
                try:
                    batch = original(iterator)
                except StopIteration:
                    self._tape.put("batch", location, LoaderEnd())
                    raise
                self._tape.put("batch", location, batch)
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
            entry if isinstance(entry, (list, tuple)) else [entry] for entry in loader._index_sampler
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

    def _tell(self, event: str, subject: str, reason: str = "", line: str = "") -> None:
        message = f"{subject}{line or _line()}"
        if (event, message) not in self._told:
            self._told.add((event, message))
            self.recorder.note(event, what=message, why=reason)

    def _missing(self, subject: str, reason: str, line: str = "") -> None:
        self._tell("unreplayed", subject, reason, line)

    def _give(self, subject: str) -> None:
        self._tell("given", subject)

    def start(self, module: nn.Module, location: str) -> None:
        kept = self._tapes.first("start", location)
        if kept is None:
            return
        own = tensors_of(module)
        prints = self._tapes.turn("buffers", location)
        if any(rank != prints[0] for rank in prints):
            self._missing(f"the buffers of {type(module).__name__}", "ranks start with other values")
        if isinstance(kept, Unstored):
            self._tell("unreplayed", f"the start of {type(module).__name__}", kept.reason)
            return
        if {name: value.shape for name, value in kept.items()} != {name: value.shape for name, value in own.items()}:
            self._tell("unreplayed", f"the start of {type(module).__name__}", "it has other tensors on rank 0")
            return
        with torch.no_grad():
            for name, value in kept.items():
                own[name].copy_(value)

    def inputs(self, operation: str, own: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        shards = self._tapes.turn("call", f"{operation} {place()}", self.micro())
        if not own and not any(shards):
            return []
        if not shards or any(isinstance(shard, Unstored) or len(shard) != len(own) for shard in shards):
            self._tell("unreplayed", f"the call of {operation}", "not every rank makes it with as many tensors")
            return [None] * len(own)
        return [self._input(operation, value, [shard[i] for shard in shards]) for i, value in enumerate(own)]

    def _input(self, operation: str, own: torch.Tensor, shards: Sequence[torch.Tensor]) -> torch.Tensor | None:
        is_known = self.outside.origins.of(own) is Origin.KNOWN
        guesses: list[str] = []
        self.outside.learn(own, shards)
        try:
            value = self.outside.joint(own, shards, guesses, input_=True)
        except NotJoinedError as error:
            if not is_known:
                self._missing(f"an argument of {operation}", str(error))
            return None
        if value is None or (is_known and _same_rows(plain(own), value)):
            return None
        for guess in guesses:
            self._missing(f"an argument of {operation}", guess)
        self.outside.ordered = self.outside.ordered or not is_known
        self._give(f"the inputs of {operation}")
        return value

    def before_step(self, optimizer: Any) -> None:
        self.outside.judge("code outside of a backward pass", self.gradients())
        if self._rows.ambiguous:
            self.recorder.note("ambiguous")
        if self.outside.ordered:
            self.recorder.note("ordered")
        location, number = self._rates_of(optimizer)
        rates = self._tapes.first("rate", location, number) or []
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
            location = place(of_a_loop=True)
            self._kinds[location] += 1
            location = f"{location} {self._kinds[location]}"
            if self.active() and self._tapes.first("batch", location) is not None:
                return self._batches(location)
            with self.paused():
                return original(loader)

        return iterate

    def _batches(self, location: str) -> Iterator[Any]:
        while shards := self._tapes.turn("batch", location):
            shards = [shard for shard in shards if not isinstance(shard, LoaderEnd)]
            if not shards:
                return
            if unstored := [shard for shard in shards if isinstance(shard, Unstored)]:
                self._tell("unreplayed", "a batch", unstored[0].reason)
                return
            guesses: list[str] = []
            try:
                batch = join(shards, guesses)
                self._rows.saw(shards)
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
            if self.active() and (recorded := self._tapes.first("length", place())) is not None:
                return int(recorded)
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
    own_sums, joined_sums = (row @ torch.arange(1.0, row.shape[1] + 1, dtype=row.dtype).sin() for row in rows)
    return bool((own_sums.sort().values - joined_sums.sort().values).abs().max() <= _NEAR * joined_sums.abs().max())


_LOSSES = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss", "cosine_embedding_loss"),
)
"""Functions that may get targets outside of all modules."""
_OTHER_SEED = 20260101


def install(recorder: RecordedScript, steps: int | None, rank: int, tape: int | None, replay: int | None) -> None:
    """Record to the file `tape`, or replay the file `replay`, for the first steps."""
    until = steps or STEPS
    points: Points
    if tape is not None:
        points = RankRecording(recorder, until, rank, Tape(tape))
        recorder.finish = points.finish
    else:
        assert replay is not None
        tapes = Tapes(replay)
        points = RankReplaying(recorder, until, tapes)
    patches = Patches(among="torch")
    patches.set(nn.Module, "__call__", points.around_call(nn.Module.__call__))
    for name in _LOSSES:
        original = getattr(nn.functional, name)
        patches.replace(original, points.around_loss(original))
    attention = nn.functional.scaled_dot_product_attention
    patches.replace(attention, points.around_attention(attention))
    patches.set(DataLoader, "__iter__", points.around_iter(DataLoader.__iter__))
    patches.set(DataLoader, "__len__", points.around_len(DataLoader.__len__))
    base = loaders._BaseDataLoaderIter
    patches.set(base, "__next__", points.around_next(base.__next__))
    patches.apply()
    patches.wrap(torch.optim.Optimizer, "__init__", points.around_optimizer)
    patches.wrap(torch.autograd.Function, "apply", points.around_apply)
    patches.wrap(torch.autograd, "grad", points.around_backward)
    patches.wrap(torch.autograd, "backward", points.around_backward)
    patches.wrap(torch.Tensor, "register_hook", points.around_hook)
    patches.wrap(torch.Tensor, "numpy", points.around_numpy)
    if replay is not None and tapes.other_seeds:
        _seed_otherwise()
    for name in ("enter", "leave", "before_step", "after_step"):
        patches.set(recorder, name, points.unfollowed(getattr(recorder, name)))
    register_optimizer_step_pre_hook(points.step_begins)
    register_optimizer_step_post_hook(points.after_step)
    points.draws.__enter__()
    os.register_at_fork(after_in_child=points.leave)


def _seed_otherwise() -> None:
    """Change the seeds that the script sets: numbers that are replayed do not depend on them."""
    patches = Patches()
    for function in {torch.manual_seed, torch.random.manual_seed}:
        patches.replace(function, with_other_seeds(function))
    patches.apply()
    with contextlib.suppress(ImportError):
        importlib.import_module("numpy.random")
    for module in filter(None, (random, sys.modules.get("numpy.random"))):
        patches.wrap(module, "seed", with_other_seeds)
        module.seed(0)
    torch.manual_seed(0)


def with_other_seeds(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that sets another seed than it is given; None, a seed of the system, stays."""

    def other(value: Any) -> Any:
        if value is None:
            return None
        try:
            number = operator.index(value)  # also of NumPy
        except TypeError:  # a text, or several numbers
            number = zlib.crc32(repr(value).encode())
        return (number + _OTHER_SEED) % 2**32

    def seed(*args: Any, **kwargs: Any) -> Any:
        others = {name: other(value) if name in ("seed", "a") else value for name, value in kwargs.items()}
        return original(*map(other, args[:1]), *args[1:], **others)

    return seed
