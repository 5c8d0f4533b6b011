"""Fill memory with contents that show their origin: each 8 bytes encode their place and the tag of their writer.

A word is ``(place << 24 | tag) * ODD``, with its upper half folded into its lower one, times another odd number. The
encoding is invertible. So wrong data can be identified: data of another copy, data of the right copy but shifted, or
data from before the copy. Words of different places or tags differ in all their bytes, so that the bits on all lanes of
a link change.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

HOST = 63
"""The number of the host in tags; devices have their own numbers."""

_PLACES = 64
_SEEDS = 1 << 10
_ODD = 0x9E3779B97F4A7C15
_OTHER_ODD = 0xBF58476D1CE4E5B9
_INVERSE, _OTHER_INVERSE = (pow(odd, -1, 1 << 64) for odd in (_ODD, _OTHER_ODD))
_MASK = (1 << 64) - 1
_LOW = 0xFFFFFFFF
_WORD = 8
CHUNK = 1 << 18
"""Least number of bytes to make and compare at once; the work needs four times as much memory."""
_EVIDENCE = 16
_LOOKED_AT = 4096


def tag_of(source: int, destination: int, seed: int, *, before: bool = False) -> int:
    """Return the tag of data copied from `source` to `destination`, or, with `before`, of the destination before the
    copy.

    Devices that differ in their last four bits differ in the lowest byte of the tag, so one byte of content
    distinguishes them.
    """
    low = (source % 16) << 4 | destination % 16
    high = (source % _PLACES // 16) << 2 | destination % _PLACES // 16
    folded = (seed ^ seed >> 10 ^ seed >> 20) % _SEEDS
    tag = low | high << 8 | folded << 13 | int(before) << 12
    return tag ^ 0xA5 if before else tag


def _signed(number: int) -> int:
    number &= _MASK
    return number - (1 << 64) if number >> 63 else number


def _words(first: int, count: int, tag: int, device: torch.device) -> torch.Tensor:
    words = torch.arange(first, first + count, dtype=torch.int64, device=device)
    # (place << 24 | tag) * ODD, by two operations in place of three
    words.mul_(_signed(_ODD << 24)).add_(_signed(tag * _ODD))
    return words.bitwise_xor_((words >> 32).bitwise_and_(_LOW)).mul_(_signed(_OTHER_ODD))


def bytes_of_content(tag: int, start: int, end: int, device: torch.device) -> torch.Tensor:
    """Return the bytes `start` to `end` of the content of `tag`, as uint8."""
    first = start // _WORD
    words = _words(first, -(-end // _WORD) - first, tag, device)
    return words.view(torch.uint8)[start - first * _WORD : end - first * _WORD]


def fill(memory: torch.Tensor, tag: int, start: int = 0, chunk: int = CHUNK) -> None:
    """Write the content of `tag`, from its byte `start` on, into contiguous uint8 memory."""
    for at in range(0, memory.numel(), chunk):
        end = min(at + chunk, memory.numel())
        memory[at:end].copy_(bytes_of_content(tag, start + at, start + end, memory.device))


@dataclass(frozen=True)
class WrongBytes:
    """Wrong bytes.

    Attributes:
        count: the number of wrong bytes.
        first, last: the places of the first and the last.
        looks: a description of the wrong data.
        evidence: places, bits and values, as values that JSON can hold.
    """

    count: int
    first: int
    last: int
    looks: str
    evidence: Mapping[str, Any]


def compare(got: torch.Tensor, expected: torch.Tensor, names: Mapping[int, str], start: int = 0) -> WrongBytes | None:
    """Compare bytes on the device that has them; None if all are right.

    Args:
        got, expected: uint8, of equal size, on one device.
        names: tag -> name of the content with this tag.
        start: the place of the first byte, for the evidence.
    """
    if torch.equal(got, expected):
        return None
    wrong = (got != expected).to(torch.int8)
    count, first = int(wrong.sum()), int(wrong.argmax())
    last = got.numel() - 1 - int(wrong.flip(0).argmax())
    begin = first // _WORD * _WORD
    window = slice(begin, min(begin + _LOOKED_AT, got.numel()))
    here, should, places = got[window].cpu(), expected[window].cpu(), wrong[window].cpu().nonzero().flatten()
    looks = _looks(here, should, places, names)
    xor = (here ^ should)[first - begin :][:_EVIDENCE]
    evidence = {
        "bytes": count,
        "first": start + first,
        "last": start + last,
        "got": bytes(here[first - begin :][:_EVIDENCE].tolist()).hex(),
        "expected": bytes(should[first - begin :][:_EVIDENCE].tolist()).hex(),
        "bits": bytes(xor.tolist()).hex(),
        "period": _period(places),
    }
    return WrongBytes(count, start + first, start + last, looks, evidence)


def _looks(got: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor, names: Mapping[int, str]) -> str:
    """Describe the wrong bytes at the places `wrong`."""
    bad = got[wrong]
    if torch.equal(bad, expected[wrong]):
        return (
            "the device finds it wrong, but the host reads it right: it has changed, or the copy to the host hides "
            "the error"
        )
    if len(bad) >= _WORD and not bool(bad.any()):
        return "it holds zeros"
    if len(bad) >= _WORD and bool((bad == 0xFF).all()):
        return "all bits are ones"
    if found := _origin(got, expected, wrong, names):
        return found
    flips = (bad ^ expected[wrong]).unique().tolist()
    if len(flips) == 1 and len(wrong) < len(got):
        bits = [str(bit) for bit in range(8) if flips[0] >> bit & 1]
        return (
            f"bit{'s' * (len(bits) > 1)} {', '.join(bits)} of {'a byte is' if len(wrong) == 1 else 'bytes are'} "
            "inverted"
        )
    return "it holds other data"


def _origin(got: torch.Tensor, expected: torch.Tensor, wrong: torch.Tensor, names: Mapping[int, str]) -> str:
    """Name the origin of wrong bytes, decoded from their words; "" if they have no known tag."""
    first = int(wrong[0])
    # Shifted content may begin in the middle of a word, so try all phases.
    for phase in range(_WORD):
        found = _read(got, first + phase)
        if found is None or found[0] not in names:
            continue
        again = _read(got, first + phase + _WORD)
        if again is not None and again != (found[0], found[1] + 1) and len(wrong) > 3 * _WORD:
            continue
        name = names[found[0]]
        # Compare where the content found and the right content would begin, in bytes, to get the shift.
        begins = found[1] * _WORD - phase
        for back in range(_WORD):
            right = _read(expected, first + back)
            if right is not None and right[0] == found[0]:
                moved = begins - (right[1] * _WORD - back)
                where = "further on" if moved > 0 else "further back"
                return f"it holds {name}, {abs(moved)} bytes {where}" if moved else ""
        return f"it holds {name}"
    return ""


def _read(memory: torch.Tensor, at: int) -> tuple[int, int] | None:
    """Return tag and place of the word that begins at byte `at`; None if less than a word is left."""
    if at + _WORD > memory.numel():
        return None
    word = int.from_bytes(bytes(memory[at : at + _WORD].tolist()), "little")
    word = word * _OTHER_INVERSE & _MASK
    word ^= word >> 32 & _LOW
    number = word * _INVERSE & _MASK
    return number & 0xFFFFFF, number >> 24


def _period(places: torch.Tensor) -> int:
    """Return the greatest common divisor of the distances between wrong bytes; 0 for a single wrong byte."""
    return math.gcd(*(places[1:] - places[:-1]).tolist()) if len(places) > 1 else 0
