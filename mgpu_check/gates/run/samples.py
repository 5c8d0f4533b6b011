"""Collect the samples that a rank's loader gives in each epoch. Imports torch: for ranks only."""

from __future__ import annotations

import copy
import hashlib
import types
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, RandomSampler

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.gates.comparison.coverage import Epoch, Visits
from mgpu_check.torch_hooks.nested import leaves
from mgpu_check.torch_hooks.tensors import as_real, bytes_of, plain

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
