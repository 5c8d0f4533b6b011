"""Compare the states of a training at two numbers of ranks. One rank reads the states of all. Imports torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.gates.relations import close
from mgpu_check.gates.states import StateEntry, explained_by_rounding, is_real, load_of
from mgpu_check.processes.rank_lists import few, named

_SHOWN = 3

Parts = list[torch.Tensor]
"""An entry of the state on each rank, in rank order."""


def same_training(
    one: Path, ranks_of_one: int, other: Path, ranks_of_other: int, tolerance: float | None, rank: Rank
) -> tuple[str, bool]:
    """Compare the floating-point entries of two states, each kept by its own number of ranks.

    Returns the entries that differ, as a text, and whether any entry agrees after its parts were joined.

    Only an entry that all ranks share shows a difference: parts that do not fit together may be divided in another way.
    """
    differing: list[str] = []
    agreeing = False
    of_one, of_other = _parts(one, ranks_of_one), _parts(other, ranks_of_other)
    for entry in filter(of_other.__contains__, of_one):
        left, right = of_one[entry], of_other[entry]
        if _shared(left) and _shared(right) and left[0].shape == right[0].shape:
            if _close(left[0], right[0], tolerance or 0.0):
                agreeing = True
            else:
                differing.append(str(entry))
        elif any(_close(*pair, tolerance or 0.0) for pair in _joined(left, right)):
            agreeing = True
    return few(sorted(differing), _SHOWN) if differing else "", agreeing


def resharded(
    saved: Path, ranks_saved: int, right: Path, ranks_loaded: int, loaded: Path, rank: Rank
) -> dict[StateEntry, str]:
    """Return the entries whose saved parts are in wrong places after loading, each with a description.

    Args:
        saved: the state that the ranks of the checkpoint had.
        loaded: the state right after loading.
    """
    of_saved, of_right = _parts(saved, ranks_saved), _parts(right, ranks_loaded)
    of_loaded = _parts(loaded, ranks_loaded)
    found = {}
    for entry, parts in of_right.items():
        if entry not in of_saved or entry not in of_loaded or (_shared(of_saved[entry]) and _shared(parts)):
            continue
        held = {
            index: got
            for index, (got, expected) in enumerate(zip(of_loaded[entry], parts, strict=True))
            if not _close(got, expected)
        }
        if seen := held and (
            _single_parts(of_saved[entry], held, ranks_loaded) or _other_places(of_saved[entry], held)
        ):
            found[entry] = f"{entry} on {named(list(held))}: {seen}"
    return found


def _single_parts(saved: Parts, held: Mapping[int, torch.Tensor], ranks: int) -> str:
    """Recognize ranks that each load the saved part of one rank.

    Args:
        held: rank -> its wrong part.
    """
    sources = {
        index: next((n for n, part in enumerate(saved) if _begins(got, part)), None) for index, got in held.items()
    }
    if None in sources.values():
        return ""
    loads = ", ".join(f"rank {index} loads the part of rank {source}" for index, source in sources.items())
    return f"{loads}, but {ranks} ranks divide the entry in other places than {len(saved)}"


def _other_places(saved: Parts, held: Mapping[int, torch.Tensor]) -> str:
    """Recognize saved values in other places. Only equal bits count, because many values are similar."""
    known = torch.cat([part.flatten() for part in saved])
    values = torch.cat([got.flatten() for got in held.values()])
    values = values[values != 0]  # padding
    if not len(values) or not bool(torch.isin(values, known).all()):
        return ""
    return "each value was saved, but in another place: parts were joined in another order, or with their padding"


def _parts(directory: Path, ranks: int) -> dict[StateEntry, Parts]:
    """Return the floating-point entries that every rank has."""
    states: list[dict[StateEntry, Any]] = [load_of(directory, index) for index in range(ranks)]
    return {
        entry: [state[entry] for state in states]
        for entry in states[0]
        if all(is_real(state.get(entry)) for state in states)
    }


def _joined(left: Parts, right: Parts) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the whole tensors that both sides may be parts of; flat parts may end with padding."""
    found = []
    for dim in range(min(part.dim() for part in (*left, *right))):
        pairs = [(one, other) for one in _along(left, dim) for other in _along(right, dim)]
        found += [(one, other) for one, other in pairs if one.shape == other.shape]
        if left[0].dim() == 1:
            found += [_without_padding(*pair) for pair in pairs if pair[0].shape != pair[1].shape]
    return found


def _along(parts: Parts, dim: int) -> list[torch.Tensor]:
    """Return the parts joined along a dimension, with and without repeated ones: replicas of a mesh."""
    distinct = [
        part for index, part in enumerate(parts) if not any(torch.equal(part, known) for known in parts[:index])
    ]
    several = [parts] if len(distinct) == len(parts) else [parts, distinct]
    fit = len({(*part.shape[:dim], *part.shape[dim + 1 :]) for part in parts}) == 1
    return [torch.cat(some, dim) for some in several] if fit else []


def _without_padding(one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut zeros from the end of the longer of two flat tensors, at most down to the length of the other one."""
    length = min(len(one), len(other))

    def cut(part: torch.Tensor) -> torch.Tensor:
        return part[:length] if not bool(part[length:].any()) else part

    return cut(one), cut(other)


def _shared(parts: Parts) -> bool:
    """Return whether all ranks have the same values; True for one rank."""
    return all(torch.equal(part, parts[0]) for part in parts)


def _close(one: torch.Tensor, other: torch.Tensor, tolerance: float = 0.0) -> bool:
    return one.dtype == other.dtype and close(one, other, explained_by_rounding(other, tolerance))


def _begins(got: torch.Tensor, part: torch.Tensor) -> bool:
    """Return whether a tensor begins with a part, or is the beginning of it, along each dimension."""
    if got.dim() != part.dim() or not min(got.numel(), part.numel()):
        return False
    common = tuple(slice(min(sizes)) for sizes in zip(got.shape, part.shape, strict=True))
    return _close(got[common], part[common])
