"""The world sizes that a gate runs at."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from mgpu_check.errors import RankFailure, RankHang

__all__ = ["World", "noting", "world_sizes_of"]


class World(Protocol):
    """As much of the fixture `ranks` as a gate needs."""

    @property
    def size(self) -> int:
        """The largest world size."""
        ...

    def run(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        size: int | None = None,
        timeout: float | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """``fn(*args, **kwargs)`` on each of `size` ranks; what they return, in rank order."""
        ...


def world_sizes_of(ranks: World, world_sizes: Iterable[int] | None) -> list[int]:
    """The world sizes to compare with one rank, in ascending order, each once.

    Args:
        world_sizes: those that the user names, each 1 to `ranks.size`; None for the powers of two from 2 on, and
            `ranks.size`, which covers most codes that work for some sizes only.

    Raises:
        ValueError: `world_sizes` is empty, or has what is no int in that range; or it is None, and there is one rank only.
    """
    if world_sizes is None:
        if ranks.size < 2:
            raise ValueError(
                "ranks.size is 1, and there is nothing to compare one rank with; run pytest with --gpus=2 or more "
                "(--simulate where there are no devices)"
            )
        return sorted({ranks.size, *(2**k for k in range(1, ranks.size.bit_length()) if 2**k <= ranks.size)})
    if isinstance(world_sizes, str | bytes) or not isinstance(world_sizes, Iterable):
        raise ValueError(f"world_sizes is {world_sizes!r}; give several ints from 1 to {ranks.size}, such as [2]")
    sizes = list(world_sizes)
    wrong = [
        size for size in sizes if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= ranks.size
    ]
    if wrong or not sizes:
        fault = f"has {', '.join(map(repr, wrong))}" if wrong else "is empty"
        raise ValueError(
            f"world_sizes {fault}; give ints from 1 to {ranks.size}, the number of devices of this run "
            "(more with --gpus=N)"
        )
    return sorted(set(sizes))


@contextlib.contextmanager
def noting(doing: str) -> Iterator[None]:
    """Have errors of ranks say what the gate was at: "world size 2, steps 3 to 6"."""
    try:
        yield
    except (RankFailure, RankHang) as error:
        # A note, because the message is written anew when the ranks explain their assertions.
        error.add_note(f"while checking {doing}")
        raise
