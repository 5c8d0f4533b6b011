"""The smallest set of parts that explains what failed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_check.acceptance.comparison import vote
from mgpu_check.acceptance.verdict import evidence_lines, explain
from mgpu_check.devices.observations import EXCHANGED, Observation, Part, Subject, SubjectKind

UP: SubjectKind = "upload"
DOWN: SubjectKind = "download"
ONE_HOST = (0,) * 16


def drawing(**strategies: st.SearchStrategy[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Draw arguments, without a limit of time, which a busy machine exceeds."""
    return lambda test: settings(max_examples=40, deadline=None)(given(**strategies)(test))


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


@drawing(count=st.integers(1, 8), data=st.data())
def test_a_gpu_that_fails_alone_is_named(count: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, count - 1))
    check = data.draw(st.sampled_from(["memory", "compute", "training", "health"]))
    assert parts(run(count, (check, Subject("gpu", (bad,))))) == {Part("gpu", (bad,))}


@pytest.mark.parametrize("copy", [(0, 1), (1, 0)])
def test_a_copy_that_fails_says_the_direction_where_nobody_has_looked_at_the_other(copy: tuple[int, int]) -> None:
    failed = [Observation("links", Subject("copy", copy), "failed")]
    failed.append(Observation("collectives", Subject("group", (0, 1)), "failed"))
    assert parts(failed) == {Part("link", copy)}


@drawing(count=st.integers(3, 8), data=st.data())
def test_both_directions_of_a_link_are_named_and_no_gpu(count: int, data: st.DataObject) -> None:
    one, other = data.draw(st.permutations(range(count)))[:2]
    broken = [("links", Subject("copy", pair)) for pair in ((one, other), (other, one))]
    broken.append(("collectives", Subject("group", tuple(sorted((one, other))))))
    assert parts(run(count, *broken)) == {Part("link", (one, other)), Part("link", (other, one))}


@drawing(count=st.integers(3, 8), data=st.data(), out=st.booleans())
def test_all_copies_of_one_gpu_are_that_gpu(count: int, data: st.DataObject, out: bool) -> None:
    bad = data.draw(st.integers(0, count - 1))
    pairs = [(bad, other) if out else (other, bad) for other in range(count) if other != bad]
    found = parts(run(count, *(("links", Subject("copy", pair)) for pair in pairs)))
    assert found == {Part("gpu", (bad,))}


@drawing(count=st.integers(1, 8), data=st.data(), kinds=st.sampled_from([(UP,), (DOWN,), (UP, DOWN)]))
def test_a_link_to_the_host_is_named_also_where_training_fails_for_it(
    count: int, data: st.DataObject, kinds: tuple[SubjectKind, ...]
) -> None:
    bad = data.draw(st.integers(0, count - 1))
    broken = [("links", Subject(kind, (bad,))) for kind in kinds]
    broken.append(("training", Subject("gpu", (bad,))))
    everybody = Observation("training", Subject("group", tuple(range(count))), "failed")  # DDP, say, which reads losses
    assert parts([*run(count, *broken), everybody]) == {Part("host-link", (bad,))}


@drawing(count=st.integers(3, 8), data=st.data())
def test_collectives_that_fail_wherever_one_gpu_takes_part_are_that_gpu(count: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, count - 1))
    groups = [subject for check, subject in subjects(count) if subject.kind == "group" and bad in subject.members]
    assert parts(run(count, *(("collectives", group) for group in groups))) == {Part("gpu", (bad,))}


@drawing(count=st.integers(3, 8), data=st.data())
def test_data_that_point_at_a_gpu_are_believed(count: int, data: st.DataObject) -> None:
    bad = data.draw(st.integers(0, count - 1))
    everybody = Subject("group", tuple(range(count)))
    assert parts(run(count, ("collectives", everybody), suspects=(bad,))) == {Part("gpu", (bad,))}


@pytest.mark.parametrize("count", [6, pytest.param(16, marks=pytest.mark.slow)])
def test_what_fails_everywhere_is_the_host(count: int) -> None:
    """A statement of the driver about a GPU still concerns that GPU."""
    everything = [(check, subject) for check, subject in subjects(count) if check != "health"]
    assert parts(run(count, *everything)) == {Part("host", (0,))}
    gpus = {Part("gpu", (gpu,)) for gpu in range(count)}
    assert parts(run(count, *subjects(count))) == {Part("host", (0,)), *gpus}


@drawing(count=st.integers(1, 16))
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
    assert set(found.rivals) == {(Part("gpu", (gpu,)),) for gpu in range(count)}


@pytest.mark.parametrize("bad", [[0], [0, 1, 2], [0, 1, 2, 3], list(range(8))])
def test_what_the_driver_says_of_a_gpu_is_of_that_gpu(bad: list[int]) -> None:
    broken = [("health", Subject("gpu", (gpu,))) for gpu in bad]
    assert parts(run(8, *broken)) == {Part("gpu", (gpu,)) for gpu in bad}


@drawing(data=st.data())
def test_failures_of_a_link_are_not_charged_to_a_sick_gpu(data: st.DataObject) -> None:
    sick, one, other = (data.draw(st.integers(0, 3)), *data.draw(st.permutations(range(4)))[:2])
    broken = [("health", Subject("gpu", (sick,))), ("links", Subject("copy", (one, other)))]
    everybody = [Observation("collectives", Subject("group", (0, 1, 2, 3)), "failed")]
    seen = [*run(4, *broken), *everybody]
    found = explain(seen, ONE_HOST)
    assert set(found.parts) == {Part("gpu", (sick,)), Part("link", (one, other))}
    assert {seen[number].check for number in found.parts[Part("gpu", (sick,))]} == {"health"}
    assert not found.shared


def test_orders_of_ranks_are_one_subject() -> None:
    """A GPU that receives wrong data is right as root, which does not speak for it."""
    orders = [Subject("group", members) for members in ((0, 1), (1, 0), (1, 2), (2, 1))]
    seen = [Observation("collectives", one, "failed" if one.members[1] == 1 else "passed") for one in orders]
    found = explain(seen, ONE_HOST)
    assert set(found.parts) == {Part("gpu", (1,))}
    lines = list(evidence_lines(seen, found.parts[Part("gpu", (1,))], {}))
    assert [line.rpartition("; ")[2] for line in lines] == ["1 of 2 looks failed"] * 2


def test_a_failure_that_two_accused_parts_explain_is_shared() -> None:
    broken = [("memory", Subject("gpu", (3,))), ("links", Subject("copy", (0, 1)))]
    seen = [*run(4, *broken), Observation("collectives", Subject("group", (0, 1, 2, 3)), "failed")]
    found = explain(seen, ONE_HOST)
    assert set(found.parts) == {Part("gpu", (3,)), Part("link", (0, 1))}
    assert found.shared == (len(seen) - 1,)
    gpu, link = Part("gpu", (3,)), Part("link", (0, 1))
    own, shared = evidence_lines(seen, found.parts[gpu], found.others(gpu))
    assert own.startswith("memory: GPU 3") and "shared" not in own
    assert shared.endswith("1 of 4 looks failed; shared: link GPU 0 -> GPU 1 may explain it alone")
    assert [
        line.endswith("shared: GPU 3 may explain it alone")
        for line in evidence_lines(seen, found.parts[link], found.others(link))
    ] == [False, True]


SINGLE = [subject for check, subject in subjects(8) if check in ("memory", "links") and subject.kind in ("gpu", "copy")]


@drawing(count=st.integers(2, 8), data=st.data())
def test_the_named_parts_are_in_every_smallest_explanation(count: int, data: st.DataObject) -> None:
    """Brute force: try all sets of GPUs, of directions and of links, and the host, at their prices."""
    of_node = [subject for subject in SINGLE if max(subject.members) < count]
    failed = set(data.draw(st.lists(st.sampled_from(of_node), min_size=1, max_size=10)))
    seen = [Observation(check_of(one), one, "failed" if one in failed else "passed") for one in of_node]
    found = explain(seen, ONE_HOST)
    smallest = by_brute_force(of_node, failed)
    assert set(found.parts) == set.intersection(*map(set, smallest))
    assert len(smallest) == 1 or {part for some in smallest for part in some} == {
        part for some in (found.parts, *found.rivals) for part in some
    }


def check_of(subject: Subject) -> str:
    return "memory" if subject.kind == "gpu" else "links"


def by_brute_force(of_node: list[Subject], failed: set[Subject]) -> list[frozenset[Part]]:
    touched: dict[frozenset[Part], set[Subject]] = {}
    for member in {member for one in failed for member in one.members}:
        touched[frozenset([Part("gpu", (member,))])] = {one for one in of_node if member in one.members}
    directions = [one for one in failed if one.kind == "copy"]
    for one in directions:
        touched[frozenset([Part("link", one.members)])] = {one}
        back = Subject("copy", one.members[::-1])
        if back in failed:
            touched[frozenset([Part("link", one.members), Part("link", back.members)])] = {one, back}
    touched[frozenset([Part("host", (0,))])] = set(of_node)
    price = {
        one: {"gpu": 1.0, "link": 0.9, "host": 4.0}[next(iter(one)).kind]
        + 0.1 * (len(one) - 1)
        + 0.3 * len(subjects - failed) / len(subjects)
        for one, subjects in touched.items()
    }
    sets: dict[frozenset[Part], float] = {}
    for size in range(1, 5):  # five parts cost more than the host
        for some in itertools.combinations(touched, size):
            cost = sum(price[one] for one in some)
            if cost < 4.5 and failed <= set().union(*(touched[one] for one in some)):
                sets.setdefault(frozenset().union(*some), cost)
    least = min(sets.values())
    return [some for some, cost in sets.items() if cost <= least + 0.05]


def test_facts_of_the_host_explain_no_failure_of_another_check() -> None:
    facts = Observation("inventory", Subject("host", (0,)), "failed")
    memory = ("memory", Subject("gpu", (1,)))
    assert parts([*run(4), facts]) == {Part("host", (0,))}
    found = explain([*run(4, memory), facts], ONE_HOST)
    assert set(found.parts) == {Part("host", (0,)), Part("gpu", (1,))} and not found.shared
    every = [("memory", Subject("gpu", (gpu,))) for gpu in range(8)]
    assert parts([*run(8, *every), facts]) == {Part("host", (0,))}, "eight GPUs at once are the host"


@pytest.mark.parametrize("check", ["compute", "training", "soak"])
@pytest.mark.parametrize("whole", [True, False])
def test_no_link_is_accused_of_a_disagreement_of_gpus_that_exchanged_nothing(check: str, whole: bool) -> None:
    """A link is cheaper than a GPU, and its copies passed, or were not tried."""
    apart = Observation(check, Subject("group", (0, 1)), "failed", evidence={EXCHANGED: False})
    passed = run(2) if whole else [Observation(check, Subject("gpu", (gpu,)), "passed") for gpu in (0, 1)]
    found = explain([*passed, apart], ONE_HOST)
    assert not found.parts and found.unexplained
    assert {part for some in found.rivals for part in some} == {Part("gpu", (0,)), Part("gpu", (1,))}
    wrong = Observation(check, Subject("gpu", (1,)), "failed")
    assert parts([*passed, apart, wrong]) == {Part("gpu", (1,))}


def test_on_two_gpus_a_wrong_collective_accuses_neither_a_gpu_nor_the_link() -> None:
    """The link would be a little cheaper, but nothing shows that both GPUs are right with others."""
    wrong = ("collectives", Subject("group", (0, 1)))
    for seen in (run(2, wrong), [Observation(*wrong, "failed")], [Observation("training", wrong[1], "failed")]):
        found = explain(seen, ONE_HOST)
        assert not found.parts
        assert {part for some in found.rivals for part in some} == {
            *(Part("gpu", (gpu,)) for gpu in (0, 1)),
            *(Part("link", pair) for pair in ((0, 1), (1, 0))),
        }
    assert parts(run(2, wrong, suspects=(1,))) == {Part("gpu", (1,))}, "the data point at it"
    assert parts(run(3, wrong)) == {Part("link", (0, 1)), Part("link", (1, 0))}, "both are right with GPU 2"
    assert parts(run(2, wrong, ("memory", Subject("gpu", (1,))))) == {Part("gpu", (1,))}
    assert parts(run(2, wrong, ("links", Subject("copy", (0, 1))))) == {Part("link", (0, 1))}


def test_a_check_that_all_gpus_of_a_host_fail_accuses_the_host() -> None:
    """No GPU is right beside them. Two broken GPUs are as likely as one cause, and three are not."""
    for count in range(3, 9):
        every = [("compute", Subject("gpu", (gpu,))) for gpu in range(count)]
        assert parts(run(count, *every), (0,) * count) == {Part("host", (0,))}
    found = explain(run(2, *every[:2]), (0, 0))
    assert not found.parts
    assert set(found.rivals) == {(Part("host", (0,)),), (Part("gpu", (0,)), Part("gpu", (1,)))}
    several = [("compute", Subject("gpu", (0,))), ("memory", Subject("gpu", (1,))), ("compute", Subject("gpu", (2,)))]
    assert parts(run(3, *several), (0, 0, 0)) == {Part("gpu", (gpu,)) for gpu in range(3)}, "they fail different checks"
    assert parts(run(8, *several[:2])) == {Part("gpu", (0,)), Part("gpu", (1,))}


def test_copies_that_fail_between_all_gpus_accuse_the_host() -> None:
    """As with an IOMMU that drops them. Two broken GPUs of three are as likely. A pair that is right clears the host of
    few GPUs."""
    for count in range(4, 9):
        every = [("links", Subject("copy", pair)) for pair in itertools.permutations(range(count), 2)]
        assert parts(run(count, *every), (0,) * count) == {Part("host", (0,))}
        but_one = [failure for failure in every if set(failure[1].members) != {0, 1}]
        assert count > 5 or Part("host", (0,)) not in parts(run(count, *but_one), (0,) * count)
    of_three = [("links", Subject("copy", pair)) for pair in itertools.permutations(range(3), 2)]
    assert not explain(run(3, *of_three), (0, 0, 0)).parts


@given(st.lists(st.integers(0, 3), max_size=9))
def test_a_majority_is_never_odd(values):
    ballots = dict(enumerate(values))
    for result in vote(ballots, dict.fromkeys(ballots, "A")):
        if result.decided:
            assert 2 * sum(value == result.usual for value in values) > len(values)
            assert {ballots[gpu] == result.usual for gpu in result.odd} == {False}
        else:
            assert result.odd == result.voters
