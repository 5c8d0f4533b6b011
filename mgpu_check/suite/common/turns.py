"""Order cases so that the first ones of each group come first."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import TypeVar

_Case = TypeVar("_Case")


def in_turns(groups: Iterable[Iterable[_Case]]) -> Iterator[_Case]:
    """Yield the first case of each group, then the second ones, and so on.

    A defect of one group is found after few cases, so `selftest` takes less time.
    """
    apart = ([(case,) for case in group] for group in groups)
    for turn in itertools.zip_longest(*apart, fillvalue=()):
        yield from itertools.chain.from_iterable(turn)
