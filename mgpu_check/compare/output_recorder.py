"""Record, in the script's process, the outputs of modules in the forward passes of a step."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from mgpu_check.compare.described import has_state
from mgpu_check.compare.naming import Names
from mgpu_check.compare.outputs import OutputSummary, joined_outputs, total
from mgpu_check.compare.summaries import Numbers, on_host_together, short, statistics
from mgpu_check.compare.trace import Writer
from mgpu_check.torch_hooks.nested import leaves, named_modules
from mgpu_check.torch_hooks.tensors import as_real, is_distributed, name_of, readable

_MODULES = 256
"""Most recorded modules of a model, to bound time and the size of the trace; the deepest are left out first."""
_KEY = "output"  # takes the place of a parameter's name within its module
_CALLS = 4096
"""Most recorded calls in a step. Further ones are left out, and then the modules have other counts on ranks."""


class OutputRecorder:
    """Sums the outputs of each module until the step of the optimizer."""

    def __init__(self, writer: Writer, names: Names) -> None:
        self._writer, self._names = writer, names
        self._models, self._chosen, self._known = WeakIdKeyDictionary(), WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self._count = 0
        self.forget()

    def forget(self) -> None:
        """Discard the outputs since the last step."""
        self._calls: list[tuple[nn.Module, torch.dtype, int]] = []  # of each part
        self._parts: list[tuple[torch.Tensor, torch.Tensor]] = []

    def begin(self, model: nn.Module) -> None:
        """Choose the modules of a model to record, before its first call."""
        if model in self._models:
            return
        self._models[model] = True
        if not has_state(model):
            return
        outer_first = sorted(named_modules(model), key=lambda one: one[0].count("."))
        self._chosen.update((module, True) for _, module in outer_first[:_MODULES])

    def add(self, module: nn.Module, output: Any) -> None:
        """Add the outputs of a call. Outputs that cannot be summed are left out: they decide no verdict."""
        if module not in self._chosen or len(self._parts) >= _CALLS:
            return
        with torch.no_grad(), contextlib.suppress(Exception):  # such as a tensor subclass without these operators
            for value in [output] if isinstance(output, torch.Tensor) else leaves(output):
                part = _local(value) if isinstance(value, torch.Tensor) else None
                if part is not None:
                    numbers = statistics(part)
                    self._calls.append((module, part.dtype, part.numel()))
                    self._parts.append(numbers)

    def taken(self) -> dict[int, Numbers]:
        """Return bits, norm, sum and count of the outputs since the last step, by number of the module."""
        found: dict[int, list[OutputSummary]] = {}
        for (module, dtype, count), (bits, own) in zip(self._calls, on_host_together(self._parts), strict=True):
            number = self._number(module, dtype)
            if number is not None:
                found.setdefault(number, []).append(OutputSummary(bits, own[0], total(own[1:]), count))
        whole = {number: joined_outputs(parts) for number, parts in found.items()}
        return {number: [own.bits, short(own.norm), short(own.sum), own.count] for number, own in whole.items()}

    def _number(self, module: nn.Module, dtype: torch.dtype) -> int | None:
        """Return the number of a module, which is recorded on first use; None for a module outside of all models."""
        if module not in self._known:
            named = self._names.of_key(module, _KEY)
            if named is None:
                self._known[module] = None
            else:
                self._known[module], self._count = self._count, self._count + 1
                name = named[0].removesuffix(_KEY).removesuffix(".")
                self._writer.write("output", name=name, dtype=name_of(dtype))
        number: int | None = self._known[module]
        return number


def _local(output: Any) -> torch.Tensor | None:
    """Return the elements of an output on this rank, flattened; None if they are partial results, or unreadable."""
    if is_distributed(output):
        if any(placed.is_partial() for placed in output.placements):
            return None
        output = output.to_local()
    value = readable(output) if output.layout is torch.strided else None
    if value is None or not (value.is_floating_point() or value.is_complex()):
        return None
    return as_real(value).reshape(-1) if value.element_size() > 1 and value.numel() else None
