"""Collect what the gates of evaluations and loaders compare on ranks: the answers of a trained model, compared between
ranks, and the samples of each epoch. Imports torch: for ranks only.
"""

from __future__ import annotations

import copy
import hashlib
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.engine.rank_side.worker import pause
from mgpu_check.gates.comparison.coverage import Epoch, Visits
from mgpu_check.gates.gate_arguments import bound
from mgpu_check.gates.run.states import Opaque, digest_of_value, flattened, is_real
from mgpu_check.numerics.differences import difference, show
from mgpu_check.numerics.perturbation import Perturbed
from mgpu_check.numerics.reduction import unit_roundoff
from mgpu_check.numerics.steps import PAIRS, deviations, envelopes, full_precision
from mgpu_check.processes.rank_lists import few, grouped
from mgpu_check.torch_hooks.nested import leaves, named_buffers, named_parameters, tensors_of
from mgpu_check.torch_hooks.switches import seed_everything
from mgpu_check.torch_hooks.tensors import as_real, bytes_of, name_of, plain, plain_copy

_SEED = 7
_SHOWN_RANKS = 8


@dataclass(frozen=True)
class Evaluated:
    """The functions and numbers of `assert_evaluation_agrees`. The gate sends one to the ranks for each case."""

    step: Callable[..., Any]  # or a class, see `bound`
    build: Callable[[], Any]
    batch: Callable[[int], Any]
    evaluate: Callable[[Any, Any], Any] | None
    steps: int
    samples: int


@dataclass(frozen=True)
class Compared:
    """A value that should be the same on all ranks, as compared."""

    # "initial", "parameter", "buffer" or "answer"; "repeated" for a second answer of the same rank; "batches" and
    # "untouched" for functions that cannot be used.
    kind: str
    name: str
    wrong: tuple[int, ...]  # the ranks that differ from rank 0; for "repeated", from their own first answer
    detail: str  # the element with the largest difference, with the values of the ranks
    rounding: bool  # whether rounding errors explain the difference


def train_and_evaluate(program: Evaluated, directory: Path, measure: bool, rank: Rank) -> str | None:
    """Train and evaluate on this rank, and save the values to compare in `directory`.

    Returns why the user's functions cannot be used, if so.
    """
    seed_everything(_SEED)
    model = program.build()
    if not isinstance(model, nn.Module):
        return f"build() returned a {type(model).__name__}; return a torch.nn.Module"
    saved: dict[str, Any] = {"initial": _state(model)}
    batches = []
    for number in range(program.steps + 1):
        seed_everything(_SEED + 1 + number)
        batches.append(program.batch(program.samples))
    *training, evaluation_batch = batches
    saved["batches"] = str({name: digest_of_value(v) for name, v in flattened(batches, strict=False).items()})
    seed_everything(_SEED)
    step = bound(program.step, model, rank)
    for number, batch in enumerate(training, start=1):
        step(batch)
        pause(f"step {number}", last=number == len(training))
    state = _state(model)
    parameters = {name for name, _ in named_parameters(model)}
    saved["parameter"] = {name: value for name, value in state.items() if name in parameters}
    saved["buffer"] = {name: value for name, value in state.items() if name not in parameters}
    model.eval()
    with torch.no_grad(), full_precision():
        # Evaluation must not depend on the seed: the seed differs between ranks and between the two runs.
        for key, seed in (("answer", 1000), ("again", 2000)):
            seed_everything(_SEED + seed + rank.index)
            try:
                saved[key] = _answer(program, model, evaluation_batch)
            except Opaque as error:
                return f"evaluate(model, batch) returned an answer that cannot be compared: {error}"
        saved["granted"] = _granted(program, model, evaluation_batch, rank) if measure else {}
    if not any(isinstance(value, torch.Tensor) for value in saved["answer"].values()):
        return "evaluate(model, batch) returned no tensor or float; return the output of the model"
    directory.mkdir(exist_ok=True)
    torch.save(saved, directory / f"{rank.index}.pt")
    return None


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: plain_copy(value) for name, value in (*named_parameters(model), *named_buffers(model))}


def _answer(program: Evaluated, model: nn.Module, batch: Any) -> dict[str, Any]:
    if program.evaluate is not None:
        return flattened(program.evaluate(model, batch), "answer", take=plain_copy)
    inputs = next(iter(tensors_of(batch)), None)
    if inputs is None:
        raise ValueError(
            "batch(n) holds no tensor to call the model with; pass evaluate=, a function of model and batch"
        )
    device = next((t.device for _, t in (*named_parameters(model), *named_buffers(model))), inputs.device)
    return flattened(model(inputs.to(device)), "answer", take=plain_copy)


def _granted(program: Evaluated, model: nn.Module, batch: Any, rank: Rank) -> dict[str, torch.Tensor]:
    """Measure how far rounding may move each element of the answers, by Monte Carlo arithmetic."""
    seed_everything(_SEED + 1000 + rank.index)
    usual = {n: v.double() for n, v in _answer(program, model, batch).items() if is_real(v)}
    spread = deviations(sum(value.numel() for value in usual.values()))
    generator = torch.Generator().manual_seed(_SEED)

    def perturbed(sign: int) -> dict[str, Any]:
        seed_everything(_SEED + 1000 + rank.index)
        # The model runs in its own dtypes, so float64 is perturbed by its own roundoff.
        with Perturbed(sign * spread, generator, unit_roundoff(torch.float64)):
            return _answer(program, model, batch)

    return envelopes(usual, map(perturbed, (1, -1) * PAIRS))


def compare_ranks(directory: Path, size: int) -> list[Compared]:
    """Compare the values that `size` ranks saved. Called on one rank."""
    saved: list[dict[str, Any]] = [torch.load(directory / f"{r}.pt", weights_only=False) for r in range(size)]
    batches = grouped((values_of_rank["batches"], rank) for rank, values_of_rank in enumerate(saved))
    comparisons = [] if len(batches) == 1 else [Compared("batches", "batch", tuple(batches[1][1]), "", False)]
    pairs = [(value, own["initial"].get(name)) for own in saved for name, value in own["parameter"].items()]
    if not any(digest_of_value(value) != digest_of_value(before) for value, before in pairs):
        comparisons.append(Compared("untouched", "parameters", tuple(range(size)), "", False))
    ranks = [f"on rank {rank}" for rank in range(size)]
    for value_kind in ("initial", "parameter", "buffer", "answer"):
        granted = saved[0]["granted"] if value_kind == "answer" else {}
        comparisons += _compared(value_kind, [own[value_kind] for own in saved], ranks, granted)
    for rank, own in enumerate(saved):
        rows = _compared("repeated", [own["answer"], own["again"]], ["first", "then"], own["granted"])
        comparisons += [replace(row, wrong=(rank,)) for row in rows if row.wrong]
    return comparisons


def _compared(
    value_kind: str, states: list[dict[str, Any]], owners: list[str], granted: Mapping[str, torch.Tensor]
) -> Iterator[Compared]:
    for name in dict.fromkeys(name for state in states for name in state):
        values = [state.get(name) for state in states]
        digests = [digest_of_value(value) for value in values]
        differing = tuple(index for index, digest in enumerate(digests) if digest != digests[0])
        detail, rounding = _detail(values, owners, differing, granted.get(name)) if differing else ("", False)
        yield Compared(value_kind, name, differing, detail, rounding)


def _detail(
    values: list[Any], owners: list[str], differing: tuple[int, ...], granted: torch.Tensor | None
) -> tuple[str, bool]:
    """Return the values of all ranks at the largest difference, and whether all differences are within `granted`."""
    if len({_kind(value) for value in values}) > 1 or not isinstance(values[0], torch.Tensor):
        texts = [_kind(value) if isinstance(value, torch.Tensor) else repr(value)[:40] for value in values]
        return _said(texts, owners), False
    if values[0].is_complex():
        values, granted = [as_real(value) for value in values], None
    reference = values[0]
    rounding = granted is not None and all(difference(values[i], reference, 2 * granted) is None for i in differing)
    deviation = next(filter(None, (difference(values[i], reference) for i in differing)), None)
    if deviation is None:
        return "only the sign of zeros or the bits of NaN differ", True
    location = f"element {list(deviation.worst)} is " if deviation.worst else ""
    return location + _said([show(value[deviation.worst].item(), value.dtype) for value in values], owners), rounding


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {name_of(value.dtype)}"
    return type(value).__name__


def _said(texts: list[str], owners: list[str]) -> str:
    return few([f"{text} {owner}" for text, owner in zip(texts, owners, strict=True)], _SHOWN_RANKS)


Key = Callable[[Any], Iterable[Hashable]]
MakeLoader = Callable[[Rank], Any]

_SHOWN_VALUES, _SHOWN_CHARACTERS = 4, 40
_PASS_KEY = "pass key=, a function from a batch to the ids of its samples"
_BATCHES = "; if it yields batches, return a loader, or a list of the batches, in place of yielding them"


class _Misuse(Exception):
    """`make_loader` or `key` returns something that the gate cannot use."""


def visit(make_loader: MakeLoader, epochs: int, key: Key | None, inline: bool, rank: Rank) -> Visits:
    """Iterate this rank's loader once per epoch, and return its samples.

    `inline`: read an IterableDataset in this process, and not in worker processes of the loader.
    """
    visits = Visits()
    loaders = make_loader(rank)
    try:
        for loader in _loaders(loaders, epochs):
            visits.bare = isinstance(loaders, types.GeneratorType) and isinstance(loader, list | tuple)
            visits.shuffles |= _shuffles(loader)
            visits.workers = max(visits.workers, _workers(loader))
            epoch = _epoch(_without_workers(loader) if inline else loader, key, visits.labels)
            if not epoch.batches and hasattr(loader, "__next__") and any(visited.batches for visited in visits.epochs):
                raise _Misuse(
                    f"make_loader(rank) gave a {type(loader).__name__}, an iterator, which has nothing left for epoch "
                    f"{len(visits.epochs)}; return the loader itself, not iter(loader)"
                )
            visits.epochs.append(epoch)
        # With one epoch, only a second yield shows whether the lists are loaders or batches.
        further_yield = next(loaders, None) if visits.bare and epochs == 1 else None
        if further_yield is not None and not _epoch(further_yield, key, {}).counts & visits.epochs[0].counts:
            common = "the two yields have no sample in common"
            raise _Misuse(f"make_loader(rank) yielded twice, though epochs is 1, and {common}{_BATCHES}")
    except _Misuse as misuse:
        visits.problem = str(misuse)
        if visits.bare and not visits.problem.endswith(_BATCHES):
            visits.problem += _BATCHES
    if isinstance(loaders, types.GeneratorType):
        loaders.close()
    return visits


def _epoch(loader: Any, key: Key | None, labels: dict[Hashable, str]) -> Epoch:
    """Return the samples of a loader in one epoch. Add the texts that a report shows for them to `labels`."""
    batches = []
    for batch in loader:
        samples = list(_samples(batch, key))
        labels.update(samples)
        batches.append(tuple(sample for sample, _ in samples))
    return Epoch(tuple(batches))


def _loaders(loaders: Any, epochs: int) -> Iterator[Any]:
    """Yield the loader of each epoch: each loader that a generator yields, or always the same one."""
    yielded = isinstance(loaders, types.GeneratorType)
    for epoch in range(epochs):
        try:
            loader = next(loaders) if yielded else loaders
        except StopIteration:
            raise _Misuse(
                f"make_loader(rank) yielded {epoch} loaders, and epochs is {epochs}; yield the loader once per epoch"
            ) from None
        iterable = hasattr(loader, "__iter__") or hasattr(loader, "__getitem__")
        if isinstance(loader, torch.Tensor | Mapping) or not iterable:
            raise _Misuse(
                f"make_loader(rank) {'yielded' if yielded else 'returned'} a {type(loader).__name__}; return a loader "
                f"(an iterable of batches), or yield it once per epoch{_BATCHES if yielded else ''}"
            )
        yield loader


def _shuffles(loader: Any) -> bool:
    """Return whether the loader has a sampler that should visit the samples in a new order in each epoch."""
    candidates = [loader, *(getattr(loader, name, None) for name in ("sampler", "batch_sampler"))]
    candidates += [getattr(candidate, "sampler", None) for candidate in candidates]
    return any(
        isinstance(candidate, RandomSampler)
        or (hasattr(candidate, "set_epoch") and getattr(candidate, "shuffle", False) is True)
        for candidate in candidates
    )


def _workers(loader: Any) -> int:
    if isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset):
        return loader.num_workers
    return 0


def _without_workers(loader: Any) -> Any:
    if not _workers(loader):
        return loader
    # A loader without workers refuses a timeout, and one with persistent workers keeps its iterator in `_iterator`
    # (torch/utils/data/dataloader.py, _SingleProcessDataLoaderIter and DataLoader.__iter__, torch 2.13).
    inline = copy.copy(loader)
    inline.num_workers, inline.timeout, inline._iterator = 0, 0, None
    return inline


def _samples(batch: Any, key: Key | None) -> Iterator[tuple[Hashable, str]]:
    """Yield the identity of each sample of a batch, and the text that a report shows for it."""
    if key is not None:
        for sample_id in key(batch):
            identity = _plain_id(sample_id)
            yield identity, _cut(repr(identity))
        return
    columns = [column for leaf in leaves(batch, _is_column) for column in _columns(leaf)]
    lengths = {len(column) for column in columns}
    if len(lengths) != 1:
        fault = f"has leaves of {sorted(lengths)} rows along dim 0, so its samples cannot be separated"
        raise _Misuse(
            f"a batch of type {type(batch).__name__} {fault if lengths else 'has no tensor with rows'}; {_PASS_KEY}"
        )
    for row in zip(*columns, strict=True):
        digest = hashlib.blake2b(digest_size=8)
        for encoded, _ in row:
            digest.update(encoded)
        yield int.from_bytes(digest.digest(), "big"), _cut(row[0][1])


def _is_column(node: Any) -> bool:
    """Return whether a node is a list of texts or numbers, one per sample; it then counts as one leaf."""
    return isinstance(node, list | tuple) and bool(node) and all(isinstance(x, str | bytes | int | float) for x in node)


def _columns(leaf: Any) -> Iterator[Sequence[tuple[bytes, str]]]:
    """Yield the rows of a leaf of a batch, each as bytes and as a text; nothing for a leaf without rows."""
    if isinstance(leaf, list | tuple):
        yield [(repr(entry).encode() + b"\0", repr(entry)) for entry in leaf]
    elif type(leaf).__module__ == "numpy" and hasattr(leaf, "dtype") and leaf.dtype.kind in "biufc":
        yield from _columns(torch.as_tensor(leaf))
    elif isinstance(leaf, torch.Tensor):
        if leaf.dim():
            yield _rows(plain(leaf))
    elif not (leaf is None or isinstance(leaf, str | bytes | int | float)):
        raise _Misuse(f"a batch holds a {type(leaf).__name__}, whose samples cannot be separated; {_PASS_KEY}")


def _rows(tensor: torch.Tensor) -> list[tuple[bytes, str]]:
    if tensor.layout != torch.strided:
        raise _Misuse(f"a batch holds a sparse tensor; {_PASS_KEY}")
    count = len(tensor)
    real = as_real(tensor)
    data = bytes_of(real)
    width = len(data) // count if count else 0
    # The same bytes in another dtype or shape are another sample.
    layout = f"{tensor.dtype}{tuple(tensor.shape[1:])}".encode()
    flat = tensor.reshape(count, -1)[:, :_SHOWN_VALUES].tolist() if real.numel() else [[]] * count
    rest = ", …" if real[:1].numel() > _SHOWN_VALUES else ""
    rows = []
    for i, values in enumerate(flat):
        texts = [f"{value:.4g}" if isinstance(value, float) else str(value) for value in values]
        shown = texts[0] if texts and tensor.dim() == 1 else f"[{', '.join(texts)}{rest}]"
        rows.append((layout + data[i * width : (i + 1) * width], shown))
    return rows


def _plain_id(sample_id: Any) -> Hashable:
    """Return an id that compares equal in another process: tensors, which hash by identity, become plain values."""
    identity: Hashable = _tuples(sample_id.tolist()) if hasattr(sample_id, "tolist") else sample_id
    try:
        hash(identity)
    except TypeError:
        raise _Misuse(
            f"key(batch) gave a {type(identity).__name__}, which is not hashable; give numbers or texts"
        ) from None
    return identity


def _tuples(value: Any) -> Any:
    return tuple(_tuples(element) for element in value) if isinstance(value, list) else value


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 1] + "…"
