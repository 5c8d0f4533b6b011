"""A check on ranks raises what one rank has found when all ranks have left their last collective, and not before."""

from __future__ import annotations

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch.distributed as dist

from mgpu_check import Ranks
from mgpu_check.asserts.findings import Findings, first_suffices, run_all
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import CheckFailure, GradientMismatch, ShardError
from mgpu_check.oracles.training.cases import ExactTraining
from mgpu_check.oracles.training.reference_training import gathered
from mgpu_check.oracles.training.training_steps import weighted
from mgpu_check.suite.collectives import messages
from mgpu_check.suite.parallelism.torch_parallelism import assert_parallelized_modules_agree
from mgpu_check.suite.sharded import fully_sharded
from mgpu_check.suite.sharded.checkpoints import assert_checkpoint_continues, saved_checkpoint
from mgpu_check.torch_hooks.patches import replaced

TRAINING = ExactTraining(widths=(6, 12, 5), batch=12)

SUFFERER = 2  # the rank that sees the fault

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


def saved_and_loaded(rank: Rank) -> None:
    assert_checkpoint_continues(TRAINING, saved_checkpoint(TRAINING, rank), rank, saved_by=rank.size)


@dataclass(frozen=True)
class Case:
    """A check that fails on one rank, by itself, before the last collective.

    Attributes:
        check: in the ranks, with what is to be done before.
        plant: in the rank that sees it.
        words: of the finding.
    """

    name: str
    check: Callable[[Rank], None]
    plant: Plant
    words: str


CASES = (
    Case("fully sharded", lambda rank: fully_sharded.assert_fully_sharded_agrees(TRAINING, rank, dimensions=1),
         misread("suite.sharded.fully_sharded.copied"), "resharding on"),
    Case("checkpoint", saved_and_loaded, misread("suite.sharded.checkpoints.same_bits", lambda same: not same),
         "was saved"),
    Case("parallelized modules", lambda rank: assert_parallelized_modules_agree(TRAINING, rank),
         misread("suite.parallelism.torch_parallelism.gathered"), "the batch on all ranks"),
    Case("messages", lambda rank: messages.assert_messages_of_all_ways_arrive(rank, [], 1),
         misread("suite.collectives.messages.as_bits"), "memory before or behind the received tensor was changed"),
)  # fmt: skip


def planted(rank: Rank, cases: Sequence[Case]) -> list[str]:
    """Return what each check has raised here; all ranks must agree on the case after it, so that none is behind."""
    raised = []
    for case in cases:
        raised.append("")
        plant = case.plant() if rank.index == SUFFERER else contextlib.nullcontext()
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


@pytest.mark.slow
def test_the_other_ranks_have_left_their_last_collective_when_one_raises(ranks: Ranks) -> None:
    raised = ranks.run(planted, CASES, size=3)
    for case, findings in zip(CASES, zip(*raised, strict=True), strict=True):
        assert [rank for rank, words in enumerate(findings) if words] == [SUFFERER], (case.name, findings)
        assert case.words in findings[SUFFERER], case.name


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
