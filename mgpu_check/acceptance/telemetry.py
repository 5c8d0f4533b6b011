"""Telemetry of all hosts of a run: continuous on the first host, which runs pytest; at intervals on the others.

On another host, telemetry is read within calls of its processes: after tests, at most every few seconds, and under the
load of the checks of inventory and health. These calls read its counters and state, and its clocks and links under
load. An Xid there is seen only if it occurs during such a call.

`keep_busy` is this load, under which a GPU and its links reach their full speed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from mgpu_check.acceptance.inventory.checks import is_under_load
from mgpu_check.acceptance.run_report import Gpu
from mgpu_check.devices.telemetry.sampler import Snapshot, TelemetrySample, TelemetrySampler, Trouble, Visit, visit
from mgpu_check.devices.telemetry.sources import SimulatedTelemetry
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import RankFailure, RankHang
from mgpu_check.processes.rank_lists import grouped

if TYPE_CHECKING:
    from mgpu_check.acceptance.node import Node
    from mgpu_check.engine.pool import RankPool


_SIDES = (256, 8192)  # the first, and the largest
_SHORT = 0.002  # seconds; a faster round doubles the side of the matrix
_SHARE = 64  # of the free memory


def keep_busy(rank: Rank, seconds: float) -> int:
    """Multiply matrices, and copy the products to the host and back, for `seconds`."""
    import torch

    free, _ = torch.cuda.mem_get_info(rank.device)
    largest = min(_SIDES[1], int((free // _SHARE // 4) ** 0.5))
    matrix = torch.randn(min(_SIDES[0], largest), min(_SIDES[0], largest), device=rank.device)
    times = 0
    end = time.monotonic() + seconds
    while (begun := time.monotonic()) < end:
        product = (matrix @ matrix).clamp_(-1, 1)
        product.copy_(product.cpu())
        torch.cuda.synchronize(rank.device)
        times += 1
        side = 2 * len(matrix)
        if time.monotonic() - begun < _SHORT and side <= largest:
            matrix = torch.randn(side, side, device=rank.device)
    return times


_EVERY = 5.0  # seconds between two visits of a host after tests
_PATIENCE = 60.0
_TRIES = 3


class Watch:
    """The telemetry of a run; `epoch` is its start by `time.monotonic`, and `simulated` the source of simulated GPUs.

    `Run.start` makes it. `Node.mark` takes a snapshot before the first test and after each, the checks of inventory and
    health call `under_load`, and `Run.end` closes it. `interval` is the seconds between two samples of a GPU.
    """

    def __init__(
        self, gpus: Sequence[Gpu], pool: RankPool, simulated: SimulatedTelemetry | None, interval: float, epoch: float
    ) -> None:
        self.interval = interval
        self._pool = pool
        self._simulated = simulated
        self._of = dict(grouped((gpu.host, (gpu.number, gpu.uuid)) for gpu in gpus))
        # number of a host -> numbers of its GPUs
        self.hosts = {host: [number for number, _ in host_gpus] for host, host_gpus in self._of.items()}
        self._sampler = TelemetrySampler(self._of.pop(0, []), simulated, interval, epoch=epoch)
        self._visited: dict[int, float] = {}
        self._answering: set[int] = set()
        self._samples: list[TelemetrySample] = []
        self._troubles: dict[tuple[object, ...], Trouble] = {}

    def now(self) -> float:
        """Return the seconds since the start of the run."""
        return self._sampler.now()

    def snapshot(self, *, full: bool = True) -> Snapshot:
        """Take a snapshot now. Skip other hosts that were read less than `_EVERY` seconds ago, unless it is `full`."""
        snapshot = self._sampler.snapshot(_PATIENCE, full=full)
        for host, gpus in self._of.items():
            if full or self.now() - self._visited[host] >= _EVERY:
                # Its `absent` does not count, because it is of one host only.
                addition = self._looked(host, gpus, full)
                maps = ("facts", "counters", "gauges", "unknown", "missing", "identity")
                joined: dict[str, Any] = {name: {**getattr(snapshot, name), **getattr(addition, name)} for name in maps}
                snapshot = replace(snapshot, **joined)
        self._answering = set(snapshot.facts)
        return snapshot

    def under_load(self, node: Node, check: str, seconds: float) -> list[TelemetrySample]:
        """Keep the GPUs of all hosts busy for `seconds`, and return the new samples.
        Repeat up to `_TRIES` times if a GPU has no sample under load: on a busy machine a sample may come late."""
        begun = self.now()
        for _ in range(_TRIES):
            numbers, guests = node.numbers, {}
            for gpus in self._of.values():
                index = next((numbers.index(number) for number, _ in gpus if number in numbers), None)
                if index is not None:
                    guests[index] = (gpus, self._made_of(), self.interval)
            for result in node.on_ranks(check, busy_and_listening, seconds, guests):
                if isinstance(result, Visit):
                    self._note(result)
            samples = [sample for sample in self.samples() if sample.at >= begun]
            if self._answering & set(node.numbers) <= {sample.gpu for sample in samples if is_under_load(sample)}:
                break
        return samples

    def samples(self) -> list[TelemetrySample]:
        return sorted([*self._sampler.samples(), *self._samples], key=lambda sample: (sample.at, sample.gpu))

    def troubles(self) -> list[Trouble]:
        return [*self._sampler.troubles(), *self._troubles.values()]

    def close(self) -> None:
        self._sampler.close()

    def _looked(self, host: int, gpus: Sequence[tuple[int, str]], full: bool) -> Snapshot:
        self._visited[host] = self.now()
        try:
            (result,) = self._pool.run_in_node_process(
                visit, gpus, self._made_of(), self.interval, full, host=host, timeout=2 * _PATIENCE
            )
        except (RankFailure, RankHang) as error:
            reason = f"telemetry could not be read: {str(error).splitlines()[0]}"
            return Snapshot(at=self.now(), missing={number: reason for number, _ in gpus})
        return self._note(result)

    def _made_of(self) -> SimulatedTelemetry | None:
        return None if self._simulated is None else replace(self._simulated, elapsed=self.now())

    def _note(self, host_visit: Visit) -> Snapshot:
        """Store the samples and troubles of a visit with times of the run's clock, and return its snapshot."""
        # Some samples follow the snapshot.
        latest = max([host_visit.snapshot.at, *(sample.at for sample in host_visit.samples)])
        ahead = self.now() - latest
        self._samples += [replace(sample, at=sample.at + ahead) for sample in host_visit.samples]
        for trouble in host_visit.troubles:
            same = (trouble.kind, trouble.gpu, trouble.field, trouble.code)
            self._troubles.setdefault(same, replace(trouble, at=trouble.at + ahead))
        return replace(host_visit.snapshot, at=self.now())


def busy_and_listening(rank: Rank, seconds: float, guests: Mapping[int, tuple[Any, ...]]) -> Visit | None:
    """Keep the GPU of a rank busy; on the ranks in `guests`, sample telemetry at the same time and return it."""
    if rank.index in guests:
        gpus, simulated, interval = guests[rank.index]
        return visit(gpus, simulated, interval, meanwhile=lambda: keep_busy(rank, seconds))
    keep_busy(rank, seconds)
    return None
