"""Accounts as runs leave them: of a good node, of a bad one, of two hosts, of one GPU."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

from mgpu_check.acceptance.run_report import Accusation, CheckRun, Gpu, Host, RunReport, Verdict
from mgpu_check.devices.observations import Measurement, Observation, Outcome, Part, Subject, Work
from mgpu_check.devices.telemetry.sampler import TelemetrySample

CHECKS = ("inventory", "memory", "compute", "links", "collectives", "training", "health", "performance")
MODEL = "NVIDIA H100 80GB HBM3"
SOFTWARE = {"torch": "2.14.1", "cuda": "13.0", "nccl": "2.28.3", "driver": "580.95.05", "python": "3.11.7"}
COMMAND = "mgpu-check accept --gpus=8"
MIB = 1 << 20
STEADY: dict[str, Any] = {"memory_clock": 2619, "throttle": "", "pcie_replays": 0}
STEADY |= {"pcie_generation": 5, "pcie_width": 16}


def gpus(count: int, host: int = 0, first: int = 0) -> tuple[Gpu, ...]:
    """GPUs of one host, whose numbers in the run begin at `first`."""
    return tuple(
        Gpu(
            number=first + index,
            host=host,
            index=index,
            name=MODEL,
            uuid=f"GPU-{host:04x}{index:04x}-8f2e-4d1c-9b7a-{0x51A0C0DE0000 + 16 * host + index:012x}",
            memory=85_520_809_984,
            serial=f"16530240{host}{index:03}",
            pci=f"0000:{27 + 19 * index:02x}:00.0",
            facts={"vbios": "96.00.89.00.01", "ecc": True, "mig": "disabled", "power_limit": 700, "persistence": None},
        )
        for index in range(count)
    )


def observations(numbers: tuple[int, ...]) -> list[Observation]:
    """The observations of all checks on GPUs that are right."""
    found = []
    for check, number in itertools.product(("inventory", "memory", "compute", "training", "health"), numbers):
        work = Work(bytes=60 << 30, operations=40, seconds=2.5) if check == "memory" else Work(operations=40)
        found.append(Observation(check, Subject("gpu", (number,)), "passed", case=f"{check} of all, seed 7", work=work))
    for number in numbers:
        for way in (Subject("upload", (number,)), Subject("download", (number,))):
            found.append(Observation("links", way, "passed", work=Work(32 * MIB, 8)))
    for pair in itertools.permutations(numbers, 2):
        case = "float32, 2097153 elements, contiguous"
        found.append(Observation("links", Subject("copy", pair), "passed", case=case, work=Work(32 * MIB, 8)))
    if len(numbers) > 1:
        found.append(Observation("collectives", Subject("group", numbers), "passed", work=Work(operations=400)))
    return found


def measurements(numbers: tuple[int, ...]) -> list[Measurement]:
    """Speeds as an NVLink node has them, a little different for each pair."""
    found = []
    for one, other in itertools.permutations(numbers, 2):
        pair, shift = Subject("copy", (one, other)), 1 + 0.01 * math.sin(3 * one + 7 * other)
        found.append(Measurement("links", pair, "copy bandwidth", "B/s", 385e9 * shift, 7, 256 * MIB, 1e9))
        found.append(Measurement("links", pair, "copy bandwidth", "B/s", 71e9 * shift, 7, MIB, 1e9))
        found.append(Measurement("links", pair, "copy latency", "s", 3.1e-6 * shift, 50, 4))
    for number in numbers:
        shift = 1 + 0.01 * math.sin(number)
        for way, rate in ((Subject("upload", (number,)), 55e9), (Subject("download", (number,)), 52.3e9)):
            found.append(Measurement("links", way, f"{way.kind} pinned", "B/s", rate * shift, 7, 256 * MIB))
        for dtype, rate in (("float16", 689e12), ("float64", 61.2e12)):
            gpu = Subject("gpu", (number,))
            found.append(Measurement("compute", gpu, f"matrix product {dtype}", "FLOP/s", rate * shift, 9, 8192))
    if len(numbers) > 1:
        group = Subject("group", numbers)
        found.append(Measurement("collectives", group, "all_reduce bus bandwidth", "B/s", 361e9, 20, 1 << 30))
    return found


def samples(numbers: tuple[int, ...], seconds: float, every: float = 1.0) -> tuple[TelemetrySample, ...]:
    """Telemetry of GPUs that warm up under load."""
    found = []
    for at in (every * n for n in range(int(seconds / every))):
        load = 1 - math.exp(-at / 60)
        for number in numbers:
            values = {
                "temperature": round(34 + 30 * load + 2 * math.sin(number + at / 9)),
                "power": 120 + 540 * load + 15 * math.sin(at / 3 + number),
                "sm_clock": 1980 if at > 2 else 345,
                "ecc_corrected": None,
            }
            found.append(TelemetrySample(at, number, {**STEADY, **values}))
    return tuple(found)


def checks(seconds: float) -> tuple[CheckRun, ...]:
    """One after the other, the first ones short."""
    shares = (0.01, 0.3, 0.2, 0.15, 0.12, 0.15, 0.05, 0.02)
    found, start = [], 0.0
    for name, share in zip(CHECKS, shares, strict=True):
        least = Work(60 << 30, 40, 2.5) if name == "memory" else Work(operations=40)
        found.append(CheckRun(name, start, share * seconds, "passed", Work(operations=20), least))
        start += share * seconds
    return tuple(found)


def good(count: int = 8, seconds: float = 300.0) -> RunReport:
    """A healthy node."""
    numbers = tuple(range(count))
    accepted = Verdict("ACCEPTED")
    return RunReport(
        started="2026-11-22T15:00:00+00:00",
        seconds=seconds,
        command=COMMAND.replace("8", str(count)),
        level="standard",
        verdict=accepted,
        verdicts={0: accepted},
        hosts=(Host(0, "node-a", SOFTWARE),),
        gpus=gpus(count),
        checks=checks(seconds),
        observations=tuple(observations(numbers)),
        measurements=tuple(measurements(numbers)),
        samples=samples(numbers, seconds),
        seed=7,
    )


def one_gpu() -> RunReport:
    """A node with one GPU, which has no pairs and no groups."""
    return good(1, 40.0)


def wrong(check: str, subject: Subject, seen: str, case: str, work: Work, **evidence: object) -> Observation:
    return Observation(check, subject, "failed", seen, case, work, evidence)


def heated(sample: TelemetrySample) -> TelemetrySample:
    late = max(0.0, sample.at - 120)
    changed = {
        "temperature": 41 + min(47, 0.4 * sample.at),
        "sm_clock": max(1190, 1980 - 5 * late),
        "throttle": "thermal (hardware)" if late else "",
        "pcie_replays": int(late // 20),
    }
    return replace(sample, values={**sample.values, **changed})


def bad() -> RunReport:
    """Eight GPUs: one that computes wrong results and grows hot, a link that gives zeros, and what could not be
    checked."""
    right, gpu, link = good(), Subject("gpu", (3,)), Subject("copy", (0, 5))
    lanes = "96 of 1048576 elements are wrong, every 32nd in columns 512 to 527"
    other = "parameters differ from those of 7 other GPUs after step 2"
    zeros = "4194304 bytes from offset 2097152 are zero"
    slow = "matrix product float16 is 290 TFLOP/s (9 repeats): 58% slower than 689 TFLOP/s, median of 7 others"
    entries = [
        *(
            wrong("compute", gpu, lanes, f"matrix product bfloat16, 1024 x 1024 x 1024, seed {seed}", Work(operations=1),
                  offset=16384 + 32 * seed, expected=-17.0, found=math.nan, bits="0x7fc0", period=32)
            for seed in range(3)
        ),
        wrong("training", gpu, other, "transformer, 10 steps", Work(operations=10),
              step=2, parameter="layers.0.linear1.weight", votes={"0": 7, "1": 1}),
        *(
            wrong("links", link, zeros, f"{dtype}, strided by kernel, 6291456 bytes <b>& more</b>", Work(6 * MIB, 1),
                  offset=2097152, length=4194304, found="0x00")
            for dtype in ("float32", "int64")
        ),
        wrong("collectives", right.observations[-1].subject, "element 131072 is 28.0, not 36.0, on ranks 0 to 7",
              "all_reduce float32, 1 MiB, iteration 212", Work(operations=300), iteration=212),
        wrong("performance", gpu, slow, "matrix product float16, size 8192", Work(operations=9),
              quantity="matrix product float16", unit="FLOP/s", size=8192, value=290e12, repeats=9),
        Observation("health", Subject("gpu", (6,)), "unknown", "the device does not know ECC counters"),
        Observation("compute", Subject("gpu", (1,)), "skipped", "no float8 on this device", "float8_e4m3fn"),
    ]  # fmt: skip
    shift = len(right.observations)
    send = "run again; if it fails again, send"
    accusations = (
        Accusation(
            Part("gpu", (3,)),
            (f"compute: GPU 3: {lanes}; 3 of 4 looks failed", f"training: GPU 3: {other}; 1 of 2 looks failed"),
            (*range(shift, shift + 4), shift + 7),
            "follows the device: on ranks 0, 4 and 7 too",
            f"drain the node, reset this GPU and {send} it back",
            f"{COMMAND} -k 'compute or training' --hypothesis-seed=7",
        ),
        Accusation(
            Part("link", (0, 5)),
            (f"links: copy GPU 0 -> GPU 5: {zeros}; 2 of 3 looks failed",),
            (shift + 4, shift + 5),
            "only by the kernel path, above 2 MiB",
            f"drain the node, re-seat both GPUs or their bridge and {send} back the baseboard",
            f"{COMMAND} -k links --hypothesis-seed=7",
        ),
    )
    unknown = ("health: GPU 6: the device does not know ECC counters", "memory: GPU 2: 12 GiB of 60 GiB were tested")
    verdict = Verdict("REJECTED", accusations, unknown, (shift + 6,))
    speeds = [
        replace(one, value=one.value * 0.42) if one.subject in (link, gpu) and one.unit != "s" else one
        for one in right.measurements
    ]
    hot = tuple(heated(sample) if sample.gpu == 3 else sample for sample in right.samples)
    names = ("compute", "links", "training", "collectives", "performance")
    outcomes: dict[str, Outcome] = {**dict.fromkeys(names, "failed"), "memory": "unknown"}
    whys = {"memory": "GPU 2: 12 GiB of 60 GiB were tested"}
    runs = tuple(
        replace(run, outcome=outcomes.get(run.name, run.outcome), why=whys.get(run.name, "")) for run in right.checks
    )
    return replace(
        right,
        verdict=verdict,
        verdicts={0: verdict},
        checks=runs,
        observations=(*right.observations, *entries),
        measurements=tuple(speeds),
        samples=hot,
    )


def two_hosts() -> RunReport:
    """Four simulated GPUs on each of two hosts; a GPU of the second has a wrong memory."""
    first, second = tuple(range(4)), tuple(range(4, 8))
    across = [
        Observation("links", Subject("copy", (one, other)), "passed", work=Work(MIB, 4))
        for one, other in (*itertools.product(first, second), *itertools.product(second, first))
    ]
    bit = "bit 5 of the byte at offset 1048577 stays 1"
    work = Work(16 * MIB, 1)
    stuck = wrong("memory", Subject("gpu", (6,)), bit, "walking bits, pass 1", work, offset=1048577, bits=[5])
    seen = (*observations(first), *observations(second), *across, stuck)
    accusation = Accusation(
        Part("gpu", (6,)),
        (f"memory: GPU 6: {bit}; 1 of 2 looks failed",),
        (len(seen) - 1,),
        "",
        "drain the node, reset this GPU and run again; if it fails again, send it back",
        "mgpu-check accept --gpus=8 --simulate -k memory",
    )
    rejected = Verdict("REJECTED", (accusation,))
    speeds = [*measurements(first), *measurements(second)]
    for one, other in itertools.product(first, second):
        for pair in ((one, other), (other, one)):
            speeds.append(Measurement("links", Subject("copy", pair), "copy bandwidth", "B/s", 21e9, 7, 256 * MIB))
    return replace(
        good(),
        seconds=61.0,
        command="mgpu-check accept --gpus=8 --simulate --hypothesis-seed=3",
        level="quick",
        verdict=rejected,
        verdicts={0: Verdict("ACCEPTED"), 1: rejected},
        hosts=(Host(0, "node-a", SOFTWARE), Host(1, "node-b", SOFTWARE)),
        gpus=(*gpus(4), *gpus(4, host=1, first=4)),
        checks=tuple(replace(run, outcome="failed") if run.name == "memory" else run for run in checks(61.0)),
        observations=seen,
        measurements=tuple(speeds),
        samples=samples((*first, *second), 61.0),
        simulated="cpu",
        planted=("memory-stuck-bit:device=6,address=1048577,bit=5",),
        seed=3,
    )


def inconclusive() -> RunReport:
    """Two checks of all; one did less than its floor."""
    why = "GPU 1: 3 operations of 40"
    verdict = Verdict("INCONCLUSIVE", (), (f"compute: {why}",), (), ("compute", "memory"))
    right, short = good(2, 20.0), Work(operations=3)
    runs = tuple(
        replace(run, outcome="unknown", least=short, why=why) if run.name == "compute" else run
        for run in right.checks
        if run.name in verdict.partial
    )
    seen = tuple(entry for entry in right.observations if entry.check in verdict.partial)
    return replace(right, verdict=verdict, verdicts={0: verdict}, checks=runs, observations=seen, samples=())


ALL = {"good": good, "bad": bad, "two hosts": two_hosts, "one GPU": one_gpu, "inconclusive": inconclusive}
