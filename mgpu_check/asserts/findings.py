"""Keep the errors that a rank finds, and raise them when all ranks have left their last collective."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from types import TracebackType
from typing import TYPE_CHECKING

from mgpu_check.errors import CheckFailure, GradientMismatch

if TYPE_CHECKING:
    from mgpu_check.engine.rank_side.rank import Rank

_first_suffices = ContextVar("first_suffices", default=False)


@contextlib.contextmanager
def first_suffices() -> Iterator[None]:
    """Within the context, let checks end at their first finding: only whether they fail matters, not their report."""
    token = _first_suffices.set(True)
    try:
        yield
    finally:
        _first_suffices.reset(token)


def enough(findings: Sequence[object]) -> bool:
    """Return whether a check may end with these findings. Ranks must not end before their last collective."""
    return bool(findings) and _first_suffices.get()


class Findings:
    """The errors that a rank finds, kept until the context ends, after the last collective.

    A check on ranks makes one and enters it around its collectives. The end of the context raises the first finding,
    even if another exception, which may follow from it, ends the context.
    """

    def __init__(self) -> None:
        self.found: list[CheckFailure] = []

    def __enter__(self) -> Findings:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        if self.found and (error is None or isinstance(error, Exception)):
            raise self.found[0]

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """Catch a finding that the body raises, and keep it."""
        try:
            yield
        except CheckFailure as failure:
            self.found.append(failure)

    def require(self, holds: bool, message: str, *, ranks: Sequence[int] = ()) -> None:
        """Keep a finding with this message, unless `holds`."""
        if not holds:
            self.found.append(GradientMismatch(message, ranks=ranks))

    def anywhere(self, rank: Rank) -> bool:
        """Return whether any rank has a finding, so that all can stop together. A collective.

        Use it where a finding would cause wrong findings on other ranks, or would make them wait forever.
        """
        return on_any_rank(rank, bool(self.found))

    def enough(self, rank: Rank) -> bool:
        """Return whether all ranks may end together with the findings of any of them, as `first_suffices` allows.

        Within `first_suffices` it is a collective: an all_reduce of one int64. No planted fault may alter it, or ranks
        would not end together.
        """
        return _first_suffices.get() and self.anywhere(rank)


def require(findings: Findings, rank: Rank, holds: bool, subject: str, text: str) -> None:
    """Keep a finding of this rank about `subject`, unless `holds`."""
    findings.require(holds, f"{subject}, rank {rank.index}: {text}", ranks=[rank.index])


def run_all(checks: Iterable[Callable[[], object]], rank: Rank | None = None) -> None:
    """Run all checks, even after one has found an error, and then raise the first finding.

    With `rank` the checks are collectives of all ranks. Within `first_suffices` they end together at the first finding
    of any rank.
    """
    __tracebackhide__ = True
    with Findings() as findings:
        for check in checks:
            with findings.collected():
                check()
            if rank is not None and findings.enough(rank):
                break


def on_any_rank(rank: Rank, true: bool) -> bool:
    """Return on all ranks whether `true` holds on one of them. A collective."""
    import torch
    import torch.distributed as dist

    count = torch.tensor([int(true)], device=rank.device)
    dist.all_reduce(count)
    return bool(count)
