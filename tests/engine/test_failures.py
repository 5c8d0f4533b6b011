"""How the endings of all ranks become one story."""

from __future__ import annotations

from mgpu_check.engine.failures import Account, Died, Raised, Who
from mgpu_check.processes.channel import RaisedInRank


def raised(kind: str, message: str) -> Raised:
    return Raised(RaisedInRank("error", kind, message, f"traceback of {message}", "train.py", 31, None))


def test_errors_that_differ_in_the_address_of_a_peer_are_one():
    """As gloo raises them on all ranks that were connected to a dead one."""
    endings = {
        rank: raised("RuntimeError", f"Read error [127.0.0.1]:{port}: Connection reset by peer")
        for rank, port in ((2, 22441), (0, 18066), (1, 4247))
    }
    error = Account({**endings, 3: Died("signal SIGKILL", "")}, Who(4), "test_step").error()
    assert str(error).splitlines()[:2] == [
        "rank 3 of 4 died: signal SIGKILL",
        "ranks 0-2 of 4 raised RuntimeError: Read error [127.0.0.1]:18066: Connection reset by peer",
    ]


def test_errors_that_differ_in_values_are_told_apart_as_far_as_that_helps():
    endings = {rank: raised("ValueError", str(rank)) for rank in range(5)}
    error = Account(endings, Who(5), "test_step").error()
    assert str(error).splitlines()[:4] == [
        "rank 0 of 5 raised ValueError: 0",
        "rank 1 of 5 raised ValueError: 1",
        "rank 2 of 5 raised ValueError: 2",
        "ranks 3-4 of 5 raised the same error with other values",
    ]
