"""Record calls in the script's process that may explain a difference. The calls otherwise behave as before.

Errors of the recorder stay out of the script.

Recorded are gradient clipping, checkpoints, samplers, seeds, dropout, gradient scaling, process groups, processes that
the script starts, and the temporary directory of these processes. The functions are replaced as soon as torch is
imported, under all of their names in torch, before the script can import them by name. Each mesh and group of ranks is
recorded: they divide the work.

Ranks meet at the store of this comparison, even if the script sets another address. Each rank is launched as by
torchrun, whose agent holds the store, so no rank creates one. A rank that tries to reach the store at another address
would wait until it times out: torch takes every store for that of the agent (pytorch/pytorch#192113).
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing.util
import os
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.utils import clip_grad
from torch.utils.data import get_worker_info
from torch.utils.data.distributed import DistributedSampler

from mgpu_check.compare.in_script.summaries import whole
from mgpu_check.compare.process_watch import group_size
from mgpu_check.numerics.placement import Coordinates
from mgpu_check.processes.environments import FLOAT32, rank_and_world
from mgpu_check.processes.tracebacks import calling_line
from mgpu_check.torch_hooks.patches import Patches, around
from mgpu_check.torch_hooks.tensors import is_capturing, is_distributed, readable


class Note(Protocol):
    def __call__(self, event: str, **fields: object) -> None: ...


Guard = Callable[[Callable[..., Any]], Callable[..., Any]]
"""Wraps a function of the recorder: its errors stay out of the script, and methods of the user's tensors out of it."""
_HERE = str(Path(__file__).parents[2])


def guard_with(broken: Callable[[str, str], None]) -> Guard:
    """Return a guard, which calls `broken` with an error and its place."""

    def guard(record: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(record)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            try:
                with torch._C.DisableTorchFunctionSubclass():
                    return record(*args, **kwargs)
            except Exception as error:
                last = next(f for f in reversed(traceback.extract_tb(error.__traceback__)) if _HERE in f.filename)
                return broken(f"{type(error).__name__}: {error}", f"{last.filename}:{last.lineno}")

        return guarded

    return guard


class Witness(Protocol):
    """The receiver of watched calls: the `ScriptRecorder` of the process, for as long as the process lives."""

    guard: Guard
    labels: list[torch.Tensor]  # the number of labels of each loss since the last step

    @property
    def note(self) -> Note:
        """Record an event."""

    def forked(self) -> bool:
        """Return whether this process was forked from the recorded one."""

    def take_over(self) -> bool:
        """Record this process, which the script has started. Return False if another one has trained already."""

    def wait(self, event: str, **fields: object) -> None:
        """Record the event, and wait until this process is ended."""

    def scaled_step(self, step: Callable[[], Any]) -> Any:
        """Run a step of a `GradScaler`, which may skip the optimizer step."""


def in_a_group() -> bool:
    """Return whether this process belongs to a default process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def trains_alone(module: nn.Module) -> bool:
    """Return whether a call of a module in a process that the script has started may be training, not loading."""
    may_train = torch.is_grad_enabled() and get_worker_info() is None
    return may_train and next(module.parameters(), None) is not None


def generators() -> tuple[list[int], ...]:
    """Return the states of the random number generators of the CPU and of the current GPU."""
    states = [torch.get_rng_state()]
    if torch.cuda.is_initialized():
        states.append(torch.cuda.get_rng_state())
    return tuple(state.tolist() for state in states)


def install(witness: Witness, world: int) -> Patches:
    """Report watched calls to `witness`, in a run with `world` ranks. Return the patches, which can undo this."""
    calls = _Calls(witness, world)

    def after(report: Callable[..., None]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Make a wrapper, whose calls are followed by one of `report` with the result and the arguments."""
        report = witness.guard(report)

        def call(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)
            report(result, *args, **kwargs)
            return result

        return around(call)

    reports: tuple[tuple[Any, str, Callable[..., None]], ...] = (
        *((os.path, "exists", calls.asked), (os.path, "isfile", calls.asked)),
        *(
            (torch.nn.Module, "load_state_dict", calls.restored),
            (torch.optim.Optimizer, "load_state_dict", calls.restored),
        ),
        *((torch.nn.functional, "cross_entropy", calls.counted), (torch.nn.functional, "nll_loss", calls.counted)),
        (torch.nn.functional, "dropout", calls.dropped),
        (torch.amp.autocast, "__init__", calls.cast),
        *([(torch.amp.GradScaler, "__init__", calls.cast)] if calls.float32 else ()),
        (multiprocessing.util, "get_temp_dir", calls.told_directory),
    )
    patches = Patches(sparing="mgpu_check")
    for owner, name, report in reports:
        patches.wrap(owner, name, after(report))
    for function, report in (
        *((clip_grad.clip_grad_norm_, calls.clipped), (torch.load, calls.loaded), (torch.save, calls.saved)),
        # Two functions: torch._dynamo wraps that of `torch` when it is imported (torch/_dynamo/__init__.py, 2.13).
        *((torch.manual_seed, calls.seeded), (torch.random.manual_seed, calls.seeded)),
    ):
        patches.replace(function, after(report)(function))
    patches.wrap(DistributedSampler, "set_epoch", around(calls.set_epoch))
    patches.wrap(DistributedSampler, "__iter__", around(calls.iterate))
    patches.wrap(torch.amp.GradScaler, "step", around(calls.scaled))
    if torch.distributed.is_available():
        from torch.distributed import distributed_c10d as c10d

        patches.replace(c10d.init_process_group, around(calls.make_group)(c10d.init_process_group))
    from torch.multiprocessing.spawn import spawn, start_processes

    for function in (spawn, start_processes):
        patches.replace(function, around(calls.start)(function))
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        # With this variable alone, a function compiled with fullgraph=True raises "found no compiled frames"
        # (torch/_dynamo/eval_frame.py, compile_wrapper, torch 2.13).
        patches.replace(torch.compile, lambda model=None, **options: (lambda f: f) if model is None else model)
    patches.apply()
    return patches


def _path(file: Any) -> str | None:
    try:
        return os.path.realpath(os.fspath(file) if isinstance(file, (str, os.PathLike)) else file.name)
    except (AttributeError, TypeError):
        return None


class _Calls:
    """The reports of watched calls. Most methods take the result of a call, and its arguments.
    `install` makes it once for a process. The patched functions call it for as long as the process lives."""

    def __init__(self, witness: Witness, world: int) -> None:
        self._witness, self._world = witness, world
        self.float32 = FLOAT32 in os.environ
        self._told: set[str] = set()
        self._missed: set[str] = set()  # files that the script checked for, and that did not exist
        self._set_epoch = DistributedSampler.set_epoch
        self._iterations: dict[int, int] = {}
        self._epoch_set: set[int] = set()
        self._samplers: list[Any] = []  # keeps samplers alive whose ids are keys

    def _note_once(self, event: str, **fields: object) -> None:
        if event not in self._told:
            self._told.add(event)
            self._witness.note(event, **fields)

    def clipped(self, norm: Any, parameters: Any, max_norm: float = 0.0, *args: Any, **kwargs: Any) -> None:
        value = whole(norm) if isinstance(norm, torch.Tensor) else norm
        if value is not None:
            self._witness.note("clip", norm=float(value), most=float(max_norm))

    def loaded(self, result: Any, f: Any = None, *args: Any, **kwargs: Any) -> None:
        self._witness.note("load", file=_path(f))

    def asked(self, exists: bool, path: Any) -> None:
        if not exists and (file := _path(path)) is not None:
            self._missed.add(file)

    def saved(self, result: Any, obj: Any = None, f: Any = None, *args: Any, **kwargs: Any) -> None:
        file = _path(f)
        self._witness.note("save", file=file, missed=file in self._missed)

    def restored(self, result: Any, owner: Any, *args: Any, **kwargs: Any) -> None:
        self._witness.note("restore", of=type(owner).__name__)

    def seeded(self, result: Any, *args: Any, **kwargs: Any) -> None:
        self._note_once("seed")

    def told_directory(self, directory: str) -> None:
        """Record the temporary directory of `multiprocessing`, because a killed process does not remove it."""
        self._note_once("temporary", directory=directory)

    def cast(self, result: Any, mode: Any, *args: Any, **kwargs: Any) -> None:
        """Record that the script uses autocast, or turn autocast and scalers off if the command asks for float32."""
        if self.float32:
            mode._enabled = False
        elif mode._enabled:
            self._note_once("autocast", device=mode.device)

    def dropped(self, result: Any, input: Any, p: float = 0.5, training: bool = True, inplace: bool = False) -> None:
        if p and training and torch.is_grad_enabled():
            self._note_once("random", what=f"dropout(p={p:g})", line="")

    def counted(
        self,
        result: Any,
        input: Any,
        target: Any,
        weight: Any = None,
        *args: Any,
        ignore_index: int = -100,
        **options: Any,
    ) -> None:
        """Keep the number that each mean over labels divides by."""
        mean = options.get("reduction", "mean") == "mean" and torch.is_grad_enabled() and not is_capturing()
        labels = readable(target) if mean else None
        if labels is not None and not is_distributed(labels) and not labels.is_floating_point():
            kept = labels != ignore_index
            self._witness.labels.append(kept.sum() if weight is None else weight.detach()[labels[kept]].sum())

    def set_epoch(self, original: Callable[..., None], sampler: Any, epoch: int) -> None:
        self._epoch_set.add(id(sampler))
        original(sampler, epoch)

    def iterate(self, original: Callable[..., Any], sampler: Any) -> Any:
        if id(sampler) not in self._iterations:
            self._samplers.append(sampler)
        number = self._iterations[id(sampler)] = self._iterations.get(id(sampler), 0) + 1
        if self._world == 1 and number > 1 and sampler.shuffle and id(sampler) not in self._epoch_set:
            # A loader on one device would shuffle anew in each epoch, so the reference must do the same. A sampler has
            # one order until its epoch is set: torch/utils/data/distributed.py, __iter__, torch 2.13.
            self._set_epoch(sampler, sampler.epoch + 1)
        self._witness.guard(self._note_sampler)(sampler, number)
        return original(sampler)

    def _note_sampler(self, sampler: Any, iteration: int) -> None:
        self._witness.note(
            "sampler",
            sampler=list(self._iterations).index(id(sampler)),
            iteration=iteration,
            set_epoch=id(sampler) in self._epoch_set,
            shuffle=bool(sampler.shuffle),
            replicas=int(sampler.num_replicas),
            length=len(sampler.dataset),
            drop_last=bool(sampler.drop_last),
        )

    def scaled(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._witness.scaled_step(lambda: step(*args, **kwargs))

    def make_group(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Watch the default process group: a script that never makes it does not use several ranks.
        A forked child of the script that makes a process group is a rank that the script started itself."""
        if self._witness.forked():
            size = group_size(args, kwargs)
            if self._world > 1 or size > 1 or not self._witness.take_over():
                self._witness.wait("starts", size=size)
        original(*args, **kwargs)
        self._witness.note("group", size=torch.distributed.get_world_size(), rank=torch.distributed.get_rank())

    def start(
        self,
        original: Any,
        fn: Callable[..., Any],
        args: Any = (),
        nprocs: int = 1,
        join: bool = True,
        *rest: Any,
        **options: Any,
    ) -> Any:
        """Watch `torch.multiprocessing.spawn`: this process becomes its rank if it starts as many as there are here."""
        if nprocs != self._world or self._witness.forked():
            self._witness.wait("starts", size=nprocs)
        self._witness.note("spawned")
        fn(rank_and_world()[0], *args)
        return None if join else _Joined()


class _Joined:
    """Takes the place of the processes that `spawn` did not start."""

    processes: tuple[Any, ...] = ()

    def join(self, timeout: float | None = None, grace_period: float | None = None) -> bool:
        return True


def install_meshes(note: Note) -> Coordinates:
    """Record "mesh" for each mesh with named axes, and "subgroup" for each group with a list of ranks. Return axis ->
    (index of this rank, size). "" is the world. The axes of a mesh are added when the script makes it."""
    coordinates: dict[str, tuple[int, int]] = {"": rank_and_world()}
    if not torch.distributed.is_available():
        return coordinates
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.device_mesh import DeviceMesh

    within: list[int] = []  # not empty while a mesh is made: the groups that it makes are its axes

    def make_mesh(original: Callable[..., None], mesh: Any, *args: Any, **kwargs: Any) -> None:
        within.append(1)
        try:
            original(mesh, *args, **kwargs)
        finally:
            within.pop()
        if not within and (axes := _axes(mesh)):
            for axis, index, size in axes:
                coordinates.setdefault(axis, (index, size))
            note("mesh", axes=axes)

    def make_group(original: Callable[..., Any], ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        result = original(ranks, *args, **kwargs)
        if ranks is not None and not within:
            note("subgroup", ranks=sorted(map(int, ranks)))
        return result

    patches = Patches(sparing="mgpu_check")
    patches.wrap(DeviceMesh, "__init__", around(make_mesh))
    patches.replace(c10d.new_group, around(make_group)(c10d.new_group))
    patches.apply()
    return coordinates


def _axes(mesh: Any) -> list[tuple[str, int, int]]:
    """Return name, index of this rank and size of each axis of a root mesh; empty for a submesh."""
    if getattr(mesh, "_root_mesh", None) is not None or not mesh.mesh_dim_names:
        return []
    coordinate = mesh.get_coordinate() or ()
    axes = enumerate(mesh.mesh_dim_names if coordinate else ())
    return [(name, int(coordinate[dim]), int(mesh.size(dim))) for dim, name in axes]


_LOCAL = ("localhost", "127.0.0.1", "::1")

Places = Mapping[str, tuple[str, int]]  # environment variable -> file and line that set it


def install_meeting(note: Note, store: tuple[str, int], places: Places) -> None:
    """Redirect the ranks of the whole group to `store`; record "led" if the script set another address.
    `places`: filled while the script sets variables, and read when the script makes the group."""
    if not torch.distributed.is_available():
        return
    # Imported by name: a function `rendezvous` hides the module (torch/distributed/__init__.py, torch 2.13).
    rendezvous: Any = importlib.import_module("torch.distributed.rendezvous")
    ours = rank_and_world()

    def lead(original: Any, hostname: str, port: int, rank: int, world_size: int, *args: Any, **kwargs: Any) -> Any:
        at_store = port == store[1] and hostname in _LOCAL
        if not at_store and (rank, world_size) == ours and rendezvous._torchelastic_use_agent_store():
            meant = {"MASTER_PORT": (port, store[1]), "MASTER_ADDR": (hostname, store[0])}
            changed = [name for name, (own, wanted) in meant.items() if own != wanted]
            variable = next((name for name in changed if os.environ.get(name) == str(meant[name][0])), None)
            file, line = places.get(variable or "") or calling_line()
            note("led", address=f"{hostname}:{port}", variable=variable, file=file, line=line)
            hostname, port = store
            own = {name: os.environ.get(name, "") for name in meant}
            # An agent's store is where they say (torch/distributed/rendezvous.py, torch 2.14).
            os.environ.update(MASTER_ADDR=hostname, MASTER_PORT=str(port))
            try:
                return original(hostname, port, rank, world_size, *args, **kwargs)
            finally:
                os.environ.update(own)
        # The store listens at one address of this machine, and torchrun's at all.
        return original(store[0] if at_store else hostname, port, rank, world_size, *args, **kwargs)

    patches = Patches(sparing="mgpu_check")
    patches.replace(rendezvous._create_c10d_store, around(lead)(rendezvous._create_c10d_store))
    patches.apply()
