"""`mgpu-check doctor`: say whether ranks can run on this machine, and what to change.

It reads the facts about the machine, and judges them: each probe is a function of the facts, and says what to do.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import errno
import json
import os
import platform
import re
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from mgpu_check.cli.codes import RIGHT, WRONG, Parser
from mgpu_check.devices.inventory import Inventory, take_inventory
from mgpu_check.errors import RankFailure, RankHang
from mgpu_check.plugin.device_leases import TooFewDevices
from mgpu_check.plugin.session import GpuSession
from mgpu_check.processes.machine import available_memory, limit_of_group
from mgpu_check.settings import resolve

if TYPE_CHECKING:
    from mgpu_check import Rank


PACKAGES = ("mgpu-check", "torch", "pytest", "pytest-xdist", "hypothesis")
_PORT_OF_TORCHRUN = 29500


@dataclass(frozen=True)
class GpuFacts:
    """The GPUs, as one process sees them."""

    inventory: Inventory  # the devices, and the state of their driver
    nccl: str = ""  # version of NCCL; "" without it
    cuda: str = ""  # version of CUDA, or of ROCm, that torch was built for; "" for a CPU build
    driver: str = ""  # version of NVIDIA's driver; "" if it is unknown
    separate_pairs: tuple[tuple[int, int], ...] = ()  # pairs of devices that cannot read each other's memory directly


@dataclass(frozen=True)
class HostFacts:
    """The facts about a host."""

    versions: Mapping[str, str]  # package -> version; "" if the package is missing
    python: str
    plugin: bool  # pytest loads the plugin by its entry point
    cores: int  # processors that this process may use
    memory: int | None  # available bytes of memory; None if unknown
    shared_memory: int | None  # free bytes of /dev/shm; None without it
    temporary: tuple[str, int | None]  # directory for temporary files -> its free bytes; None if it cannot be written
    open_files: int | None  # the soft limit of open files per process; None if unlimited
    processes: int | None  # the limit of processes and threads; None if unlimited
    host: str
    address: str  # the host's name resolves to this address; "" if it does not
    interfaces: tuple[str, ...]  # names of the network interfaces
    port: int | None  # where torchrun's ranks would meet, if another process listens there; None if it is free
    environment: Mapping[str, str] = field(repr=False)


def of_host() -> HostFacts:
    """Read the facts about this host. Does not import torch."""
    host = socket.gethostname()
    return HostFacts(
        versions={name: _known(partial(version, name), PackageNotFoundError) for name in PACKAGES},
        python=platform.python_version(),
        plugin=any(it.value.startswith("mgpu_check.") for it in entry_points(group="pytest11")),
        cores=len(os.sched_getaffinity(0)),
        memory=available_memory(),
        shared_memory=_free(Path("/dev/shm")),
        temporary=(tempfile.gettempdir(), _free(Path(tempfile.gettempdir()))),
        open_files=_limit(resource.RLIMIT_NOFILE),
        processes=min(filter(None, (_limit(resource.RLIMIT_NPROC), limit_of_group("pids.max"))), default=None),
        host=host,
        address=_known(lambda: str(socket.getaddrinfo(host, None)[0][4][0])),
        interfaces=tuple(name for _, name in socket.if_nameindex()),
        port=_taken(os.environ.get("MASTER_PORT", "")),
        environment=dict(os.environ),
    )


def of_devices() -> GpuFacts:
    """Read the facts about the GPUs. Imports torch, and initializes the driver."""
    import torch

    inventory = take_inventory()
    count = len(inventory.devices)
    pairs = [(source, target) for source in range(count) for target in range(count) if source != target]
    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    nccl_version = ".".join(map(str, torch.cuda.nccl.version())) if nccl else ""
    driver = version_of_driver(_known(lambda: Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")))
    separate = tuple(pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair))
    return GpuFacts(inventory, nccl_version, torch.version.cuda or torch.version.hip or "", driver, separate)


def _known(read: Callable[[], str], error: type[Exception] = OSError) -> str:
    """Return what `read` returns; "" if it raises."""
    try:
        return read()
    except error:
        return ""


def _limit(limit_type: int) -> int | None:
    soft, _ = resource.getrlimit(limit_type)
    return None if soft == resource.RLIM_INFINITY else soft


def _free(directory: Path) -> int | None:
    return shutil.disk_usage(directory).free if os.access(directory, os.W_OK) else None


def version_of_driver(text: str) -> str:
    """Return the version in the text of NVIDIA's kernel module, such as "580.159.04"; "" without one."""
    match = re.search(r"Module .*?\b(\d+\.\d[\d.]*)", text)
    return match[1] if match else ""


def _taken(text: str) -> int | None:
    """Return a port if another process listens there: `text`, or the default of torchrun."""
    port = int(text) if text.isdecimal() and 0 < int(text) < 1 << 16 else _PORT_OF_TORCHRUN
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return port if error.errno == errno.EADDRINUSE else None
    return None


_GIB, _MIB = 2**30, 2**20
_LEAST_TORCH = (2, 11)
_MEMORY_OF_RANK = 300 * _MIB  # private, of a rank that has run DistributedDataParallel, and room for a small model
_SHARED_OF_RANK = 64 * _MIB  # batches of loader workers, and NCCL's shared-memory transport
_FILES = 1024
_THREADS_OF_RANK = 64  # gloo, autograd and loader threads

State = Literal["ok", "warn", "bad"]

_HAZARDS = {
    "CUDA_LAUNCH_BLOCKING": "kernels run one after the other, so races stay hidden",
    "NCCL_P2P_DISABLE": "NCCL does not copy from GPU to GPU directly",
    "NCCL_IB_DISABLE": "NCCL does not use InfiniBand",
    "NCCL_SHM_DISABLE": "NCCL does not use shared memory",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "it changes how torch ends a collective that hangs",
    "TORCH_NCCL_BLOCKING_WAIT": "it changes how torch ends a collective that hangs",
    "PYTHONOPTIMIZE": "Python skips assert statements, so tests pass without checking",
}
"""Variables that change results, and how."""


@dataclass(frozen=True)
class Judgement:
    """The judgement of one fact."""

    state: State  # "bad" if ranks cannot run, or if results are wrong; "warn" if they may fail, or be slow
    subject: str
    fact: str
    advice: str = ""  # what to do; "" if nothing


def _versions(facts: HostFacts, _devices: GpuFacts, _gpus: int) -> Iterator[Judgement]:
    shown = ", ".join(f"{name} {facts.versions[name]}" for name in PACKAGES if facts.versions[name])
    torch = facts.versions["torch"]
    if not torch:
        yield Judgement("bad", "versions", f"torch is not installed ({shown})", "pip install torch")
    elif tuple(int(component) for component in torch.split("+")[0].split(".")[:2]) < _LEAST_TORCH:
        yield Judgement("bad", "versions", shown, "mgpu-check needs torch 2.11 or newer: pip install -U torch")
    else:
        yield Judgement("ok", "versions", f"Python {facts.python}, {shown}")


def _plugin(facts: HostFacts, _devices: GpuFacts, _gpus: int) -> Iterator[Judgement]:
    if facts.environment.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        fact = "PYTEST_DISABLE_PLUGIN_AUTOLOAD is set, so pytest does not load the plugin"
        yield Judgement("warn", "pytest", fact, "pytest -p mgpu_check")
    elif facts.plugin:
        yield Judgement("ok", "pytest", "loads the plugin")
    else:
        fact = "the plugin has no entry point in this environment"
        yield Judgement("bad", "pytest", fact, "install mgpu-check again with pip")


def _gpus(facts: HostFacts, devices: GpuFacts, _gpus: int) -> Iterator[Judgement]:
    inventory, mask = devices.inventory, devices.inventory.mask
    masked = f", {mask}={facts.environment[mask]!r}" if mask in facts.environment else ""
    if inventory.trouble:
        fact, _, advice = inventory.trouble.partition("\n")
        yield Judgement("bad", "GPUs", fact + masked, advice.strip())
    elif not inventory.devices:
        build = f"torch is built for CUDA {devices.cuda}" if devices.cuda else "torch is a CPU build"
        yield Judgement("ok", "GPUs", f"none is visible{masked}; {build}; --gpus=N --simulate works")
    else:
        models = ", ".join(sorted({device.name for device in inventory.devices}))
        driver = f", with driver {devices.driver}" if devices.driver else ""
        fact = f"{len(inventory.devices)} x {models}{driver}{masked}; torch is built for {devices.cuda}"
        yield Judgement("ok", "GPUs", fact)
        if devices.nccl:
            yield Judgement("ok", "NCCL", devices.nccl)
        else:
            yield Judgement("bad", "NCCL", "this build of torch has no NCCL", "install a CUDA build of torch from PyPI")


def _peers(_facts: HostFacts, devices: GpuFacts, _gpus: int) -> Iterator[Judgement]:
    if devices.separate_pairs:
        pairs = ", ".join(f"{source} to {target}" for source, target in devices.separate_pairs[:6])
        remainder = f" and {len(devices.separate_pairs) - 6} more" if len(devices.separate_pairs) > 6 else ""
        advice = "expected on GPUs without NVLink or behind different PCIe roots; else look at nvidia-smi topo -m"
        fact = f"copies go through the host: {pairs}{remainder}"
        yield Judgement("warn", "peer access", fact, f"{advice}, and at ACS in the firmware")


def _memory(facts: HostFacts, _devices: GpuFacts, gpus: int) -> Iterator[Judgement]:
    if facts.memory is None:
        return
    needed = gpus * _MEMORY_OF_RANK
    fact = f"{facts.memory / _GIB:.1f} GiB available; {gpus} ranks need about {needed / _GIB:.1f} GiB"
    if facts.memory >= needed:
        yield Judgement("ok", "memory", fact)
    else:
        yield Judgement("warn", "memory", fact, "the kernel may kill ranks: use fewer GPUs, or end other programs")


def _shared_memory(facts: HostFacts, _devices: GpuFacts, gpus: int) -> Iterator[Judgement]:
    needed, free = gpus * _SHARED_OF_RANK, facts.shared_memory
    if free is None:
        advice = "mount it, or run the container with --ipc=host"
        yield Judgement("bad", "/dev/shm", "is missing, or cannot be written", advice)
    elif free < needed:
        fact = f"{free / _MIB:.0f} MiB free; {gpus} ranks with loaders need about {needed / _MIB:.0f} MiB"
        yield Judgement("warn", "/dev/shm", fact, "run the container with --shm-size=1g or --ipc=host")
    else:
        yield Judgement("ok", "/dev/shm", f"{free / _GIB:.1f} GiB free")


def _temporary(facts: HostFacts, _devices: GpuFacts, _gpus: int) -> Iterator[Judgement]:
    directory, free = facts.temporary
    if free is None:
        yield Judgement("bad", "temporary files", f"{directory} cannot be written", "set TMPDIR to another directory")
    elif free < 100 * _MIB:
        fact = f"{directory} has {free / _MIB:.0f} MiB free"
        yield Judgement("warn", "temporary files", fact, "make room, or set TMPDIR")
    else:
        yield Judgement("ok", "temporary files", f"{directory}, {free / _GIB:.1f} GiB free")


def _limits(facts: HostFacts, _devices: GpuFacts, gpus: int) -> Iterator[Judgement]:
    if facts.open_files is not None and facts.open_files < _FILES:
        yield Judgement("warn", "open files", f"at most {facts.open_files} per process", f"ulimit -n {_FILES}")
    needed = gpus * _THREADS_OF_RANK
    if facts.processes is not None and facts.processes < needed:
        fact = f"at most {facts.processes} processes and threads; {gpus} ranks may need {needed}"
        yield Judgement("warn", "processes", fact, "raise ulimit -u, or pids.max of the container (--pids-limit)")
    if facts.cores < 2:
        yield Judgement("warn", "processors", "one processor: ranks run in turns, and timeouts may be reached early")
    else:
        yield Judgement("ok", "processors", f"{facts.cores}")


def _network(facts: HostFacts, devices: GpuFacts, _gpus: int) -> Iterator[Judgement]:
    if not facts.address:
        fact = f"the host name {facts.host!r} has no address, and gloo may not find one"
        yield Judgement("warn", "network", fact, "add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME")
    for variable in ("GLOO_SOCKET_IFNAME", *(["NCCL_SOCKET_IFNAME"] if devices.inventory.devices else [])):
        value = facts.environment.get(variable, "")
        wanted = [name.lstrip("=") for name in value.split(",") if name and not value.startswith("^")]
        # NCCL takes prefixes of names, and a port after a colon.
        missing = [name for name in wanted if not any(have.startswith(name.split(":")[0]) for have in facts.interfaces)]
        if missing:
            fact = f"{variable}={value}, but the interfaces are {', '.join(facts.interfaces)}"
            yield Judgement("bad", "network", fact, f"unset {variable}, or name one of them")


def _ports(facts: HostFacts, _devices: GpuFacts, _gpus: int) -> Iterator[Judgement]:
    if facts.port is None:
        yield Judgement("ok", "ports", "torchrun's port is free")
    else:
        fails = "a static rendezvous at this port fails"
        advice = "torchrun --standalone, or another port: torchrun --master-port=29501. The ranks of tests need no port"
        yield Judgement("warn", "ports", f"another process listens at port {facts.port}: {fails}", advice)


def _variables(facts: HostFacts, _devices: GpuFacts, _gpus: int) -> Iterator[Judgement]:
    for name, effect in _HAZARDS.items():
        if facts.environment.get(name, "") not in ("", "0"):
            yield Judgement("warn", "environment", f"{name}={facts.environment[name]}: {effect}", f"unset {name}")


PROBES: tuple[Callable[[HostFacts, GpuFacts, int], Iterator[Judgement]], ...] = (
    *(_versions, _plugin, _gpus, _peers, _memory, _shared_memory),
    *(_temporary, _limits, _network, _ports, _variables),
)


def examine(facts: HostFacts, devices: GpuFacts, gpus: int) -> list[Judgement]:
    """Judge the facts for a run on `gpus` GPUs, real or simulated."""
    return [judgement for probe in PROBES for judgement in probe(facts, devices, gpus)]


_SIMULATED = 4  # number of simulated GPUs to plan for, on a machine without GPUs

_TIMEOUT = "120"  # seconds; the first rank imports torch


def main(argv: Sequence[str]) -> int:
    """Print a line for each fact about this machine, and try a sum over ranks. Return 0, also with warnings; 1 if ranks
    cannot run; 4 for wrong usage."""
    parser = Parser(prog="mgpu-check doctor", description="Say whether ranks can run here, and what to change.")
    parser.add_argument("--gpus", type=_count, metavar="N", help="plan for N GPUs; default: all, or 4 simulated ones")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args(argv)

    facts = of_host()
    if facts.versions["torch"]:
        devices, tried = _try_ranks(options.gpus)
    else:
        devices, tried = GpuFacts(Inventory(())), []
    judgements = [*examine(facts, devices, options.gpus or len(devices.inventory.devices) or _SIMULATED), *tried]
    bad = any(judgement.state == "bad" for judgement in judgements)
    if options.json:
        print(json.dumps({"works": not bad, "judgements": list(map(dataclasses.asdict, judgements))}, indent=2))
    else:
        width = max(len(judgement.subject) for judgement in judgements)
        for judgement in judgements:
            print(f"{judgement.state:<4}  {judgement.subject:<{width}}  {judgement.fact}")
            if judgement.advice:
                print(f"{'':<{width + 8}}{judgement.advice}")
        print("ranks cannot run here: mend what is bad" if bad else "ranks can run here")
    return WRONG if bad else RIGHT


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GPUs; give 1 or more")
    return int(text)


def _try_ranks(gpus: int | None) -> tuple[GpuFacts, list[Judgement]]:
    """Look at the GPUs, and add up a tensor over two simulated ranks, and over one rank per GPU."""
    devices, judgements = _look()
    with contextlib.closing(_session(gpus="2", simulate="cpu")) as simulated:
        judgements += _sum(simulated, "2 simulated ranks")
    count = len(devices.inventory.devices)
    if gpus is not None and 0 < count < gpus:
        advice = f"use --gpus={count}, or --simulate"
        judgements.append(Judgement("bad", "GPUs", f"{count} of {gpus} are visible", advice))
    if count:
        with contextlib.closing(_session(gpus=str(min(gpus or count, count)))) as real:
            try:
                real.count_devices()
            except TooFewDevices as error:  # another process has taken or masked some meanwhile
                judgements.append(Judgement("bad", "ranks", str(error)))
            else:
                judgements += _sum(real, f"{real.settings.gpus} ranks on GPUs")
    return devices, judgements


def _session(**options: str) -> GpuSession:
    return GpuSession(resolve({**options, "rank_timeout": _TIMEOUT}, {}, {}))


def _look() -> tuple[GpuFacts, list[Judgement]]:
    """Look at the GPUs in a process of its own, because a sick driver may hang or crash it."""
    with contextlib.closing(_session(gpus="1")) as session:
        try:
            return session.pool.in_fresh_process(of_devices), []
        except (RankFailure, RankHang) as error:
            return GpuFacts(Inventory(())), [Judgement("bad", "GPUs", _first_line(error), "does nvidia-smi answer?")]


def _sum(session: GpuSession, who: str) -> list[Judgement]:
    started = time.perf_counter()
    try:
        session.begin_test("mgpu-check doctor")
        sums = session.pool.run(_all_reduce)
        session.end_test(failed=False)
    except (RankFailure, RankHang) as error:
        return [Judgement("bad", "ranks", f"{who}: {_first_line(error)}", "the whole report: mgpu-check -k fixtures")]
    seconds = time.perf_counter() - started
    size = len(sums)
    expected = [float(size * (size + 1) // 2)] * size
    if sums != expected:
        return [Judgement("bad", "ranks", f"{who} add up to {sums}, and should to {expected}", "mgpu-check accept")]
    return [Judgement("ok", "ranks", f"{who} started, and added up a tensor, in {seconds:.1f} s")]


def _all_reduce(rank: Rank) -> float:
    import torch
    import torch.distributed as dist

    x = torch.tensor(rank.index + 1.0).to(rank.device)
    dist.all_reduce(x)
    return float(x)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
