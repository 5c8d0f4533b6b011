"""Specs of a soak: one round of load, and each GPU's results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mgpu_check.acceptance.training.cases import Trained, TransformerCase


@dataclass(frozen=True)
class SoakCase:
    """One round of load: training, rewriting and comparing memory, collectives, and copies.

    Attributes:
        every: number of training steps between two turns of all other work, each with digests.
        memory_share: share of the remaining free memory to rewrite and compare.
        collective: int32 elements that each rank contributes; a multiple of the number of ranks.
        copied: 64-bit words to copy to the device and back.
        number: of the round, from 1; seeds the written and copied data.
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
    """One GPU's results of a round.

    Attributes:
        trained: the result of the training, with digests after each `SoakCase.every` steps.
        seconds: under load, by the clock of the host.
        steps: seconds of each step, by the clock of the device.
        bytes: written to memory and compared, copied, and contributed to collectives.
        reduced: number of wrong elements in the sum over all ranks.
        exchanged: rank -> number of wrong elements received from it.
    """

    trained: Trained
    seconds: float
    steps: tuple[float, ...]
    bytes: int
    reduced: int
    exchanged: Mapping[int, int]
