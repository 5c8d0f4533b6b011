"""The check of modules that move passes on a sound node, and says what is lost on another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mgpu_check.errors import DeviceMismatch
from mgpu_check.oracles.devices import copies as checks
from mgpu_check.simulated import simulated_node
from mgpu_check.suite.common.faults.registry import planted


@pytest.fixture
def node() -> Iterator[list[torch.device]]:
    with simulated_node(3):
        yield [torch.device("cuda", index) for index in range(3)]


def test_a_sound_node_passes(node: list[torch.device]) -> None:
    assert checks.assert_modules_move(node) == 6 * 7


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("gradients-left-behind", "it holds .*unsaved; expected .*the gradient of trained"),
        ("unsaved-buffers-lost", "unsaved: .* elements"),
        ("packed-sequence-not-unsorted", "PackedSequence.to from cpu to cuda:0: .* elements"),
    ],
)
def test_what_is_left_behind_is_named(node: list[torch.device], fault: str, words: str) -> None:
    with planted(fault), pytest.raises(DeviceMismatch, match=words) as caught:
        checks.assert_modules_move(node)
    assert caught.value.ranks == (0, 1, 2)


def test_ties_that_part_are_named(node: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    move = torch.nn.Module.to

    def apart(module: checks._Holding, *args: object, **kwargs: object) -> torch.nn.Module:
        moved = move(module, *args, **kwargs)  # type: ignore[call-overload]
        moved.tied = torch.nn.Parameter(moved.tied.detach().clone())
        return moved

    monkeypatch.setattr(torch.nn.Module, "to", apart)
    with pytest.raises(DeviceMismatch, match=r"two names has become two|it holds .*inner.weight"):
        checks.assert_modules_move(node)
