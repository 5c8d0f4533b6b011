"""`raises_device_mismatch` takes what torch says of devices, and nothing else; the rules of the table hold."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from mgpu_check.asserts.mismatch import raises_device_mismatch
from mgpu_check.errors import DeviceMismatch
from mgpu_check.oracles.devices.mixed_operands import OPERATORS, OperatorCase
from mgpu_check.simulated import simulated_node
from mgpu_check.suite.mismatch import checks

SAME = "Expected all tensors to be on the same device, but "
# Messages of CUDA builds of torch, each with its devices.
GENUINE = [
    (SAME + "found at least two devices, cuda:0 and cpu!", "cuda:0", "cpu"),
    (SAME + "got mat2 is on cpu, different from other tensors on cuda:0 (when checking argument in method wrapper_CUDA_mm)",
     "cpu", "cuda:0"),
    (SAME + "found at least two devices, cuda:1 and cuda:0! (when checking argument for argument mat1 in method "
     "wrapper_CUDA_addmm)", "cuda:0", "cuda:1"),
    ("Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same", "cuda:3", "cpu"),
    ("Input type (torch.FloatTensor) and weight type (torch.cuda.FloatTensor) should be the same or input should be "
     "a MKLDNN tensor and weight is a dense tensor", "cpu", "cuda:0"),
    ("Input type (torch.cuda.HalfTensor) and bias type (torch.HalfTensor) should be the same", "cpu", "cuda:0"),
    ("Expected tensor for argument #1 'input' to have the same device as tensor for argument #2 'weight'; but "
     "device 0 does not equal 1 (while checking arguments for cudnn_convolution)", "cuda:0", "cuda:1"),
    ("indices should be either on cpu or on the same device as the indexed tensor (cpu)", "cpu", "cuda:0"),
    ("indices should be either on cpu or on the same device as the indexed tensor (cuda:1)", "cuda:1", "cuda:0"),
    ("module must have its parameters and buffers on device cuda:0 (device_ids[0]) but found one of them on device: "
     "cuda:1", "cuda:0", "cuda:1"),
    ("Cannot compare two tensors on different devices. Got: cuda:0 and cpu", "cpu", "cuda:0"),
    ("expected self and mask to be on the same device, but got mask on cpu and self on cuda:0", "cpu", "cuda:0"),
    ("Input and parameter tensors are not at the same device, found input tensor at cpu and parameter tensor at cuda:0",
     "cuda:0", "cpu"),
    ("Expected query, key, and value to have the same device type, but got query.device: cuda:0 key.device: cuda:1 "
     "and value.device: cuda:1 instead.", "cuda:0", "cuda:1"),
]  # fmt: skip
# Errors that are not about the two devices, or do not say which.
VACUOUS = [
    (SAME + "but one of them is on cuda:0", "cuda:0", "cuda:1"),
    (SAME + "found at least two devices, cuda:0 and cuda:2!", "cuda:0", "cuda:1"),
    (SAME + "found at least two devices, cuda:1 and cuda:10!", "cuda:1", "cuda:0"),
    ("mat1 and mat2 shapes cannot be multiplied (2x3 and 2x3)", "cuda:0", "cpu"),
    ("CUDA error: invalid device ordinal", "cuda:0", "cpu"),
    ("Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same", "cuda:0", "cuda:1"),
    ("Input type (torch.cuda.FloatTensor) and weight type (torch.cuda.HalfTensor) should be the same", "cuda:0", "cpu"),
    ("indices should be either on cpu or on the same device as the indexed tensor (cuda:0)", "cuda:0", "cpu"),
    ("indices should be either on cpu or on the same device as the indexed tensor (cuda:2)", "cuda:0", "cuda:1"),
    ("device 0 does not equal 1", "cuda:0", "cuda:1"),
]


@pytest.fixture
def node() -> Iterator[None]:
    with simulated_node(3):
        yield


@pytest.mark.parametrize(("message", "first", "second"), GENUINE)
def test_torchs_words_are_taken(message: str, first: str, second: str) -> None:
    for pair in ((first, second), (second, first)):
        with raises_device_mismatch(*pair):
            raise RuntimeError(message)


@pytest.mark.parametrize(("message", "first", "second"), VACUOUS)
def test_other_words_are_not(message: str, first: str, second: str) -> None:
    with pytest.raises(DeviceMismatch, match=re.escape(message)) as caught, raises_device_mismatch(first, second):
        raise RuntimeError(message)
    assert set(caught.value.ranks) == {torch.device(one).index for one in (first, second)} - {None}


def test_a_device_without_index_is_any_of_its_kind() -> None:
    with raises_device_mismatch("cpu", "cuda"):
        raise RuntimeError(SAME + "found at least two devices, cuda:2 and cpu!")
    with raises_device_mismatch("cpu", torch.device("cuda")):
        raise RuntimeError("Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same")


def test_nothing_raised_is_a_finding() -> None:
    nothing = pytest.raises(DeviceMismatch, match="must raise RuntimeError, but raised nothing")
    with nothing, raises_device_mismatch("cuda:0", "cpu"):
        pass


def test_another_type_of_error_is_a_finding() -> None:
    other = pytest.raises(DeviceMismatch, match="raised ValueError: cuda:0 and cpu")
    with other as caught, raises_device_mismatch("cuda:0", "cpu"):
        raise ValueError("cuda:0 and cpu")
    assert isinstance(caught.value.__cause__, ValueError)


def test_interrupts_pass_through() -> None:
    with pytest.raises(KeyboardInterrupt), raises_device_mismatch("cuda:0", "cpu"):
        raise KeyboardInterrupt


def test_one_device_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="one device"), raises_device_mismatch("cuda:0", torch.device("cuda", 0)):
        pass


PAIRS = [("cpu", "cuda:1"), ("cuda:2", "cpu"), ("cuda:2", "cuda:0")]


@pytest.mark.usefixtures("node")
@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_the_rules_hold_on_a_simulated_node(first: str, second: str) -> None:
    for case in (OperatorCase(operator, first, second) for operator in OPERATORS):
        if case.must_raise:
            checks.assert_refused(case)
            with pytest.raises(DeviceMismatch, match="must work, but raised"):
                checks.assert_works(case)
        else:
            checks.assert_works(case)
            with pytest.raises(DeviceMismatch, match="raised nothing"):
                checks.assert_refused(case)


@pytest.mark.usefixtures("node")
def test_a_wrong_result_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    case = OperatorCase("add 0-dim", "cuda:1", "cpu")
    add = torch.add
    monkeypatch.setattr(torch, "add", lambda a, b: add(a, b) + (a.device.type == "cuda"))
    with pytest.raises(DeviceMismatch, match=r"(?s)gave .* expected"):
        checks.assert_works(case)
    monkeypatch.setattr(torch, "add", lambda a, b: add(a, b).cpu())
    with pytest.raises(DeviceMismatch, match="is on cpu, expected it on cuda:1"):
        checks.assert_works(case)


@pytest.mark.usefixtures("node")
def test_a_refused_control_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("cuda:0 and cuda:1 are broken")

    monkeypatch.setattr(torch, "add", broken)
    with pytest.raises(DeviceMismatch, match="add with all operands on cuda:0 must work, but raised RuntimeError"):
        checks.assert_refused(OperatorCase("add", "cuda:0", "cuda:1"))


@pytest.mark.usefixtures("node")
def test_on_modules() -> None:
    with raises_device_mismatch("cuda:1", "cpu"):
        nn.Linear(3, 2).to("cuda:1")(torch.ones(4, 3))
    net = nn.DataParallel(nn.Linear(3, 2).to("cuda:1"), device_ids=[0, 1])
    with raises_device_mismatch("cuda:0", "cuda:1"):
        net(torch.ones(4, 3))
