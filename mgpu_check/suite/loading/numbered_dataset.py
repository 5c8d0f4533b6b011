"""Define a dataset whose samples show their number, with values of several dtypes and all bit patterns.

A sample follows from its number alone. So the right batch can be computed for many samples at once, without collation.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.data import Dataset

from mgpu_check.asserts.collectives import first_difference, same_bits
from mgpu_check.errors import ShardError
from mgpu_check.oracles.generated_data import mix_
from mgpu_check.suite.loading.samplers import require

_FIELDS = {
    "image": torch.float32,
    "half": torch.bfloat16,
    "wide": torch.complex64,
    "mask": torch.bool,
    "pixel": torch.uint8,
    "turned": torch.float64,
}


def _bits(indices: torch.Tensor, words: int, seed: int) -> torch.Tensor:
    """Return (n, words) words of 64 bits; all bits of a word depend on its sample and place."""
    places = (indices[:, None] << 24) + torch.arange(words, device="cpu")
    return mix_(places, seed, torch.empty_like(places))


def _rows(indices: torch.Tensor, name: str, features: int) -> torch.Tensor:
    """Return a field of n samples: (n, features) for "image", (n, 3, 2) for "turned", (n, k), with a small k, else."""
    dtype, seed = _FIELDS[name], list(_FIELDS).index(name)
    if name == "mask":
        return _bits(indices, 3, seed) > 0
    if name == "turned":  # as images in channels_last: a sample is dense, but not contiguous
        return _bits(indices, 6, seed).view(dtype).view(-1, 2, 3).transpose(1, 2)
    words = _bits(indices, -(-features // 2) if name == "image" else 2, seed)
    return words.view(dtype)[:, :features] if name == "image" else words.view(dtype)


class Numbered(Dataset[Any]):
    """A dataset of `length` samples: dicts of a number, tensors with `features` floats and others, a text, and a pair.

    The floats have arbitrary bits, including all kinds of NaN, infinities and subnormals. Samples of even number have
    `large` times as many features, and then cannot share a batch with odd ones. Reading sample `broken` raises a
    LookupError.
    """

    def __init__(self, length: int, features: int = 5, large: int = 1, broken: int | None = None) -> None:
        self.length, self.features, self.large, self.broken = length, features, large, broken

    def __len__(self) -> int:
        return self.length

    def features_of(self, index: int) -> int:
        """Return the number of features of a sample."""
        return self.features * (self.large if index % 2 == 0 else 1)

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.length:
            raise IndexError(f"sample {index} of {self.length}")
        if index == self.broken:
            raise LookupError(f"sample {index} cannot be read")
        own = torch.tensor([index], device="cpu")
        rows: dict[str, Any] = {name: _rows(own, name, self.features_of(index))[0] for name in _FIELDS}
        return {"number": index, **rows, "score": index / 3, "name": f"sample {index}", "pair": (own, index % 2 == 0)}


def indices_of(batch: dict[str, Any]) -> list[int]:
    """Return the numbers of the samples in a batch, read from the batch."""
    numbers: list[int] = batch["number"].tolist()
    return numbers


def assert_batch(
    batch: Any,
    indices: Sequence[int],
    dataset: Numbered,
    label: str,
    device: torch.device | str = "cpu",
    pinned: bool = False,
) -> None:
    """Assert that `batch` has the samples `indices` of `dataset` in this order, bit for bit, as torch collates them."""
    require(isinstance(batch, dict), f"{label}: it is a {type(batch).__name__}, expected a dict")
    own = torch.tensor(list(indices), dtype=torch.int64, device="cpu")
    features = dataset.features_of(indices[0]) if indices else dataset.features
    expected: dict[str, Any] = {name: _rows(own, name, features) for name in _FIELDS}
    expected |= {"number": own, "score": own.to(torch.float64) / 3}
    names = sorted({*expected, "name", "pair"})
    require(sorted(batch) == names, f"{label}: it has the entries {sorted(batch)}, expected {names}")
    named = batch["name"] == [f"sample {index}" for index in indices]
    require(named, f"{label}: the names are {batch['name']}, expected those of the samples {list(indices)}")
    pair = batch["pair"]
    if type(pair) not in (list, tuple) or len(pair) != 2:
        raise ShardError(f"{label}: the pair is {pair!r}, expected one of two tensors")
    entries = {name: batch[name] for name in expected} | {"pair[0]": pair[0], "pair[1]": pair[1]}
    expected |= {"pair[0]": own[:, None], "pair[1]": own % 2 == 0}
    for name, wanted in expected.items():
        got = entries[name]
        if not isinstance(got, torch.Tensor):
            raise ShardError(f"{label}: {name} is a {type(got).__name__}, expected a tensor")
        require(got.device == torch.device(device), f"{label}: {name} is on {got.device}, expected on {device}")
        require(not pinned or got.is_pinned(), f"{label}: {name} is not in pinned memory")
        text = f"{tuple(got.shape)} of {got.dtype}, expected {tuple(wanted.shape)} of {wanted.dtype}"
        require((got.shape, got.dtype) == (wanted.shape, wanted.dtype), f"{label}: {name} is {text}")
        if not same_bits(wanted, got):
            at = first_difference(wanted, got)
            raise ShardError(
                f"{label}: {name}, {got.nbytes} bytes of {got.dtype}: row {at[0]} (sample {indices[at[0]]}), element "
                f"{list(at)}: expected {wanted[at].item()}, got {got[at].item()}"
            )
