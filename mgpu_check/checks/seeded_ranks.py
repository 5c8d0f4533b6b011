"""What ranks have drawn on their GPUs, held against each other, without torch: the pytest process does this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mgpu_check.errors import DeviceMismatch

__all__ = ["DrawnBy", "assert_ranks_draw_as_seeded"]


@dataclass(frozen=True)
class DrawnBy:
    """Digests of what one rank has drawn, by the names of the ways to draw.

    Attributes:
        model: of the rank's GPU.
        same: with the seed that all ranks had.
        own: with a seed that no other rank had.
    """

    model: str
    same: Mapping[str, int]
    own: Mapping[str, int]


def assert_ranks_draw_as_seeded(drawn: Sequence[DrawnBy]) -> None:
    """Assert that ranks with one seed have drawn the same on GPUs of one model, and that ranks with different seeds have not.

    Args:
        drawn: what each rank has drawn, in rank order.

    Raises:
        DeviceMismatch: naming the ranks and the draws.
    """
    __tracebackhide__ = True
    for number, rank in enumerate(drawn):
        for other, before in enumerate(drawn[:number]):
            odd = [name for name in rank.same if rank.model == before.model and rank.same[name] != before.same[name]]
            if odd:
                raise DeviceMismatch(
                    f"ranks {other} and {number} were seeded alike, and {', '.join(odd)} gave other numbers on rank {number}",
                    ranks=(other, number),
                )
            equal = [name for name in rank.own if rank.own[name] == before.own[name]]
            if equal:
                raise DeviceMismatch(
                    f"ranks {other} and {number} were seeded differently, and {', '.join(equal)} gave the same numbers",
                    ranks=(other, number),
                )
