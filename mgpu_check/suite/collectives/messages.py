"""Check messages between ranks: each must arrive once, whole, under its tag, and with the right sender."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.collectives.buffers import CallMemory, shaped
from mgpu_check.suite.collectives.exact import groups_of
from mgpu_check.suite.collectives.findings import WrongResult, raise_findings
from mgpu_check.suite.collectives.message_cases import Message
from mgpu_check.suite.collectives.values import differing, given_blocks, stretched
from mgpu_check.torch_hooks.tensors import as_bits


class _Received:
    """The tensor that receives a message, with guards around it, and its right content."""

    def __init__(self, rank: Rank, message: Message, place: str) -> None:
        self.message = message
        self.right = _content(message)
        self.memory = CallMemory(self.right.dtype)
        self.memory.add(shaped("dense", message.elements))
        self.whole = self.memory.filled([None]).to(rank.device if place == "device" else "cpu")
        self.tensor = self.memory.view(self.whole, 0)

    def findings(self) -> list[WrongResult]:
        got = self.whole.cpu()
        right = self.memory.filled([self.right])
        if torch.equal(as_bits(got), as_bits(right)):
            return []
        mine = self.memory.view(got, 0)
        wrong = differing(mine, self.right)
        if not bool(wrong.any()):
            return [WrongResult(self.message, "memory before or behind the received tensor was changed")]
        return [WrongResult.of(self.message, mine, self.right, wrong)]


def _content(message: Message) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, message.dtype)
    # A different block for each message, so that swapped messages show.
    block = given_blocks(
        "bits", "", dtype, 1, message.source * 97 + message.target * 13 + message.tag * 7 + message.number
    )[0]
    return stretched(block, message.number, message.elements)


def assert_messages_arrive(
    rank: Rank, messages: Sequence[Message], way: str, place: str, members: tuple[int, ...] = (), group: Any = None
) -> None:
    """Assert that each of `messages` arrives unchanged, and that the memory around it does not change. A collective.

    Every second message names the other rank by its number in the group.

    Args:
        way: "blocking": `send` and `recv`, one message after the other. "flying": all `isend`, then all `irecv` in
            another order of tags. "batched": all in one `batch_isend_irecv`.
        members: the ranks of the group that exchanges them; empty for all ranks.
    """
    mine = [message for message in messages if rank.index in (message.source, message.target)]
    device = rank.device if place == "device" else "cpu"
    given = {message: _content(message).to(device) for message in mine if message.source == rank.index}
    taken = {message: _Received(rank, message, place) for message in mine if message.target == rank.index}

    def to(message: Message, role: str, other: int) -> dict[str, Any]:
        numbers = members or range(rank.size)
        end = {f"group_{role}": numbers.index(other)} if message.number % 2 else {role: other}
        return {**end, "tag": message.tag, "group": group}

    works: list[Any] = []
    if way == "blocking":
        for message in mine:
            if message.source == rank.index:
                dist.send(given[message], **to(message, "dst", message.target))
            else:
                dist.recv(taken[message].tensor, **to(message, "src", message.source))
    elif way == "flying":
        works = [dist.isend(tensor, **to(message, "dst", message.target)) for message, tensor in given.items()]
        # Tags in descending order; messages of the same tag in order.
        ordered = sorted(taken.items(), key=lambda one: -one[0].tag)
        works += [dist.irecv(one.tensor, **to(message, "src", message.source)) for message, one in ordered]
    elif mine:
        both = []
        for message in mine:  # a message to itself is in both
            if message in given:
                both.append(dist.P2POp(dist.isend, given[message], **to(message, "peer", message.target)))
            if message in taken:
                both.append(dist.P2POp(dist.irecv, taken[message].tensor, **to(message, "peer", message.source)))
        works = dist.batch_isend_irecv(both)
    for work in works:
        work.wait()
    findings = [finding for one in taken.values() for finding in one.findings()]
    for message, tensor in given.items():
        if not torch.equal(as_bits(tensor.cpu()), as_bits(_content(message))):
            findings.append(WrongResult(message, "the tensor that was sent was changed"))
    raise_findings(findings, len(mine), rank)


def assert_any_source_tells_the_sender(
    rank: Rank, target: int, tag: int, dtype: str, elements: int, members: tuple[int, ...] = ()
) -> None:
    """Assert that `recv` without a source gets one message from each other rank, and returns the sender. A collective.

    Args:
        target: the rank that receives, one of `members`.
        members: the ranks of the group that sends them; empty for all ranks.
    """
    sources = [source for source in members or range(rank.size) if source != target]
    messages = [Message(source, target, tag, dtype, elements, 0) for source in sources]
    findings: list[WrongResult] = []
    with groups_of(rank, [members]) as groups:
        group = groups[members]
        if rank.index == target:
            findings += _taken_from_any(rank, messages, group)
        for own in messages:
            if own.source == rank.index:
                dist.send(_content(own), target, tag=tag, group=group)
    raise_findings(findings, len(messages), rank)


def _taken_from_any(rank: Rank, messages: Sequence[Message], group: dist.ProcessGroup | None) -> Iterator[WrongResult]:
    left = {message.source: message for message in messages}
    for due in messages:
        received = _Received(rank, replace(due, source=-1), "cpu")
        sender = dist.recv(received.tensor, tag=due.tag, group=group)
        message = left.pop(sender, None)
        if message is None:
            text = f"recv returned rank {sender} as the sender, which had no message to send"
            yield WrongResult(received.message, text)
            continue
        received.message, received.right = message, _content(message)
        yield from received.findings()
