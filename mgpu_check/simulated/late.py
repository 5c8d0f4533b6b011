"""Stage the tensors of a collective in plain host memory for gloo, and deliver its results late."""

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

_FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}


def is_channels_last(t: torch.Tensor) -> bool:
    return t.dim() in _FORMATS and not t.is_contiguous() and t.is_contiguous(memory_format=_FORMATS[t.dim()])


@dataclass
class Staging:
    """The plain tensors that gloo works on, and the tensors that receive its results."""

    late: bool
    device: torch.device | None = None
    results: list[torch.Tensor] = field(default_factory=list)
    joined: bool = False  # whether the future has the results in one tensor, as NCCL gathers lists
    _deliveries: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def read(self, value: torch.Tensor) -> torch.Tensor:
        """Return contiguous host memory with the present values of a tensor."""
        return self._copied(*self._bare(value))

    def write(self, value: torch.Tensor) -> torch.Tensor:
        """Return host memory for the new values of a tensor. In a late call the tensor is poison until the delivery."""
        bare, direct = self._bare(value)
        return self._returned(value, bare, bare if direct else torch.empty(bare.shape, dtype=bare.dtype, device="cpu"))

    def update(self, value: torch.Tensor) -> torch.Tensor:
        """Return host memory with the values of a tensor, for gloo to update; the delivery writes them back."""
        bare, direct = self._bare(value)
        return self._returned(value, bare, self._copied(bare, direct))

    def _bare(self, value: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """Return the plain tensor of ``value``, and whether gloo may work on it without a copy."""
        if isinstance(value, SimulatedTensor):
            self.device = value.device
        elif not self.late:
            return value, True
        bare = raw(value).data  # autograd does not see the writes of NCCL either
        if is_channels_last(bare):
            bare = bare.movedim(1, -1)  # memory moves in its own order, like NCCL, even if other ranks use another
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
    """The future of a collective. Its callbacks run at once in the calling thread, as those of a CUDA future do.

    C++ does not call these methods: call `finish` before C++ gets the future. (A callback in gloo's thread can
    deadlock: gloo frees it under its own lock, and needs Python's lock to do so.)
    """

    def __init__(self, work: LateWork) -> None:
        super().__init__()
        self._work = work

    def finish(self) -> None:
        self._work.wait()
        if not super().done():
            self.set_result(self._work.values())

    def wait(self) -> object:
        self.finish()
        return super().wait()

    def value(self) -> object:
        self.finish()
        return super().value()

    def done(self) -> bool:
        return True  # a CUDA future is done for the host as soon as it exists

    def then(self, callback: Callable[[torch.futures.Future], object]) -> torch.futures.Future:  # type: ignore[type-arg]
        self.finish()
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[torch.futures.Future], None]) -> None:  # type: ignore[type-arg]
        self.finish()
        super().add_done_callback(callback)


class LateWork(dist.Work):
    """The work of a collective, whose results are poison until the caller waits.

    `title` is NCCL's name for the collective, or empty for another backend.
    """

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

    def values(self) -> list[torch.Tensor]:
        return [torch.stack(self.results)] if self._staging.joined else self.results

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
                    f"[Rank {dist.get_rank()}] Watchdog caught collective operation timeout: "
                    f"WorkNCCL(OpType={self.title}, Timeout(ms)={limit:.0f}) ran for {ran:.0f} milliseconds before "
                    "timing out."
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
