"""Specs of memory checks of a GPU."""

from __future__ import annotations

from dataclasses import dataclass

PATTERNS = ("address", "inversions", "walking ones", "walking zeros", "checkerboard", "random")
"""The patterns to write; see `mgpu_check.acceptance.memory.checks`."""


@dataclass(frozen=True)
class MemoryCase:
    """One check of the memory of a GPU.

    Attributes:
        share: share of the free memory to write and read back; more than 0, less than 1.
        seed: determines the shifts and seeds of the pattern, and the places that the host reads.
        passes: how often all of it is written and read back.
        hold_seconds: seconds under load between writing and reading.
    """

    pattern: str
    share: float
    seed: int
    passes: int = 1
    hold_seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.pattern not in PATTERNS:
            raise ValueError(f"MemoryCase: pattern={self.pattern!r} is unknown; choose one of {', '.join(PATTERNS)}")
        if not 0 < self.share < 1:
            raise ValueError(f"MemoryCase: share={self.share} must be more than 0 and less than 1")
        if self.passes < 1:
            raise ValueError(f"MemoryCase: passes={self.passes} must be at least 1")

    def __str__(self) -> str:
        times = "1 pass" if self.passes == 1 else f"{self.passes} passes"
        suffix = f", kept for {self.hold_seconds:g} s under load" if self.hold_seconds else ""
        return f"{self.pattern}, {times} over {self.share:g} of the free memory{suffix}, seed {self.seed}"
