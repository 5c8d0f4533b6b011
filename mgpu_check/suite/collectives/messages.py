"""Check messages between ranks, collectives of Python objects, barriers and stores."""

from __future__ import annotations

import contextlib
import itertools
import random
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist

from mgpu_check.asserts.findings import Findings, run_all
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.oracles.collectives.cases import REDUCED, Message, WrongResult, messages_between, raise_findings
from mgpu_check.oracles.collectives.repeated_calls import groups_of
from mgpu_check.suite.collectives.calls import (
    CallMemory,
    differing,
    given_blocks,
    shaped,
    some_groups,
    stretched,
    without,
)
from mgpu_check.torch_hooks.tensors import as_bits


class _Received:
    """The tensor that receives a message, with guards around it, and its right content."""

    def __init__(self, rank: Rank, message: Message, placement: str) -> None:
        self.message = message
        self.right = _content(message)
        self.memory = CallMemory(self.right.dtype)
        self.memory.add(shaped("dense", message.elements))
        self.whole = self.memory.filled([None]).to(rank.device if placement == "device" else "cpu")
        self.tensor = self.memory.view(self.whole, 0)

    def findings(self) -> list[WrongResult]:
        got = self.whole.cpu()
        if torch.equal(as_bits(got), as_bits(self.memory.filled([self.right]))):
            return []
        mine = self.memory.view(got, 0)
        mismatches = differing(mine, self.right)
        if not bool(mismatches.any()):
            return [WrongResult(self.message, "memory before or behind the received tensor was changed")]
        return [WrongResult.of(self.message, mine, self.right, mismatches)]


def _content(message: Message) -> torch.Tensor:
    # A different block for each message, so that swapped messages show.
    seed = message.source * 97 + message.target * 13 + message.tag * 7 + message.number
    block = given_blocks("bits", "", getattr(torch, message.dtype), 1, seed)[0]
    return stretched(block, message.number, message.elements)


def assert_messages_arrive(
    rank: Rank, messages: Sequence[Message], way: str, placement: str, members: tuple[int, ...] = (), group: Any = None
) -> None:
    """Assert that each of `messages` arrives unchanged, and that the memory around it does not change. A collective.

    Every second message names the other rank by its number in the group of `members`, empty for all ranks. The `way` is
    "blocking": `send` and `recv`, one message after the other; "flying": all `isend`, then all `irecv` in another order
    of tags; or "batched": all in one `batch_isend_irecv`, on the CPU in another order of tags too.
    """
    mine = [message for message in messages if rank.index in (message.source, message.target)]
    device = rank.device if placement == "device" else "cpu"
    sent = {message: _content(message).to(device) for message in mine if message.source == rank.index}
    receivers = {message: _Received(rank, message, placement) for message in mine if message.target == rank.index}

    def to(message: Message, role: str, peer: int) -> dict[str, Any]:
        numbers = members or range(rank.size)
        end = {f"group_{role}": numbers.index(peer)} if message.number % 2 else {role: peer}
        return {**end, "tag": message.tag, "group": group}

    works: list[Any] = []
    if way == "blocking":
        for message in mine:
            if message.source == rank.index:
                dist.send(sent[message], **to(message, "dst", message.target))
            else:
                dist.recv(receivers[message].tensor, **to(message, "src", message.source))
    elif way == "flying":
        works = [dist.isend(tensor, **to(message, "dst", message.target)) for message, tensor in sent.items()]
        # Tags in descending order; messages of the same tag in order.
        ordered = sorted(receivers.items(), key=lambda entry: -entry[0].tag)
        works += [dist.irecv(receiver.tensor, **to(message, "src", message.source)) for message, receiver in ordered]
    elif mine:
        # On devices in the order of the sends, as NCCL has no tags. A message to itself is in both.
        ordered = sorted(receivers.items(), key=lambda entry: -entry[0].tag * (placement == "cpu"))
        both = [dist.P2POp(dist.isend, sent[own], **to(own, "peer", own.target)) for own in sent]
        both += [dist.P2POp(dist.irecv, into.tensor, **to(own, "peer", own.source)) for own, into in ordered]
        works = dist.batch_isend_irecv(both)
    for work in works:
        work.wait()
    findings = [finding for receiver in receivers.values() for finding in receiver.findings()]
    for message, tensor in sent.items():
        if not torch.equal(as_bits(tensor.cpu()), as_bits(_content(message))):
            findings.append(WrongResult(message, "the tensor that was sent was changed"))
    raise_findings(findings, len(mine), rank)


def assert_any_source_tells_the_sender(
    rank: Rank, target: int, tag: int, dtype: str, elements: int, members: tuple[int, ...] = ()
) -> None:
    """Assert that `recv` without a source gets one message from each other rank, and returns the sender. A collective.
    Rank `target` receives, one of `members`, the ranks of the group that sends them; empty for all ranks."""
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
    outstanding = {message.source: message for message in messages}
    for due in messages:
        received = _Received(rank, replace(due, source=-1), "cpu")
        sender = dist.recv(received.tensor, tag=due.tag, group=group)
        message = outstanding.pop(sender, None)
        if message is None:
            text = f"recv returned rank {sender} as the sender, which had no message to send"
            yield WrongResult(received.message, text)
        else:
            received.message, received.right = message, _content(message)
            yield from received.findings()


BarrierForm = Literal["of devices", "of the CPU", "monitored", "asynchronous"]
_HELD = 0.06  # seconds to watch a barrier, enough for a rank that does not wait to leave it


def object_of(seed: int, rank: int, number: int = 0) -> object:
    """Return an object that differs between ranks in content, kind and size: a few bytes to some 100 KiB."""
    drawn = random.Random(seed * 1009 + rank * 31 + number)
    pool: list[object] = [
        None,
        rank,
        f"rank {rank} ✓" * drawn.randint(0, 300),
        {"rank": rank, "values": [drawn.random() for _ in range(drawn.randint(0, 40))]},
        drawn.randbytes(70_000 + drawn.randint(0, 9)),
        (float("inf"), -0.0, {rank, -1}, [[], {}]),
    ]
    return (rank, number, pool[(seed + rank + number) % len(pool)])


def assert_objects_travel(
    rank: Rank, root: int, seed: int, members: tuple[int, ...] = (), *, backend: str | None = None
) -> None:
    """Assert that each collective of objects brings equal copies of the objects to the right ranks. A collective.

    `root` is the number in the group of the rank that sends or collects, modulo the size of the group. An odd seed
    names it so. Objects travel over the CPU if the group has a backend for it.
    """
    with groups_of(rank, [members], backend=backend) as groups:
        everybody = members or tuple(range(rank.size))
        if rank.index not in everybody:
            return
        findings = list(_traveled(everybody, everybody.index(rank.index), root % len(everybody), seed, groups[members]))
    raise_findings(findings, 6, rank)


def _traveled(
    members: tuple[int, ...], me: int, root: int, seed: int, group: dist.ProcessGroup | None
) -> Iterator[WrongResult]:
    """Call each collective of objects, and yield the wrong results; `me` and `root` are numbers in the group."""
    size = len(members)
    all_of = [object_of(seed, position) for position in range(size)]
    suffix = f" in the group {list(members)}" if members != tuple(range(size)) else ""

    def differing(label: str, got: object, expected: object) -> Iterator[WrongResult]:
        yield from _unequal(label + suffix, got, expected)

    def shared(label: str, got: list[object]) -> Iterator[WrongResult]:
        # A later change of a result must not change the input.
        if any(result is all_of[me] for result in got):
            yield WrongResult(label + suffix, "it gives this rank's own object back, expected a copy")

    def end(role: str, number: int) -> dict[str, Any]:
        return {f"group_{role}": number} if seed % 2 else {role: members[number]}

    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, all_of[me], group=group)
    yield from differing("all_gather_object", gathered, all_of)
    yield from shared("all_gather_object", gathered)
    # False objects, of a different type on each of seven consecutive ranks.
    empty: tuple[object, ...] = (0, "", False, [], {}, 0.0, b"")
    dist.all_gather_object(gathered, empty[(seed + me) % 7], group=group)
    expected: list[object] = [repr(empty[(seed + number) % 7]) for number in range(size)]
    yield from differing("all_gather_object of empty objects", [repr(result) for result in gathered], expected)
    collected: list[object] | None = [None] * size if me == root else None
    dist.gather_object(all_of[me], collected, group=group, **end("dst", root))
    yield from differing(f"gather_object to rank {members[root]}", collected, all_of if me == root else None)
    yield from shared("gather_object", collected or [])
    spread: list[object] = [f"nothing for rank {me}"]
    objects = [object_of(seed, root, to) for to in range(size)] if me == root else None
    dist.scatter_object_list(spread, objects, group=group, **end("src", root))
    yield from differing(f"scatter_object_list from rank {members[root]}", spread, [object_of(seed, root, me)])
    entries = _broadcast_entries(seed, me, root)
    dist.broadcast_object_list(entries, group=group, **end("src", root))
    label = f"broadcast_object_list from rank {members[root]}"
    yield from differing(label, entries, _broadcast_entries(seed, root, root))
    if size > 1:
        target = (root + 1) % size
        carried = [object_of(seed, me, 7), object_of(seed, me, 8)]
        if me == root:
            dist.send_object_list(carried, group=group, **end("dst", target))
        elif me == target:
            sender = dist.recv_object_list(carried, group=group, **end("src", root))
            yield from differing("the sender that recv_object_list returns", [sender], [members[root]])
            expected = [object_of(seed, root, 7), object_of(seed, root, 8)]
            yield from differing(f"send_object_list of rank {members[root]}", carried, expected)


def assert_drawn_objects_travel(rank: Rank, root: int, drawn: Sequence[object]) -> None:
    """Assert that `all_gather_object` and `broadcast_object_list` bring equal copies of drawn objects to all ranks.
    Each rank has one of the drawn objects, and its number. Rank `root`, modulo the world size, broadcasts."""
    all_of = [(index, drawn[index % len(drawn)]) for index in range(rank.size)]
    gathered: list[object] = [None] * rank.size
    dist.all_gather_object(gathered, all_of[rank.index])
    copies: list[object] = list(drawn) if rank.index == root % rank.size else [None] * len(drawn)
    dist.broadcast_object_list(copies, src=root % rank.size)
    label = f"broadcast_object_list of drawn objects from rank {root % rank.size}"
    findings = _unequal("all_gather_object of drawn objects", gathered, all_of) + _unequal(label, copies, list(drawn))
    raise_findings(findings, 2, rank)


def _unequal(label: str, got: object, expected: object) -> list[WrongResult]:
    def short(value: object) -> str:
        text = repr(value)
        return text if len(text) <= 120 else f"{text[:80]} ... ({len(text)} characters)"

    return [] if got == expected else [WrongResult(label, f"got {short(got)}, expected {short(expected)}")]


def _broadcast_entries(seed: int, rank: int, root: int) -> list[object]:
    """Return a rank's list before a broadcast: an entry that is None on `root` only, and an object of each kind."""
    return [None if rank == root else "something", *(object_of(seed, rank, number) for number in range(6))]


def assert_barrier_holds(
    rank: Rank, late: int, form: BarrierForm = "of devices", members: tuple[int, ...] = ()
) -> None:
    """Assert that no rank leaves a barrier before rank `late`, which comes last, has entered it.

    Rank `late` waits until all others are about to enter the barrier, watches for a while whether one of them leaves
    it, and only then enters. A right barrier never fails this check. A wrong one passes only if no other rank is
    scheduled meanwhile. All ranks must call this function, also those that are not `members`; `late` alone raises. Only
    gloo supports `monitored_barrier`. "asynchronous" is a barrier of devices with async_op, followed by a wait.
    """
    backend = "gloo" if form == "monitored" else None
    group = dist.new_group(list(members) or None, backend=backend) if members or backend else None
    devices = [rank.device.index]
    waits: dict[BarrierForm, Callable[[], Any]] = {
        "of devices": lambda: dist.barrier(group, device_ids=devices),
        "of the CPU": lambda: dist.barrier(group),
        "monitored": lambda: dist.monitored_barrier(group, wait_all_ranks=bool(late % 2)),
        "asynchronous": lambda: (work := dist.barrier(group, async_op=True, device_ids=devices)) and work.wait(),
    }
    wait = waits[form]
    # The store of a new group: all ranks share it, and no earlier call has used it.
    store = dist.distributed_c10d._world.pg_map[dist.new_group(backend="gloo")][1]
    if members and rank.index not in members:
        return
    departures, size = 0, len(members) or rank.size
    if rank.index != late:
        store.add("before", 1)
        wait()
        store.add("behind", 1)
    else:
        while store.add("before", 0) < size - 1:
            time.sleep(0.001)
        ends = time.monotonic() + _HELD
        while time.monotonic() < ends and not departures:
            departures = store.add("behind", 0)
            time.sleep(0.002)
        wait()
    if group is not None:
        # Wait by the store, not by the barrier, which may be broken: no rank may destroy the group while another makes
        # it.
        store.add("done", 1)
        while store.add("done", 0) < size:
            time.sleep(0.001)
        dist.destroy_process_group(group)
    suffix = f" in the group {list(members)}" if members else ""
    text = f"{departures} ranks left it before rank {late} had entered it"
    raise_findings([WrongResult(f"barrier {form}{suffix}", text)] if departures else [], 1, rank)


def assert_messages_of_all_ways_arrive(rank: Rank, drawn: Sequence[Message], seed: int) -> None:
    """Assert that messages arrive: in batches, blocking and asynchronous, of devices and of the CPU, and in a group."""
    between = partial(messages_between, rank.size)
    placed = [message.between_ranks(rank.size) for message in drawn]
    large = [Message(0, rank.size - 1, 0, "int8", (1 << 20) + 3, seed)]
    cases: list[tuple[Any, ...]] = [
        (placed, "batched", "device"),
        ([message for message in placed if message.dtype in REDUCED], "flying", "cpu"),
        (between(seed, "device", tags=False, own=True), "batched", "device"),
        (between(seed + 3, "device", tags=False, alike=True), "batched", "device"),
        (between(seed + 1, "device", tags=False), "blocking", "device"),
        (between(seed, "cpu", tags=True), "batched", "cpu"),
        (between(seed + 1, "cpu", tags=True), "blocking", "cpu"),
        (between(seed + 2, "cpu", alike=True), "flying", "cpu"),
        *((large, "blocking", "device"), (large, "flying", "cpu")),
    ]
    wanted = some_groups(rank, seed)[:1]
    with groups_of(rank, wanted) as groups:
        for members in wanted:
            for turn, (way, placement) in enumerate((("batched", "device"), ("flying", "cpu"), ("blocking", "device"))):
                inside = messages_between(len(members), seed, placement, tags=placement == "cpu")[turn::3]
                moved = [replace(sent, source=members[sent.source], target=members[sent.target]) for sent in inside]
                cases.append((moved, way, placement, members, groups[members]))
        run_all(partial(assert_messages_arrive, rank, *case) for case in cases)


def assert_messages_from_any_source_arrive(
    rank: Rank, target: int, tag: int, elements: Sequence[int], outside: int
) -> None:
    """Assert that `recv` without a source returns the sender: for three dtypes, and in a group.
    Ranks from `target` on receive, under tags from `tag` on; each dtype has a number of elements."""
    cases = [
        ((target + turn) % rank.size, tag + turn, dtype, count, ())
        for turn, (dtype, count) in enumerate(zip(("float32", "int64", "bfloat16"), elements, strict=True))
    ]
    groups = [(members[target % len(members)], 1, "float32", 9, members) for members in without(rank, outside)]
    run_all(partial(assert_any_source_tells_the_sender, rank, *case) for case in (*cases, *groups))


def assert_objects_travel_on_all_ways(rank: Rank, root: int, drawn: Sequence[object], seed: int) -> None:
    """Assert that objects travel over the CPU, over devices, and in a group: drawn ones, and some of each kind."""
    checks = [partial(assert_objects_travel, rank, root + turn, seed + turn) for turn in range(3)]
    checks.append(partial(assert_objects_travel, rank, root, seed, backend="nccl"))
    checks += [partial(assert_objects_travel, rank, root + 1, seed, members) for members in some_groups(rank, seed)[:1]]
    run_all((partial(assert_drawn_objects_travel, rank, root, drawn), *checks))


def assert_barriers_hold(rank: Rank, late: int, outside: int) -> None:
    """Assert that barriers of all kinds hold: with several ranks as the last, and in a group without `outside`."""
    forms: tuple[BarrierForm, ...] = ("of devices", "of the CPU", "monitored", "asynchronous")
    last = late % rank.size
    cases: list[tuple[int, BarrierForm, tuple[int, ...]]]
    cases = [(latecomer, forms[0], ()) for latecomer in sorted({0, rank.size - 1, last})]
    cases += [(last, form, ()) for form in forms[1:]]
    for members in without(rank, outside):
        cases += [(members[late % len(members)], form, members) for form in forms[:3]]
    run_all(partial(assert_barrier_holds, rank, *case) for case in cases)


def assert_stores_agree(rank: Rank, late: int) -> None:
    """Assert that ranks share values, counters and decisions: in the store of the process group, under two prefixes,
    and in a TCPStore if all ranks are on one host. The rank `late` is the last to set a value."""
    library: Any = dist  # whose __all__ lacks stores
    mine = library.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if rank.index == 0 else None
    known: list[Any] = [None] * rank.size
    dist.all_gather_object(known, (socket.gethostname(), mine and mine.port, uuid.uuid4().hex))
    _, port, token = known[0]
    # A private name: torch has no public one (torch/distributed/distributed_c10d.py, torch 2.14).
    of_group = dist.distributed_c10d._get_default_store()
    stores = {f"PrefixStore {name}": library.PrefixStore(f"{token}{name}", of_group) for name in "ab"}
    if len({host for host, *_ in known}) == 1:
        stores["TCPStore"] = mine or library.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    last = [*stores][-1]  # to wait in vain on; a FileStore, which the process group may have, looks once a second
    run_all(partial(_assert_store_agrees, rank, stores[name], name, late % rank.size, name == last) for name in stores)
    dist.barrier()  # before the server ends


def _assert_store_agrees(rank: Rank, store: Any, name: str, late: int, in_vain: bool) -> None:
    everybody, mine = range(rank.size), (rank.index,)
    values = [f"{name} of {each}\0é".encode() * (1 + each * 999) for each in everybody]
    counts: list[Any] = [None] * rank.size
    decisions: list[Any] = [None] * rank.size
    with Findings() as findings:
        store.set(f"value {rank.index}", values[rank.index])
        got = [store.get(f"value {each}") for each in everybody]
        findings.require(got == values, f"{name}: get returns other bytes than were set", ranks=mine)
        dist.all_gather_object(counts, [store.add("count", 1) for _ in range(5)])
        numbers, wanted = sorted(itertools.chain(*counts)), [*range(1, 5 * rank.size + 1)]
        findings.require(numbers == wanted, f"{name}: add counted {numbers}, not each of 1 to {wanted[-1]} once")
        dist.all_gather_object(decisions, store.compare_set("winner", "", f"rank {rank.index}").decode())
        findings.require(len({*decisions}) == 1, f"{name}: compare_set made several decisions: {decisions}")
        findings.require(not store.check(["last"]), f"{name}: check knows a key before it is set", ranks=mine)
        with contextlib.suppress(RuntimeError):
            if in_vain:
                store.wait(["winner", "last"], timedelta(milliseconds=50))
                findings.require(False, f"{name}: wait returned for a key before it is set", ranks=mine)
        dist.barrier()
        if rank.index == late:
            store.set("last", str(late))
        if not in_vain:
            dist.barrier()
        store.wait(["winner", "last"])
        text = store.get("last").decode()
        findings.require(text == str(late), f"{name}: the value of rank {late} is {text!r}", ranks=mine)
        dist.barrier()
        if rank.index == 0:
            findings.require(store.delete_key("last"), f"{name}: delete_key says that there was no key", ranks=mine)
        dist.barrier()
        findings.require(not store.check(["last"]), f"{name}: check knows a key that was deleted", ranks=mine)
