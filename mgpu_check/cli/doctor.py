"""`mgpu-check doctor`: say whether ranks can run on this machine, and what to change."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mgpu_check.cli.codes import RIGHT, WRONG, Parser
from mgpu_check.cli.doctor_facts import GpuFacts, of_devices, of_host
from mgpu_check.cli.doctor_probes import Judgement, examine
from mgpu_check.devices.inventory import Inventory
from mgpu_check.errors import RankFailure, RankHang
from mgpu_check.plugin.device_leases import TooFewDevices
from mgpu_check.plugin.session import GpuSession
from mgpu_check.settings import resolve

if TYPE_CHECKING:
    from mgpu_check import Rank

_SIMULATED = 4
"""Number of simulated GPUs to plan for, on a machine without GPUs."""

_TIMEOUT = "120"  # seconds; the first rank imports torch


def main(argv: Sequence[str]) -> int:
    """Print a line for each fact about this machine, and try a sum over ranks.

    Returns:
        Exit code 0, also with warnings; 1 if ranks cannot run; 4 for wrong usage.
    """
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
        print(
            json.dumps(
                {"works": not bad, "judgements": [dataclasses.asdict(judgement) for judgement in judgements]}, indent=2
            )
        )
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
        judgements.append(
            Judgement("bad", "GPUs", f"{count} of {gpus} are visible", f"use --gpus={count}, or --simulate")
        )
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
        found = session.pool.run(_all_reduce)
        session.end_test(failed=False)
    except (RankFailure, RankHang) as error:
        return [Judgement("bad", "ranks", f"{who}: {_first_line(error)}", "the whole report: mgpu-check -k fixtures")]
    seconds = time.perf_counter() - started
    size = len(found)
    expected = [float(size * (size + 1) // 2)] * size
    if found != expected:
        return [Judgement("bad", "ranks", f"{who} add up to {found}, and should to {expected}", "mgpu-check accept")]
    return [Judgement("ok", "ranks", f"{who} started, and added up a tensor, in {seconds:.1f} s")]


def _all_reduce(rank: Rank) -> float:
    import torch
    import torch.distributed as dist

    x = torch.tensor(rank.index + 1.0).to(rank.device)
    dist.all_reduce(x)
    return float(x)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
