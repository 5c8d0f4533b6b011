"""Measure whether an acceptance names the broken part, on simulated GPUs with a planted hardware fault.

    python benchmarks/acceptance.py matrix [FAULT ...] [--level=quick|standard] [-k NAME] [--own|--first] [--json=FILE]
    python benchmarks/acceptance.py draws [--faults=500] [--healthy=300] [--gpus=4] [--seed=0] [--own|--first|--sample=N] [--json=FILE]

``matrix`` plants each fault once, with its defaults, and prints the checks that saw it, the accused part, and the
time. ``--own`` runs only the checks that must see it, and no healthy node; ``--first`` ends them with the first test that
sees it, so that the verdict has the least evidence. ``--sample=8`` runs inventory and health, the tests of these checks
in a random order up to the first that sees the fault, and 8 tests of all others: a tenth of the work.

``draws`` draws faults, their devices, sizes, dtypes and seeds. It also draws healthy nodes. Their GPUs differ by up to
8 % in speed, and in temperatures, power, clocks and old errors.

All runs are in one process, one after the other; the file of ``--json`` is written after each. The exit code is 0 if
each planted fault was REJECTED, its part and no other accused, and each healthy node ACCEPTED. If 2 GPUs differ, no
majority shows which of them is wrong: then it is right too if no part is accused, or, for different facts, the host.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import mgpu_check.acceptance
from mgpu_check.acceptance.faults import HardwareFault, Planted, all_hardware_faults, planted_from
from mgpu_check.cli.suite import run as run_suite
from mgpu_check.devices.telemetry.sources import PROFILE, Override

LEVELS = ("quick", "standard", "long")


@dataclasses.dataclass
class Outcome:
    """The result of an acceptance with one planted fault; on a healthy node `planted` is empty."""

    planted: str
    seed: int
    gpus: int
    kind: str = ""
    accused: tuple[str, ...] = ()
    wanted: tuple[str, ...] = ()
    seen_by: tuple[str, ...] = ()
    unknown: tuple[str, ...] = ()
    seconds: float = 0.0

    @property
    def right(self) -> bool:
        if not self.planted:
            return self.kind == "ACCEPTED"
        undecided = self.gpus == 2 and set(self.accused) <= ({"host 0"} if self.seen_by == ("inventory",) else set())
        return self.kind == "REJECTED" and (set(self.accused) == set(self.wanted) or undecided)

    @property
    def innocent(self) -> tuple[str, ...]:
        """Parts that were accused, and are right."""
        return () if self.right else tuple(part for part in self.accused if part not in self.wanted)

    def line(self) -> str:
        sign = "right" if self.right else "WRONG"
        accused = ", ".join(self.accused) or "-"
        why = f"; unknown: {self.unknown[0][:80]}" if self.unknown else ""
        seen = f"; seen by {', '.join(self.seen_by)}" if self.seen_by else ""
        return f"{sign}  {self.seconds:5.1f} s  {self.planted or 'no fault':44} {self.kind}: {accused}{seen}{why}"


class Repeated:
    """A pytest plugin that runs all tests of the acceptance once for each case, as a run of its own with its own
    verdict."""

    def __init__(
        self,
        cases: Sequence[tuple[str, int]],
        own: bool = False,
        kept: Path | None = None,
        first: bool = False,
        sample: int = 0,
    ) -> None:
        self.cases = cases
        self.own = own or first
        self.first = first
        self.sample = sample
        self.kept = kept
        self.outcomes: list[Outcome] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        writer = session.config.get_terminal_writer()
        shown, writer._file = writer._file, io.StringIO()
        try:
            for planted, seed in self.cases:
                outcome = self._one(session, planted, seed)
                self.outcomes.append(outcome)
                print(outcome.line(), file=shown, flush=True)
                if self.kept:
                    self.kept.write_text(json.dumps([dataclasses.asdict(one) for one in self.outcomes], indent=1))
        finally:
            writer._file = shown
        return True

    def _one(self, session: pytest.Session, planted: str, seed: int) -> Outcome:
        from hypothesis import core

        from mgpu_check.acceptance.conftest import RUN, _check_of
        from mgpu_check.acceptance.run import Run
        from mgpu_check.plugin.stash import SESSION

        config = session.config
        core.global_force_seed = seed
        before = config.stash[RUN]
        faults = (planted_from(planted),) if planted else ()
        noise = noise_of(config.stash[SESSION].settings.gpus or 0, random.Random(f"noise {seed}"))
        plan = dataclasses.replace(before.plan, planted=faults or noise)
        run = config.stash[RUN] = Run(config.stash[SESSION], plan, "mgpu-check accept", seed)
        items = list(session.items)
        needed = faults[0].fault.caught_by if faults else ()
        if self.own and needed:
            judged = "performance" in needed
            items = [item for item in items if _check_of(item) in needed or (judged and measures(item))]
        mine: set[pytest.Item] = set()
        if self.sample:
            items, mine = sampled(items, needed, random.Random(f"{planted} {seed}"), self.sample)
        left_out = {_check_of(item) for item in set(session.items) - set(items)}
        run.selected = {_check_of(item) for item in items} - (left_out if self.sample else set())
        seen = False
        began = time.monotonic()
        try:
            run.start()
            for item, after in zip(items, [*items[1:], None], strict=True):
                if seen and item in mine:
                    continue
                session._setupstate.teardown_exact(item)
                item._initrequest()  # type: ignore[attr-defined]  # as plugins do that repeat tests
                config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                seen = any(entry.outcome == "failed" for entry in run.log.observations())
                if self.first and seen:
                    session._setupstate.teardown_exact(None)
                    break
            run.look_again()
        finally:
            run.end()
        report = run.report()
        failed = {observation.check for observation in report.observations if observation.outcome == "failed"}
        return Outcome(
            planted,
            seed,
            len(report.gpus),
            report.verdict.kind,
            tuple(str(accusation.part) for accusation in report.verdict.accusations),
            tuple(str(part) for one in faults for part in one.parts),
            tuple(sorted(failed)),
            report.verdict.unknown,
            time.monotonic() - began,
        )


_MEASURING = ("test_speed_of", "test_memory_holds_what_is_written", "test_results_are_right")
"""Names of tests that measure the speeds that the check of performance judges."""


def measures(item: pytest.Item) -> bool:
    """Return whether a test measures speeds."""
    return any(name in item.name for name in _MEASURING)


_JUDGED = {False: 0.1, True: 0.03}
"""Share of the samples whose speeds are judged: of healthy nodes, and of nodes with a fault other than a slow part."""
_UNLIKE = 1.08
"""GPUs of one model differ by 8 % on average (Sinha et al., SC 2022)."""


def noise_of(gpus: int, chosen: random.Random) -> tuple[Planted, ...]:
    """Draw differences between healthy GPUs: their speeds, temperatures, power, clocks, and old errors."""
    found = []
    for gpu in range(gpus):
        for name in ("slow-gpu", "slow-host-link"):
            found.append(planted_from(f"{name}:device={gpu},factor={chosen.uniform(1, _UNLIKE):.3f}"))
        temperature, power = chosen.randrange(35, 87), chosen.uniform(0.65, 1.0) * float(PROFILE["power_limit"])
        values = {
            "temperature": temperature,
            "temperature_margin": int(PROFILE["temperature_slowdown"]) - temperature,
            "memory_temperature": chosen.randrange(40, 94),
            "power": power,
            "sm_clock": int(chosen.uniform(0.85, 1.0) * float(PROFILE["sm_clock_max"])),
            "throttle": chosen.choice(("", "power cap")),
            "ecc_corrected": chosen.randrange(5),
            "ecc_corrected_ever": chosen.randrange(5, 1000),
            "pcie_replays": chosen.randrange(3),
        }
        # The ranks look a fault up by its name, and this one has no defect there.
        found.append(planted_from(f"memory-hot:device={gpu}"))
        overrides = [Override(gpu, field, value) for field, value in values.items()]
        fault = dataclasses.replace(found[-1].fault, telemetry=lambda _, overrides=overrides: overrides)
        found[-1] = dataclasses.replace(found[-1], fault=fault)
    return tuple(found)


def sampled(
    items: Sequence[pytest.Item], needed: Sequence[str], chosen: random.Random, count: int
) -> tuple[list[pytest.Item], set[pytest.Item]]:
    """Return the tests to run, and those of them that must see the fault.

    Inventory and health always run. The tests that measure, and performance, run if performance must see the fault,
    and in some of the other samples.
    """
    from mgpu_check.acceptance.conftest import _check_of

    checks = {item: _check_of(item) for item in items}
    always = [item for item in items if checks[item] in ("inventory", "health")]
    if "performance" in needed or chosen.random() < _JUDGED[bool(needed)]:
        always += [item for item in items if checks[item] == "performance" or measures(item)]
    mine = [item for item in items if item not in always and checks[item] in needed]
    others = [item for item in items if item not in always and item not in mine and checks[item] != "performance"]
    run = {*always, *mine, *chosen.sample(others, min(count, len(others)))}
    last = [item for item in always if checks[item] in ("performance", "health")]
    order = chosen.sample(items, len(items))
    return [*(item for item in order if item in run and item not in last), *last], set(mine)


_SIZES: dict[tuple[str, Any], tuple[int, ...]] = {
    ("above", 0): (0, 1000, 65536),
    ("above", 4096): (0, 1024, 4096),
    ("length", 64): (8, 64, 1024),
    ("length", 1024): (16, 256, 4096),
    ("distance", 4096): (4096, 65536, 1 << 20),
}
"""Parameter and its default -> values that must be found as soon."""


VARIANTS = (
    *(f"xid:value={xid}" for xid in (13, 31, 62, 63, 64, 74, 79, 92, 94, 95, 109, 119, 120, 140, 145)),
    *(f"telemetry-errs:field={name}" for name in ("temperature", "nvlinks", "memory", "throttle", "remap_pending")),
    *(f"driver-hangs:field={name}" for name in ("ecc_uncorrected", "sm_clock", "serial")),
    *(f"product-inner:inner={length}" for length in (16, 129, 255, 512, 768, 1024)),
    *(f"product-dtype:dtype={name}" for name in ("float64", "float32", "bfloat16", "int8", "float8_e4m3fn")),
    *(f"copy-large:above={size}" for size in (65536, 1 << 20)),
    *(f"copy-tail:above={size}" for size in (65536, 2 << 20)),
    *("copy-offset:above=2097152", "copy-lanes:above=2097152", "copy-stale:above=65536"),
    *("upload-truncated:above=1048576", "download-truncated:above=1048576", "download-pageable:above=65536"),
    *(f"memory-leaks:seconds={seconds}" for seconds in (0.5, 1.0, 2.4)),
    *(f"memory-stuck-at-one:address={address}" for address in (0, 8388607, 13000000)),
    *("memory-aliased:distance=8388608", "memory-dead-row:length=8", "memory-weak:every=3"),
    *(f"collective-wrong:operation={name}" for name in ("reduce", "gather", "scatter", "all_gather")),
    *(f"all-reduce-dtype:dtype={name}" for name in ("float64", "float16", "int64", "uint8")),
)
"""Faults with parameters other than their defaults, which other kernels, paths, sizes or fields show."""

_ALIKE = ("clock-beside", "collective-of-three")
"""Faults other than those of inventory and speed that only a majority shows, or groups of three."""


_OF_FOUR = ("slow-collective", "slow-small-collectives")
"""Faults that three GPUs do not show: the one pair that is not slow may have a faster link."""


def shown_on(fault: HardwareFault, gpus: int) -> bool:
    """Return whether a node of `gpus` GPUs can show a fault: one GPU has no peers, and two have no majority."""
    if gpus < 4 and fault.name in _OF_FOUR:
        return False
    if gpus == 1 and ("peer" in fault.defaults or fault.caught_by in (("collectives",), ("links",))):
        return fault.name.startswith(("upload", "download"))
    return gpus > 2 or (fault.caught_by not in (("inventory",), ("performance",)) and fault.name not in _ALIKE)


def drawn(faults: Sequence[HardwareFault], gpus: int, chosen: random.Random) -> str:
    """Draw a fault, its device or link, and sizes, dtype and seed where others must be found as soon."""
    fault = chosen.choice(faults)
    device, peer = chosen.sample(range(gpus), 2) if gpus > 1 else (0, 0)
    values: dict[str, Any] = {
        "device": device,
        "peer": peer,
        "seed": chosen.randrange(1000),
        "bit": chosen.randrange(8),
        "address": chosen.randrange(1 << 20, 10 << 20),
        "dtype": chosen.choice(("float16", "bfloat16", "float32")),
        "factor": chosen.choice((2.0, 3.0, 8.0)),
    }
    given = {name: values[name] for name in values if name in fault.defaults}
    for (name, default), sizes in _SIZES.items():
        if fault.defaults.get(name) == default:
            # The level quick makes few large copies: a fault that is rare and strikes only them is beyond its reach.
            given[name] = chosen.choice(sizes[:2] if "every" in fault.defaults else sizes)
    return planted_from(f"{fault.name}:" + ",".join(f"{name}={value}" for name, value in given.items())).text


def cases_of(given: argparse.Namespace) -> Iterator[tuple[str, int]]:
    faults = [
        fault
        for name, fault in sorted(all_hardware_faults().items())
        if any(part in name for part in given.k.split(","))
    ]
    if given.command == "matrix":
        reached = LEVELS.index(given.level)
        chosen = [fault for fault in faults if LEVELS.index(fault.level) <= reached]
        if not (given.own or given.first):
            yield "", given.seed
        names = {fault.name for fault in chosen}
        variants = [text for text in VARIANTS if text.partition(":")[0] in names]
        for text in given.planted or [*sorted(names), *variants]:
            yield text, given.seed
        return
    chosen_from = random.Random(given.seed)
    quick = [fault for fault in faults if fault.level == "quick" and shown_on(fault, given.gpus)]
    kinds = [True] * given.faults + [False] * given.healthy
    chosen_from.shuffle(kinds)
    for number, planted in enumerate(kinds):
        yield (drawn(quick, given.gpus, chosen_from) if planted else ""), given.seed + number


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("matrix", "draws"))
    parser.add_argument(
        "planted", nargs="*", metavar="FAULT", help="of a matrix, with parameters or without (default: each)"
    )
    parser.add_argument("--level", choices=LEVELS[:2], default="quick")
    parser.add_argument(
        "-k", default="", metavar="NAME", help="only faults with one of these in their names, joined by commas"
    )
    parser.add_argument("--own", action="store_true", help="run only the checks that must see the fault")
    parser.add_argument("--first", action="store_true", help="the same, up to the first test that sees it")
    parser.add_argument("--sample", type=int, default=0, help="the same, and N tests of the other checks", metavar="N")
    parser.add_argument("--faults", type=int, default=500)
    parser.add_argument("--healthy", type=int, default=300)
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="keep the outcomes in this file")
    given = parser.parse_intermixed_args()
    repeated = Repeated(list(cases_of(given)), given.own, given.json, given.first, given.sample)
    options = [f"--gpus={given.gpus}", "--simulate", f"--gpu-level={given.level}", "--no-summary", "--tb=no"]
    run_suite(options, [repeated], mgpu_check.acceptance)
    outcomes = repeated.outcomes
    planted = [one for one in outcomes if one.planted]
    healthy = [one for one in outcomes if not one.planted]
    print(
        f"{sum(one.right for one in planted)} of {len(planted)} planted faults: rejected, the right part accused; "
        f"{sum(bool(one.innocent) for one in outcomes)} wrong accusations; "
        f"{sum(one.right for one in healthy)} of {len(healthy)} healthy nodes accepted; "
        f"{sum(one.seconds for one in outcomes):.0f} s"
    )
    whole = len(outcomes) == len(repeated.cases) and bool(outcomes)
    return 0 if whole and all(one.right for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
