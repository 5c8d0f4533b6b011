"""Specs of batches: tensors and other values, nested in containers, and their split over devices."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mgpu_check.oracles.tensors import TensorSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch


Sample = namedtuple("Sample", ["inputs", "labels"])
"""The named tuple among the containers."""

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
    """A tuple, list, dict (keys "a", "b", …), `OrderedDict` (keys "z", "y", …) or `Sample` of parts.

    Raises:
        ValueError: the kind is unknown, or a "namedtuple" does not have two parts.
    """

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
    """A batch, and its distribution over devices.

    Attributes:
        batch: the batch to split.
        size: its number of samples, which is the number of elements along `dim`.
        dim: the dimension to split.
        devices: number of devices to split over.
        source: device of the batch before the split; "pinned" is pinned memory of the CPU.
        target: device that gathers the shards.
        order: indices of the devices, in the order of their shards; empty for the first `devices` ones, in order.
    """

    batch: BatchSpec
    size: int
    dim: int = 0
    devices: int = 1
    source: str = "cpu"
    target: str = "cpu"
    order: tuple[int, ...] = ()

    def on(self, gpus: Sequence[torch.device]) -> tuple[torch.device, ...]:
        """Return the devices that get shards, in order."""
        return tuple(gpus[index] for index in self.order) if self.order else tuple(gpus[: self.devices])

    @property
    def tensor(self) -> TensorSpec:
        """The spec of the batch, if it is a single tensor.

        Raises:
            TypeError: the batch is not a single tensor.
        """
        if not isinstance(self.batch, TensorSpec):
            raise TypeError(f"Split.tensor: the batch is {type(self.batch).__name__}, not a single tensor")
        return self.batch

    def build(self) -> Any:
        """Build the batch, on `source`."""
        return self.batch.build(self.source)
