"""The arguments for divided models: placements, meshes, returned values, and values that are not compared."""

from __future__ import annotations

import functools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgpu_check import NotCompared, ScalingMismatch, assert_step_scales
from mgpu_check.diagnosis.observations import KINDS, Relations, Result
from mgpu_check.gates.explanation.failure_report import Axes
from mgpu_check.gates.explanation.investigation import shrunk_to_axes
from mgpu_check.gates.gate_arguments import Program
from mgpu_check.gates.search.scenarios import Scenario
from mgpu_check.gates.search.trials import Trial, Trials
from tests.gates import divided, steps

pytestmark = pytest.mark.gpus(4)

TP = [{"dp": 1, "tp": 2}]
FEW: dict[str, Any] = {"sizes": [4], "max_examples": 1}
MLP: dict[str, Any] = {"build": divided.Mlp, "batch": divided.rows, **FEW}
WORDS: dict[str, Any] = {"build": divided.Words, "batch": divided.texts, "meshes": TP, **FEW}
ROWS: dict[str, Any] = {"build": steps.build, "batch": steps.batch, **FEW}


class InDouble(divided.VocabularyParallel):
    """Keeps its shard in another dtype, so that no values identify the slice."""

    def kept(self, shard):
        return shard.double() if self.rank.size > 1 else shard


class Marked(InDouble):
    """Has the attributes that Megatron sets."""

    def divide(self):
        super().divide()
        weight = self.model.words.weight
        weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 1


def of_function(name, rank):
    return (slice(6 * rank.index, 6 * rank.index + 6), slice(None)) if name == "words.weight" else None


def tried(ranks, mesh: dict[str, int], *program: Any, **options: Any) -> tuple[Trials, Trial | None]:
    """Try a program on one case of four samples."""
    trials = Trials(ranks, Program(*program, **options), frozenset(KINDS), None, "step")
    return trials, trials.run(Scenario(math.prod(mesh.values()), 4, mesh=tuple(mesh.items())))


def failed(*case: Any, **options: Any) -> Relations:
    _, trial = tried(*case, **options)
    assert trial is not None and trial.relations is not None
    return trial.relations


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "placement"),
    [
        (InDouble, {"head.*": "whole", "*": ("words.weight", {"tp": 0})}),
        (InDouble, of_function),
        (Marked, None),
    ],
    ids=["name", "function", "attributes"],
)
def test_a_placement_that_is_declared(ranks, step, placement):
    trials, failure = tried(ranks, TP[0], step, divided.Words, divided.texts, placement=placement)
    assert failure is None
    trials.finish([*trials.completed], {})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("whole", r"selects all elements of words.weight with shape \[12, 8\], but rank \d"),
        (slice(0, 5), r"selects 40 elements .* but rank \d holds shape \[6, 8\]; declare the slice that it holds"),
    ],
)
def test_a_placement_that_does_not_fit(ranks, spec, message):
    with pytest.raises(ValueError, match=f"assert_step_scales: placement of .*{message}"):
        assert_step_scales(ranks, InDouble, placement={"words.weight": spec}, **WORDS)


def test_a_placement_that_is_wrong_is_refuted(ranks):
    def of_the_other(name, rank):
        return [*range(6 - 6 * rank.index, 12 - 6 * rank.index)] if name == "words.weight" else None

    relations = failed(ranks, TP[0], InDouble, divided.Words, divided.texts, placement=of_the_other)
    assert (
        relations.placements[Result("params", "words.weight")]
        == "dim 0: 6 to 11 of 12 on rank 0; dim 0: 0 to 5 of 12 on rank 1"
    )


def test_what_was_not_compared_is_no_pass(ranks):
    with pytest.raises(NotCompared) as caught:
        assert_step_scales(ranks, InDouble, **WORDS)
    assert caught.value.names == ("words.weight",)
    report = str(caught.value)
    assert report.startswith("InDouble is undecided: 1 of 3 trained parameters were not compared with one device")
    assert "  at mesh dp 1 x tp 2: words.weight: its values before the first step are nowhere" in report
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.names) == (report, caught.value.names)


@pytest.mark.slow
def test_what_need_not_be_compared(ranks):
    assert_step_scales(ranks, InDouble, unjudged={"words.*": "kept in float64", "*.weight": "all of them"}, **WORDS)


# Meshes


def total(model, batch, rank, wrong):
    """A sum that is wrong where all axes in `wrong` are divided."""
    share = rank.mesh["dp"].get_local_rank(), rank.mesh["dp"].size()
    result = batch[0].chunk(share[1])[share[0]].sum() if share[0] < len(batch[0].chunk(share[1])) else torch.zeros(())
    dist.all_reduce(result, group=rank.mesh["dp"].get_group())
    return {"total": result * (3 if all(rank.mesh[axis].size() > 1 for axis in wrong) else 1)}


@pytest.mark.parametrize(
    ("wrong", "axes", "size"),
    [(["tp"], Axes(("tp",), "any", ("dp",), ("dp",)), 2), (["dp", "tp"], Axes(("dp", "tp"), "all"), 4)],
)
def test_a_failure_names_the_axes_that_it_needs(ranks, wrong, axes, size):
    trials, failure = tried(ranks, {"dp": 2, "tp": 2}, functools.partial(total, wrong=wrong), steps.build, steps.batch)
    smallest, needed = shrunk_to_axes(trials, failure)
    assert needed == axes and smallest.scenario.world_size == size


def coordinates(model, batch, rank):
    mesh = rank.mesh
    place = [mesh.get_local_rank(axis) for axis in mesh.mesh_dim_names]
    assert rank.size == 1 or rank.index == place[0] * mesh["tp"].size() + place[1]
    return {"size": torch.tensor(mesh["dp"].size() * mesh["tp"].size() // rank.size)}


def test_the_last_axis_of_a_mesh_varies_fastest(ranks):
    trials, failure = tried(ranks, {"dp": 2, "tp": 2}, coordinates, steps.build, steps.batch)
    assert failure is None and sum(trials.completed.values()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"meshes": []}, "meshes is empty; give mappings from axes to sizes"),
        ({"meshes": {"dp": 2}}, r"meshes=\{'dp': 2\}; give mappings"),
        ({"meshes": [{"dp": True}]}, "each size an int of at least 1"),
        ({"unjudged": {"words.*": ""}}, "unjudged=.*; give a mapping from patterns of parameters to the reasons"),
        ({"meshes": [{"dp": 8}]}, r"mesh \{'dp': 8\} needs 8 ranks, and this run has 4 devices; .* --gpus=N"),
        ({"meshes": [{"dp": 2}], "world_sizes": [2]}, "meshes and world_sizes are both given"),
        ({"meshes": [{"dp": 2}], "single_process": True}, "meshes and single_process=True are both given"),
        ({"meshes": [{"dp": 1}]}, "compares one device with itself"),
        ({"placement": "up"}, "placement='up'; give a mapping from patterns"),
        ({"returned_by": "first"}, "returned_by='first'; give \"last\", or a function"),
    ],
    ids=str,
)
def test_wrong_arguments(ranks, options, message):
    with pytest.raises(ValueError, match=message):
        assert_step_scales(ranks, steps.total, **ROWS, **options)


# What ranks return


def telling(model, batch, rank, by):
    """The sum of a batch, on one rank only."""
    place = {axis: rank.mesh.get_local_rank(axis) for axis in rank.mesh.mesh_dim_names} if rank.mesh else {}
    if rank.size > 1 and not by(place, rank):
        return None
    return {"sum": batch[0].sum()}


LAST: dict[str, tuple[dict[str, Any], Callable[..., Any]]] = {
    "rank": ({"world_sizes": [2], "returned_by": "last"}, lambda place, rank: rank.index == 1),
    "axis": (
        {"meshes": [{"dp": 2, "tp": 2}], "returned_by": lambda at: at["tp"] == 0},
        lambda place, rank: place["tp"] == 0,
    ),
    "index": ({"world_sizes": [2], "returned_by": lambda at: at["rank"] == 0}, lambda place, rank: rank.index == 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("which", LAST)
def test_what_some_ranks_return(ranks, which):
    options, by = LAST[which]
    assert_step_scales(ranks, functools.partial(telling, by=by), **ROWS, **options)


def test_what_some_ranks_return_is_missing_on_others(ranks):
    step = functools.partial(telling, by=lambda place, rank: rank.index == 1)
    assert [*failed(ranks, {"dp": 2}, step, steps.build, steps.batch).details.values()] == ["missing on rank 0"]


def test_ranks_whose_values_count_must_agree(ranks):
    def step(model, batch, rank):
        return {"sum": batch[0].sum() + (rank.index if rank.size > 1 else 0)}

    by: dict[str, Any] = {"returned_by": lambda at: at["pp"] == 0}
    relations = failed(ranks, {"pp": 1, "dp": 2}, step, steps.build, steps.batch, **by)
    assert [*relations.wrong.values()] == [[1]]


# Parameters that an optimizer has as a copy, or on one rank


class NotGathered(divided.FlatShards):
    """Trains the chunks of a flat buffer, and does not update the model."""

    def returned(self, loss):
        return super().returned(loss) if self.rank.size == 1 else None


@pytest.mark.slow
def test_the_model_counts_beside_copies_that_an_optimizer_trains(ranks):
    with pytest.raises(ScalingMismatch) as caught:
        assert_step_scales(ranks, NotGathered, meshes=[{"dp": 2}], observe=("params",), **MLP)
    report = str(caught.value)
    assert steps.row(report, "up.weight")[1] == "NO"
    assert "up.weight is divided" not in report


class Owned(divided.Step):
    """Each rank's optimizer has some of the parameters. Gradients are reduced to it only."""

    def owner(self, number):
        return number % self.rank.size

    def parameters(self):
        yield from (one for number, one in enumerate(self.model.parameters()) if self.owner(number) == self.rank.index)

    def synchronize(self):
        for number, one in enumerate(self.model.parameters()):
            if self.wrong != divided.MISSING:
                dist.reduce(one.grad, self.owner(number))
            if self.owner(number) != self.rank.index:
                one.grad = None

    def returned(self, loss):
        for number, one in enumerate(self.model.parameters()):
            dist.broadcast(one.detach(), self.owner(number))
        return super().returned(loss)


@pytest.mark.slow
def test_gradients_count_on_the_rank_whose_optimizer_has_them(ranks):
    assert_step_scales(ranks, Owned, meshes=[{"dp": 2}], **MLP)
    with pytest.raises(ScalingMismatch):
        assert_step_scales(ranks, functools.partial(Owned, wrong=divided.MISSING), meshes=[{"dp": 2}], **MLP)
