"""Specs of tensors, of batches, and of the inputs of a reduction: plain values that rebuild the same data in any
process.

A batch is tensors and other values, nested in containers. Its split over devices is computed here too.
"""

from __future__ import annotations

import importlib
import math
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch as torch
    from torch import nn as nn

    F = nn.functional
else:

    class _OnFirstUse:
        """Stand for torch in specs and tables that processes without torch read too: its first use imports torch."""

        def __init__(self, name: str) -> None:
            self._name = name

        def __getattr__(self, attribute: str) -> Any:
            return getattr(importlib.import_module(self._name), attribute)

    torch, nn, F = (_OnFirstUse(name) for name in ("torch", "torch.nn", "torch.nn.functional"))

FLOAT_DTYPES = ("float32", "float64", "float16", "bfloat16")
INTEGER_DTYPES = ("int64", "int32", "int16", "int8", "uint8")
COMPLEX_DTYPES = ("complex64", "complex128")
DTYPES = (*FLOAT_DTYPES, *INTEGER_DTYPES, "bool")

LAYOUTS = ("contiguous", "transposed", "sliced", "strided", "channels_last")
"""Memory layouts of a tensor.

contiguous: row by row. transposed: the last two dimensions swapped. sliced: a window into a larger storage, with an
offset and gaps between rows. strided: every second element of the last dimension. channels_last: four dimensions, the
second one innermost. No layout has overlapping elements, so all can be written to.
"""

VALUES = ("exact", "distinct", "random", "special", "bits")
"""Kinds of values of a tensor.

exact: integers in [-15, 15] (unsigned: [0, 15]), so that a sum of 16 such tensors is exact in every dtype here, in any
order. distinct: a permutation of consecutive integers, each exactly representable; with more elements than the dtype
has such integers, they repeat as rarely as possible. random: standard normal (integers: the dtype's whole range).
special: random values mixed with NaN, infinities and -0.0 (floats only). bits: arbitrary bits; about an eighth of
floats are NaN or infinite, with arbitrary payloads, and another eighth subnormal.
"""

PINNED = "pinned"  # the device argument of `TensorSpec.build` for pinned memory of the CPU

_EXPONENTS = {"float16": 0x7C00, "bfloat16": 0x7F80, "float32": 0x7F800000, "float64": 0x7FF << 52}
"""dtype -> mask of the exponent's bits."""


@dataclass(frozen=True)
class TensorSpec:
    """The description of a tensor."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    layout: str = "contiguous"
    seed: int = 0
    values: str = "distinct"

    def __post_init__(self) -> None:
        restricted = {
            "dtype": (self.dtype, (*DTYPES, *COMPLEX_DTYPES)),
            "layout": (self.layout, layouts_for(len(self.shape))),
            "values": (self.values, VALUES),
        }
        for argument, (value, valid) in restricted.items():
            if value not in valid:
                text = f"TensorSpec: {argument}={value!r} is not valid for shape {self.shape}"
                raise ValueError(f"{text}; choose one of {', '.join(valid)}")
        if any(size < 0 for size in self.shape):
            raise ValueError(f"TensorSpec: shape={self.shape} has a negative size; sizes are 0 or more")

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def like(self, layout: str, *, seed: int = 0) -> TensorSpec:
        """Return a spec of this shape and dtype with exact values in `layout`, if the shape allows it."""
        possible = layout if layout in layouts_for(len(self.shape)) else "contiguous"
        return TensorSpec(self.shape, self.dtype, possible, seed, "exact")

    def build(self, device: str | torch.device = "cpu") -> torch.Tensor:
        """Build the tensor in its layout on `device`; with `PINNED`, on the CPU in pinned memory.
        The result always has the same bits."""
        if device == PINNED:
            return self.build().pin_memory()
        base, window = self._storage()
        # Create the whole storage on the device and take the view there: a copied view would become contiguous.
        storage = torch.zeros(base, dtype=getattr(torch, self.dtype), device=device)
        laid_out = window(storage)
        laid_out.copy_(self._data())
        return laid_out

    def _data(self) -> torch.Tensor:
        dtype: torch.dtype = getattr(torch, self.dtype)
        generator = torch.Generator(device="cpu").manual_seed(self.seed)
        if self.values == "bits" and self.dtype != "bool":
            return _any_bits(self.shape, self.dtype, generator)
        if dtype.is_complex:
            components = TensorSpec((*self.shape, 2), "float32", seed=self.seed, values=self.values)._data()
            return torch.view_as_complex(components).to(dtype)
        if self.values in ("random", "special", "bits"):
            data = _random(self.shape, dtype, generator)
            if self.values == "special" and dtype.is_floating_point:
                chosen = torch.randint(0, 8, self.shape, generator=generator, device="cpu")
                for code, value in enumerate((math.nan, math.inf, -math.inf, -0.0)):
                    data[chosen == code] = value
            return data
        if self.values == "exact":
            low = 0 if self.dtype in ("uint8", "bool") else -15
            high = 2 if self.dtype == "bool" else 16
            return torch.randint(low, high, self.shape, generator=generator, device="cpu").to(dtype)
        order = torch.randperm(self.numel, generator=generator, device="cpu")
        return (order % _countable(dtype)).reshape(self.shape).to(dtype)

    def _storage(self) -> tuple[tuple[int, ...], Callable[[torch.Tensor], torch.Tensor]]:
        """Return the shape of the storage, and a function that returns the tensor's view of it."""
        shape = self.shape
        if self.layout == "transposed":
            return (*shape[:-2], shape[-1], shape[-2]), lambda storage: storage.transpose(-1, -2)
        if self.layout == "sliced":
            inner = tuple(slice(1, 1 + size) for size in shape)
            return tuple(size + 2 for size in shape), lambda storage: storage[inner]
        if self.layout == "strided":
            return (*shape[:-1], 2 * shape[-1]), lambda storage: storage[..., ::2]
        if self.layout == "channels_last":
            batch, channels, height, width = shape
            return (batch, height, width, channels), lambda storage: storage.permute(0, 3, 1, 2)
        return shape, lambda storage: storage


def _countable(dtype: torch.dtype) -> int:
    """Return the number of consecutive integers from 0 that the dtype represents exactly."""
    if dtype == torch.bool:
        return 2
    if dtype.is_floating_point:
        return int(2 / torch.finfo(dtype).eps)
    return int(torch.iinfo(dtype).max) + 1


def _random(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.randint(0, 2, shape, generator=generator, device="cpu").bool()
    if dtype.is_floating_point:
        # Drawn in float64 for every dtype, so that a seed gives the same numbers in all of them.
        return torch.randn(shape, generator=generator, dtype=torch.float64, device="cpu").to(dtype)
    limits = torch.iinfo(dtype)
    return torch.randint(limits.min, limits.max, shape, generator=generator, dtype=dtype, device="cpu")


def _any_bits(shape: tuple[int, ...], name: str, generator: torch.Generator) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, name)
    data = torch.randint(0, 256, (*shape, dtype.itemsize), generator=generator, dtype=torch.uint8, device="cpu")
    exponent = _EXPONENTS.get(name)
    if exponent is not None:
        words = data.view(getattr(torch, f"int{8 * dtype.itemsize}"))
        chosen = torch.randint(0, 8, words.shape, generator=generator, device="cpu")
        words[chosen == 0] |= exponent
        words[chosen == 1] &= ~exponent
    return data.view(dtype).squeeze(-1)


def layouts_for(dims: int) -> tuple[str, ...]:
    """Return the layouts that a tensor of `dims` dimensions can have."""
    least = {"transposed": 2, "sliced": 1, "strided": 1, "contiguous": 0}
    named = tuple(name for name in LAYOUTS if name in least and dims >= least[name])
    return (*named, "channels_last") if dims == 4 else named


Sample = namedtuple("Sample", ["inputs", "labels"])  # the named tuple among the containers

KINDS = ("tuple", "list", "dict", "namedtuple", "ordereddict")


@dataclass(frozen=True)
class Leaf:
    """A value that is not a tensor; every device gets it unchanged."""

    value: object

    def build(self, device: str | torch.device = "cpu") -> object:
        """Return the value itself."""
        return self.value


@dataclass(frozen=True)
class Nested:
    """A tuple, list, dict (keys "a", "b", …), `OrderedDict` (keys "z", "y", …) or `Sample` of parts."""

    kind: str
    parts: tuple[BatchSpec, ...]

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"Nested: kind={self.kind!r} is not valid; choose one of {', '.join(KINDS)}")
        if self.kind == "namedtuple" and len(self.parts) != len(Sample._fields):
            raise ValueError(f"Nested: a namedtuple has the parts {Sample._fields}, but {len(self.parts)} were given")

    def build(self, device: str | torch.device = "cpu") -> Any:
        """Build the container, with its parts on `device`."""
        entries = [entry.build(device) for entry in self.parts]
        if self.kind == "dict":
            return {chr(ord("a") + index): entry for index, entry in enumerate(entries)}
        if self.kind == "ordereddict":
            return OrderedDict((chr(ord("z") - index), entry) for index, entry in enumerate(entries))
        return Sample(*entries) if self.kind == "namedtuple" else {"tuple": tuple, "list": list}[self.kind](entries)


BatchSpec = TensorSpec | Nested | Leaf


@dataclass(frozen=True)
class Split:
    """A batch, and its distribution over devices."""

    batch: BatchSpec  # the batch to split
    size: int  # its number of samples, which is the number of elements along `dim`
    dim: int = 0  # the dimension to split
    devices: int = 1  # number of devices to split over
    source: str = "cpu"  # device of the batch before the split; "pinned" is pinned memory of the CPU
    target: str = "cpu"  # device that gathers the shards
    # indices of the devices, in the order of their shards; empty for the first `devices` ones, in order
    order: tuple[int, ...] = ()

    def on(self, gpus: Sequence[torch.device]) -> tuple[torch.device, ...]:
        """Return the devices that get shards, in order."""
        return tuple(gpus[index] for index in self.order) if self.order else tuple(gpus[: self.devices])

    @property
    def tensor(self) -> TensorSpec:
        """The spec of the batch, if it is a single tensor."""
        if not isinstance(self.batch, TensorSpec):
            raise TypeError(f"Split.tensor: the batch is {type(self.batch).__name__}, not a single tensor")
        return self.batch

    def build(self) -> Any:
        """Build the batch, on `source`."""
        return self.batch.build(self.source)


REDUCIBLE = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "int8", "uint8")
"""The dtypes that both gloo and NCCL reduce."""

DENSE = ("contiguous", "channels_last")  # layouts without gaps, which NCCL accepts

GAPPED = ("sliced", "strided")  # layouts with gaps: views into a larger storage


@dataclass(frozen=True)
class Contributions:
    """One tensor per rank: equal shape, dtype and layout, different values.
    "exact" values have the same result in every order of the operation; "random" values use all bits."""

    tensor: TensorSpec
    operation: str = "sum"

    def parts(self, count: int) -> list[torch.Tensor]:
        """Return the contributions of `count` ranks, contiguous, on the CPU."""
        from mgpu_check.numerics import reduction

        make = reduction.random_parts
        if self.tensor.values == "exact":
            make = reduction.exact_factors if self.operation == "product" else reduction.exact_parts
        dtype: torch.dtype = getattr(torch, self.tensor.dtype)
        return make(self.tensor.shape, dtype, count=count, seed=self.tensor.seed)

    def placed(self, term: torch.Tensor, device: str | torch.device) -> torch.Tensor:
        """Copy `term` to `device`, in the layout of the spec."""
        return self.tensor.build(device).copy_(term)
