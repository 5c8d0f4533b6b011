"""Keep ranks in lockstep, from the pytest process: pause them after each part of a call, resume them once all have
made the same calls in it, and check that every tensor that a rank sent to another rank was received there.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from mgpu_check.engine.failures import Who, all_returned, disagreement, last_collectives, raised_at
from mgpu_check.engine.process import Process
from mgpu_check.errors import RankFailure
from mgpu_check.processes.channel import (
    ANY,
    COLLECTIVE,
    MANY,
    Group,
    Paused,
    PeerTransfers,
    RankRequest,
    TensorRun,
    frame,
)
from mgpu_check.processes.collective_records import Record, Uneven, ahead, deadlocked, parting, relative, uneven
from mgpu_check.processes.rank_lists import few, grouped, named

_MOST_TOLD = 4  # lines of a report: more rarely help


@dataclass(frozen=True)
class Unmatched:
    """One transfer that sender and receiver recorded differently."""

    # sender, receiver: ranks; the sender of a receive from any source is `ANY`
    sender: int
    receiver: int
    tag: int
    # sent, received: the send and the receive; None if that side has no such operation
    sent: TensorRun | None
    received: TensorRun | None

    def text(self, who: Who) -> str:
        """Describe it: "rank 0 has sent float32[4] to rank 1 in send (a.py:7), and rank 1 has not received it"."""
        tag = f" with tag {self.tag}" if self.tag not in (0, COLLECTIVE) else ""
        receiver = who([self.receiver])
        if self.sent is None:
            sender, unsent = "any rank", "none has sent it"
            if self.sender != ANY:
                sender = who([self.sender])
                unsent = f"{sender} has not sent it"
            begun = f"has begun to receive {_shown(self.received)} from {sender}{tag} in {_site(self.received)}"
            return f"{who.full([self.receiver])} {begun}, and {unsent}"
        sent = f"{who.full([self.sender])} has sent {_shown(self.sent)} to {receiver}{tag} in {_site(self.sent)}"
        if self.received is None:
            return f"{sent}, and {receiver} has not received it"
        return f"{sent}, where {receiver} has received {_shown(self.received)} in {_site(self.received)}"


def _shown(run: TensorRun | None) -> str:
    return "nothing" if run is None else "a tensor" if run.content == MANY else run.content


def _site(run: TensorRun | None) -> str:
    return "" if run is None else f"{run.name} ({relative(run.file)}:{run.line})"


def unmatched(flows: Mapping[int, Sequence[PeerTransfers]]) -> list[Unmatched]:
    """Return the first difference for each pair of ranks, group and tag."""
    sends: dict[tuple[Group, int, int, int], Sequence[TensorRun]] = {}  # Keys: group, tag, sender, receiver.
    receives: dict[tuple[Group, int, int, int], Sequence[TensorRun]] = {}
    for rank, transfers in flows.items():
        for flow in transfers:
            if flow.sent:
                sends[flow.group, flow.tag, rank, flow.peer] = flow.runs
            else:
                receives[flow.group, flow.tag, flow.peer, rank] = flow.runs
    differences = []
    for group, tag, receiver in {(g, t, r) for g, t, s, r in receives if s == ANY}:
        differences += _from_any(sends, receives, group, tag, receiver)
    for key in sorted(sends.keys() | receives.keys()):
        _, tag, sender, receiver = key
        if difference := _difference(sends.get(key, ()), receives.get(key, ())):
            differences.append(Unmatched(sender, receiver, tag, *difference))
    return differences


def _from_any(
    sends: dict[tuple[Group, int, int, int], Sequence[TensorRun]],
    receives: dict[tuple[Group, int, int, int], Sequence[TensorRun]],
    group: Group,
    tag: int,
    receiver: int,
) -> list[Unmatched]:
    """Return the differences for a rank that receives from any source, and remove its transfers from both sides."""
    received = [receives.pop((group, tag, sender, receiver), ()) for sender in (*group.ranks, ANY)]
    sent = [(sender, run) for sender in group.ranks for run in sends.pop((group, tag, sender, receiver), ())]
    every = (*(run for runs in received for run in runs), *(run for _, run in sent))
    only_counts = any(run.content == MANY for run in every)

    def kind(run: TensorRun) -> str:
        return MANY if only_counts else run.content  # if one side recorded only a count, only counts can be compared

    unpaired: Counter[str] = Counter()
    for run in (run for runs in received for run in runs):
        unpaired[kind(run)] += run.count
    differences = []
    for sender, run in sent:
        unpaired[kind(run)] -= run.count
        if unpaired[kind(run)] < 0:
            differences.append(Unmatched(sender, receiver, tag, run, None))
            unpaired[kind(run)] = 0
    for runs in received:
        differences += [Unmatched(ANY, receiver, tag, None, run) for run in runs if unpaired.pop(kind(run), 0) > 0]
    return differences


def _difference(
    sends: Sequence[TensorRun], receives: Sequence[TensorRun]
) -> tuple[TensorRun | None, TensorRun | None] | None:
    """Return the first two tensors that differ, None on a side that has ended; None if the sequences are equal."""
    ours = [(run.count, run) for run in reversed(sends)]
    theirs = [(run.count, run) for run in reversed(receives)]
    while ours and theirs:
        (count, sent), (as_many, received) = ours.pop(), theirs.pop()
        if sent.content != received.content and MANY not in (sent.content, received.content):
            return sent, received
        if count > as_many:
            ours.append((count - as_many, sent))
        elif as_many > count:
            theirs.append((as_many - count, received))
    if ours:
        return ours[-1][1], None
    return (None, theirs[-1][1]) if theirs else None


def imbalance(differences: Sequence[Unmatched], who: Who) -> RankFailure:
    lines = [difference.text(who) for difference in differences[:_MOST_TOLD]]
    if len(differences) > _MOST_TOLD:
        lines.append(f"and {len(differences) - _MOST_TOLD} more such pairs")
    in_collectives = all(difference.tag == COLLECTIVE for difference in differences)
    undefined = "the results of these collectives are undefined"
    lines.append(
        f"all ranks returned: {undefined if in_collectives else 'a later transfer could pair with what is left'}"
    )
    odd = set.intersection(*({difference.sender, difference.receiver} for difference in differences))
    involved = {rank for difference in differences for rank in (difference.sender, difference.receiver)} - {ANY}
    ranks = sorted(odd - {ANY} if len(odd) == 1 and len(differences) > 1 else involved) or sorted(involved)
    origin = next((run for run in (differences[0].sent, differences[0].received) if run is not None), None)
    error = RankFailure("\n".join(lines), ranks=ranks)
    return error if origin is None else raised_at(error, origin.file, origin.line, None)


CROSSED = 1.0
"""Seconds between two reads of the ranks' records while no rank is paused. Equal records mean that ranks never meet."""
LOOK = 0.2
"""Seconds between two reads of the running ranks' records. A rank that enters nothing in between may be stuck."""

_SHOWN = 3  # names in a line of the report

_RESUME = frame(RankRequest.RESUME)


class Pauses:
    """The pauses of one call.
    `World.finish` makes one for each call, and `WorldProcesses._collect` hands it each `Paused` that arrives. It
    resumes the ranks when all have paused and agree. `look` finds ranks that can never meet."""

    def __init__(self, processes: Mapping[int, Process], who: Who) -> None:
        self.failure: RankFailure | None = None  # the error that keeps ranks from resuming; None until one is found
        self.crossed = False  # ranks wait in vain, for each other or for ranks that have finished
        self._processes, self._who = processes, who
        self._paused: dict[int, Paused] = {}
        self._seen: dict[int, Record] = {}

    def __bool__(self) -> bool:
        return bool(self._paused)

    def done(self, rank: int) -> str | None:
        """Return the part of the call that a paused rank has done, such as "step 1"; None if it is not paused."""
        return self._paused[rank].done if rank in self._paused else None

    def come(self, rank: int, message: Paused) -> None:
        self._paused[rank] = message

    def settle(self, waiting: Collection[int], failed: bool) -> bool:
        """Resume all ranks once all are paused and agree; return False if the paused ranks can never resume.
        `waiting`: ranks whose answer to the call is still to come. `failed`: whether a rank has failed, so that the
        others wait in vain."""
        if not self._paused.keys() >= set(waiting):
            return True
        if failed:
            return False
        if len(self._paused) == len(self._processes):
            self.failure = self._difference()
        if self.failure is None:
            for rank in self._paused:
                with contextlib.suppress(OSError):  # it has ended, which the end of its connection shows
                    self._processes[rank].connection.send(_RESUME)
            self._paused.clear()
            self._seen.clear()
        return self.failure is None

    def look(self, waiting: Collection[int]) -> bool:
        before, self._seen = self._seen, {}
        for rank in waiting:
            process = self._processes[rank]
            # While no rank pauses, a look is not worth a message to another host, which may not answer.
            if rank not in self._paused and (self._paused or process.on_this_host):
                self._seen[rank] = process.record()
        still = {rank: record for rank, record in self._seen.items() if before.get(rank) == record}
        parted = parting(still) or {}  # of ranks that wait in different collectives of one group, so for each other
        self.crossed = bool(parted) and all(still[rank].current == entered for rank, entered in parted.items())
        self.crossed = self.crossed or self._are_deadlocked(still, waiting)
        if self.crossed:
            return False
        if not self._paused or not still:
            return True
        deviation = ahead(self._counts(), still, self._records(), len(self._processes), self._described())
        if deviation is not None:
            self.failure = self._uneven(deviation)
        return deviation is None

    def _are_deadlocked(self, still: Mapping[int, Record], waiting: Collection[int]) -> bool:
        """Return whether no rank moves, and some of them wait for operations that no rank will begin."""
        moving = [self._processes[rank] for rank in waiting if rank not in self._paused]
        if len(still) < len(moving) or any(process.runnable() for process in moving):
            return False
        others = {rank: process for rank, process in self._processes.items() if rank not in waiting}
        finished = {rank: process.record() for rank, process in others.items() if process.on_this_host}
        return bool(deadlocked({**still, **finished}, finished, len(self._processes)))

    def _difference(self) -> RankFailure | None:
        """Return the error if ranks that have done the same part differ in their calls; None if they agree."""
        messages = list(self._paused.values())
        reference = dataclasses.replace(messages[0], flows=())
        if all(message == reference for message in messages) and all(
            len(group.ranks) == len(messages) for group, _, _ in reference.agreement
        ):
            return None  # the usual case, kept cheap
        deviation = uneven(self._counts(), self._records(), self._described())
        if deviation is not None:
            return self._uneven(deviation)
        checks: dict[Group, set[int]] = {}
        for message in messages:
            for group, _, check in message.agreement:
                checks.setdefault(group, set()).add(check)
        if any(len(of_group) > 1 for of_group in checks.values()):
            return disagreement(self._who, self._records())
        last = all(message.last for message in messages)
        differences = [
            difference
            for difference in unmatched({rank: message.flows for rank, message in self._paused.items()})
            if last or difference.tag == COLLECTIVE  # the next step may receive a message of this one
        ]
        if not differences:
            return self._hidden() or self._part_held()
        error = imbalance(differences, self._who)
        # In a collective, only the sizes differ.
        if not any(difference.tag == COLLECTIVE for difference in differences):
            error.account = self._error(str(error).splitlines(), self._records(), error.ranks).account
        return error

    def _hidden(self) -> RankFailure | None:
        """Return the error if the backends counted different numbers of operations, those that C++ called included."""
        numbers: dict[Group, dict[int, int]] = {}
        for rank, message in self._paused.items():
            for group, number in message.operations:
                numbers.setdefault(group, {})[rank] = number
        for group, of_group in numbers.items():
            if len(of_group) == len(group.ranks) and len(set(of_group.values())) > 1:
                described = self._described().get(group.name, "") if group.name else ""
                return self._uneven(Uneven(group, described, of_group, {}), "operations (including calls from C++)")
        return None

    def _part_held(self) -> RankFailure | None:
        """Return the error if only some of the ranks that should hold a tensor have a part of it."""
        paused = sorted(self._paused.items())
        holders = dict(grouped((tensor, rank) for rank, message in paused for tensor in message.slices))
        without = {tensor: tuple(sorted(set(tensor[1]) - set(ranks))) for tensor, ranks in holders.items()}
        done = next(iter(self._paused.values())).done
        lines = [
            f"{few(tensor_names, _SHOWN)}: of {named(among)} that hold a part each, {named(ranks)} had none by the "
            f"end of {done}"
            for (among, ranks), tensor_names in grouped(
                ((among, ranks), name) for (name, among), ranks in without.items() if ranks
            )
        ]
        if not lines:
            return None
        missing = sorted({rank for ranks in without.values() for rank in ranks})
        return self._error(lines, self._records(), missing)

    def _uneven(self, deviation: Uneven, noun: str = "") -> RankFailure:
        records = self._records()
        done = next(iter(self._paused.values())).done
        lines = [deviation.told(f"by the end of {done}", noun), *last_collectives(records, self._who)]
        error = self._error(lines, records, sorted(deviation.unmatched or deviation.missing))
        origin = next(iter(deviation.unmatched.values()), None)
        return error if origin is None else raised_at(error, origin.file, origin.line, None)

    def _error(self, lines: Sequence[str], records: Mapping[int, Record], ranks: Iterable[int]) -> RankFailure:
        return all_returned(lines, self._who, records, ranks, unmatched=lines[0])

    def _counts(self) -> dict[int, dict[Group, int]]:
        return {rank: {group: count for group, count, _ in message.agreement} for rank, message in self._paused.items()}

    def _records(self) -> dict[int, Record]:
        return {rank: process.record() for rank, process in self._processes.items()}

    def _described(self) -> dict[str, str]:
        return {name: text for message in self._paused.values() for name, text in message.described}
