"""The part of the fixture `node` that a check needs, with ranks in this process, one after the other."""

from __future__ import annotations

import pkgutil
from collections.abc import Sequence

import torch

from mgpu_check.acceptance.run_report import Gpu
from mgpu_check.devices.observations import Observation, SubjectResult
from mgpu_check.engine.rank_side.rank import NamedFunction, Rank


class Node:
    """A node with a GPU of each of these models."""

    depth = "quick"

    def __init__(self, models: Sequence[str]) -> None:
        self.gpus = [Gpu(number, 0, number, model, f"uuid-{number}", 16 << 20) for number, model in enumerate(models)]
        self.numbers = [gpu.number for gpu in self.gpus]
        self.results: list[SubjectResult] = []

    def on_ranks(self, check, fn, *args, gpus=None, timeout=None, environment=None):
        chosen = self.numbers if gpus is None else list(gpus)
        results = []
        fn = pkgutil.resolve_name(fn.__qualname__) if isinstance(fn, NamedFunction) else fn
        for index, gpu in enumerate(chosen):
            result = fn(Rank(index, len(chosen), index, 0, torch.device("cuda", gpu)), *args)
            if isinstance(result, list):
                result = [item.on(chosen) if isinstance(item, SubjectResult) else item for item in result]
                self.record(item for item in result if isinstance(item, SubjectResult))
            results.append(result)
        return results

    def record(self, results):
        self.results += results

    @property
    def failed(self) -> list[Observation]:
        return [entry for entry in self.results if isinstance(entry, Observation) and entry.outcome == "failed"]
