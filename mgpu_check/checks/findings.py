"""What a rank finds wrong while the others go on: to be raised when all have left their last collective."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING

from mgpu_check.errors import CheckFailure, GradientMismatch

if TYPE_CHECKING:
    from mgpu_check.rank_side.rank import Rank

__all__ = ["Findings", "on_any_rank"]


class Findings:
    """What a rank finds wrong, kept until all ranks have left their last collective, where the context ends.

    Then the first finding is raised. It is raised, too, where what follows from it ends the context by another error.
    """

    def __init__(self) -> None:
        self.found: list[CheckFailure] = []

    def __enter__(self) -> Findings:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        __tracebackhide__ = True
        if self.found and (error is None or isinstance(error, Exception)):
            raise self.found[0]

    @contextlib.contextmanager
    def collected(self) -> Iterator[None]:
        """Keep a finding that is raised within."""
        try:
            yield
        except CheckFailure as failure:
            self.found.append(failure)

    def require(self, right: bool, message: str, *, ranks: Sequence[int] = ()) -> None:
        """Keep a finding with this message, unless all is right."""
        if not right:
            self.found.append(GradientMismatch(message, ranks=ranks))

    def anywhere(self, rank: Rank) -> bool:
        """Return whether a rank has found something, so that all stop together. A collective.

        For where going on makes no sense: other ranks would be told what follows from the finding, or wait for ever.
        """
        return on_any_rank(rank, bool(self.found))


def on_any_rank(rank: Rank, true: bool) -> bool:
    """Return on all ranks whether something is true on one of them. A collective."""
    import torch
    import torch.distributed as dist

    count = torch.tensor([int(true)], device=rank.device)
    dist.all_reduce(count)
    return bool(count)
