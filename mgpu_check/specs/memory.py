"""What a check of a GPU's memory is to do, as plain values."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["PATTERNS", "MemoryCase"]

PATTERNS = ("address", "inversions", "walking ones", "walking zeros", "checkerboard", "random")
"""What is written; see `mgpu_check.checks.memory_patterns`."""


@dataclass(frozen=True)
class MemoryCase:
    """One look at the memory of a GPU.

    Attributes:
        pattern: one of `PATTERNS`.
        share: of the memory that is free, to be written and read back; more than 0, less than 1.
        seed: shifts and seeds of the pattern, and the places that are looked at from the host.
        passes: how often all of it is written and read back.
    """

    pattern: str
    share: float
    seed: int
    passes: int = 1

    def __post_init__(self) -> None:
        if self.pattern not in PATTERNS:
            raise ValueError(f"MemoryCase: pattern={self.pattern!r} is unknown; choose one of {', '.join(PATTERNS)}")
        if not 0 < self.share < 1:
            raise ValueError(f"MemoryCase: share={self.share} must be between 0 and 1, which both are excluded")
        if self.passes < 1:
            raise ValueError(f"MemoryCase: passes={self.passes} must be at least 1")

    def __str__(self) -> str:
        times = "1 pass" if self.passes == 1 else f"{self.passes} passes"
        return f"{self.pattern}, {times} over {self.share:g} of the free memory, seed {self.seed}"
