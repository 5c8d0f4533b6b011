"""Diagnose a word of memory that did not hold its value."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from math import gcd
from typing import Any

from mgpu_check.acceptance.memory.region import Region, WrongWord
from mgpu_check.suite.common.generated_data import MASK

_DIAGNOSED = 4
_TRIES = 4


def bits_of(word: int) -> list[int]:
    """Return the numbers of the bits that are 1 in an integer in [0, 2^64), in ascending order."""
    return [bit for bit in range(64) if word >> bit & 1]


def named(bits: Sequence[int]) -> str:
    """Return "bit 3" or "bits 0 to 7, 9" for numbers in ascending order."""
    runs: list[list[int]] = []
    for bit in bits:
        if runs and runs[-1][-1] == bit - 1:
            runs[-1].append(bit)
        else:
            runs.append([bit])
    texts = [f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"bit{'s' * (len(bits) > 1)} {', '.join(texts)}"


def kind_of(region: Region, wrong: WrongWord) -> str:
    """Diagnose a wrong word by writing to it, and to others, again. The region is overwritten.

    "bit 5 stuck at 1"; "holds what is written at offset …" (an address fault); "bit 5 changes when offset … is written"
    (coupled bits); "changes by itself, now and then"; "not seen again".
    """
    return (
        _by_itself(region, wrong.word)
        or _stuck(region, wrong.word)
        or _aliased(region, wrong)
        or _coupled(region, wrong)
        or "not seen again"
    )


def _by_itself(region: Region, word: int) -> str:
    """Describe a word that, written and read again with the same value, is sometimes right and sometimes wrong."""
    seen = set()
    for value in (0, MASK) * _TRIES:
        region.set(word, value)
        seen.add((value, region.read(word)))
        seen.add((value, region.read(word)))
    return "changes by itself, now and then" if len(seen) > 2 else ""


def _stuck(region: Region, word: int) -> str:
    ones, zeros = _written(region, word, 0), ~_written(region, word, MASK) & MASK
    found = []
    for value, bits in ((1, ones), (0, zeros)):
        # A bit that is right when it differs from all others is not stuck: another bit of the word changes it.
        alone = [bit for bit in bits_of(bits) if _written(region, word, _single(bit, value)) >> bit & 1 != value]
        stuck = [bit for bit in bits_of(bits) if bit not in alone]
        if stuck:
            found.append(f"{named(stuck)} stuck at {value}")
        for bit in alone[:1]:
            others = [
                other
                for other in range(64)
                if other != bit and _written(region, word, _single(bit, value) ^ 1 << other) >> bit & 1 == value
            ]
            by = f" of {named(others)}" if others else "s of several others together"
            found.append(f"{named([bit])} follows the value{by} of the word (coupled)")
    return ", ".join(found)


def _single(bit: int, stuck: int) -> int:
    """Return the word where all bits have the value `stuck` except for `bit`, which has the opposite."""
    return (MASK if stuck else 0) ^ 1 << bit


def _written(region: Region, word: int, value: int) -> int:
    region.set(word, value)
    return region.read(word)


def _aliased(region: Region, wrong: WrongWord) -> str:
    other = wrong.pattern.where(wrong.read)
    if other is None or not 0 <= other < region.words or other == wrong.word:
        return ""
    for value in (0x0123456789ABCDEF, 0xFEDCBA9876543210):
        region.set(wrong.word, value)
        region.set(other, value ^ MASK)
        if region.read(wrong.word) != value ^ MASK:
            return ""
    lines = named(bits_of(8 * wrong.word ^ 8 * other))
    return f"holds what is written at offset {8 * other:#x}; the addresses differ in {lines}"


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
        again = [_disturbed(region, wrong.word, victim, first, end) for _ in range(_TRIES)]
        if not all(again):
            return "changes by itself, now and then"
        return f"{named(bits_of(again[0]))} changes when offset {8 * first:#x} is written (coupled)"
    return ""


def _disturbed(region: Region, word: int, victim: int, first: int, end: int) -> int:
    """Return the bits of a word that change when only the words from `first` up to `end` are inverted."""
    region.fill(0, region.words, victim)
    for start, stop in ((first, min(end, word)), (max(first, word + 1), end)):
        if start < stop:
            region.fill(start, stop, victim ^ MASK)
    return region.read(word) ^ victim


def evidence_of(region: Region, count: int, words: Sequence[WrongWord]) -> dict[str, Any]:
    """Describe wrong words for a report, in values that JSON can hold. `words` may have fewer words than `count`.

    The first few words are diagnosed, which overwrites the region.
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
