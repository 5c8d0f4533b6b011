"""The functions that a recorded script may call are watched under all of their names, and do what they did."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.nn.utils import clip_grad

from mgpu_check.compare.in_script import script_calls
from mgpu_check.compare.in_script.script_calls import guard_with


class Witness:
    def __init__(self) -> None:
        self.labels: list[torch.Tensor] = []
        self.seen: list[tuple[str, dict[str, object]]] = []
        self.guard = guard_with(lambda error, place: pytest.fail(f"{error} at {place}"))

    def note(self, event: str, **what: object) -> None:
        self.seen.append((event, what))

    def forked(self) -> bool:
        return False

    def take_over(self) -> bool:
        return False

    def wait(self, event: str, **fields: object) -> None:
        raise AssertionError(event)

    def scaled_step(self, step: Callable[[], Any]) -> Any:
        return step()


def test_what_is_watched_is_so_under_each_name_that_torch_has_for_it(tmp_path):
    names: dict[str, Any] = {
        "a mesh makes the default group by this name": (device_mesh, c10d, torch.distributed, "init_process_group"),
        "clipping": (torch.nn.utils, clip_grad, "clip_grad_norm_"),
        "seeds": (torch, torch.random, "manual_seed"),
        "checkpoints": (torch, torch.serialization, "save"),
    }
    before = {(owner, name): getattr(owner, name) for *owners, name in names.values() for owner in owners}
    witness = Witness()
    patches = script_calls.install(witness, 1)
    try:
        for *owners, name in names.values():
            for owner in owners:
                assert getattr(owner, name).__wrapped__ is before[owner, name]
        assert not os.path.exists(tmp_path / "checkpoint")
        torch.save({}, tmp_path / "checkpoint")
        parameter = torch.nn.Parameter(torch.ones(1))
        parameter.grad = torch.full((1,), 2.0)
        torch.nn.utils.clip_grad_norm_([parameter], max_norm=1.0)
    finally:
        patches.undo()
    assert all(getattr(owner, name) is function for (owner, name), function in before.items())
    path = os.path.realpath(tmp_path / "checkpoint")
    assert witness.seen == [("save", {"file": path, "missed": True}), ("clip", {"norm": 2.0, "most": 1.0})]
    assert parameter.grad.item() == pytest.approx(1.0)
