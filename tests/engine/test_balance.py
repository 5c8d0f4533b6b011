"""Transfers that one side has and the other lacks, by what ranks have recorded of them."""

from __future__ import annotations

import pytest

from mgpu_check.engine.lockstep import unmatched
from mgpu_check.processes.channel import ANY, MANY, Group, PeerTransfers, TensorRun

WORLD = Group("", (0, 1, 2))


def runs(text: str) -> tuple[TensorRun, ...]:
    """Return tensors, such as "2a b": two of the kind a, and one of b."""
    words = [word if word[0].isdigit() else f"1{word}" for word in text.split()]
    return tuple(TensorRun(int(word[0]), word[1:], "send", "train.py", 7) for word in words)


def sent(peer: int, what: str, tag: int = 0) -> PeerTransfers:
    return PeerTransfers(WORLD, True, peer, tag, runs(what))


def received(peer: int, what: str, tag: int = 0) -> PeerTransfers:
    return PeerTransfers(WORLD, False, peer, tag, runs(what))


@pytest.mark.parametrize(
    ("flows", "found"),
    [
        pytest.param({}, [], id="nothing"),
        pytest.param({0: [sent(1, "a b")], 1: [received(0, "a b")]}, [], id="equal"),
        pytest.param({0: [sent(1, "a a")], 1: [received(0, "2a")]}, [], id="counted otherwise"),
        pytest.param({0: [sent(1, "2a")], 1: [received(0, "a")]}, [(0, 1, "a", None)], id="one is left"),
        pytest.param({0: [sent(1, "a")], 1: [received(0, "2a")]}, [(0, 1, None, "a")], id="one is missing"),
        pytest.param({0: [sent(1, "a")]}, [(0, 1, "a", None)], id="nobody receives"),
        pytest.param({1: [received(0, "a")]}, [(0, 1, None, "a")], id="nobody sends"),
        pytest.param({0: [sent(1, "a b")], 1: [received(0, "b a")]}, [(0, 1, "a", "b")], id="another order"),
        pytest.param({0: [sent(1, "a b")], 1: [received(0, f"2{MANY}")]}, [], id="counts alone are known"),
        pytest.param(
            {0: [sent(1, "a", 1)], 1: [received(0, "a", 2)]}, [(0, 1, "a", None), (0, 1, None, "a")], id="other tags"
        ),
        pytest.param(
            {0: [sent(2, "a b")], 1: [sent(2, "c")], 2: [received(ANY, "c b a")]}, [], id="from any, in any order"
        ),
        pytest.param(
            {0: [sent(2, "a")], 1: [sent(2, "b")], 2: [received(0, "a"), received(ANY, "b")]},
            [],
            id="from one and from any",
        ),
        pytest.param({0: [sent(2, "2a")], 2: [received(ANY, "a")]}, [(0, 2, "a", None)], id="any receives too few"),
        pytest.param({0: [sent(2, "a")], 2: [received(ANY, "a b")]}, [(ANY, 2, None, "b")], id="any waits for more"),
        pytest.param(
            {0: [sent(2, "a")], 2: [received(ANY, "b")]}, [(0, 2, "a", None), (ANY, 2, None, "b")], id="another kind"
        ),
        pytest.param({0: [sent(2, "a b")], 2: [received(ANY, f"2{MANY}")]}, [], id="any, of counts alone"),
        pytest.param(
            {0: [sent(2, "a")], 2: [received(ANY, "a", 5)]},
            [(0, 2, "a", None), (ANY, 2, None, "a")],
            id="any, of another tag",
        ),
    ],
)
def test_each_tensor_that_was_sent_must_be_received(flows, found):
    told = {
        (one.sender, one.receiver, one.sent and one.sent.content, one.received and one.received.content)
        for one in unmatched(flows)
    }
    assert told == set(found)
