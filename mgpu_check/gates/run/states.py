"""The state of a training run on each rank: flatten it, save it, and compare saved states. Imports torch.

Flattening gives tensors, numbers and texts by dotted name. Two different values must not flatten to the same result,
so a value that cannot be taken apart is refused. Unlike `torch_hooks.nested`, this module also takes apart objects,
generators and arrays, by their state. For states at two numbers of ranks, one rank reads the states of all.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
import gc
import hashlib
import io
import os
import random
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils.data.distributed import DistributedSampler

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.engine.rank_side.worker import pause
from mgpu_check.gates.comparison.relations import close
from mgpu_check.gates.search.scenarios import Mesh, mesh_of
from mgpu_check.numerics.differences import difference
from mgpu_check.numerics.perturbation import Perturbed
from mgpu_check.numerics.reduction import unit_roundoff
from mgpu_check.numerics.steps import envelopes
from mgpu_check.processes.rank_lists import few, named
from mgpu_check.torch_hooks.patches import replaced
from mgpu_check.torch_hooks.switches import seed_everything
from mgpu_check.torch_hooks.tensors import as_real, copied, digest_of, local_part

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_WITHOUT_STATE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType)


class Opaque(ValueError):
    """A value holds an object that cannot be compared."""


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor on the CPU; for a DTensor, a copy of this rank's part."""
    return copied(local_part(tensor))


def flattened(
    value: Any, name: str = "", *, take: Callable[[torch.Tensor], torch.Tensor] = own_part, strict: bool = True
) -> dict[str, Any]:
    """Return `value` as tensors on the CPU (floats as float64), numbers and texts, by dotted name.

    Args:
        value: tensors, arrays, numbers, texts; mappings, sequences and sets of these; objects with ``state_dict()``,
            dataclasses, and other objects by their attributes.
        take: makes a copy of a tensor on the CPU.
        strict: refuse values that cannot be taken apart. If False, such a value is replaced by the name of its type.

    Raises:
        Opaque: `strict`, and a value cannot be taken apart or two entries have the same name.
    """
    return _flattened(value, name, take, strict, ())


def _flattened(
    value: Any, name: str, take: Callable[[torch.Tensor], torch.Tensor], strict: bool, outside: tuple[int, ...]
) -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        return {name: take(value)}
    if isinstance(value, torch.Generator):
        return {name: value.get_state().clone()}
    if isinstance(value, float):
        return {name: torch.tensor(value, dtype=torch.float64)}
    if value is None or isinstance(value, bool | int | str | bytes | complex):
        return {name: value}
    if _is_numpys(value) and hasattr(value, "dtype") and value.dtype.kind in "biufc":
        try:
            return {name: torch.as_tensor(value).clone()}
        except TypeError:  # torch lacks the dtype, such as longdouble: repr has all digits
            return {name: repr(value.tolist())}
    if id(value) in outside:
        return _opaque(value, name, strict, "which holds itself")
    members = _parts(value)
    if members is None:
        text = _text(value)
        return {name: text} if text is not None else _opaque(value, name, strict, "which cannot be taken apart")
    flat: dict[str, Any] = {}
    for key, member in members:
        inner = f"{name}.{key}" if name and key else name or key
        entries = _flattened(member, inner, take, strict, (*outside, id(value)))
        if strict and (twice := flat.keys() & entries.keys()):
            raise Opaque(f"there are two entries {min(twice)!r}; give them keys that differ, and have no dots in them")
        flat.update(entries)
    return flat


def _opaque(value: Any, name: str, strict: bool, reason: str) -> dict[str, Any]:
    if not strict:
        return {name: type(value).__name__}
    raise Opaque(
        f"{name or 'the whole'} is a {type(value).__name__}, {reason}; give it a state_dict(), or give in its "
        "place the tensors, numbers and texts that it holds"
    )


def _parts(value: Any) -> list[tuple[str, Any]] | None:
    """Return the parts of a value by key; None if it has no parts. An empty key adds nothing to the name."""
    pairs: Iterable[tuple[Any, Any]]
    if isinstance(value, (*_WITHOUT_STATE, enum.Enum, os.PathLike, range, bytearray, set, frozenset)):
        return None
    if isinstance(value, Mapping):
        pairs = value.items()
    elif callable(getattr(value, "state_dict", None)):
        pairs = [("", value.state_dict())]
    elif dataclasses.is_dataclass(value):
        field_names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]
        pairs = {**{name: getattr(value, name) for name in field_names}, **getattr(value, "__dict__", {})}.items()
    elif isinstance(value, functools.partial):
        pairs = [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    elif isinstance(value, random.Random):
        pairs = enumerate(value.getstate())
    elif isinstance(value, io.BytesIO):
        pairs = [("", value.getvalue())]
    elif _is_numpys(value) and hasattr(value, "bit_generator"):
        pairs = value.bit_generator.state.items()
    elif _is_numpys(value) and hasattr(value, "get_state"):
        pairs = enumerate(value.get_state())
    elif _is_numpys(value) and hasattr(value, "dtype") and value.ndim:
        pairs = enumerate(value.tolist())
    elif isinstance(value, Sequence) or type(value).__name__ == "deque":
        pairs = enumerate(value)
    elif getattr(value, "__dict__", None):
        pairs = vars(value).items()
    else:
        return None
    return [(str(key), member) for key, member in pairs]


def _text(value: Any) -> str | None:
    """Return a text that differs between different values; None if no text can guarantee that."""
    if isinstance(value, _WITHOUT_STATE):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
    if isinstance(value, set | frozenset):  # sorted, because a set has no order
        texts = [_text(member) for member in value]
        return None if None in texts else repr(sorted(text for text in texts if text is not None))
    text, value_type = repr(value), cast(Any, type(value))
    if value_type.__repr__ is object.__repr__ or _ADDRESS.search(text) or _holds_tensors(value):
        return None  # repr of a tensor has four digits, and leaves out elements
    return text


def _holds_tensors(value: Any) -> bool:
    visited: dict[int, Any] = {}
    pending = [value]
    while pending:
        referent = pending.pop()
        if id(referent) in visited or isinstance(referent, _WITHOUT_STATE):
            continue
        visited[id(referent)] = referent
        if isinstance(referent, torch.Tensor) or type(referent).__name__ == "ndarray":
            return True
        pending += gc.get_referents(referent)
    return False


def _is_numpys(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "numpy"


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
    """The comparison of one entry of the state, on one rank."""

    entry: StateEntry
    same: bool | None  # whether it has the expected value; None if two uninterrupted runs disagree about that value
    detail: str
    got: str | None  # a digest; None for a missing entry
    expected: str | None
    moved: bool  # whether the entry has changed since the earlier step
    repeats: bool  # whether two uninterrupted runs agree up to rounding; always True for generators


@dataclass(frozen=True)
class TrainingPart:
    """A part of the training: its steps, seed, checkpoint directory and perturbation."""

    start: int
    stop: int
    directory: Path
    seed: int
    mesh: Mesh = ()  # the mesh of the ranks; empty for none
    per_rank: bool = False  # whether each rank has its own checkpoint, in `directory` under its index
    spread: float = 0.0  # size of the rounding errors that are added to each operator, in roundoffs; see `Perturbed`
    signs: int = 0  # seed of the signs of the errors


def train_and_keep(train: Train, training: TrainingPart, file: Path, rank: Rank) -> str | None:
    """Run a part of the training, save the state that it returns, and return why that state cannot be used, if so."""
    if training.mesh:
        rank = replace(rank, mesh=mesh_of(rank, training.mesh))
    seed_everything(training.seed)
    # Training runs in its own dtypes, so float64 is perturbed by its own roundoff.
    mode = Perturbed(training.spread, torch.Generator().manual_seed(training.signs), unit_roundoff(torch.float64))
    directory = training.directory / str(rank.index) if training.per_rank else training.directory
    epochs: list[int] = []
    with mode if training.spread else contextlib.nullcontext(), _noting_epochs(epochs):
        state = train(rank, directory, training.start, training.stop)
    pause(f"steps {training.start} to {training.stop}", last=True)
    # Read the generators before code of the gate can draw from them.
    generators = _generators(rank)
    if not isinstance(state, Mapping):
        return (
            f"train(rank, directory, {training.start}, {training.stop}) returned a {type(state).__name__}; return a "
            "mapping from names to the parts of the state: tensors, numbers, state dicts, or objects with state_dict()"
        )
    try:
        flat = flattened(state)
    except Opaque as error:
        return f"train returned a state that cannot be compared: {error}"
    if not flat:
        return "train returned an empty mapping; return the model and the optimizer, at least"
    torch.save({_ENTRIES: flat, _GENERATORS: generators, _EPOCHS: epochs}, kept(file, rank))
    return None


def _noting_epochs(epochs: list[int]) -> contextlib.AbstractContextManager[None]:
    # A patch, because `__iter__` reads the plain attribute `epoch` (torch/utils/data/distributed.py, torch 2.13).
    iterate = DistributedSampler.__iter__

    def noted(sampler: DistributedSampler[Any]) -> Iterator[Any]:
        epochs.append(int(sampler.epoch))
        return iterate(sampler)

    return replaced(DistributedSampler, "__iter__", noted)


def epochs_of(directories: Sequence[Path], rank: Rank) -> list[list[int]]:
    """Return the epochs of samplers in the runs that were kept there, in their order."""
    return [_read(kept(directory, rank))[_EPOCHS] for directory in directories]


def kept(directory: Path, rank: Rank) -> Path:
    """Return the file of a rank's state; make the directory if it is missing."""
    directory.mkdir(parents=True, exist_ok=True)
    return directory / f"{rank.index}.pt"


def _read(file: Path) -> dict[str, Any]:
    # An entry may be of a user's subclass of int or str. By default, loading refuses classes that are not on its list
    # (torch/serialization.py, load, torch 2.13).
    return torch.load(file, weights_only=False)


def load(directory: Path, index: int) -> dict[StateEntry, Any]:
    state = _read(directory / f"{index}.pt")
    values = {StateEntry(name): value for name, value in state[_ENTRIES].items()}
    return values | {StateEntry(name, generator=True): value for name, value in state[_GENERATORS].items()}


def _generators(rank: Rank) -> dict[str, str]:
    states = {"torch (CPU)": digest_of(torch.get_rng_state()), "Python": _digest(repr(random.getstate()))}
    if torch.cuda.is_available():
        states["torch (device)"] = digest_of(torch.cuda.get_rng_state(rank.device))
    if (numpy := sys.modules.get("numpy")) is not None:
        fields = [field.tolist() if hasattr(field, "tolist") else field for field in numpy.random.get_state()]
        states["NumPy"] = _digest(repr(fields))
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
    new, old, first_state, second_state = (load(path, rank.index) for path in (got, earlier, runs[0], runs[-1]))
    real = {entry: value for entry, value in first_state.items() if is_real(value)}
    moves = envelopes(real, (load(run, rank.index) for run in perturbed))
    rows = []
    for entry in dict.fromkeys([*first_state, *second_state, *new]):
        once, repeated = first_state.get(entry), second_state.get(entry)
        noise = _noise(once, repeated) if (entry in first_state) == (entry in second_state) else None
        repeats = entry.generator or (noise is not None and noise <= explained_by_rounding(once, tolerance or 0.0))
        same: bool | None = False
        detail: str | None = "is missing" if entry in first_state else "is there, but not in an uninterrupted run"
        if noise is None or not repeats:
            same, detail = None, _difference(repeated, once, 0.0, None)
        elif entry in new and entry in first_state:
            granted = _ROOM * noise + _BOTH * moves.get(entry, 0.0)
            granted += explained_by_rounding(once) if rounded else 0.0
            detail = _difference(new[entry], once, granted, tolerance)
            same = detail is None
        moved = entry not in old or _difference(once, old[entry], 0.0, None) is not None
        digests = digest_of_value(new.get(entry)), digest_of_value(once)
        rows.append(StateRow(entry, same, detail or "", *digests, moved, repeats))
    return rows


def digest_of_value(value: Any) -> str | None:
    """Return a digest that is equal for equal values; None for None."""
    if value is None:
        return None
    return digest_of(value) if isinstance(value, torch.Tensor) else f"{type(value).__name__} {value!r}"


def _noise(value: Any, repeated: Any) -> float | None:
    """Return the largest difference of an entry between two runs that should be equal; None if it is not comparable."""
    if not isinstance(value, torch.Tensor) or not isinstance(repeated, torch.Tensor):
        return 0.0 if type(value) is type(repeated) and value == repeated else None
    if value.shape != repeated.shape or value.dtype != repeated.dtype:
        return None
    if digest_of_value(value) == digest_of_value(repeated):
        return 0.0
    value, repeated = as_real(value), as_real(repeated)
    if not value.dtype.is_floating_point:
        return None
    same = (value == repeated) | (value.isnan() & repeated.isnan())  # infinities, too
    return float(torch.where(same, 0.0, (value.double() - repeated.double()).abs().nan_to_num(torch.inf)).max())


def explained_by_rounding(value: Any, tolerance: float = 0.0) -> float:
    """Return the largest difference of two runs in this entry that rounding or the user's tolerance explains."""
    if not isinstance(value, torch.Tensor) or not value.numel() or not (is_real(value) or value.is_complex()):
        return 0.0
    largest = float(value.abs().double().nan_to_num(0.0, 0.0, 0.0).max())
    return max(_EXPLAINED, _ROUNDOFFS * torch.finfo(value.dtype).eps / 2, tolerance) * largest


def is_real(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype.is_floating_point


def _difference(got: Any, expected: Any, granted: torch.Tensor | float, tolerance: float | None) -> str | None:
    """Describe a difference that exceeds `granted`, if there is one."""
    if not isinstance(got, torch.Tensor) or not isinstance(expected, torch.Tensor):
        same = type(got) is type(expected) and got == expected
        return None if same else f"got {_cut(got)}, expected {_cut(expected)}"
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return f"got {tuple(got.shape)} {got.dtype}, expected {tuple(expected.shape)} {expected.dtype}"
    got, expected = as_real(got), as_real(expected)
    if tolerance is not None and expected.dtype.is_floating_point and expected.numel():
        granted = tolerance * float(expected.double().abs().max())
    deviation = difference(got, expected, granted)
    return None if deviation is None else str(deviation)


def _cut(value: Any) -> str:
    text = value if isinstance(value, str) and len(value) == 32 else repr(value)
    return text if len(text) <= 40 else text[:39] + "…"


_SHOWN = 3

Parts = list[torch.Tensor]  # an entry of the state on each rank, in rank order


def same_training(
    directory: Path, ranks: int, other_directory: Path, other_ranks: int, tolerance: float | None
) -> tuple[str | None, bool]:
    """Compare the floating-point entries of two states, each kept by its own number of ranks.

    Returns the entries that differ, as a text or None, and whether any entry agrees after its parts were joined.
    Only an entry that all ranks share shows a difference: parts that do not fit together may be divided in another way.
    """
    differing: list[str] = []
    agreeing = False
    entries, other_entries = _parts_of_ranks(directory, ranks), _parts_of_ranks(other_directory, other_ranks)
    for entry in filter(other_entries.__contains__, entries):
        shards, other_shards = entries[entry], other_entries[entry]
        if _shared(shards) and _shared(other_shards) and shards[0].shape == other_shards[0].shape:
            if _close(shards[0], other_shards[0], tolerance or 0.0):
                agreeing = True
            else:
                differing.append(str(entry))
        elif any(_close(*pair, tolerance or 0.0) for pair in _joined(shards, other_shards)):
            agreeing = True
    return few(sorted(differing), _SHOWN) if differing else None, agreeing


def resharded(saved: Path, ranks_saved: int, reference: Path, ranks_loaded: int, loaded: Path) -> dict[StateEntry, str]:
    """Return the entries whose parts, as `saved`, are in wrong places right after loading, with descriptions."""
    of_saved, of_right = _parts_of_ranks(saved, ranks_saved), _parts_of_ranks(reference, ranks_loaded)
    of_loaded = _parts_of_ranks(loaded, ranks_loaded)
    misplaced = {}
    for entry, shards in of_right.items():
        if entry not in of_saved or entry not in of_loaded or (_shared(of_saved[entry]) and _shared(shards)):
            continue
        pairs = enumerate(zip(of_loaded[entry], shards, strict=True))
        if not (wrong_shards := {index: got for index, (got, expected) in pairs if not _close(got, expected)}):
            continue
        description = _single_parts(of_saved[entry], wrong_shards, ranks_loaded)
        if description := description or _other_places(of_saved[entry], wrong_shards):
            misplaced[entry] = f"{entry} on {named(list(wrong_shards))}: {description}"
    return misplaced


def _single_parts(saved: Parts, wrong_shards: Mapping[int, torch.Tensor], ranks: int) -> str | None:
    """Recognize ranks that each load the saved part of one rank; `wrong_shards` has the wrong part of each."""
    sources = {}
    for index, got in wrong_shards.items():
        sources[index] = next((n for n, shard in enumerate(saved) if _begins(got, shard)), None)
    if None in sources.values():
        return None
    loads = ", ".join(f"rank {index} loads the part of rank {source}" for index, source in sources.items())
    return f"{loads}, but {ranks} ranks divide the entry in other places than {len(saved)}"


def _other_places(saved: Parts, wrong_shards: Mapping[int, torch.Tensor]) -> str | None:
    """Recognize saved values in other places. Only equal bits count, because many values are similar."""
    saved_values = torch.cat([shard.flatten() for shard in saved])
    values = torch.cat([got.flatten() for got in wrong_shards.values()])
    values = values[values != 0]  # padding
    if not len(values) or not bool(torch.isin(values, saved_values).all()):
        return None
    return "each value was saved, but in another place: parts were joined in another order, or with their padding"


def _parts_of_ranks(directory: Path, ranks: int) -> dict[StateEntry, Parts]:
    states = [load(directory, index) for index in range(ranks)]
    common = [entry for entry in states[0] if all(is_real(state.get(entry)) for state in states)]
    return {entry: [state[entry] for state in states] for entry in common}


def _joined(shards: Parts, other_shards: Parts) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return the whole tensors that both sides may be parts of; flat parts may end with padding."""
    candidates = []
    for dim in range(min(shard.dim() for shard in (*shards, *other_shards))):
        pairs = [(joined, counterpart) for joined in _along(shards, dim) for counterpart in _along(other_shards, dim)]
        candidates += [(joined, counterpart) for joined, counterpart in pairs if joined.shape == counterpart.shape]
        if shards[0].dim() == 1:
            candidates += [_without_padding(*pair) for pair in pairs if pair[0].shape != pair[1].shape]
    return candidates


def _along(shards: Parts, dim: int) -> list[torch.Tensor]:
    """Return the parts joined along a dimension, with and without repeated ones: replicas of a mesh."""
    distinct = [own for n, own in enumerate(shards) if not any(torch.equal(own, earlier) for earlier in shards[:n])]
    variants = [shards] if len(distinct) == len(shards) else [shards, distinct]
    fit = len({(*shard.shape[:dim], *shard.shape[dim + 1 :]) for shard in shards}) == 1
    return [torch.cat(variant, dim) for variant in variants] if fit else []


def _without_padding(tensor: torch.Tensor, counterpart: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut zeros from the end of the longer of two flat tensors, at most down to the length of the other one."""
    length = min(len(tensor), len(counterpart))
    cut, cut_counterpart = (flat if bool(flat[length:].any()) else flat[:length] for flat in (tensor, counterpart))
    return cut, cut_counterpart


def _shared(shards: Parts) -> bool:
    return all(torch.equal(shard, shards[0]) for shard in shards)


def _close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 0.0) -> bool:
    return got.dtype == expected.dtype and close(got, expected, explained_by_rounding(expected, tolerance))


def _begins(got: torch.Tensor, shard: torch.Tensor) -> bool:
    """Return whether a tensor begins with a part, or is the beginning of it, along each dimension."""
    if got.dim() != shard.dim() or not min(got.numel(), shard.numel()):
        return False
    common = tuple(slice(min(sizes)) for sizes in zip(got.shape, shard.shape, strict=True))
    return _close(got[common], shard[common])
