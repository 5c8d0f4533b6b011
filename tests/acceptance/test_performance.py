"""Slow parts are found, and only those: against the others, against themselves, and against floors."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_check.acceptance.comparison import (
    amount,
    modes,
)
from mgpu_check.acceptance.findings import identify, judged
from mgpu_check.acceptance.performance.checks import among_nodes, judge, link_classes, unmeasured
from mgpu_check.acceptance.references import packaged_floors
from mgpu_check.acceptance.report.merge import merge
from mgpu_check.acceptance.run_report import Gpu, RunReport
from mgpu_check.acceptance.verdict import explain
from mgpu_check.devices.observations import Measurement, Subject
from mgpu_check.simulated.hardware import Rates
from tests.acceptance.speeds import (
    KINDS,
    NONE,
    SIZE,
    SUBJECTS,
    all_of,
    differing,
    failed,
    gpus,
    measurement,
    node,
    of_measurements,
    report,
)

CUBE: dict[int, tuple[int, ...]] = {0: (1, 2, 3, 4), 1: (0, 2, 3, 5), 2: (0, 1, 3, 6), 3: (0, 1, 2, 7)}
CUBE |= {gpu + 4: tuple((peer + 4) % 8 for peer in peers) for gpu, peers in CUBE.items()}


@st.composite
def healthy(draw: st.DrawFn) -> tuple[str, int, list[float]]:
    kind, count = draw(st.sampled_from(sorted(KINDS))), draw(st.integers(1, 8))
    noise = st.floats(-0.02, 0.02)
    return kind, count, [1 + draw(noise) for _ in all_of(kind, count)]


@settings(max_examples=150, deadline=None)
@given(healthy(), st.booleans())
def test_healthy_noise_is_never_accused(case, bimodal):
    """Two percent to either side, and links of two classes: pairs on one socket, and across."""
    kind, count, noise = case
    factors = dict(zip(all_of(kind, count), noise, strict=True))
    across = 0.4 if bimodal and SUBJECTS.get(kind, kind) == "copy" else 1.0
    found = judge(
        node(kind, count, lambda m: factors[m] * (across if m[0] % 2 != m[-1] % 2 else 1.0)), gpus(count), floors=NONE
    )
    assert failed(found) == set()


@settings(max_examples=60, deadline=None)
@given(healthy(), st.data())
def test_a_slow_one_is_always_found_and_nothing_else(case, data):
    kind, count, noise = case
    members = all_of(kind, count)
    if len(members) < 3:
        return
    factors = dict(zip(members, noise, strict=True))
    slow = data.draw(st.sampled_from(members))
    factor = data.draw(st.floats(0.05, 0.4 if KINDS[kind][1] == "s" else 0.7))
    found = judge(node(kind, count, lambda m: factors[m] * (factor if m == slow else 1.0)), gpus(count), floors=NONE)
    assert failed(found) == {slow}
    (seen,) = (o for o in found if o.outcome == "failed")
    evidence = seen.evidence["comparisons"][0]
    assert evidence["outcome"] == "failed" and evidence["missing"] > evidence["limit"] and evidence["peers"] >= 2
    assert seen.evidence["measured_by"] == "x" and seen.case in ("64 MiB", f"matrices of {SIZE} x {SIZE}")
    assert amount(seen.evidence["value"], seen.evidence["unit"]) in seen.seen and "slower" in seen.seen


@settings(max_examples=40, deadline=None)
@given(st.integers(4, 8), st.floats(0.1, 0.7), st.data())
def test_all_links_of_a_slow_gpu_are_found(count, factor, data):
    """Of four GPUs they are half of all links."""
    slow = data.draw(st.integers(0, count - 1))
    found = judge(node("copy", count, lambda m: factor if slow in m else 1.0), gpus(count), floors=NONE)
    assert failed(found) == {m for m in all_of("copy", count) if slow in m}


def cube(speeds: dict[tuple[int, ...], float]) -> list[Measurement]:
    return node("copy", 8, lambda m: speeds.get(m, 1.0 if m[1] in CUBE[m[0]] else 0.3))


@pytest.mark.parametrize(
    ("speeds", "wrong"),
    [
        ({}, set()),
        ({(0, 1): 0.5}, {(0, 1)}),  # an NVLink between the speeds of both classes
        ({(0, 5): 0.1}, {(0, 5)}),  # a link over PCIe
        ({m: 0.15 for m in all_of("copy", 8) if 3 in m}, {m for m in all_of("copy", 8) if 3 in m}),
    ],
)
def test_a_hybrid_cube_mesh_has_two_classes_of_links(speeds, wrong):
    assert failed(judge(cube(speeds), gpus(8), floors=NONE)) == wrong


def test_a_known_topology_tells_a_slow_link_from_one_of_another_class():
    """Three GPUs on one socket and one on the other: by speed alone the last one would be slow."""
    links = {m: "across" if 3 in m else "same" for m in all_of("copy", 4)}
    healthy = node("copy", 4, lambda m: 0.5 if 3 in m else 1.0)
    assert failed(judge(healthy, gpus(4), floors=NONE)) == {m for m in links if 3 in m}
    assert failed(judge(healthy, gpus(4), floors=NONE, links=links)) == set()
    broken = node("copy", 4, lambda m: (0.5 if 3 in m else 1.0) * (0.4 if m in ((0, 1), (0, 3)) else 1.0))
    assert failed(judge(broken, gpus(4), floors=NONE, links=links)) == {(0, 1), (0, 3)}


def test_links_over_pcie_have_the_class_that_telemetry_says():
    facts = {f"topology_{n}": "host bridge" for n in range(3)}
    pcie = gpus(3, **facts, **{f"p2p_{n}": "read+write" for n in range(3)})
    nvlink = gpus(3, **facts, **{f"p2p_{n}": "read+write+nvlink" for n in range(3)})
    assert set(link_classes(pcie).values()) == {"host bridge, read+write"} and len(link_classes(pcie)) == 6
    assert link_classes(nvlink) == link_classes(gpus(3)) == {}


@pytest.mark.parametrize(("known", "outcome"), [(False, "unknown"), (True, "failed")])
def test_of_three_gpus_a_slow_one_is_told_from_a_bridge_by_topology_only(known, outcome):
    star = node("copy", 3, lambda m: 0.5 if 1 in m else 1.0)
    links = dict.fromkeys(all_of("copy", 3), "same") if known else {}
    found = {o.subject.members: o.outcome for o in of_measurements(judge(star, gpus(3), floors=NONE, links=links))}
    assert {found[m] for m in found if 1 in m} == {outcome}
    assert {found[m] for m in found if 1 not in m} == {"passed"}


# --- what is not known ---


@pytest.mark.parametrize("kind", KINDS)
def test_of_two_gpus_that_differ_nobody_is_accused(kind):
    found = judge(node(kind, 2, lambda m: 0.5 if m[0] else 1.0), gpus(2), floors=NONE)
    single = of_measurements(found)
    assert {o.outcome for o in single} == {"unknown"} and "two values do not show which is right" in single[0].seen
    (both,) = differing(found)
    assert (both.outcome, both.subject, both.suspects) == ("failed", Subject("group", (0, 1)), (0, 1))
    assert "no majority shows which is right" in both.seen and str(single[0].subject) in both.seen
    of_host = kind in ("upload", "download")
    assert identify(both).id == ("MGPU-HOST-LINK-DIFFERS" if of_host else "MGPU-SPEED-DIFFERS")
    assert explain([judged(both, {})], [0, 0]).parts == {}
    alike = judge(node(kind, 2, lambda m: 0.9 if m[0] else 1.0), gpus(2), floors=NONE)
    assert not differing(alike) and not failed(alike)


def test_half_of_all_is_no_minority():
    """Memory of the host lies nearer to half of the GPUs."""
    halves = judge(node("upload", 8, lambda m: 0.6 if m[0] < 4 else 1.0), gpus(8), floors=NONE)
    assert {o.subject.members[0] for o in of_measurements(halves) if o.outcome == "unknown"} == {0, 1, 2, 3}
    assert [judged(o, {}).ruling for o in differing(halves)] == ["warn"]
    third = judge(node("upload", 8, lambda m: 0.6 if m[0] < 3 else 1.0), gpus(8), floors=NONE)
    assert failed(third) == {(0,), (1,), (2,)}


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_measurement_that_went_wrong_is_unknown(value):
    good = node("copy", 4, lambda m: 1.0)
    found = judge([measurement("copy", (0, 1), value), *good], gpus(4), floors=NONE)
    assert found[0].outcome == "unknown" and "is not a valid speed" in found[0].seen and not failed(found)
    assert {o.outcome for o in of_measurements(found[1:])} == {"passed"}


def test_few_repeats_say_nothing_and_where_there_are_no_others_that_is_said():
    good = node("copy", 4, lambda m: 1.0)
    few = measurement("copy", (0, 1), 1.0, repeats=2)
    found = judge([few, *good], gpus(4), floors=NONE)
    assert found[0].outcome == "skipped" and "2 repeats are too few" in found[0].seen and not failed(found)
    assert judge([few, *good[1:]], gpus(4), floors=NONE)[0].outcome == "unknown"


def test_values_that_scatter_hide_a_slow_one_and_that_is_said():
    wild = [1.0, 0.4, 2.1, 0.7, 1.6, 0.55, 1.3]
    found = of_measurements(judge(node("gpu", 7, lambda m: wild[m[0]]), gpus(7), floors=NONE))
    assert not failed(found) and found[1].outcome == "unknown"
    assert "a part at half its speed would still pass" in found[1].seen


def test_noise_of_the_repeats_widens_the_limit():
    right = KINDS["copy"][2]
    values = {m: right * (0.75 if m == (0, 1) else 1.0) for m in all_of("copy", 4)}
    for spread, outcome in ((0.001, "failed"), (0.03, "passed")):
        made = [measurement("copy", m, v, 3, spread=spread * v) for m, v in values.items()]
        assert judge(made, gpus(4), floors=NONE)[0].outcome == outcome


def test_a_group_that_is_alone_is_skipped_and_a_part_is_not():
    ring = Measurement("x", Subject("group", (0, 1, 2, 3)), "bus bandwidth", "B/s", 1e11, 5, SIZE)
    (found,) = of_measurements(judge([ring], gpus(4), floors=NONE))
    assert found.outcome == "skipped" and "there is no other of its kind" in found.seen
    latency = measurement("latency", (0, 1), 1e-5)
    copies = node("copy", 4, lambda m: 1.0)
    found_both = of_measurements(judge([latency, *copies], gpus(4), floors=NONE))
    assert found_both[0].outcome == "skipped"  # the link is judged by its bandwidth
    assert of_measurements(judge([latency], gpus(4), floors=NONE))[0].outcome == "unknown"


def test_gpus_of_several_models_are_not_compared():
    mixed = [*gpus(3), *(Gpu(3 + n, 0, 3 + n, "Other", f"o{n}", 1 << 30) for n in range(3))]
    speeds = {n: 1.0 if n < 3 else 0.2 for n in range(6)}
    assert not failed(judge(node("gpu", 6, lambda m: speeds[m[0]]), mixed, floors=NONE))
    speeds[4] = 0.1
    assert failed(judge(node("gpu", 6, lambda m: speeds[m[0]]), mixed, floors=NONE)) == {(4,)}


def test_memory_that_firmware_keeps_makes_no_other_model():
    mixed = [Gpu(n, 0, n, "Model", str(n), (80 << 30) - n * (1 << 20)) for n in range(4)]
    assert failed(judge(node("gpu", 4, lambda m: 0.5 if m[0] == 3 else 1.0), mixed, floors=NONE)) == {(3,)}


# --- against itself ---


def test_a_gpu_that_slows_down_is_found_even_alone():
    cold, hot = node("gpu", 1, lambda m: 1.0), node("gpu", 1, lambda m: 0.6)
    found = of_measurements(judge([*cold, *hot], gpus(1), floors=NONE))
    assert [o.outcome for o in found] == ["skipped", "failed"] and "first measurement of this run" in found[1].seen
    warm = node("gpu", 1, lambda m: 0.9)
    assert of_measurements(judge([*cold, *warm], gpus(1), floors=NONE))[1].outcome == "passed"


def test_later_measurements_are_compared_with_later_ones():
    speeds = lambda m: 1.0, lambda m: 0.8, lambda m: 0.8 if m[0] else 0.5
    rounds = [one for speed in speeds for one in node("gpu", 4, speed)]
    found = judge(rounds, gpus(4), floors=NONE)
    assert [(o.subject.members, n // 4) for n, o in enumerate(found) if o.outcome == "failed"] == [((0,), 2)]


# --- against floors ---


@pytest.mark.parametrize(("fraction", "outcome"), [(0.5, "failed"), (0.9, "passed")])
def test_all_gpus_too_slow_are_found_by_the_floor_of_their_sku(fraction, outcome):
    h100 = [Gpu(n, 0, n, "NVIDIA H100 80GB HBM3", str(n), 85_520_809_984) for n in range(8)]
    speed = fraction * 3.35e12
    made = [Measurement("x", Subject("gpu", (n,)), "memory bandwidth", "B/s", speed, 5, 1 << 30) for n in range(8)]
    found = judge(made, h100)
    assert {o.outcome for o in found} == {outcome} and len(found) == 8
    if outcome == "failed":
        assert "70% of the data sheet (NVIDIA H100 Tensor Core GPU data sheet" in found[0].seen


def test_a_part_of_a_gpu_and_a_model_that_is_not_listed_have_no_floors():
    for name, memory, why in (
        ("NVIDIA H100 80GB HBM3", 10 << 30, "10.7 GB of memory"),
        ("NVIDIA H100 80GB HBM4", 80 << 30, "does not have this model"),
    ):
        made = [Gpu(n, 0, n, name, str(n), memory) for n in range(4)]
        found = judge(node("gpu", 4, lambda m: 1.0), made)
        absolute = [o for o in found if o.case == "absolute speed"]
        assert [o.outcome for o in absolute] == ["unknown"] * 4 and why in absolute[0].seen
        assert "--record-baseline=FILE" in absolute[0].seen


def test_a_size_below_the_least_one_of_a_floor_does_not_count():
    gpu = Gpu(0, 0, 0, "NVIDIA H200", "u", 141 * 10**9)
    small = Measurement("x", Subject("gpu", (0,)), "memory bandwidth", "B/s", 1e9, 5, 1 << 20)
    assert packaged_floors().compare(small, {0: gpu}) == []


def test_the_floors_of_simulated_devices_are_those_of_their_rates():
    """A healthy simulated node reaches them, at any size, and one at a third of its speed does not."""
    rates = Rates()
    (sku,) = (sku for sku in packaged_floors().skus if sku.names == ("SIMULATED (*",))
    figures = {floor.quantity: floor.data_sheet for floor in sku.floors}
    own = {str(dtype).removeprefix("torch."): rate for dtype, rate in rates.flops.items()}
    products = {name.removeprefix("matrix product, "): v for name, v in figures.items() if name.startswith("matrix")}
    assert all(own.get(name, rate) == rate for name, rate in products.items())
    assert (figures["memory bandwidth"], figures["copy bandwidth"]) == (rates.memory, rates.link)
    device = {0: Gpu(0, 0, 0, "SIMULATED (cpu)", "u", 16 << 20), 1: Gpu(1, 0, 1, "SIMULATED (cpu)", "v", 16 << 20)}
    for size in (1 << 10, 1 << 20, 1 << 28):
        right = size / rates.of_copy(size, host=False, pinned=False)
        for factor, outcome in ((1.0, "passed"), (1 / 3, "failed")):
            m = Measurement("x", Subject("copy", (0, 1)), "copy bandwidth", "B/s", factor * right, 3, size)
            assert [c.outcome for c in packaged_floors().compare(m, device)] == [outcome]


# --- the statistics ---


def test_a_fast_link_is_no_measure_for_all_others():
    for known in (False, True):
        speeds = {m: 1.5 if m == (0, 1) else 1.0 for m in all_of("copy", 4)}
        classes = modes(speeds, 0.15, known)
        assert len(classes) == 1 and len(classes[0].reference) >= 11


# --- among nodes ---


def joined(*reports: RunReport) -> RunReport:
    return merge({one.hosts[0].name: one for one in reports}, "mgpu-check accept merge")


def test_nodes_are_compared_with_their_like_only():
    few = among_nodes(joined(report("a", 1.0), report("b", 0.5)))
    assert not few.outliers and len(few.unknown) == 2 and "fewer than 2 other nodes" in few.unknown[0]
    other = joined(report("a", 1.0), report("b", 1.0), report("c", 0.5, torch="2.11"))
    assert not among_nodes(other).outliers


def test_what_was_not_measured_is_not_known_and_of_links_only_not_asked():
    made = [*node("copy", 2, lambda m: 1.0), measurement("gpu", (0,), 1e14)]
    found = {o.subject.members: (o.outcome, o.seen) for o in unmeasured(made, gpus(3))}
    assert found == {
        (1,): ("skipped", "only its links were measured"),
        (2,): ("unknown", "no check has measured how fast it is; memory, compute and links do"),
    }
