"""Enter and leave a simulated node; replace torch's compilers there, and restrict its profilers to the host.

No driver measures the time of simulated devices. ``torch.compile`` returns its argument, as under
``TORCH_COMPILE_DISABLE=1``: a compiler traces the operators of a tensor, but the simulation is in the Python code
around them.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.autograd.profiler as profiler
import torch.autograd.profiler_legacy as legacy
import torch.jit._builtins
import torch.utils._device
from torch._C._profiler import ProfilerActivity, ProfilerState

from mgpu_check.option_values import arithmetic_of_environment, parse_arithmetic
from mgpu_check.simulated import dispatch
from mgpu_check.simulated.cuda import streams
from mgpu_check.simulated.cuda.allocator import forget_pinned
from mgpu_check.simulated.cuda.graphs import abandon, install_graphs
from mgpu_check.simulated.cuda.runtime import install_native, install_runtime
from mgpu_check.simulated.distributed.collectives import install_collectives
from mgpu_check.simulated.distributed.data_parallel import install_parallel, install_reducer
from mgpu_check.simulated.factories import install_device_type, install_factories, install_typed
from mgpu_check.simulated.node import SimulatedNode, active_node, enter_node, present_node
from mgpu_check.simulated.operators.arithmetic import Arithmetic
from mgpu_check.simulated.operators.attention import install_attention
from mgpu_check.simulated.operators.autograd import install_autocast, install_functions
from mgpu_check.simulated.operators.generators import ambient_generator, device_generators, install_random
from mgpu_check.simulated.operators.kernels import install_composites
from mgpu_check.simulated.tensor import install_storage, tag
from mgpu_check.simulated.tensor_methods import install_methods, install_modules, install_wrappers
from mgpu_check.torch_hooks.patches import Patches, around

_warned: set[int] = set()


def _say_once() -> None:
    """Print the notice once per process, and only on rank 0."""
    if os.getpid() in _warned or os.environ.get("RANK", "0") != "0":
        return
    _warned.add(os.getpid())
    print(
        "mgpu-check: torch.compile has no effect on simulated GPUs: the code runs eagerly, with the same results",
        file=sys.stderr,
        flush=True,
    )


def _eager(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def compile(model: Callable[..., Any] | None = None, **options: Any) -> Any:
        if model is None:
            return lambda function: compile(function, **options)
        if not options.get("disable"):
            _say_once()
        return model

    return compile


def install_compiler(patches: Patches) -> None:
    patches.replace(torch.compile, _eager(torch.compile))


def install_scripting(patches: Patches) -> None:
    """Allow scripts to call the replacements. Install this last.

    `torch.jit.script` finds operators by the ids of functions: torch/jit/_builtins.py, _find_builtin, torch 2.13.
    """
    table: dict[int, str] = torch.jit._builtins._get_builtin_table()
    added = {id(new): table[old] for old, new in patches.replaced() if old in table}

    def forget() -> None:
        for key in added:
            table.pop(key, None)

    table.update(added)
    patches.at_exit(forget)


@around
def _host_only(original: Callable[..., None], self: Any, *args: object, **kwargs: object) -> None:
    # The profiler asks C++ for the activities of this build: torch/autograd/profiler.py, profile.__init__, torch 2.13.
    original(self, *args, **kwargs)
    if getattr(self, "profiler_kind", None) is ProfilerState.KINETO_GPU_FALLBACK:
        self.profiler_kind = ProfilerState.KINETO
    if hasattr(self, "kineto_activities"):
        self.kineto_activities.discard(ProfilerActivity.CUDA)


@around
def _without_devices(original: Callable[..., None], self: Any, *args: object, **kwargs: object) -> None:
    original(self, *args, **kwargs)
    self.use_cuda = False


def install_profiling(patches: Patches) -> None:
    patches.wrap(profiler.profile, "__init__", _host_only)
    patches.wrap(legacy.profile, "__init__", _without_devices)
    # `with emit_nvtx()` does nothing: no tool could record the ranges.
    patches.set(profiler.emit_nvtx, "__enter__", lambda self: self)
    patches.set(profiler.emit_nvtx, "__exit__", lambda self, *_: None)


_entering = threading.Lock()
_prepared: Patches | None = None


def _backing_device(backing: str) -> torch.device:
    valid = ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
    if backing not in valid:
        raise ValueError(f"backing={backing!r} is not a device of this machine; it must be one of: {', '.join(valid)}")
    return torch.device(backing)


@contextmanager
def simulated_node(n: int, backing: str = "cpu", arithmetic: str | None = None) -> Iterator[None]:
    """Simulate a machine with ``n`` CUDA devices, in this process and all of its threads, until the context exits.

    ``backing`` is the real device that computes: "cpu", or a visible "cuda:i". Results say nothing about real hardware.
    ``arithmetic`` is a value of ``--simulate-arithmetic``, such as "gpu"; default that of the environment, or "cpu".
    Tensors that outlive the context keep their values, but their device no longer exists; :func:`to_real` converts them
    to plain tensors. The exit restores all of torch.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"n={n!r} is not a number of devices; it must be an int of at least 1")
    settings = arithmetic_of_environment() if arithmetic is None else parse_arithmetic(arithmetic)
    with _entering:
        patches = _take_over(n, backing) or _enter(n, _backing_device(backing))
        dispatch.use_arithmetic(Arithmetic(settings))
    try:
        yield
    finally:
        _leave(patches)


def _node(n: int, backing: torch.device) -> SimulatedNode:
    devices = [torch.device("cuda", i) for i in range(n)]
    node = SimulatedNode(n, backing, seeded=device_generators(devices, backing), ambient=ambient_generator(backing))
    node.at_first_use += [
        lambda: setattr(torch.cuda, "_initialized", True),
        lambda: setattr(torch.cuda, "default_generators", node.generators),
    ]
    return node


def _take_over(n: int, backing: str) -> Patches | None:
    """Enter a node with the patches that `prepare` applied, and return them; None without a prepared node."""
    global _prepared
    patches, _prepared = _prepared, None
    if patches is None:
        if active_node() is not None:
            raise RuntimeError(
                "a simulated node is active in this process already; leave it before entering another one"
            )
        return None
    assert backing == "cpu", "a prepared node hides the device that is to compute"
    streams.forget_streams()
    enter_node(_node(n, torch.device(backing)))
    return patches


def _enter(n: int, backing: torch.device) -> Patches:
    if backing.type == "cuda":
        torch.cuda.init()
    # torch caches these tables at the first call, and they must hold its own functions, not the replacements:
    # torch/utils/_device.py, torch/overrides.py and torch/jit/_builtins.py, torch 2.13.
    torch.utils._device._device_constructors()
    torch.overrides.get_default_nowrap_functions()
    torch.jit._builtins._get_builtin_table()
    node = _node(n, backing)
    # Before the node is entered: calibrating there would count as the first use of a device.
    dispatch.calibrate(lambda t: tag(t, torch.device("cuda", 0)))
    patches = Patches(sparing="mgpu_check.simulated")
    enter_node(node)
    try:
        for install in (
            *(install_device_type, install_factories, install_methods, install_storage, install_random),
            *(install_runtime, install_graphs, install_native, install_typed, install_profiling, install_modules),
            *(install_attention, install_parallel, install_autocast, install_collectives, install_reducer),
            *(install_functions, install_composites, install_compiler, install_wrappers, install_scripting),
        ):
            install(patches)
        patches.apply()
    except BaseException:
        _leave(patches)
        raise
    return patches


def _leave(patches: Patches) -> None:
    try:
        patches.undo()
    finally:
        abandon()
        streams.forget_streams()
        forget_pinned()
        enter_node(None)


def prepare() -> None:
    """Patch torch in advance, so that a process forked from this one can enter a node with any number of devices.

    Entering a node replaces a thousand names in torch's modules. A forked process that did so itself would need 20 ms,
    and 10 MB for its own copies of memory pages that it now shares with this process.
    """
    global _prepared
    with _entering:
        if active_node() is None:
            _prepared = _enter(1, torch.device("cpu"))


def enter_in_fork(n: int) -> None:
    """Leave the node of the parent in a forked process, where it cannot be used, and enter one of n devices."""
    node = present_node()
    streams.forget_streams()
    enter_node(_node(n, node.backing))


def simulated_device_count() -> int | None:
    """Return the number of devices of this process's simulated node; None if no simulation is active."""
    node = active_node()
    return None if node is None else node.count()
