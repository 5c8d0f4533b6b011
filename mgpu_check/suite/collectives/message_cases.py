"""Specs of messages between two ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from mgpu_check.suite.collectives.cases import COPIED, REDUCED


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

    def between_ranks(self, size: int) -> Message:
        """Return the message with its ranks modulo the world size; it goes to the next rank if they are one."""
        source, target = self.source % size, self.target % size
        return replace(self, source=source, target=target if target != source else (source + 1) % size)

    def __str__(self) -> str:
        source = f"rank {self.source}" if self.source >= 0 else "any rank"
        return (
            f"message {self.number} of {source} to rank {self.target}, tag {self.tag}, {self.elements} x {self.dtype}"
        )


def messages_between(
    size: int, seed: int, place: str, *, tags: bool = True, alike: bool = False, own: bool = False
) -> list[Message]:
    """Return messages between all pairs of ranks: two in each direction, of any dtype, with 0 to 65,537 elements.

    Args:
        alike: whether the two messages of a direction have the same dtype and size, and differ only by their tags.
        own: whether each rank also sends messages to itself, which NCCL takes in batches.
    """
    found: list[Message] = []
    dtypes = COPIED if place == "device" else REDUCED
    sizes = (1, 0, 4097, 33, 65537, 700)
    for source in range(size):
        for target in range(size):
            if source == target and not own:
                continue
            for turn in range(2):
                number = len(found) + 2 * seed
                tag = (number * 7 + turn) % 5 if tags else 0
                kind = number // 2 + seed if alike else number
                dtype, elements = dtypes[kind * 5 % len(dtypes)], sizes[kind % len(sizes)]
                found.append(Message(source, target, tag, dtype, elements, number))
    return found
