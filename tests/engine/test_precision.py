"""Torch's precision of float32: settings of each interface are restored, and held at float32 meanwhile."""

from __future__ import annotations

import random

import pytest
import torch
from torch import backends

from mgpu_check.numerics.steps import full_precision
from mgpu_check.torch_hooks import switches

SETTINGS = {
    "older, convolutions off": lambda: setattr(backends.cudnn, "allow_tf32", False),
    "older, convolutions on": lambda: setattr(backends.cudnn, "allow_tf32", True),
    "older, products on": lambda: setattr(backends.cuda.matmul, "allow_tf32", True),
    "older, medium": lambda: torch.set_float32_matmul_precision("medium"),
    "newer, all": lambda: setattr(backends, "fp32_precision", "tf32"),
    "newer, all off": lambda: setattr(backends, "fp32_precision", "ieee"),
    "newer, products": lambda: setattr(backends.cuda.matmul, "fp32_precision", "tf32"),
    "newer, one of two": lambda: setattr(backends.cudnn.conv, "fp32_precision", "ieee"),  # type: ignore[attr-defined]  # made at import
    "newer, on the CPU": lambda: setattr(backends.mkldnn.matmul, "fp32_precision", "bf16"),  # type: ignore[attr-defined]  # made at import
    "sums": lambda: setattr(backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "accumulation": lambda: setattr(backends.cuda.matmul, "allow_fp16_accumulation", True),
}


@pytest.fixture(autouse=True)
def fresh():
    before = switches.saved_precision()
    assert None not in before[0]
    yield
    switches.restore_precision(before)
    assert switches.saved_precision() == before


@pytest.mark.parametrize("seed", range(5))
def test_whatever_is_set_is_put_back(seed):
    drawn, fresh = random.Random(seed), switches.saved_precision()
    for _ in range(100):
        for name in drawn.choices(list(SETTINGS), k=drawn.randint(0, 5)):
            SETTINGS[name]()
        before = switches.saved_precision()
        with full_precision():
            older, newer, narrow = switches.saved_precision()
            assert older == ("highest", False)
            assert set(newer[3:]) <= {"ieee", "none"} and not any(narrow)
            for name in drawn.choices(list(SETTINGS), k=drawn.randint(0, 3)):
                SETTINGS[name]()
        after = switches.saved_precision()
        # If the newer interface had the last word, the older one could not be read before, and need not be now.
        assert after[1:] == before[1:]
        assert all(was in (None, now) for was, now in zip(before[0], after[0], strict=True))
        switches.restore_precision(fresh)
        assert switches.saved_precision() == fresh


def test_what_a_call_has_set_ends_with_it(pool):
    def set_all(rank):
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        torch.backends.cudnn.conv.fp32_precision = "tf32"  # type: ignore[attr-defined]

    before = pool.run(switches.saved_precision, size=2)
    assert pool.run(set_all, size=2) == [None, None]
    assert pool.run(switches.saved_precision, size=2) == before
