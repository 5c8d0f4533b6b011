"""Record the batches, calls and draws of a rank, or give one device those of all ranks, joined along the samples.

The ranks write tapes, and a later run on one device replays them: `install` starts either in the script's process. A
batch is replayed where a DataLoader gives it; else at the outermost module or loss that gets it. The initial parameters
and buffers are those of rank 0, and so are the learning rates. What a dataset holds is hashed, to find out whether
ranks index the same data or shards of their own.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import hashlib
import importlib
import itertools
import operator
import os
import pickle
import random
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader, Dataset
from torch.utils.data import dataloader as loaders

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
from mgpu_check.compare.in_script.tape import STEPS, Tape, Tapes, Unstored, place
from mgpu_check.processes.collective_records import relative
from mgpu_check.processes.tracebacks import calling_line
from mgpu_check.simulated.tensor import tensors_in
from mgpu_check.torch_hooks.nested import leaves, named_buffers, named_modules, named_parameters
from mgpu_check.torch_hooks.patches import Patches, around, replaced
from mgpu_check.torch_hooks.tensors import is_capturing, is_distributed, is_tracing, is_transforming, plain

if TYPE_CHECKING:
    from mgpu_check.compare.in_script.recorder import ScriptRecorder


_LIMIT = 2**26  # bytes of one attribute, to bound the time
_ENDS = 64  # elements at each end of an array
_SPREAD = 4096  # elements of a whole array
_ELEMENTS = 2**18  # of all arrays; of further ones, fewer
_PARTS = 256  # of a list or dict that is too large, or cannot be pickled
_DEPTH = 4  # of datasets within datasets
_SMALL = (int, float, bool, str, type(None))
_DATA = (torch.Tensor, list, tuple, dict, set, frozenset, bytes, PurePath, Dataset)
_OF_A_RANK = (torch.device, torch.Generator, random.Random)


class _TooLargeError(Exception):
    pass


class _Hashing:
    """A file that hashes what is written to it."""

    def __init__(self) -> None:
        self.hash, self._size = hashlib.sha256(), 0

    def write(self, data: bytes) -> int:
        if (room := _LIMIT - self._size) < len(data):
            self.hash.update(data[:room] + bytes(data[:: max(1, len(data) // _SPREAD)]))
            raise _TooLargeError
        self._size += len(data)
        self.hash.update(data)
        return len(data)


class _PicklerOfData(pickle.Pickler):
    """Pickles the data of datasets: shape, ends and spread elements of arrays, and no state of a process."""

    _budget = _ELEMENTS

    def reducer_override(self, value: Any) -> Any:
        value_type = type(value)
        if isinstance(value, _OF_A_RANK) or value_type.__module__.startswith("numpy.random"):
            return str, (value_type.__name__,)
        if isinstance(value, torch.Tensor):
            return str, (repr((tuple(value.shape), self._elements(value.detach().reshape(-1)))),)
        if _is_array(value):
            return str, (repr((value.shape, self._elements(value.ravel()))),)
        # Compiled expressions of the package regex have other bytes in each process.
        if value_type.__name__ == "Pattern" and value_type.__module__.partition(".")[0] in ("re", "regex", "_regex"):
            return str, (str(getattr(value, "pattern", "")),)
        if isinstance(value, Dataset):
            return str, (value_type.__qualname__,), _data_of(value.__dict__)
        return NotImplemented

    def _elements(self, flat: Any) -> list[Any]:
        ends, spread = (_ENDS, _SPREAD) if self._budget > 0 else (4, 8)  # there may be an array for each sample
        samples = [elements.tolist() for elements in (flat[:ends], flat[-ends:], flat[:: max(1, len(flat) // spread)])]
        self._budget -= sum(map(len, samples))
        return samples


def _is_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "ravel")


def _data_of(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a dataset that are data: no rank, device or counter beside arrays and lists."""
    ordered = {
        name: sorted(map(repr, attribute)) if isinstance(attribute, (set, frozenset)) else attribute
        for name, attribute in sorted(attributes.items())
    }
    if not any(isinstance(attribute, _DATA) or _is_array(attribute) for attribute in attributes.values()):
        return {name: _drawn_from(attribute) for name, attribute in ordered.items()}

    def is_data(name: str, attribute: Any) -> bool:
        """Return whether it is no number or word beside the data; seeds and paths may be."""
        is_path = isinstance(attribute, str) and os.sep in attribute
        return not isinstance(attribute, _SMALL) or "seed" in name.lower() or is_path

    return {name: attribute for name, attribute in ordered.items() if is_data(name, attribute)}


def _drawn_from(attribute: Any) -> Any:
    """Return the state of a generator, because a dataset without data may draw its samples; else `attribute`."""
    if isinstance(attribute, torch.Generator):
        return attribute.get_state().tolist()
    if isinstance(attribute, random.Random):
        return attribute.getstate()
    return repr(attribute.bit_generator.state) if hasattr(attribute, "bit_generator") else attribute


def fingerprint(dataset: Any, depth: int = _DEPTH) -> str:
    """Return a hash of a dataset: equal for equal data.
    What is too large or cannot be pickled is hashed by its attributes or elements, or left out."""
    attributes, content = getattr(dataset, "__dict__", None), dataset
    if attributes and not isinstance(dataset, (type, *_DATA)):
        content = type(dataset).__name__, _data_of(attributes)
    hashing = _Hashing()
    try:
        _PicklerOfData(hashing, protocol=4).dump(content)
        return hashing.hash.hexdigest()
    except _TooLargeError:
        digest = hashing.hash.hexdigest()
    except Exception:  # such as a function within a transformation, or code of the user
        digest = type(dataset).__name__
    if depth:
        digest += "".join(f" {name} {fingerprint(piece, depth - 1)}" for name, piece in _parts_of(dataset))
    return hashlib.sha256(digest.encode()).hexdigest()


def _parts_of(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, (list, tuple, dict)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for name, piece in itertools.islice(items, 0, None, max(1, len(value) // _PARTS)):
            yield repr(name)[:99] if isinstance(name, (int, str)) else "", piece
    elif isinstance(attributes := getattr(value, "__dict__", None), dict) and not isinstance(value, type):
        yield from _data_of(attributes).items()


class Points(abc.ABC):
    """Watches a script, for recording and for replaying.
    `install` makes one of its two kinds in a process, after the recorder. Patched functions of torch call it. It is
    active until the first `until` steps are done; a forked child leaves it at once."""

    draws: InterceptedDraws
    outside: OutsideData

    def __init__(self, recorder: ScriptRecorder, until: int) -> None:
        self.recorder, self.until = recorder, until
        self._before_fork = until
        self._depth = 0  # calls of modules and losses
        self._paused = 0  # calls that are not followed
        self._seen: set[int] = set()
        self._held: list[Any] = []  # keeps objects alive whose ids are keys
        self._kinds: Counter[str] = Counter()
        self._rates: dict[int, list[int]] = {}
        self.optimizers: list[Any] = []  # that the script has made
        self._stepping = False
        self._differentiating = False  # within a backward pass

    def active(self) -> bool:
        """Return whether the thread that trains runs within the recorded steps."""
        return (
            self.recorder.in_training_thread()
            and not is_tracing()
            and self.recorder.done < self.until
            and not self._paused
        )

    def micro(self) -> int:
        """Return the number of the micro-batch."""
        return self.recorder.passes

    def follows(self) -> bool:
        """Return whether operators are followed now: not those of a backward pass or an optimizer."""
        computes = self._stepping or self._differentiating  # with gradients: a closure, or a checkpointed part
        return torch.is_grad_enabled() or not computes

    def gradients(self) -> Iterator[torch.Tensor]:
        """Yield the gradients of the parameters of all optimizers."""
        for optimizer in self.optimizers:
            yield from (p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None)

    def leave(self) -> None:
        """Do nothing in a forked child, such as a worker of a loader."""
        self._before_fork, self.until = self.until, -1

    def resume(self) -> None:
        """Go on in a forked child that trains instead of the script's first process."""
        self.until = self._before_fork

    def call_module(self, original: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
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

    def call_loss(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._depth or not self._enters():
            return original(*args, **kwargs)
        with self._call(original.__name__, args, kwargs):
            return original(*args, **kwargs)

    def call_attention(
        self,
        original: Callable[..., Any],
        query: Any,
        key: Any,
        value: Any,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        """Let attention with dropout draw its mask by an operator of its own: fused kernels do not return it.

        They return the state of a generator, or nothing: `aten::_scaled_dot_product_efficient_attention`, torch 2.13.
        """
        with sdpa_kernel(SDPBackend.MATH) if dropout_p and self.active() else contextlib.nullcontext():
            return original(query, key, value, attn_mask, dropout_p, *args, **kwargs)

    def trace(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Trace without modes: with one, an operator in place makes the tracer take its result for a constant."""
        with _disable_current_modes():
            return original(*args, **kwargs)

    def make_optimizer(self, original: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)
        if not self.optimizers and threading.current_thread() is not threading.main_thread():
            self.draws.__enter__()  # a dispatch mode belongs to one thread
        self.optimizers.append(optimizer)
        self.know(p for group in optimizer.param_groups for p in group["params"])

    def apply_function(self, original: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        """Follow the forward pass of a `torch.autograd.Function`, which runs without gradients."""
        if self.outside.applying or not (self.active() and self.follows() and torch.is_grad_enabled()):
            return original(function, *args, **kwargs)
        return self.outside.apply(lambda: original(function, *args, **kwargs), function.__name__, args)

    def differentiate(self, original: Callable[..., Any], outputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Replace the gradients that the script gives to `torch.autograd.backward` or `grad`."""
        if not self.active() or self._differentiating:
            return original(outputs, *args, **kwargs)
        with replaced(self, "_differentiating", True), self._call(original.__name__, args, kwargs):
            result = original(outputs, *args, **kwargs)
        self.know(tensors_in([result]))
        return result

    def register_hook(self, original: Callable[..., Any], tensor: torch.Tensor, hook: Callable[..., Any]) -> Any:
        """Follow the hooks of gradients, and judge their results."""

        @functools.wraps(hook)
        def followed(gradient: torch.Tensor) -> Any:
            if not self.active():
                return hook(gradient)
            with replaced(self, "_differentiating", False), self.outside.origins.known([gradient]):
                result = hook(gradient)
                self.recorder.guard(self.outside.judge)("a hook", tensors_in([gradient, result]))
            return result

        return original(tensor, followed)

    def to_numpy(self, original: Callable[..., Any], tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Take note of tensors that share their memory with an array: the script may change it unseen."""
        if self.active() and not tensor.requires_grad:
            self.know([tensor], None)
        return original(tensor, *args, **kwargs)

    def _enters(self) -> bool:
        return self.active() and not self.recorder.backwards and not is_capturing() and not is_transforming()

    @contextlib.contextmanager
    def _call(self, operation: str, args: Any, kwargs: Any) -> Iterator[None]:
        """Replace the tensors of an outermost call that were not computed with parameters; let them be known in it."""
        keep = self.recorder.guard(self._kept_inputs)
        inputs = keep(operation, args, kwargs) or [] if torch.is_grad_enabled() else []
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

    def call_unfollowed(self, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a hook of this package, whose operators do not count."""
        with self.paused():
            return hook(*args, **kwargs)

    def _rates_of(self, optimizer: Any) -> tuple[str, int]:
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
    def iterate(self, original: Callable[..., Any], loader: Any) -> Any:
        """Begin an iteration over a DataLoader."""

    @abc.abstractmethod
    def next_batch(self, original: Callable[..., Any], iterator: Any) -> Any:
        """Return the next batch."""

    @abc.abstractmethod
    def length(self, original: Callable[..., Any], loader: Any) -> int:
        """Return the number of batches."""


def _is_input(leaf: Any) -> bool:
    if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or is_distributed(leaf):
        return False
    return not leaf.requires_grad or (leaf.grad_fn is None and not isinstance(leaf, nn.Parameter))


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers by their names without wrappers, which one device may lack."""
    modules = [(name, submodule) for name, submodule in named_modules(module) if name]
    wrappers = [f"{name}.module." for name, submodule in modules if unwrapped(submodule) is not submodule]
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


_LISTED = 2**14  # indices of a rank in the trace: a sampler that overlaps shows in any part of a dataset
_LONGEST = 2**24  # entries of an epoch, to bound the time


class LoaderEnd:
    """The end of an iteration over a loader."""


class RankRecording(Points):
    """Writes what a rank is given to its tape; `finish` adds an epoch of each loader when the script has ended."""

    def __init__(self, recorder: ScriptRecorder, until: int, rank: int, tape: Tape) -> None:
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

    def iterate(self, original: Callable[..., Any], loader: Any) -> Any:
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

    def next_batch(self, original: Callable[..., Any], iterator: Any) -> Any:
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

    def length(self, original: Callable[..., Any], loader: Any) -> int:
        own: int = original(loader)
        if self.active():
            self._tape.put("length", place(), own)
        return own


def epoch_of(loader: Any, world: int) -> dict[str, Any] | None:
    """Return the indices of an epoch of a loader, for an event; None for a loader without indices.
    After the last recorded step this changes nothing. Of a large dataset it has every n-th index. An endless sampler
    has no epoch: the event has the first indices, as many as the share of a rank."""
    try:
        length = len(loader.dataset)
        stride = -(-length // _LISTED)
        most = min(4 * length + _LISTED, _LONGEST)  # no epoch is so long
        batches = (entry if isinstance(entry, (list, tuple)) else [entry] for entry in loader._index_sampler)
        entries = itertools.chain.from_iterable(batches)
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


_NEAR = 1e-3  # relative to the largest element: rounding in batches of another size changes results by less


class RankReplaying(Points):
    """Gives one device what the ranks were given."""

    outside: ReplayedData

    def __init__(self, recorder: ScriptRecorder, until: int, tapes: Tapes) -> None:
        super().__init__(recorder, until)
        self._tapes = tapes
        self._told: set[tuple[str, ...]] = set()
        self._rows = SampleRows(tapes.turned)
        self._missing, self._give = (functools.partial(self._tell, event) for event in ("unreplayed", "given"))
        self.outside = ReplayedData(self, tapes, self._rows, self._give, self._missing)
        self.draws = ReplayedDraws(self, tapes, self._missing, self.outside)

    def _tell(self, event: str, subject: str, reason: str = "", line: str = "") -> None:
        if not line:
            file, number = calling_line()
            line = f" at {relative(file)}:{number}" if file else ""
        message = f"{subject}{line}"
        if (event, message) not in self._told:
            self._told.add((event, message))
            self.recorder.note(event, what=message, why=reason)

    def start(self, module: nn.Module, location: str) -> None:
        kept, own, name = self._tapes.first("start", location), tensors_of(module), type(module).__name__
        if kept is None:
            return
        prints = self._tapes.turn("buffers", location)
        if any(rank != prints[0] for rank in prints):
            self._missing(f"the buffers of {name}", "ranks start with other values")
        if isinstance(kept, Unstored):
            self._missing(f"the start of {name}", kept.reason)
        elif {key: value.shape for key, value in kept.items()} != {key: value.shape for key, value in own.items()}:
            self._missing(f"the start of {name}", "it has other tensors on rank 0")
        else:
            with torch.no_grad():
                for key, value in kept.items():
                    own[key].copy_(value)

    def inputs(self, operation: str, own: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        shards = self._tapes.turn("call", f"{operation} {place()}", self.micro())
        if not own and not any(shards):
            return []
        if not shards or any(isinstance(shard, Unstored) or len(shard) != len(own) for shard in shards):
            self._missing(f"the call of {operation}", "not every rank makes it with as many tensors")
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
        if self._tapes.confused:
            self._missing("a call", "one device makes it at two lines, and the ranks at one")
        location, number = self._rates_of(optimizer)
        rates = self._tapes.first("rate", location, number) or []
        if len(rates) != len(optimizer.param_groups):
            return
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            own = group.get("lr")
            if isinstance(rate, (int, float)) and isinstance(own, (int, float)) and rate != own:
                self._tell("rate", f"{own:g}", f"{rate:g}")
                group["lr"] = rate

    def iterate(self, original: Callable[..., Any], loader: Any) -> Any:
        location = place(of_a_loop=True)
        self._kinds[location] += 1
        location = f"{location} {self._kinds[location]}"
        if self.active() and self._tapes.first("batch", location) is not None:
            return self._batches(location)
        with self.paused():
            return original(loader)

    def _batches(self, location: str) -> Iterator[Any]:
        while shards := self._tapes.turn("batch", location):
            shards = [shard for shard in shards if not isinstance(shard, LoaderEnd)]
            if not shards:
                return
            if unstored := [shard for shard in shards if isinstance(shard, Unstored)]:
                self._missing("a batch", unstored[0].reason)
                return
            guesses: list[str] = []
            try:
                batch = join(shards, guesses)
                self._rows.saw(shards)
            except NotJoinedError as error:
                self._missing("a batch", str(error))
                return
            for guess in guesses:
                self._missing("a batch", guess)
            self._give("the batches of the DataLoader")
            self.know(leaf for leaf in leaves(batch) if isinstance(leaf, torch.Tensor))
            yield batch

    def next_batch(self, original: Callable[..., Any], iterator: Any) -> Any:
        with self.paused():
            return original(iterator)

    def length(self, original: Callable[..., Any], loader: Any) -> int:
        recorded = self._tapes.first("length", place()) if self.active() else None
        return int(original(loader) if recorded is None else recorded)


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


def install(recorder: ScriptRecorder, steps: int | None, rank: int, tape: int | None, replay: int | None) -> None:
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
    patches = Patches(sparing="mgpu_check")
    for name in (*_LOSSES, "scaled_dot_product_attention"):
        original = getattr(nn.functional, name)
        patches.replace(original, around(points.call_loss if name in _LOSSES else points.call_attention)(original))
    patches.replace(torch.jit.trace, around(points.trace)(torch.jit.trace))
    patches.apply()
    watched: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        *((nn.Module, "__call__", points.call_module), (DataLoader, "__iter__", points.iterate)),
        *((DataLoader, "__len__", points.length), (loaders._BaseDataLoaderIter, "__next__", points.next_batch)),
        *((torch.optim.Optimizer, "__init__", points.make_optimizer), (torch.Tensor, "numpy", points.to_numpy)),
        *((torch.autograd, "grad", points.differentiate), (torch.autograd, "backward", points.differentiate)),
        (torch.autograd.Function, "apply", points.apply_function),
        (torch.Tensor, "register_hook", points.register_hook),
    )
    for owner, name, watch in watched:
        patches.wrap(owner, name, around(watch))
    if replay is not None and tapes.other_seeds:
        _seed_otherwise()
    for name in ("enter", "leave", "before_step", "after_step"):
        patches.wrap(recorder, name, around(points.call_unfollowed))
    register_optimizer_step_pre_hook(points.step_begins)
    register_optimizer_step_post_hook(points.after_step)
    points.draws.__enter__()
    os.register_at_fork(after_in_child=points.leave)
    recorder.resume = points.resume


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
