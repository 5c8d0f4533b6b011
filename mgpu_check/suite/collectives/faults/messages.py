"""Planted faults of messages, of exchanges in parts, of collectives of objects, and of barriers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mgpu_check.suite.collectives.faults.planting import Seen, around, spoiled
from mgpu_check.suite.common.faults.breaking import replaced_method
from mgpu_check.suite.common.faults.conditions import Count, is_last
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.torch_hooks.patches import replaced

_MESSAGES, _ANY, _OBJECTS, _BARRIERS = (
    "test_messages", "test_messages_from_any_source", "test_object_collectives", "test_barriers",
)  # fmt: skip
Real = Callable[..., Any]


@fault("the tag of a message is ignored", _MESSAGES, condition="irecv with tags")
def tags_ignored() -> Iterator[None]:
    send, receive = dist.isend, dist.irecv

    def isend(tensor: torch.Tensor, dst: int | None = None, group: Any = None, tag: int = 0, **more: Any) -> Any:
        return send(tensor, dst, group, 0, **more)

    def irecv(tensor: torch.Tensor, src: int | None = None, group: Any = None, tag: int = 0, **more: Any) -> Any:
        return receive(tensor, src, group, 0, **more)

    # Replace them in their own module, too: batches recognise them by identity.
    with (
        replaced(dist, "isend", isend),
        replaced(dist, "irecv", irecv),
        replaced(c10d, "isend", isend),
        replaced(c10d, "irecv", irecv),
    ):
        yield


@fault("a batch of messages brings the last one with a bit flipped", _MESSAGES, condition="one rank")
def last_of_a_batch_spoiled() -> Iterator[None]:
    def batch(real: Real, operations: list[dist.P2POp]) -> list[dist.Work]:
        works: list[dist.Work] = real(operations)
        for work in works:
            work.wait()
        taken = [one.tensor for one in operations if one.op is dist.irecv and one.tensor.numel()]
        if taken and is_last():
            taken[-1].view(torch.uint8)[:1].bitwise_xor_(1)
        return works

    with replaced_method(dist, "batch_isend_irecv", batch):
        yield


@fault("a long message loses its end", _MESSAGES, condition="above 64 Ki elements")
def long_message_cut() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if seen.first.numel() > 1 << 16:
            seen.first.view(torch.uint8)[-1:] ^= 0x40

    with spoiled(spoil, "recv"):
        yield


@fault("sending clears the first element of the sent tensor", _MESSAGES, condition="above 4,096 elements")
def sender_cleared() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        if seen.first.numel() > 4096:
            seen.first.view(torch.uint8)[:8] = 0x11

    with spoiled(spoil, "send"):
        yield


@fault("one message in five arrives with a bit flipped", _MESSAGES, condition="one message in 5")
def one_message_in_five() -> Iterator[None]:
    count = Count()

    def spoil(seen: Seen) -> None:
        if seen.first.numel() and count.every(5):
            seen.first.view(torch.uint8)[:1].bitwise_xor_(1)

    with spoiled(spoil, "recv"):
        yield


@fault("recv from any rank names the wrong sender", _ANY, condition="any source, 3 ranks and more")
def wrong_sender() -> Iterator[None]:
    def recv(real: Real, tensor: torch.Tensor, src: int | None = None, *args: Any, **kwargs: Any) -> int:
        sender: int = real(tensor, src, *args, **kwargs)
        size = dist.get_world_size()
        return sender if src is not None or size < 3 else (sender + 1) % size

    with replaced_method(dist, "recv", recv):
        yield


@fault("all_gather_object starts with the second rank", _OBJECTS)
def objects_rotated() -> Iterator[None]:
    def all_gather_object(real: Real, object_list: list[Any], obj: Any, *args: Any, **kwargs: Any) -> None:
        real(object_list, obj, *args, **kwargs)
        object_list[:] = object_list[1:] + object_list[:1]

    with replaced_method(dist, "all_gather_object", all_gather_object):
        yield


@fault("large objects lose their end in a broadcast", _OBJECTS, condition="above 64 KiB")
def large_object_cut() -> Iterator[None]:
    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(cut, value))
        return value[:65536] if isinstance(value, bytes) else value

    def broadcast(real: Real, object_list: list[Any], *args: Any, **kwargs: Any) -> None:
        real(object_list, *args, **kwargs)
        object_list[:] = map(cut, object_list)

    with replaced_method(dist, "broadcast_object_list", broadcast):
        yield


@fault(
    "scatter_object_list gives the second half of the ranks the objects of the first half",
    _OBJECTS,
    condition="4 ranks and more",
)
def objects_for_others() -> Iterator[None]:
    def scatter(real: Real, output: list[Any], given: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
        if given is not None and len(given) > 3:
            half = len(given) // 2
            given = [*given[: len(given) - half], *given[:half]]
        real(output, given, *args, **kwargs)

    with replaced_method(dist, "scatter_object_list", scatter):
        yield


@fault("gather_object gives the last rank's object twice", _OBJECTS, condition="2 ranks and more")
def object_gathered_twice() -> Iterator[None]:
    def gather(real: Real, obj: Any, object_gather_list: list[Any] | None = None, *args: Any, **kwargs: Any) -> None:
        real(obj, object_gather_list, *args, **kwargs)
        if object_gather_list:
            object_gather_list[0] = object_gather_list[-1]

    with replaced_method(dist, "gather_object", gather):
        yield


@fault("a list of objects arrives in reverse", _OBJECTS, condition="messages of objects")
def objects_in_reverse() -> Iterator[None]:
    def recv(real: Real, object_list: list[Any], *args: Any, **kwargs: Any) -> int:
        sender: int = real(object_list, *args, **kwargs)
        object_list.reverse()
        return sender

    with replaced_method(dist, "recv_object_list", recv):
        yield


@fault("objects lose their end in a broadcast over devices", _OBJECTS, condition="groups with no backend for the CPU")
def objects_cut_on_devices() -> Iterator[None]:
    def broadcast(real: Real, object_list: list[Any], *args: Any, **kwargs: Any) -> None:
        real(object_list, *args, **kwargs)
        if dist.get_backend(kwargs.get("group")) == "nccl":
            object_list[-1] = None

    with replaced_method(dist, "broadcast_object_list", broadcast):
        yield


@fault("a barrier of devices does not wait", _BARRIERS, condition="device_ids is given")
def open_barrier_of_devices() -> Iterator[None]:
    def barrier(real: Real, *args: Any, device_ids: list[int] | None = None, **kwargs: Any) -> Any:
        return None if device_ids else real(*args, **kwargs)

    with replaced_method(dist, "barrier", barrier):
        yield


@fault("a barrier does not wait", _BARRIERS)
def open_barrier() -> Iterator[None]:
    with replaced(dist, "barrier", lambda *args, **kwargs: None):
        yield


@fault("a monitored barrier does not wait", _BARRIERS, condition="monitored_barrier")
def open_monitored_barrier() -> Iterator[None]:
    with replaced(dist, "monitored_barrier", lambda *args, **kwargs: None):
        yield


@fault(
    "two messages of one size in a batch arrive in reverse order",
    _MESSAGES,
    condition="two from one rank, of one dtype and size",
)
def alike_messages_exchanged() -> Iterator[None]:
    def batch(real: Real, operations: Any) -> Any:
        waiting: dict[Any, Any] = {}
        for one in operations:
            if one.op is not dist.irecv:
                continue
            other = waiting.setdefault((one.peer, one.tensor.shape, one.tensor.dtype), one)
            if other is not one:
                one.tensor, other.tensor = other.tensor, one.tensor
        return real(operations)

    with replaced_method(dist, "batch_isend_irecv", batch):
        yield


@fault(
    "recv from any rank returns the sender's rank in the group, not in the world",
    _ANY,
    condition="groups of some ranks",
)
def sender_by_its_place() -> Iterator[None]:
    def recv(real: Real, *args: Any, group: Any = None, **kwargs: Any) -> int:
        sender: int = real(*args, group=group, **kwargs)
        return sender if group is None else dist.get_group_rank(group, sender)

    with replaced_method(dist, "recv", recv):
        yield


@fault("all_gather_object returns the rank's own object itself, not a copy", _OBJECTS, condition="each rank's own")
def own_object_not_copied() -> Iterator[None]:
    def gather(real: Real, objects: list[Any], own: Any, group: Any = None) -> None:
        real(objects, own, group=group)
        objects[dist.get_rank(group)] = own

    with replaced_method(dist, "all_gather_object", gather):
        yield


@fault("broadcast_object_list keeps the old object if it receives None", _OBJECTS, condition="None")
def nothing_not_broadcast() -> Iterator[None]:
    def broadcast(real: Real, objects: list[Any], *args: Any, **kwargs: Any) -> None:
        before = list(objects)
        real(objects, *args, **kwargs)
        objects[:] = [old if new is None else new for old, new in zip(before, objects, strict=True)]

    with replaced_method(dist, "broadcast_object_list", broadcast):
        yield


@fault(
    "all_to_all_single reads the part after an empty one from one element too early",
    "test_layouts",
    condition="parts of different sizes, one of them empty",
)
def part_behind_an_empty_one() -> Iterator[None]:
    def spoil(seen: Seen) -> None:
        sizes = seen.args[2] if len(seen.args) > 2 else None
        begin, before = 0, 1
        for size in sizes or ():
            if size and not before:
                part = seen.first[begin : begin + size]
                part.copy_(part.roll(1, 0))
            begin, before = begin + size, size

    with spoiled(spoil, "all_to_all_single"):
        yield


@fault("a monitored barrier in a group does not wait", _BARRIERS, condition="groups of some ranks", least_gpus=3)
def open_barrier_of_some() -> Iterator[None]:
    def barrier(real: Real, group: Any = None, *args: Any, **kwargs: Any) -> Any:
        if dist.get_world_size(group) == dist.get_world_size():
            real(group, *args, **kwargs)

    with replaced_method(dist, "monitored_barrier", barrier):
        yield


@fault("an asynchronous barrier completes at once", _BARRIERS, condition="async")
def open_barrier_when_late() -> Iterator[None]:
    kept: list[Any] = []

    class Done:
        def wait(self) -> bool:
            return True

    def barrier(real: Real, *args: Any, **kwargs: Any) -> Any:
        if not kwargs.get("async_op"):
            return real(*args, **kwargs)
        kept.append(real(*args, **kwargs))
        return Done()

    with replaced_method(dist, "barrier", barrier):
        yield


@fault(
    "all_to_all_single sends the elements after an empty part in reverse order",
    "test_layouts",
    condition="an empty part of the input before others",
    least_gpus=3,
)
def sent_backwards_behind_an_empty_part() -> Iterator[None]:
    def exchange(seen: Seen) -> Any:
        sizes = list(seen.args[3] or ()) if len(seen.args) > 3 else []
        if 0 not in sizes[:-1]:
            return seen.call()
        output, given = seen.args[:2]
        begin = sum(sizes[: sizes.index(0)])
        rest = given[begin:].split(1)  # float8 has no flip
        return seen.call(output, torch.cat([given[:begin], *reversed(rest)]))

    with around(exchange, "all_to_all_single"):
        yield
