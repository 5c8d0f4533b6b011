"""Check, in the pytest process, that every tensor that a rank sent to another rank was received there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mgpu_check.engine.failures import Who, raised_at
from mgpu_check.errors import RankFailure
from mgpu_check.processes.protocol import ANY, COLLECTIVE, MANY, Group, PeerTransfers, TensorRun
from mgpu_check.processes.record import relative

_MOST_TOLD = 4  # lines of a report: more rarely help


@dataclass(frozen=True)
class Unmatched:
    """One transfer that sender and receiver recorded differently.

    Attributes:
        sender, receiver: ranks; the sender of a receive from any source is `ANY`.
        given, taken: the send and the receive; None if that side has no such operation.
    """

    sender: int
    receiver: int
    tag: int
    given: TensorRun | None
    taken: TensorRun | None

    def text(self, who: Who) -> str:
        """Describe the transfer: "rank 0 has sent float32[4] to rank 1 in send (a.py:7), and rank 1 has not received
        it"."""
        tag = f" with tag {self.tag}" if self.tag not in (0, COLLECTIVE) else ""
        receiver = who([self.receiver])
        if self.given is None:
            sender, unsent = "any rank", "none has sent it"
            if self.sender != ANY:
                sender = who([self.sender])
                unsent = f"{sender} has not sent it"
            begun = f"has begun to receive {_shown(self.taken)} from {sender}{tag} in {_site(self.taken)}"
            return f"{who.full([self.receiver])} {begun}, and {unsent}"
        given = f"{who.full([self.sender])} has sent {_shown(self.given)} to {receiver}{tag} in {_site(self.given)}"
        if self.taken is None:
            return f"{given}, and {receiver} has not received it"
        return f"{given}, where {receiver} has received {_shown(self.taken)} in {_site(self.taken)}"


def _shown(run: TensorRun | None) -> str:
    return "nothing" if run is None else "a tensor" if run.what == MANY else run.what


def _site(run: TensorRun | None) -> str:
    return "" if run is None else f"{run.name} ({relative(run.file)}:{run.line})"


def unmatched(flows: Mapping[int, Sequence[PeerTransfers]]) -> list[Unmatched]:
    """Return the first difference for each pair of ranks, group and tag."""
    # Keys: group, tag, sender, receiver.
    given: dict[tuple[Group, int, int, int], Sequence[TensorRun]] = {}
    taken: dict[tuple[Group, int, int, int], Sequence[TensorRun]] = {}
    for rank, some in flows.items():
        for flow in some:
            if flow.given:
                given[flow.group, flow.tag, rank, flow.peer] = flow.runs
            else:
                taken[flow.group, flow.tag, flow.peer, rank] = flow.runs
    found = []
    for group, tag, receiver in {(g, t, r) for g, t, s, r in taken if s == ANY}:
        found += _from_any(given, taken, group, tag, receiver)
    for key in sorted(given.keys() | taken.keys()):
        _, tag, sender, receiver = key
        if difference := _difference(given.get(key, ()), taken.get(key, ())):
            found.append(Unmatched(sender, receiver, tag, *difference))
    return found


def _from_any(
    given: dict[tuple[Group, int, int, int], Sequence[TensorRun]],
    taken: dict[tuple[Group, int, int, int], Sequence[TensorRun]],
    group: Group,
    tag: int,
    receiver: int,
) -> list[Unmatched]:
    """Return the differences for a rank that receives from any source, and remove its transfers from both sides."""
    received = [taken.pop((group, tag, sender, receiver), ()) for sender in (*group.ranks, ANY)]
    sent = [(sender, run) for sender in group.ranks for run in given.pop((group, tag, sender, receiver), ())]
    whole = any(run.what == MANY for run in (*(run for runs in received for run in runs), *(run for _, run in sent)))

    def kind(run: TensorRun) -> str:
        return MANY if whole else run.what  # if one side recorded only a count, only counts can be compared

    left: Counter[str] = Counter()
    for run in (run for runs in received for run in runs):
        left[kind(run)] += run.count
    found = []
    for sender, run in sent:
        left[kind(run)] -= run.count
        if left[kind(run)] < 0:
            found.append(Unmatched(sender, receiver, tag, run, None))
            left[kind(run)] = 0
    for runs in received:
        found += [Unmatched(ANY, receiver, tag, None, run) for run in runs if left.pop(kind(run), 0) > 0]
    return found


def _difference(
    given: Sequence[TensorRun], taken: Sequence[TensorRun]
) -> tuple[TensorRun | None, TensorRun | None] | None:
    """Return the first two tensors that differ, None on a side that has ended; None if the sequences are equal."""
    ours = [(run.count, run) for run in reversed(given)]
    theirs = [(run.count, run) for run in reversed(taken)]
    while ours and theirs:
        (count, one), (as_many, other) = ours.pop(), theirs.pop()
        if one.what != other.what and MANY not in (one.what, other.what):
            return one, other
        if count > as_many:
            ours.append((count - as_many, one))
        elif as_many > count:
            theirs.append((as_many - count, other))
    if ours:
        return ours[-1][1], None
    return (None, theirs[-1][1]) if theirs else None


def imbalance(found: Sequence[Unmatched], who: Who) -> RankFailure:
    lines = [one.text(who) for one in found[:_MOST_TOLD]]
    if len(found) > _MOST_TOLD:
        lines.append(f"and {len(found) - _MOST_TOLD} more such pairs")
    in_collectives = all(one.tag == COLLECTIVE for one in found)
    undefined = "the results of these collectives are undefined"
    lines.append(
        f"all ranks returned: {undefined if in_collectives else 'a later transfer could pair with what is left'}"
    )
    odd = set.intersection(*({one.sender, one.receiver} for one in found))
    involved = {rank for one in found for rank in (one.sender, one.receiver)} - {ANY}
    ranks = sorted(odd - {ANY} if len(odd) == 1 and len(found) > 1 else involved) or sorted(involved)
    first = next((run for run in (found[0].given, found[0].taken) if run is not None), None)
    error = RankFailure("\n".join(lines), ranks=ranks)
    return error if first is None else raised_at(error, first.file, first.line, None)
