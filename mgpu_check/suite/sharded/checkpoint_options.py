"""Save and load checkpoints with each pair of values of the options of `torch.distributed.checkpoint`."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from mgpu_check.asserts.collectives import same_bits
from mgpu_check.asserts.findings import Findings
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import ShardError
from mgpu_check.suite.common.pairs import drawn_rows, words_of
from mgpu_check.suite.sharded.redistribution import placed
from mgpu_check.suite.sharded.states import shared_directory

_WAYS = (False, True)
_SAVED: Mapping[str, Sequence[Any]] = {
    "flatten_state_dict": (True, False),
    "flatten_sharded_tensors": (True, False),
    "dedup_replicated_tensors": (None, False, True),
    "dedup_save_to_lowest_rank": _WAYS,
    "enable_plan_caching": _WAYS,
}
"""Options of DefaultSavePlanner, the default first."""
_WRITTEN: Mapping[str, Sequence[Any]] = {
    "single_file_per_rank": (True, False),
    "sync_files": (True, False),
    "thread_count": (1, 3),
    "per_thread_copy_ahead": (10_000_000, 1),
    "cache_staged_state_dict": _WAYS,
    "overwrite": (True, False),
}
"""Options of FileSystemWriter, the default first."""
_OPTIONS: Mapping[str, Sequence[Any]] = {
    **_SAVED,
    **_WRITTEN,
    "process_group": (None, "world"),
    "use_collectives": (True, False),
    "no_dist": _WAYS,
    "asynchronous": ("", "by its own stager", "by another stager"),
    "allow_partial_load": _WAYS,
}
"""Options of saving and loading, the default first. With `no_dist` each rank has a checkpoint of its own."""


def _together(row: Mapping[str, Any]) -> bool:
    """Return whether torch takes these options together."""
    if row.get("no_dist") and (row.get("process_group") or row.get("use_collectives") is False):
        return False
    if row.get("overwrite") is False and row.get("use_collectives") is False:
        return False  # a rank that comes late finds the checkpoint of the others
    # Plans are cached for the class of the planner, for any number of ranks, and sent to the coordinator. The
    # second save goes to the same directory.
    caching = row.get("enable_plan_caching")
    alone = row.get("no_dist") or row.get("use_collectives") is False
    return not (caching and (alone or row.get("overwrite") is False))


def assert_checkpoint_options_agree(rank: Rank, seed: int, *, more: bool) -> None:
    """Assert that each tensor is loaded as it was saved, with each pair of options. A collective.

    Args:
        more: whether to save with all rows of options, or with an eighth of them, by the seed.
    """
    directory = shared_directory(rank)
    with Findings() as findings:
        try:
            for number, row in enumerate(drawn_rows(_OPTIONS, _together, seed=seed, more=more, share=8)):
                what = f"checkpoint with {words_of(row, _OPTIONS)}, on {rank.device}, rank {rank.index}"
                place = Path(directory) / str(number) / (str(rank.index) if row["no_dist"] else "")
                with findings.collected():
                    _judge(_saved_and_loaded(place, row, rank, seed), _state(row, rank, seed, 1), what, rank)
            dist.barrier(device_ids=[rank.device.index] if rank.device.type == "cuda" else None)
        finally:
            if rank.index == 0:
                shutil.rmtree(directory, ignore_errors=True)


def _state(row: Mapping[str, Any], rank: Rank, seed: int, factor: int) -> dict[str, Any]:
    """Return the values of a checkpoint times `factor`; with 0 they are the target of loading."""

    def numbers(*shape: int, start: int = 0) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return ((torch.arange(count) + seed + start).reshape(shape) % 97 + 1.0) * factor

    made: dict[str, Any] = {"own": numbers(5, start=7).to(rank.device)}
    if row["flatten_state_dict"]:  # only then torch changes numbers, and what is nested
        made |= {"number": 12 * factor, "nested": {"inner": {"values": numbers(4, start=3).to(rank.device)}}}
        made["nested"]["list"] = [numbers(2), 3 * factor]
    if row["no_dist"]:
        made["own"] += rank.index * factor
        return made
    line = init_device_mesh("cuda", (rank.size,))
    for name, shape, placement in (("by rows", (7, 3), Shard(0)), ("by columns", (2, 5), Shard(1))):
        made[name] = placed(numbers(*shape), [placement], line)
    made["on all"] = placed(numbers(3), [Replicate()], line)
    return made


def _saved_and_loaded(place: Path, row: Mapping[str, Any], rank: Rank, seed: int) -> dict[str, Any]:
    group = rank.group if row["process_group"] else None
    state = _state(row, rank, seed, 1)
    for _ in range(2 if row["enable_plan_caching"] else 1):
        options: dict[str, Any] = {
            "planner": DefaultSavePlanner(**{name: row[name] for name in _SAVED}),
            "storage_writer": FileSystemWriter(place, **{name: row[name] for name in _WRITTEN}),
            "process_group": group,
            "no_dist": row["no_dist"],
            "use_collectives": row["use_collectives"],
        }
        if not row["asynchronous"]:
            state_dict_saver.save(state, **options)
            continue
        if row["asynchronous"] == "by another stager":
            options["async_stager"] = BlockingAsyncStager()
        done: Any = state_dict_saver.async_save(state, **options)
        getattr(done, "upload_completion", done).result()
    loaded = _state(row, rank, seed, 0)
    if row["allow_partial_load"]:
        loaded["not saved"] = torch.ones(2, device=rank.device)
    planner = DefaultLoadPlanner(row["flatten_state_dict"], row["flatten_sharded_tensors"], row["allow_partial_load"])
    reader = FileSystemReader(place)
    state_dict_loader.load(loaded, storage_reader=reader, planner=planner, process_group=group, no_dist=row["no_dist"])
    if row["allow_partial_load"] and not bool((loaded.pop("not saved") == 1).all()):
        raise ShardError(f"{place.name}: an entry that was not saved was changed by loading", ranks=[rank.index])
    return loaded


def _judge(got: Any, right: Any, what: str, rank: Rank) -> None:
    if isinstance(right, (dict, list)):
        if isinstance(right, dict) and got.keys() != right.keys():
            raise ShardError(f"{what}: has the entries {[*got]}, expected {[*right]}", ranks=[rank.index])
        for name, value in right.items() if isinstance(right, dict) else enumerate(right):
            _judge(got[name], value, f"{what}: {name}", rank)
        return
    if isinstance(right, DTensor):
        got, right = got.to_local(), right.to_local()
    same = same_bits(right.cpu(), got.cpu()) if isinstance(right, torch.Tensor) else got == right
    if not same:
        raise ShardError(f"{what} is {got}, {right} was saved", ranks=[rank.index])
