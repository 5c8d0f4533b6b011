"""Compare the random numbers of ranks' GPUs, without torch, because the pytest process runs this."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mgpu_check.errors import DeviceMismatch


@dataclass(frozen=True)
class DrawnBy:
    """Digests of a rank's random numbers, by name of the drawing function."""

    model: str  # the model of the rank's GPU
    same: Mapping[str, int]  # the digests with the seed that all ranks share
    own: Mapping[str, int]  # the digests with a seed that no other rank has


def assert_ranks_draw_as_seeded(drawn: Sequence[DrawnBy]) -> None:
    """Assert that equal seeds gave equal numbers on GPUs of one model, and different seeds different ones, by rank."""
    __tracebackhide__ = True
    for number, rank in enumerate(drawn):
        for peer, before in enumerate(drawn[:number]):
            text = ""
            if equal := [name for name in rank.own if rank.own[name] == before.own[name]]:
                text = f"different seeds, but {', '.join(equal)} gave the same numbers"
            odd = [name for name in rank.same if rank.model == before.model and rank.same[name] != before.same[name]]
            if odd:
                text = f"equal seeds, but {', '.join(odd)} gave different numbers on rank {number}"
            if text:
                raise DeviceMismatch(f"ranks {peer} and {number} had {text}", ranks=(peer, number))
