"""The gate for checkpoints on other ranks than those that saved: ways of saving, meshes, and mistakes of each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from mgpu_check import NotCompared, Rank, assert_resume_continues
from mgpu_check.gates.gate_arguments import RanksFixture
from tests.gates.checkpoints import refuted

pytestmark = [
    pytest.mark.gpus(4),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # of torch's checkpoints and FSDP1: resumed runs overwrite
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

UNITS = (5, 18)  # elements of the two flat units of hand-written shards, each padded by itself


def by_hand(mistake: str = "", returned: tuple[str, ...] = ("whole", "momentum")) -> Callable[..., dict[str, Any]]:
    """Training with momentum that is sharded by hand: each rank saves its part of two flat units."""

    def train(rank: Rank, directory: Path, start: int, stop: int) -> dict[str, Any]:
        each = [-(-unit // rank.size) for unit in UNITS]

        def split(whole: torch.Tensor) -> torch.Tensor:
            parts = zip(whole.split(list(UNITS)), each, strict=True)
            padded = [torch.cat([part, part.new_zeros(size * rank.size - len(part))]) for part, size in parts]
            return torch.cat([part.chunk(rank.size)[rank.index] for part in padded])

        def joined(parts: list[torch.Tensor], cut: bool = True) -> torch.Tensor:
            sizes = [-(-unit // len(parts)) for unit in UNITS]
            units = [torch.cat(several) for several in zip(*(part.split(sizes) for part in parts), strict=True)]
            if not cut:
                return torch.cat(units)[: sum(UNITS)]
            return torch.cat([unit[:length] for unit, length in zip(units, UNITS, strict=True)])

        whole, momentum = torch.linspace(-1, 1, sum(UNITS)), torch.zeros(sum(each))
        if start:
            whole = torch.load(directory / "whole.pt")
            parts = [torch.load(directory / f"{index}.pt") for index in range(len(list(directory.glob("?.pt"))))]
            if mistake == "order":
                parts.reverse()
            if mistake != "lost":
                momentum = split(joined(parts, cut=mistake != "padding"))
        for number in range(start, stop):
            x = torch.randn(24, sum(UNITS), generator=torch.Generator().manual_seed(number))
            weights = whole.clone().requires_grad_()
            ((x.tensor_split(rank.size)[rank.index] @ weights).square().sum() / 24).backward()
            dist.all_reduce(weights.grad)
            if mistake == "gradients":
                weights.grad *= rank.size
            momentum.mul_(0.9).add_(split(weights.grad))
            updated = split(whole) - 0.05 * momentum
            parts = [torch.empty_like(updated) for _ in range(rank.size)]
            dist.all_gather(parts, updated)
            whole = joined(parts)
        torch.save(momentum, directory / f"{rank.index}.pt")
        if rank.index == 0:
            torch.save(whole, directory / "whole.pt")
        dist.barrier()
        state = {"whole": whole, "momentum": momentum, "own": momentum.sum() * (1 + rank.index)}
        return {name: state[name] for name in returned}

    return train


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mistake", "mistakes", "seen"),
    [
        ("lost", ("state-not-restored",), "on no rank as saved: momentum"),
        ("order", ("resharded-wrongly",), "momentum on ranks 0-2: each value was saved, but in another place"),
        ("padding", ("resharded-wrongly",), "with their padding"),
    ],
)
def test_shards_by_hand_that_are_divided_wrongly(
    ranks: RanksFixture, mistake: str, mistakes: tuple[str, ...], seen: str
) -> None:
    report = refuted(ranks, by_hand(mistake), *mistakes, match="does not continue", save_on=2, load_on=3)
    assert report.startswith("training saved at step 3 at world size 2 and resumed at world size 3 does not continue")
    assert "smallest case: saved at world size 2, resumed at world size 3, steps 3 + 3" in report
    assert "uninterrupted runs at world size 2 and at world size 3 agree" in report
    assert seen in report


@pytest.mark.slow
def test_shards_by_hand_pass_on_any_number_of_ranks(ranks: RanksFixture) -> None:
    assert_resume_continues(ranks, by_hand(), save_on=[1, 3], load_on=[1, 2, {"dp": 4}])


def test_a_training_that_depends_on_the_number_of_ranks_has_no_verdict(ranks: RanksFixture) -> None:
    with pytest.raises(ValueError, match=r"train depends on the number of ranks: after steps 0 to 3, .* whole at"):
        assert_resume_continues(ranks, by_hand("gradients"), save_on=1, load_on=2)


def test_a_state_without_anything_to_compare_has_no_verdict(ranks: RanksFixture) -> None:
    with pytest.raises(NotCompared, match="no entry of the state could be compared between these numbers of ranks"):
        assert_resume_continues(ranks, by_hand("lost", returned=("own",)), save_on=2, load_on=3)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"save_on": 5}, "save_on has 5; give ints from 1 to 4, or mappings"),
        ({"load_on": []}, "load_on is empty"),
        ({"load_on": "2"}, "load_on has '2'"),
        ({"save_on": 2, "world_sizes": [2]}, "world_sizes and save_on or load_on are both given"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_arguments(ranks: RanksFixture, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match="assert_resume_continues: ") as caught:
        assert_resume_continues(ranks, by_hand(), **given)
    assert said in str(caught.value)


def by_torch(way: str) -> Callable[..., dict[str, Any]]:
    """Training that saves in one of the ways of torch.

    Args:
        way: "rank 0", "full" or "sharded" for state dicts of FSDP2, or "FSDP1".
    """

    def train(rank: Rank, directory: Path, start: int, stop: int) -> dict[str, Any]:
        from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
        from torch.distributed.checkpoint.state_dict import (
            StateDictOptions,
            get_state_dict,
            set_model_state_dict,
            set_optimizer_state_dict,
        )
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
        from torch.nn.parallel import DistributedDataParallel
        from torch.utils.data import DistributedSampler

        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)).to(rank.device)
        if way in ("full", "sharded"):
            fully_shard(net, mesh=rank.mesh["dp"] if rank.mesh is not None else None)
        elif way == "FSDP1":
            net = FullyShardedDataParallel(net, device_id=rank.device, use_orig_params=True)
        else:
            net = DistributedDataParallel(net)
        optimizer = torch.optim.AdamW(net.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        options = StateDictOptions(full_state_dict=way in ("rank 0", "full"), cpu_offload=way in ("rank 0", "full"))
        if start:
            model, moments = get_state_dict(net, optimizer, options=options)
            if options.full_state_dict:
                saved = torch.load(directory / "all.pt", map_location="cpu")
            else:
                saved = {"model": model, "optimizer": moments}
                state_dict_loader.load(saved, checkpoint_id=directory / "dcp")
            set_model_state_dict(net, saved["model"], options=options)
            set_optimizer_state_dict(net, optimizer, saved["optimizer"], options=options)
            schedule.load_state_dict(torch.load(directory / "schedule.pt"))
        data = torch.randn(24, 5, generator=torch.Generator().manual_seed(1))
        sampler: Any = DistributedSampler(data, rank.size, rank.index)  # type: ignore[arg-type]
        share = 12 // rank.size
        for number in range(start, stop):
            epoch, place = divmod(number, 2)
            sampler.set_epoch(epoch)
            x = data[list(sampler)[place * share : (place + 1) * share]].to(rank.device)
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
            schedule.step()
        model, moments = get_state_dict(net, optimizer, options=options)
        if not options.full_state_dict:
            state_dict_saver.save({"model": model, "optimizer": moments}, checkpoint_id=directory / "dcp")
        elif rank.index == 0:
            torch.save({"model": model, "optimizer": moments}, directory / "all.pt")
        if rank.index == 0:
            torch.save(schedule.state_dict(), directory / "schedule.pt")
        dist.barrier()
        whole = StateDictOptions(full_state_dict=True)
        return {"model": get_state_dict(net, optimizer, options=whole)[0], "schedule": schedule}

    return train


# FSDP1 does not shard on one rank, and on four its last rank has no parameters here, which torch cannot load.
SIZES = {"rank 0": [1, 2, 3, 4], "full": [1, 2, 3, 4], "sharded": [1, 2, 3, 4], "FSDP1": [2, 3]}


@pytest.mark.slow
@pytest.mark.parametrize("way", SIZES)
def test_ways_of_torch_pass_on_all_numbers_of_ranks(ranks: RanksFixture, way: str) -> None:
    assert_resume_continues(ranks, by_torch(way), save_on=SIZES[way], load_on=SIZES[way])
