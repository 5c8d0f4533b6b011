"""Walk a batch and its shards side by side, through the containers that `nn.parallel.scatter` supports.

These containers differ from those of `torch_hooks.nested` and of torch's pytree. Errors name the place of a difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mgpu_check.errors import ShardError


def columns(batch: Any, shards: Sequence[Any], where: str = "batch") -> Iterator[tuple[str, Any, list[Any]]]:
    """Yield each tensor or other leaf of `batch`: its name, the leaf, and the leaf at the same place in every shard.

    Raises:
        ShardError: a shard is nested differently: another type, length or set of keys.
    """
    if isinstance(batch, Mapping):
        for key in batch:
            yield from columns(batch[key], _parts(batch, shards, key, where), f"{where}[{key!r}]")
        _require_same_length(batch, shards, where)
    elif isinstance(batch, (tuple, list)) and len(batch) > 0:
        _require_same_length(batch, shards, where)
        names = getattr(batch, "_fields", None)
        for index, part in enumerate(batch):
            name = f"{where}.{names[index]}" if names else f"{where}[{index}]"
            yield from columns(part, _parts(batch, shards, index, where), name)
    else:
        for index, shard in enumerate(shards):
            if isinstance(batch, torch.Tensor) != isinstance(shard, torch.Tensor):
                _fail(where, index, type(batch).__name__, type(shard).__name__)
        yield where, batch, list(shards)


def _parts(batch: Any, shards: Sequence[Any], key: Any, where: str) -> list[Any]:
    parts = []
    for index, shard in enumerate(shards):
        if type(shard) is not type(batch):
            _fail(where, index, type(batch).__name__, type(shard).__name__)
        try:
            parts.append(shard[key])
        except (KeyError, IndexError):
            _fail(where, index, f"an entry {key!r}", "none")
    return parts


def _require_same_length(batch: Any, shards: Sequence[Any], where: str) -> None:
    for index, shard in enumerate(shards):
        if type(shard) is not type(batch):
            _fail(where, index, type(batch).__name__, type(shard).__name__)
        if len(shard) != len(batch):
            _fail(where, index, f"{len(batch)} entries", f"{len(shard)}")


def _fail(where: str, index: int, expected: str, got: str) -> None:
    raise ShardError(f"{where}: shard {index} is nested differently: expected {expected}, got {got}", ranks=(index,))
