"""Run collectives on plain tensors by gloo, with work whose results are late."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta

import torch
import torch.distributed as dist

from mgpu_check.simulated.delivery import Late, poison
from mgpu_check.simulated.streams import hold_outstanding
from mgpu_check.simulated.tensor import SimulatedTensor, raw

__all__ = ["LateFuture", "LateWork", "Staging", "is_channels_last"]

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_channels_last(t: torch.Tensor) -> bool:
    """Return whether the memory of a tensor is without gaps, but in the order of one of torch's other memory formats."""
    return t.dim() in _FORMATS and not t.is_contiguous() and t.is_contiguous(memory_format=_FORMATS[t.dim()])


@dataclass
class Staging:
    """The plain tensors that gloo works on, and what of them goes back where."""

    late: bool
    device: torch.device | None = None
    results: list[torch.Tensor] = field(default_factory=list)
    _deliveries: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def read(self, value: torch.Tensor) -> torch.Tensor:
        """Read the values of a tensor as they are now, into contiguous memory of the host."""
        return self._copied(*self._bare(value))

    def write(self, value: torch.Tensor) -> torch.Tensor:
        """Return host memory for what goes into a tensor, which is poison until the delivery where that is late."""
        bare, direct = self._bare(value)
        return self._returned(value, bare, bare if direct else torch.empty(bare.shape, dtype=bare.dtype, device="cpu"))

    def update(self, value: torch.Tensor) -> torch.Tensor:
        """Return host memory with the values of a tensor, which is read, and then goes into it."""
        bare, direct = self._bare(value)
        return self._returned(value, bare, self._copied(bare, direct))

    def _bare(self, value: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return the memory of a tensor, and whether gloo may work on it as it is."""
        if isinstance(value, SimulatedTensor):
            self.device = value.device
        elif not self.late:
            return value, True
        bare = raw(value).data  # NCCL, too, writes without autograd's knowing
        if is_channels_last(bare):
            bare = bare.movedim(1, -1)  # memory is moved as it lies, whatever the format is on other ranks
        return bare, not self.late and bare.device.type == "cpu" and bare.is_contiguous()

    @staticmethod
    def _copied(bare: torch.Tensor, direct: bool) -> torch.Tensor:
        return bare if direct else bare.to("cpu", copy=True, memory_format=torch.contiguous_format)

    def _returned(self, value: torch.Tensor, bare: torch.Tensor, host: torch.Tensor) -> torch.Tensor:
        self.results.append(value)
        if host is not bare and host is not value:
            self._deliveries.append((bare, host))
            if self.late:
                poison(bare)
        return host

    def deliver(self) -> None:
        with torch.no_grad():
            deliveries, self._deliveries = self._deliveries, []
            for target, host in deliveries:
                target.copy_(host.view(target.shape))


class LateFuture(torch.futures.Future):  # type: ignore[type-arg]
    """The future of a collective: what is put behind it runs at once and here, as behind a future of CUDA.

    C++ knows nothing of that: `finish` what is handed to it. (A callback in the thread of gloo that ends the work can
    deadlock: gloo drops it under a lock of its own, and needs that of Python for it.)
    """

    def __init__(self, work: LateWork) -> None:
        super().__init__()
        self._work = work

    def finish(self) -> None:
        """Wait for the result."""
        self._work.wait()
        if not super().done():
            self.set_result(self._work.results)

    def wait(self) -> object:
        self.finish()
        return super().wait()

    def value(self) -> object:
        self.finish()
        return super().value()

    def done(self) -> bool:
        return True  # for the host a future of CUDA is done as soon as it is there

    def then(self, callback: Callable[[torch.futures.Future], object]) -> torch.futures.Future:  # type: ignore[type-arg]
        self.finish()
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[torch.futures.Future], None]) -> None:  # type: ignore[type-arg]
        self.finish()
        super().add_done_callback(callback)


class LateWork(dist.Work):
    """The work of a collective whose results are poison until someone waits; `title` is what NCCL calls it, if it is its."""

    def __init__(
        self,
        works: Sequence[dist.Work],
        staging: Staging,
        after: Sequence[Callable[[], None]] = (),
        title: str = "",
        delivered: Callable[[], None] | None = None,
    ) -> None:
        super().__init__()
        self.works = works
        self.title = title
        self._delivered = delivered
        self._staging = staging
        self._after = after
        self._late = Late(self._finish)
        if staging.device is not None:
            hold_outstanding(self._late, staging.device)

    def _finish(self) -> None:
        for work in self.works:
            work.wait()
        for then in self._after:
            then()
        self._staging.deliver()
        if self._delivered is not None:
            self._delivered()

    @property
    def results(self) -> list[torch.Tensor]:
        return self._staging.results

    def wait(self, timeout: timedelta | None = None) -> bool:
        if timeout is not None:
            begun = time.monotonic()
            try:
                for work in self.works:
                    work.wait(timeout)
            except RuntimeError as error:
                ran = 1000 * (time.monotonic() - begun)
                limit = 1000 * timeout.total_seconds()
                if not self.title or ran < limit:
                    raise
                raise dist.DistBackendError(
                    f"[Rank {dist.get_rank()}] Watchdog caught collective operation timeout: WorkNCCL(OpType={self.title}, "
                    f"Timeout(ms)={limit:.0f}) ran for {ran:.0f} milliseconds before timing out."
                ) from error
        self._late.deliver()
        return True

    def synchronize(self) -> None:
        self._late.deliver()

    def block_current_stream(self) -> None:
        self._late.deliver()

    def is_completed(self) -> bool:
        done = all(work.is_completed() for work in self.works)
        if done:
            self._late.deliver()
        return done

    def is_success(self) -> bool:
        return all(work.is_success() for work in self.works)

    def exception(self) -> object:
        return next((found for work in self.works if (found := work.exception()) is not None), None)

    def _source_rank(self) -> int:
        return self.works[0]._source_rank()

    def result(self) -> list[torch.Tensor]:
        self._late.deliver()
        return self._staging.results

    def get_future(self) -> torch.futures.Future[list[torch.Tensor]]:
        return LateFuture(self)
