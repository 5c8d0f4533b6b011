"""Check the host of the GPUs: its cores, its memory, its NICs and slots, and the paths of collectives."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mgpu_check.acceptance.machine import checks
from mgpu_check.acceptance.machine.checks import SimulatedHost, log_of_nccl, write_tree
from mgpu_check.acceptance.node import Node, seconds_for_a_call
from mgpu_check.devices.observations import Observation, Work
from mgpu_check.processes.machine import boot_id

_SECONDS = {"quick": 0.3, "standard": 5.0, "long": 30.0}
"""Seconds that the cores compute, at each level; at most half of the time limit of a call."""
_MEMORY = {"quick": (64 << 20, 1), "standard": (1 << 30, 2), "long": (1 << 30, 16)}
"""Bytes of host memory, and how often other ones are taken, at each level. A call must end within its time limit."""
_PASSES = 2
_COPIES = 64  # copies of 1 MiB in the time that a core takes for 8 MiB: enough to keep PCIe busy
_SIMULATED = (4 << 20, 1)


def _simulated(node: Node) -> SimulatedHost | None:
    if not node.simulated:
        return None
    fields: dict[str, Any] = {}
    for planted in node.plan.planted:
        for name, value in planted.fault.of_host.items():
            fields[name] = {**fields.get(name, {}), **value} if isinstance(value, Mapping) else value
    return SimulatedHost(**fields)


def look_at_cores(devices: Sequence[object], seconds: float, simulated: SimulatedHost | None) -> list[Observation]:
    """Let the cores of this host vote; those of a simulated host take turns, once."""
    if simulated is None:
        return checks.vote_of_cores(seconds, None)
    return checks.vote_of_cores(0.0, range(simulated.cores), simulated.core)


def look_at_kernel(
    devices: Sequence[object], before: Mapping[tuple[str, str], checks.KernelFacts], simulated: SimulatedHost | None
) -> list[Observation]:
    """Judge what the kernel of this host says before and after the run. `before` has the facts of each host by its name
    and boot id."""
    if simulated is None:
        return checks.examine_kernel(before.get((socket.gethostname(), boot_id())), checks.read_kernel())
    with tempfile.TemporaryDirectory() as directory:
        facts = []
        for name, changes in (("before", simulated.before), ("after", simulated.after)):
            write_tree(Path(directory) / name, changes)
            facts.append(checks.read_kernel(Path(directory) / name, range(simulated.cores)))
    return checks.examine_kernel(*facts)


def test_cores_agree(node: Node) -> None:
    """Each core of the host computes the same bits of integers, products and functions."""
    seconds = min(_SECONDS[node.depth], seconds_for_a_call() / 2)
    node.in_node_process("machine", look_at_cores, seconds, _simulated(node))


def test_ram_keeps_its_content(node: Node) -> None:
    """Memory of the host holds what was written while copies to and from the GPUs run."""
    simulated = _simulated(node)
    size, times = _SIMULATED if simulated else _MEMORY[node.depth]
    copies, wrong_word = (1, simulated.word) if simulated else (_COPIES, -1)
    for _ in range(times):
        node.in_node_process("machine", checks.examine_memory, size, _PASSES, copies, wrong_word)


def test_no_errors_were_counted(node: Node) -> None:
    """NICs, slots and memory controllers counted no errors in the run, and links have their full rate."""
    node.in_node_process("machine", look_at_kernel, node.kernel_before, _simulated(node))


def test_the_fabric_is_used(node: Node) -> None:
    """NCCL uses direct access where GPUs have it, and InfiniBand where hosts have it."""
    is_short = node.depth == "quick" and not node.simulated
    reason = "at quick, there is no time to start NCCL again" if is_short else None
    if len(node.numbers) < 2:
        reason = "one GPU has no path to another"
    if reason:
        skipped = checks.of_host("skipped", f"paths of collectives were not tried: {reason}", "transport", Work())
        node.record(skipped.on((), host) for host in node.hosts)
        return
    gpus = [node.gpus[number] for number in node.numbers]
    simulated = _simulated(node)
    if simulated is None:
        paths = node.on_ranks("machine", checks.paths_of_rank, environment=checks.environment())
    else:
        paths = [checks.paths_in(log_of_nccl(len(gpus), simulated.transport))]
    node.record(checks.examine_paths(paths, gpus, node.fabric))
