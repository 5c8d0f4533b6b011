"""Record the labels of losses: the classes that cross entropy, or a gather in the code under test, picks."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from mgpu_check.diagnosis.observed import Labels
from mgpu_check.gates.operands import site
from mgpu_check.torch_hooks.tensors import plain

_MOST = 4096
"""Most labels of one call that are kept, to bound memory."""
_MOST_CALLS = 64
_aten = torch.ops.aten
_LOSSES = {_aten.nll_loss_forward, _aten.nll_loss2d_forward}


class NotingLabels(TorchDispatchMode):
    """Records the labels of each loss, and the line of the code under test that computes it."""

    def __init__(self, found: list[Labels]) -> None:
        super().__init__()
        self._found = found

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        with contextlib.suppress(Exception):  # missing evidence must not fail the step
            labels = _labels(func.overloadpacket, args)
            if labels is not None and len(self._found) < _MOST_CALLS and (line := site(sys._getframe())):
                ignored = int(args[4]) if func.overloadpacket in _LOSSES and len(args) > 4 else None
                self._found.append(Labels(line, tuple(plain(labels).flatten().tolist()), ignored))
        return result


def _labels(packet: Any, args: tuple[Any, ...]) -> torch.Tensor | None:
    if packet in _LOSSES:
        labels = args[1]
    elif packet is _aten.gather and args[2].dim() == args[0].dim() and args[2].shape[args[1]] == 1:
        labels = args[2]
    else:
        return None
    wanted = isinstance(labels, torch.Tensor) and not labels.is_floating_point() and 1 < labels.numel() <= _MOST
    return labels if wanted else None
