"""Watch the loaders and the outermost calls of modules and losses, which bring tensors into a training step."""

from __future__ import annotations

import abc
import contextlib
import functools
import random
import sys
import threading
import types
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode
from torch.utils._pytree import tree_flatten, tree_unflatten

from mgpu_check.compare.errors import Guard
from mgpu_check.compare.naming import unwrapped
from mgpu_check.compare.replay_numbers import MOST, generators
from mgpu_check.compare.replay_own import OwnGenerators
from mgpu_check.compare.watched import Note
from mgpu_check.torch_hooks.graphs import is_capturing, is_transforming
from mgpu_check.torch_hooks.members import named_buffers, named_modules, named_parameters
from mgpu_check.torch_hooks.values import is_distributed


class RecordedScript(Protocol):
    """The part of `mgpu_check.compare.recorder.ScriptRecorder` that is used."""

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

    draws: TorchDispatchMode

    def __init__(self, recorder: RecordedScript, until: int) -> None:
        self.recorder, self.until = recorder, until
        self._thread = threading.get_ident()
        self._depth = 0  # calls of modules and losses
        self._loading = 0  # calls of loaders
        self._seen: set[int] = set()
        self._held: list[Any] = []  # keeps objects alive whose ids are keys
        self._kinds: Counter[str] = Counter()
        self._rates: dict[int, list[int]] = {}
        self._random: dict[str, int] | None = None
        self._drawn: Counter[tuple[types.CodeType, int, int]] = Counter()
        self._most = MOST  # draws of a line and a micro-batch that pass through `number`
        self.own = OwnGenerators(self.active)
        self.trained = False  # a module was called with gradients
        self.prepared = False  # an optimizer exists

    def active(self) -> bool:
        """Return whether the script's own thread runs within the recorded steps."""
        return self.recorder.done < self.until and threading.get_ident() == self._thread and not self._loading

    def micro(self) -> int:
        """Return the number of the micro-batch."""
        return self.recorder.passes

    def leave(self) -> None:
        """Do nothing in a forked child, such as a worker of a loader."""
        self.until = -1

    def around_call(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._depth or not self._enters():
                return original(module, *args, **kwargs)
            kind = type(unwrapped(module)).__name__
            if id(module) not in self._seen:
                self._seen.add(id(module))
                self._held.append(module)
                self.start(unwrapped(module), f"{kind} {self._kinds[kind]}")
                self._kinds[kind] += 1
            args, kwargs = self.recorder.guard(self._replaced)(kind, args, kwargs)
            with self._inside():
                return original(module, *args, **kwargs)

        return call

    def around_loss(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._depth or not self._enters():
                return original(*args, **kwargs)
            args, kwargs = self.recorder.guard(self._replaced)(original.__name__, args, kwargs)
            with self._inside():
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

    def around_numbers(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function of `random` or `numpy.random` whose results pass through `number`."""

        @functools.wraps(original)
        def draw(*args: Any, **kwargs: Any) -> Any:
            if not self.active():
                return original(*args, **kwargs)
            frame = sys._getframe(1)
            self._drawn[at := (frame.f_code, frame.f_lineno, self.micro())] += 1
            if self._drawn[at] > self._most + 1:  # they take long; `_notice_random` notices them
                return original(*args, **kwargs)
            self._notice_random()
            result = original(*args, **kwargs)
            self._random = _random_states()
            return self.number(name, result)

        return draw

    def around_optimizer(self, original: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(original)
        def make(*args: Any, **kwargs: Any) -> None:
            original(*args, **kwargs)
            self.prepared = True

        return make

    def _enters(self) -> bool:
        return self.active() and not self.recorder.backwards and not is_capturing() and not is_transforming()

    @contextlib.contextmanager
    def _inside(self) -> Iterator[None]:
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    def _replaced(self, kind: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments with other tensors, except for tensors that were computed with parameters."""
        if not torch.is_grad_enabled():
            return args, kwargs
        if not self.trained:
            self._notice_own()
        self.trained = True
        leaves, form = tree_flatten((args, kwargs))
        at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and not leaf.requires_grad]
        at = [i for i in at if not is_distributed(leaves[i]) and leaves[i].layout is torch.strided]
        for i, value in zip(at, self.inputs(kind, [leaves[i].detach() for i in at]), strict=True):
            if value is not None:
                leaves[i] = value
        args, kwargs = tree_unflatten(leaves, form)
        return args, kwargs

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Leave the draws of a loader to it: its batches have them."""
        self._notice_random()
        self._notice_own()
        self._loading += 1
        try:
            yield
        finally:
            self._loading -= 1
            self._random = _random_states()
            self.own.drawn()

    def _notice_random(self) -> None:
        """Record that the script has drawn numbers of Python or NumPy in a way that `around_numbers` does not see."""
        now = _random_states()
        if self._random is not None and self.trained:
            for name, state in now.items():
                if state != self._random.get(name, state):
                    self.recorder.note("foreign", generator=name)
        self._random = now

    def _notice_own(self) -> None:
        """Record draws from generators of the script's own; before the training, with the first states."""
        for name, start in self.own.drawn():
            self.recorder.note("foreign", generator=name, **({} if self.trained else {"start": start}))

    def _rates_of(self, optimizer: Any) -> tuple[str, int]:
        """Return the place of an optimizer's learning rates, and the number of its step."""
        if id(optimizer) not in self._rates:
            self._held.append(optimizer)
        entry = self._rates.setdefault(id(optimizer), [len(self._rates), -1])
        entry[1] += 1
        return str(entry[0]), entry[1]

    def after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.active():
            self._notice_random()
            self._notice_own()
        elif _get_current_dispatch_mode() is self.draws:
            self.draws.__exit__(None, None, None)  # it costs time

    @abc.abstractmethod
    def start(self, module: nn.Module, place: str) -> None:
        """Record the parameters of a model before its first call, or set them."""

    @abc.abstractmethod
    def inputs(self, kind: str, own: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
        """Record the tensors of a call, or return those to give it; None for a tensor that stays."""

    @abc.abstractmethod
    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Record the learning rates of an optimizer, or set them."""

    @abc.abstractmethod
    def number(self, name: str, own: Any) -> Any:
        """Record the result of a function that draws numbers, or return another one."""

    @abc.abstractmethod
    def around_iter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that begins an iteration over a DataLoader."""

    @abc.abstractmethod
    def around_next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that gives the next batch."""

    @abc.abstractmethod
    def around_len(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method that gives the number of batches."""


def _random_states() -> dict[str, int]:
    found = {}
    for module, _ in generators():
        state: Any = random.getstate() if module is random else module.get_state()
        found[module.__name__] = hash(state if module is random else (bytes(state[1]), state[2]))
    return found


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return the parameters and buffers by their names without wrappers, which one device may lack."""
    wrappers = [f"{name}.module." for name, part in named_modules(module) if name and unwrapped(part) is not part]
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
