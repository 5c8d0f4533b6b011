"""Restore the global state of torch and of the process after each call and each test."""

from __future__ import annotations

import _thread
import copy
import ctypes
import itertools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.__future__ as future
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch._tensor_str import PRINT_OPTS

from mgpu_check.engine.rank_side.process_state import ProcessState, ports_of_libraries
from mgpu_check.engine.rank_side.rendezvous import own_gloo_devices
from mgpu_check.processes.clock import Clock
from mgpu_check.processes.protocol import SEED
from mgpu_check.torch_hooks import precision
from mgpu_check.torch_hooks.modes import Modes
from mgpu_check.torch_hooks.replaced import Replaceable
from mgpu_check.torch_hooks.seeds import seed_everything


def _deterministic() -> tuple[bool, bool]:
    return torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()


def _set_deterministic(value: tuple[bool, bool]) -> None:
    torch.use_deterministic_algorithms(value[0], warn_only=value[1])


def _flags(owner: Any, names: str) -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    return [(partial(getattr, owner, name), partial(setattr, owner, name)) for name in names.split()]


_numpy: Any = sys.modules.get("numpy")
_TORCH_STATE: tuple[tuple[Callable[[], Any], Callable[[Any], Any]], ...] = (
    (torch._C._get_default_device, lambda _: torch.set_default_tensor_type(torch.FloatTensor)),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (_deterministic, _set_deterministic),
    (precision.kept, precision.put_back),
    (torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly),
    (torch._C._is_multithreading_enabled, torch._C._set_multithreading_enabled),
    (torch.is_warn_always_enabled, torch.set_warn_always),
    (lambda: copy.copy(PRINT_OPTS), lambda value: vars(PRINT_OPTS).update(vars(value))),
    (torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled),
    (future.get_overwrite_module_params_on_conversion, future.set_overwrite_module_params_on_conversion),
    (future.get_swap_module_params_on_conversion, future.set_swap_module_params_on_conversion),
    (torch.serialization.get_default_load_endianness, torch.serialization.set_default_load_endianness),
    (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled),
    (torch.backends.cuda.preferred_linalg_library, torch.backends.cuda.preferred_linalg_library),
    (c10d.get_debug_level, c10d.set_debug_level),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp),
    (torch.backends.cuda.mem_efficient_sdp_enabled, torch.backends.cuda.enable_mem_efficient_sdp),
    (torch.backends.cuda.math_sdp_enabled, torch.backends.cuda.enable_math_sdp),
    (torch.backends.cuda.cudnn_sdp_enabled, torch.backends.cuda.enable_cudnn_sdp),
    *_flags(torch.backends.cudnn, "enabled benchmark deterministic benchmark_limit"),
    *_flags(torch.backends.opt_einsum, "enabled strategy"),
    *_flags(torch.utils.deterministic, "fill_uninitialized_memory"),
    *([(_numpy.random.get_bit_generator, _numpy.random.set_bit_generator)] if _numpy else ()),
    *([(_numpy.geterr, lambda value: _numpy.seterr(**value))] if _numpy else ()),
)

_MOMENT = 0.2  # seconds for threads to end: ample for a thread that is ending, and little compared to new ranks

_DEVICES = (torch.device("cpu"), torch.device("cuda"))


def _default_device() -> torch.device | None:
    """Return the device set by `torch.set_default_device`, None if none was set."""
    mode = getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
    return None if mode is None else mode.device


@dataclass
class FreshState:
    torch_state: list[Any]
    environment: dict[str, str]
    environment_of_c: dict[bytes, bytes]
    directory: str
    threads: frozenset[threading.Thread]
    count: int
    device: int | None
    group: dist.ProcessGroup | None
    sharing: str
    modes: Modes
    replaceable: Replaceable
    process: ProcessState
    simulated: bool
    modules: int = 0
    interop_threads: int = 0

    @classmethod
    def take(cls, device: int | None, simulated: bool) -> FreshState:
        """Record the current state."""
        return cls(
            torch_state=[get() for get, _ in _TORCH_STATE],
            environment=dict(os.environ),
            environment_of_c=_variables_of_c(),
            directory=os.getcwd(),
            threads=frozenset(threading.enumerate()),
            count=_thread._count(),
            device=device,
            group=_world(),
            sharing=torch.multiprocessing.get_sharing_strategy(),
            modes=Modes(),
            replaceable=Replaceable(),
            process=ProcessState.take(),
            simulated=simulated,
            modules=len(sys.modules),
            interop_threads=torch.get_num_interop_threads(),
        )

    def restore(self) -> None:
        """Undo the changes of a call. This must be cheap, because it runs between any two examples."""
        if _default_device() is not None:
            torch.set_default_device(None)
        self.modes.restore()
        for (get, put), value in zip(_TORCH_STATE, self.torch_state, strict=True):
            if get() != value:
                put(value)
        if torch.cuda.is_initialized() and torch.cuda.current_device() != (self.device or 0):
            torch.cuda.set_device(self.device or 0)
        seed_everything(SEED)

    def restore_process(self) -> None:
        """Undo the changes of a test to the process."""
        imported = len(sys.modules) > self.modules
        self.modules = len(sys.modules)
        self.replaceable.restore(imported)
        self.restore_context()
        self.process.restore(imported)
        if torch.multiprocessing.get_sharing_strategy() != self.sharing:
            torch.multiprocessing.set_sharing_strategy(self.sharing)
        _destroy_extra_groups()

    def restore_context(self) -> None:
        if dict(os.environ) != self.environment:
            os.environ.clear()
            os.environ.update(self.environment)
            time.tzset()
        if (now := _variables_of_c()) != self.environment_of_c:
            for name in now.keys() - self.environment_of_c.keys():
                os.unsetenv(name)
            for name, value in self.environment_of_c.items():
                os.putenv(name, value)
        try:
            os.chdir(self.directory)
        except OSError:
            pass  # the directory is gone, and a test that needs it fails with its own error

    def left_behind(self) -> tuple[str, ...]:
        """Describe the changes that cannot be undone in a living process."""
        found = []
        threads = _still_running(one for one in threading.enumerate() if one not in self.threads)
        # `_thread` may have started threads that `threading` does not know.
        strangers = _thread._count() - self.count
        if threads or strangers > 0:
            shown = ", ".join(threads) or f"{strangers} that threading does not know"
            found.append(f"threads that still run: {shown}")
        if (group := _world()) is not self.group:
            how = "destroyed" if group is None else "left initialized" if self.group is None else "replaced by another"
            found.append(f"the default process group was {how}")
        if torch.get_num_interop_threads() != self.interop_threads:
            found.append("another number of interop threads of torch, which can be set once")
        # NCCL listens at ports that the kernel chooses, and so does each gloo group that does not share its device.
        listening = not self.simulated or os.getpid() in own_gloo_devices
        left_open = self.process.left_behind(ports_of_libraries() if listening else range(0))
        return (*found, *self.replaceable.changed(), *left_open)


_environ = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")


def _variables_of_c() -> dict[bytes, bytes]:
    """Return the environment of programs that this process starts, which `os.environ` may differ from."""
    entries = itertools.takewhile(bool, map(_environ.__getitem__, itertools.count())) if _environ else ()
    return {name: value for name, _, value in (entry.partition(b"=") for entry in entries)}


def _still_running(threads: Iterable[threading.Thread]) -> list[str]:
    """Wait a moment for threads to end, and return the names of the threads that still run.

    The thread of a queue, for example, ends shortly after the last use of the queue.
    """
    deadline = Clock.now() + _MOMENT
    running = []
    for thread in threads:
        foreign = isinstance(thread, threading._DummyThread)  # started in C, so that it cannot be joined
        if not foreign:
            thread.join(Clock.until(deadline))
        if foreign or thread.is_alive():
            running.append(thread.name)
    return running


def _destroy_extra_groups() -> None:
    if not dist.is_initialized():
        return
    world = dist.group.WORLD
    extra = [group for group in dist.distributed_c10d._world.pg_map if group is not world]
    for group in extra:
        dist.destroy_process_group(group)
    if extra and "torch.distributed.tensor" in sys.modules:
        # DTensor caches sharding decisions by equal meshes, and a cached mesh may have groups that are destroyed now.
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


class Steps:
    """Counts the operations of the default group from now on: collectives, and with gloo sends and receives, too.

    CPU tensors and tensors on devices may have separate backends with separate counts. A common backend counts for CPU
    tensors.
    """

    def __init__(self) -> None:
        self._group = _world()
        self._backends = backends_of(self._group)
        self._before = tuple(number_of(backend) for backend in self._backends)

    def taken(self) -> tuple[int, ...]:
        """Return the number of operations per backend; all -1 if the group was destroyed or replaced."""
        if _world() is not self._group:
            return (-1,) * len(self._before)
        return tuple(number_of(backend) - then for backend, then in zip(self._backends, self._before, strict=True))


def operations() -> int:
    """Return the number of operations that all backends of the current default group have counted; see `Steps`."""
    return sum(map(number_of, backends_of(_world())))


def _world() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None


def backends_of(group: Any) -> tuple[Any, Any]:
    """Return the backends for CPU tensors and for devices; None for a missing backend, or for one that does both."""
    found = []
    for device in _DEVICES:
        try:
            found.append(None if group is None else group._get_backend(device))
        except RuntimeError:
            found.append(None)
    return found[0], None if found[1] is found[0] else found[1]


def number_of(backend: Any) -> int:
    try:
        return 0 if backend is None else int(backend._get_sequence_number_for_group())
    except RuntimeError:
        return 0  # this backend does not number its operations


def groups_made() -> int:
    """Return the number of groups made in this process, which determines the name of the next group."""
    return dist.distributed_c10d._world.group_count if dist.is_initialized() else 0
