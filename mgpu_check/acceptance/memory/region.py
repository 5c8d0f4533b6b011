"""Hold most of the free memory of a GPU, write patterns into it, and compare its contents on the device."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from mgpu_check.acceptance.memory.patterns import PERIOD, Pattern, Put
from mgpu_check.suite.common.generated_data import MASK, signed
from mgpu_check.suite.common.timing import Stopwatch

_LARGEST_CHUNK = 512 << 20
_SMALLEST_CHUNK = 8 * PERIOD
_LISTED = 64
"""Wrong words to list per chunk; all wrong words are counted."""
_LOOKED_AT_FROM_THE_HOST = 256
"""Words of each pass that the host compares too."""


@dataclass(frozen=True)
class WrongWord:
    """A word that did not hold its value.

    Attributes:
        word: its number in the region, an eighth of its offset in bytes.
        pattern: the pattern that was written.
        expected, read: 64 bits, as nonnegative integers; `read` follows from the difference that the device found.
    """

    word: int
    pattern: Pattern
    expected: int
    read: int

    @property
    def differs(self) -> int:
        return self.expected ^ self.read


@dataclass
class WrongRegion:
    """The errors of a region.

    Attributes:
        blind: lines that explain why the comparison on the device is unreliable.
        astray: lines about words that the host reads wrong, although a working device finds them right.
    """

    count: int = 0
    words: list[WrongWord] = field(default_factory=list)
    blind: list[str] = field(default_factory=list)
    astray: list[str] = field(default_factory=list)


class Region:
    """Memory of one device, as a sequence of words of 64 bits.

    It is written and compared in chunks, to bound the extra memory of the comparison.
    """

    def __init__(self, device: torch.device, words: int, chunk_words: int) -> None:
        self.device = device
        self.chunks: list[torch.Tensor] = []
        self.firsts: list[int] = []
        self.watch = Stopwatch(device)
        self._scratch = torch.empty(2, chunk_words, dtype=torch.int64, device=device)
        self.words = 0
        block = words // PERIOD * PERIOD
        while block and self.words < words:
            try:
                memory = torch.empty(block, dtype=torch.int64, device=device)
            except torch.OutOfMemoryError:
                # Free memory is fragmented, so try smaller blocks. The report states how much was tested.
                block = block // 2 // PERIOD * PERIOD
                continue
            for chunk in memory.split(chunk_words):
                self.chunks.append(chunk)
                self.firsts.append(self.words)
                self.words += chunk.numel()
            block = min(block, (words - self.words) // PERIOD * PERIOD)

    @property
    def bytes(self) -> int:
        return 8 * self.words

    def write(self, pattern: Pattern, backwards: bool = False) -> None:
        put = pattern.maker(self.device)
        self.watch.start()
        for index in self._order(backwards):
            self._lay(index, put)
        self.watch.stop()

    def compare(
        self, pattern: Pattern, wrong: WrongRegion, seed: int, *, then: Pattern | None = None, backwards: bool = False
    ) -> None:
        """Record in `wrong` each word that does not hold the pattern.

        The comparison on the device is tested too: the device must find one word that was changed on purpose, and the
        host compares some words, drawn by `seed`.

        Args:
            seed: selects the words for the tests of the comparison.
            then: the pattern to write over each chunk right after its comparison.
            backwards: from the last chunk to the first.
        """
        drawn = random.Random(seed)
        control, seen = drawn.randrange(len(self.chunks)), drawn.randrange(len(self.chunks))
        put, overwrite = pattern.maker(self.device), None if then is None else then.maker(self.device)
        self.watch.start()
        for index in self._order(backwards):
            chunk, first = self.chunks[index], self.firsts[index]
            there = self._wrong_on_the_host(index, pattern, drawn) if index == seen else []
            difference = self._difference(index, put)
            count = int(torch.count_nonzero(difference))
            if count:
                wrong.words += self._listed(difference, first, pattern)
                wrong.count += count
            elif there or index == control:
                changed = drawn.randrange(chunk.numel())
                if not self._sees(index, put, changed, signed(1 << drawn.randrange(64))):
                    wrong.blind.append(
                        f"{pattern.name}: the device did not find word {changed}, changed on purpose, in chunk {index}"
                    )
                elif there:
                    wrong.astray.append(
                        f"{pattern.name}: words {there[:4]} of chunk {index} are right on the device, but the host "
                        "reads them wrong"
                    )
            if overwrite is not None:
                self._lay(index, overwrite)
        self.watch.stop()

    def read(self, word: int) -> int:
        """Return one word, in [0, 2^64)."""
        chunk, place = self._place(word)
        return int(chunk[place].item()) & MASK

    def set(self, word: int, value: int) -> None:
        chunk, place = self._place(word)
        chunk[place] = signed(value)

    def fill(self, first: int, end: int, value: int) -> None:
        """Write `value` to the words from `first` up to, not including, `end`."""
        for chunk, start in zip(self.chunks, self.firsts, strict=True):
            chunk[max(0, first - start) : max(0, end - start)].fill_(signed(value))

    def _place(self, word: int) -> tuple[torch.Tensor, int]:
        index = next(i for i, first in enumerate(self.firsts) if word < first + self.chunks[i].numel())
        return self.chunks[index], word - self.firsts[index]

    def _order(self, backwards: bool) -> Iterator[int]:
        return iter(reversed(range(len(self.chunks)))) if backwards else iter(range(len(self.chunks)))

    def _lay(self, index: int, put: Put) -> None:
        chunk = self.chunks[index]
        put(chunk, self.firsts[index], self._scratch[1, : chunk.numel()])

    def _difference(self, index: int, put: Put) -> torch.Tensor:
        """Return the bits of each word of a chunk that differ from the pattern."""
        chunk = self.chunks[index]
        out, scratch = self._scratch[0, : chunk.numel()], self._scratch[1, : chunk.numel()]
        put(out, self.firsts[index], scratch)
        return torch.bitwise_xor(chunk, out, out=out)

    def _listed(self, difference: torch.Tensor, first: int, pattern: Pattern) -> list[WrongWord]:
        rows = difference.view(-1, PERIOD)
        wrong_rows = (rows != 0).any(dim=1).nonzero()[:_LISTED, 0].tolist()
        listed = []
        for row in wrong_rows:
            for column, bits in enumerate(rows[row].tolist()):
                if bits:
                    word = first + row * PERIOD + column
                    listed.append(WrongWord(word, pattern, pattern.at(word), pattern.at(word) ^ bits & MASK))
        return listed[: _LISTED + 1]

    def _sees(self, index: int, put: Put, changed: int, bit: int) -> bool:
        """Change one word of a right chunk, and return whether the device finds exactly one word that differs."""
        chunk = self.chunks[index]
        chunk[changed] ^= bit
        found = int(torch.count_nonzero(self._difference(index, put)))
        chunk[changed] ^= bit
        return found == 1

    def _wrong_on_the_host(self, index: int, pattern: Pattern, drawn: random.Random) -> list[int]:
        """Return the wrong words, read on the host, in a drawn part of a chunk."""
        chunk, first = self.chunks[index], self.firsts[index]
        start = drawn.randrange(max(1, chunk.numel() - _LOOKED_AT_FROM_THE_HOST))
        words = chunk[start : start + _LOOKED_AT_FROM_THE_HOST].tolist()
        return [start + i for i, word in enumerate(words) if word & MASK != pattern.at(first + start + i)]


def take_region(device: torch.device, share: float) -> Region:
    """Allocate a share of the free memory of `device`.

    The comparison takes two more chunks. A chunk has at most 512 MiB, and less if two would not fit into the remaining
    memory.
    """
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    left = int(free * (1 - share)) // 4
    chunk = max(_SMALLEST_CHUNK, min(_LARGEST_CHUNK, left) // (8 * PERIOD) * (8 * PERIOD))
    return Region(device, int(free * share) // 8, chunk // 8)
