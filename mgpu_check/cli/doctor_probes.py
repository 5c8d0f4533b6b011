"""Judge the facts about a machine: each probe is a function of the facts, and says what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from mgpu_check.cli.doctor_facts import PACKAGES, GpuFacts, HostFacts

_GIB, _MIB = 2**30, 2**20
_LEAST_TORCH = (2, 11)
_MEMORY_OF_RANK = (
    300 * _MIB
)  # private memory of a rank that has run DistributedDataParallel, and room for a small model
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
    """The judgement of one fact.

    Attributes:
        state: "bad" if ranks cannot run, or if results are wrong; "warn" if they may fail, or be slow.
        advice: what to do; "" if nothing.
    """

    state: State
    subject: str
    fact: str
    advice: str = ""


def _versions(facts: HostFacts, _devices: GpuFacts, _gpus: int) -> Iterator[Judgement]:
    shown = ", ".join(f"{name} {facts.versions[name]}" for name in PACKAGES if facts.versions[name])
    torch = facts.versions["torch"]
    if not torch:
        yield Judgement("bad", "versions", f"torch is not installed ({shown})", "pip install torch")
    elif tuple(int(part) for part in torch.split("+")[0].split(".")[:2]) < _LEAST_TORCH:
        yield Judgement("bad", "versions", shown, "mgpu-check needs torch 2.11 or newer: pip install -U torch")
    else:
        yield Judgement("ok", "versions", f"Python {facts.python}, {shown}")


def _plugin(facts: HostFacts, _devices: GpuFacts, _gpus: int) -> Iterator[Judgement]:
    if facts.environment.get("PYTEST_DISABLE_PLUGIN_AUTOLOAD"):
        yield Judgement(
            "warn",
            "pytest",
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD is set, so pytest does not load the plugin",
            "pytest -p mgpu_check",
        )
    elif facts.plugin:
        yield Judgement("ok", "pytest", "loads the plugin")
    else:
        yield Judgement(
            "bad", "pytest", "the plugin has no entry point in this environment", "install mgpu-check again with pip"
        )


def _gpus(facts: HostFacts, devices: GpuFacts, _gpus: int) -> Iterator[Judgement]:
    found, mask = devices.inventory, devices.inventory.mask
    masked = f", {mask}={facts.environment[mask]!r}" if mask in facts.environment else ""
    if found.trouble:
        fact, _, advice = found.trouble.partition("\n")
        yield Judgement("bad", "GPUs", fact + masked, advice.strip())
    elif not found.devices:
        build = f"torch is built for CUDA {devices.cuda}" if devices.cuda else "torch is a CPU build"
        yield Judgement("ok", "GPUs", f"none is visible{masked}; {build}; --gpus=N --simulate works")
    else:
        names = ", ".join(sorted({device.name for device in found.devices}))
        driver = f", with driver {devices.driver}" if devices.driver else ""
        fact = f"{len(found.devices)} x {names}{driver}{masked}; torch is built for {devices.cuda}"
        yield Judgement("ok", "GPUs", fact)
        if not devices.nccl:
            yield Judgement("bad", "NCCL", "this build of torch has no NCCL", "install a CUDA build of torch from PyPI")
        else:
            yield Judgement("ok", "NCCL", devices.nccl)


def _peers(_facts: HostFacts, devices: GpuFacts, _gpus: int) -> Iterator[Judgement]:
    if devices.apart:
        pairs = ", ".join(f"{one} to {other}" for one, other in devices.apart[:6])
        more = f" and {len(devices.apart) - 6} more" if len(devices.apart) > 6 else ""
        yield Judgement(
            "warn",
            "peer access",
            f"copies go through the host: {pairs}{more}",
            "expected on GPUs without NVLink or behind different PCIe roots; else look at nvidia-smi topo -m, and at "
            "ACS in the firmware",
        )


def _memory(facts: HostFacts, _devices: GpuFacts, gpus: int) -> Iterator[Judgement]:
    if facts.memory is None:
        return
    needed = gpus * _MEMORY_OF_RANK
    state: State = "ok" if facts.memory >= needed else "warn"
    yield Judgement(
        state,
        "memory",
        f"{facts.memory / _GIB:.1f} GiB available; {gpus} ranks need about {needed / _GIB:.1f} GiB",
        "" if state == "ok" else "the kernel may kill ranks: use fewer GPUs, or end other programs",
    )


def _shared_memory(facts: HostFacts, _devices: GpuFacts, gpus: int) -> Iterator[Judgement]:
    needed = gpus * _SHARED_OF_RANK
    if facts.shared_memory is None:
        yield Judgement(
            "bad", "/dev/shm", "is missing, or cannot be written", "mount it, or run the container with --ipc=host"
        )
    elif facts.shared_memory < needed:
        yield Judgement(
            "warn",
            "/dev/shm",
            f"{facts.shared_memory / _MIB:.0f} MiB free; {gpus} ranks with loaders need about {needed / _MIB:.0f} MiB",
            "run the container with --shm-size=1g or --ipc=host",
        )
    else:
        yield Judgement("ok", "/dev/shm", f"{facts.shared_memory / _GIB:.1f} GiB free")


def _temporary(facts: HostFacts, _devices: GpuFacts, _gpus: int) -> Iterator[Judgement]:
    directory, free = facts.temporary
    if free is None:
        yield Judgement("bad", "temporary files", f"{directory} cannot be written", "set TMPDIR to another directory")
    elif free < 100 * _MIB:
        yield Judgement(
            "warn", "temporary files", f"{directory} has {free / _MIB:.0f} MiB free", "make room, or set TMPDIR"
        )
    else:
        yield Judgement("ok", "temporary files", f"{directory}, {free / _GIB:.1f} GiB free")


def _limits(facts: HostFacts, _devices: GpuFacts, gpus: int) -> Iterator[Judgement]:
    if facts.open_files is not None and facts.open_files < _FILES:
        yield Judgement("warn", "open files", f"at most {facts.open_files} per process", f"ulimit -n {_FILES}")
    needed = gpus * _THREADS_OF_RANK
    if facts.processes is not None and facts.processes < needed:
        yield Judgement(
            "warn",
            "processes",
            f"at most {facts.processes} processes and threads; {gpus} ranks may need {needed}",
            "raise ulimit -u, or pids.max of the container (--pids-limit)",
        )
    if facts.cores < 2:
        yield Judgement("warn", "processors", "one processor: ranks run in turns, and timeouts may be reached early")
    else:
        yield Judgement("ok", "processors", f"{facts.cores}")


def _network(facts: HostFacts, devices: GpuFacts, _gpus: int) -> Iterator[Judgement]:
    if not facts.address:
        yield Judgement(
            "warn",
            "network",
            f"the host name {facts.host!r} has no address, and gloo may not find one",
            "add the name to /etc/hosts, or set GLOO_SOCKET_IFNAME",
        )
    for variable in ("GLOO_SOCKET_IFNAME", *["NCCL_SOCKET_IFNAME"] * bool(devices.inventory.devices)):
        value = facts.environment.get(variable, "")
        wanted = [name.lstrip("=") for name in value.split(",") if name and not value.startswith("^")]
        # NCCL takes prefixes of names, and a port after a colon.
        missing = [name for name in wanted if not any(have.startswith(name.split(":")[0]) for have in facts.interfaces)]
        if missing:
            yield Judgement(
                "bad",
                "network",
                f"{variable}={value}, but the interfaces are {', '.join(facts.interfaces)}",
                f"unset {variable}, or name one of them",
            )


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
    _versions,
    _plugin,
    _gpus,
    _peers,
    _memory,
    _shared_memory,
    _temporary,
    _limits,
    _network,
    _ports,
    _variables,
)


def examine(facts: HostFacts, devices: GpuFacts, gpus: int) -> list[Judgement]:
    """Judge the facts for a run on `gpus` GPUs, real or simulated."""
    return [judgement for probe in PROBES for judgement in probe(facts, devices, gpus)]
