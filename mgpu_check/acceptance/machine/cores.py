"""Compute the same on every core of a host, and let the cores vote."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from mgpu_check.acceptance.machine.checks import of_host
from mgpu_check.acceptance.robust import LEAST_PEERS
from mgpu_check.devices.observations import Observation, Work

if TYPE_CHECKING:
    import torch

_SEEDS = range(4)
_SIDE = 96

_Key = tuple[int, str]
"""Seed and kind of work."""
_Results = Mapping[_Key, Collection[bytes]]
"""The different results of one core."""


def vote_of_cores(seconds: float, cores: Sequence[int] | None, wrong: int = -1) -> list[Observation]:
    """Compute integers, products, functions and hashes on each core at the same time, pinned, and compare the bits.

    A core is named only if more than half of the cores, and at least two others, agree on another result.

    Args:
        seconds: how long; at least one round.
        cores: the cores of a simulated host, which take turns and are not pinned; None for those of this process.
        wrong: the core that a planted fault makes wrong; -1 for none.
    """
    from mgpu_check.torch_hooks.threads import one_thread

    rounds: dict[int, tuple[int, _Results]] = {}
    refused: list[int] = []
    deadline = time.monotonic() + seconds

    def on_core(core: int, pinned: bool) -> None:
        try:
            if pinned:
                os.sched_setaffinity(0, {core})  # of this thread
        except OSError:
            refused.append(core)
            return
        rounds[core] = _compute(deadline, core == wrong)

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
    found = list(_judged({core: results for core, (_, results) in rounds.items()}))
    machine = len(rounds) if cores is not None else os.cpu_count() or 0
    evidence = {"cores": len(rounds), "of the machine": machine, "not pinned": refused}
    if len(rounds) < 1 + LEAST_PEERS:
        text = f"no core can be named: a vote needs {1 + LEAST_PEERS} cores, and this process may use {len(rounds)}"
        found.append(of_host("skipped", text, "cores", Work(), **evidence))
    if len(rounds) < machine:
        text = f"{machine - len(rounds)} of {machine} cores were not tried: this process may not use them"
        found.append(of_host("skipped", text, "cores", Work(), **evidence))
    return [*found, of_host("passed", "", "cores", Work(operations=done), **evidence)]


def _judged(results: Mapping[int, _Results]) -> Iterator[Observation]:
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


def _compute(deadline: float, wrong: bool) -> tuple[int, _Results]:
    """Return the number of results, and the different results of each kind of work."""
    import torch

    found: dict[_Key, set[bytes]] = {}
    times = 0
    while not times or time.monotonic() < deadline:
        for seed in _SEEDS:
            for kind, tensor in _work(seed):
                if wrong:
                    tensor.view(-1).view(torch.uint8)[seed] ^= 1
                found.setdefault((seed, kind), set()).add(_digest(tensor))
                times += 1
    return times, found


def _work(seed: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield results with equal bits on all cores: sums of small integers are exact, and functions use one code path."""
    import torch

    whole = torch.arange(_SIDE * _SIDE, dtype=torch.int64, device="cpu")
    mixed = (whole * 2654435761 + seed * 40503).bitwise_xor(whole << 7)
    yield "integers", (mixed * 6364136223846793005 + 1442695040888963407).bitwise_xor(mixed >> 13)
    small = (mixed >> 5).remainder(17).sub(8).reshape(_SIDE, _SIDE)
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        exact = small.to(dtype)
        yield f"products in {str(dtype).partition('.')[2]}", exact @ exact.T
    points = small.to(torch.float64).add(9 + seed / 8)
    yield "functions", torch.stack((points.exp(), points.sin(), points.sqrt(), points.log(), 1 / points))


def _digest(tensor: torch.Tensor) -> bytes:
    from mgpu_check.torch_hooks.tensors import memory_of

    return hashlib.sha256(memory_of(tensor.contiguous())).digest()
