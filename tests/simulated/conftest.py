"""A simulated node for the tests of this folder, in this process and in forked ranks."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from mgpu_check.simulated import simulated_node


@pytest.fixture
def node() -> Iterator[int]:
    """Four simulated devices; seeded."""
    torch.manual_seed(0)
    with simulated_node(4):
        yield 4


def _rank(
    index: int, size: int, store: str, backend: str | None, body: Callable[[int, int], object], results: Any
) -> None:
    torch.set_num_threads(1)
    try:
        with simulated_node(size):
            torch.cuda.set_device(index)
            file = dist.FileStore(store, size)  # type: ignore[attr-defined]  # torch's list of names lacks it
            dist.init_process_group(backend, store=file, rank=index, world_size=size)
            value = body(index, size)
            results.put((index, True, value))
            dist.barrier(device_ids=[index])
            dist.destroy_process_group()
    except BaseException:
        results.put((index, False, traceback.format_exc()))


@pytest.fixture
def on_ranks(tmp_path: Path) -> Callable[..., list[object]]:
    """``on_ranks(body, size=2, backend="nccl")``: body(rank, size) on forked ranks; its values in rank order."""

    def run(body: Callable[[int, int], object], size: int = 2, backend: str | None = "nccl") -> list[object]:
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        store = str(tmp_path / f"store-{len(list(tmp_path.iterdir()))}")
        ranks = [context.Process(target=_rank, args=(i, size, store, backend, body, results)) for i in range(size)]
        for rank in ranks:
            rank.start()
        try:
            found = sorted((results.get(timeout=60) for _ in ranks), key=lambda found: found[0])
        finally:
            for rank in ranks:
                rank.join(timeout=10)
                if rank.is_alive():
                    rank.kill()
                    rank.join()
        for index, fine, value in found:
            assert fine, f"rank {index}:\n{value}"
        return [value for _, _, value in found]

    return run


class Passing(TorchDispatchMode):
    """A mode that changes nothing, and lets operators come by way of Python."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def refusal(call):
    try:
        call()
    except (RuntimeError, ValueError) as error:
        return type(error).__name__, str(error)
    return None
