"""Specs of copies between devices and the host. This module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Path = Literal["engine", "strided", "casting"]


@dataclass(frozen=True)
class Copies:
    """Copies of several sizes, made for each pair.

    Attributes:
        path: "engine": contiguous, by a copy engine; "strided": every second byte, and "casting": uint8 to int16, by a
            kernel that reads or writes the memory of its peer.
        sizes: elements of each copy; sizes that do not fit into memory are replaced by one that does.
        source, destination: the offset of the copy in its allocation, in bytes, which sets its alignment.
        together: copy all pairs at once; else one pair after the other.
        pinned: whether memory of the host is pinned.
        pieces: number of copies that transfer each size, of equal parts of it.
        reach: bytes of both allocations in front of the copy; only as much as is copied is filled and compared there.
    """

    path: Path
    sizes: tuple[int, ...]
    source: int = 0
    destination: int = 0
    together: bool = False
    pinned: bool = True
    pieces: int = 1
    reach: int = 0
    seed: int = 0

    def __str__(self) -> str:
        sizes = "+".join(map(str, self.sizes))
        how = f" in {self.pieces} pieces" * (self.pieces > 1) + ", all at once" * self.together
        how += f", {self.reach} bytes into memory" * (self.reach > 0)
        return f"{self.path}, {sizes} bytes, alignment {self.source} to {self.destination}{how}, seed {self.seed}"
