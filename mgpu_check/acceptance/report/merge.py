"""Join the accounts of many nodes into one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from mgpu_check.acceptance.account import Account, Accusation, Gpu, Kind, Verdict
from mgpu_check.acceptance.report.view import host_name
from mgpu_check.devices.observations import Part, Subject
from mgpu_check.option_values import LEVELS

__all__ = ["merge"]

_WORST: tuple[Kind, ...] = ("REJECTED", "INCONCLUSIVE", "ACCEPTED")


@dataclass(frozen=True)
class _Numbers:
    """The numbers of one account's hosts and GPUs, and the index of its first observation, in the joined account."""

    hosts: Mapping[int, int]
    gpus: Mapping[int, int]
    first: int

    @property
    def same(self) -> bool:
        return all(old == new for numbers in (self.hosts, self.gpus) for old, new in numbers.items())


def merge(named: Mapping[str, Account], command: str) -> Account:
    """Join accounts into one with all hosts and GPUs, renumbered in the order given. Its verdict is the worst of theirs.

    Times count from the start of each node's own run.

    Args:
        named: the accounts by file name, which error messages use.
        command: command line of the merge.

    Raises:
        ValueError: a real GPU is in two accounts, or some accounts are simulated and others are not.
    """
    accounts = list(named.values())
    _refuse_what_does_not_fit(named)
    numbers = list(_numbered(accounts))
    joined = [_renumbered(account, its) for account, its in zip(accounts, numbers, strict=True)]
    partial = {account.verdict.partial for account in accounts}
    verdict = Verdict(
        kind=worst(account.verdict.kind for account in accounts),
        accusations=tuple(one for account in joined for one in account.verdict.accusations),
        unknown=tuple(one for account in joined for one in _unknown(account, len(partial) > 1)),
        unexplained=tuple(one for account in joined for one in account.verdict.unexplained),
        partial=partial.pop() if len(partial) == 1 else (),
    )
    return Account(
        started=min(account.started for account in accounts),
        seconds=max(account.seconds for account in accounts),
        command=command,
        level=min((account.level for account in accounts), key=lambda level: LEVELS.index(level)),
        verdict=verdict,
        verdicts={host: one for account in joined for host, one in account.verdicts.items()},
        hosts=tuple(host for account in joined for host in account.hosts),
        gpus=tuple(gpu for account in joined for gpu in account.gpus),
        checks=tuple(run for account in joined for run in account.checks),
        observations=tuple(entry for account in joined for entry in account.observations),
        measurements=tuple(one for account in joined for one in account.measurements),
        samples=tuple(sample for account in joined for sample in account.samples),
        simulated=accounts[0].simulated,
        planted=tuple(f"{_name(account)}: {one}" for account in accounts for one in account.planted),
        versions={_name(account): account.versions for account in accounts if account.versions},
    )


def worst(kinds: Iterable[Kind]) -> Kind:
    """Return the worst of the verdicts: REJECTED, then INCONCLUSIVE, then ACCEPTED."""
    return min(kinds, key=_WORST.index)


def _unknown(account: Account, with_partial: bool) -> list[str]:
    """Return the lines on checks that could not be done on a node. With `with_partial`, also list a partial selection."""
    partial = account.verdict.partial if with_partial else ()
    return [*account.verdict.unknown, *([f"{_name(account)}: only {', '.join(partial)} ran"] if partial else [])]


def _name(account: Account) -> str:
    return ", ".join(host_name(account, host.number) for host in account.hosts) or "a node"


def _refuse_what_does_not_fit(named: Mapping[str, Account]) -> None:
    simulated = {name: bool(account.simulated) for name, account in named.items()}
    if len(set(simulated.values())) > 1:
        one = next(name for name, value in simulated.items() if value)
        other = next(name for name, value in simulated.items() if not value)
        raise ValueError(
            f"{one} is of a SIMULATED node, and {other} is not; merge only reports of real nodes, or only of simulated ones"
        )
    seen: dict[str, str] = {}
    for name, account in named.items():
        for gpu in account.gpus if not account.simulated else ():
            if gpu.uuid and gpu.uuid in seen:
                raise ValueError(
                    f"GPU {gpu.uuid} is in {seen[gpu.uuid]} and in {name}; give the latest report of each node"
                )
            seen[gpu.uuid] = name


def _numbered(accounts: Sequence[Account]) -> Iterable[_Numbers]:
    hosts = gpus = observations = 0
    for account in accounts:
        yield _Numbers(
            {host.number: hosts + place for place, host in enumerate(account.hosts)},
            {gpu.number: gpus + place for place, gpu in enumerate(account.gpus)},
            observations,
        )
        hosts += len(account.hosts)
        gpus += len(account.gpus)
        observations += len(account.observations)


def _renumbered(account: Account, its: _Numbers) -> Account:
    # Lines of text keep the numbers of the node's own run, so a prefix says whose numbers they are.
    prefix = "" if its.same else f"by the numbers of {_name(account)}: "
    only = next(iter(its.hosts.values())) if len(its.hosts) == 1 else None

    def verdict(one: Verdict) -> Verdict:
        return replace(
            one,
            accusations=tuple(_accusation(accusation, its, prefix) for accusation in one.accusations),
            unknown=tuple(f"{_name(account)}: {line}" for line in one.unknown),
            unexplained=tuple(its.first + number for number in one.unexplained),
        )

    return replace(
        account,
        verdict=verdict(account.verdict),
        verdicts={its.hosts[host]: verdict(one) for host, one in account.verdicts.items() if host in its.hosts},
        hosts=tuple(replace(host, number=its.hosts[host.number]) for host in account.hosts),
        gpus=tuple(_gpu(gpu, its) for gpu in account.gpus),
        checks=tuple(
            replace(run, host=only if run.host is None else its.hosts.get(run.host)) for run in account.checks
        ),
        observations=tuple(
            replace(
                entry,
                subject=_subject(entry.subject, its),
                suspects=tuple(its.gpus.get(number, number) for number in entry.suspects),
            )
            for entry in account.observations
        ),
        measurements=tuple(replace(one, subject=_subject(one.subject, its)) for one in account.measurements),
        samples=tuple(
            replace(sample, gpu=its.gpus[sample.gpu]) for sample in account.samples if sample.gpu in its.gpus
        ),
    )


def _gpu(gpu: Gpu, its: _Numbers) -> Gpu:
    return replace(gpu, number=its.gpus[gpu.number], host=its.hosts.get(gpu.host, gpu.host))


def _members(kind: str, members: tuple[int, ...], its: _Numbers) -> tuple[int, ...]:
    numbers = its.hosts if kind == "host" else its.gpus
    return tuple(numbers.get(member, member) for member in members)


def _subject(subject: Subject, its: _Numbers) -> Subject:
    return Subject(subject.kind, _members(subject.kind, subject.members, its))


def _accusation(one: Accusation, its: _Numbers, prefix: str) -> Accusation:
    return replace(
        one,
        part=Part(one.part.kind, _members(one.part.kind, one.part.members, its)),
        because=tuple(f"{prefix}{line}" for line in one.because),
        observations=tuple(its.first + number for number in one.observations),
        arm=f"{prefix}{one.arm}" if one.arm else "",
    )
