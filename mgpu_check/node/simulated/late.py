"""What is behind a collective: the plain tensors that gloo computes on, and the work whose results are late."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from mgpu_check.node.simulated.delivery import Late, poison
from mgpu_check.node.simulated.streams import hold_outstanding
from mgpu_check.node.simulated.tensor import SimulatedTensor, raw

__all__ = ["LateWork", "Staging"]


@dataclass
class Staging:
    """The plain tensors that gloo works on, and what of them goes back where."""

    late: bool
    device: torch.device | None = None
    results: list[torch.Tensor] = field(default_factory=list)
    _deliveries: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)

    def read(self, value: torch.Tensor) -> torch.Tensor:
        """The values of a tensor as they are now, in contiguous memory of the host."""
        bare, direct = self._bare(value)
        return bare if direct else bare.to("cpu", copy=True, memory_format=torch.contiguous_format)

    def write(self, value: torch.Tensor) -> torch.Tensor:
        """Host memory for what goes into a tensor, which is poison until the delivery where that is late."""
        bare, direct = self._bare(value)
        return self._returned(value, bare, bare if direct else torch.empty(bare.shape, dtype=bare.dtype, device="cpu"))

    def update(self, value: torch.Tensor) -> torch.Tensor:
        """Host memory with the values of a tensor, that is read, and then goes into it."""
        return self._returned(value, self._bare(value)[0], self.read(value))

    def _bare(self, value: torch.Tensor) -> tuple[torch.Tensor, bool]:
        """The memory of a tensor, and whether gloo may work on it as it is."""
        if isinstance(value, SimulatedTensor):
            self.device = value.device
        elif not self.late:
            return value, True
        bare = raw(value).detach()
        return bare, not self.late and bare.device.type == "cpu" and bare.is_contiguous()

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


class _Future(torch.futures.Future):  # type: ignore[type-arg]
    """Of a collective: what is put behind it runs at once and here, as behind a future of CUDA.

    C++, which knows nothing of that, gets its result from the thread of gloo that ends the work.
    """

    def __init__(self, work: LateWork) -> None:
        super().__init__()
        self._work = work
        self._completing = threading.Lock()
        with contextlib.suppress(RuntimeError):  # sends and receives of gloo have no future
            torch.futures.collect_all([one.get_future() for one in work.works]).add_done_callback(self._complete)

    def _complete(self, _: object = None) -> None:
        with self._completing:
            if not super().done():
                self._work.conclude()
                self.set_result(self._work.results)

    def _finish(self) -> None:
        self._work.wait()
        self._complete()

    def wait(self) -> object:
        self._finish()
        return super().wait()

    def value(self) -> object:
        self._finish()
        return super().value()

    def done(self) -> bool:
        return True  # for the host a future of CUDA is done as soon as it is there

    def then(self, callback: Callable[[torch.futures.Future], object]) -> torch.futures.Future:  # type: ignore[type-arg]
        self._finish()
        return super().then(callback)

    def add_done_callback(self, callback: Callable[[torch.futures.Future], None]) -> None:  # type: ignore[type-arg]
        self._finish()
        super().add_done_callback(callback)


class LateWork(dist.Work):
    """The work of a collective whose results are poison until someone waits."""

    def __init__(self, works: Sequence[dist.Work], staging: Staging, after: Sequence[Callable[[], None]] = ()) -> None:
        super().__init__()
        self.works = works
        self._staging = staging
        self._after = after
        self._concluding = threading.Lock()
        self._late = Late(self._finish)
        if staging.device is not None:
            hold_outstanding(self._late, staging.device)

    def _finish(self) -> None:
        for work in self.works:
            work.wait()
        self.conclude()

    def conclude(self) -> None:
        """Put the results where they belong; the works have ended."""
        with self._concluding:
            after, self._after = self._after, ()
            for then in after:
                then()
            self._staging.deliver()

    @property
    def results(self) -> list[torch.Tensor]:
        return self._staging.results

    def wait(self, timeout: object = None) -> bool:
        if timeout is not None:
            for work in self.works:
                work.wait(timeout)  # type: ignore[arg-type]
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
        return _Future(self)
