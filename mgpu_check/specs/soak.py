"""What a round of a soak is to do, as plain values, and what each GPU says of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mgpu_check.specs.transformer import Trained, TransformerCase

__all__ = ["Loaded", "SoakCase"]


@dataclass(frozen=True)
class SoakCase:
    """One round of load: training, beside memory that is rewritten and compared, collectives, and copies.

    Attributes:
        training: how all GPUs train.
        every: after so many of its steps all else is done once, and digests are taken.
        memory_share: of the memory that is free beside the rest, to be rewritten and compared.
        collective: elements of int32 that each rank gives, a multiple of the number of ranks.
        copied: words of 64 bits that go to the device and back.
        number: of the round, from 1; seeds what is written and copied.
    """

    training: TransformerCase
    every: int
    memory_share: float
    collective: int
    copied: int
    number: int

    def __str__(self) -> str:
        return f"round {self.number}: {self.training}"


@dataclass(frozen=True)
class Loaded:
    """What one GPU says of a round.

    Attributes:
        trained: how the training went, with digests after each `SoakCase.every` steps.
        seconds: under load, by the clock of the host.
        steps: seconds of each step, by the clock of the device.
        bytes: written to memory and compared, copied, and given to collectives.
        reduced: elements that the sum over all ranks had wrong.
        exchanged: rank -> elements from it that were wrong.
    """

    trained: Trained
    seconds: float
    steps: tuple[float, ...]
    bytes: int
    reduced: int
    exchanged: Mapping[int, int]
