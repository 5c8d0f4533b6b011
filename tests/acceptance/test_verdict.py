"""The smallest set of parts that explains what failed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_check.acceptance.verdict.verdict import explain
from mgpu_check.devices.observations import Observation, Part, Subject, SubjectKind

UP: SubjectKind = "upload"
DOWN: SubjectKind = "download"
ONE_HOST = (0,) * 16


def subjects(count: int) -> Iterator[tuple[str, Subject]]:
    """The subjects of a run on a node with the given number of GPUs: (check, subject)."""
    for gpu in range(count):
        for check in ("memory", "compute", "training", "health"):
            yield check, Subject("gpu", (gpu,))
        yield "links", Subject("upload", (gpu,))
        yield "links", Subject("download", (gpu,))
    for pair in itertools.permutations(range(count), 2):
        yield "links", Subject("copy", pair)
    for size in range(2, count + 1):
        for group in itertools.combinations(range(count), size):
            if size in (2, count):
                yield "collectives", Subject("group", group)


def run(count: int, *broken: tuple[str, Subject], suspects: tuple[int, ...] = ()) -> list[Observation]:
    """The observations of a run with intermittent failures: each was tried three times, and failed once."""
    seen = []
    for check, subject in subjects(count):
        wrong = (check, subject) in broken
        seen += [Observation(check, subject, "passed")] * 2
        seen.append(Observation(check, subject, "failed" if wrong else "passed", suspects=suspects if wrong else ()))
    return seen


def parts(observations: list[Observation], hosts: Sequence[int] = ONE_HOST) -> set[Part]:
    found = explain(observations, hosts)
    assert not found.unexplained
    return set(found.parts)


@given(count=st.integers(1, 8), data=st.data())
def test_a_gpu_that_fails_alone_is_named(count: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, count - 1))
    check = data.draw(st.sampled_from(["memory", "compute", "training", "health"]))
    assert parts(run(count, (check, Subject("gpu", (bad,))))) == {Part("gpu", (bad,))}


@given(count=st.integers(2, 8), data=st.data())
def test_one_direction_of_a_link_is_named(count: int, data: st.DataObject) -> None:
    pair = tuple(data.draw(st.permutations(range(count)))[:2])
    assert parts(run(count, ("links", Subject("copy", pair)))) == {Part("link", pair)}


@given(count=st.integers(3, 8), data=st.data())
def test_both_directions_of_a_link_are_named_and_no_gpu(count: int, data: st.DataObject) -> None:
    one, other = data.draw(st.permutations(range(count)))[:2]
    broken = [("links", Subject("copy", pair)) for pair in ((one, other), (other, one))]
    broken.append(("collectives", Subject("group", tuple(sorted((one, other))))))
    assert parts(run(count, *broken)) == {Part("link", (one, other)), Part("link", (other, one))}


@given(count=st.integers(3, 8), data=st.data(), out=st.booleans())
def test_all_copies_of_one_gpu_are_that_gpu(count: int, data: st.DataObject, out: bool) -> None:
    bad = data.draw(st.integers(0, count - 1))
    pairs = [(bad, other) if out else (other, bad) for other in range(count) if other != bad]
    found = parts(run(count, *(("links", Subject("copy", pair)) for pair in pairs)))
    assert found == {Part("gpu", (bad,))}


@given(count=st.integers(1, 8), data=st.data(), kinds=st.sampled_from([(UP,), (DOWN,), (UP, DOWN)]))
def test_a_link_to_the_host_is_named_also_where_training_fails_for_it(
    count: int, data: st.DataObject, kinds: tuple[SubjectKind, ...]
) -> None:
    bad = data.draw(st.integers(0, count - 1))
    broken = [("links", Subject(kind, (bad,))) for kind in kinds]
    broken.append(("training", Subject("gpu", (bad,))))
    everybody = Observation("training", Subject("group", tuple(range(count))), "failed")  # DDP, say, which reads losses
    assert parts([*run(count, *broken), everybody]) == {Part("host-link", (bad,))}


@given(count=st.integers(3, 8), data=st.data())
def test_collectives_that_fail_wherever_one_gpu_takes_part_are_that_gpu(count: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, count - 1))
    groups = [subject for check, subject in subjects(count) if subject.kind == "group" and bad in subject.members]
    assert parts(run(count, *(("collectives", group) for group in groups))) == {Part("gpu", (bad,))}


@given(count=st.integers(3, 8), data=st.data())
def test_data_that_point_at_a_gpu_are_believed(count: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, count - 1))
    everybody = Subject("group", tuple(range(count)))
    assert parts(run(count, ("collectives", everybody), suspects=(bad,))) == {Part("gpu", (bad,))}


@given(count=st.integers(4, 8), data=st.data())
def test_two_parts_are_two(count: int, data: st.DataObject) -> None:
    bad, one, other = data.draw(st.permutations(range(count)))[:3]
    broken = ("memory", Subject("gpu", (bad,))), ("links", Subject("copy", (one, other)))
    assert parts(run(count, *broken)) == {Part("gpu", (bad,)), Part("link", (one, other))}


@pytest.mark.parametrize("count", [6, 16])
def test_what_fails_everywhere_is_the_host(count: int) -> None:
    assert parts(run(count, *subjects(count))) == {Part("host", (0,))}


@given(count=st.integers(1, 16))
def test_nothing_is_accused_where_nothing_failed(count: int) -> None:
    assert explain(run(count), ONE_HOST).parts == {}


def test_what_follows_the_rank_is_software() -> None:
    seen = run(4, ("collectives", Subject("group", (0, 1, 2, 3))), suspects=(2,))
    number = next(index for index, entry in enumerate(seen) if entry.outcome == "failed")
    assert set(explain(seen, ONE_HOST, follows_rank=[number]).parts) == {Part("host", (0,))}


def test_a_host_explains_its_own_gpus_only() -> None:
    hosts = (0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1)
    broken = [("memory", Subject("gpu", (gpu,))) for gpu in range(6, 12)]
    assert parts(run(12, *broken), hosts) == {Part("host", (1,))}


@pytest.mark.parametrize("count", [3, 4, 8])
def test_none_of_several_alike_is_accused(count: int) -> None:
    """A collective of all GPUs fails, all smaller groups are right, and the data point at no rank."""
    seen = run(count, ("collectives", Subject("group", tuple(range(count)))))
    found = explain(seen, ONE_HOST)
    assert found.parts == {}
    assert [seen[number].outcome for number in found.unexplained] == ["failed"]
