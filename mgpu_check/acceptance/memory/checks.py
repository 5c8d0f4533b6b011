"""Check most of the memory of a GPU: every bit must hold its value, at its own address.

A `Region` holds most of the free memory. The device writes patterns into it and compares its contents; the host can
compute each word of a pattern. A word that did not hold its value is diagnosed. A word has 64 bits, and words are
numbered from the start of the tested memory.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import gcd
from typing import Any, Protocol

import torch

from mgpu_check.acceptance.cases import MemoryCase
from mgpu_check.acceptance.telemetry import keep_busy
from mgpu_check.devices.observations import Measurement, Observation, Subject, SubjectResult, Work
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.oracles.devices.operations import Stopwatch, measured
from mgpu_check.oracles.generated_data import MASK, mix_, mixed, position_of, signed

PERIOD = 64  # period of repeating patterns, in words; the size of each chunk of memory is a multiple


Put = Callable[[torch.Tensor, int, torch.Tensor], object]
"""Writes the words from a number on into a tensor of int64; the last argument is a scratch tensor of the same shape."""


class Pattern(Protocol):
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
    It shows stuck or joined address lines, and where a wrong value belongs."""

    complement: bool = False

    @property
    def name(self) -> str:
        return "complement of the address" if self.complement else "address"

    def maker(self, device: torch.device) -> Put:
        def put(out: torch.Tensor, first_word: int, scratch: torch.Tensor) -> None:
            start, end = 8 * first_word, 8 * (first_word + out.numel())
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
        return lambda out, first_word, scratch: out.view(-1, PERIOD).copy_(row)

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
        def put(out: torch.Tensor, first_word: int, scratch: torch.Tensor) -> None:
            torch.arange(first_word, first_word + out.numel(), out=out)
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


_LARGEST_CHUNK = 512 << 20
_SMALLEST_CHUNK = 8 * PERIOD
_LISTED = 64  # wrong words to list per chunk; all wrong words are counted
_LOOKED_AT_FROM_THE_HOST = 256  # words of each pass that the host compares too


@dataclass(frozen=True)
class WrongWord:
    word: int  # its number in the region, an eighth of its offset in bytes
    pattern: Pattern  # the pattern that was written
    # expected, read: 64 bits, as nonnegative integers; `read` follows from the difference that the device found
    expected: int
    read: int

    @property
    def differs(self) -> int:
        return self.expected ^ self.read


@dataclass
class WrongRegion:
    count: int = 0
    words: list[WrongWord] = field(default_factory=list)
    blind: list[str] = field(default_factory=list)  # lines that explain why the comparison on the device is unreliable
    # lines about words that the host reads wrong, although a working device finds them right
    astray: list[str] = field(default_factory=list)


class Region:
    """Memory of one device, as a sequence of words of 64 bits.

    `take_region` allocates it for one check, or for one round of load, which lets it go at its end.

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
        self, pattern: Pattern, errors: WrongRegion, seed: int, *, then: Pattern | None = None, backwards: bool = False
    ) -> None:
        """Record in `errors` each word that does not hold the pattern.

        The comparison on the device is tested too: the device must find one word that was changed on purpose, and the
        host compares some words, drawn by `seed`. The pattern `then` is written over each chunk right after its
        comparison. `backwards` starts with the last chunk.
        """
        drawn = random.Random(seed)
        control, host_index = drawn.randrange(len(self.chunks)), drawn.randrange(len(self.chunks))
        put, overwrite = pattern.maker(self.device), None if then is None else then.maker(self.device)
        self.watch.start()
        for index in self._order(backwards):
            chunk, first_word = self.chunks[index], self.firsts[index]
            host_errors = self._wrong_on_the_host(index, pattern, drawn) if index == host_index else []
            difference = self._difference(index, put)
            count = int(torch.count_nonzero(difference))
            if count:
                rows = difference.view(-1, PERIOD)
                wrong_rows = (rows != 0).any(dim=1).nonzero()[:_LISTED, 0].tolist()
                listed = []
                for row in wrong_rows:
                    for column, bits in enumerate(rows[row].tolist()):
                        if bits:
                            word = first_word + row * PERIOD + column
                            listed.append(WrongWord(word, pattern, pattern.at(word), pattern.at(word) ^ bits & MASK))
                errors.words += listed[: _LISTED + 1]
                errors.count += count
            elif host_errors or index == control:
                changed = drawn.randrange(chunk.numel())
                if not self._sees(index, put, changed, signed(1 << drawn.randrange(64))):
                    text = f"the device did not find word {changed}, changed on purpose, in chunk {index}"
                    errors.blind.append(f"{pattern.name}: {text}")
                elif host_errors:
                    text = f"words {host_errors[:4]} of chunk {index} are right on the device"
                    errors.astray.append(f"{pattern.name}: {text}, but the host reads them wrong")
            if overwrite is not None:
                self._lay(index, overwrite)
        self.watch.stop()

    def read(self, word: int) -> int:
        """Return one word, in [0, 2^64)."""
        chunk, offset = self._place(word)
        return int(chunk[offset].item()) & MASK

    def set(self, word: int, value: int) -> None:
        chunk, offset = self._place(word)
        chunk[offset] = signed(value)

    def fill(self, first_word: int, end: int, value: int) -> None:
        """Write `value` to the words from `first_word` up to, not including, `end`."""
        for chunk, start in zip(self.chunks, self.firsts, strict=True):
            chunk[max(0, first_word - start) : max(0, end - start)].fill_(signed(value))

    def _place(self, word: int) -> tuple[torch.Tensor, int]:
        index = next(i for i, first_word in enumerate(self.firsts) if word < first_word + self.chunks[i].numel())
        return self.chunks[index], word - self.firsts[index]

    def _order(self, backwards: bool) -> range:
        return range(len(self.chunks))[:: -1 if backwards else 1]

    def _lay(self, index: int, put: Put) -> None:
        chunk = self.chunks[index]
        put(chunk, self.firsts[index], self._scratch[1, : chunk.numel()])

    def _difference(self, index: int, put: Put) -> torch.Tensor:
        """Return the bits of each word of a chunk that differ from the pattern."""
        chunk = self.chunks[index]
        out, scratch = self._scratch[0, : chunk.numel()], self._scratch[1, : chunk.numel()]
        put(out, self.firsts[index], scratch)
        return torch.bitwise_xor(chunk, out, out=out)

    def _sees(self, index: int, put: Put, changed: int, bit: int) -> bool:
        """Change one word of a right chunk, and return whether the device finds exactly one word that differs."""
        chunk = self.chunks[index]
        chunk[changed] ^= bit
        mismatch_count = int(torch.count_nonzero(self._difference(index, put)))
        chunk[changed] ^= bit
        return mismatch_count == 1

    def _wrong_on_the_host(self, index: int, pattern: Pattern, drawn: random.Random) -> list[int]:
        """Return the wrong words, read on the host, in a drawn part of a chunk."""
        chunk, first_word = self.chunks[index], self.firsts[index]
        start = drawn.randrange(max(1, chunk.numel() - _LOOKED_AT_FROM_THE_HOST))
        words = chunk[start : start + _LOOKED_AT_FROM_THE_HOST].tolist()
        return [start + i for i, word in enumerate(words) if word & MASK != pattern.at(first_word + start + i)]


def take_region(device: torch.device, share: float) -> Region:
    """Allocate a share of the free memory of `device`.

    The comparison takes two more chunks. A chunk has at most 512 MiB, and less if two would not fit into the remaining
    memory.
    """
    torch.cuda.empty_cache()
    free = torch.cuda.mem_get_info(device)[0]
    remaining = int(free * (1 - share)) // 4
    chunk = max(_SMALLEST_CHUNK, min(_LARGEST_CHUNK, remaining) // (8 * PERIOD) * (8 * PERIOD))
    return Region(device, int(free * share) // 8, chunk // 8)


_DIAGNOSED = 4
_TRIES = 4


def bits_of(word: int) -> list[int]:
    """Return the numbers of the bits that are 1 in an integer in [0, 2^64), in ascending order."""
    return [bit for bit in range(64) if word >> bit & 1]


def bits_text(bits: Sequence[int]) -> str:
    """Return "bit 3" or "bits 0 to 7, 9" for numbers in ascending order."""
    runs: list[list[int]] = []
    for bit in bits:
        if runs and runs[-1][-1] == bit - 1:
            runs[-1].append(bit)
        else:
            runs.append([bit])
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"bit{'s' * (len(bits) > 1)} {', '.join(texts)}"


def kind_of(region: Region, error: WrongWord) -> str:
    """Diagnose a wrong word by writing to it, and to others, again. The region is overwritten.

    "bit 5 stuck at 1"; "holds what is written at offset …" (an address fault); "bit 5 changes when offset … is written"
    (coupled bits); "changes by itself, now and then"; "not seen again".
    """
    of_word = _by_itself(region, error.word) or _stuck(region, error.word)
    return of_word or _aliased(region, error) or _coupled(region, error) or "not seen again"


def _by_itself(region: Region, word: int) -> str | None:
    """Describe a word that, written and read again with the same value, is sometimes right and sometimes wrong."""
    readings = set()
    for value in (0, MASK) * _TRIES:
        region.set(word, value)
        readings.add((value, region.read(word)))
        readings.add((value, region.read(word)))
    return "changes by itself, now and then" if len(readings) > 2 else None


def _stuck(region: Region, word: int) -> str | None:
    ones, zeros = _written(region, word, 0), ~_written(region, word, MASK) & MASK
    descriptions = []
    for value, bits in ((1, ones), (0, zeros)):
        # A bit that is right when it differs from all others is not stuck: another bit of the word changes it.
        alone = [bit for bit in bits_of(bits) if _written(region, word, _single(bit, value)) >> bit & 1 != value]
        stuck = [bit for bit in bits_of(bits) if bit not in alone]
        if stuck:
            descriptions.append(f"{bits_text(stuck)} stuck at {value}")
        for bit in alone[:1]:
            patterns = {peer: _single(bit, value) ^ 1 << peer for peer in range(64) if peer != bit}
            others = [peer for peer, text in patterns.items() if _written(region, word, text) >> bit & 1 == value]
            by = f" of {bits_text(others)}" if others else "s of several others together"
            descriptions.append(f"{bits_text([bit])} follows the value{by} of the word (coupled)")
    return ", ".join(descriptions) or None


def _single(bit: int, stuck: int) -> int:
    """Return the word where all bits have the value `stuck` except for `bit`, which has the opposite."""
    return (MASK if stuck else 0) ^ 1 << bit


def _written(region: Region, word: int, value: int) -> int:
    region.set(word, value)
    return region.read(word)


def _aliased(region: Region, error: WrongWord) -> str | None:
    target = error.pattern.where(error.read)
    if target is None or not 0 <= target < region.words or target == error.word:
        return None
    for value in (0x0123456789ABCDEF, 0xFEDCBA9876543210):
        region.set(error.word, value)
        region.set(target, value ^ MASK)
        if region.read(error.word) != value ^ MASK:
            return None
    lines = bits_text(bits_of(8 * error.word ^ 8 * target))
    return f"holds what is written at offset {8 * target:#x}; the addresses differ in {lines}"


def _coupled(region: Region, error: WrongWord) -> str | None:
    for victim in (0, MASK):
        if not _disturbed(region, error.word, victim, 0, region.words):
            continue
        start, end = 0, region.words
        while end - start > 1:
            middle = (start + end) // 2
            if _disturbed(region, error.word, victim, start, middle):
                end = middle
            elif _disturbed(region, error.word, victim, middle, end):
                start = middle
            else:
                return f"changes when offsets {8 * start:#x} to {8 * end:#x} are written, not by a part of them alone"
        repetitions = [_disturbed(region, error.word, victim, start, end) for _ in range(_TRIES)]
        if not all(repetitions):
            return "changes by itself, now and then"
        return f"{bits_text(bits_of(repetitions[0]))} changes when offset {8 * start:#x} is written (coupled)"
    return None


def _disturbed(region: Region, word: int, victim: int, first_word: int, end: int) -> int:
    """Return the bits of a word that change when only the words from `first_word` up to `end` are inverted."""
    region.fill(0, region.words, victim)
    for start, stop in ((first_word, min(end, word)), (max(first_word, word + 1), end)):
        if start < stop:
            region.fill(start, stop, victim ^ MASK)
    return region.read(word) ^ victim


def evidence_of(region: Region, count: int, words: Sequence[WrongWord]) -> dict[str, Any]:
    """Describe wrong words for a report, in values that JSON can hold. `words` may have fewer words than `count`.
    The first few words are diagnosed, which overwrites the region."""
    bits = Counter(bit for word in words for bit in bits_of(word.differs))
    single = sum(word.differs.bit_count() == 1 for word in words)
    period = gcd(*(upper - lower for lower, upper in pairwise(sorted({word.word for word in words}))))
    kinds: dict[int, str] = {}
    for word in words:
        if word.word not in kinds and len(kinds) < _DIAGNOSED:
            kinds[word.word] = kind_of(region, word)
    return {
        "errors": count,
        "words": [
            {
                "offset": 8 * word.word,
                "pattern": word.pattern.name,
                "expected": f"{word.expected:#018x}",
                "read": f"{word.read:#018x}",
                "differs": f"{word.differs:#018x}",
                "kind": kinds.get(word.word, ""),
            }
            for word in words[:32]
        ],
        "bits": {str(bit): times for bit, times in bits.most_common()},
        "share of single bits": single / len(words) if words else 0.0,
        "period": 8 * period,
        "kinds": list(dict.fromkeys(kinds.values())),
    }


_COPIES = 5


def examine_memory(rank: Rank, case: MemoryCase) -> list[SubjectResult]:
    """Write patterns over most of the free memory of the device of `rank`, and then read it, in the passes of `case`.

    Everything is written before anything is read, so that aliased addresses show. The device compares, and only wrong
    words are copied to the host.
    """
    subject = Subject("gpu", (rank.index,))
    with torch.cuda.device(rank.device), torch.no_grad():
        region = take_region(rank.device, case.share)
        try:
            if not region.chunks:
                return [Observation("memory", subject, "unknown", "no memory is free", str(case))]
            hold = functools.partial(keep_busy, rank, case.hold_seconds) if case.hold_seconds else None
            return [examine_region(region, case, subject, hold), *_bandwidth(region, subject)]
        finally:
            del region
            torch.cuda.empty_cache()


def examine_region(
    region: Region, case: MemoryCase, subject: Subject, hold: Callable[[], object] | None = None
) -> Observation:
    """Run the passes of `case` on a region, and call `hold` before each comparison; see `examine_memory`."""
    errors = WrongRegion()
    done = 0
    for number in range(case.passes):
        rounds = rounds_of(case, number)
        region.write(*rounds[0])
        for index, (pattern, backwards) in enumerate(rounds):
            seed = case.seed + 1000 * number + index
            then = rounds[index + 1][0] if index + 1 < len(rounds) and case.pattern == "inversions" else None
            if hold is not None:
                hold()
            region.compare(pattern, errors, seed, then=then, backwards=backwards)
            if then is None and index + 1 < len(rounds):
                region.write(*rounds[index + 1])
            done += 1
    work = Work(bytes=2 * done * region.bytes, operations=done * len(region.chunks), seconds=sum(region.watch.laps()))
    if not errors.count and not errors.blind and not errors.astray:
        return Observation("memory", subject, "passed", case=str(case), work=work)
    if errors.astray and not errors.count and not errors.blind:
        way, details = Subject("download", subject.members), {"astray": errors.astray}
        return Observation("memory", way, "failed", errors.astray[0], str(case), work, details)
    evidence = evidence_of(region, errors.count, errors.words) | {"bytes tested": region.bytes, "blind": errors.blind}
    return Observation("memory", subject, "failed", _seen(errors, evidence["kinds"]), str(case), work, evidence)


def _seen(errors: WrongRegion, kinds: list[str]) -> str:
    if not errors.count:
        return errors.blind[0]
    earliest = errors.words[0]
    words = "1 word" if errors.count == 1 else f"{errors.count} words"
    place = f"{words} wrong, the first at offset {8 * earliest.word:#x}"
    return "; ".join([f"{place}: wrote {earliest.expected:#018x}, read {earliest.read:#018x}", *kinds[:1]])


def _bandwidth(region: Region, subject: Subject) -> list[Measurement]:
    if len(region.chunks) < 2 or region.chunks[0].shape != region.chunks[1].shape:
        return []
    watch = Stopwatch(region.device)
    for _ in range(_COPIES + 1):
        watch.start()
        region.chunks[0].copy_(region.chunks[1])
        watch.stop()
    size = 8 * region.chunks[0].numel()
    return measured("memory", subject, "memory bandwidth", "B/s", 2 * size, watch.laps()[1:], size)
