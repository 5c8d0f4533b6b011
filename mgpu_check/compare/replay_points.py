"""Watch the loaders and the outermost calls of modules and losses, which bring tensors into a training step."""

from __future__ import annotations

import abc
import contextlib
import functools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from mgpu_check.compare.errors import Guard
from mgpu_check.compare.naming import unwrapped
from mgpu_check.compare.replay_draws import InterceptedDraws
from mgpu_check.compare.replay_origins import Origin
from mgpu_check.compare.replay_outside import OutsideData
from mgpu_check.compare.watched import Note
from mgpu_check.simulated.tensor import tensors_in
from mgpu_check.torch_hooks.nested import named_buffers, named_modules, named_parameters
from mgpu_check.torch_hooks.tensors import is_capturing, is_distributed, is_transforming


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
            kind = type(unwrapped(module)).__name__
            if id(module) not in self._seen:
                self._seen.add(id(module))
                self._held.append(module)
                with self.paused():
                    self.start(unwrapped(module), f"{kind} {self._kinds[kind]}")
                self._kinds[kind] += 1
                self.know([value for _, value in (*named_parameters(module), *named_buffers(module))])
            with self._call(kind, args, kwargs):
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
    def _call(self, kind: str, args: Any, kwargs: Any) -> Iterator[None]:
        """Replace the tensors of an outermost call that were not computed with parameters; let them be known in it."""
        inputs = self.recorder.guard(self._kept_inputs)(kind, args, kwargs) or [] if torch.is_grad_enabled() else []
        self._depth += 1
        try:
            with self.outside.origins.known(inputs):
                yield
        finally:
            self._depth -= 1

    def know(self, tensors: Iterable[torch.Tensor], origin: Origin | None = Origin.KNOWN) -> None:
        """Set the origin of tensors; the objects of the user among them may raise any error."""
        self.recorder.guard(self.outside.origins.set)(tensors, origin)

    def _kept_inputs(self, kind: str, args: Any, kwargs: Any) -> list[torch.Tensor]:
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if _is_input(leaf)]
        with self.paused():
            for tensor, value in zip(inputs, self.inputs(kind, inputs), strict=True):
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
    def start(self, module: nn.Module, place: str) -> None:
        """Record the parameters of a model before its first call, or set them."""

    @abc.abstractmethod
    def inputs(self, kind: str, own: list[torch.Tensor]) -> Sequence[torch.Tensor | None]:
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
