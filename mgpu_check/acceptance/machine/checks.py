"""Check a host: its cores and memory, what its kernel says before and after a run, and the paths that NCCL takes.

What the kernel says of NICs, PCIe slots and memory controllers is read without root. Every core computes the same, and
the cores vote. Memory holds patterns while copies to and from the GPUs run. The debug log of NCCL names the paths
between GPUs, which are compared with the paths that the hardware has.
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
_VENDORS = ("0x10de", "0x1002")
"""Makers of GPUs."""
_ETHERNET = 1
"""``ARPHRD_ETHER``: the type of an interface that is no InfiniBand and no tunnel."""
_ACS = 0x0D
"""PCI Express Base Specification: the id of the capability Access Control Services."""
_REDIRECTS = 0b11100
"""Bits of its control register that send traffic between peers up to the root: request and completion redirect, and
upstream forwarding."""


@dataclass(frozen=True)
class Component:
    """One component of a host.

    Attributes:
        kind: "infiniband", "ethernet", "pci" or "memory"; "host" for the host itself.
        model: components of one kind and model are alike.
        slots: PCI addresses from the root port to the device.
        values: content of its files; without files that are absent or cannot be read.
    """

    kind: str
    name: str
    model: str = ""
    slots: tuple[str, ...] = ()
    values: Mapping[str, str | int] = field(default_factory=dict)

    @property
    def is_up(self) -> bool:
        return self.values.get("state") == _ACTIVE or self.values.get("operstate") == "up"


KernelFacts = Mapping[str, Component]
"""Components by name."""


def read_kernel(root: Path = Path("/"), allowed: Collection[int] | None = None) -> dict[str, Component]:
    """Return the components of this host.

    Args:
        root: the directory that has ``sys`` and ``proc``.
        allowed: cores that this process may use; default from the kernel.
    """
    allowed = os.sched_getaffinity(0) if allowed is None else allowed
    system = root / "sys"
    found = []
    for port in sorted(system.glob("class/infiniband/*/ports/*")):
        card = port.parents[1]
        values = _values(port, _PORT) | _values(port / "counters", PORT_COUNTERS)
        model = f"{_value(card / 'hca_type')} {values.get('link_layer', '')}"
        found.append(Component("infiniband", f"{card.name} port {port.name}", model, _slots(card / "device"), values))
    for net in sorted(system.glob("class/net/*")):
        if (net / "device").exists() and _value(net / "type") == _ETHERNET:
            model = f"{_value(net / 'device' / 'vendor')} {_value(net / 'device' / 'device')}"
            found.append(Component("ethernet", net.name, model, _slots(net / "device"), _values(net, _NET)))
    for controller in sorted(system.glob("devices/system/edac/mc/mc*")):
        found.append(Component("memory", controller.name, "", (), _values(controller, ("ce_count", "ue_count"))))
    nics = {one.slots[-1] for one in found if one.slots}
    devices = {device.name: device for device in sorted(system.glob("bus/pci/devices/*"))}
    gpus = {slot for slot, device in devices.items() if _is_gpu(device)}
    wanted = {slot for name in nics | gpus for slot in _slots(devices.get(name, Path("/none")))}
    for slot in sorted(wanted & devices.keys()):
        model = "gpu" if slot in gpus else "nic" if slot in nics else "bridge"
        values = _of_device(root, devices[slot], model, allowed)
        found.append(Component("pci", slot, model, _slots(devices[slot]), values))
    nodes = len(list(system.glob("devices/system/node/node[0-9]*")))
    found.append(Component("host", "host", values={"nodes": nodes}))
    return {one.name: one for one in found}


def _is_gpu(device: Path) -> bool:
    return str(_value(device / "class")).startswith("0x03") and _value(device / "vendor") in _VENDORS


def _of_device(root: Path, device: Path, model: str, allowed: Collection[int]) -> dict[str, str | int]:
    values = _values(device, _PCI)
    if model == "bridge":
        return values | _acs(device / "config")
    if model == "gpu":
        cores = {core for part in str(_value(device / "local_cpulist") or "").split(",") for core in _range(part)}
        if cores:
            values["near"] = len(cores & set(allowed))
        group = device / "iommu_group"
        kind = _value(root / "sys/kernel/iommu_groups" / group.resolve().name / "type") if group.exists() else None
        if kind is not None:
            values["iommu"] = kind
        text = _text(root / "proc/driver/nvidia/gpus" / device.name / "information") or ""
        if match := re.search(r"GPU Firmware:\s*(\S+)", text):
            values["gsp"] = match[1]
    return values


def _range(part: str) -> range:
    first, _, last = part.strip().partition("-")
    return range(int(first), int(last or first) + 1) if first.isdigit() else range(0)


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
    return tuple(part for part in device.resolve().parts if _SLOT.fullmatch(part))


def _values(directory: Path, names: Collection[str]) -> dict[str, str | int]:
    return {name: value for name in names if (value := _value(directory / name)) is not None}


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
    """A counter that must not grow by more in a run.

    Attributes:
        kind, field: the kind of the component, and its file.
        most: the largest growth that is allowed.
        finding: selects the kind of finding.
        but: models that another check judges.
    """

    kind: str
    field: str
    text: str
    most: int
    finding: str
    but: tuple[str, ...] = ()


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


def of_host(outcome: Outcome, seen: str, case: str, work: Work, **evidence: Any) -> Observation:
    return Observation("machine", Subject("host", (0,)), outcome, seen, case, work, evidence)


def examine_kernel(before: KernelFacts | None, after: KernelFacts) -> list[Observation]:
    """Judge counters by their growth and states by their value after the run.

    Args:
        before: the facts from before the run; None if they were not read.

    Returns:
        failed observations, and one that passed, with the number of values that were judged; skipped ones for kinds of
        components that the host does not have.
    """
    found: list[Observation] = []
    judged = 0
    silent: Counter[str] = Counter()

    def wrong(kind: str, one: Component, text: str, **evidence: Any) -> None:
        seen = f"{one.name}: {text}"
        found.append(of_host("failed", seen, "kernel", Work(operations=1), kind=kind, component=one.name, **evidence))

    for limit in _GROWTH_LIMITS:
        for one in (one for one in after.values() if one.kind == limit.kind and one.model not in limit.but):
            first = before[one.name].values.get(limit.field) if before and one.name in before else None
            last = one.values.get(limit.field)
            if not isinstance(first, int) or not isinstance(last, int):
                silent[f"{limit.kind} {limit.field}"] += 1
                continue
            judged += 1
            if (more := last - first if last >= first else last) > limit.most:
                text = f"{more} {limit.text} in the run (from {first} to {last}, allowed {limit.most})"
                wrong(limit.finding, one, text, before=first, after=last, field=limit.field)
    for name, one in (before or {}).items():
        gone = one.kind in ("infiniband", "ethernet") and name not in after
        if gone or (one.is_up and not after.get(name, one).is_up):
            wrong("nic link", one, "it is gone" if gone else "its link is down, and was up before the run")
    for kind, one, text in _states(after):
        wrong(kind, one, text)
    judged += sum(len(one.values) for one in after.values())
    counts = Counter(one.kind for one in after.values())
    evidence = {"components": dict(counts), "not known": dict(silent)}
    found.append(of_host("passed", "", "kernel", Work(operations=judged), **evidence))
    if silent:
        names = ", ".join(f"{name} ({times})" for name, times in silent.items())
        found.append(of_host("skipped", f"counters that could not be read before and after: {names}", "kernel", Work()))
    for kind, text in _KINDS.items():
        if not counts[kind]:
            found.append(of_host("skipped", f"the kernel shows no {text}", "kernel", Work()))
    return found


def _states(facts: KernelFacts) -> Iterator[tuple[str, Component, str]]:
    yield from _speeds(facts)
    gpus = [one for one in facts.values() if one.model == "gpu"]
    for one in facts.values():
        if one.kind == "infiniband" and not one.is_up:
            yield "nic idle", one, f"its state is {one.values.get('state', 'unknown')}, so nothing uses it"
        if one.model == "nic":
            yield from ((*("nic pcie", one), text) for text in _trained(one, facts))
    usual = Counter(one.values["gsp"] for one in gpus if "gsp" in one.values).most_common(1)
    for one in gpus:
        if one.values.get("numa_node") == -1 and int(facts["host"].values["nodes"]) > 1:
            yield "affinity", one, "the kernel does not know its NUMA node"
        if one.values.get("near") == 0:
            yield "affinity", one, "this process may use no core of its NUMA node"
        if str(one.values.get("iommu", "")).startswith("DMA"):
            yield "iommu", one, f"the IOMMU translates its addresses ({one.values['iommu']})"
        if "gsp" in one.values and one.values["gsp"] != usual[0][0] and 2 * usual[0][1] > len(gpus):
            yield ("gsp", one, f"its firmware of the GSP is {one.values['gsp']}, and that of the others {usual[0][0]}")
    above = {slot for one in gpus for slot in one.slots[:-1]} if len(gpus) > 1 else set()
    for one in facts.values():
        if one.name in above and one.values.get("acs"):
            yield "acs", one, "ACS sends the traffic between GPUs below it up to the root"


def _speeds(facts: KernelFacts) -> Iterator[tuple[str, Component, str]]:
    """Yield the NICs that are slower than the others of their model, if at least two of these agree and are most."""
    groups: dict[tuple[str, str], dict[str, float]] = {}
    for one in facts.values():
        speed = _number(one.values.get("rate" if one.kind == "infiniband" else "speed"))
        if one.kind in ("infiniband", "ethernet") and one.is_up and speed is not None and speed > 0:
            groups.setdefault((one.kind, one.model), {})[one.name] = speed
    for (kind, _), speeds in groups.items():
        (usual, times), *_ = Counter(speeds.values()).most_common(1)
        for name, speed in speeds.items():
            if speed < usual and times >= LEAST_PEERS and 2 * times > len(speeds):
                unit = "Gb/s" if kind == "infiniband" else "Mb/s"
                text = f"its link runs at {speed:g} {unit}, and {times} others of its model at {usual:g} {unit}"
                yield "nic slow", facts[name], text


def _trained(one: Component, facts: KernelFacts) -> Iterator[str]:
    """Yield what of the PCIe link of a NIC is below what the NIC and its slot can do."""
    slot = facts.get(one.slots[-2]) if len(one.slots) > 1 else None
    for name, unit in (("speed", "GT/s"), ("width", "lanes")):
        now = _number(one.values.get(f"current_link_{name}"))
        most = [_number(part.values.get(f"max_link_{name}")) for part in (one, slot) if part is not None]
        known = [value for value in most if value]
        if now is not None and known and now < min(known):
            yield f"its PCIe link has {now:g} {unit}, and it and its slot can do {min(known):g} {unit}"


def _number(value: str | int | None) -> float | None:
    match = re.match(r"-?\d+(\.\d+)?", str(value))
    return float(match[0]) if match else None


_CORE_SEEDS = range(4)
_MATRIX_SIDE = 96

_CoreKey = tuple[int, str]
"""Seed and kind of work."""
_CoreResults = Mapping[_CoreKey, Collection[bytes]]
"""The different results of one core."""


def vote_of_cores(seconds: float, cores: Sequence[int] | None, wrong: int = -1) -> list[Observation]:
    """Compute integers, products, functions and hashes on each core at the same time, pinned, and compare the bits.

    A core is named only if more than half of the cores, and at least two others, agree on another result.

    Args:
        seconds: how long; at least one round.
        cores: the cores of a simulated host, which take turns and are not pinned; None for those of this process.
        wrong: the core that a planted fault makes wrong; -1 for none.
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
        rounds[core] = _compute_on_core(deadline, core == wrong)

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
    found = list(_vote({core: results for core, (_, results) in rounds.items()}))
    machine = len(rounds) if cores is not None else os.cpu_count() or 0
    evidence = {"cores": len(rounds), "of the machine": machine, "not pinned": refused}
    if len(rounds) < 1 + LEAST_PEERS:
        text = f"no core can be named: a vote needs {1 + LEAST_PEERS} cores, and this process may use {len(rounds)}"
        found.append(of_host("skipped", text, "cores", Work(), **evidence))
    if len(rounds) < machine:
        text = f"{machine - len(rounds)} of {machine} cores were not tried: this process may not use them"
        found.append(of_host("skipped", text, "cores", Work(), **evidence))
    return [*found, of_host("passed", "", "cores", Work(operations=done), **evidence)]


def _vote(results: Mapping[int, _CoreResults]) -> Iterator[Observation]:
    """Yield an observation for each core that the others outvote, or one for cores that differ without a majority."""
    bad: dict[int, list[str]] = {}
    split: dict[str, list[int]] = {}
    for key in dict.fromkeys(key for mine in results.values() for key in mine):
        given = {core: mine[key] for core, mine in results.items()}
        votes = Counter(next(iter(values)) for values in given.values() if len(values) == 1)
        usual, times = votes.most_common(1)[0] if votes else (b"", 0)
        wrong = [core for core, values in given.items() if set(values) != {usual}]
        if wrong and (times < LEAST_PEERS or 2 * times <= len(given)):
            split.setdefault(key[1], sorted(given))
        else:
            for core in wrong:
                bad.setdefault(core, []).append(f"{key[1]}{' now and then' if len(given[core]) > 1 else ''}")
    for core, kinds in sorted(bad.items()):
        text = f"core {core} computes other results than {len(results) - len(bad)} others: "
        text += ", ".join(dict.fromkeys(kinds))
        yield of_host("failed", text, "cores", Work(operations=1), kind="host core", core=core)
    for kind, cores in split.items():
        text = f"cores {', '.join(map(str, cores))} compute different results, without a majority: {kind}"
        yield of_host("failed", text, "cores", Work(operations=1), kind="host core")


def _compute_on_core(deadline: float, wrong: bool) -> tuple[int, _CoreResults]:
    """Return the number of results, and the different results of each kind of work."""
    import torch

    found: dict[_CoreKey, set[bytes]] = {}
    times = 0
    while not times or time.monotonic() < deadline:
        for seed in _CORE_SEEDS:
            for kind, tensor in _work(seed):
                if wrong:
                    tensor.view(-1).view(torch.uint8)[seed] ^= 1
                found.setdefault((seed, kind), set()).add(_digest(tensor))
                times += 1
    return times, found


def _work(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield results with equal bits on all cores: sums of small integers are exact, and functions use one code path."""
    import torch

    whole = torch.arange(_MATRIX_SIDE * _MATRIX_SIDE, dtype=torch.int64, device="cpu")
    mixed = (whole * 2654435761 + seed * 40503).bitwise_xor(whole << 7)
    yield "integers", (mixed * 6364136223846793005 + 1442695040888963407).bitwise_xor(mixed >> 13)
    small = (mixed >> 5).remainder(17).sub(8).reshape(_MATRIX_SIDE, _MATRIX_SIDE)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        exact = small.to(dtype)
        yield f"products in {str(dtype).partition('.')[2]}", exact @ exact.T
    points = small.to(torch.float64).add(9 + seed / 8)
    yield "functions", torch.stack((points.exp(), points.sin(), points.sqrt(), points.log(), 1 / points))


def _digest(tensor: torch.Tensor) -> bytes:
    from mgpu_check.torch_hooks.tensors import memory_of

    return hashlib.sha256(memory_of(tensor.contiguous())).digest()


CHUNK = 1 << 20
"""Words that are written or compared at once: 8 MiB."""
_ODD = -7046029254386353131  # 2^64 divided by the golden ratio
_COPIED = 1 << 17
"""Words of a copy."""
_MEMORY_SHARE = 8
"""A divisor of the available memory: other programs need the rest."""
_UNKNOWN = 1 << 30
"""Available memory, where the kernel does not say."""


def examine_memory(
    devices: Sequence[torch.device], size: int, passes: int, copies: int, wrong: int = -1
) -> list[Observation]:
    """Return observations of the memory of the host, and of GPUs whose copies were wrong.

    Each word holds a number that derives from its address, in the next pass its complement.

    Args:
        devices: GPUs that copy in the meantime.
        size: bytes; less if an eighth of the available memory is less.
        passes: number of times that all of it is written and read.
        copies: number of times that each GPU copies 1 MiB from and to the host, for each 8 MiB written or read.
        wrong: index of the word whose bit 5 a planted fault flips; -1 for none.
    """
    import torch

    known = available_memory()
    words = max(1, min(size, (_UNKNOWN if known is None else known) // _MEMORY_SHARE) // 8)
    held = torch.empty(words, dtype=torch.int64, device="cpu")
    sent = torch.arange(_COPIED, dtype=torch.int64, device="cpu").mul_(2654435761)
    sent = sent.pin_memory() if devices else sent
    there = [torch.empty_like(sent, device=device) for device in devices]
    back = [torch.zeros_like(sent, pin_memory=True) for _ in devices]

    def load() -> None:
        for on_device, target in zip(there, back, strict=True):
            for _ in range(copies):
                on_device.copy_(sent, non_blocking=True)
                target.copy_(on_device, non_blocking=True)

    found: list[Observation] = []
    for turn in range(passes):
        pattern = WordPattern(turn)
        for start in range(0, words, CHUNK):
            load()
            pattern.write(start, held[start : start + CHUNK])
        if 0 <= wrong < words:
            held[wrong] ^= 1 << 5
        found += _compared_words(held, pattern, turn, load)
        for place, (device, target) in enumerate(zip(devices, back, strict=True)):
            torch.cuda.synchronize(device)
            if wrong_words := int((target != sent).sum()):
                text = f"{wrong_words} of {len(sent)} words came back wrong while host memory was under load"
                link = Subject("download", (place,))  # or the way there, or the GPU
                found.append(Observation("machine", link, "failed", text, "memory", Work(operations=1)))
    evidence = {"copying GPUs": len(devices)}
    work = Work(bytes=8 * words * passes, operations=passes)
    return [*found, of_host("passed", "", "memory", work, **evidence)]


class WordPattern:
    """The content of memory in a pass: a word is its index times an odd number, or its complement."""

    def __init__(self, turn: int) -> None:
        import torch

        self._other = turn % 2
        self._shift = turn // 2
        first = torch.arange(CHUNK, dtype=torch.int64, device="cpu").mul_(_ODD)
        self._first = first.neg_() if self._other else first  # the complement of n is -n - 1

    def write(self, start: int, chunk: torch.Tensor) -> None:
        import torch

        added = start * _ODD + self._shift
        added = -added - 1 if self._other else added
        torch.add(self._first[: len(chunk)], (added + (1 << 63)) % (1 << 64) - (1 << 63), out=chunk)


def _compared_words(
    held: torch.Tensor, pattern: WordPattern, turn: int, load: Callable[[], None]
) -> Iterator[Observation]:
    """Yield an observation for the first chunk with wrong words. Call `load` before each chunk."""
    import torch

    scratch = torch.empty(CHUNK, dtype=torch.int64, device="cpu")
    for start in range(0, len(held), CHUNK):
        load()
        mine = held[start : start + CHUNK]
        right = scratch[: len(mine)]
        pattern.write(start, right)
        if not torch.equal(mine, right):
            wrong = (mine != right).nonzero()
            first = int(wrong[0])
            byte, bits = 8 * (start + first), hex((int(mine[first]) ^ int(right[first])) & (2**64 - 1))
            text = f"host memory: {len(wrong)} words wrong in pass {turn}, the first at byte {byte}, bits {bits}"
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
    import torch.distributed as dist

    if "nccl" not in dist.get_backend():  # also "cpu:gloo,cuda:nccl"
        return f"the backend is {dist.get_backend()}, which has no such paths"
    dist.all_reduce(torch.ones(_ELEMENTS, device=rank.device))
    torch.cuda.synchronize(rank.device)
    log = Path(os.environ.get(_VARIABLE, "no-such-file").replace("%p", str(os.getpid())))
    try:
        found = paths_in(log.read_text(errors="replace").splitlines())
    except OSError as error:
        return f"NCCL wrote no log: {error.strerror}"
    log.unlink(missing_ok=True)
    return found or "NCCL's log names no path"


def paths_in(lines: Iterable[str]) -> dict[tuple[int, int], str]:
    """Return the paths in the lines of a log; of several between two ranks, the last."""
    return {(int(m[1]), int(m[2])): m[3] for line in lines if (m := _PATH.search(line))}


def examine_paths(of_ranks: Sequence[Paths | str], gpus: Sequence[Gpu], fabric: Mapping[int, str]) -> list[Observation]:
    """Return an observation of the host for each pair that does not use the best path that is there.

    Args:
        of_ranks: the result of `paths_of_rank` for each rank.
        fabric: by number of the host, the name of an InfiniBand port that is active there.
    """
    paths = {pair: path for one in of_ranks if not isinstance(one, str) for pair, path in one.items()}
    silent = list(dict.fromkeys(one for one in of_ranks if isinstance(one, str)))
    found: list[Observation] = [of_host("skipped", why, "transport", Work()) for why in silent]
    for (sender, receiver), path in sorted(paths.items()):
        one, other = gpus[sender], gpus[receiver]
        pair = f"GPU {one.number} -> GPU {other.number}"
        can = str(one.facts.get(f"p2p_{other.number}") or "")
        text = ""
        if one.host == other.host and "read" in can.split("+") and path.startswith(("SHM", "NET")):
            text = f"{pair}: collectives use {path}, and direct access is there ({can})"
        elif one.host != other.host and one.host in fabric and path.startswith("NET/Socket"):
            text = f"{pair}: collectives use {path}, and {fabric[one.host]} is active"
        if text:
            evidence = {"kind": "transport", "path": path}
            found.append(of_host("failed", text, "transport", Work(operations=1), **evidence).on((), one.host))
    if paths:
        counts = dict(sorted(Counter(paths.values()).items()))
        found.append(of_host("passed", "", "transport", Work(operations=len(paths)), paths=counts))
    return found
