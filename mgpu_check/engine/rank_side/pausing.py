"""Pause a call until all ranks have done the same part of it, and compare their collectives.

A rank reports the part to the pytest process over its connection and waits for the answer. Such a message cannot pair
with a collective of the code under test. The pytest process waits as for any answer, so it also reports a rank that
hangs or dies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from mgpu_check.engine.rank_side.state import backends_of, number_of
from mgpu_check.processes.protocol import Paused
from mgpu_check.torch_hooks.collective_arguments import group_of
from mgpu_check.torch_hooks.collectives import recorder

_UNDESCRIBED = ("", "undefined", "default_pg")

_wait: Callable[[Paused], None] | None = None
_before: dict[str, int] = {}
"""Name of a group -> number of its operations at the start of the call."""


def on_pause(wait: Callable[[Paused], None]) -> None:
    """Set the function that sends a `Paused` and waits for the answer."""
    global _wait
    _wait = wait


def begin() -> None:
    """Start to count operations, at the start of a call."""
    _before.clear()
    _before.update((str(group.group_name), _operations(group)) for group in _groups())


def pause(done: str, *, last: bool = False, slices: Iterable[tuple[str, tuple[int, ...]]] = ()) -> None:
    """Wait until all ranks of the world have done a part of the call and entered the same collectives.

    If the collectives differ, this does not return: the pytest process kills the ranks and reports the difference.

    Args:
        done: the part, such as "step 1".
        last: whether this is the last part, so that every message must have been received.
    """
    if _wait is None or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    operations, described = [], []
    for group in _groups():
        named = group_of(group)
        if named is None:
            continue
        if recorder.alike(named):
            operations.append((named, _operations(group) - _before.get(str(group.group_name), 0)))
        if (text := str(getattr(group, "group_desc", ""))) not in _UNDESCRIBED:
            described.append((named.name, text))
    _wait(
        Paused(done, recorder.agreement(), recorder.flows(), last, tuple(operations), tuple(described), tuple(slices))
    )


def _groups() -> list[Any]:
    if not dist.is_initialized():
        return []
    return [group for group in dist.distributed_c10d._world.pg_map if isinstance(group, dist.ProcessGroup)]


def _operations(group: Any) -> int:
    return sum(map(number_of, backends_of(group)))
