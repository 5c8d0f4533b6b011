"""Define the patterns of the memory test: the device writes them, and the host can compute each word.

A word has 64 bits, and words are numbered from the start of the tested memory.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from mgpu_check.acceptance.memory.cases import MemoryCase
from mgpu_check.suite.common.generated_data import MASK, mix_, mixed, position_of, signed

PERIOD = 64
"""Period of repeating patterns, in words; the size of each chunk of memory is a multiple."""


Put = Callable[[torch.Tensor, int, torch.Tensor], object]
"""Writes the words from a number on into a tensor of int64; the last argument is a scratch tensor of the same shape."""


class Pattern(Protocol):
    """A pattern that assigns a value to each word."""

    @property
    def name(self) -> str:
        """The name in messages."""

    def maker(self, device: torch.device) -> Put:
        """Return a function that writes the pattern on `device`."""

    def at(self, word: int) -> int:
        """Return the right value of a word, in [0, 2^64)."""

    def where(self, value: int) -> int | None:
        """Return the only word where `value` is right, even outside the memory; None if there are several."""


@dataclass(frozen=True)
class Address:
    """A pattern where each word holds its own offset in bytes, or the complement.

    It shows stuck or joined address lines, and where a wrong value belongs.
    """

    complement: bool = False

    @property
    def name(self) -> str:
        return "complement of the address" if self.complement else "address"

    def maker(self, device: torch.device) -> Put:
        def put(out: torch.Tensor, first: int, scratch: torch.Tensor) -> None:
            start, end = 8 * first, 8 * (first + out.numel())
            if self.complement:
                torch.arange(-1 - start, -1 - end, -8, out=out)
            else:
                torch.arange(start, end, 8, out=out)

        return put

    def at(self, word: int) -> int:
        return 8 * word ^ (MASK if self.complement else 0)

    def where(self, value: int) -> int | None:
        offset = value ^ (MASK if self.complement else 0)
        return None if offset % 8 else offset // 8


@dataclass(frozen=True)
class Repeated:
    """A pattern that repeats `PERIOD` words."""

    name: str
    words: tuple[int, ...]

    def maker(self, device: torch.device) -> Put:
        row = torch.tensor([signed(word) for word in self.words], dtype=torch.int64, device="cpu").to(device)
        return lambda out, first, scratch: out.view(-1, PERIOD).copy_(row)

    def at(self, word: int) -> int:
        return self.words[word % PERIOD]

    def where(self, value: int) -> int | None:
        return None


@dataclass(frozen=True)
class Random:
    """A pattern where each word holds a pseudorandom number made from its position and a seed, or the complement."""

    seed: int
    complement: bool = False

    @property
    def name(self) -> str:
        return "complement of random" if self.complement else "random"

    def maker(self, device: torch.device) -> Put:
        def put(out: torch.Tensor, first: int, scratch: torch.Tensor) -> None:
            torch.arange(first, first + out.numel(), out=out)
            mix_(out, self.seed, scratch)
            if self.complement:
                out.bitwise_not_()

        return put

    def at(self, word: int) -> int:
        return mixed(word, self.seed) ^ (MASK if self.complement else 0)

    def where(self, value: int) -> int | None:
        return position_of(value ^ (MASK if self.complement else 0), self.seed)


def rounds_of(case: MemoryCase, number: int) -> Sequence[tuple[Pattern, bool]]:
    """Return the (pattern, backwards) rounds of pass `number`; backwards means from the last chunk to the first.

    In each pass every bit is both 0 and 1, except with walking bits, where one bit of each word differs from the
    others.
    """
    drawn = random.Random(case.seed + number)
    if case.pattern == "address":
        return (Address(), False), (Address(complement=True), True)
    if case.pattern == "random":
        seed = drawn.getrandbits(32)
        return (Random(seed), False), (Random(seed, complement=True), True)
    if case.pattern == "inversions":
        zeros, ones = Repeated("zeros", (0,) * PERIOD), Repeated("ones", (MASK,) * PERIOD)
        return (zeros, False), (ones, False), (zeros, True), (ones, True)
    if case.pattern == "checkerboard":
        even, odd = 0x5555555555555555, 0xAAAAAAAAAAAAAAAA
        pair = Repeated("checkerboard", (even, odd) * (PERIOD // 2)), Repeated("inverse", (odd, even) * (PERIOD // 2))
        return tuple((pattern, drawn.random() < 0.5) for pattern in pair)
    shift, flip = (case.seed + number) % 64, MASK if case.pattern == "walking zeros" else 0
    walking = Repeated(case.pattern, tuple(1 << (word + shift) % 64 ^ flip for word in range(PERIOD)))
    return ((walking, drawn.random() < 0.5),)
