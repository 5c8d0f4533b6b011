"""Save the state of a training run on each rank, and compare the saved states there. Imports torch."""

from __future__ import annotations

import contextlib
import hashlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data.distributed import DistributedSampler

from mgpu_check.engine.rank_side.pausing import pause
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.gates.flattening import Opaque, flattened
from mgpu_check.gates.meshes import Mesh, mesh_of
from mgpu_check.numerics.bounds import unit_roundoff
from mgpu_check.numerics.compare import difference
from mgpu_check.numerics.envelopes import envelopes
from mgpu_check.numerics.perturbation import Perturbed
from mgpu_check.torch_hooks.patches import replaced
from mgpu_check.torch_hooks.seeds import seed_everything
from mgpu_check.torch_hooks.tensors import as_real, digest_of

Train = Callable[[Rank, Path, int, int], Any]

_ENTRIES, _GENERATORS, _EPOCHS = "entries", "generators", "epochs"
"""Keys of a file: the state that `train` returned, the states of generators, and the epochs of samplers."""

# Two runs estimate poorly how far a third may be off, and both runs may err in opposite directions.
_ROOM = 8.0
# The resumed run and the uninterrupted run each have rounding errors.
_BOTH = 2.0
# Rounding explains this fraction of the largest magnitude in an entry between two equal runs. In narrow dtypes that is
# hardly a unit roundoff, so some roundoffs are granted instead. A larger difference is due to random numbers.
_EXPLAINED, _ROUNDOFFS = 2.0**-10, 16.0


@dataclass(frozen=True)
class StateEntry:
    """An entry of the state: a value that `train` returned under a name, or the state of a generator."""

    name: str
    generator: bool = False

    def __str__(self) -> str:
        return f"random numbers of {self.name}" if self.generator else self.name


@dataclass(frozen=True)
class StateRow:
    """The comparison of one entry of the state, on one rank.

    Attributes:
        same: whether the entry has the expected value; None if two uninterrupted runs disagree about that value.
        repeats: whether two uninterrupted runs agree up to rounding; always True for generators.
        got, expected: digests; "" for a missing entry.
        moved: whether the entry has changed since the earlier step.
    """

    entry: StateEntry
    same: bool | None
    detail: str
    got: str
    expected: str
    moved: bool
    repeats: bool


@dataclass(frozen=True)
class TrainingPart:
    """A part of the training: its steps, seed, checkpoint directory and perturbation.

    Attributes:
        mesh: the mesh of the ranks; empty for none.
        apart: whether each rank has its own checkpoint, in `directory` under its index.
        spread: size of the rounding errors that are added to each operator, in unit roundoffs; see `Perturbed`.
        signs: seed of the signs of the errors.
    """

    start: int
    stop: int
    directory: Path
    seed: int
    mesh: Mesh = ()
    apart: bool = False
    spread: float = 0.0
    signs: int = 0


def train_and_keep(train: Train, part: TrainingPart, file: Path, rank: Rank) -> str:
    """Run a part of the training, and save the state that it returns.

    Returns why that state cannot be used, or "" if it can.
    """
    if part.mesh:
        rank = replace(rank, mesh=mesh_of(rank, part.mesh))
    seed_everything(part.seed)
    generator = torch.Generator().manual_seed(part.signs)
    # Training runs in its own dtypes, so float64 is perturbed by its own roundoff.
    perturbed = Perturbed(part.spread, generator, unit_roundoff(torch.float64)) if part.spread else nullcontext()
    epochs: list[int] = []
    with perturbed, _noting_epochs(epochs):
        state = train(rank, part.directory / str(rank.index) if part.apart else part.directory, part.start, part.stop)
    pause(f"steps {part.start} to {part.stop}", last=True)
    # Read the generators before code of the gate can draw from them.
    generators = _generators(rank)
    if not isinstance(state, Mapping):
        return (
            f"train(rank, directory, {part.start}, {part.stop}) returned a {type(state).__name__}; return a mapping "
            "from names to the parts of the state: tensors, numbers, state dicts, or objects with state_dict()"
        )
    try:
        flat = flattened(state)
    except Opaque as error:
        return f"train returned a state that cannot be compared: {error}"
    if not flat:
        return "train returned an empty mapping; return the model and the optimizer, at least"
    torch.save({_ENTRIES: flat, _GENERATORS: generators, _EPOCHS: epochs}, kept(file, rank))
    return ""


@contextlib.contextmanager
def _noting_epochs(epochs: list[int]) -> Iterator[None]:
    """Note which epoch a sampler is set to, each time that it is gone through."""
    go_through = DistributedSampler.__iter__

    def noted(sampler: DistributedSampler[Any]) -> Iterator[Any]:
        epochs.append(int(sampler.epoch))
        return go_through(sampler)

    with replaced(DistributedSampler, "__iter__", noted):
        yield


def epochs_of(directories: Sequence[Path], rank: Rank) -> list[list[int]]:
    """Return the epochs of samplers in the runs that were kept there, in their order."""
    return [torch.load(kept(directory, rank), weights_only=False)[_EPOCHS] for directory in directories]


def kept(directory: Path, rank: Rank) -> Path:
    """Return the file of a rank's state; make the directory if it is missing."""
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"{rank.index}.pt"


def load(directory: Path, rank: Rank) -> dict[StateEntry, Any]:
    return load_of(directory, rank.index)


def load_of(directory: Path, index: int) -> dict[StateEntry, Any]:
    state: dict[str, dict[str, Any]] = torch.load(directory / f"{index}.pt", weights_only=False)
    return {
        StateEntry(name, kind == _GENERATORS): value
        for kind in (_ENTRIES, _GENERATORS)
        for name, value in state[kind].items()
    }


def _generators(rank: Rank) -> dict[str, str]:
    states = {"torch (CPU)": digest_of(torch.get_rng_state()), "Python": _digest(repr(random.getstate()))}
    if torch.cuda.is_available():
        states["torch (device)"] = digest_of(torch.cuda.get_rng_state(rank.device))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        states["NumPy"] = _digest(
            repr([part if not hasattr(part, "tolist") else part.tolist() for part in numpy.random.get_state()])
        )
    return states


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def compare(
    got: Path,
    runs: list[Path],
    earlier: Path,
    perturbed: list[Path],
    tolerance: float | None,
    rounded: bool,
    rank: Rank,
) -> list[StateRow]:
    """Compare the state saved in `got` with the states of `runs`, which should all be equal, entry by entry.

    Args:
        runs: one or two runs.
        earlier: the state at an earlier step; an entry that equals it has not changed since.
        perturbed: runs with added rounding errors, which show how far rounding moves each entry.
        rounded: whether the runs add in different orders, so that all differences that rounding explains are granted.
    """
    new, old = load(got, rank), load(earlier, rank)
    first, second = load(runs[0], rank), load(runs[-1], rank)
    moves = envelopes(
        {entry: value for entry, value in first.items() if is_real(value)}, (load(run, rank) for run in perturbed)
    )
    rows = []
    for entry in dict.fromkeys([*first, *second, *new]):
        noise = _noise(first.get(entry), second.get(entry)) if (entry in first) == (entry in second) else None
        repeats = entry.generator or (
            noise is not None and noise <= explained_by_rounding(first.get(entry), tolerance or 0.0)
        )
        if noise is None or not repeats:
            same: bool | None = None
            detail = _difference(second.get(entry), first.get(entry), 0.0, None)
        elif entry not in new or entry not in first:
            same, detail = False, "is missing" if entry in first else "is there, but not in an uninterrupted run"
        else:
            granted = _ROOM * noise + _BOTH * moves.get(entry, 0.0)
            granted += explained_by_rounding(first[entry]) if rounded else 0.0
            detail = _difference(new[entry], first[entry], granted, tolerance)
            same = not detail
        moved = entry not in old or bool(_difference(first.get(entry), old[entry], 0.0, None))
        digests = digest_of_value(new.get(entry)), digest_of_value(first.get(entry))
        rows.append(StateRow(entry, same, detail, *digests, moved, repeats))
    return rows


def digest_of_value(value: Any) -> str:
    """Return a digest that is equal for equal values; "" for None."""
    if value is None:
        return ""
    if isinstance(value, torch.Tensor):
        return digest_of(value)
    return f"{type(value).__name__} {value!r}"


def _noise(one: Any, other: Any) -> float | None:
    """Return the largest difference of an entry between two runs that should be equal; None if it is not comparable."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return 0.0 if type(one) is type(other) and one == other else None
    if one.shape != other.shape or one.dtype != other.dtype:
        return None
    if digest_of_value(one) == digest_of_value(other):
        return 0.0
    one, other = as_real(one), as_real(other)
    if not one.dtype.is_floating_point:
        return None
    same = (one == other) | (one.isnan() & other.isnan())  # infinities, too
    return float(torch.where(same, 0.0, (one.double() - other.double()).abs().nan_to_num(torch.inf)).max())


def explained_by_rounding(value: Any, tolerance: float = 0.0) -> float:
    """Return the largest difference of two runs in this entry that rounding or the user's tolerance explains."""
    if (
        not isinstance(value, torch.Tensor)
        or not value.numel()
        or not (value.is_floating_point() or value.is_complex())
    ):
        return 0.0
    largest = float(value.abs().double().nan_to_num(0.0, 0.0, 0.0).max())
    roundoff = torch.finfo(value.dtype).eps / 2
    return max(_EXPLAINED, _ROUNDOFFS * roundoff, tolerance) * largest


def is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _difference(got: Any, expected: Any, granted: torch.Tensor | float, tolerance: float | None) -> str:
    """Describe a difference that exceeds `granted`; return "" if there is no such difference."""
    if not isinstance(got, torch.Tensor) or not isinstance(expected, torch.Tensor):
        same = type(got) is type(expected) and got == expected
        return "" if same else f"got {_cut(got)}, expected {_cut(expected)}"
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"got {tuple(got.shape)} {got.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
    got, expected = as_real(got), as_real(expected)
    if tolerance is not None and expected.dtype.is_floating_point and expected.numel():
        granted = tolerance * float(expected.double().abs().max())
    found = difference(got, expected, granted)
    return "" if found is None else str(found)


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) and len(value) == 32 else repr(value)
    return text if len(text) <= 40 else text[:39] + "…"
