"""`assert_survives`: trainings that recover pass, those that do not are refuted with the fewest events."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgpu_check import ScalingMismatch, assert_survives
from mgpu_check.gates.run.survival import Event, Training, Worker, supervise
from tests.gates.recoveries import elastic, from_checkpoints

pytestmark = pytest.mark.gpus(3)


def survive(ranks: Any, train: Any, **options: Any) -> None:
    defaults: dict[str, Any] = {"world_sizes": [2], "samples": "once", "max_examples": 8, "timeout": 20.0}
    assert_survives(ranks, train, **defaults | options)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("torn", ["raised RuntimeError: PytorchStreamReader failed reading zip archive"]),
        pytest.param("moments", ["has other results than without events: model."], marks=pytest.mark.slow),
        pytest.param("place", ["samples are not", "has other results than without"], marks=pytest.mark.slow),
        pytest.param(
            "late", ["has other results than", "samples are not trained exactly once"], marks=pytest.mark.slow
        ),
        pytest.param("one rank", ["rank 0 waits in", "raised", "has other results"], marks=pytest.mark.slow),
    ],
)
def test_trainings_that_do_not_recover_are_refuted(ranks, fault, words):
    with pytest.raises(ScalingMismatch, match="from_checkpoints does not survive: ") as caught:
        survive(ranks, functools.partial(from_checkpoints, fault=fault), max_examples=20)
    message = str(caught.value)
    assert any(text in message for text in words), message
    assert message.count(" is killed at ") == 1  # shrunk to one event
    assert caught.value.site.startswith("tests/gates/recoveries.py:")


def test_a_training_that_starts_again_from_whole_checkpoints_survives(ranks):
    survive(ranks, from_checkpoints, max_examples=4)


@pytest.mark.slow
def test_a_training_that_goes_on_without_the_dead_survives(ranks):
    survive(ranks, elastic, restart="none", world_sizes=[3], max_examples=5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "words"),
    [("no detection", "raised "), ("own share", "samples are not trained exactly once")],
)
def test_ranks_that_do_not_go_on_rightly_are_refuted(ranks, fault, words):
    with pytest.raises(ScalingMismatch) as caught:
        train = functools.partial(elastic, fault=fault)
        survive(ranks, train, restart="none", events="kill", world_sizes=[3], max_examples=3)
    assert words in str(caught.value)


def waits(worker: Worker) -> torch.Tensor:
    dist.init_process_group("nccl")
    total = torch.ones(1, device=worker.device)
    dist.all_reduce(total)
    return total


def test_ranks_that_wait_for_the_dead_are_named(ranks):
    with pytest.raises(ScalingMismatch) as caught:
        survive(ranks, waits, restart="rank", events="kill", samples=None, timeout=2.0)
    assert "rank 1 waits in all_reduce #1 (tests/gates/test_survival.py:" in str(caught.value) or "raised" in str(
        caught.value
    )


def test_events_strike_the_call_that_they_name(ranks):
    """Half of a file is written by a save that is killed; restarts count on."""
    training = Training(from_checkpoints, 2, "all", 10.0)
    quiet = ranks.run(supervise, training, (), size=1)[0]
    save = next(i for i, name in enumerate(quiet.calls[0]) if name.startswith("torch.save"))
    ending = ranks.run(supervise, training, (Event("kill", 0, save),), size=1)[0]
    assert ending.problem == "" and ending.calls[0][: save + 1] == quiet.calls[0][: save + 1]
    assert len(ending.calls[0]) == len(quiet.calls[0]) + save + 1
    assert [name.partition(" (")[0] for name in quiet.calls[0][:4]] == [
        "all_reduce", "all_reduce", "optimizer.step", "the end of optimizer.step",
    ]  # fmt: skip
    for kind in ("stop", "slow"):
        ending = ranks.run(supervise, training, (Event(kind, 1, 1),), size=1)[0]
        assert ending.problem == "" and ending.calls == quiet.calls


def fails(worker: Worker) -> None:
    raise OSError("no data")


def nothing(worker: Worker) -> None:
    torch.optim.SGD([torch.ones(1)]).step()


def without_calls(worker: Worker) -> torch.Tensor:
    return torch.ones(1)


def drawn(worker: Worker) -> torch.Tensor:
    return torch.tensor([float.fromhex(f"0x{torch.seed() % 2**40:x}p0")])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train": 3}, r"train=3 is not a function; give one, as in train\(worker\)"),
        ({"restart": "some"}, "restart has 'some'; choose from all, rank, none"),
        ({"events": ["crash"]}, "events has 'crash'; choose from kill, stop, slow"),
        ({"samples": "twice"}, "samples has 'twice'; choose from once, at least once, at most once"),
        ({"timeout": 0}, "timeout=0; give seconds above 0"),
        ({"max_examples": 0}, "max_examples=0; give an int of at least 1"),
        ({"train": fails}, "without any event rank . raised OSError: no data at tests/gates/test_survival.py"),
        ({"train": nothing}, r"train\(worker\) returned None on all ranks"),
        ({"train": without_calls}, "makes no collective, optimizer step or save for an event to strike"),
        ({"train": drawn}, "two runs without events have other results on rank 0: the result"),
        ({"train": waits, "samples": "once"}, "rank 0 returned no 'samples', the counts of trained samples"),
    ],
)
def test_wrong_arguments_are_refused(ranks, options, message):
    arguments = {"train": waits, "samples": None, **options}
    with pytest.raises(ValueError, match=message):
        survive(ranks, arguments.pop("train"), **arguments)
