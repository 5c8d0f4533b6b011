"""The gate for checkpoints: each thing that is forgotten is named, and code that forgets nothing passes."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from mgpu_check import RankFailure, assert_resume_continues
from tests.gates.checkpoints import refuted, training

pytestmark = pytest.mark.gpus(2)


def test_all_restored(ranks):
    returned = ["model", "optimizer", "scheduler", "rng"]
    assert_resume_continues(ranks, training(dropout=0.5, returned=returned))
    assert_resume_continues(ranks, training("rng"), world_sizes=[1], steps=2)  # no random number matters


@pytest.mark.slow
def test_schedule_and_model(ranks):
    text = refuted(
        ranks,
        training("scheduler", "model"),
        "state-not-restored",
        match="does not continue .*model.0.weight on ranks 0-1: element",
    )
    assert "scheduler.last_epoch" in text and "got 3, expected 6" in text
    assert "model.0.weight" in text.partition("on no rank as saved: ")[2].partition("\n")[0]


def test_a_link_to_the_latest_checkpoint_stays_a_link(ranks):
    def train(rank, directory, start, stop):
        latest = directory / f"latest-{rank.index}"
        total = torch.load(latest / "total.pt") if start else torch.zeros(())
        for step in range(start, stop):
            total = total * 0.5 + step + 1
        own = directory / f"{rank.index}-{stop}"
        own.mkdir(exist_ok=True)
        torch.save(total, own / "total.pt")
        latest.unlink(missing_ok=True)  # raises an error if it is a directory
        latest.symlink_to(own)
        return {"total": total}

    assert_resume_continues(ranks, train)


def counted(keeps, returned):
    """Training whose loader skips what its state counts, and may then count from zero again."""

    def train(rank, directory, start, stop):
        file = directory / f"{rank.index}.pt"
        total, position = torch.load(file) if start else (torch.zeros(()), 0)
        read = 0
        for sample in torch.arange(1.0, 99.0)[position:][: stop - start]:
            total, read = total * 0.5 + sample, read + 1
        position = position + read if keeps else read
        torch.save((total, position), file)
        return {"total": total} | ({"position": position} if returned else {})

    return train


def test_a_second_interruption(ranks):
    assert_resume_continues(ranks, counted(keeps=True, returned=True))
    text = refuted(
        ranks,
        counted(keeps=False, returned=False),
        "state-not-restored",
        match=r"resumed at step 3, and again at step 5, does not continue .* after step 6, total on ranks 0-1",
    )
    assert "smallest case: world size 2, steps 3 + 2 + 1" in text
    assert "every entry that train returns is restored" in text


@pytest.mark.slow
def test_random_numbers(ranks):
    text = refuted(ranks, training("rng", dropout=0.5), "state-not-restored", match="does not continue")
    assert "right after loading, on no rank as saved: random numbers of torch" in text


@pytest.mark.slow
def test_random_numbers_of_rank_0_on_all(ranks):
    text = refuted(ranks, training(dropout=0.5, per_rank_rng=False), "state-not-restored", match="does not continue")
    assert "on rank 1: what rank 0 had; each rank must save and load its own" in text


def drawn_anew(generator):
    def train(rank, directory, start, stop):
        data = torch.randn(8, generator=generator())  # as a data set that is made, or split, when a run starts
        total = torch.load(directory / f"{rank.index}.pt") if start else torch.zeros(())
        for step in range(start, stop):
            total = total + data[step]
        torch.save(total, directory / f"{rank.index}.pt")
        return {"total": total}

    return train


def test_what_is_drawn_anew(ranks):
    assert_resume_continues(ranks, drawn_anew(lambda: torch.Generator().manual_seed(5)))
    refuted(ranks, drawn_anew(lambda: None), "state-not-restored", match="total on ranks 0-1")


def by_epochs(keeps_epoch: bool):
    """Train over epochs of four steps; a DataLoader draws a seed that no step uses."""

    def train(rank, directory, start, stop):
        dataset = TensorDataset(torch.arange(16.0))
        sampler: DistributedSampler[Any] = DistributedSampler(dataset, rank.size, rank.index, seed=3)
        total = torch.load(directory / f"{rank.index}.pt") if start else torch.zeros(())
        per_epoch = len(sampler) // 2
        step, epoch = start, start // per_epoch if keeps_epoch else 0
        while step < stop:
            sampler.set_epoch(epoch)
            for number, (values,) in enumerate(DataLoader(dataset, 2, sampler=sampler)):
                if number == step % per_epoch and step < stop:
                    total, step = total * 0.5 + values.sum(), step + 1
            epoch += 1
        torch.save(total, directory / f"{rank.index}.pt")
        return {"total": total}

    return train


def test_the_epoch_of_a_sampler(ranks):
    assert_resume_continues(ranks, by_epochs(keeps_epoch=True), steps=6)
    text = refuted(ranks, by_epochs(keeps_epoch=False), "state-not-restored", match="total on ranks 0-1", steps=6)
    assert "DistributedSampler continues with epoch 0 on rank 0, and with epoch 1 in the uninterrupted run" in text
    assert "random numbers" not in text.partition("see:")[0]


@pytest.mark.slow
def test_where_a_call_of_no_steps_fails(ranks):
    inner = training("optimizer")

    def train(rank, directory, start, stop):
        assert stop > start, "no steps"
        return inner(rank, directory, start, stop)

    text = refuted(ranks, train, "state-not-restored", match="does not continue")
    assert "could not be seen: train(rank, directory, 3, 3): " in text and "no steps" in text
    assert "at the end differ model.0.weight" in text
    inner = training(loads=lambda rank: rank.index == 0, wrap_first=True)
    refuted(ranks, train, "restored-on-one-rank", "state-not-restored", match="does not continue")


def test_a_time_of_day_cannot_be_repeated(ranks):
    differs = r"differ by more than rounding in time on ranks 0-1: time: got .*as a time of day"
    with pytest.raises(ValueError, match=differs):
        assert_resume_continues(ranks, lambda rank, directory, start, stop: {"steps": stop, "time": time.time_ns()})


COUNTER: list[int] = []


def test_globals_of_the_test_carry_nothing(ranks):
    def train(rank, directory, start, stop):
        COUNTER.extend(range(start, stop))
        return {"count": len(COUNTER)}

    refuted(ranks, train, "state-not-restored", match="count on ranks 0-1: got 3, expected 6")


def test_errors_of_ranks_say_where(ranks):
    def train(rank, directory, start, stop):
        if start:
            raise KeyError("optimizer")
        return {"stop": stop}

    with pytest.raises(RankFailure, match="KeyError") as caught:
        assert_resume_continues(ranks, train)
    assert caught.value.__notes__ == ["while checking steps 3 to 6 at world size 2"]


NO_TOLERANCE = r"tolerance=.*; give a fraction of the largest magnitude, from 0 to below 1"


@pytest.mark.parametrize(
    ("options", "match"),
    [
        *(({"tolerance": value}, NO_TOLERANCE) for value in (-1.0, 1.0, 5, float("nan"), "a", True, {"x": 0.1})),
        ({"steps": 0}, "steps=0"),
        ({"steps": True}, "steps=True"),
        ({"world_sizes": [0]}, "has 0"),
    ],
)
def test_misuse(ranks, options, match):
    with pytest.raises(ValueError, match=match):
        assert_resume_continues(ranks, training(), **options)


@pytest.mark.parametrize(
    ("state", "match"),
    [
        (None, "returned a NoneType; return a mapping"),
        ({}, "empty mapping"),
        ({"same": 1}, "the same state after steps 0 to 6 as after steps 0 to 3"),
    ],
)
def test_what_is_no_state(ranks, state, match):
    with pytest.raises(ValueError, match=match):
        assert_resume_continues(ranks, lambda rank, directory, start, stop: state)
