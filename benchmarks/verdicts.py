"""Draw what checks see, and measure whether the verdict names the broken part: thousands of draws, without a node.

    python benchmarks/verdicts.py [--draws=1000] [--seed=0]

Each draw is of one kind:

- telemetry: a fault that telemetry shows, on 1 to 8 GPUs whose other values are noisy, and the checks of inventory and
  health on it;
- healthy telemetry: the same noise, and no fault;
- parts: observations of a node of 1 to 8 GPUs, and one or two broken parts. Each case of a broken part fails with a
  probability of 0.3 to 1.

A draw is right if the parts at fault, and no other, are accused. It is undecided if the node is rejected and fewer parts
are accused, all of them at fault. The exit code is 0 if no innocent part is accused, and each healthy node is accepted.
"""

from __future__ import annotations

import argparse
import itertools
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mgpu_check.acceptance.faults import all_hardware_faults, planted_from
from mgpu_check.acceptance.findings import judged
from mgpu_check.acceptance.health.checks import examine_health
from mgpu_check.acceptance.inventory.checks import examine_identity, examine_inventory, examine_pcie
from mgpu_check.acceptance.verdict import explain
from mgpu_check.devices.observations import Observation, Part, PartKind, Subject
from mgpu_check.devices.telemetry.sampler import Snapshot, TelemetrySample, Trouble
from mgpu_check.devices.telemetry.sources import PROFILE, Override

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

# The path has the folders of these modules only now.
from acceptance import drawn, shown_on  # noqa: E402

from tests.acceptance.watching import Run, nominal, watched  # noqa: E402

_TRIES = 12  # of a case, as an acceptance at the level quick tries it


class Noise:
    """Values of a healthy GPU of its own kind: warm or cool, near its power limit or not, idle at times."""

    def __init__(self, chosen: random.Random, fixed: set[str]) -> None:
        self.chosen = chosen
        self.fixed = fixed
        self.base = {
            "temperature": chosen.uniform(40, 80),
            "memory_temperature": chosen.uniform(45, 85),
            "power": chosen.uniform(0.65, 1.0) * float(PROFILE["power_limit"]),
            "sm_clock": chosen.uniform(0.85, 1.0) * float(PROFILE["sm_clock_max"]),
        }
        self.spike = chosen.randrange(1, 31)
        rates = {"pcie_replays": 0.5, "nvlink_crc": 20, "ecc_corrected": 0.2, "thermal_violation": 1e6}
        rates |= {"power_violation": 2e8}
        self.rates = {name: rate * chosen.random() for name, rate in rates.items()}
        self.life = chosen.randrange(1000)

    def gauges(self, at: float, values: Mapping[str, Any]) -> dict[str, Any]:
        spread, spike = self.chosen.gauss, int(at) == self.spike
        found: dict[str, Any] = {name: value * spread(1, 0.02) for name, value in self.base.items()}
        found["temperature"] = 91 if spike else min(88, round(found["temperature"]))
        found["temperature_margin"] = 89 - found["temperature"]
        found["memory_temperature"] = min(94, round(found["memory_temperature"]))
        found["sm_clock"] = min(found["sm_clock"], float(PROFILE["sm_clock_max"]))
        capped = found["power"] > 0.9 * float(PROFILE["power_limit"]) and "sm_clock" not in self.fixed
        found["throttle"] = "thermal (software)" if spike else "power cap" if capped else ""
        if self.chosen.random() < 0.2:  # between two tests
            idle = {"utilization": 0, "sm_clock": 345, "memory_clock": 810, "power": 90.0}
            found |= idle | {"throttle": "idle", "pcie_generation": 1}
        return {**values, **{name: value for name, value in found.items() if name not in self.fixed}}

    def counters(self, at: float, values: Mapping[str, Any]) -> dict[str, Any]:
        found = {name: int(rate * at) for name, rate in self.rates.items()}
        found["ecc_corrected_ever"] = self.life + found["ecc_corrected"]
        return {**values, **{name: value for name, value in found.items() if name not in self.fixed}}


def noisy(run: Run, gpus: Sequence[int], overrides: Sequence[Override], chosen: random.Random) -> None:
    """Add noise to the values of a run that no fault has set."""
    noise = {g: Noise(chosen, {one.field for one in overrides if one.gpu == g}) for g in gpus}

    def of_snapshot(taken: Snapshot) -> Snapshot:
        counters = {g: noise[g].counters(taken.at, values) for g, values in taken.counters.items()}
        return replace(taken, counters=counters)

    def of_sample(sample: TelemetrySample) -> TelemetrySample:
        mine = noise[sample.gpu]
        return replace(sample, values=mine.counters(sample.at, mine.gauges(sample.at, sample.values)))

    run.snapshots = [(name, of_snapshot(taken)) for name, taken in run.snapshots]
    run.samples = [of_sample(sample) for sample in run.samples]


def seen_by_telemetry(text: str, gpus: Sequence[int], chosen: random.Random) -> list[Observation]:
    """Return what the checks of inventory and health see of a fault; of a healthy node if `text` is empty."""
    planted = planted_from(text) if text else None
    overrides = [one for one in planted.fault.telemetry(planted.parameters) if one.gpu in gpus] if planted else []
    hanging = [one for one in overrides if one.error == "timeout"]
    with pytest.MonkeyPatch.context() as patch:
        run = watched(patch, [one for one in overrides if one not in hanging], gpus=gpus)
    run.troubles += [Trouble("hang", one.gpu, one.field, "no answer", 3.0) for one in hanging]
    noisy(run, gpus, overrides, chosen)
    slots = {gpu: f"00000000:{gpu:02X}:00.0" for gpu in gpus}
    found = [
        *examine_inventory(run.first, references=[nominal(len(gpus))]),
        *examine_identity(run.first, slots),
        *examine_pcie(run.first, run.samples),
        *examine_health(run.snapshots, run.samples, run.troubles),
    ]
    return [judged(entry, {}) for entry in found]


def subjects(count: int) -> Iterator[tuple[str, Subject]]:
    """Yield each check of a node with its subject."""
    gpus = range(count)
    for gpu in gpus:
        yield from ((check, Subject("gpu", (gpu,))) for check in ("memory", "compute", "training"))
        yield from (("links", subject) for subject in (Subject("upload", (gpu,)), Subject("download", (gpu,))))
    yield from (("links", Subject("copy", pair)) for pair in itertools.permutations(gpus, 2))
    groups = {tuple(gpus), *itertools.combinations(gpus, 2)} if count > 1 else set()
    groups |= {half for half in (tuple(gpus[: count // 2]), tuple(gpus[count // 2 :])) if len(half) > 1}
    yield from (("collectives", Subject("group", group)) for group in sorted(groups))
    if count > 1:
        yield "training", Subject("group", tuple(gpus))


def touches(part: Part, theme: str, check: str, subject: Subject) -> bool:
    """Return whether a broken part can spoil a case. `theme` is what the fault of a GPU spoils."""
    members = set(subject.members)
    if part.kind == "host":
        return True
    if part.kind == "host-link":
        return subject.kind in ("upload", "download") and members == set(part.members)
    if part.kind == "link":
        both = set(part.members) <= members
        return subject.members == part.members if subject.kind == "copy" else subject.kind == "group" and both
    if not set(part.members) & members:
        return False
    themes = {"memory": ("memory",), "compute": ("compute", "training"), "links": ("links",)}
    return check in themes.get(theme, ("collectives",)) and (theme != "links" or subject.kind == "copy")


def seen_of_parts(parts: Mapping[Part, str], count: int, chosen: random.Random) -> list[Observation]:
    """Return the observations of a node with broken parts. Each case was tried several times."""
    chance = {part: chosen.uniform(0.3, 1.0) for part in parts}
    found = []
    for check, subject in subjects(count):
        for _ in range(_TRIES):
            wrong = any(touches(p, theme, check, subject) and chosen.random() < chance[p] for p, theme in parts.items())
            found.append(Observation(check, subject, "failed" if wrong else "passed"))
    return found


def broken(count: int, chosen: random.Random) -> dict[Part, str]:
    """Draw one or two broken parts of a node, with what the fault of a GPU spoils."""
    parts: dict[Part, str] = {}
    for _ in range(chosen.choice((1, 1, 1, 2)) if count > 3 else 1):
        kinds: list[PartKind] = ["gpu", "gpu", "host-link"]
        kinds += ["link"] if count > 1 else []
        kinds += ["host"] if count > 1 and not parts else []
        kind = chosen.choice(kinds)
        members = tuple(chosen.sample(range(count), 2 if kind == "link" else 1)) if kind != "host" else (0,)
        part = Part(kind, members)
        if any(set(other.members) & set(members) or other.kind == "host" for other in parts):
            continue
        parts[part] = chosen.choice(("memory", "compute", *(("links", "collectives") if count > 2 else ())))
    return parts


def directed(accused: set[Part], broken: set[Part]) -> set[Part]:
    """Return the accused parts without the other direction of a link that is broken in one: collectives show no
    direction."""
    return accused - {Part(one.kind, one.members[::-1]) for one in accused & broken if one.kind == "link"} | (
        accused & broken
    )


def drawing(kind: str, chosen: random.Random) -> tuple[str, set[Part], list[Observation], int]:
    """Draw a case: what is broken, in words and as parts, and what the checks see."""
    count = chosen.randint(1, 8)
    if kind == "parts":
        parts = broken(count, chosen)
        words = ", ".join(f"{part} ({theme})" for part, theme in parts.items())
        return words, set(parts), seen_of_parts(parts, count, chosen), count
    if kind == "healthy telemetry":
        return "no fault", set(), seen_by_telemetry("", range(count), chosen), count
    faults = [one for one in all_hardware_faults().values() if one.telemetry(one.defaults) and one.level == "quick"]
    text = drawn([one for one in faults if shown_on(one, count)], count, chosen)
    return text, set(planted_from(text).parts), seen_by_telemetry(text, range(count), chosen), count


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000, help="of each kind")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    wrong = 0
    for kind in ("telemetry", "healthy telemetry", "parts"):
        counts: Counter[str] = Counter()
        began = time.process_time()
        for number in range(given.draws):
            words, parts, seen, count = drawing(kind, random.Random(f"{kind} {given.seed + number}"))
            explanation = explain(seen, (0,) * count)
            accused = directed(set(explanation.parts), parts)
            failures = any(entry.outcome == "failed" for entry in seen)
            innocent = accused - parts
            said = (
                "right" if accused == parts and not explanation.unexplained else "undecided" if failures else "missed"
            )
            said = "innocent part accused" if innocent else said
            counts[said] += 1
            if said != "right":
                names = ", ".join(map(str, sorted(accused))) or "-"
                print(f"{said}: {count} GPUs, {words}: {names}  (seed {given.seed + number})")
        wrong += counts["innocent part accused"] + counts["missed"]
        print(f"{kind}: {dict(counts)}, {time.process_time() - began:.0f} s of processor time", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
