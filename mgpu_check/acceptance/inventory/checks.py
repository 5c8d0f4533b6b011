"""Compare the GPUs of a node with a baseline, with their data sheet, and with each other.

A GPU that differs from the baseline or the data sheet is at fault; if all differ equally, the host is. A fact that
neither has is compared among the GPUs. A GPU that differs from the majority is at fault. If no value has a majority,
the GPU with the lower capability is at fault, if the values have such an order. Otherwise the observation is about the
host.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from mgpu_check.devices.observations import Observation, Subject, Work
from mgpu_check.devices.telemetry.fields import Value, field_of, names, pair_field
from mgpu_check.devices.telemetry.sampler import Snapshot, TelemetrySample

_CHECK = "inventory"

_MORE_IS_BETTER = (
    *("memory", "power_limit", "sm_clock_max", "memory_clock_max"),
    *("pcie_generation_max", "pcie_width_max", "nvlinks", "nvlink_speed"),
)
_SAME_MEMORY = 1 / 1024  # GPUs of one model differ by the memory that their firmware reserves
_PCIE = ("pcie_generation", "pcie_width")
# NVLinks are counted by GPU: a mesh may leave out pairs on purpose.
_CAPABILITIES = frozenset(("read", "write", "atomics"))
_BUSY = 10  # percent of the time


@dataclass(frozen=True)
class Reference:
    """The facts that each GPU of a host should have, from one origin."""

    origin: str  # the origin in words, such as "the baseline"
    # name of a fact -> its right value; facts of pairs have their name without the peer
    facts: Mapping[str, Value] = field(default_factory=dict)
    counts: tuple[int, ...] = ()  # the right numbers of GPUs of the host; empty for any number
    # the facts come from a data sheet. A larger value is as good, if more is better, and a fact that the driver does
    # not report is no finding.
    nominal: bool = False

    def meets(self, name: str, value: Value) -> bool:
        expected = self.facts[name]
        if self.nominal and name in _MORE_IS_BETTER:
            return float(value) >= float(expected)
        return _same_as(name)(value, expected)


def examine_inventory(snapshot: Snapshot, *, host: int = 0, references: Sequence[Reference] = ()) -> list[Observation]:
    """Compare the facts of the GPUs of one host with references and with each other.

    For each fact, the first of `references` that has it counts; so does the first that has counts. Return for each GPU
    one failed observation for each fact that differs, or a passed or unknown one. Differences that no single GPU causes
    are about the host, and pairs with fewer capabilities than others have their own.
    """
    if snapshot.absent:
        return [_unknown(gpu, snapshot.absent) for gpu in sorted(snapshot.missing)]
    observations = [_unknown(gpu, reason) for gpu, reason in sorted(snapshot.missing.items())]
    gpu_count = len(snapshot.facts) + len(snapshot.missing)
    counted = next((reference for reference in references if reference.counts), None)
    if counted is not None and gpu_count not in counted.counts:
        expected = ", ".join(map(str, counted.counts))
        text = f"it has {gpu_count} GPUs, and {counted.origin} has {expected}"
        observations.append(_differs(Subject("host", (host,)), text, "count", gpu_count, list(counted.counts)))
    observations += _facts(snapshot, host, references)
    observations += _pairs(snapshot, _reference("p2p", references))
    open_ = {observation.subject for observation in observations if observation.outcome == "unknown"}
    for gpu, facts in sorted(snapshot.facts.items()):
        subject = Subject("gpu", (gpu,))
        if subject in open_:
            continue
        # Also for a GPU with findings: they may be warnings only, and then its work counts.
        fact_count = sum(facts[name] is not None for name in names("fact"))
        unknown = dict(snapshot.unknown.get(gpu, {}))
        evidence = {"not known": unknown} if unknown else {}
        if fact_count:
            work = Work(operations=fact_count)
            observations.append(Observation(_CHECK, subject, "passed", work=work, evidence=evidence))
        else:
            observations.append(_unknown(gpu, "nothing is known of it: " + "; ".join(sorted(set(unknown.values())))))
    return observations


def is_under_load(sample: TelemetrySample) -> bool:
    """Return whether the GPU was under load: by its utilization, or else by its reasons for low clocks."""
    busy = sample.values.get("utilization")
    if isinstance(busy, (int, float)):
        return busy >= _BUSY
    throttle = sample.values.get("throttle")
    return isinstance(throttle, str) and "idle" not in throttle.split(", ")


def examine_pcie(snapshot: Snapshot, samples: Iterable[TelemetrySample]) -> list[Observation]:
    """Compare the largest generation and width of each PCIe link under load with what the GPU and its slot can do.
    An idle link slows down to save power, so samples without load are ignored."""
    under_load: dict[int, list[TelemetrySample]] = {gpu: [] for gpu in snapshot.facts}
    for sample in samples:
        if sample.gpu in under_load and is_under_load(sample):
            under_load[sample.gpu].append(sample)
    return [entry for gpu, busy in sorted(under_load.items()) for entry in _pcie(gpu, snapshot.facts[gpu], busy)]


def _pcie(gpu: int, facts: Mapping[str, Value | None], busy: Sequence[TelemetrySample]) -> list[Observation]:
    subject = Subject("gpu", (gpu,))
    work = Work(operations=len(busy))
    failed = []
    unknown = ""
    for name in _PCIE:
        most = max((value for s in busy if isinstance(value := s.values.get(name), int)), default=None)
        able = facts.get(f"{name}_max")
        if able is None:
            unknown = f"the {field_of(name).text} that it can do is not known"
        elif most is None:
            unknown = unknown or "no sample was taken under load"
        elif most < int(able):
            seen_text = f"under load its {field_of(name).text} is {most}, and it and its slot can do {able}"
            evidence = {"field": name, "seen": most, "expected": able}
            failed.append(Observation(_CHECK, subject, "failed", seen_text, "PCIe under load", work, evidence))
    if failed:
        return failed
    return [Observation(_CHECK, subject, "unknown" if unknown else "passed", unknown, "PCIe under load", work)]


def _reference(name: str, references: Sequence[Reference]) -> Reference | None:
    return next((reference for reference in references if name in reference.facts), None)


def _facts(snapshot: Snapshot, host: int, references: Sequence[Reference]) -> list[Observation]:
    models, observations = snapshot.by_model(), []
    for name in names("fact"):
        for gpus in [sorted(snapshot.facts)] if name == "name" else models:
            reference = _reference(name, references)
            if reference is None:
                observations += _among_each_other(snapshot, name, gpus, host)
            else:
                observations += _against(reference, snapshot, name, gpus, host)
    return observations


def _among_each_other(snapshot: Snapshot, name: str, gpus: Sequence[int], host: int) -> list[Observation]:
    values = {gpu: value for gpu in gpus if (value := snapshot.facts[gpu][name]) is not None}
    same = _same_as(name)
    usual = _majority(list(values.values()), same)
    if usual is None and values and name in _MORE_IS_BETTER:
        usual = max(values.values(), key=float)
    if usual is None:
        if not values:
            return []
        of_values = {value: [gpu for gpu in values if values[gpu] == value] for value in values.values()}
        groups = [f"{_shown(name, value)} on GPUs {_list(mine)}" for value, mine in of_values.items()]
        text = f"its GPUs differ in {field_of(name).text}: {'; '.join(groups)}"
        return [_differs(Subject("host", (host,)), text, name, sorted(map(str, values.values())), None)]
    text, than = field_of(name).text, f"that of the others {_shown(name, usual)}"
    observations = []
    for gpu, value in values.items():
        if not same(value, usual):
            message = f"{text} is {_shown(name, value)}, and {than}"
            observations.append(_differs(Subject("gpu", (gpu,)), message, name, value, usual))
    return observations + _silent(snapshot, name, gpus, usual, than)


def _silent(snapshot: Snapshot, name: str, gpus: Sequence[int], usual: Value, than: str) -> list[Observation]:
    """Return an observation for each GPU that does not report a fact that most GPUs report."""
    silent = [gpu for gpu in gpus if snapshot.facts[gpu][name] is None]
    observations = []
    for gpu in silent if 2 * len(silent) < len(gpus) else ():
        reason = snapshot.unknown.get(gpu, {}).get(name, "not supported")
        if not reason.startswith("error"):  # an error has an observation of its own
            text = f"{field_of(name).text} is {reason}, and {than}"
            observations.append(_differs(Subject("gpu", (gpu,)), text, name, None, usual))
    return observations


def _against(reference: Reference, snapshot: Snapshot, name: str, gpus: Sequence[int], host: int) -> list[Observation]:
    expected = reference.facts[name]
    values = {gpu: snapshot.facts[gpu][name] for gpu in gpus}
    off = {gpu: value for gpu, value in values.items() if value is not None and not reference.meets(name, value)}
    than = f"{reference.origin} has {_shown(name, expected)}"
    text = f"{field_of(name).text} is {{}}, and {than}"
    if len(off) == len(values) > 1 and len(set(off.values())) == 1:
        value = next(iter(off.values()))
        message = "of its GPUs: " + text.format(_shown(name, value))
        return [_differs(Subject("host", (host,)), message, name, value, expected)]
    shown = {gpu: text.format(_shown(name, value)) for gpu, value in off.items()}
    observations = [_differs(Subject("gpu", (gpu,)), shown[gpu], name, off[gpu], expected) for gpu in off]
    if reference.nominal:
        return observations + _silent(snapshot, name, gpus, expected, than)
    return observations + [_unknown(gpu, text.format("not known")) for gpu, value in values.items() if value is None]


def _pairs(snapshot: Snapshot, reference: Reference | None) -> list[Observation]:
    """Compare the capabilities of pairs with the same topology and models, and with a reference."""
    alike: dict[tuple[Any, ...], dict[tuple[int, int], frozenset[str]]] = {}
    texts: dict[tuple[int, int], str] = {}
    for gpu, peer in itertools.permutations(sorted(snapshot.facts), 2):
        facts = snapshot.facts[gpu]
        if (value := facts.get(pair_field("p2p", peer))) is None:
            continue
        pair_class = (facts[pair_field("topology", peer)], facts["name"], snapshot.facts[peer]["name"])
        texts[gpu, peer] = str(value)
        alike.setdefault(pair_class, {})[gpu, peer] = frozenset(str(value).split("+")) & _CAPABILITIES
    observations = []
    for pairs in alike.values():
        usual = _majority(list(pairs.values()), lambda a, b: bool(a == b))
        usual = frozenset().union(*pairs.values()) if usual is None else usual
        for pair, able in pairs.items():
            if able < usual:
                others = "+".join(sorted(usual))
                text = f"peer-to-peer capability is {texts[pair]}, and that of other pairs {others}"
                observations.append(_differs(Subject("copy", pair), text, "p2p", texts[pair], others))
    expected = reference.facts["p2p"] if reference is not None else ""
    wanted = frozenset(str(expected).split("+")) - {""}
    blamed = {observation.subject for observation in observations}
    for pair, text in texts.items():
        if reference is not None and not wanted <= frozenset(text.split("+")) and Subject("copy", pair) not in blamed:
            message = f"peer-to-peer capability is {text}, and {reference.origin} has {expected}"
            observations.append(_differs(Subject("copy", pair), message, "p2p", text, expected))
    return observations


def _majority(values: Sequence[Any], same: Callable[[Any, Any], bool]) -> Any:
    """Return the value that more than half of `values` equal; None if there is no majority."""
    for value, _ in Counter(values).most_common():
        if 2 * sum(same(value, peer) for peer in values) > len(values):
            return value
    return None


def _same_as(name: str) -> Callable[[Any, Any], bool]:
    if name == "memory":
        return lambda a, b: bool(abs(a - b) <= _SAME_MEMORY * max(a, b))
    return lambda a, b: bool(a == b)


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
    return _wrong(subject, text, name, value, {"expected": usual}, "")


def _wrong(
    subject: Subject, text: str, name: str, value: object, details: Mapping[str, object], case: str = "identity"
) -> Observation:
    evidence = {"field": name, "seen": value, **details}
    return Observation(_CHECK, subject, "failed", text, case, Work(operations=1), evidence)


def _unknown(gpu: int, reason: str) -> Observation:
    return Observation(_CHECK, Subject("gpu", (gpu,)), "unknown", reason)


def examine_identity(snapshot: Snapshot, slots: Mapping[int, str], *, host: int = 0) -> list[Observation]:
    """Compare the identities of the GPUs of one host with each other, and their slots with those that torch reports.

    GPUs on a board with several GPUs share its serial number. MIG devices share that of their GPU, and its slot.
    `slots` has the PCI bus id of each GPU by its number, from torch, where it is known. Return failed observations
    only. It is unknown which of two GPUs has a wrong identity, so they are about the host.
    """
    observations = []
    for name in ("uuid", "serial", "pci"):
        owners: dict[object, list[int]] = {}
        for gpu, values in sorted(snapshot.identity.items()):
            facts = snapshot.facts.get(gpu, {})
            may_share = facts.get("mig") == "on" or (name == "serial" and facts.get("multi_gpu_board") is True)
            if values.get(name) and not may_share:
                owners.setdefault(values[name], []).append(gpu)
        for value, gpus in owners.items():
            if len(gpus) > 1:
                text = f"its GPUs {_list(gpus)} have one {field_of(name).text}: {value}"
                observations.append(_wrong(Subject("host", (host,)), text, name, value, {"shared by": gpus}))
    for gpu, slot in sorted(slots.items()):
        reported = snapshot.identity.get(gpu, {}).get("pci")
        if reported and slot and str(reported).lower() != slot.lower():
            text = f"PCI bus id is {reported} for the driver's library, and {slot} for torch"
            observations.append(_wrong(Subject("gpu", (gpu,)), text, "pci", reported, {"of torch": slot}))
    return observations
