"""Ranks that wait for operations that no rank will begin: the call ends at once, without its deadline."""

from __future__ import annotations

import pytest

from mgpu_check.processes.collective_records import KEPT, Entered, Record, deadlocked


def collective(number: int, state: str = "inside", group: str = "", options: str = "sum") -> Entered:
    return Entered("all_reduce", number, group, group, "float32[4]", options, "", "a.py", 7, state)  # type: ignore[arg-type]


def message(options: str, state: str = "inside") -> Entered:
    name = "recv" if options.startswith("src") else "send"
    return Entered(name, 0, "", "", "float32[4]", options, "", "a.py", 9, state)  # type: ignore[arg-type]


def records(*of_ranks: list[Entered]) -> dict[int, Record]:
    return {rank: Record(tuple(entries), len(entries)) for rank, entries in enumerate(of_ranks)}


SENT = message("dst=1", "done")


@pytest.mark.parametrize(
    ("of_ranks", "found"),
    [
        ([[message("src=1")], [collective(1)]], {0, 1}),
        ([[message("src=1")], [message("src=0")]], {0, 1}),
        ([[collective(1)], [collective(1)]], set()),
        ([[collective(1)], [collective(1)], []], set()),  # rank 2 may still come
        ([[collective(1)], [message("src=0")], []], {0, 1}),  # with or without rank 2
        ([[SENT, collective(1)], [message("src=0")]], set()),  # the message is on its way
        ([[SENT, collective(1)], [message("src=0", "done"), message("src=0")]], {0, 1}),
        ([[SENT, collective(1)], [message("src=0", "pending"), message("src=0")]], set()),  # tags may differ
        ([[collective(1)], [collective(1, group="1,2")], [message("src=0")]], {0, 1, 2}),
        ([[collective(1, options="src=1")], [message("src=2")], []], set()),
        ([[collective(1, options="src=1")], [message("src=0")]], {0, 1}),
        ([[collective(1, options="sum, dst=1")], [message("src=0")]], set()),  # only the root waits for others
        ([[collective(1, options="sum, dst=0")], [message("src=0")]], {0, 1}),
        ([[collective(1, group="0,1", options="src=1")], [message("src=0")]], set()),  # the root is ambiguous
    ],
)
def test_ranks_are_deadlocked_if_each_waits_for_another_of_them(of_ranks, found):
    assert deadlocked(records(*of_ranks), (), len(of_ranks)) == found


def test_nobody_comes_who_has_finished():
    assert deadlocked(records([collective(2)], [collective(1, "done")]), (), 2) == set()
    assert deadlocked(records([collective(2)], [collective(1, "done")]), {1}, 2) == {0}
    assert deadlocked(records([message("src=1")], []), {1}, 2) == {0}
    assert deadlocked(records([collective(1)], [collective(1, "done")]), {1}, 2) == set()


def test_what_the_record_has_lost_may_have_been_done():
    lost = Record((message("src=0"),), KEPT + 1)
    for waiting in (collective(1), message("src=1")):
        assert deadlocked({0: Record((waiting,), 1), 1: lost}, (), 2) == set()
