"""Specs of tensors build what they say."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings

from mgpu_check import strategies
from mgpu_check.oracles.tensors import COMPLEX_DTYPES, DTYPES, VALUES
from mgpu_check.strategies import TensorSpec


@pytest.mark.slow
@settings(max_examples=200, deadline=None, database=None)
@given(spec=strategies.tensors(dtypes=(*DTYPES, *COMPLEX_DTYPES), values=VALUES))
def test_builds_shape_and_dtype_the_same_each_time(spec: TensorSpec) -> None:
    tensor = spec.build()
    assert tuple(tensor.shape) == spec.shape
    assert tensor.dtype == getattr(torch, spec.dtype)
    assert tensor.numel() == spec.numel
    assert torch.equal(torch.nan_to_num(tensor), torch.nan_to_num(spec.build()))


@settings(max_examples=50, deadline=None, database=None)
@given(spec=strategies.tensors())
def test_prints_as_what_rebuilds_it(spec: TensorSpec) -> None:
    assert eval(repr(spec), {"TensorSpec": TensorSpec}) == spec


@pytest.mark.parametrize(
    ("layout", "stride", "offset"),
    [
        ("contiguous", (60, 20, 5, 1), 0),
        ("transposed", (60, 20, 1, 4), 0),
        ("sliced", (210, 42, 7, 1), 260),
        ("strided", (120, 40, 10, 2), 0),
        ("channels_last", (60, 1, 15, 3), 0),
    ],
)
def test_layouts(layout: str, stride: tuple[int, ...], offset: int) -> None:
    tensor = TensorSpec((2, 3, 4, 5), layout=layout).build()
    assert tensor.stride() == stride
    assert tensor.storage_offset() == offset
    assert torch.equal(tensor, TensorSpec((2, 3, 4, 5)).build())


@pytest.mark.parametrize("dtype", [name for name in DTYPES if name != "bool"])
def test_exact_values_have_exact_sums(dtype: str) -> None:
    parts = [TensorSpec((50,), dtype, seed=seed, values="exact").build() for seed in range(8)]
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    assert torch.equal(total.double(), torch.stack([part.double() for part in parts]).sum(0))


@pytest.mark.parametrize("dtype", ["float32", "float64", "int64", "int16", "float16"])
def test_distinct_values_are_distinct(dtype: str) -> None:
    tensor = TensorSpec((20, 30), dtype).build()
    assert len(set(tensor.flatten().tolist())) == 600


def test_special_values_are_among_them() -> None:
    tensor = TensorSpec((200,), values="special", seed=1).build()
    assert tensor.isnan().any()
    assert tensor.isposinf().any()
    assert tensor.isneginf().any()
    assert (torch.signbit(tensor) & (tensor == 0)).any()


def test_like_keeps_shape_and_dtype() -> None:
    spec = TensorSpec((2, 3), "float16", "transposed", 5)
    assert spec.like("strided", seed=9) == TensorSpec((2, 3), "float16", "strided", 9, "exact")
    assert spec.like("channels_last").layout == "contiguous"


@pytest.mark.slow
def test_using_needs_no_hypothesis() -> None:
    program = (
        "import sys, torch, mgpu_check.asserts.mismatch, mgpu_check.suite.scatter.checks\n"
        "import mgpu_check.oracles.tensors, mgpu_check.oracles.tensors, mgpu_check.oracles.devices.mixed_operands\n"
        "assert 'hypothesis' not in sys.modules, 'specs or checks import Hypothesis'"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_any_bits_have_payloads_and_subnormals(dtype: str) -> None:
    data = TensorSpec((4000,), dtype, values="bits").build()
    words = data.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[data.element_size()])
    smallest = torch.finfo(data.dtype).smallest_normal
    assert len(words[data.isnan()].unique()) > 100
    assert int(((data.abs() < smallest) & (data != 0)).sum()) > 100
    assert int((data.isfinite() & (data.abs() >= smallest)).sum()) > 1000
