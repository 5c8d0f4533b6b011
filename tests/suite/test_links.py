"""The check of links sees each kind of broken copy, and reports the way, the sent data and the received data."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from mgpu_check.acceptance.comparison import least_shortfall
from mgpu_check.acceptance.faults import planted_from
from mgpu_check.acceptance.links.speed import measure_copies
from mgpu_check.acceptance.verdict import explain
from mgpu_check.asserts.known_defects import Met, reported_to
from mgpu_check.devices.observations import Part, Subject
from mgpu_check.oracles.devices import copies
from mgpu_check.oracles.devices.cases import SECOND_LONGEST, Copies, Laps
from mgpu_check.oracles.devices.copies import examine_copies, examine_host_copies
from mgpu_check.oracles.generated_data import HOST, bytes_of_content, compare, tag_of
from mgpu_check.simulated import simulated_node
from mgpu_check.simulated.hardware import Hardware, planted

CPU = torch.device("cpu")
MIB = 1 << 20
OWN, OTHER, BEFORE = tag_of(0, 2, 7), tag_of(1, 2, 7), tag_of(0, 2, 7, before=True)
NAMES = {OWN: "what was sent", OTHER: "what another sent", BEFORE: "what was there before"}


def content(tag, start, end):
    return bytes_of_content(tag, start, end, CPU)


def test_one_byte_of_content_tells_devices_apart():
    tags = [tag_of(one, other, 3, before=before) for one in range(8) for other in range(8) for before in (False, True)]
    assert len({tag & 0xFF for tag in tags if not tag >> 12 & 1}) == 64
    assert len(set(tags)) == len(tags) and max(tags) < 1 << 24
    assert tag_of(0, 1, 3) != tag_of(0, 1, 3 + (1 << 10)) != tag_of(HOST, 1, 3)


def shown(change):
    got = content(OWN, 5, 5005).clone()
    change(got)
    return compare(got, content(OWN, 5, 5005), NAMES, start=1000)


CHANGES = {
    "nothing": (lambda got: None, None),
    "another's data": (lambda got: got.copy_(content(OTHER, 5, 5005)), "it holds what another sent"),
    "stale data": (lambda got: got[900:].copy_(content(BEFORE, 905, 5005)), "it holds what was there before"),
    "shifted data": (lambda got: got.copy_(content(OWN, 8, 5008)), "it holds what was sent, 3 bytes further on"),
    "aliased data": (lambda got: got[2000:].copy_(content(OWN, 5, 3005)), "what was sent, 2000 bytes further back"),
    "zeros": (lambda got: got[700:].zero_(), "it holds zeros"),
    "ones": (lambda got: got[700:].fill_(255), "all bits are ones"),
    "one bit": (lambda got: got[100].bitwise_xor_(8), "bit 3 of a byte is inverted"),
    "a lane": (lambda got: got[100::32].bitwise_xor_(8), "bit 3 of bytes are inverted"),
    "noise": (lambda got: got[64:128].copy_(torch.arange(64)), "it holds other data"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_arrived_is_told(name):
    change, looks = CHANGES[name]
    found = shown(change)
    if looks is None:
        assert found is None
        return
    assert looks in found.looks
    first, last = {"stale data": (900, 4999), "one bit": (100, 100), "a lane": (100, 4996)}.get(name, (None, None))
    if first is not None:
        assert (found.first, found.last) == (1000 + first, 1000 + last)
    assert found.evidence["period"] == {"one bit": 0, "a lane": 32}.get(name, 1)


ENGINE, STRIDED, CASTING = (Copies(path, (66001,), 3, 9, seed=5) for path in ("engine", "strided", "casting"))
TOGETHER = Copies("strided", (66001,), 0, 1, together=True, seed=6)
FAR = Copies("engine", (66001,), 3, 9, reach=2 * MIB, seed=5)
PAGEABLE = Copies("engine", (66001,), 1, 0, pinned=False, seed=7)
SMALL = Copies("engine", (1, 37), 1, 3, seed=8)
PIECES = Copies("engine", (16 << 10,), pieces=16, seed=9)


BETWEEN = [
    ("copy-zeros", SMALL, "it holds zeros"),
    ("copy-stale", ENGINE, "it holds the data from before the copy cuda:0 -> cuda:2"),
    ("copy-of-another-peer", TOGETHER, "it holds"),
    ("copy-offset", ENGINE, "it holds the data of the copy cuda:0 -> cuda:2, "),
    ("copy-tail", CASTING, "from byte 130002 on"),
    ("copy-large:above=66000", ENGINE, "from byte 33000 on: it holds zeros"),
    ("copy-of-zeros", PIECES, "is inverted"),
    ("copy-of-ones", PIECES, "is inverted"),
    ("copy-of-ones:word=12297829382473034410", PIECES, "is inverted"),
    ("copy-of-signs", PIECES, "is inverted"),
    ("copy-by-kernel", CASTING, "it holds zeros"),
    ("copy-by-engine", ENGINE, "it holds zeros"),
    ("copy-under-load", TOGETHER, "is inverted"),
    ("copy-lanes", ENGINE, "of bytes are inverted"),
    (
        "copy-wraps",
        FAR,
        "bytes in and around the destination of 66001 bytes are wrong, some outside: it holds the data of the copy",
    ),
    ("copy-out", ENGINE, "1000 of 66001 bytes are wrong, from byte 65001 on"),
]
WITH_HOST = [
    ("upload-truncated", STRIDED, "it holds zeros"),
    ("download-truncated", CASTING, "it holds zeros"),
    ("upload-pinned", ENGINE, "is inverted"),
    ("download-pageable", PAGEABLE, "is inverted"),
]


@pytest.mark.slow
def test_each_broken_link_is_seen_and_no_other_is_accused():
    with simulated_node(3):
        devices = [torch.device("cuda", index) for index in range(3)]

        def look(examine, case, *defects):
            with planted(Hardware(defects, 16 * MIB)):
                return examine(devices, case)

        for case in (SMALL, ENGINE, STRIDED, CASTING, TOGETHER, FAR, replace(FAR, path="casting"), PIECES):
            right = look(examine_copies, case) + look(examine_host_copies, case)
            assert {entry.outcome for entry in right} == {"passed"}
            assert Counter(entry.subject.kind for entry in right) == {"copy": 6, "upload": 3, "download": 3}
            done = (len(case.sizes) * case.pieces, sum(case.sizes))
            assert {(entry.work.operations, entry.work.bytes) for entry in right} == {done}
        for examine, faults in ((examine_copies, BETWEEN), (examine_host_copies, WITH_HOST)):
            for text, case, said in faults:
                fault = planted_from(text)
                found = look(examine, case, fault.fault.defect(fault.parameters))
                failed = [entry for entry in found if entry.outcome == "failed"]
                assert set(explain(found, [0] * 3).parts) == set(fault.parts), (text, failed)
                assert re.search(said, failed[0].seen), (text, failed[0].seen)


def test_a_copy_that_does_nothing_is_wrong_and_sizes_are_cut_to_the_memory():
    with simulated_node(2), planted(Hardware([], 4 * MIB)):
        devices = [torch.device("cuda", index) for index in range(2)]
        found: list[Any] = [*examine_copies(devices, Copies("casting", (9, 64 * MIB + 1, 1024 * MIB), seed=1))]
        assert [(entry.outcome, entry.work.operations) for entry in found] == [("passed", 2)] * 2
        assert MIB // 4 < found[0].work.bytes < 2 * MIB
        copy_ = torch.Tensor.copy_

        def nothing(into, other, **named):
            return into if into.device != other.device else copy_(into, other, **named)

        def spilling(into, other, **named):
            copy_(into, other, **named)
            if (other.device, into.device) == (devices[1], devices[0]):
                into.as_strided((1,), (1,), into.storage_offset() + into.numel() + 5).bitwise_xor_(1)
            return into

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "copy_", nothing)
            seen: list[Any] = [*examine_copies(devices, ENGINE)]
            assert {entry.outcome for entry in seen} == {"failed"}
            patch.setattr(torch.Tensor, "copy_", spilling)
            seen = [*examine_copies(devices, ENGINE)]
            failed = [entry for entry in seen if entry.outcome == "failed"]
        assert {entry.subject for entry in failed} == {Subject("copy", (1, 0))}
        assert failed[0].seen.startswith("1 bytes in and around the destination of 66001 bytes are wrong, some outside")


def measured_with(fault: Any) -> list[Any]:
    devices = [torch.device("cuda", index) for index in range(3)]
    with simulated_node(3), planted(Hardware([fault.fault.defect(fault.parameters)], 16 * MIB)):
        return [*measure_copies(devices, 64 * MIB, 3, Laps(120, 1 << 10))]


def test_a_link_that_seldom_stalls_shows_in_the_second_longest_of_many_copies():
    found = measured_with(planted_from("stalls-link"))
    values = {entry.subject.members: entry.value for entry in found if entry.quantity == "copy latency"}
    assert max(values.values()) == pytest.approx(min(values.values()))
    values = {entry.subject.members: entry.value for entry in found if entry.quantity == "copy, second longest"}
    assert values.pop((0, 2)) > 50 * max(values.values())
    assert {least_shortfall(entry.kind) for entry in found if entry.repeats == 90} == {0.9}


def test_bandwidth_and_latency_are_measured_for_each_way_and_a_slow_link_shows():
    slow = planted_from("slow-link")
    pair = slow.parts[0].members
    found = [entry for entry in measured_with(slow) if not entry.quantity.endswith(SECOND_LONGEST)]
    assert Counter(entry.quantity for entry in found) == {
        f"{kind} {what}": count
        for kinds, count in (
            (("copy", "copy by kernel"), 6),
            (("upload", "download", "pageable upload", "pageable download"), 3),
        )
        for kind in kinds
        for what in ("bandwidth", "latency")
    }
    speed = {entry.subject.members: entry.value for entry in found if entry.quantity == "copy bandwidth"}
    assert speed[pair] < 0.8 * min(value for key, value in speed.items() if key != pair)
    assert {entry.size for entry in found} == {2 * MIB, 16, 32} and {entry.repeats for entry in found} == {3}
    assert slow.parts == (Part("link", pair),)


def test_a_copy_that_drops_a_lazy_sign_meets_a_known_defect():
    values, host, met = torch.arange(1.0, 7.0), torch.device("cpu"), list[Met]()
    with simulated_node(1), reported_to(met.append):
        there = values.to("cuda:0")
        assert (
            copies._arrived(lambda x, device: (-x).to(device), there, host, values, lost=-values) == copies._SIGN_LOST
        )
        spoiled = copies._arrived(lambda x, device: (1 - x).to(device), there, host, values, lost=-values)
        assert spoiled not in ("", copies._SIGN_LOST)
        assert copies._is_known("copy_", there, host)
        assert not copies._is_known("to(device)", there, host)
        assert not copies._is_known("copy_", there, there.device)
        assert not copies._is_known("copy_", there.to(torch.complex64), host)
    assert met == [Met("lazy-signs-between-devices", True)]
