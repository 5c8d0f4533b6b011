"""Several ranks, each alone in its world, that compute at the same time."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from mgpu_check.engine.world import World
from mgpu_check.errors import RankFailure, RankHang
from tests.engine.processes import gone


def test_each_has_its_arguments_and_its_device(pool):
    def body(rank, first, second):
        return rank.size, rank.index, rank.device.index, first + second

    found = pool.run_apart(body, [(1, 2), (3, 4), (5, 6)])
    assert found == [(1, 0, 0, 3), (1, 0, 1, 7), (1, 0, 2, 11)]
    assert pool.run_apart(body, []) == []


@pytest.mark.parametrize("size", [0, 10_000_000], ids=["small", "more than a socket takes"])
def test_they_compute_at_the_same_time(pool, tmp_path, size):
    path, data = tmp_path / "fifo", bytes(size)
    os.mkfifo(path)

    def meet(mode, data):
        with open(path, mode) as file:  # waits for the other
            return file.write("met") if mode == "w" else file.read()

    assert pool.run_apart(meet, [("r", data), ("w", data)], timeout=60) == ["met", 3]


def test_one_that_takes_no_arguments_hinders_no_other(pool):
    stopped, other = pool.run_apart(os.getpid, [(), ()])
    os.kill(stopped, signal.SIGSTOP)
    with pytest.raises(RankHang, match="is stopped by a signal"):
        pool.run_apart(len, [(bytes(10_000_000),)] * 2, timeout=0.5)
    assert pool.run_apart(os.getpid, [(), ()])[1] == other


def test_the_first_error_is_raised_when_all_have_ended(pool):
    def body(number):
        if number:
            raise ArithmeticError(f"planted {number}")
        return os.getpid()

    before = pool.run_apart(body, [(0,), (0,), (0,)])
    with pytest.raises(RankFailure, match="planted 1"):
        pool.run_apart(body, [(0,), (1,), (2,)])
    assert pool.run_apart(body, [(0,), (0,), (0,)]) == before


def test_one_that_hangs_is_ended_and_replaced(pool):
    def body(hangs):
        if hangs:
            threading.Event().wait()
        return os.getpid()

    first, second = pool.run_apart(body, [(False,), (False,)])
    with pytest.raises(RankHang, match=r"did not finish body within 0\.5 s"):
        pool.run_apart(body, [(True,), (False,)], timeout=0.5)
    assert gone(first)
    again = pool.run_apart(body, [(False,), (False,)])
    assert again[0] != first and again[1] == second


@pytest.mark.slow
def test_those_beside_one_that_hangs_get_no_time_of_their_own(pool, monkeypatch):
    finish, granted = World.finish, []

    def noted(world, call, timeout):
        granted.append(timeout)
        return finish(world, call, timeout)

    monkeypatch.setattr(World, "finish", noted)
    with pytest.raises(RankHang, match=r"did not finish <lambda> within 2 s"):
        pool.run_apart(lambda: threading.Event().wait(), [(), (), ()], timeout=2.0)
    assert granted[0] == 2.0 and all(timeout < 2.0 for timeout in granted[1:])


def test_from_outside(pool, monkeypatch):
    """What ends the test from outside, as Ctrl-C does, leaves none that would answer the next call."""
    before = pool.run_apart(os.getpid, [(), ()])

    def hangs():
        threading.Event().wait()

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(World, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pool.run_apart(hangs, [(), ()])
    assert isinstance(pool.stopped(), RankHang)
    after = pool.run_apart(os.getpid, [(), ()])
    assert set(after).isdisjoint(before)
