"""Read the paths between GPUs from the debug log of NCCL, and compare them with the paths that the hardware has."""

from __future__ import annotations

import os
import re
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from mgpu_check.acceptance.machine.checks import of_host
from mgpu_check.acceptance.run_report import Gpu
from mgpu_check.devices.observations import Observation, Work
from mgpu_check.engine.rank_side.rank import Rank

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
