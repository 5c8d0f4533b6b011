"""Record, in the script's process, the inputs of the first calls of each micro-batch, which show its samples."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mgpu_check.compare.described import in_training
from mgpu_check.compare.inputs import Inputs
from mgpu_check.compare.naming import unwrapped
from mgpu_check.compare.summaries import digests, host_copy, inputs_of
from mgpu_check.torch_hooks.nested import named_parameters

_COLUMNS = 2**22  # larger inputs are not hashed along the second dimension, to bound the time
_CALLS = 8  # nested calls; wrappers are rarely deeper


class InputRecorder:
    """Records the first call of a model in a micro-batch, and the first call within each recorded call.

    One device and the ranks may call a model by another wrapper, so that only an inner call is common.
    """

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Discard the inputs since the last step."""
        self.calls: list[list[Inputs]] = []
        self.next_micro_batch()

    def next_micro_batch(self) -> None:
        self._waiting = True  # for the first call of a model
        self.next_call()

    def next_call(self) -> None:
        """Forget the calls within a model that has returned, which may not be one with samples."""
        self._entered = self._open = 0  # depth of the first calls: all of them, and those that have not returned
        self._found: list[Inputs] = []
        self._hashed: dict[tuple[int, int], tuple[torch.Tensor, tuple[list[int], list[int]]]] = {}

    def enter(self, depth: int) -> None:
        """Note that a call begins.

        Args:
            depth: 1 for a call outside of others.
        """
        if depth == 1:
            self.next_call()
        if self._waiting and depth <= _CALLS and self._entered == self._open == depth - 1:
            self._entered = self._open = depth

    def leave(self, module: nn.Module, depth: int, args: Any, kwargs: Any) -> None:
        """Record the inputs of a call that returns, if it is one of the first ones."""
        if not self._waiting or depth != self._open:
            return
        self._open -= 1
        given = inputs_of(args, kwargs)
        computed = any(tensor.grad_fn is not None for tensor in given)  # such a tensor is not a sample
        # FullyShardedDataParallel takes the parameters of the modules within it.
        trains = in_training(module) and (depth > 1 or next(named_parameters(module), None) is not None)
        if computed or not trains:
            return
        name = _class_of(module)
        hashes = [self._hashes(tensor) for tensor in given]
        inputs = Inputs(name, [rows for rows, _ in hashes], [columns for _, columns in hashes])
        self._found = [inputs, *(call for call in self._found if call.module != name)]
        if depth == 1:
            self.calls.append(self._found)
            self._waiting = False
            self.next_call()

    def _hashes(self, tensor: torch.Tensor) -> tuple[list[int], list[int]]:
        key = id(tensor), -1 if tensor.is_inference() else tensor._version
        if key not in self._hashed:
            value = host_copy(tensor)
            few = value is not None and value.numel() <= _COLUMNS
            self._hashed[key] = tensor, (digests(value), digests(value, 1) if few else [])  # keeps its id
        return self._hashed[key][1]


def _class_of(module: nn.Module) -> str:
    """Return the class of the user's module: `fully_shard` puts "FSDP" before its name."""
    kind = type(unwrapped(module))
    sharded = any(base.__name__ == "FSDPModule" for base in kind.__mro__)
    return kind.__name__.removeprefix("FSDP") if sharded else kind.__name__
