"""States of optimizers and buffers in traces: how they are put together, and judged."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mgpu_check.compare.trace import State, Trace, named_state
from tests.compare.test_assembly import GRADIENT, ONE, RIGHT, WEIGHT, part, ranks_of, summary, trace, trained, verdict

STEPS = torch.ones(())


def keeping(made: Trace, **states) -> Trace:
    """Give the trace of a rank states of its only parameter, by key: values, and whether they are those of its
    slice."""
    made = replace(made, states={}, steps=[replace(made.steps[0], states={})])
    (parameter,) = made.parameters.values()
    for key, (value, cut) in states.items():
        name = named_state(key, parameter.name)
        held = None if cut is None else replace(cut.held, whole=named_state(key, cut.held.whole))
        shape = tuple(value.shape) if cut is None else tuple(cut.shape)
        made.states[name] = State(name, shape, "float32", "cpu", 0, held=held, of=parameter.name, key=key)
        made.steps[0].states[name] = summary(value, cut)
    return made


def with_buffer(made: Trace, name: str, value: torch.Tensor, constant: bool = False) -> Trace:
    full = named_state("", name)
    made.states[full] = State(full, tuple(value.shape), "float32", "cpu", 9, of=name, constant=constant)
    made.steps[0].states[full] = summary(value)
    return made


def shard(rank: int, scale: float = 1.0, steps: torch.Tensor = STEPS) -> Trace:
    rows = range(4) if rank % 2 == 0 else range(4, 8)
    cut, *_ = part(rows)
    moments = scale * GRADIENT[torch.tensor(list(rows))]
    return keeping(trace(rank, 2, {"shard": part(rows)}), exp_avg=(moments, cut), step=(steps, None))


KEEPING = keeping(ONE, exp_avg=(GRADIENT, None), step=(STEPS, None))


def test_states_of_slices_are_judged_as_a_whole():
    found = verdict(KEEPING, [shard(0), shard(1)])
    assert (found.kind, found.not_compared) == ("equal", {})
    found = verdict(KEEPING, [shard(0), shard(1, scale=2.0)])
    assert (found.kind, found.parameter, found.tensor) == ("differs", "exp_avg of net.weight", "state")
    assert (found.ranks, found.report.mistakes) == ((1,), ("optimizer-differs",))
    found = verdict(KEEPING, [shard(0), shard(1, steps=2 * STEPS)])
    assert (found.kind, found.parameter, found.ranks) == ("differs", "step of net.weight", (1,))


@pytest.mark.parametrize(
    ("states", "reason"),
    [
        ({}, "no rank keeps it"),
        ({"exp_avg": (GRADIENT[:4], None)}, "its shape is [4, 5] on ranks, and [8, 5] on one device"),
    ],
)
def test_a_state_that_was_not_compared_is_undecided(states, reason):
    found = verdict(KEEPING, [keeping(made, step=(STEPS, None), **states) for made in ranks_of(RIGHT, RIGHT)])
    assert found.not_compared == {"exp_avg of net.weight": reason}
    assert found.report.headline == "undecided: 1 state of optimizers or buffer was not compared with one device"


def test_a_state_that_one_device_lacks_is_undecided():
    found = verdict(keeping(ONE), [keeping(trace(0, 1, RIGHT), own=(GRADIENT, None))])
    reasons = {"own of net.weight": "one device keeps no state or buffer of this name"}
    assert (found.kind, found.not_compared) == ("undecided", reasons)


def test_the_state_of_a_parameter_on_one_rank_is_judged_there():
    """As of an optimizer that shares the states of whole parameters out."""
    whole, other = ranks_of(RIGHT, RIGHT)
    found = verdict(KEEPING, [keeping(whole, exp_avg=(GRADIENT, None), step=(STEPS, None)), keeping(other)])
    assert (found.kind, found.not_compared) == ("equal", {})


def test_buffers_are_judged_where_training_changes_them():
    one = with_buffer(keeping(ONE), "net.mean", WEIGHT)
    ranks = [keeping(made) for made in ranks_of(RIGHT, RIGHT)]
    assert verdict(one, [with_buffer(made, "net.mean", WEIGHT) for made in ranks]).kind == "equal"
    found = verdict(one, [with_buffer(made, "net.mean", WEIGHT + made.rank) for made in ranks])
    assert (found.kind, found.parameter, found.ranks) == ("differs", "buffer net.mean", (1,))
    assert found.report.mistakes == ("buffers-drift",)
    ranks[0].events.append({"event": "module", "after": 0, "broadcasts": True, "batch_norms": [], "dropouts": []})
    found = verdict(one, [with_buffer(made, "net.mean", WEIGHT + made.rank) for made in ranks])
    assert "keeps the values of rank 0 only (broadcast_buffers is on)" in found.report.findings[0].evidence
    assert "gather or reduce over all ranks what the forward pass writes to a buffer" in str(found.report)
    never = with_buffer(keeping(ONE), "net.mean", WEIGHT, constant=True)
    others = [with_buffer(keeping(made), "net.mean", WEIGHT + 1, constant=True) for made in ranks]
    assert verdict(never, others).kind == "equal"  # a mask, which is not trained
    assert verdict(one, others).kind == "differs"  # one that the ranks forget to change
    missing = verdict(one, [keeping(made) for made in ranks])
    assert (missing.kind, missing.not_compared) == ("undecided", {"buffer net.mean": "no rank keeps it"})


def test_buffers_have_the_names_of_the_modules_around_them():
    second, first = trained(WEIGHT, GRADIENT), trained(GRADIENT, WEIGHT)
    one = with_buffer(trace(0, 1, {"2.weight": second, "0.weight": first}), "2.mean", WEIGHT)
    stages = ranks_of({"0.weight": first}, {"0.weight": second})
    buffers = with_buffer(stages[0], "0.mean", GRADIENT), with_buffer(stages[1], "0.mean", WEIGHT)
    found = verdict(with_buffer(one, "0.mean", GRADIENT), buffers)
    assert (found.kind, found.not_compared) == ("equal", {})
