"""Find out what is wrong with a word of memory that did not hold what was written."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from math import gcd
from typing import Any

from mgpu_check.checks.counters import MASK
from mgpu_check.checks.memory_region import Region, WrongWord

__all__ = ["bits_of", "evidence_of", "kind_of"]

_DIAGNOSED = 4
_TRIES = 4


def bits_of(word: int) -> list[int]:
    """Return the numbers of the bits that are 1, of an integer in [0, 2^64), the lowest first."""
    return [bit for bit in range(64) if word >> bit & 1]


def kind_of(region: Region, wrong: WrongWord) -> str:
    """Say what is wrong with a word, after writing to it, and to others, again. The region is overwritten.

    "bit 5 stuck at 1"; "holds what is written at offset …" (an address fault); "bit 5 follows offset …" (coupled bits);
    "not seen again".
    """
    return _stuck(region, wrong) or _aliased(region, wrong) or _coupled(region, wrong) or "not seen again"


def _stuck(region: Region, wrong: WrongWord) -> str:
    ones, zeros = MASK, 0
    for _ in range(_TRIES):  # what is stuck now and then is not stuck
        region.set(wrong.word, 0)
        ones &= region.read(wrong.word)
        region.set(wrong.word, MASK)
        zeros |= region.read(wrong.word)
    stuck = [f"bit {bit} stuck at 1" for bit in bits_of(ones)] + [
        f"bit {bit} stuck at 0" for bit in bits_of(~zeros & MASK)
    ]
    return ", ".join(stuck)


def _aliased(region: Region, wrong: WrongWord) -> str:
    other = wrong.pattern.where(wrong.read)
    if other is None or not 0 <= other < region.words or other == wrong.word:
        return ""
    for value in (0x0123456789ABCDEF, 0xFEDCBA9876543210):
        region.set(wrong.word, value)
        region.set(other, value ^ MASK)
        if region.read(wrong.word) != value ^ MASK:
            return ""
    lines = bits_of(8 * wrong.word ^ 8 * other)
    return f"holds what is written at offset {8 * other:#x}; the addresses differ in bits {', '.join(map(str, lines))}"


def _coupled(region: Region, wrong: WrongWord) -> str:
    for victim in (0, MASK):
        if not _disturbed(region, wrong.word, victim, 0, region.words):
            continue
        first, end = 0, region.words
        while end - first > 1:
            middle = (first + end) // 2
            if _disturbed(region, wrong.word, victim, first, middle):
                end = middle
            elif _disturbed(region, wrong.word, victim, middle, end):
                first = middle
            else:
                return f"changes when offsets {8 * first:#x} to {8 * end:#x} are written, not by a part of them alone"
        bits = bits_of(_disturbed(region, wrong.word, victim, first, end))
        return f"bits {', '.join(map(str, bits))} change when offset {8 * first:#x} is written (coupled)"
    return ""


def _disturbed(region: Region, word: int, victim: int, first: int, end: int) -> int:
    """Return the bits of a word that change when the words from `first` up to `end` are inverted, and no others."""
    region.fill(0, region.words, victim)
    for start, stop in ((first, min(end, word)), (max(first, word + 1), end)):
        if start < stop:
            region.fill(start, stop, victim ^ MASK)
    return region.read(word) ^ victim


def evidence_of(region: Region, count: int, words: Sequence[WrongWord]) -> dict[str, Any]:
    """Return what a report says about wrong words, as values that JSON has. Those listed may be fewer than `count`.

    The first few are diagnosed, which overwrites the region.
    """
    bits: Counter[int] = Counter()
    single = 0
    for word in words:
        bits.update(bits_of(word.differs))
        single += word.differs.bit_count() == 1
    distinct = sorted({word.word for word in words})
    period = 0
    for left, right in pairwise(distinct):
        period = gcd(period, right - left)
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
