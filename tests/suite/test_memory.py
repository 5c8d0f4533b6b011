"""The check of memory sees each kind of broken memory, and says which it is."""

from __future__ import annotations

import pytest
import torch

from mgpu_check.acceptance.cases import PATTERNS, MemoryCase
from mgpu_check.acceptance.memory import checks as memory
from mgpu_check.acceptance.memory.checks import Region
from mgpu_check.devices.observations import Subject
from mgpu_check.oracles import generated_data

CPU = torch.device("cpu")
WORDS, CHUNK = 64 * 20, 64 * 6


class Broken(Region):
    """A region in which `defect(words, index)` spoils a chunk after each write."""

    def __init__(self, defect):
        super().__init__(CPU, WORDS, CHUNK)
        self.defect = defect

    def _lay(self, index, put):
        super()._lay(index, put)
        self.defect(self)

    def fill(self, first, end, value):
        super().fill(first, end, value)
        self.defect(self)

    def set(self, word, value):
        super().set(word, value)
        self.defect(self, word)


def looked_at(region, pattern="random"):
    return memory.examine_region(region, MemoryCase(pattern, 0.5, seed=3, passes=2), Subject("gpu", (0,)))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_healthy_memory_passes(pattern):
    seen = looked_at(Region(CPU, WORDS, CHUNK), pattern)
    rounds = {"inversions": 4, "walking ones": 1, "walking zeros": 1}.get(pattern, 2)
    assert (seen.outcome, seen.work.bytes) == ("passed", 2 * rounds * 2 * 8 * WORDS)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("value", [0, 1])
def test_a_stuck_bit(pattern, value):
    word, bit = 700, 63  # where a bit walks by in the first pass

    def defect(region, written=None):
        chunk, place = region._place(word)
        mask = generated_data.signed(1 << bit)
        chunk[place] = chunk[place] | mask if value else chunk[place] & ~mask

    seen = looked_at(Broken(defect), pattern)
    assert seen.evidence["kinds"] == [f"bit {bit} stuck at {value}"]
    assert {w["offset"] for w in seen.evidence["words"]} == {8 * word}
    assert seen.evidence["bits"].keys() == {str(bit)}


@pytest.mark.parametrize("pattern", ["address", "random"])
def test_addresses_that_are_one(pattern):
    low, high = 100, 100 ^ 512

    class Aliased(Broken):
        latest = low

        def write(self, pattern, backwards=False):
            super().write(pattern, backwards)
            Region.set(self, low, pattern.at(low if backwards else high))
            Region.set(self, high, pattern.at(low if backwards else high))

    def defect(region, written=None):
        if written in (low, high):
            value = region.read(written)
            Region.set(region, low, value)
            Region.set(region, high, value)

    seen = looked_at(Aliased(defect), pattern)
    assert any("the addresses differ in bit 12" in kind for kind in seen.evidence["kinds"]), seen


def test_coupled_bits_are_found_with_their_aggressor():
    victim, aggressor = 900, 37

    def defect(region, written=None):
        if written is None:
            bit = region.read(aggressor) & 2
            Region.set(region, victim, region.read(victim) & ~2 | bit)

    seen = looked_at(Broken(defect), "inversions")
    assert seen.evidence["kinds"] == [f"bit 1 changes when offset {8 * aggressor:#x} is written (coupled)"]


def test_bits_of_one_word_that_are_coupled_are_not_called_stuck():
    def defect(region, written=None):
        chunk, place = region._place(700)
        if int(chunk[place]) & 4:
            chunk[place] &= ~(1 << 20)

    seen = looked_at(Broken(defect), "checkerboard")
    assert seen.evidence["kinds"] == ["bit 20 follows the value of bit 2 of the word (coupled)"]


def test_a_bit_that_is_wrong_now_and_then():
    times = []

    def defect(region, written=None):
        times.append(1)
        if len(times) % 7 == 0:
            chunk, place = region._place(700)
            chunk[place] ^= 1 << 20

    assert looked_at(Broken(defect)).evidence["kinds"] == ["changes by itself, now and then"]


def test_what_is_wrong_once_is_not_seen_again():
    times = []

    def defect(region, written=None):
        times.append(1)
        if len(times) == 1:
            region.chunks[0][5] ^= 1 << 40

    seen = looked_at(Broken(defect))
    assert (seen.evidence["errors"], seen.evidence["kinds"]) == (1, ["not seen again"])
    assert seen.evidence["words"][0]["differs"] == f"{1 << 40:#018x}"


def test_all_errors_are_counted_and_few_are_listed():
    def defect(region, written=None):
        region.chunks[1][::2] = 0

    seen = looked_at(Broken(defect), "checkerboard")
    assert seen.evidence["errors"] == 2 * 2 * CHUNK // 2
    assert len(seen.evidence["words"]) == 32 and seen.evidence["period"] == 16


def test_a_comparison_that_sees_nothing_is_found_out():
    class Blind(Region):
        def _difference(self, index, put):
            return torch.zeros(8, 64, dtype=torch.int64)

    seen = looked_at(Blind(CPU, WORDS, CHUNK))
    assert (seen.outcome, seen.evidence["errors"]) == ("failed", 0)
    assert "changed on purpose" in seen.seen
