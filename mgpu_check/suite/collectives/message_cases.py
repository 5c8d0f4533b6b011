"""Specs of messages between two ranks."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Message"]


@dataclass(frozen=True)
class Message:
    """A point-to-point message.

    Attributes:
        source, target: ranks of the world; source -1 for any.
        number: of the message; determines its content.
    """

    source: int
    target: int
    tag: int
    dtype: str
    elements: int
    number: int

    def __str__(self) -> str:
        source = f"rank {self.source}" if self.source >= 0 else "any rank"
        return (
            f"message {self.number} of {source} to rank {self.target}, tag {self.tag}, {self.elements} x {self.dtype}"
        )
