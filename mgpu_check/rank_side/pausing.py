"""Pause a call until all ranks have done the same part of it, and compare what they have called.

Ranks say so to the pytest process by the connection that they have to it: it cannot pair with a collective of anybody,
and what becomes of a rank that hangs or dies meanwhile is told by the same wait as everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist

from mgpu_check.processes.protocol import Paused
from mgpu_check.rank_side.state import backends_of, number_of
from mgpu_check.torch_hooks.arguments import group_of
from mgpu_check.torch_hooks.collectives import recorder

__all__ = ["begin", "on_pause", "pause"]

_UNDESCRIBED = ("", "undefined", "default_pg")

_wait: Callable[[Paused], None] | None = None
_before: dict[str, int] = {}
"""By name of a group, the operations that it had entered when the call began."""


def on_pause(wait: Callable[[Paused], None]) -> None:
    """Have `wait` called at each pause from now on."""
    global _wait
    _wait = wait


def begin() -> None:
    """Count operations from here."""
    _before.clear()
    _before.update((str(group.group_name), _operations(group)) for group in _groups())


def pause(done: str, *, last: bool = False, held: Iterable[tuple[str, tuple[int, ...]]] = ()) -> None:
    """Wait until all ranks of the world have done a part of the call; compare the collectives that they have entered.

    Where they differ this does not return: the pytest process ends the ranks, and reports what differs.

    Args:
        done: the part, such as "step 1".
        last: no later part may receive what this one has sent.
        held: see `Paused`.
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
    _wait(Paused(done, recorder.agreement(), recorder.flows(), last, tuple(operations), tuple(described), tuple(held)))


def _groups() -> list[Any]:
    if not dist.is_initialized():
        return []
    return [group for group in dist.distributed_c10d._world.pg_map if isinstance(group, dist.ProcessGroup)]


def _operations(group: Any) -> int:
    return sum(map(number_of, backends_of(group)))
