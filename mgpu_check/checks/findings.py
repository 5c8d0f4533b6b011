"""What a rank finds wrong while the others go on: to be raised when all have left their last collective."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from mgpu_check.errors import CheckFailure, GradientMismatch

__all__ = ["Findings"]


class Findings:
    """What a rank finds wrong, kept until all ranks have left their last collective."""

    def __init__(self) -> None:
        self.found: list[CheckFailure] = []

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

    def close(self) -> None:
        """Raise the first finding.

        Raises:
            CheckFailure: there is one.
        """
        __tracebackhide__ = True
        if self.found:
            raise self.found[0]
