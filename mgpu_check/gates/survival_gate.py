"""The gate for recovery: a training that loses ranks ends as if it had lost none, or as it declares."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from hypothesis import strategies as st

from mgpu_check.diagnosis.report import Report
from mgpu_check.errors import ScalingMismatch
from mgpu_check.gates.comparison.coverage import check_unjudged
from mgpu_check.gates.gate_arguments import (
    RanksFixture,
    check_count,
    definition_of,
    name_of,
    naming_unusable,
    world_sizes_of,
)
from mgpu_check.gates.run.bits import Results, difference_of_results
from mgpu_check.gates.run.survival import Ending, Event, Training, Worker, supervise
from mgpu_check.gates.search.scenario_search import smallest_failure

_GATE = "assert_survives"
_EVENTS = {"kill": "killed", "stop": "stopped for a second", "slow": "slow for 20 calls"}
_RESTARTS = ("all", "rank", "none")
_SAMPLES = {"once": "exactly once", "at least once": "at least once", "at most once": "at most once"}
_MOST_SHRINKS = 15
_MOST_EVENTS = 2


def assert_survives(
    ranks: RanksFixture,
    train: Callable[[Worker], Any],
    *,
    restart: str = "all",
    events: Iterable[str] = ("kill", "stop", "slow"),
    samples: str | None = None,
    unjudged: Mapping[str, str] | None = None,
    timeout: float = 20.0,
    max_examples: int = 20,
    world_sizes: Iterable[int] | None = None,
) -> None:
    """Assert that a training recovers from ranks that are killed, stopped or slowed.

    Workers run ``train(worker)``, each in a process of its own, with the environment of torchrun. The training makes
    its process group, keeps checkpoints in ``worker.directory``, and returns results, such as the state of model and
    optimizer, its schedule and a count of samples. The gate runs it without events first. Then it kills a rank at the
    first and the last call of each line, and Hypothesis draws what happens, to which rank, and at which of its calls:
    a collective, before or after an optimizer step, a `torch.save` (half of the file is written), an ``os.replace``.
    Afterwards:

    - all ranks end, and no rank waits for longer than `timeout`;
    - with `restart` "all" or "rank", each rank has the results of the run without events, bit for bit;
    - with "none", the ranks that are left have the same results, bit for bit;
    - `samples`, an integer tensor of that name among the results, counts how often each sample was trained. Add to it
      where the model is trained, and keep it in checkpoints.

    A failure shrinks to the fewest events and the earliest call.

    Args:
        ranks: the fixture, on a simulated node.
        train: the training. A `Worker` has `rank`, `size`, `attempt` (0 before restarts), `directory` and `device`.
        restart: what happens after a rank was killed. "all": all ranks start again, as under ``torchrun
            --max-restarts``. "rank": this rank starts again, and the others go on. "none": the others go on without it.
        events: some of "kill", "stop" (for a second) and "slow" (20 calls, each 0.05 s late).
        samples: "once", "at least once" or "at most once", if the results have `samples`.
        unjudged: results that may differ: a mapping from patterns of names to reasons.
        timeout: seconds without any call of any rank.
        max_examples: how many runs with events to make for each world size, half of them at most by line.
        world_sizes: world sizes to check; default 2 and ``ranks.size``.

    Raises:
        ScalingMismatch: the training does not recover. The message names the events, and what differs or waits.
        ValueError: an argument is wrong, the training fails without events, or two such runs differ.
    """
    if not callable(train):
        raise ValueError(f"{_GATE}: train={train!r:.80} is not a function; give one, as in train(worker)")
    kinds = (events,) if isinstance(events, str) else tuple(events)
    for argument, values, valid in (
        ("restart", (restart,), _RESTARTS),
        ("events", kinds or ("",), tuple(_EVENTS)),
        ("samples", () if samples is None else (samples,), tuple(_SAMPLES)),
    ):
        if wrong := [value for value in values if value not in valid]:
            raise ValueError(f"{_GATE}: {argument} has {wrong[0]!r}; choose from {', '.join(valid)}")
    if not isinstance(timeout, int | float) or not timeout > 0:
        raise ValueError(f"{_GATE}: timeout={timeout!r}; give seconds above 0")
    check_count(_GATE, "max_examples", max_examples)
    reasons = check_unjudged(_GATE, unjudged)
    sizes = world_sizes_of(ranks, sorted({2, ranks.size}) if world_sizes is None else world_sizes)
    for size in sizes:
        training = Training(train, size, restart, float(timeout))  # type: ignore[arg-type]  # checked above
        trials = _Trials(ranks, training, reasons, samples)
        failure = _of_kills(trials, max_examples // 2) if "kill" in kinds else None
        if failure is None:
            drawn = max(1, max_examples - trials.runs)
            failure = smallest_failure(trials, _plans(trials.calls, kinds), drawn, _MOST_SHRINKS)
        if failure is not None:
            report = Report(
                f"{name_of(train)} does not survive: {failure.problem}",
                {"world size": size, "restart": restart},
                known=[*failure.events, *failure.facts],
                place=definition_of(train),
            )
            raise ScalingMismatch(str(report), ranks=failure.ranks, site=report.site)
        if trials.missed:
            ranks._not_seen(_GATE, f"{trials.missed} drawn events: the rank made fewer calls than without events")


@dataclass(frozen=True)
class _Failure:
    problem: str
    events: tuple[str, ...]
    facts: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()


def _of_kills(trials: _Trials, lines: int) -> _Failure | None:
    """Return the first failure of kills at the first and the last call of each line, those of the fewest calls first.

    Draws alone would seldom strike a line of few calls, such as the one that saves.
    """
    of_line: dict[str, tuple[int, list[int]]] = {}
    for rank, names in trials.calls.items():
        of_line = {line: (rank, numbers) for line, numbers in _by_line(names).items()} | of_line
    for rank, numbers in sorted(of_line.values(), key=lambda entry: len(entry[1]))[:lines]:
        for call in dict.fromkeys((numbers[0], numbers[-1])):
            if (failure := trials.run((Event("kill", rank, call),))) is not None:
                earlier = (trials.run((Event("kill", rank, other),)) for other in numbers if other < call)
                return next((smaller for smaller in earlier if smaller is not None), failure)
    return None


def _by_line(names: Sequence[str]) -> dict[str, list[int]]:
    """Return the numbers of the calls of each line."""
    of_line: dict[str, list[int]] = {}
    for number, name in enumerate(names):
        of_line.setdefault(name, []).append(number)
    return of_line


def _plans(calls: Mapping[int, Sequence[str]], kinds: Sequence[str]) -> st.SearchStrategy[tuple[Event, ...]]:
    """Return plans of one or two events, which shrink to early ones. All lines that make calls are equally likely."""

    def call_of(rank: int) -> st.SearchStrategy[int]:
        of_line = _by_line(calls[rank])
        return st.sampled_from(list(of_line)).flatmap(lambda name: st.sampled_from(of_line[name]))

    @st.composite
    def event(draw: st.DrawFn) -> Event:
        rank = draw(st.sampled_from(sorted(rank for rank in calls if calls[rank])))
        kind: Any = draw(st.sampled_from(list(kinds)))
        return Event(kind, rank, draw(call_of(rank)))

    return st.lists(event(), min_size=1, max_size=_MOST_EVENTS, unique_by=lambda e: (e.rank, e.call)).map(tuple)


class _Trials:
    """Runs plans, and judges each run by the run without events."""

    def __init__(
        self, ranks: RanksFixture, training: Training, unjudged: Mapping[str, str], samples: str | None
    ) -> None:
        self._ranks, self._training, self._unjudged, self._samples = ranks, training, unjudged, samples
        self._judged: dict[tuple[Event, ...], _Failure | None] = {}
        self.missed = self.runs = 0  # events that did not happen; runs with events
        self._undisturbed, again = self._ended(()), self._ended(())
        self.calls = self._undisturbed.calls
        for ending in (self._undisturbed, again):
            if ending.problem:
                raise ValueError(f"{_GATE}: without any event {ending.problem}")
        if not any(self._undisturbed.results.values()):
            raise ValueError(f"{_GATE}: train(worker) returned None on all ranks; return what is to be compared")
        if other := self._other_results(again, range(training.size)):
            raise ValueError(
                f"{_GATE}: two runs without events have other results on rank {other[0]}: {other[1]}; seed what is "
                "drawn, or name it in unjudged"
            )
        if not any(self.calls.values()):
            raise ValueError(
                f"{_GATE}: train(worker) makes no collective, optimizer step or save for an event to strike"
            )
        if samples is not None and (text := self._wrong_samples(self._undisturbed)):
            raise ValueError(f"{_GATE}: without any event {text}")

    def knows(self, scenario: tuple[Event, ...]) -> bool:
        return scenario in self._judged

    def run(self, scenario: tuple[Event, ...]) -> _Failure | None:
        if scenario not in self._judged:
            self._judged[scenario] = self._judge(scenario, self._ended(scenario))
        return self._judged[scenario]

    def _ended(self, events: tuple[Event, ...]) -> Ending:
        limit = 60.0 + 10 * self._training.timeout
        with naming_unusable(_GATE):
            return self._ranks.run(supervise, self._training, events, size=1, timeout=limit)[0]

    def _judge(self, events: tuple[Event, ...], ending: Ending) -> _Failure | None:
        self.runs += 1
        self.missed += sum(event.call >= len(ending.calls[event.rank]) for event in events)
        failed = functools.partial(_Failure, events=tuple(map(self._described, events)))
        if ending.problem:
            return failed(ending.problem, facts=tuple(ending.facts), ranks=ending.ranks)
        killed = {event.rank for event in events if event.kind == "kill"}
        left = [r for r in range(self._training.size) if self._training.restart != "none" or r not in killed]
        if missing := [rank for rank in left if rank not in ending.results]:
            return failed(f"rank {missing[0]} returned nothing", ranks=tuple(missing))
        other = self._other_results(ending, left)
        if other is not None:
            rank, text = other
            than = "than rank " + str(left[0]) if self._training.restart == "none" else "than without events"
            return failed(f"rank {rank} has other results {than}: {text}", ranks=(rank,))
        wrong = self._wrong_samples(ending)
        return failed(wrong, ranks=tuple(left)) if wrong else None

    def _described(self, event: Event) -> str:
        calls = self.calls[event.rank]
        name = calls[event.call] if event.call < len(calls) else "a call"
        return f"rank {event.rank} is {_EVENTS[event.kind]} at {name}, its call {event.call + 1} of {len(calls)}"

    def _other_results(self, ending: Ending, left: Sequence[int]) -> tuple[int, str] | None:
        """Return the first rank with other results, and how they differ: first value, second value."""
        for rank in left:
            alone = self._training.restart == "none" and ending is not self._undisturbed
            results = ending.results[rank]
            expected = ending.results[left[0]] if alone else self._undisturbed.results[rank]
            if (text := difference_of_results(self._judged_of(expected), self._judged_of(results))) is not None:
                return rank, text
        return None

    def _judged_of(self, results: Results) -> Results:
        judged = (name for name in results if not any(fnmatchcase(name, pattern) for pattern in self._unjudged))
        return {name: results[name] for name in judged}

    def _wrong_samples(self, ending: Ending) -> str:
        """Return how the counts of samples are wrong; "" if they are as declared."""
        if self._samples is None:
            return ""
        for rank, results in sorted(ending.results.items()):
            if "samples" not in results:
                return f"rank {rank} returned no 'samples', the counts of trained samples"
            counts = results["samples"].long().flatten()
            wrong = {
                "once": counts != 1,
                "at least once": counts < 1,
                "at most once": counts > 1,
            }[self._samples]
            if bool(wrong.any()):
                sample = int(wrong.nonzero()[0])
                return (
                    f"{int(wrong.sum())} of {len(counts)} samples are not trained {_SAMPLES[self._samples]} on rank "
                    f"{rank}: sample {sample} is trained {int(counts[sample])} times"
                )
        return ""
