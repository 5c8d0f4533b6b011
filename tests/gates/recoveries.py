"""Trainings with their own recovery, right and wrong ones."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import PrefixStore, TCPStore

from mgpu_check.gates.run.survival import Worker

SAMPLES, STEPS = 12, 3
PER_STEP = SAMPLES // STEPS


def data() -> torch.Tensor:
    return torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(1))


def made(worker: Worker) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 2).to(worker.device)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, rows: torch.Tensor, ranks: int) -> None:
    optimizer.zero_grad()
    (model(rows).square().sum() / PER_STEP).backward()
    for parameter in model.parameters():
        if parameter.grad is not None and ranks > 1:
            dist.all_reduce(parameter.grad)
    optimizer.step()


def from_checkpoints(worker: Worker, fault: str = "") -> dict[str, Any]:
    """Train under ``torchrun --max-restarts``: all ranks start again from the last checkpoint.

    `fault`: "torn" files, "moments" not loaded, the "place" in the data not loaded, "late" (saved before the step, as if
    it had been made), "one rank" that loads nothing.
    """
    dist.init_process_group("nccl", timeout=timedelta(seconds=20))
    model, optimizer = made(worker)
    counts = torch.zeros(SAMPLES, dtype=torch.int64)
    path, first = worker.directory / "last.pt", 0
    if path.exists() and not (fault == "one rank" and worker.rank == 1):
        state = torch.load(path, map_location=worker.device)
        model.load_state_dict(state["model"])
        counts = state["counts"].cpu()
        first = 0 if fault == "place" else state["step"]
        if fault != "moments":
            optimizer.load_state_dict(state["optimizer"])
    share = PER_STEP // worker.size
    for step in range(first, STEPS):
        start = step * PER_STEP + worker.rank * share
        after = {"step": step + 1, "counts": counts}
        if fault == "late":
            dist.barrier(device_ids=[worker.rank])
        if fault == "late" and worker.rank == 0:
            torch.save(
                {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **after}, path.with_suffix(".new")
            )
            os.replace(path.with_suffix(".new"), path)
        step_of(model, optimizer, data()[start : start + share].to(worker.device), worker.size)
        counts[step * PER_STEP : (step + 1) * PER_STEP] += 1
        if worker.rank == 0 and fault != "late":
            new = path if fault == "torn" else path.with_suffix(".new")
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), **after}, new)
            if fault != "torn":
                os.replace(new, path)
        dist.barrier(device_ids=[worker.rank])
    return {"model": model.state_dict(), "samples": counts}


def elastic(worker: Worker, fault: str = "") -> dict[str, Any]:
    """Go on without the ranks that are gone: those that are left agree on a step, and form a new group.

    `fault`: "no detection" (the error ends the rank), "own share" (the samples of the rank that is gone are left out).
    """
    limit = timedelta(seconds=2)
    store = TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), is_master=False, timeout=limit)
    model, optimizer = made(worker)
    counts = torch.zeros(SAMPLES, dtype=torch.int64)
    kept: list[Any] = []

    def keep() -> None:
        states = {name: value.clone() for name, value in model.state_dict().items()}
        moments = [{key: value.clone() for key, value in state.items()} for state in optimizer.state.values()]
        kept.append((states, moments, counts.clone()))

    def restore(step: int) -> None:
        states, moments, before = kept[step]
        model.load_state_dict(states)
        optimizer.state.clear()
        for parameter, state in zip(model.parameters(), moments, strict=False):
            optimizer.state[parameter] = {key: value.clone() for key, value in state.items()}
        counts.copy_(before)
        del kept[step + 1 :]

    keep()
    members, generation = list(range(worker.size)), 0
    while len(kept) <= STEPS:
        try:
            if len(members) > 1 and not dist.is_initialized():
                place = PrefixStore(f"group {generation}", store)
                index = members.index(worker.rank)
                dist.init_process_group("nccl", store=place, rank=index, world_size=len(members), timeout=limit)
            step = len(kept) - 1
            rows = list(range(step * PER_STEP, (step + 1) * PER_STEP))
            share = len(members) if fault != "own share" else worker.size
            place_among = members.index(worker.rank) if fault != "own share" else worker.rank
            mine = rows[place_among::share]
            step_of(model, optimizer, data()[mine].to(worker.device), len(members))
            trained = torch.zeros(SAMPLES, dtype=torch.int64, device=worker.device)
            trained[mine] = 1
            if len(members) > 1:
                dist.all_reduce(trained)
            counts += trained.cpu()
            keep()
        except RuntimeError:
            if fault == "no detection":
                raise
            generation += 1
            if dist.is_initialized():
                dist.destroy_process_group()
            members, step = agreement(store, generation, worker.rank, members, len(kept) - 1)
            restore(step)
    return {"model": model.state_dict(), "samples": counts}


def agreement(store: Any, generation: int, rank: int, members: list[int], step: int) -> tuple[list[int], int]:
    """Return who is left, and the last step that all of them have made: the lowest rank decides for all."""
    store.set(f"{generation}/{rank}", str(step))
    steps = {}
    for member in members:
        try:
            store.wait([f"{generation}/{member}"], timedelta(seconds=1))
            steps[member] = int(store.get(f"{generation}/{member}"))
        except RuntimeError:
            continue
    if rank == min(steps):
        store.set(f"{generation}/decision", f"{','.join(map(str, sorted(steps)))};{min(steps.values())}")
    left, agreed = store.get(f"{generation}/decision").decode().split(";")
    return [int(member) for member in left.split(",")], int(agreed)
