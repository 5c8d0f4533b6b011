"""Compare the GPUs of a node with each other and with a baseline: they should be equal, with links at full speed.

A GPU that differs from the majority is at fault. If no value has a majority, the GPU with the lower capability is at
fault, if the values have such an order. Otherwise the observation is about the host.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from mgpu_check.devices.observations import Observation, Subject, Work
from mgpu_check.devices.telemetry.fields import Value, field_of, names, pair_field
from mgpu_check.devices.telemetry.values import Snapshot, TelemetrySample

__all__ = ["examine_inventory", "examine_pcie", "is_under_load"]

_CHECK = "inventory"

_MORE_IS_BETTER = (
    *("memory", "power_limit", "sm_clock_max", "memory_clock_max"),
    *("pcie_generation_max", "pcie_width_max", "nvlinks", "nvlink_speed"),
)
_SAME_MEMORY = 1 / 1024  # GPUs of one model differ by the memory that their firmware reserves
_PCIE = ("pcie_generation", "pcie_width")
_CAPABILITIES = frozenset(
    ("read", "write", "atomics")
)  # NVLinks are counted by GPU: a mesh may leave out pairs on purpose
_BUSY = 10  # percent of the time


def examine_inventory(
    snapshot: Snapshot, *, host: int = 0, expected: Mapping[str, Value] | None = None, count: int | None = None
) -> list[Observation]:
    """Compare the facts of the GPUs of one host with each other, and with those of a baseline.

    Args:
        snapshot: a full snapshot of the GPUs of this host.
        host: the number of the host in the run.
        expected: name of a fact -> its right value; facts of pairs have their name without the peer.
        count: the number of GPUs that the host must have.

    Returns:
        For each GPU one failed observation for each fact that differs, or a passed or unknown one. Differences that no
        single GPU causes are about the host, and pairs with fewer capabilities than others have their own.
    """
    if snapshot.absent:
        return [_unknown(gpu, snapshot.absent) for gpu in sorted(snapshot.missing)]
    found = [_unknown(gpu, why) for gpu, why in sorted(snapshot.missing.items())]
    here = len(snapshot.facts) + len(snapshot.missing)
    if count is not None and count != here:
        found.append(_of_host(host, f"it has {here} GPUs, and the baseline has {count}", "count", here, count))
    found += _against_each_other(snapshot, host)
    found += _against_a_baseline(snapshot, host, expected or {})
    found += _pairs(snapshot, expected or {})
    blamed = {observation.subject for observation in found}
    for gpu, facts in sorted(snapshot.facts.items()):
        subject = Subject("gpu", (gpu,))
        if subject in blamed:
            continue
        known = sum(facts[name] is not None for name in names("fact"))
        unknown = dict(snapshot.unknown.get(gpu, {}))
        if not known:
            found.append(_unknown(gpu, "nothing is known of it: " + "; ".join(sorted(set(unknown.values())))))
        else:
            evidence = {"not known": unknown} if unknown else {}
            found.append(Observation(_CHECK, subject, "passed", work=Work(operations=known), evidence=evidence))
    return found


def is_under_load(sample: TelemetrySample) -> bool:
    """Return whether the GPU was under load: by its utilization, or else by its reasons for low clocks."""
    busy = sample.values.get("utilization")
    if isinstance(busy, (int, float)):
        return busy >= _BUSY
    throttle = sample.values.get("throttle")
    return isinstance(throttle, str) and "idle" not in throttle.split(", ")


def examine_pcie(snapshot: Snapshot, samples: Iterable[TelemetrySample]) -> list[Observation]:
    """Compare the largest generation and width of each PCIe link under load with what the GPU and its slot can do.

    An idle link slows down to save power, so samples without load are ignored.
    """
    under_load: dict[int, list[TelemetrySample]] = {gpu: [] for gpu in snapshot.facts}
    for sample in samples:
        if sample.gpu in under_load and is_under_load(sample):
            under_load[sample.gpu].append(sample)
    return [
        observation for gpu, seen in sorted(under_load.items()) for observation in _pcie(gpu, snapshot.facts[gpu], seen)
    ]


def _pcie(gpu: int, facts: Mapping[str, Value | None], seen: Sequence[TelemetrySample]) -> list[Observation]:
    subject = Subject("gpu", (gpu,))
    work = Work(operations=len(seen))
    failed = []
    unknown = ""
    for name in _PCIE:
        most = max((value for s in seen if isinstance(value := s.values.get(name), int)), default=None)
        able = facts.get(f"{name}_max")
        if able is None:
            unknown = f"the {field_of(name).text} that it can do is not known"
        elif most is None:
            unknown = unknown or "no sample was taken under load"
        elif most < int(able):
            seen_text = f"under load its {field_of(name).text} is {most}, and it and its slot can do {able}"
            evidence = {"field": name, "seen": most, "expected": able, "advice": _ADVICE["pcie"]}
            failed.append(Observation(_CHECK, subject, "failed", seen_text, "PCIe under load", work, evidence))
    if failed:
        return failed
    return [Observation(_CHECK, subject, "unknown" if unknown else "passed", unknown, "PCIe under load", work)]


_ADVICE = {
    "pcie": "re-seat the GPU and its riser, look at the BIOS settings of the slot; if it stays, exchange riser, then "
    "GPU",
    "nvlinks": "look at nvidia-smi nvlink -s and dmesg; reset the GPU; re-seat it or its bridge; if it stays, "
    "exchange it",
    "memory": "compare nvidia-smi -q of both; if model and ECC mode are equal, exchange the GPU",
    "power_limit": "set it again (nvidia-smi -pl), and find what has changed it",
    "ecc": "set it (nvidia-smi -e 1), and reset the GPU",
    "mig": "set it (nvidia-smi -mig 0), and reset the GPU",
    "vbios": "flash all GPUs to one version, as the maker of the system gives it",
    "inforom": "bring all GPUs to one version; if the InfoROM is corrupt, exchange the GPU",
    "driver": "install one version, and restart the machine",
    "name": "exchange the GPU for one of the ordered model",
    **dict.fromkeys(
        ("sm_clock_max", "memory_clock_max"), "look at locked clocks (nvidia-smi -q -d CLOCK), then at VBIOS and model"
    ),
    **dict.fromkeys(
        ("pcie_generation_max", "pcie_width_max"),
        "look at slot, riser and BIOS settings; put the GPU into another slot; if it stays, exchange it",
    ),
    "p2p": "look at nvidia-smi topo -p2p r, at ACS and IOMMU settings, and at the fabric manager",
}


_OTHERWISE = "bring the setting or the firmware to that of the other GPUs"


def _against_each_other(snapshot: Snapshot, host: int) -> list[Observation]:
    models: dict[Value | None, list[int]] = {}
    for gpu, facts in sorted(snapshot.facts.items()):
        models.setdefault(facts["name"], []).append(gpu)
    found = _compared(snapshot, "name", sorted(snapshot.facts), host)
    for gpus in models.values():
        for name in names("fact"):
            if name != "name":
                found += _compared(snapshot, name, gpus, host)
    return found


def _compared(snapshot: Snapshot, name: str, gpus: Sequence[int], host: int) -> list[Observation]:
    """Compare one fact over GPUs of one model."""
    values = {gpu: value for gpu in gpus if (value := snapshot.facts[gpu][name]) is not None}
    same = _same_as(name)
    usual = _majority(list(values.values()), same)
    found = []
    if usual is None and values and name in _MORE_IS_BETTER:
        usual = max(values.values(), key=float)
    if usual is None:
        if values:
            parts = [
                f"{_shown(name, v)} on GPUs {_list(g for g in values if values[g] == v)}" for v in _distinct(values)
            ]
            text = f"its GPUs differ in {field_of(name).text}: {'; '.join(parts)}"
            found.append(_of_host(host, text, name, sorted(map(str, values.values())), None))
        return found
    for gpu in gpus:
        if gpu in values and not same(values[gpu], usual):
            text = f"{field_of(name).text} is {_shown(name, values[gpu])}, and that of the others {_shown(name, usual)}"
            found.append(_differs(Subject("gpu", (gpu,)), text, name, values[gpu], usual))
        elif gpu not in values and 2 * len(values) > len(gpus):
            why = snapshot.unknown.get(gpu, {}).get(name, "not supported")
            if not why.startswith("error"):  # an error has an observation of its own
                text = f"{field_of(name).text} is {why}, and that of the others {_shown(name, usual)}"
                found.append(_differs(Subject("gpu", (gpu,)), text, name, None, usual))
    return found


def _against_a_baseline(snapshot: Snapshot, host: int, expected: Mapping[str, Value]) -> list[Observation]:
    found = []
    for name in (name for name in names("fact") if name in expected):
        usual, same = expected[name], _same_as(name)
        values = {gpu: facts[name] for gpu, facts in sorted(snapshot.facts.items())}
        off = {gpu: value for gpu, value in values.items() if value is not None and not same(value, usual)}
        silent = [gpu for gpu, value in values.items() if value is None]
        text = f"{field_of(name).text} is {{}}, and the baseline has {_shown(name, usual)}"
        if len(off) == len(values) > 1 and len(set(off.values())) == 1:
            value = next(iter(off.values()))
            of_all = "of its GPUs: " + text.format(_shown(name, value))
            found.append(_of_host(host, of_all, name, value, usual))
            continue
        for gpu, value in off.items():
            found.append(_differs(Subject("gpu", (gpu,)), text.format(_shown(name, value)), name, value, usual))
        found += [_unknown(gpu, text.format("not known")) for gpu in silent]
    return found


def _pairs(snapshot: Snapshot, expected: Mapping[str, Value]) -> list[Observation]:
    """Compare the capabilities of pairs with the same topology and models, and with the baseline."""
    alike: dict[tuple[Any, ...], dict[tuple[int, int], frozenset[str]]] = {}
    texts: dict[tuple[int, int], str] = {}
    for (gpu, peer), value in _of_pairs(snapshot, "p2p"):
        facts = snapshot.facts[gpu]
        kind = (facts[pair_field("topology", peer)], facts["name"], snapshot.facts[peer]["name"])
        texts[gpu, peer] = str(value)
        alike.setdefault(kind, {})[gpu, peer] = frozenset(str(value).split("+")) & _CAPABILITIES
    found = []
    for pairs in alike.values():
        usual = _majority(list(pairs.values()), lambda a, b: bool(a == b))
        usual = frozenset().union(*pairs.values()) if usual is None else usual
        for pair, able in pairs.items():
            if able < usual:
                others = "+".join(sorted(usual))
                text = f"peer-to-peer capability is {texts[pair]}, and that of other pairs {others}"
                found.append(_differs(Subject("copy", pair), text, "p2p", texts[pair], others))
    wanted = frozenset(str(expected["p2p"]).split("+")) if "p2p" in expected else frozenset()
    blamed = {observation.subject for observation in found}
    for pair, text in texts.items():
        if not wanted <= frozenset(text.split("+")) and Subject("copy", pair) not in blamed:
            seen = f"peer-to-peer capability is {text}, and the baseline has {expected['p2p']}"
            found.append(_differs(Subject("copy", pair), seen, "p2p", text, expected["p2p"]))
    return found


def _of_pairs(snapshot: Snapshot, name: str) -> list[tuple[tuple[int, int], Value]]:
    """Return (ordered pair, value) for the pairs of responding GPUs whose value is known."""
    gpus = sorted(snapshot.facts)
    return [
        ((gpu, peer), value)
        for gpu in gpus
        for peer in gpus
        if gpu != peer and (value := snapshot.facts[gpu].get(pair_field(name, peer))) is not None
    ]


def _majority(values: Sequence[Any], same: Callable[[Any, Any], bool]) -> Any:
    """Return the value that more than half of `values` equal; None if there is no majority."""
    if not values:
        return None
    for value, _ in Counter(values).most_common():
        if 2 * sum(same(value, other) for other in values) > len(values):
            return value
    return None


def _same_as(name: str) -> Callable[[Any, Any], bool]:
    if name == "memory":
        return lambda one, other: bool(abs(one - other) <= _SAME_MEMORY * max(one, other))
    return lambda one, other: bool(one == other)


def _distinct(values: Mapping[int, Value]) -> list[Value]:
    return list(dict.fromkeys(values.values()))


def _list(gpus: Iterable[int]) -> str:
    return ", ".join(map(str, gpus))


def _shown(name: str, value: Value | None) -> str:
    if value is None:
        return "not known"
    if name == "memory" and isinstance(value, (int, float)):
        return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:g} MiB"
    unit = field_of(name).unit
    return f"{value:g} {unit}".rstrip() if isinstance(value, float) else f"{value} {unit}".rstrip()


def _differs(subject: Subject, text: str, name: str, value: Any, usual: Any) -> Observation:
    evidence = {"field": name, "seen": value, "expected": usual, "advice": _ADVICE.get(name, _OTHERWISE)}
    return Observation(_CHECK, subject, "failed", text, "", Work(operations=1), evidence)


def _of_host(host: int, text: str, name: str, value: Any, usual: Any) -> Observation:
    evidence = {"field": name, "seen": value, "expected": usual, "advice": _ADVICE.get(name, _OTHERWISE)}
    return Observation(_CHECK, Subject("host", (host,)), "failed", text, "", Work(operations=1), evidence)


def _unknown(gpu: int, why: str) -> Observation:
    return Observation(_CHECK, Subject("gpu", (gpu,)), "unknown", why)
