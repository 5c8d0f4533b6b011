"""Record calls in the script's process that may explain a difference. The calls otherwise behave as before.

Recorded are gradient clipping, checkpoints, samplers, seeds, dropout, gradient scaling, process groups, processes that
the script starts, and the temporary directory of these processes. The functions are replaced as soon as torch is
imported, under all of their names in torch, before the script can import them by name.
"""

from __future__ import annotations

import functools
import multiprocessing.util
import os
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn.utils import clip_grad
from torch.utils.data.distributed import DistributedSampler

from mgpu_check.compare.in_script.errors import Guard
from mgpu_check.compare.in_script.summaries import whole
from mgpu_check.processes.python_environment import FLOAT32, rank_and_world
from mgpu_check.torch_hooks.patches import Patches
from mgpu_check.torch_hooks.tensors import is_capturing, is_distributed, readable


class Note(Protocol):
    def __call__(self, event: str, **fields: object) -> None: ...


class Witness(Protocol):
    """The receiver of watched calls."""

    guard: Guard
    labels: list[torch.Tensor]  # the number of labels of each loss since the last step

    @property
    def note(self) -> Note:
        """Record an event."""

    def forked(self) -> bool:
        """Return whether this process was forked from the recorded one."""

    def wait(self, event: str) -> None:
        """Record the event, and wait until this process is ended."""

    def scaled_step(self, step: Callable[[], Any]) -> Any:
        """Run a step of a `GradScaler`, which may skip the optimizer step."""


def in_a_group() -> bool:
    """Return whether this process belongs to a default process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def generators() -> tuple[list[int], ...]:
    """Return the states of the random number generators of the CPU and of the current GPU."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return tuple(state.tolist() for state in states)


def install(witness: Witness, world: int) -> Patches:
    """Report watched calls to `witness`, in a run with `world` ranks. Return the patches, which can undo this."""
    patches = Patches(among="torch")
    _clipping(patches, witness)
    _checkpoints(patches, witness)
    _samplers(patches, witness, world)
    _seeds(patches, witness)
    _random(patches, witness)
    _losses(patches, witness)
    _groups(patches, witness)
    _starts(patches, witness, world)
    _temporary(patches, witness)
    _autocast(patches, witness)
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        # With this variable alone, torch refuses to call a function that was compiled with fullgraph=True.
        patches.replace(torch.compile, lambda model=None, **options: (lambda f: f) if model is None else model)

    def scaled(step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def watched(*args: Any, **kwargs: Any) -> Any:
            return witness.scaled_step(lambda: step(*args, **kwargs))

        return watched

    patches.wrap(torch.amp.GradScaler, "step", scaled)
    patches.apply()
    return patches


def _after(original: Callable[..., Any], report: Callable[..., None], witness: Witness) -> Callable[..., Any]:
    """Wrap `original` so that each call is followed by one of `report` with the result and the arguments."""
    report = witness.guard(report)

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        report(result, *args, **kwargs)
        return result

    return call


def _clipping(patches: Patches, witness: Witness) -> None:
    def clipped(norm: Any, parameters: Any, max_norm: float = 0.0, *args: Any, **kwargs: Any) -> None:
        value = whole(norm) if isinstance(norm, torch.Tensor) else norm
        if value is not None:
            witness.note("clip", norm=float(value), most=float(max_norm))

    patches.replace(clip_grad.clip_grad_norm_, _after(clip_grad.clip_grad_norm_, clipped, witness))


def _path(file: Any) -> str | None:
    """Return the real path of a file name or an open file; None for other objects."""
    try:
        return os.path.realpath(os.fspath(file) if isinstance(file, (str, os.PathLike)) else file.name)
    except (AttributeError, TypeError):
        return None


def _checkpoints(patches: Patches, witness: Witness) -> None:
    def loaded(result: Any, f: Any = None, *args: Any, **kwargs: Any) -> None:
        witness.note("load", file=_path(f))

    missed: set[str] = set()  # files that the script checked for, and that did not exist

    def asked(exists: bool, path: Any) -> None:
        if not exists and (file := _path(path)) is not None:
            missed.add(file)

    def saved(result: Any, obj: Any = None, f: Any = None, *args: Any, **kwargs: Any) -> None:
        file = _path(f)
        witness.note("save", file=file, missed=file in missed)

    def restored(result: Any, owner: Any, *args: Any, **kwargs: Any) -> None:
        witness.note("restore", of=type(owner).__name__)

    for owner, name, report in (
        *((os.path, "exists", asked), (os.path, "isfile", asked)),
        *((torch.nn.Module, "load_state_dict", restored), (torch.optim.Optimizer, "load_state_dict", restored)),
    ):
        patches.wrap(owner, name, functools.partial(_after, report=report, witness=witness))
    patches.replace(torch.load, _after(torch.load, loaded, witness))
    patches.replace(torch.save, _after(torch.save, saved, witness))


def _samplers(patches: Patches, witness: Witness, world: int) -> None:
    iterations: dict[int, int] = {}
    reported: set[int] = set()
    kept: list[Any] = []  # keeps samplers alive whose ids are keys
    iterate, set_epoch = DistributedSampler.__iter__, DistributedSampler.set_epoch

    @functools.wraps(set_epoch)
    def watched_set_epoch(self: Any, epoch: int) -> None:
        reported.add(id(self))
        set_epoch(self, epoch)

    @functools.wraps(iterate)
    def watched(self: Any) -> Any:
        if id(self) not in iterations:
            kept.append(self)
        number = iterations[id(self)] = iterations.get(id(self), 0) + 1
        if world == 1 and number > 1 and self.shuffle and id(self) not in reported:
            # A loader on one device would shuffle anew in each epoch, so the reference must do the same.
            set_epoch(self, self.epoch + 1)
        witness.guard(noted)(self, number)
        return iterate(self)

    def noted(sampler: Any, iteration: int) -> None:
        witness.note(
            "sampler",
            sampler=list(iterations).index(id(sampler)),
            iteration=iteration,
            set_epoch=id(sampler) in reported,
            shuffle=bool(sampler.shuffle),
            replicas=int(sampler.num_replicas),
            length=len(sampler.dataset),
            drop_last=bool(sampler.drop_last),
        )

    patches.set(DistributedSampler, "set_epoch", watched_set_epoch)
    patches.set(DistributedSampler, "__iter__", watched)


def _seeds(patches: Patches, witness: Witness) -> None:
    reported: list[int] = []

    def seeded(result: Any, *args: Any, **kwargs: Any) -> None:
        if not reported:
            reported.append(1)
            witness.note("seed")

    for function in (torch.manual_seed, torch.random.manual_seed):  # two, once torch._dynamo has been imported
        patches.replace(function, _after(function, seeded, witness))


def _groups(patches: Patches, witness: Witness) -> None:
    """Watch the default process group: a script that never makes it does not use several ranks.

    A forked child of the script that makes a process group is a rank that the script started itself.
    """
    if not torch.distributed.is_available():
        return
    from torch.distributed import distributed_c10d as c10d

    original = c10d.init_process_group

    @functools.wraps(original)
    def watched(*args: Any, **kwargs: Any) -> None:
        if witness.forked():
            witness.wait("starts")
        original(*args, **kwargs)
        witness.note("group", size=torch.distributed.get_world_size(), rank=torch.distributed.get_rank())

    patches.replace(original, watched)


def _starts(patches: Patches, witness: Witness, world: int) -> None:
    """Watch `torch.multiprocessing.spawn`: this process becomes its rank if it starts as many as there are here."""
    from torch.multiprocessing.spawn import spawn, start_processes

    def starting(
        fn: Callable[..., Any], args: Any = (), nprocs: int = 1, join: bool = True, *rest: Any, **options: Any
    ) -> Any:
        if nprocs != world or witness.forked():
            witness.wait("starts")
        witness.note("spawned")
        fn(rank_and_world()[0], *args)
        return None if join else _Joined()

    patches.replace(spawn, starting)
    patches.replace(start_processes, starting)


class _Joined:
    """Takes the place of the processes that `spawn` did not start."""

    processes: tuple[Any, ...] = ()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        return True


def _temporary(patches: Patches, witness: Witness) -> None:
    """Record the temporary directory of `multiprocessing`, because a killed process does not remove it."""
    recorded: list[str] = []

    def told(directory: str) -> None:
        if not recorded:
            recorded.append(directory)
            witness.note("temporary", directory=directory)

    patches.wrap(multiprocessing.util, "get_temp_dir", functools.partial(_after, report=told, witness=witness))


def _autocast(patches: Patches, witness: Witness) -> None:
    """Record that the script uses autocast, or turn autocast and scalers off if the command asks for float32."""
    off = FLOAT32 in os.environ
    reported: list[str] = []

    def made(result: Any, mode: Any, *args: Any, **kwargs: Any) -> None:
        if off:
            mode._enabled = False
        elif mode._enabled and not reported:
            reported.append(mode.device)
            witness.note("autocast", device=mode.device)

    patches.wrap(torch.amp.autocast, "__init__", functools.partial(_after, report=made, witness=witness))
    if off:
        patches.wrap(torch.amp.GradScaler, "__init__", functools.partial(_after, report=made, witness=witness))


def _random(patches: Patches, witness: Witness) -> None:
    recorded: list[float] = []

    def dropped(result: Any, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> None:
        if p and training and torch.is_grad_enabled() and not recorded:
            recorded.append(p)
            witness.note("random", what=f"dropout(p={p:g})", line="")

    patches.wrap(torch.nn.functional, "dropout", functools.partial(_after, report=dropped, witness=witness))


def _losses(patches: Patches, witness: Witness) -> None:
    """Keep the number that each mean over labels divides by."""

    def counted(
        result: Any, input: Any, target: Any, weight: Any = None, *args: Any, ignore_index: int = -100, **options: Any
    ) -> None:
        mean = options.get("reduction", "mean") == "mean" and torch.is_grad_enabled() and not is_capturing()
        labels = readable(target) if mean else None
        if labels is not None and not is_distributed(labels) and not labels.is_floating_point():
            kept = labels != ignore_index
            witness.labels.append(kept.sum() if weight is None else weight.detach()[labels[kept]].sum())

    for name in ("cross_entropy", "nll_loss"):
        patches.wrap(torch.nn.functional, name, functools.partial(_after, report=counted, witness=witness))
