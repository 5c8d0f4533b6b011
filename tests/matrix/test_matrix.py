"""The fault matrix: every kind of fault of a rank, in every situation, with the expected report.

A row is a fault in a situation. What goes wrong is red, names the rank at fault, the cause and the place, in time; the
next test is green, finds clean ranks, and nothing of the fault is alive any more. What only leaves something behind is
green, because a test may well change the state of its process: all that is asked is that the next one sees nothing of
it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import pytest

from tests.matrix.conftest import INNER

SOURCE = (INNER / "faults.py").read_text().splitlines()
LINES = {
    marker: number
    for number, line in enumerate(SOURCE, 1)
    for marker in [line.partition("# place: ")[2].strip()]
    if marker
}
DEADLINE, TO_TELL = 2.0, 2.0


@dataclass(frozen=True)
class Told:
    """The expected report of a fault; "{name}" is replaced by the line of `faults.py` with that marker.

    Attributes:
        cause: a regular expression for the line that names the rank and the cause.
        places: what the report contains besides: where it was, and where the others were; as it stands there, or a
            pattern.
    """

    cause: str
    places: tuple[str | re.Pattern[str], ...] = ()


# Of rank 1, and of those that had come no further when it struck.
MET = re.compile(
    rf"last collective of (rank 1|ranks (0-1|1-2|0-2)): all_reduce #1 \(faults\.py:{LINES['meeting']}\), float32\[2\], sum"
)
WAITED = "last collective of ranks 0, 2: barrier #2 (faults.py:{waiting}) (still in it)"
MET_AGAIN = ": barrier #2 (faults.py:{waiting})"  # with the rank at fault, or they noticed that it was gone
FINISHED = "ranks 0, 2 finished"


def raised(error: str, place: str) -> Told:
    return Told(rf"rank 1 of 3 raised {error}", (f"faults.py:{{{place}}}", MET, WAITED))


def died(cause: str, *places: str) -> Told:
    return Told(rf"rank 1 of 3 died: {cause}", (*places, MET, MET_AGAIN))


def broke(cause: str) -> Told:
    return Told(rf"rank 1 of 3 died: {cause}", (MET_AGAIN,))


def no_answer(cause: str) -> Told:
    return broke(f"it has written an invalid message to its connection to the pytest process: {cause}")


LATE = r"rank 1 of 3 did not finish (test_fault|happen) within 2 s"
STACKS = ("rank 1: stacks of all threads", "ranks 0, 2: stacks of all threads")
IN_THE_BARRIER = ("ranks 0, 2 are in barrier #2 (faults.py:{waiting})", "faults.py:{waiting} in _wait")


def hung(function: str, place: str) -> Told:
    where = f"rank 1 is in {function} (faults.py:{{{place}}}), after all_reduce #1 (faults.py:{{meeting}})"
    return Told(LATE, (where, f"faults.py:{{{place}}} in", *IN_THE_BARRIER, *STACKS))


def alone(where: str, place: str) -> Told:
    stack = f"faults.py:{{{place}}} in {place.replace('-', '_')}"
    return Told(LATE, (f"rank 1 is in {where}", stack, FINISHED, STACKS[0]))


ERRORS = {
    "raises": "ValueError: planted",
    "sys-exit": "SystemExit: 3",
    "keyboard-interrupt": "KeyboardInterrupt",
    "overflow": "RecursionError: maximum recursion depth exceeded",
    "memory": "MemoryError",
    "memory-of-torch": "RuntimeError: .*can't allocate memory",
    "memory-used-up": "MemoryError",
    "prints-50-mb": "ValueError: printed",
}
ENDS = {
    "exit-0": "exit code 0",
    "sigkill": "signal SIGKILL",
    "sigterm": "signal SIGTERM",
    "sigkill-with-shared-memory": "signal SIGKILL",
    "cpu-limit": "signal SIGXCPU",
    "exit-of-a-thread": "exit code 9",
    "closes-all-files": "(exit code 70|signal SIGABRT)",  # the second by a thread of gloo, whose sockets are gone
}
CRASHES = {"sigsegv": "signal SIGSEGV", "abort": "signal SIGABRT"}  # with their stacks
CLOSED = "its connection to the pytest process was closed"

# In a call: in the body, in setup, in teardown, while shrinking, under -n 2.
IN_A_CALL = {
    **{name: raised(error, name) for name, error in ERRORS.items()},
    **{name: died(end) for name, end in ENDS.items()},
    **{
        name: died(end, "rank 1: stacks at the end", f"faults.py:{{{name}}} in {name}") for name, end in CRASHES.items()
    },
    "unpicklable-result": Told(
        r"rank 1 of 3 raised TypeError: the result, of type lock, cannot be sent to the pytest process: cannot pickle",
        (FINISHED, "last collective of ranks 0-2: all_reduce #1 (faults.py:{meeting})"),
    ),
    # No rank is at fault, and none is reached.
    "unpicklable-argument": Told(
        r"(E +\S+NotPicklable: )?(test_fault|happen) cannot be called in another process: argument ('value'|2), of type lock, cannot be pickled"
    ),
    "unpicklable-error": raised(r"Difficult: <str\(\) of it raised RuntimeError>", "unpicklable-error"),
    "sends-what-nobody-receives": Told(
        r"rank 1 of 3 has sent float32\[2\] to rank 0 in isend \(.*\), and rank 0 has not received it",
        ("faults.py:{sends-what-nobody-receives}",),
    ),
    "is-to-receive-what-nobody-sends": Told(
        r"rank 1 of 3 has begun to receive float32\[2\] from rank 0 in irecv \(.*\), and rank 0 has not sent it",
        ("faults.py:{is-to-receive-what-nobody-sends}",),
    ),
    "gathers-another-dtype": Told(
        r"rank 1 of 3 has sent int32\[2\] to rank 0 in gather \(.*\), where rank 0 has received float32\[2\] in gather",
        ("faults.py:{gather-to-0}",),
    ),
    "exit-7-after-the-last-collective": Told(
        r"rank 1 of 3 died: exit code 7",
        ("last collective of rank 1: all_reduce #2 (faults.py:{exit-7-after-the-last-collective})",),
    ),
    # Gloo ends whichever rank notices; the shapes say which is the odd one.
    "gathers-another-shape": Told(
        r"rank \d of 3 died: signal SIGABRT",
        (
            "rank 1: all_gather #2 (faults.py:{gather}), float32[7]",
            ": all_gather #2 (faults.py:{gather}), float32[3]",
            "faults.py:{gather} in _gather",
        ),
    ),
    "closes-its-connection": broke(CLOSED),
    "shuts-its-connection-down": broke(CLOSED),
    "garbage": no_answer(".* is not a message"),
    "buffer-of-no-message": no_answer("it came with a buffer that it does not use"),
    "buffer-beyond-all-memory": no_answer("its header announces 4611686018427387904 bytes"),
    "message-of-another-kind": no_answer("it is dict, not Outcome"),
    "message-that-cannot-be-loaded": no_answer("it cannot be unpickled: No module named 'no_such_module'"),
    "kills-the-fork-server": Told("ranks 0-2 of 3 died: the fork server ended: killed by SIGKILL", (MET,)),
    "sleeps": hung("sleeps", "sleeps"),
    "spins-in-c": hung("match", "spins-in-c"),
    "spins-in-c-without-the-lock": hung("spins_in_c_without_the_lock", "spins-in-c-without-the-lock"),
    "deadlock": hung("deadlock", "deadlock"),
    "collective-alone": alone("all_reduce #2 (faults.py:{collective-alone}), float32[4], sum", "collective-alone"),
    "other-collective": Told(
        LATE,
        (
            "rank 1 is in broadcast #2 (faults.py:{other-collective}), float32[4], src=1",
            "ranks 0, 2 are in all_reduce #2 (faults.py:{other-collective-others}), float32[4], sum",
            *STACKS,
        ),
    ),
    "receives-what-nobody-sends": alone(
        "recv (faults.py:{receives-what-nobody-sends}), float32[1], src=0", "receives-what-nobody-sends"
    ),
    "group-alone": Told(LATE, ("_process_group", "(faults.py:{group-alone})", FINISHED, STACKS[0])),
    # It cannot write its stacks: what it was last in is known all the same.
    "sigstop": Told(
        LATE,
        (
            "rank 1 is stopped by a signal, such as SIGSTOP, or by a debugger, after all_reduce #1 "
            "(faults.py:{meeting})",
            *IN_THE_BARRIER,
            STACKS[1],
        ),
    ),
    "deaf": hung("deaf", "deaf"),
    "half-a-message": hung("half_a_message", "half-a-message"),
}


AFTERWARDS = "rank 1 of 3 died after its part of the test was done"
NOT_AT_REST = r"rank 1 of 3 did not finish its answer at the end of the test within 2 s"
ARMED = "after all_reduce #1 (faults.py:{arming})"


def uncaught(error: str, place: str) -> Told:
    """The main loop of a rank has no use for an exception from a signal handler."""
    return Told(f"{AFTERWARDS}: exit code 70", (f"faults.py:{{{place}}}, in", re.compile(error)))


def unasked(cause: str) -> Told:
    return Told(f"{AFTERWARDS}: it has written an invalid message to its connection to the pytest process: {cause}")


def idly(where: str, place: str, armed: bool = False) -> Told:
    at = f"faults.py:{{{place}}} in"
    return Told(NOT_AT_REST, (f"rank 1 is in {where}{f', {ARMED}' if armed else ''}", at, STACKS[0]))


WHILE_IDLE = {
    **{name: uncaught(error, name) for name, error in ERRORS.items()},
    "unpicklable-error": uncaught("Difficult", "unpicklable-error"),
    **{name: Told(f"{AFTERWARDS}: {end}") for name, end in ENDS.items()},
    **{name: Told(f"{AFTERWARDS}: {end}", (f"faults.py:{{{name}}} in {name}",)) for name, end in CRASHES.items()},
    "closes-its-connection": Told(f"{AFTERWARDS}: {CLOSED}"),
    # To the rank it looks as if the pytest process had done it, and it ends; on a loaded machine, a moment later.
    "shuts-its-connection-down": Told(
        f"{AFTERWARDS}: (exit code 0|it has closed its connection to the pytest process, and still ran)"
    ),
    "garbage": unasked(".* is not a message"),
    "buffer-of-no-message": unasked("half a message"),
    "buffer-beyond-all-memory": unasked("its header announces 4611686018427387904 bytes"),
    "message-of-another-kind": unasked("nothing was asked"),
    "message-that-cannot-be-loaded": unasked("it cannot be unpickled: No module named 'no_such_module'"),
    "kills-the-fork-server": Told("rank 1 of 3 died after its part .*: the fork server ended: killed by SIGKILL"),
    "sleeps": idly("sleeps (faults.py:{sleeps})", "sleeps", armed=True),
    "spins-in-c": idly("match (faults.py:{spins-in-c})", "spins-in-c", armed=True),
    "spins-in-c-without-the-lock": idly(
        "spins_in_c_without_the_lock (faults.py:{spins-in-c-without-the-lock})",
        "spins-in-c-without-the-lock",
        armed=True,
    ),
    "deadlock": idly("deadlock (faults.py:{deadlock})", "deadlock", armed=True),
    "collective-alone": idly("all_reduce #2 (faults.py:{collective-alone}), float32[4], sum", "collective-alone"),
    "other-collective": idly("broadcast #2 (faults.py:{other-collective}), float32[4], src=1", "other-collective"),
    "receives-what-nobody-sends": idly(
        "recv (faults.py:{receives-what-nobody-sends}), float32[1], src=0", "receives-what-nobody-sends"
    ),
    "group-alone": Told(NOT_AT_REST, ("_process_group", "(faults.py:{group-alone})", STACKS[0])),
    "sigstop": Told(NOT_AT_REST, (f"rank 1 is stopped by a signal, such as SIGSTOP, or by a debugger, {ARMED}",)),
    "deaf": idly("deaf (faults.py:{deaf})", "deaf", armed=True),
    # Looked at before the end of the test, or waited for after it.
    "half-a-message": Told(f"({AFTERWARDS}: it has written an invalid message .*: half a message|{NOT_AT_REST})"),
}

UNUSED = "while no test used it"
BETWEEN = {
    name: Told(f"rank 1 of 3 died {UNUSED}: {(ENDS | CRASHES)[name]}")
    for name in ("sigkill", "sigsegv", "sigterm", "abort", "cpu-limit")
} | {
    "kills-the-fork-server": Told(f"rank 1 of 3 died {UNUSED}: the fork server ended: killed by SIGKILL"),
    "sigstop": Told(f"rank 1 of 3 did not run any more {UNUSED}: stopped by a signal"),
}

# Put back in the rank, or, where that cannot be, by a rank that takes its place: then a remark says what was left.
STATE = {
    "thread": "threads that still run: left",
    "group": "",
    "destroyed-group": "the default process group was destroyed",
    "environment": "",
    "vanished-directory": "",
    "settings-of-torch": "",
    "signals": "",
    "hard-resource-limit": "lowered resource limits",
    "closed-output": "a closed stdout",
    "at-exit": "",
    "huge-result": "",
    "children": "processes that still run: sleep",
    "orphans": "processes that still run: ",
    "modes-of-torch": "",
    "settings-of-python": "",
    "user": "",
    "replaced-functions": "replaced functions: torch.distributed.all_reduce, torch.nn.functional.relu",
    "hook-of-all-modules": "hooks on all modules or optimizers",
    "another-default-group": "the default process group was replaced by another",
    "open-file": "files or addresses that are still open: ",
    "replaced-input": "closed or replaced file descriptors: 0",
    "all-signal-handlers": "",
    "timer-of-faulthandler": "",
    "thread-of-c": "threads that still run: 1 that threading does not know",
    "forks-and-returns-twice": "",
    "shared-memory-with-names": "",
}

# What other rows tell as well is tried in the body and while idle only, and weekly.
VARIATIONS = (INNER / "variations.txt").read_text().split()
IN_EVERY_CALL = {name: told for name, told in IN_A_CALL.items() if name not in VARIATIONS}
IN_TEARDOWN = (
    *("raises", "sys-exit", "unpicklable-result", "exit-0", "sigkill"),
    *("sleeps", "other-collective", "sigstop"),
)

RED = {
    "body": IN_A_CALL,
    "setup": IN_EVERY_CALL,
    "xdist": IN_A_CALL,
    "shrinking": {name: told for name, told in IN_EVERY_CALL.items() if name != "kills-the-fork-server"}
    # The next example of the same test finds no group.
    | {"destroyed-group": Told("ranks 0-2 of 3 raised ValueError: Default process group has not been initialized")},
    "idle": WHILE_IDLE,
    "between": BETWEEN,
    "teardown": {name: IN_A_CALL[name] for name in IN_TEARDOWN},
}
GREEN = {
    situation: {
        name: remark
        for name, remark in STATE.items()
        if name not in RED[situation] and (situation in ("body", "xdist") or name not in VARIATIONS)
    }
    for situation in ("body", "setup", "xdist", "shrinking")
} | {"idle": {name: remark for name, remark in STATE.items() if name != "huge-result"}}

WHERE = {
    "body": ("test_fault", "call"),
    "setup": ("test_fault", "setup"),
    "xdist": ("test_fault", "call"),
    "shrinking": ("test_fault", "call"),
    "idle": ("test_fault", "teardown"),
    "teardown": ("test_fault", "teardown"),
}

# Where a call is made makes a difference to how it is told, and hardly to what becomes of it: one of each kind shows it.
SHOWN_EVERYWHERE = ("raises", "sigkill", "garbage", "sleeps", "destroyed-group", "environment")
# And what differs there from a call in the body.
SHOWN_IN = {
    "setup": ("unpicklable-argument",),
    "xdist": ("shared-memory-with-names",),
    "idle": (
        *("buffer-of-no-message", "message-of-another-kind", "message-that-cannot-be-loaded", "half-a-message"),
        *("closes-its-connection", "shuts-its-connection-down", "sigsegv", "collective-alone", "sigstop"),
        *("kills-the-fork-server", "shared-memory-with-names"),
    ),
    "teardown": ("unpicklable-result",),
    "between": ("kills-the-fork-server", "sigstop"),
}

CASES = [(situation, name, True) for situation, faults in RED.items() for name in faults]
CASES += [(situation, name, False) for situation, faults in GREEN.items() for name in faults]


def lines(text: str) -> str:
    return re.sub(r"\{([\w-]+)\}", lambda found: str(LINES[found[1]]), text)


def check_told(told: Told, text: str) -> None:
    assert re.search(rf"^{told.cause}", text, re.MULTILINE), text
    text = text.replace('", line ', ":")  # Python's way to write a place
    assert [place for place in told.places if not shows(text, place)] == [], text


def shows(text: str, place: str | re.Pattern[str]) -> bool:
    return bool(place.search(text)) if isinstance(place, re.Pattern) else lines(place) in text


def check_example(kind: str, text: str) -> None:
    """The smallest example, or of a hang the only one."""
    if kind == "hang":
        assert re.search(
            r"Failing test case \(not shrunk, because every try would hang\): .*n=[23]$", text, re.MULTILINE
        )
    else:
        assert "Failing test case: test_fault(" in text
        assert "    n=2,\n" in text


# Of the same kind as a fault that is in the body each day: sigkill, sigsegv, raises, memory, sleeps, and garbage.
LIKE_OTHERS = (
    *("exit-0", "sigterm", "abort", "exit-7-after-the-last-collective", "keyboard-interrupt", "overflow"),
    *("memory-used-up", "prints-50-mb", "spins-in-c", "buffer-of-no-message", "buffer-beyond-all-memory"),
    *("message-of-another-kind", "closes-its-connection"),
)


def shown_quickly(situation: str, name: str) -> bool:
    in_body = situation == "body" and name not in (*VARIATIONS, *LIKE_OTHERS)
    return in_body or name in SHOWN_EVERYWHERE or name in SHOWN_IN.get(situation, ())


@pytest.mark.parametrize(
    ("situation", "name", "red"),
    [
        pytest.param(
            *(situation, name, red),
            id=f"{situation}-{name}",
            marks=[] if shown_quickly(situation, name) else [pytest.mark.slow],
        )
        for situation, name, red in CASES
    ],
)
def test_fault(situation: str, name: str, red: bool, situations: Any) -> None:
    run = situations[situation]
    row = run.rows[name]
    phases = row.phases
    expected: list[tuple[str, str]] = []
    if situation == "between":
        told = [line for line in run.deaths if f"[{name}]" in line]
        cause, report = "\n".join(told), phases["test_fault", "call"]
    else:
        expected = [WHERE[situation]] if red else []
        report = phases.get(WHERE[situation], phases["test_fault", "setup"])
        cause = report["text"]
    after = phases.get(("test_next", "call"), {"properties": {}, "outcome": "missing"})
    left = after["properties"].get("survivors", "unknown")
    changed = after["properties"].get("changed", "unknown")
    assert row.red == expected
    if red:
        check_told(RED[situation][name], cause)
        assert run.code == pytest.ExitCode.TESTS_FAILED
    elif GREEN[situation][name]:
        assert [line for line in run.remarks if f"[{name}]" in line and GREEN[situation][name] in line], run.remarks
    kind = run.kinds[name]
    if situation == "shrinking" and red and name not in ("destroyed-group", "unpicklable-argument"):
        check_example(kind, cause)
    if (situation != "shrinking" or kind == "hang") and name not in run.take_longer:
        assert report["seconds"] <= DEADLINE + TO_TELL
    if name == "prints-50-mb" and situation != "idle":
        ((_, length, _),) = [section for section in report["sections"] if "stdout of rank 1" in section[0]]
        assert length < 70_000
    if situation == "teardown":
        assert phases["test_fault", "teardown"]["properties"].get("torn down")
    assert (after["outcome"], changed, left) == ("passed", "", "")


@pytest.mark.parametrize("situation", RED)
def test_nothing_survives_a_run(situation: str, situations: Any) -> None:
    run = situations[situation]
    assert run.survivors == []
    assert run.names == []
    there_are = {*RED[situation], *GREEN.get(situation, ())}
    assert set(run.rows) == set(situations.wanted.get(situation, there_are)) <= there_are


def test_every_fault_is_in_the_matrix(situations: Any) -> None:
    assert set(situations["between"].kinds) == {*IN_A_CALL, *STATE}
    assert len(CASES) >= 100
