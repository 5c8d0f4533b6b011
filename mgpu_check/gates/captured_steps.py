"""Report the optimizer steps in replays of CUDA graphs: torch calls hooks only during the capture."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from mgpu_check.torch_hooks.patches import Patches

_STEPS = "_mgpu_check_steps"  # of a graph, for as long as it is there


class CapturedSteps:
    """The optimizer steps of the graph that is being captured, until the capture ends."""

    def __init__(self, replayed: Callable[[Optimizer], None]) -> None:
        """Begin without any.

        Args:
            replayed: called after each replay with each optimizer that has stepped in it.
        """
        self._replayed = replayed
        self._captured: list[Optimizer] = []

    def add(self, optimizer: Optimizer) -> None:
        self._captured.append(optimizer)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watch captures and replays."""
        patches = Patches()
        for name, around in (("capture_end", self._capture_end), ("replay", self._replay)):
            patches.wrap(torch.cuda.CUDAGraph, name, around)
        try:
            yield
        finally:
            patches.undo()

    def _capture_end(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def capture_end(graph: Any) -> None:
            captured, self._captured = self._captured, []
            original(graph)
            graph.__dict__[_STEPS] = captured

        return capture_end

    def _replay(self, original: Callable[[Any], None]) -> Callable[[Any], None]:
        def replay(graph: Any) -> None:
            original(graph)
            for optimizer in graph.__dict__.get(_STEPS, ()):
                self._replayed(optimizer)

        return replay
