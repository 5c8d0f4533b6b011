"""Planted faults of messages, of exchanges in parts, of collectives of objects, and of barriers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mgpu_check.suite.collectives.faults.conditions import GROUPS, above
from mgpu_check.suite.collectives.faults.planting import Done, Seen, after, flipped, instead
from mgpu_check.suite.common.faults.breaking import around, given, returned
from mgpu_check.suite.common.faults.conditions import is_last
from mgpu_check.suite.common.faults.registry import FaultRow, fault, register
from mgpu_check.suite.common.faults.when import When
from mgpu_check.torch_hooks.patches import replaced

_MESSAGES, _ANY, _OBJECTS, _BARRIERS, _LAYOUTS = (
    "test_messages", "test_messages_from_any_source", "test_object_collectives", "test_barriers", "test_layouts",
)  # fmt: skip
_object_lists = partial(returned, dist)


def _filled(objects: list[Any], values: list[Any]) -> None:
    objects[:] = values


def _cut(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(_cut, value))
    return value[:65536] if isinstance(value, bytes) else value


def _for_others(objects: list[Any]) -> list[Any]:
    half = len(objects) // 2
    return [*objects[: len(objects) - half], *objects[:half]]


def _set_bits(tensor: torch.Tensor) -> None:
    tensor.view(torch.uint8)[:8] = 0x11


def _closed(real: Any, *args: Any, **kwargs: Any) -> None:
    """Return at once."""


register(
    __name__,
    FaultRow("long-message-cut", "a long message loses its end", _MESSAGES, after("recv"),
        lambda seen: seen.first.view(torch.uint8)[-1:].bitwise_xor_(0x40), above(1 << 16)),
    FaultRow("sender-cleared", "sending clears the first element of the sent tensor", _MESSAGES, after("send"),
        lambda seen: _set_bits(seen.first), above(4096)),
    FaultRow("one-message-in-five", "one message in five arrives with a bit flipped", _MESSAGES, after("recv"),
        lambda seen: seen.first.numel() and seen.every(5) and flipped(seen.first), "one message in 5"),
    FaultRow("wrong-sender", "recv from any rank names the wrong sender", _ANY, returned(dist, "recv"),
        lambda sender, *_, **__: (sender + 1) % dist.get_world_size(),
        When("any source", lambda sender, tensor, src=None, *_, **__: src is None)
        & When("3 ranks and more", lambda *_, **__: dist.get_world_size() > 2)),
    FaultRow("sender-by-its-place", "recv from any rank returns the sender's rank in the group, not in the world", _ANY,
        returned(dist, "recv"), lambda sender, *_, group, **__: dist.get_group_rank(group, sender),
        When("groups of some ranks", lambda *_, group=None, **__: group is not None)),
    FaultRow("message-of-a-group-spoiled", "recv with group_src has a bit flipped", _MESSAGES, after("recv"),
        lambda seen: seen.first.numel() and flipped(seen.first),
        GROUPS & When("group_src", lambda seen: "group_src" in seen.kwargs), 3),
    FaultRow("objects-of-a-group-swapped", "all_gather_object in a group swaps its first two members", _OBJECTS,
        _object_lists("all_gather_object"),
        lambda _, objects, *__, **___: _filled(objects, [*objects[1::-1], *objects[2:]]),
        When("groups without rank 0", lambda *_, group=None, **__: 0 not in dist.get_process_group_ranks(group)), 3),
    FaultRow("objects-rotated", "all_gather_object starts with the second rank", _OBJECTS,
        _object_lists("all_gather_object"),
        lambda _, objects, *__, **___: _filled(objects, [*objects[1:], objects[0]])),
    FaultRow("false-objects-lost", "falsy objects arrive as None", _OBJECTS, _object_lists("all_gather_object"),
        lambda _, objects, *__, **___: _filled(objects, [one or None for one in objects]),
        "zeros, empty strings and containers"),
    FaultRow("large-object-cut", "large objects lose their end in a broadcast", _OBJECTS,
        _object_lists("broadcast_object_list"),
        lambda _, objects, *__, **___: _filled(objects, [*map(_cut, objects)]), "above 64 KiB"),
    FaultRow("object-gathered-twice", "gather_object gives the last rank's object twice", _OBJECTS,
        _object_lists("gather_object"),
        lambda _, own, objects, *__, **___: _filled(objects, [objects[-1], *objects[1:]]),
        When("2 ranks and more", lambda _, own, objects=None, *__, **___: len(objects or ()) > 1)),
    FaultRow("objects-in-reverse", "a list of objects arrives in reverse", _OBJECTS, _object_lists("recv_object_list"),
        lambda _, objects, *__, **___: objects.reverse(), "messages of objects"),
    FaultRow("sender-unknown", "recv_object_list returns -1 as its sender", _OBJECTS,
        returned(dist, "recv_object_list"), lambda *_, **__: -1),
    FaultRow("objects-cut-on-devices", "objects lose their end in a broadcast over devices", _OBJECTS,
        _object_lists("broadcast_object_list"), lambda _, objects, *__, **___: _filled(objects, [*objects[:-1], None]),
        When("groups with no backend for the CPU", lambda *_, group=None, **__: dist.get_backend(group) == "nccl")),
    FaultRow("objects-for-others",
        "scatter_object_list gives the second half of the ranks the objects of the first half", _OBJECTS,
        given(dist, "scatter_object_list"), lambda output, objects, *_, **__: (output, _for_others(objects)),
        When("4 ranks and more", lambda output, objects=None, *_, **__: objects is not None and len(objects) > 3)),
    FaultRow("open-barrier-of-devices", "a barrier of devices does not wait", _BARRIERS, around(dist, "barrier"),
        _closed, When("device_ids is given", lambda *_, device_ids=None, **__: bool(device_ids))),
    FaultRow("open-barrier", "a barrier does not wait", _BARRIERS, around(dist, "barrier"), _closed),
    FaultRow("open-monitored-barrier", "a monitored barrier does not wait", _BARRIERS,
        around(dist, "monitored_barrier"), _closed, "monitored_barrier"),
    FaultRow("open-barrier-of-some", "a monitored barrier in a group does not wait", _BARRIERS,
        around(dist, "monitored_barrier"), _closed,
        When("groups of some ranks",
             lambda real, group=None, *_, **__: dist.get_world_size(group) != dist.get_world_size()), 3),
)  # fmt: skip


def _untagged(real: Any, *args: Any, tag: int = 0, **kwargs: Any) -> Any:
    return real(*args, **kwargs)


@fault("the tag of a message is ignored", _MESSAGES, when="irecv with tags")
def tags_ignored() -> Iterator[None]:
    with (
        around(dist, "isend", "irecv")(_untagged),
        # The same functions in their own module, too: batches recognise them by identity.
        replaced(c10d, "isend", dist.isend),
        replaced(c10d, "irecv", dist.irecv),
    ):
        yield


@fault("a batch of messages brings the last one with a bit flipped", _MESSAGES, by=returned(dist, "batch_isend_irecv"),
       when="one rank")  # fmt: skip
def last_of_a_batch_spoiled(works: list[dist.Work], operations: list[dist.P2POp]) -> None:
    for work in works:
        work.wait()
    taken = [one.tensor for one in operations if one.op is dist.irecv and one.tensor.numel()]
    if taken and is_last():
        flipped(taken[-1])


@fault("a message to oneself arrives with a bit flipped", _MESSAGES, by=returned(dist, "batch_isend_irecv"),
       when="messages to oneself, in a batch")  # fmt: skip
def own_message_spoiled(works: list[dist.Work], operations: list[dist.P2POp]) -> None:
    for work in works:
        work.wait()
    for one in operations:
        if one.op is dist.irecv and one.peer == dist.get_rank() and one.tensor.numel():
            flipped(one.tensor)


@fault("two messages of one size in a batch arrive in reverse order", _MESSAGES, by=given(dist, "batch_isend_irecv"),
       when="two from one rank, of one dtype and size")  # fmt: skip
def alike_messages_exchanged(operations: list[dist.P2POp]) -> None:
    waiting: dict[Any, Any] = {}
    for one in operations:
        if one.op is dist.irecv:
            other = waiting.setdefault((one.peer, one.tensor.shape, one.tensor.dtype), one)
            one.tensor, other.tensor = other.tensor, one.tensor


@fault("all_gather_object returns the rank's own object itself, not a copy", _OBJECTS,
       by=returned(dist, "all_gather_object"), when="each rank's own")  # fmt: skip
def own_object_not_copied(_: None, objects: list[Any], own: Any, group: Any = None) -> None:
    objects[dist.get_rank(group)] = own


@fault("broadcast_object_list keeps the old object if it receives None", _OBJECTS,
       by=around(dist, "broadcast_object_list"), when="None")  # fmt: skip
def nothing_not_broadcast(real: Any, objects: list[Any], *args: Any, **kwargs: Any) -> None:
    before = list(objects)
    real(objects, *args, **kwargs)
    objects[:] = [old if new is None else new for old, new in zip(before, objects, strict=True)]


@fault("an asynchronous barrier completes at once", _BARRIERS, when="async")
def open_barrier_when_late() -> Iterator[None]:
    kept: list[Any] = []  # work that is dropped may be waited for

    def barrier(real: Any, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("async_op"):
            return NotImplemented
        kept.append(real(*args, **kwargs))
        return Done()

    with around(dist, "barrier")(barrier):
        yield


@fault("all_to_all_single reads the part after an empty one from one element too early", _LAYOUTS,
       by=after("all_to_all_single"), when="parts of different sizes, one of them empty")  # fmt: skip
def part_behind_an_empty_one(seen: Seen) -> None:
    sizes = seen.splits(2)
    for before, size, part in zip(sizes, sizes[1:], seen.first.split(sizes)[1:] if sizes else (), strict=False):
        if size and not before:
            part.copy_(part.roll(1, 0))


@fault("all_to_all_single sends the elements after an empty part in reverse order", _LAYOUTS,
       by=instead("all_to_all_single"), when="an empty part of the input before others", least_gpus=3)  # fmt: skip
def sent_backwards_behind_an_empty_part(seen: Seen) -> Any:
    sizes = seen.splits(3)
    if 0 not in sizes[:-1]:
        return NotImplemented
    output, sent = seen.args[:2]
    begin = sum(sizes[: sizes.index(0)])
    rest = sent[begin:].split(1)  # float8 has no flip
    return seen.call(output, torch.cat([sent[:begin], *reversed(rest)]))
