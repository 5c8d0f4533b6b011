"""Strategies of evidence: any record that a gate may have of a failure, mostly such as no right program
leaves."""

from __future__ import annotations

from collections import Counter

import torch
from hypothesis import strategies as st

from mgpu_check.diagnosis.evidence import Accepted, EpochSamples, Loader, Restored, UnfinishedCall
from mgpu_check.diagnosis.observations import (
    KINDS,
    Alternative,
    CallEvent,
    Division,
    Expected,
    Hypotheses,
    ObservedRun,
    Other,
    Relations,
    Result,
)
from mgpu_check.diagnosis.tensors import Tensors
from mgpu_check.gates.comparison.relations import relations_of
from mgpu_check.processes.collective_records import Entered
from mgpu_check.torch_hooks.collective_table import COLLECTIVES
from mgpu_check.torch_hooks.tensors import digest_of
from tests.gates.calls import NAMES, RESULTS, few, traces, values

__all__ = ["calls", "loaders", "restored", "tensors"]


@st.composite
def like(draw: st.DrawFn, right: torch.Tensor) -> torch.Tensor | None:
    """A possible tensor of a rank for the tensor `right` of one device; None if it has none."""
    how = draw(st.sampled_from(("same", "times", "other", "rows", "another", "nothing")))
    if how == "same":
        return right.clone()
    if how == "times":
        return (right.double() * draw(st.sampled_from((2.0, 0.5, 4.0, 1 / 3, -1.0)))).to(right.dtype)
    if how == "other":
        return right.double().add(draw(st.integers(1, 3))).to(right.dtype)
    if how == "rows":
        return right[: len(right) // 2] if right.dim() else right.reshape(1)
    return draw(values()) if how == "another" else None


@st.composite
def kept(draw: st.DrawFn, right: dict[Result, torch.Tensor]) -> dict[Result, torch.Tensor]:
    """Possible tensors of a rank for all tensors of one device: each changed by itself, or all times one number."""
    if draw(st.booleans()):
        factor = draw(st.sampled_from((1.0, 2.0, 0.5, 4.0)))
        return {name: (value.double() * factor).to(value.dtype) for name, value in right.items()}
    found = {name: draw(like(value)) for name, value in right.items()}
    return {name: value for name, value in found.items() if value is not None}


@st.composite
def stages(draw: st.DrawFn, results: dict[Result, torch.Tensor]) -> list[dict[Result, torch.Tensor]]:
    """The states after several steps of an optimizer."""
    of_model = {name: value for name, value in results.items() if name.kind in ("grads", "params")}
    return [draw(kept(of_model)) for _ in range(draw(st.integers(0, 3)))]


@st.composite
def ranks(draw: st.DrawFn, right: ObservedRun, size: int) -> list[ObservedRun]:
    """The states that ranks leave: mostly the same."""
    common = ObservedRun(values=draw(kept(right.values)), initial=right.initial)
    if draw(st.booleans()):
        return [draw(observations(common, draw(st.booleans()))) for _ in range(size)]
    return [draw(observations(common if draw(st.booleans()) else right)) for _ in range(size)]


@st.composite
def observations(draw: st.DrawFn, right: ObservedRun, equal: bool = False) -> ObservedRun:
    """The state that a rank leaves, for the state `right` of one device or another rank.

    Args:
        equal: the values are the same.
    """
    found = dict(right.values) if equal else draw(kept(right.values))
    if draw(st.integers(0, 4)) == 4:
        extra = draw(st.sampled_from(RESULTS))
        found.setdefault(extra, draw(values()))
    digests = {name: digest_of(value) for name, value in found.items()}
    if draw(st.integers(0, 6)) == 6:
        found = {}  # where values are many, ranks send checksums
    return ObservedRun(
        values=found,
        digests=digests,
        initial=right.initial if draw(st.booleans()) else {},
        others=draw(st.sampled_from([{}, {Result("returned", "name"): "'a'"}])),
        rng=draw(st.sampled_from("ab")),
        draws=draw(st.booleans()),
        optimizer_steps=draw(st.integers(0, 2)),
        optimizers=draw(st.integers(0, 2)),
        nonlinear=draw(st.booleans()),
        touched=draw(st.sets(st.sampled_from(["grads", "params", "buffers", "returned"]))),
        broadcast={name for name in found if name.kind == "buffers" and draw(st.booleans())},
        normalized=draw(st.sampled_from([[], ["bn"]])),
        snapshots=draw(stages(right.values)),
        stepped={
            name: (draw(st.sampled_from("xy")), draw(st.sampled_from("xy"))) for name in NAMES if draw(st.booleans())
        },
        built=[CallEvent("seed", "manual_seed", "model.py:1", {"seed": draw(st.integers(0, 1))})]
        if draw(st.booleans())
        else [],
    )


@st.composite
def expectations(draw: st.DrawFn, of: dict[Result, torch.Tensor] | None = None) -> Expected:
    """The results of one device.

    Args:
        of: what it gives in another case: mostly as many values.
    """
    if of is None:
        names = draw(st.lists(st.sampled_from(RESULTS), min_size=1, max_size=6, unique=True))
        results = {name: draw(values()) for name in names}
    else:
        results = {name: draw(values(tuple(value.shape))) for name, value in of.items()}
        results = results if draw(st.booleans()) else draw(kept(of))
    of_model = {name.of: value for name, value in results.items() if name.kind in ("params", "buffers")}
    initial = {name: draw(like(value)) for name, value in of_model.items()}
    single = ObservedRun(
        values=results,
        digests={name: digest_of(value) for name, value in results.items()},
        initial={name: value for name, value in initial.items() if value is not None},
        optimizer_steps=draw(st.integers(0, 2)),
        optimizers=draw(st.integers(0, 1)),
        draws=draw(st.booleans()),
    )
    exact = {name: value.double() for name, value in results.items() if value.is_floating_point()}
    snapshots = [
        {name: value.double() for name, value in stage.items() if value.is_floating_point()}
        for stage in draw(stages(results))
    ]
    return Expected(
        single,
        draw(st.none() | observations(single)),
        by_reference=draw(st.booleans()),
        exact=exact,
        tolerance={name: torch.full_like(value, 1e-6) for name, value in exact.items()},
        undetermined={name for name in exact if draw(st.integers(0, 9)) == 9},
        narrow=draw(st.sampled_from([(), ("bfloat16",)])),
        drawn=draw(st.sampled_from([(), ((3,),)])),
        snapshots=snapshots,
        allowances=[{name: torch.full_like(value, 1e-6) for name, value in stage.items()} for stage in snapshots],
    )


@st.composite
def hypotheses(draw: st.DrawFn, right: dict[Result, torch.Tensor], size: int, count: int | None = None) -> Hypotheses:
    divisions = []
    for number in range(draw(st.integers(0, 2)) if count is None else count):
        windows = number + 1 if draw(st.booleans()) else 1
        parts = [[draw(kept(right)) for _ in range(windows)] for _ in range(size)]
        counts = [1] * size if draw(st.booleans()) else draw(st.lists(few, min_size=size, max_size=size))
        along = draw(st.sampled_from((0, 0, 1)))
        divisions.append(Division("every 2nd sample", along, windows, parts, counts))
    kinds: tuple[Other, ...] = ("truncated", "padded", "first-shard-only", "first-block-only", "first-part-of-a-tensor")
    alternatives = [
        Alternative(kind, draw(kept(right)), draw(st.integers(0, 1)))
        for kind in draw(st.lists(st.sampled_from(kinds), max_size=2, unique=True))
    ]
    if draw(st.booleans()):
        alternatives.append(Alternative("biases-several-times", draw(kept(right)), 0, ("bias",)))
    return Hypotheses(divisions, alternatives, draw(st.booleans()))


@st.composite
def tensors(draw: st.DrawFn) -> Tensors:
    """All that a gate knows of a failure; relations are those that hold.

    Sometimes ranks hold what a hypothesis says, in this case and in those with other random numbers.
    """
    first = draw(cases(draw(st.sampled_from((1, 2, 2, 3, 4)))))
    of, divisions = first.expected.single.values, first.hypotheses.divisions
    first.further = [draw(cases(first.size, of, len(divisions))) for _ in range(draw(st.integers(0, 2)))]
    how = draw(st.sampled_from(("", "mean", "sum", "own", "max", "norm", "first")))
    if how and divisions:
        factor = draw(st.sampled_from((1.0, 1.0, 1 / first.size)))
        for case in (first, *first.further):
            _hold(case, how, factor)
    return first


def _hold(case: Tensors, how: str, factor: float) -> None:
    """Let ranks hold the results of parts, put together in one way."""
    for name in case.expected.exact:
        combined = [case.combined(division, how, factor, [name]) for division in case.hypotheses.divisions[:1]]
        for one, values_of_rank in zip(case.seen, *combined, strict=False):
            if name in values_of_rank:
                one.values[name] = values_of_rank[name].to(case.expected.single.values[name].dtype)
                one.digests[name] = digest_of(one.values[name])
    case.relations = relations_of(case.expected, case.seen, KINDS, None)


@st.composite
def elsewhere(draw: st.DrawFn, size: int, expected: Expected) -> Tensors:
    seen = [draw(observations(expected.single))]
    return Tensors(size, draw(st.integers(0, 9)), 1, expected, Relations(), seen, (), Hypotheses([], []))


@st.composite
def cases(
    draw: st.DrawFn, size: int, of: dict[Result, torch.Tensor] | None = None, divisions: int | None = None
) -> Tensors:
    """One case by itself, with the given number of divisions; a different one from the case of `of`."""
    expected = draw(expectations(of))
    seen = draw(ranks(expected.single, size))
    return Tensors(
        size,
        draw(st.integers(0, 5)),
        draw(st.integers(1, 2)),
        expected,
        relations_of(expected, seen, KINDS, None),
        seen,
        draw(traces(size)) if of is None else [],
        draw(hypotheses(expected.single.values, size, divisions)),
        wrong_alone=draw(st.booleans()),
        right_when_small=draw(st.none() | st.booleans()),
        elsewhere=draw(elsewhere(2 * size, expected)) if draw(st.booleans()) else None,
        shardwise=draw(st.booleans()),
        alone=(draw(traces(1)) or [None])[0],
    )


entered = st.builds(
    Entered,
    name=st.sampled_from(sorted(COLLECTIVES)),
    number=few,
    group_name=st.sampled_from(("", "group")),
    group=st.just(""),
    operand=st.sampled_from(("", "float32[3]", "float32[0]", "2x int64[]")),
    options=st.sampled_from(("", "sum")),
    compared=st.sampled_from(("", "a", "b")),
    file=st.sampled_from(("", "train.py")),
    line=few,
    state=st.sampled_from(("inside", "done", "pending", "waiting", "failed")),
)
texts = st.sampled_from(("", "must be contiguous", "Sizes of tensors must match\nbut do not", "stack in all_gather"))
calls = st.builds(
    UnfinishedCall,
    size=st.integers(1, 4),
    samples=st.integers(0, 9),
    told=texts,
    hung=texts,
    parted=st.dictionaries(st.integers(0, 3), entered, max_size=3),
    parting=texts,
    last=st.dictionaries(st.integers(0, 3), entered, max_size=4),
    some_finished=st.booleans(),
    raised=st.lists(st.tuples(texts, texts), max_size=2),
    aborted=st.lists(texts, max_size=2),
)

_ranks = st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(0, 3), max_size=3), max_size=3)
_entries = st.lists(st.sampled_from("abc"), unique=True)
restored = st.builds(
    Restored,
    seen=st.booleans(),
    on_some=_ranks,
    nowhere=_entries,
    of_rank_0=_ranks,
    numbers_of_rank_0=_ranks,
    parted=_ranks,
    right_on_rank_0=_ranks,
    at_the_end=_entries,
)

_counts = st.text("abcxy", max_size=6).map(Counter)
_epochs = st.integers(1, 4).flatmap(
    lambda size: st.builds(
        EpochSamples,
        expected=st.text("abc", max_size=6).map(Counter),
        counts=st.lists(_counts, min_size=size, max_size=size),
        largest=few,
        batches=st.lists(few, min_size=size, max_size=size),
        labels=st.just({"a": "row 0"}),
        workers=few,
        accepted=st.builds(Accepted, st.booleans(), st.booleans(), st.booleans()),
    )
)
loaders = st.builds(Loader, st.lists(_epochs, max_size=2), st.lists(st.integers(0, 3), unique=True), texts)

assert {name.kind for name in RESULTS} | {"rng"} == set(KINDS)
