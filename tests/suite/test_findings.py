"""A check on ranks raises what one rank has found when all ranks have left their last collective, and not before."""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from mgpu_check import Ranks
from mgpu_check.asserts.findings import Findings, first_suffices, run_all
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import CheckFailure, GradientMismatch, ShardError
from mgpu_check.oracles.training.cases import ExactTraining
from mgpu_check.oracles.training.reference_training import gathered
from mgpu_check.oracles.training.training_steps import weighted
from mgpu_check.suite.collectives import calls, functional, messages
from mgpu_check.suite.loading import checks as loading_on_ranks
from mgpu_check.suite.parallelism import handwritten_parallelism as ranks_parallel
from mgpu_check.suite.parallelism.torch_parallelism import assert_parallelized_modules_agree, assert_schedules_agree
from mgpu_check.suite.sharded import fully_sharded
from mgpu_check.suite.sharded.checkpoints import assert_checkpoint_continues, assert_state_dict_agrees, saved_checkpoint
from mgpu_check.suite.sharded.dtensors import assert_meshes_agree
from mgpu_check.suite.sharded.sync_batchnorm import assert_sync_batchnorm_agrees
from mgpu_check.torch_hooks.patches import replaced

TRAINING = ExactTraining(widths=(6, 12, 5), batch=12)
FINE = ExactTraining(widths=(6, 7, 3), batch=8, steps=1, fine=2.0**-14)
DEEP = ExactTraining(widths=(4, 3, 2, 2), batch=8)

Change = Callable[[Any], Any]
Plant = Callable[[], contextlib.AbstractContextManager[None]]


def one_more(result: Any) -> Any:
    """Change the first tensor."""
    if isinstance(result, dict):
        name = next(iter(result))
        return result | {name: result[name] + 1}
    return result + 1


def misread(place: str, change: Change = one_more) -> Plant:
    """Let a function of a check give something else when it is called first."""

    @contextlib.contextmanager
    def plant() -> Iterator[None]:
        module, _, name = place.rpartition(".")
        owner = importlib.import_module(f"mgpu_check.{module}")
        real, changes = getattr(owner, name), [change]

        def wrong(*args: Any, **kwargs: Any) -> Any:
            result = real(*args, **kwargs)
            return changes.pop()(result) if changes else result

        with replaced(owner, name, wrong):
            yield

    return plant


@contextlib.contextmanager
def first_object_lost() -> Iterator[None]:
    real = dist.all_gather_object

    def lossy(objects: list[object], *args: Any, **kwargs: Any) -> None:
        real(objects, *args, **kwargs)
        objects[0] = None

    with replaced(dist, "all_gather_object", lossy):
        yield


@contextlib.contextmanager
def group_of_the_first_dimension() -> Iterator[None]:
    real = DeviceMesh.get_group

    def get_group(self: DeviceMesh, mesh_dim: int | str | None = None) -> Any:
        return real(self, 0 if self.ndim == 2 else mesh_dim)

    with replaced(DeviceMesh, "get_group", get_group):
        yield


@contextlib.contextmanager
def first_gradient_lost() -> Iterator[None]:
    real, made = torch.Tensor.backward, list[torch.nn.Module]()

    def kept(model: torch.nn.Module) -> torch.nn.Module:
        made.append(model)
        return model

    def backward(self: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **kwargs)
        for model in made:
            next(model.parameters()).grad = None

    with misread("suite.sharded.fully_sharded.sharded", kept)(), replaced(torch.Tensor, "backward", backward):
        yield


def without_the_first(result: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return dict(list(result.items())[1:])


def of_rank_0(sampler: Any) -> Any:
    sampler.rank = 0
    return sampler


def of_a_shorter_chunk(model: torch.nn.Module) -> torch.nn.Module:
    parameter: Any = next(model.parameters())
    parameter._local_tensor = parameter._local_tensor[:-1]
    return model


class LeftAtOnce:
    """A store that says of ranks that they have left the barrier."""

    def __init__(self, store: Any) -> None:
        self.store = store

    def add(self, key: str, amount: int) -> int:
        return 1 if (key, amount) == ("behind", 0) else int(self.store.add(key, amount))


def saved_and_loaded(rank: Rank) -> None:
    assert_checkpoint_continues(TRAINING, saved_checkpoint(TRAINING, rank), rank, saved_by=rank.size)


@dataclass(frozen=True)
class Case:
    """A check that fails on one rank, by itself, before the last collective.

    Attributes:
        check: in the ranks, with what is to be done before.
        plant: in the rank that sees it.
        words: of the finding.
        who: sees it.
    """

    name: str
    check: Callable[[Rank], None]
    plant: Plant
    words: str
    who: int = 2
    size: int = 3


CASES = (
    Case("fully sharded: another chunk",
         lambda rank: fully_sharded.assert_fully_sharded_agrees(TRAINING, rank, dimensions=1),
         misread("suite.sharded.fully_sharded.sharded", of_a_shorter_chunk),
         "0.weight has a part of (3, 6) here, expected (4, 6)"),
    Case("fully sharded", lambda rank: fully_sharded.assert_fully_sharded_agrees(TRAINING, rank, dimensions=1),
         misread("suite.sharded.fully_sharded.copied"), "resharding on"),
    Case("mixed precision", lambda rank: fully_sharded.assert_mixed_precision_agrees(FINE, rank),
         misread("suite.sharded.fully_sharded.copied"), "torch.bfloat16 reduced in torch.float32"),
    Case("clipping", lambda rank: fully_sharded.assert_clipping_agrees(TRAINING, rank), first_gradient_lost,
         "0.weight has no gradient"),
    Case("sharded: meshes", assert_meshes_agree, group_of_the_first_dimension,
         "the group has ranks [1, 3], expected [2, 3]", who=3, size=4),
    Case("state dict", lambda rank: assert_state_dict_agrees(TRAINING, rank), misread("suite.sharded.checkpoints.copied"),
         "full state dict", who=0),
    Case("checkpoint: parameters", saved_and_loaded, misread("suite.sharded.checkpoints.copied"), "1 of 4 results"),
    Case("checkpoint: others", saved_and_loaded, misread("suite.sharded.checkpoints.same_bits", lambda same: not same),
         "was saved"),
    Case("checkpoint: a lost gradient", saved_and_loaded, misread("suite.sharded.checkpoints.gathered", without_the_first),
         "then one step, rank 2: lacks step 2: gradient of 0.weight"),
    Case("SyncBatchNorm", lambda rank: assert_sync_batchnorm_agrees(rank, 5),
         misread("suite.sharded.sync_batchnorm.gradient_or_zeros"), "momentum 0.25"),
    Case("tensor parallelism", lambda rank: ranks_parallel.assert_tensor_parallel_agrees(TRAINING, rank),
         misread("suite.parallelism.handwritten_parallelism.seen"), "divided between"),
    Case("parallelized modules", lambda rank: assert_parallelized_modules_agree(TRAINING, rank),
         misread("suite.parallelism.torch_parallelism.gathered"), "the batch on all ranks"),
    Case("samplers", lambda rank: loading_on_ranks.assert_samplers_of_ranks(rank, 5),
         misread("suite.loading.checks.sampler_over", of_rank_0), "it takes itself for rank 0 of 3"),
    Case("loaders", lambda rank: loading_on_ranks.assert_loaders_cover(rank, 5), misread("suite.loading.checks.sent"),
         "epoch 0: batch 0 of 2: number"),
    Case("streams", loading_on_ranks.assert_streams_cover, misread("suite.loading.checks.indices_of", lambda got: got[::-1]),
         "with 0 workers, drop_last=False: expected the batches"),
    Case("suite: messages", lambda rank: messages.assert_messages_of_all_ways_arrive(rank, [], 1),
         misread("suite.collectives.messages.as_bits"), "memory before or behind the received tensor was changed"),
    Case("suite: any source", lambda rank: messages.assert_messages_from_any_source_arrive(rank, 1, 1, [4, 5, 6], 0),
         misread("suite.collectives.messages.as_bits"), "memory before or behind the received tensor was changed", who=1),
    Case("suite: objects", lambda rank: messages.assert_objects_travel_on_all_ways(rank, 1, [None], 1),
         misread("suite.collectives.messages.object_of", str), "all_gather_object"),
    Case("suite: drawn objects", lambda rank: messages.assert_drawn_objects_travel(rank, 1, [0, "", None]), first_object_lost,
         "all_gather_object of drawn objects is wrong on rank 2 of 3 (cuda:2): got [None, (1, ''), (2, None)], " "expected [(0, 0), (1, ''), (2, None)]"),
    Case("suite: barriers", lambda rank: messages.assert_barriers_hold(rank, 1, 0),
         misread("suite.collectives.messages._fresh_store", LeftAtOnce), "ranks left it before rank 0 had entered it", who=0),
    Case("suite: functional", lambda rank: functional.assert_functional_match_in_groups(rank, 1),
         misread("suite.collectives.functional.numbers_of"), "functional all_reduce sum"),
    Case("suite: bias of rounding", lambda rank: calls.assert_sums_are_unbiased(rank, 1),
         misread("oracles.collectives.repeated_calls.mean_error", lambda mean: mean + 1), "rounding leans away from zero"),
    Case("suite: schedules", lambda rank: assert_schedules_agree(DEEP, rank, 2),
         misread("suite.parallelism.torch_parallelism.seen"), "ScheduleGPipe"),
)  # fmt: skip


def planted(rank: Rank, cases: list[Case]) -> list[str]:
    """Return what each check has raised here; all ranks must agree on the case after it, so that none is behind."""
    raised = []
    for case in cases:
        raised.append("")
        plant = case.plant() if rank.index == case.who else contextlib.nullcontext()
        # Torch warns of what it is to call otherwise in its next versions, and a case may leave filters of its own.
        with warnings.catch_warnings(action="ignore"), plant:
            try:
                case.check(rank)
            except CheckFailure as finding:
                raised[-1] = str(finding)
        names: list[str] = [""] * rank.size
        dist.all_gather_object(names, case.name)
        assert names == [case.name] * rank.size
    return raised


@pytest.mark.parametrize("size", [pytest.param(3, marks=pytest.mark.slow), 4])
def test_the_other_ranks_have_left_their_last_collective_when_one_raises(ranks: Ranks, size: int) -> None:
    cases = [case for case in CASES if case.size == size]
    raised = ranks.run(planted, cases, size=size)
    for case, findings in zip(cases, zip(*raised, strict=True), strict=True):
        assert [rank for rank, words in enumerate(findings) if words] == [case.who], (case.name, findings)
        assert case.words in findings[case.who], case.name


def gradients_gathered(rank: Rank) -> list[str]:
    model = fully_sharded.sharded(TRAINING, rank)
    (x, y), *_ = TRAINING.batches()
    weighted(model(x.to(rank.device)), y.to(rank.device)).backward()
    if rank.index == 1:
        next(model.parameters()).grad = None
    return sorted(gathered(model, 1))


def test_a_rank_without_a_gradient_takes_part_in_gathering_it(ranks: Ranks) -> None:
    one, other = ranks.run(gradients_gathered, size=2)
    assert set(one) - set(other) == {"step 1: gradient of 0.weight"}


def test_the_first_finding_is_raised_where_the_context_ends() -> None:
    done: list[str] = []
    with pytest.raises(ShardError, match="the first"), Findings() as findings:
        for words in ("the first", "the second"):
            with findings.collected():
                raise ShardError(words, ranks=[1])
            done.append(words)
    assert done == ["the first", "the second"]
    with pytest.raises(GradientMismatch, match="no sum") as caught, Findings() as findings:
        findings.require(True, "all is well")
        findings.require(False, "no sum", ranks=[2])
    assert caught.value.ranks == (2,)


def test_all_checks_run_and_the_first_finding_is_raised() -> None:
    done: list[str] = []

    def check(words: str) -> None:
        done.append(words)
        raise ShardError(words)

    with pytest.raises(ShardError, match="the first"):
        run_all(functools.partial(check, words) for words in ("the first", "the second"))
    assert done == ["the first", "the second"]


def checks_run(rank: Rank) -> list[int]:
    done: list[int] = []

    def check(number: int) -> None:
        done.append(number)
        if (number, rank.index) == (1, 1):
            raise ShardError("of one rank")

    with contextlib.suppress(ShardError), first_suffices():
        run_all((functools.partial(check, number) for number in range(3)), rank)
    return done


def test_ranks_end_together_where_the_first_finding_suffices(ranks: Ranks) -> None:
    assert ranks.run(checks_run, size=2) == [[0, 1], [0, 1]]


def test_a_finding_is_not_lost_to_the_error_that_follows_from_it() -> None:
    with pytest.raises(ShardError, match="another shape") as caught, Findings() as findings:
        with findings.collected():
            raise ShardError("another shape")
        raise RuntimeError("shapes do not fit")
    assert isinstance(caught.value.__context__, RuntimeError)
    with pytest.raises(RuntimeError, match="shapes do not fit"), Findings():
        raise RuntimeError("shapes do not fit")
    with pytest.raises(KeyboardInterrupt), Findings() as findings:
        findings.require(False, "another shape")
        raise KeyboardInterrupt
