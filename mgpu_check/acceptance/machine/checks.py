"""Check a host: its cores and memory, what its kernel says before and after a run, and the paths that NCCL takes.

What the kernel says of NICs, PCIe slots and memory controllers is read without root. Every core computes the same, and
the cores vote. Memory holds patterns while copies to and from the GPUs run. The debug log of NCCL names the paths
between GPUs, which are compared with the paths that the hardware has. `SimulatedHost` has such files and such a log.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_check.acceptance.comparison import LEAST_PEERS
from mgpu_check.acceptance.run_report import Gpu
from mgpu_check.devices.observations import Observation, Outcome, Subject, Work
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.processes.machine import available_memory

if TYPE_CHECKING:
    import torch


_PORT = ("state", "rate", "link_layer")
PORT_COUNTERS = (
    *("link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors"),
    *("local_link_integrity_errors", "excessive_buffer_overrun_errors"),
)
_NET = ("operstate", "speed", "carrier_down_count", "statistics/rx_crc_errors", "statistics/tx_carrier_errors")
_PCI = (
    *("current_link_speed", "current_link_width", "max_link_speed", "max_link_width", "numa_node"),
    *("aer_dev_correctable", "aer_dev_nonfatal", "aer_dev_fatal"),
)
_ACTIVE = "4: ACTIVE"
_SLOT = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-9a-f]")
_VENDORS = ("0x10de", "0x1002")  # makers of GPUs
_ETHERNET = 1  # `ARPHRD_ETHER`: the type of an interface that is no InfiniBand and no tunnel
_ACS = 0x0D  # PCI Express Base Specification: the id of the capability Access Control Services
_REDIRECTS = 0b11100
"""Bits of its control register that send traffic between peers up to the root: request and completion redirect, and
upstream forwarding."""


@dataclass(frozen=True)
class Component:
    kind: str  # "infiniband", "ethernet", "pci" or "memory"; "host" for the host itself
    name: str
    model: str = ""  # components of one kind and model are alike
    slots: tuple[str, ...] = ()  # PCI addresses from the root port to the device
    # content of its files; without files that are absent or cannot be read
    values: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def is_up(self) -> bool:
        return self.values.get("state") == _ACTIVE or self.values.get("operstate") == "up"


KernelFacts = Mapping[str, Component]  # components by name


def read_kernel(root: Path = Path("/"), allowed: Collection[int] | None = None) -> dict[str, Component]:
    """Return the components of this host, from ``sys`` and ``proc`` in `root`. `allowed` are the cores that this
    process may use; by default the kernel names them."""
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    system = root / "sys"
    components = []
    for port in sorted(system.glob("class/infiniband/*/ports/*")):
        card = port.parents[1]
        values = _values(port, _PORT) | _values(port / "counters", PORT_COUNTERS)
        model = f"{_value(card / 'hca_type')} {values.get('link_layer', '')}"
        name = f"{card.name} port {port.name}"
        components.append(Component("infiniband", name, model, _slots(card / "device"), values))
    for net in sorted(system.glob("class/net/*")):
        if (net / "device").exists() and _value(net / "type") == _ETHERNET:
            model = f"{_value(net / 'device' / 'vendor')} {_value(net / 'device' / 'device')}"
            components.append(Component("ethernet", net.name, model, _slots(net / "device"), _values(net, _NET)))
    for controller in sorted(system.glob("devices/system/edac/mc/mc*")):
        components.append(Component("memory", controller.name, "", (), _values(controller, ("ce_count", "ue_count"))))
    nics = {component.slots[-1] for component in components if component.slots}
    devices = {device.name: device for device in sorted(system.glob("bus/pci/devices/*"))}
    displays = {slot for slot, device in devices.items() if str(_value(device / "class")).startswith("0x03")}
    gpus = {slot for slot in displays if _value(devices[slot] / "vendor") in _VENDORS}
    wanted = {slot for name in nics | gpus for slot in _slots(devices.get(name, Path("/none")))}
    for slot in sorted(wanted & devices.keys()):
        model = "gpu" if slot in gpus else "nic" if slot in nics else "bridge"
        values = _of_device(root, devices[slot], model, allowed)
        components.append(Component("pci", slot, model, _slots(devices[slot]), values))
    nodes = len(list(system.glob("devices/system/node/node[0-9]*")))
    components.append(Component("host", "host", values={"nodes": nodes}))
    return {component.name: component for component in components}


def _of_device(root: Path, device: Path, model: str, allowed: Collection[int]) -> dict[str, str | int]:
    values = _values(device, _PCI)
    if model == "bridge":
        return values | _acs(device / "config")
    if model == "gpu":
        ranges = str(_value(device / "local_cpulist") or "").split(",")
        if cores := {core for cpu_range in ranges for core in _range(cpu_range)}:
            values["near"] = len(cores & set(allowed))
        group = (device / "iommu_group").resolve().name
        if (device / "iommu_group").exists() and (iommu := _value(root / "sys/kernel/iommu_groups" / group / "type")):
            values["iommu"] = iommu
        text = _text(root / "proc/driver/nvidia/gpus" / device.name / "information") or ""
        if match := re.search(r"GPU Firmware:\s*(\S+)", text):
            values["gsp"] = match[1]
    return values


def _range(text: str) -> range:
    start, _, end = text.strip().partition("-")
    return range(int(start), int(end or start) + 1) if start.isdigit() else range(0)


def _acs(config: Path) -> dict[str, str | int]:
    """Return the redirects of a bridge; nothing without redirects, or if only root may read its capabilities."""
    try:
        content = config.read_bytes()
    except OSError:
        return {}
    at = 0x100
    while 0x100 <= at <= len(content) - 8:
        head = int.from_bytes(content[at : at + 4], "little")
        if head & 0xFFFF == _ACS:
            return {"acs": int.from_bytes(content[at + 6 : at + 8], "little") & _REDIRECTS}
        if head >> 20 <= at:  # the capabilities are in order, so that a loop ends here
            break
        at = head >> 20
    return {}


def _slots(device: Path) -> tuple[str, ...]:
    return tuple(slot for slot in device.resolve().parts if _SLOT.fullmatch(slot))


def _values(directory: Path, file_names: Collection[str]) -> dict[str, str | int]:
    return {name: value for name in file_names if (value := _value(directory / name)) is not None}


def _value(path: Path) -> str | int | None:
    """Return a file as a number or a text; of the counters of AER, which are a table, the total."""
    text = _text(path)
    if text is None:
        return None
    if path.name.startswith("aer_dev_"):
        text = next((line.split()[-1] for line in text.splitlines() if line.startswith("TOTAL")), "")
    return int(text) if re.fullmatch(r"-?\d+", text) else text or None


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


_KINDS = {"infiniband": "InfiniBand port", "ethernet": "Ethernet interface", "memory": "memory controller (EDAC)"}


@dataclass(frozen=True)
class GrowthLimit:
    """A counter that must not grow by more in a run."""

    component_kind: str
    field: str  # its file
    text: str
    most: int  # the largest growth that is allowed
    finding: str  # selects the kind of finding
    but: tuple[str, ...] = ()  # models that another check judges


_MINOR = 10  # ibcheckerrors of infiniband-diags warns above 10
_CORRECTED = 480  # of PCIe: DCGM's limit for its plugin pcie

_GROWTH_LIMITS = (
    GrowthLimit("infiniband", "link_downed", "times its link went down", 0, "nic link"),
    GrowthLimit("infiniband", "link_error_recovery", "recoveries of its link", 0, "nic errors"),
    GrowthLimit("infiniband", "symbol_error", "symbol errors", _MINOR, "nic errors"),
    GrowthLimit("infiniband", "port_rcv_errors", "received packets with errors", _MINOR, "nic errors"),
    GrowthLimit("infiniband", "local_link_integrity_errors", "errors of link integrity", _MINOR, "nic errors"),
    GrowthLimit("infiniband", "excessive_buffer_overrun_errors", "buffer overruns", _MINOR, "nic errors"),
    GrowthLimit("ethernet", "carrier_down_count", "times its link went down", 0, "nic link"),
    GrowthLimit("ethernet", "statistics/rx_crc_errors", "frames with a wrong checksum", _MINOR, "nic errors"),
    GrowthLimit("ethernet", "statistics/tx_carrier_errors", "losses of the carrier", _MINOR, "nic errors"),
    GrowthLimit("memory", "ue_count", "uncorrected errors of memory", 0, "host memory errors"),
    GrowthLimit("memory", "ce_count", "corrected errors of memory", 0, "host memory corrected"),
    GrowthLimit("pci", "aer_dev_fatal", "fatal errors of PCIe", 0, "host pcie", but=("gpu",)),
    GrowthLimit("pci", "aer_dev_nonfatal", "uncorrectable errors of PCIe", 0, "host pcie", but=("gpu",)),
    GrowthLimit("pci", "aer_dev_correctable", "corrected errors of PCIe", _CORRECTED, "host pcie corrected"),
)
"""The health of a GPU has its fatal and other uncorrectable errors of PCIe from the driver."""


def of_host(outcome: Outcome, message: str, case: str, work: Work, **evidence: Any) -> Observation:
    return Observation("machine", Subject("host", (0,)), outcome, message, case, work, evidence)


def examine_kernel(before: KernelFacts | None, after: KernelFacts) -> list[Observation]:
    """Judge counters by their growth and states by their value after the run.

    `before` has the facts from before the run; None if they were not read. Return failed observations, and one that
    passed, with the number of values that were judged; skipped ones for kinds of components that the host does not
    have.
    """
    observations: list[Observation] = []
    judged = 0
    silent: Counter[str] = Counter()

    def wrong(finding: str, component: Component, text: str, **evidence: Any) -> None:
        message, about = f"{component.name}: {text}", {"kind": finding, "component": component.name}
        observations.append(of_host("failed", message, "kernel", Work(operations=1), **about, **evidence))

    for limit in _GROWTH_LIMITS:
        of_kind = (component for component in after.values() if component.kind == limit.component_kind)
        for component in (component for component in of_kind if component.model not in limit.but):
            initial = before[component.name].values.get(limit.field) if before and component.name in before else None
            last = component.values.get(limit.field)
            if not isinstance(initial, int) or not isinstance(last, int):
                silent[f"{limit.component_kind} {limit.field}"] += 1
                continue
            judged += 1
            if (growth := last - initial if last >= initial else last) > limit.most:
                text = f"{growth} {limit.text} in the run (from {initial} to {last}, allowed {limit.most})"
                wrong(limit.finding, component, text, before=initial, after=last, field=limit.field)
    for name, component in (before or {}).items():
        gone = component.kind in ("infiniband", "ethernet") and name not in after
        if gone or (component.is_up and not after.get(name, component).is_up):
            wrong("nic link", component, "it is gone" if gone else "its link is down, and was up before the run")
    for finding, component, text in _states(after):
        wrong(finding, component, text)
    judged += sum(len(component.values) for component in after.values())
    counts = Counter(component.kind for component in after.values())
    evidence = {"components": dict(counts), "not known": dict(silent)}
    observations.append(of_host("passed", "", "kernel", Work(operations=judged), **evidence))
    if silent:
        counters = ", ".join(f"{name} ({times})" for name, times in silent.items())
        text = f"counters that could not be read before and after: {counters}"
        observations.append(of_host("skipped", text, "kernel", Work()))
    for component_kind, text in _KINDS.items():
        if not counts[component_kind]:
            observations.append(of_host("skipped", f"the kernel shows no {text}", "kernel", Work()))
    return observations


def _states(facts: KernelFacts) -> Iterator[tuple[str, Component, str]]:
    yield from _speeds(facts)
    gpus = [component for component in facts.values() if component.model == "gpu"]
    for component in facts.values():
        if component.kind == "infiniband" and not component.is_up:
            yield "nic idle", component, f"its state is {component.values.get('state', 'unknown')}, so nothing uses it"
        if component.model == "nic":
            yield from ((*("nic pcie", component), text) for text in _trained(component, facts))
    usual = Counter(component.values["gsp"] for component in gpus if "gsp" in component.values).most_common(1)
    for component in gpus:
        if component.values.get("numa_node") == -1 and int(facts["host"].values["nodes"]) > 1:
            yield "affinity", component, "the kernel does not know its NUMA node"
        if component.values.get("near") == 0:
            yield "affinity", component, "this process may use no core of its NUMA node"
        if str(component.values.get("iommu", "")).startswith("DMA"):
            yield "iommu", component, f"the IOMMU translates its addresses ({component.values['iommu']})"
        if "gsp" in component.values and component.values["gsp"] != usual[0][0] and 2 * usual[0][1] > len(gpus):
            own = component.values["gsp"]
            yield "gsp", component, f"its firmware of the GSP is {own}, and that of the others {usual[0][0]}"
    above = {slot for component in gpus for slot in component.slots[:-1]} if len(gpus) > 1 else set()
    for component in facts.values():
        if component.name in above and component.values.get("acs"):
            yield "acs", component, "ACS sends the traffic between GPUs below it up to the root"


def _speeds(facts: KernelFacts) -> Iterator[tuple[str, Component, str]]:
    """Yield the NICs that are slower than the others of their model, if at least two of these agree and are most."""
    groups: dict[tuple[str, str], dict[str, float]] = {}
    for component in facts.values():
        speed = _number(component.values.get("rate" if component.kind == "infiniband" else "speed"))
        if component.kind in ("infiniband", "ethernet") and component.is_up and speed is not None and speed > 0:
            groups.setdefault((component.kind, component.model), {})[component.name] = speed
    for (component_kind, _), speeds in groups.items():
        (usual, times), *_ = Counter(speeds.values()).most_common(1)
        for name, speed in speeds.items():
            if speed < usual and times >= LEAST_PEERS and 2 * times > len(speeds):
                unit = "Gb/s" if component_kind == "infiniband" else "Mb/s"
                text = f"its link runs at {speed:g} {unit}, and {times} others of its model at {usual:g} {unit}"
                yield "nic slow", facts[name], text


def _trained(nic: Component, facts: KernelFacts) -> Iterator[str]:
    """Yield what of the PCIe link of a NIC is below what the NIC and its slot can do."""
    slot = facts.get(nic.slots[-2]) if len(nic.slots) > 1 else None
    for name, unit in (("speed", "GT/s"), ("width", "lanes")):
        now = _number(nic.values.get(f"current_link_{name}"))
        most = [_number(component.values.get(f"max_link_{name}")) for component in (nic, slot) if component is not None]
        limits = [value for value in most if value]
        if now is not None and limits and now < min(limits):
            yield f"its PCIe link has {now:g} {unit}, and it and its slot can do {min(limits):g} {unit}"


def _number(value: str | int | None) -> float | None:
    match = re.match(r"-?\d+(\.\d+)?", str(value))
    return float(match[0]) if match else None


_CORE_SEEDS = range(4)
_MATRIX_SIDE = 96

_CoreKey = tuple[int, str]  # seed and kind of work
_CoreResults = Mapping[_CoreKey, Collection[bytes]]  # the different results of one core


def vote_of_cores(seconds: float, cores: Sequence[int] | None, wrong_core: int = -1) -> list[Observation]:
    """Compute integers, products, functions and hashes on each core at the same time, pinned, and compare the bits.

    A core is named only if more than half of the cores, and at least two others, agree on another result. It takes
    `seconds`, at least one round. `cores` are those of a simulated host, which take turns and are not pinned; None for
    those of this process. A planted fault makes `wrong_core` wrong; -1 for none.
    """
    from mgpu_check.torch_hooks.switches import one_thread

    rounds: dict[int, tuple[int, _CoreResults]] = {}
    refused: list[int] = []
    deadline = time.monotonic() + seconds

    def on_core(core: int, pinned: bool) -> None:
        try:
            if pinned:
                os.sched_setaffinity(0, {core})  # of this thread
        except OSError:
            refused.append(core)
            return
        rounds[core] = _compute_on_core(deadline, core == wrong_core)

    with one_thread():
        if cores is not None:
            for core in cores:
                on_core(core, False)
        else:
            threads = [threading.Thread(target=on_core, args=(core, True)) for core in sorted(os.sched_getaffinity(0))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    done = sum(times for times, _ in rounds.values())
    observations = list(_vote({core: results for core, (_, results) in rounds.items()}))
    machine = len(rounds) if cores is not None else os.cpu_count() or 0
    evidence = {"cores": len(rounds), "of the machine": machine, "not pinned": refused}
    if len(rounds) < 1 + LEAST_PEERS:
        text = f"no core can be named: a vote needs {1 + LEAST_PEERS} cores, and this process may use {len(rounds)}"
        observations.append(of_host("skipped", text, "cores", Work(), **evidence))
    if len(rounds) < machine:
        text = f"{machine - len(rounds)} of {machine} cores were not tried: this process may not use them"
        observations.append(of_host("skipped", text, "cores", Work(), **evidence))
    return [*observations, of_host("passed", "", "cores", Work(operations=done), **evidence)]


def _vote(results: Mapping[int, _CoreResults]) -> Iterator[Observation]:
    """Yield an observation for each core that the others outvote, or one for cores that differ without a majority."""
    bad: dict[int, list[str]] = {}
    split: dict[str, list[int]] = {}
    for key in dict.fromkeys(key for mine in results.values() for key in mine):
        digests = {core: mine[key] for core, mine in results.items()}
        votes = Counter(next(iter(values)) for values in digests.values() if len(values) == 1)
        usual, times = votes.most_common(1)[0] if votes else (b"", 0)
        odd_cores = [core for core, values in digests.items() if set(values) != {usual}]
        if odd_cores and (times < LEAST_PEERS or 2 * times <= len(digests)):
            split.setdefault(key[1], sorted(digests))
        else:
            for core in odd_cores:
                bad.setdefault(core, []).append(f"{key[1]}{' now and then' if len(digests[core]) > 1 else ''}")
    for core, kinds in sorted(bad.items()):
        text = f"core {core} computes other results than {len(results) - len(bad)} others: "
        text += ", ".join(dict.fromkeys(kinds))
        yield of_host("failed", text, "cores", Work(operations=1), kind="host core", core=core)
    for work_kind, cores in split.items():
        text = f"cores {', '.join(map(str, cores))} compute different results, without a majority: {work_kind}"
        yield of_host("failed", text, "cores", Work(operations=1), kind="host core")


def _compute_on_core(deadline: float, corrupt: bool) -> tuple[int, _CoreResults]:
    """Return the number of results, and the different results of each kind of work."""
    import torch

    from mgpu_check.torch_hooks.tensors import memory_of

    digests: dict[_CoreKey, set[bytes]] = {}
    times = 0
    while not times or time.monotonic() < deadline:
        for seed in _CORE_SEEDS:
            for work_kind, tensor in _work(seed):
                if corrupt:
                    tensor.view(-1).view(torch.uint8)[seed] ^= 1
                digest = hashlib.sha256(memory_of(tensor.contiguous())).digest()
                digests.setdefault((seed, work_kind), set()).add(digest)
                times += 1
    return times, digests


def _work(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield results with equal bits on all cores: sums of small integers are exact, and functions use one code path."""
    import torch

    indices = torch.arange(_MATRIX_SIDE * _MATRIX_SIDE, dtype=torch.int64, device="cpu")
    mixed = (indices * 2654435761 + seed * 40503).bitwise_xor(indices << 7)
    yield "integers", (mixed * 6364136223846793005 + 1442695040888963407).bitwise_xor(mixed >> 13)
    small = (mixed >> 5).remainder(17).sub(8).reshape(_MATRIX_SIDE, _MATRIX_SIDE)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        exact = small.to(dtype)
        yield f"products in {str(dtype).partition('.')[2]}", exact @ exact.T
    points = small.to(torch.float64).add(9 + seed / 8)
    yield "functions", torch.stack((points.exp(), points.sin(), points.sqrt(), points.log(), 1 / points))


CHUNK = 1 << 20  # words that are written or compared at once: 8 MiB
_ODD = -7046029254386353131  # 2^64 divided by the golden ratio
_COPIED = 1 << 17  # words of a copy
_MEMORY_SHARE = 8  # a divisor of the available memory: other programs need the rest
_UNKNOWN = 1 << 30  # available memory, where the kernel does not say


def examine_memory(
    devices: Sequence[torch.device], size: int, passes: int, copies: int, wrong_word: int = -1
) -> list[Observation]:
    """Return observations of the memory of the host, and of GPUs whose copies were wrong.

    Each word holds a number that derives from its address, in the next pass its complement.

    Args:
        devices: GPUs that copy in the meantime.
        size: bytes; less if an eighth of the available memory is less.
        passes: number of times that all of it is written and read.
        copies: number of times that each GPU copies 1 MiB from and to the host, for each 8 MiB written or read.
        wrong_word: index of the word whose bit 5 a planted fault flips; -1 for none.
    """
    import torch

    available = available_memory()
    words = max(1, min(size, (_UNKNOWN if available is None else available) // _MEMORY_SHARE) // 8)
    memory = torch.empty(words, dtype=torch.int64, device="cpu")
    sent = torch.arange(_COPIED, dtype=torch.int64, device="cpu").mul_(2654435761)
    sent = sent.pin_memory() if devices else sent
    on_devices = [torch.empty_like(sent, device=device) for device in devices]
    back = [torch.zeros_like(sent, pin_memory=True) for _ in devices]

    def load() -> None:
        for on_device, target in zip(on_devices, back, strict=True):
            for _ in range(copies):
                on_device.copy_(sent, non_blocking=True)
                target.copy_(on_device, non_blocking=True)

    observations: list[Observation] = []
    for turn in range(passes):
        pattern = WordPattern(turn)
        for start in range(0, words, CHUNK):
            load()
            pattern.write(start, memory[start : start + CHUNK])
        if 0 <= wrong_word < words:
            memory[wrong_word] ^= 1 << 5
        observations += _compared_words(memory, pattern, turn, load)
        for index, (device, target) in enumerate(zip(devices, back, strict=True)):
            torch.cuda.synchronize(device)
            if wrong_words := int((target != sent).sum()):
                text = f"{wrong_words} of {len(sent)} words came back wrong while host memory was under load"
                link = Subject("download", (index,))  # or the way there, or the GPU
                observations.append(Observation("machine", link, "failed", text, "memory", Work(operations=1)))
    work = Work(bytes=8 * words * passes, operations=passes)
    return [*observations, of_host("passed", "", "memory", work, **{"copying GPUs": len(devices)})]


class WordPattern:
    """The content of memory in a pass: a word is its index times an odd number, or its complement."""

    def __init__(self, turn: int) -> None:
        import torch

        self._other, self._shift = turn % 2, turn // 2
        words = torch.arange(CHUNK, dtype=torch.int64, device="cpu").mul_(_ODD)
        self._first = words.neg_() if self._other else words  # the complement of n is -n - 1

    def write(self, start: int, chunk: torch.Tensor) -> None:
        import torch

        added = start * _ODD + self._shift
        added = -added - 1 if self._other else added
        torch.add(self._first[: len(chunk)], (added + (1 << 63)) % (1 << 64) - (1 << 63), out=chunk)


def _compared_words(
    memory: torch.Tensor, pattern: WordPattern, turn: int, load: Callable[[], None]
) -> Iterator[Observation]:
    """Yield an observation for the first chunk with wrong words. Call `load` before each chunk."""
    import torch

    scratch = torch.empty(CHUNK, dtype=torch.int64, device="cpu")
    for start in range(0, len(memory), CHUNK):
        load()
        mine = memory[start : start + CHUNK]
        expected = scratch[: len(mine)]
        pattern.write(start, expected)
        if not torch.equal(mine, expected):
            mismatches = (mine != expected).nonzero()
            position = int(mismatches[0])
            byte, bits = 8 * (start + position), hex((int(mine[position]) ^ int(expected[position])) & (2**64 - 1))
            text = f"host memory: {len(mismatches)} words wrong in pass {turn}, the first at byte {byte}, bits {bits}"
            evidence = {"kind": "host memory", "byte": byte, "bits": bits}
            yield of_host("failed", text, "memory", Work(operations=1), **evidence)
            return


_VARIABLE = "NCCL_DEBUG_FILE"
_PATH = re.compile(r"NCCL INFO Channel \S+ : (\d+)\[\w+\] -> (\d+)\[\w+\] (?:\[\w+\] )?via (\S+)")
_ELEMENTS = 1 << 20

Paths = Mapping[tuple[int, int], str]
"""Path from a rank to another in NCCL's words, such as "P2P/CUMEM/read", "SHM/direct/direct" or "NET/IB/0/GDRDMA"."""


def environment() -> dict[str, str]:
    name = Path(tempfile.gettempdir()) / f"mgpu-check-{os.getpid()}-%p.log"
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,GRAPH,P2P,SHM,NET", _VARIABLE: str(name)}


def paths_of_rank(rank: Rank) -> dict[tuple[int, int], str] | str:
    """Sum over all ranks, and return the paths in the log of this process, or why the log has no path."""
    import torch

    backend = torch.distributed.get_backend()
    if "nccl" not in backend:  # also "cpu:gloo,cuda:nccl"
        return f"the backend is {backend}, which has no such paths"
    torch.distributed.all_reduce(torch.ones(_ELEMENTS, device=rank.device))
    torch.cuda.synchronize(rank.device)
    log = Path(os.environ.get(_VARIABLE, "no-such-file").replace("%p", str(os.getpid())))
    try:
        paths = paths_in(log.read_text(errors="replace").splitlines())
    except OSError as error:
        return f"NCCL wrote no log: {error.strerror}"
    log.unlink(missing_ok=True)
    return paths or "NCCL's log names no path"


def paths_in(lines: Iterable[str]) -> dict[tuple[int, int], str]:
    """Return the paths in the lines of a log; of several between two ranks, the last."""
    return {(int(m[1]), int(m[2])): m[3] for line in lines if (m := _PATH.search(line))}


def examine_paths(of_ranks: Sequence[Paths | str], gpus: Sequence[Gpu], fabric: Mapping[int, str]) -> list[Observation]:
    """Return an observation of the host for each pair that does not use the best path that is there.

    `of_ranks` has the result of `paths_of_rank` for each rank. `fabric` has, by number of the host, the name of an
    InfiniBand port that is active there.
    """
    named = (mine for mine in of_ranks if not isinstance(mine, str))
    paths = {pair: path for mine in named for pair, path in mine.items()}
    silent = list(dict.fromkeys(reason for reason in of_ranks if isinstance(reason, str)))
    observations: list[Observation] = [of_host("skipped", reason, "transport", Work()) for reason in silent]
    for (sender, receiver), path in sorted(paths.items()):
        source, target = gpus[sender], gpus[receiver]
        pair = f"GPU {source.number} -> GPU {target.number}"
        can = str(source.facts.get(f"p2p_{target.number}") or "")
        text = ""
        if source.host == target.host and "read" in can.split("+") and path.startswith(("SHM", "NET")):
            text = f"{pair}: collectives use {path}, and direct access is there ({can})"
        elif source.host != target.host and source.host in fabric and path.startswith("NET/Socket"):
            text = f"{pair}: collectives use {path}, and {fabric[source.host]} is active"
        if text:
            failed = of_host("failed", text, "transport", Work(operations=1), kind="transport", path=path)
            observations.append(failed.on((), source.host))
    if paths:
        counts = dict(sorted(Counter(paths.values()).items()))
        observations.append(of_host("passed", "", "transport", Work(operations=len(paths)), paths=counts))
    return observations


_CARDS = 4
_GPUS = 4
_AER = {"correctable": "COR", "nonfatal": "NONFATAL", "fatal": "FATAL"}


@dataclass(frozen=True)
class SimulatedHost:
    cores: int = 8
    core: int = -1  # the core that computes wrong results; -1 for none
    word: int = -1  # the word of memory that loses a bit; -1 for none
    transport: str = "P2P/CUMEM/read"  # the path between any two of its GPUs, in NCCL's words
    # before, after: content of files below the root, where it differs from that of a healthy host, before and after the
    # run; None for a file that is absent
    before: Mapping[str, str | None] = field(default_factory=dict)
    after: Mapping[str, str | None] = field(default_factory=dict)


def log_of_nccl(ranks: int, path: str) -> Iterator[str]:
    """Yield the lines of NCCL about a ring of ranks that use `path`."""
    for rank in range(ranks):
        peer = (rank + 1) % ranks
        yield f"simulated:1:1 [0] NCCL INFO Channel 00/0 : {rank}[{rank}] -> {peer}[{peer}] via {path}"


def write_tree(root: Path, changes: Mapping[str, str | None]) -> None:
    """Write the files of a healthy host below `root`, with changes."""
    for name, text in {**_healthy(), **changes}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if text is not None and text.startswith("-> "):
            path.symlink_to(text.removeprefix("-> "))
        elif text is not None:
            path.write_text(text)


def _healthy() -> dict[str, str]:
    tree = {"sys/devices/system/node/node0/cpulist": "0-3", "sys/devices/system/node/node1/cpulist": "4-7"}
    for number in range(2):
        tree |= {f"sys/devices/system/edac/mc/mc{number}/{count}_count": "0" for count in ("ce", "ue")}
    for number in range(_GPUS):
        tree |= _device(f"0000:{number:02x}:00.0", number, {"class": "0x030200", "vendor": "0x10de"})
        tree[f"sys/devices/pci0000:00/0000:f0:{number:02x}.0/0000:{number:02x}:00.0/local_cpulist"] = "0-7"
        tree[f"proc/driver/nvidia/gpus/0000:{number:02x}:00.0/information"] = "GPU Firmware: \t 580.95.05"
    for number in range(_CARDS):
        slot = f"0000:{0x40 + number:02x}:00.0"
        tree |= _device(slot, 0x20 + number, {"class": "0x020700", "vendor": "0x15b3", "device": "0x1021"})
        card = f"sys/class/infiniband/mlx5_{number}"
        port = {"state": "4: ACTIVE", "rate": "400 Gb/sec (4X NDR)", "link_layer": "InfiniBand"}
        tree |= {f"{card}/ports/1/{name}": text for name, text in port.items()}
        tree |= {f"{card}/ports/1/counters/{name}": "0" for name in PORT_COUNTERS}
        tree |= {f"{card}/hca_type": "MT4129", f"{card}/device": f"-> ../../../bus/pci/devices/{slot}"}
    slot = "0000:50:00.0"
    tree |= _device(slot, 0x30, {"class": "0x020000", "vendor": "0x8086", "device": "0x1592"})
    net = {"type": "1", "operstate": "up", "speed": "100000", "carrier_down_count": "1"}
    net |= {"statistics/rx_crc_errors": "0", "statistics/tx_carrier_errors": "0"}
    tree |= {f"sys/class/net/eth0/{name}": text for name, text in net.items()}
    tree["sys/class/net/eth0/device"] = f"-> ../../../bus/pci/devices/{slot}"
    return tree


def _device(slot: str, port: int, files: Mapping[str, str]) -> dict[str, str]:
    bridge = f"0000:f0:{port:02x}.0"
    above = f"sys/devices/pci0000:00/{bridge}"
    link = {"current_link_speed": "32.0 GT/s PCIe", "current_link_width": "16"}
    link |= {"max_link_speed": "32.0 GT/s PCIe", "max_link_width": "16", "numa_node": "0"}
    link |= {f"aer_dev_{name}": f"RxErr 0\nTOTAL_ERR_{total} 0" for name, total in _AER.items()}
    tree = {f"{above}/{name}": text for name, text in link.items()}
    tree |= {f"{above}/{slot}/{name}": text for name, text in {**link, **files}.items()}
    for name, location in ((bridge, bridge), (slot, f"{bridge}/{slot}")):
        tree[f"sys/bus/pci/devices/{name}"] = f"-> ../../../devices/pci0000:00/{location}"
    return tree
