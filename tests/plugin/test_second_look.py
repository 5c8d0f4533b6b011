"""A check of the packaged suite that fails looks again: which device it is, how many it needs, and how often it
fails."""

from __future__ import annotations

import contextlib
import itertools
import random
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st

from mgpu_check.errors import RankFailure, RankHang, UnexpectedError
from mgpu_check.plugin import second_look
from mgpu_check.plugin.report.suspects import Rerun, Reruns
from mgpu_check.plugin.requirements import Needs
from mgpu_check.plugin.second_look import Failed, look_again

ALWAYS = [Rerun((0, 1, 2, 3), True)] * 5
ALONE = [(device,) for device in range(4)]
OF_THREE = list(itertools.combinations(range(4), 3))


def seen(*elsewhere: Rerun, repeats=ALWAYS, settled=True) -> Reruns:
    """Reruns that passed often enough."""
    often = [one if one.tries > 1 or one.failed else replace(one, tries=50) for one in elsewhere]
    return Reruns(list(repeats), often, settled=settled)


@pytest.mark.parametrize(
    ("found", "headline"),
    [
        (seen(*(Rerun(one, one == (2,)) for one in ALONE)), "looks like cuda:2: fails on it alone, and with others in"),
        (seen(*(Rerun(one, True) for one in ALONE)), "fails on each device alone: looks like the code"),
        (
            seen(
                *(Rerun(one, False) for one in ALONE),
                Rerun((0, 1), False),
                Rerun((2, 3), False),
                *(Rerun(three, True) for three in OF_THREE),
            ),
            "fails on any 3 devices: looks like the code",
        ),
        (
            seen(
                *(Rerun(one, True) for one in ((0, 3), (0, 3, 1), (0, 3, 2))),
                *(Rerun(one, False) for one in ((0, 1), (1, 3), (0, 2, 1), (1, 3, 2))),
            ),
            "looks like the link between cuda:0 and cuda:3: no rerun without it fails",
        ),
        (
            seen(
                *(Rerun(one, True, (2,)) for one in OF_THREE),
                Rerun((0, 1), False),
                Rerun((2, 3), False),
                repeats=[Rerun((0, 1, 2, 3), True, (2,))],
            ),
            "fails on any 3 devices: looks like the code",
        ),
        # devices 0 and 1 alone fail: two parts
        (seen(*(Rerun(one, one < (2,)) for one in ALONE)), "looks like cuda:0 and cuda:1: no rerun without them"),
        # cuda:3 has not been tried alone, and is not what is left over
        (seen(*(Rerun(one, False) for one in ALONE[:3])), ""),
        # those who see wrong data may have been sent them
        (
            seen(Rerun((1, 2, 3, 0), True, (1,)), repeats=[Rerun((0, 1, 2, 3), True, (2,))]),
            "",
        ),
        (seen(Rerun((0,), True)), ""),
        (seen(Rerun((0, 3), True), Rerun((1,), False)), ""),
        (seen(*(Rerun(one, False) for one in ALONE), Rerun((0, 3), True)), ""),
        (seen(), ""),
        (Reruns(), ""),
    ],
)
def test_the_headline_names_the_part(found, headline):
    assert found.headline.startswith(headline)
    assert bool(found.headline) is bool(headline)


def test_nothing_is_named_before_the_controls_have_run():
    found = seen(*(Rerun(one, one == (2,)) for one in ALONE), settled=False)
    assert found.headline == ""
    assert "no part is named: the reruns that would prove cuda:2 are missing" in found.lines()


def test_parts_that_nothing_tells_apart_are_listed():
    found = seen(Rerun((0,), False), Rerun((1,), False), repeats=[Rerun((0, 1), True)])
    assert found.headline == ""
    assert (
        "no part is named: these reruns do not distinguish the code, cuda:0, cuda:1, the link between cuda:0 and cuda:1"
        in found.lines()
    )


def test_a_device_that_passed_once_is_not_cleared():
    """All three unchanged reruns failed, but the rate may be 64 %, and one pass is no proof."""
    repeats = [Rerun((0, 1, 2), True)] * 3
    few = seen(*(Rerun((one,), one == 2, tries=4) for one in range(3)), repeats=repeats)
    assert few.tries == 5 and few.headline == ""
    enough = seen(*(Rerun((one,), one == 2, tries=5) for one in range(3)), repeats=repeats)
    assert enough.headline.startswith("looks like cuda:2")


def test_devices_that_the_example_does_not_name_may_be_at_fault():
    found = seen(*(Rerun(one, True) for one in ALONE))
    found.partial = True
    assert found.headline == ""


def test_code_may_treat_a_device_apart_that_it_takes_by_its_index():
    found = seen(*(Rerun(one, one == (2,)) for one in ALONE))
    found.partial = True
    assert found.headline.startswith("looks like cuda:2, or like code that treats it apart: fails on it alone, and")


def test_what_fails_now_and_then_is_told_with_its_rate():
    """A device that is right once may be at fault all the same, so it must be right many times."""
    repeats = [Rerun((0, 1, 2, 3), number % 2 == 0) for number in range(20)]
    found = seen(*(Rerun(one, one == (1,), tries=18) for one in ALONE), repeats=repeats)
    assert found.tries == 18
    rate = "looks like unreliable hardware, or a race: failed 10 of 20 times"
    assert found.headline == (
        f"{rate}; looks like cuda:1: fails on it alone, and with others in its place the example passes"
    )
    assert "on one device alone: fails on cuda:1; passes on cuda:0, cuda:2, cuda:3" in found.lines()
    assert seen(*(Rerun(one, one == (1,), tries=17) for one in ALONE), repeats=repeats).headline == rate


# Planted faults: a kind, the devices or ranks, and the least size of the world.
Fault = tuple[str, tuple[int, ...], int]


def shows(fault: Fault, trial: tuple[int, ...]) -> bool:
    kind, members, least = fault
    if kind == "rank":
        return len(trial) > members[0]
    if kind == "at":  # a device at one rank only
        return len(trial) >= max(least, members[1] + 1) and trial[members[1]] == members[0]
    return len(trial) >= least and set(members) <= set(trial)


def ranks_of(fault: Fault, trial: tuple[int, ...]) -> list[int]:
    """Return the ranks that see a fault: the device, the taker of a link, the rank, or all."""
    kind, members, _ = fault
    if kind in ("rank", "size"):
        return list(members) if kind == "rank" else list(range(len(trial)))
    return [trial.index(members[1 if kind == "link" else 0])]


def cause_of(fault: Fault) -> str:
    return {"device": "cuda:{0}", "at": "cuda:{0}", "link": "the link between cuda:{0} and cuda:{1}"}.get(
        fault[0], "the code"
    ).format(*fault[1])


def faults_of(count: int) -> list[Fault]:
    sizes = range(1, count + 1)
    found: list[Fault] = [("device", (one,), least) for one in range(count) for least in sizes]
    found += [("link", pair, least) for pair in itertools.combinations(range(count), 2) for least in sizes[1:]]
    return [*found, *(("size", (), least) for least in sizes), *(("rank", (rank,), 1) for rank in range(count))]


def at_one_rank(count: int) -> list[Fault]:
    return [("at", (one, rank), least) for one, rank, least in itertools.product(range(count), repeat=3)]


class Clock:
    """Stands for the module `time`: a second passes with every rerun."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now


class Node:
    """Stands for a session and its pool of `count` devices with planted faults."""

    def __init__(self, count: int, faults: list[Fault], clock: Clock, cost: float = 1.0, rate: float = 1.0) -> None:
        self.faults = faults
        self.rate = rate
        self.random = random.Random(f"{faults} {rate}")
        self.clock, self.cost = clock, cost
        self.looked = 0.0
        self.settings = SimpleNamespace(depth="quick", per_host=())
        self.pool = SimpleNamespace(devices=count, run=self.run, renew=self.renew)
        self.history: set[tuple[int, ...]] = set()
        self.trials: list[tuple[int, ...]] = []
        self.on_ranks = lambda: None
        self.hear_covered = lambda heard: None
        self.some_devices = lambda size: contextlib.nullcontext()
        self.test = SimpleNamespace(in_body=True)

    def renew(self) -> None:
        self.history.clear()

    def run(self, fn, *, devices, **_):
        self.clock.now += self.cost
        trial = tuple(devices)
        self.trials.append(trial)
        shown = (
            [("history", (), 0)] if trial in self.history else [fault for fault in self.faults if shows(fault, trial)]
        )
        if shown and self.random.random() < self.rate:
            failure = RankFailure("wrong", ranks=sorted({rank for one in shown for rank in ranks_of(one, trial)}))
            failure.__cause__ = AssertionError("wrong")
            raise failure
        return []


def body(ranks, size):
    ranks.run("module:function", size=size)


def session_of(node: Node) -> Any:
    """Return the node as a session: it has the part of one that second looks use."""
    return node


def look(node: Node, size: int) -> Reruns:
    failed = Failed((), {"ranks": None, "size": size})
    return look_again(body, failed, Needs("parent", 0), session_of(node), AssertionError())


def named_in(found: Reruns) -> set[str]:
    line = found.headline
    if "looks like the code" in line:
        return {"the code"}
    named = re.split(r": (?:fails on|no rerun)", line)[0]
    return set(
        re.findall(r"the link between cuda:\d and cuda:\d|(?<!between )(?<!and )cuda:\d|(?<=\d and )cuda:\d", named)
    )


def test_a_failure_that_needs_what_ran_before_names_no_part():
    for devices in ((0, 1), (0, 1, 2)):
        node = Node(3, [], Clock())
        node.history.add(devices)  # only the ranks of the failed example have it
        reruns = look(node, len(devices))
        assert (reruns.headline, reruns.named) == ("", [])
        assert "no part is named: it passes in fresh processes, so it may need what ran before" in reruns.lines()
        assert set(node.trials) == {devices}


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(second_look, "time", made)
    return made


@given(data=st.data())
@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_innocent_part_is_named(clock, data):
    """Random faults, one to three, and random budgets. Brute force: every set of faults as small that agrees with all
    reruns has the named parts."""
    count = data.draw(st.integers(1, 5), label="devices")
    size = data.draw(st.integers(1, count), label="size of the example")
    everything = faults_of(count)
    several = st.lists(st.sampled_from(everything), min_size=1, max_size=3, unique=True)
    planted = data.draw(several | st.sampled_from(at_one_rank(count)).map(lambda one: [one]), label="planted")
    assume(any(shows(fault, tuple(range(size))) for fault in planted))
    node = Node(count, planted, clock, cost=data.draw(st.sampled_from([0.05, 0.1, 0.5, 3.0]), label="seconds"))
    node.looked = data.draw(st.sampled_from([0.0, 5.0, 17.0]), label="seconds of earlier looks")
    named = named_in(look(node, size))
    event(f"{len(planted)} planted, {'named' if named else 'not named'}")
    trials = {trial: any(shows(fault, trial) for fault in planted) for trial in node.trials}
    if len(planted) == 1:
        assert named <= {cause_of(*planted)}
    for size in (1, 2):
        agreeing = [
            {cause_of(fault) for fault in some}
            for some in itertools.combinations([*everything, *(at_one_rank(count) if size == 1 else ())], size)
            if all(any(shows(fault, trial) for fault in some) is failed for trial, failed in trials.items())
        ]
        if agreeing:
            assert all(named <= causes for causes in agreeing)
            return


@pytest.mark.parametrize("count", [3, 4, 8])
@pytest.mark.parametrize("fault", [("device", (1,), 1), ("device", (1,), 2), ("link", (0, 1), 2), ("size", (), 2)])
def test_a_part_that_fails_is_named(clock, count, fault):
    node = Node(count, [fault], clock, cost=0.05)
    found = look(node, count)
    assert named_in(found) == {cause_of(fault)}
    assert len(node.trials) < 60


@pytest.mark.parametrize("rate", [0.2, 0.5, 0.8, 0.97])
def test_no_innocent_part_is_named_for_a_fault_that_shows_now_and_then(clock, rate):
    named: list[object] = []
    for fault in faults_of(4):
        node = Node(4, [fault], clock, cost=0.01, rate=rate)
        found = look(node, 4)
        assert named_in(found) <= {cause_of(fault)}, (fault, found.lines())
        named += named_in(found)
    assert len(named) > 5


def test_a_fault_of_worlds_of_three_is_not_charged_to_the_device_that_was_not_tried(clock):
    """However many reruns fit into the time."""
    for seconds in (0.05, 0.2, 0.5, 1.0, 1.5, 2.5, 4.0, 6.0):
        node = Node(4, [("size", (), 3)], clock, cost=seconds)
        found = look(node, 4)
        assert "looks like cuda" not in found.headline
        if not found.headline:
            assert any("no part is named" in line for line in found.lines()) or len(node.trials) < 4
            assert any("reached its time limit" in line for line in found.lines())


def test_a_rerun_that_hangs_proves_nothing(clock):
    """A busy machine makes ranks late, too."""
    node = Node(3, [("device", (2,), 3)], clock, cost=0.1)

    def hanging(ranks, size):
        if size == 2:
            raise RankHang("late", ranks=[0])
        ranks.run("module:function", size=size)

    failed = Failed((), {"ranks": None, "size": 3})
    found = look_again(hanging, failed, Needs("parent", 0), session_of(node), AssertionError())
    assert not [one for one in found.elsewhere if len(one.devices) == 2] and not found.named
    assert found.notes == ["the second look ended early, because a rerun hung"]


def test_two_faults_that_leave_no_world_right_are_not_charged_to_the_code(clock):
    """All worlds of two fail, as with a fault of the code, but the ranks that fail follow the devices."""
    found = look(Node(3, [("device", (2,), 2), ("link", (0, 1), 2)], clock, cost=0.1), 2)
    assert {one.devices for one in found.elsewhere if one.failed} >= {(0, 2), (1, 2)}
    assert not found.named


def test_the_time_follows_the_speed_of_the_machine_and_each_failure_has_a_share(clock):
    fault: list[Fault] = [("device", (1,), 1)]
    fast, slow = Node(4, fault, clock, cost=0.01), Node(4, fault, clock, cost=0.9)
    look(slow, 4)
    assert slow.looked > 5.0, "reruns of 0.9 s have more time"
    assert "looks like cuda:1" in look(slow, 4).headline
    look(fast, 4)
    assert fast.looked <= 5.0
    spent = Node(4, fault, clock, cost=1.0)
    for _ in range(12):
        before = len(spent.trials)
        look(spent, 4)
        assert len(spent.trials) > before
    assert spent.looked < 4 * 50.0


@pytest.mark.parametrize("size", [1, 2, 3])
def test_only_the_devices_that_take_part_are_suspects(clock, size):
    """A check that chooses its number of devices by itself."""

    def of_its_own(ranks):
        ranks.run("module:function", size=size)

    node = Node(4, [("device", (0,), 1)], clock, cost=0.05)
    found = look_again(of_its_own, Failed((), {"ranks": None}), Needs("parent", 0), session_of(node), AssertionError())
    assert {len(trial) for trial in node.trials} == {size}
    assert "looks like cuda:0: " in found.headline or size == 3
    assert named_in(found) <= {"cuda:0"}


def test_a_size_of_data_is_no_number_of_devices(clock):
    """The example runs on fewer devices with the same size. Others may take part, so the code is not named."""
    calls = []

    def of_data(gpus, size):
        clock.now += 0.1
        calls.append(size)
        raise AssertionError

    found = look_again(
        of_data,
        Failed((), {"gpus": None, "size": 3}),
        Needs("node", 0),
        session_of(Node(4, [], clock)),
        AssertionError(),
    )
    assert set(calls) == {3} and {(0,), (1,)} <= {one.devices for one in found.elsewhere} and not found.named


def test_devices_named_in_two_ways_are_moved_together(clock):
    """The example has a device by its place in `gpus`, and one by its name, so a rerun exchanges two for all."""
    node = Node(4, [("link", (0, 2), 2)], clock, cost=0.1)

    def from_first(gpus, source):
        order = getattr(gpus, "order", ()) or range(4)
        node.run(None, devices=[order[0], int(source[-1])])

    failed = Failed((), {"gpus": None, "source": "cuda:2"})
    found = look_again(from_first, failed, Needs("node", 0), session_of(node), RankFailure("wrong"))
    assert named_in(found) == {"the link between cuda:0 and cuda:2"}


@pytest.mark.parametrize("given", [{"order": (2, 0, 3)}, {"seed": 3}, {"ranks": None, "sizes": (4, 3)}])
def test_every_form_of_devices_is_moved(clock, given):
    """Indices in an argument, all devices of the fixture, and two worlds of one example."""
    node = Node(4, [("device", (2,), 1)], clock, cost=0.1)

    def on_devices(gpus=None, order=(), ranks=None, sizes=(), seed=0):
        for size in sizes:
            ranks.run("module:function", size=size)
        if ranks is None:
            node.run(None, devices=order or getattr(gpus, "order", ()) or range(4))

    arguments = given if "ranks" in given else {"gpus": None, **given}
    found = look_again(on_devices, Failed((), arguments), Needs("node", 0), session_of(node), RankFailure("wrong"))
    apart = ", or like code that treats it apart" if "seed" in given else ""
    assert f"looks like cuda:2{apart}: fails on it alone" in found.headline


def test_planted_hardware_is_named(run, pytester):
    """In ranks and in one process; a device that always fails, and one that fails now and then."""
    pytester.makepyfile(
        planter="""
        from mgpu_check.acceptance.faults import PLANTER, hardware_text, planted_from
        from mgpu_check.plugin.planting import Planting
        from mgpu_check.plugin.stash import SESSION

        FAULTS = {
            "test_all_reduce": "collective-wrong:device=2",
            "test_every_gpu_computes": "elementwise:device=1,every=13",
        }

        def pytest_runtest_setup(item):
            item.config.stash[SESSION].fault = Planting(PLANTER, hardware_text([planted_from(FAULTS[item.name])]))
        """
    )
    result = run(
        *("--gpus=3", "--simulate", "--gpu-level=quick", "-p", "planter", "--hypothesis-seed=0"),
        *(
            "--junitxml=out.xml",
            "--pyargs",
            "mgpu_check.suite",
            "-k",
            "(test_all_reduce and not test_all_reduce_) or test_every_gpu_computes",
        ),
    )
    text = result.stdout.str()
    assert "looks like cuda:2: no rerun without it fails" in text
    assert "unreliable results" not in text
    assert "looks like unreliable hardware, or a race: failed" in text
    assert "cuda:1 alone is wrong in " in text, "the check itself names it"
    xml = (pytester.path / "out.xml").read_text()
    assert 'name="mgpu_check.second_look" value="looks like cuda:2: no rerun without it fails' in xml


def test_an_example_that_draws_while_it_runs_is_not_looked_at_again():
    def body(data):
        raise AssertionError

    data = st.DataObject(None)
    assert look_again(body, Failed((), {"data": data}), None, None, AssertionError()) == Reruns()


def test_an_unexpected_error_is_no_failure_where_the_example_cannot_run(clock):
    """A check may raise on fewer devices because its data are made for more."""

    def unexpected(ranks, size):
        clock.now += 0.05
        if size < 3:
            failure = RankFailure("wrong", ranks=[0])
            failure.__cause__ = UnexpectedError("list index out of range", kind="IndexError")
            raise failure
        ranks.run("module:function", size=size)

    node = Node(3, [("size", (), 3)], clock, cost=0.05)
    failed = RankFailure("wrong", ranks=[0])
    failed.__cause__ = AssertionError()
    found = look_again(unexpected, Failed((), {"ranks": None, "size": 3}), Needs("parent", 0), session_of(node), failed)
    assert not [one for one in found.elsewhere if len(one.devices) < 3]
    failed.__cause__ = UnexpectedError("list index out of range", kind="IndexError")
    found = look_again(unexpected, Failed((), {"ranks": None, "size": 3}), Needs("parent", 0), session_of(node), failed)
    assert [one for one in found.elsewhere if len(one.devices) < 3 and one.failed]
