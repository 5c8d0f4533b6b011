"""Make data on a device from position and seed alone, the same on every device, and compare them there.

Data need not be copied to a device or stored for a comparison: position and seed suffice to make them again.

- Pseudorandom numbers by integer arithmetic. The mixing is a bijection of 64 bits, so a value shows its position. It
  uses the steps of splitmix64's finalizer: a product with an odd number, and an exclusive or with a shift of itself.
- Digests of 64 bits over all bits of a tensor. Each word of 32 bits is joined with its position and mixed by a
  bijection of 64 bits, and the results are summed. A single changed word always changes the digest; several leave it
  unchanged with probability 2^-64.
- Operands that show errors which small whole numbers hide: full significands, special values, extremes, any bits.
- Contents of memory that show their origin: each 8 bytes encode their place and the tag of their writer. A word is
  ``(place << 24 | tag) * ODD``, with its upper half folded into its lower one, times another odd number. The encoding
  is invertible. So wrong data can be identified: data of another copy, data of the right copy but shifted, or data from
  before the copy. Words of different places or tags differ in all their bytes, so that the bits on all lanes of a link
  change.
- Plain words, which compress, and whose bits switch all at once or never: zeros, ones, alternating and walking bits,
  signs alone, subnormal numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from mgpu_check.oracles.devices import cases
from mgpu_check.torch_hooks.tensors import INTEGER_OF_SIZE

MASK = (1 << 64) - 1
_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_STEP = 0x9E3779B97F4A7C15
_SHIFTS = (32, 29)
_LOW = 0xFFFFFFFF


def signed(word: int) -> int:
    """Return the int64 that has the bits of `word`, an integer in [0, 2^64)."""
    return word - (1 << 64) if word >> 63 else word


def _offset(seed: int) -> int:
    return (seed + 1) * _STEP & MASK


def mix_(positions: torch.Tensor, seed: int, scratch: torch.Tensor) -> torch.Tensor:
    """Replace int64 positions by their mixed values, in place; `scratch` is of their shape, dtype and device."""
    positions.add_(signed(_offset(seed)))
    for factor, shift in zip((_FIRST, _SECOND), _SHIFTS, strict=True):
        positions.mul_(signed(factor))
        torch.bitwise_right_shift(positions, shift, out=scratch)
        scratch.bitwise_and_(MASK >> shift)  # the shift of int64 repeats the sign
        positions.bitwise_xor_(scratch)
    return positions


def mixed(position: int, seed: int) -> int:
    """Return the mixed value of one position as `mix_` computes it, as an integer in [0, 2^64)."""
    word = (position + _offset(seed)) & MASK
    for factor, shift in zip((_FIRST, _SECOND), _SHIFTS, strict=True):
        word = word * factor & MASK
        word ^= word >> shift
    return word


def position_of(word: int, seed: int) -> int:
    """Return the position whose mixed value is `word`, an integer in [0, 2^64)."""
    for factor, shift in zip((_SECOND, _FIRST), reversed(_SHIFTS), strict=True):
        bits, recovered = word, shift
        while recovered < 64:  # each round recovers `shift` more bits
            bits, recovered = word ^ (bits >> shift), recovered + shift
        word = bits * pow(factor, -1, 1 << 64) & MASK
    return (word - _offset(seed)) & MASK


def counted(shape: Sequence[int], seed: int, device: torch.device) -> torch.Tensor:
    """Return the mixed values of the positions 0, 1, ... as int64 of `shape` on `device`, in row-major order."""
    positions = torch.arange(torch.Size(shape).numel(), dtype=torch.int64, device=device)
    return mix_(positions, seed, torch.empty_like(positions)).view(tuple(shape))


def integers(
    shape: Sequence[int], low: int, high: int, *, seed: int, device: torch.device, dtype: torch.dtype = torch.int64
) -> torch.Tensor:
    """Return pseudorandom whole numbers in [`low`, `high`], of `shape` and `dtype` on `device`.
    `dtype` must hold them exactly, and the range may have at most 2^31 numbers."""
    return several([shape], low, high, seed=seed, device=device, dtype=dtype)[0]


def several(
    shapes: Sequence[Sequence[int]], low: int, high: int, *, seed: int, device: torch.device, dtype: torch.dtype
) -> list[torch.Tensor]:
    """Return a tensor of numbers as from `integers` for each of `shapes`; the tensors are independent."""
    sizes = [torch.Size(shape).numel() for shape in shapes]
    words = counted((sum(sizes),), seed, device)
    words.bitwise_right_shift_(32).bitwise_and_((1 << 32) - 1)
    words.mul_(high - low + 1).bitwise_right_shift_(32).add_(low)
    return [piece.view(tuple(shape)) for piece, shape in zip(words.to(dtype).split(sizes), shapes, strict=True)]


def fractions(
    shape: Sequence[int], *, seed: int, device: torch.device, dtype: torch.dtype, low: float = -1.0, high: float = 1.0
) -> torch.Tensor:
    """Return pseudorandom numbers in [`low`, `high`], of `shape` and `dtype` on `device`, that use all digits.
    They are computed in float64 and rounded once, so they have the same bits on all devices that follow IEEE 754."""
    words = counted(shape, seed, device).bitwise_right_shift_(11)
    return words.to(torch.float64).mul_(2.0**-53).add_(0.5).mul_(high - low).add_(low).to(dtype)


_BLOCK = 1 << 24  # elements to mix at once; a limit, because mixing needs many times their memory


def digest(tensor: torch.Tensor) -> int:
    """Return the digest of a tensor of any size, in [0, 2^64)."""
    flat = tensor.detach().reshape(-1)
    total = 0
    for start in range(0, flat.numel(), _BLOCK):
        total += int(_mixed(_words(flat[start : start + _BLOCK]), start * _halves(flat)).sum())
    return total & MASK


def digests(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the digest of each of `tensors` as int64 on their device, without waiting for it.
    The digest depends on the size of the tensors before, so it differs from that of `digest`."""
    mixed = _mixed(torch.cat([_words(tensor.detach()) for tensor in tensors]), 0)
    return torch.stack([words.sum() for words in mixed.split([t.numel() * _halves(t) for t in tensors])])


def _mixed(words: torch.Tensor, start: int) -> torch.Tensor:
    """Return the mixed values of words at the positions from `start` on; `words` is overwritten."""
    positions = torch.arange(start, start + len(words), device=words.device).bitwise_left_shift_(32)
    return mix_(positions.bitwise_or_(words), 0, words)


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bits of the elements as int64 in [0, 2^32); an element of 64 bits gives two of them."""
    flat = tensor.contiguous().reshape(-1)
    size = min(flat.element_size(), 4)
    return flat.view(INTEGER_OF_SIZE[size]).long().bitwise_and_(_LOW >> (32 - 8 * size))


def _halves(tensor: torch.Tensor) -> int:
    return max(1, tensor.element_size() // 4)


ALL: tuple[torch.dtype, ...] = tuple(
    getattr(torch, name) for name in (*cases.NUMBERS, "bool", "complex64", "complex128")
)
_CPU = torch.device("cpu")
_PART = {torch.complex64: torch.float32, torch.complex128: torch.float64}


@lru_cache(maxsize=256)
def significands(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return finite numbers that use every digit of a dtype.

    Floats are between 1/8 and 16 in magnitude, with either sign; integers are arbitrary. A product or a copy in a
    narrower format loses digits of nearly every number.
    """
    if dtype.is_complex:
        components = significands((*shape, 2), _PART[dtype], seed)
        return torch.view_as_complex(components)
    if dtype.is_floating_point:
        components = fractions(shape, seed=seed, device=_CPU, dtype=torch.float64, low=1.0, high=2.0)
        signs = integers(shape, 0, 1, seed=seed + 1, device=_CPU, dtype=torch.float64) * 2 - 1
        powers = integers(shape, -3, 3, seed=seed + 2, device=_CPU)
        return torch.ldexp(components * signs, powers).to(dtype)
    words = counted(shape, seed, _CPU)
    return words & 1 != 0 if dtype == torch.bool else words.to(dtype)


@lru_cache(maxsize=64)
def small(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return numbers in (-2, 2) that use all digits of the dtype."""
    return fractions(shape, seed=seed, device=_CPU, dtype=dtype, low=-2.0, high=2.0)


@lru_cache(maxsize=64)
def anything(count: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Return elements with arbitrary bits: the special values, then pseudorandom bits, with NaNs with payloads."""
    if dtype.is_complex:
        return torch.view_as_complex(anything(2 * count, _PART[dtype], seed).view(-1, 2))
    if dtype == torch.bool:
        return significands((count,), dtype, seed)
    integer = INTEGER_OF_SIZE[dtype.itemsize]
    words = counted((count,), seed, _CPU).bitwise_right_shift_(64 - 8 * dtype.itemsize).to(integer)
    special = _special(dtype).view(integer)
    kept = special[: min(count, len(special))]
    words[: len(kept)] = kept
    return words.view(dtype)


@lru_cache(maxsize=16)
def _special(dtype: torch.dtype) -> torch.Tensor:
    if dtype.is_floating_point:
        facts = torch.finfo(dtype)
        least = facts.smallest_normal * facts.eps  # subnormal
        values = (0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan, least, -least, facts.smallest_normal / 2)
        normals = (facts.smallest_normal, facts.max, facts.min, 1 + facts.eps, math.nan)
        special = torch.tensor([*values, *normals], dtype=torch.float64).to(dtype)
        special.view(INTEGER_OF_SIZE[dtype.itemsize])[-1] |= 5  # NaN with a payload
        return special
    if dtype == torch.bool:
        return torch.tensor([False, True])
    limits = torch.iinfo(dtype)
    extremes = {0, 1, 2, limits.min, limits.min + 1, limits.max, limits.max - 1, limits.max // 2 + 1}
    return torch.tensor(sorted(extremes | ({-1} if limits.min else set())), dtype=dtype)


HOST = 63  # the number of the host in tags; devices have their own numbers

_PLACES = 64
_SEEDS = 1 << 10
_INVERSE, _OTHER_INVERSE = (pow(odd, -1, 1 << 64) for odd in (_STEP, _FIRST))
_WORD = 8
_PLAIN = (0, MASK, 0xAAAAAAAAAAAAAAAA, 0x5555555555555555, 0x8000000080000000, 0x0000000100000001)
CHUNK = 1 << 18  # least number of bytes to make and compare at once; the work needs four times as much memory
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


def bytes_of_content(tag: int, start: int, end: int, device: torch.device, piece: int = 0) -> torch.Tensor:
    """Return the bytes `start` to `end` of the content of `tag`, as uint8. If `piece` is not 0, every other piece of so
    many bytes, whole words, holds plain words instead, each piece a kind of its own."""
    first_word = start // _WORD
    words = torch.arange(first_word, -(-end // _WORD), dtype=torch.int64, device=device)
    # (place << 24 | tag) * _STEP, by two operations in place of three
    words.mul_(signed(_STEP << 24 & MASK)).add_(signed(tag * _STEP & MASK))
    words.bitwise_xor_((words >> 32).bitwise_and_(_LOW)).mul_(signed(_FIRST))
    if piece >= _WORD:
        places = torch.arange(first_word, first_word + len(words), dtype=torch.int64, device=device)
        turn = places.div(piece // _WORD, rounding_mode="floor")
        walking = torch.ones_like(places).bitwise_left_shift_(places % 64)
        kind = turn.div(2, rounding_mode="floor").remainder_(len(_PLAIN) + 2)
        plain = torch.where(kind == len(_PLAIN), walking, ~walking)
        for number, word in enumerate(_PLAIN):
            plain.masked_fill_(kind == number, signed(word))
        words = torch.where(turn % 2 == 1, plain, words)
    return words.view(torch.uint8)[start - first_word * _WORD : end - first_word * _WORD]


def fill(memory: torch.Tensor, tag: int, start: int = 0, chunk: int = CHUNK, piece: int = 0) -> None:
    """Write the content of `tag`, from its byte `start` on, into contiguous uint8 memory; `piece` as for
    `bytes_of_content`."""
    for at in range(0, memory.numel(), chunk):
        end = min(at + chunk, memory.numel())
        memory[at:end].copy_(bytes_of_content(tag, start + at, start + end, memory.device, piece))


@dataclass(frozen=True)
class WrongBytes:
    count: int  # the number of wrong bytes
    # first, last: the places of the first and the last
    first: int
    last: int
    looks: str  # a description of the wrong data
    evidence: Mapping[str, Any]  # places, bits and values, as values that JSON can hold


def compare(
    got: torch.Tensor, expected: torch.Tensor, names_by_tag: Mapping[int, str], start: int = 0
) -> WrongBytes | None:
    """Compare bytes, uint8 of equal size, on the device that has them; None if all are right. `names_by_tag` names the
    content of each tag, and `start` is the place of the first byte, for the evidence."""
    if torch.equal(got, expected):
        return None
    mismatches = (got != expected).to(torch.int8)
    count, earliest = int(mismatches.sum()), int(mismatches.argmax())
    last = got.numel() - 1 - int(mismatches.flip(0).argmax())
    begin = earliest // _WORD * _WORD
    window = slice(begin, min(begin + _LOOKED_AT, got.numel()))
    actual, should, places = got[window].cpu(), expected[window].cpu(), mismatches[window].cpu().nonzero().flatten()
    looks = _looks(actual, should, places, names_by_tag)
    xor = (actual ^ should)[earliest - begin :][:_EVIDENCE]
    evidence = {
        "bytes": count,
        "first": start + earliest,
        "last": start + last,
        "got": bytes(actual[earliest - begin :][:_EVIDENCE].tolist()).hex(),
        "expected": bytes(should[earliest - begin :][:_EVIDENCE].tolist()).hex(),
        "bits": bytes(xor.tolist()).hex(),
        # The greatest common divisor of the distances between wrong bytes; 0 for a single one.
        "period": math.gcd(*(places[1:] - places[:-1]).tolist()),
    }
    return WrongBytes(count, start + earliest, start + last, looks, evidence)


def _looks(got: torch.Tensor, expected: torch.Tensor, positions: torch.Tensor, names_by_tag: Mapping[int, str]) -> str:
    bad = got[positions]
    if torch.equal(bad, expected[positions]):
        text = "the device finds it wrong, but the host reads it right"
        return f"{text}: it has changed, or the copy to the host hides the error"
    if len(bad) >= _WORD and not bool(bad.any()):
        return "it holds zeros"
    if len(bad) >= _WORD and bool((bad == 0xFF).all()):
        return "all bits are ones"
    if origin := _origin(got, expected, positions, names_by_tag):
        return origin
    flips = (bad ^ expected[positions]).unique().tolist()
    if len(flips) == 1 and len(positions) < len(got):
        bits = [str(bit) for bit in range(8) if flips[0] >> bit & 1]
        which = "a byte is" if len(positions) == 1 else "bytes are"
        return f"bit{'s' * (len(bits) > 1)} {', '.join(bits)} of {which} inverted"
    return "it holds other data"


def _origin(
    got: torch.Tensor, expected: torch.Tensor, positions: torch.Tensor, names_by_tag: Mapping[int, str]
) -> str | None:
    """Name the origin of wrong bytes, decoded from their words; None if they have no known tag."""
    start = int(positions[0])
    # Shifted content may begin in the middle of a word, so try all phases.
    for phase in range(_WORD):
        content = _read(got, start + phase)
        if content is None or content[0] not in names_by_tag:
            continue
        following = _read(got, start + phase + _WORD)
        if following is not None and following != (content[0], content[1] + 1) and len(positions) > 3 * _WORD:
            continue
        name = names_by_tag[content[0]]
        # Compare where the content found and the right content would begin, in bytes, to get the shift.
        begins = content[1] * _WORD - phase
        for back in range(_WORD):
            due = _read(expected, start + back)
            if due is not None and due[0] == content[0]:
                moved = begins - (due[1] * _WORD - back)
                direction = "further on" if moved > 0 else "further back"
                return f"it holds {name}, {abs(moved)} bytes {direction}" if moved else None
        return f"it holds {name}"
    return None


def _read(memory: torch.Tensor, at: int) -> tuple[int, int] | None:
    """Return tag and place of the word that begins at byte `at`; None if less than a word is left."""
    if at + _WORD > memory.numel():
        return None
    word = int.from_bytes(bytes(memory[at : at + _WORD].tolist()), "little")
    word = word * _OTHER_INVERSE & MASK
    word ^= word >> 32 & _LOW
    number = word * _INVERSE & MASK
    return number & 0xFFFFFF, number >> 24
