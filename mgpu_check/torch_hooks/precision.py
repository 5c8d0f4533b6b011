"""Save, restore and fix how torch rounds float32 in matrix products, convolutions and recurrent networks.

Torch has two interfaces for these settings. The getters of the older one (``allow_tf32``,
``set_float32_matmul_precision``) raise if the newer one (``fp32_precision``) has set a value that the older one cannot
express. This module handles both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

_ABOVE = (("generic", "all"), ("cuda", "all"), ("mkldnn", "all"))
_OPERATORS = tuple((backend, operator) for backend in ("cuda", "mkldnn") for operator in ("matmul", "conv", "rnn"))
_REDUCTIONS = (
    "allow_fp16_reduced_precision_reduction",
    "allow_bf16_reduced_precision_reduction",
    "allow_fp16_accumulation",
)

Precision = tuple[tuple[Any, ...], tuple[str, ...], tuple[Any, ...]]
"""Values of the older interface (None if it raises), values of the newer one, and flags for sums in narrow dtypes."""

_get: Callable[[str, str], str] = torch._C._get_fp32_precision_getter
_set: Callable[[str, str, str], Any] = torch._C._set_fp32_precision_setter


def kept() -> Precision:
    """Return the present settings. Equal settings compare equal."""
    older = _said(torch.get_float32_matmul_precision), _said(torch._C._get_cudnn_allow_tf32)
    newer = tuple(_get(*setting) for setting in (*_ABOVE, *_OPERATORS))
    return older, newer, tuple(getattr(torch.backends.cuda.matmul, name) for name in _REDUCTIONS)


def put_back(precision: Precision) -> None:
    """Restore settings that `kept` returned."""
    (matmul, cudnn), newer, reductions = precision
    values = dict(zip((*_ABOVE, *_OPERATORS), newer, strict=True))
    # Restore the older interface first, because it changes values of the newer one, and not the other way round.
    if matmul is not None:
        torch.set_float32_matmul_precision(matmul)
    if cudnn is not None:
        torch._C._set_cudnn_allow_tf32(cudnn)
    for setting in (*_ABOVE, *_OPERATORS):
        if _get(*setting) != values[setting]:
            _set(*setting, "none")  # without its own value it inherits the general one
            if _get(*setting) != values[setting]:
                _set(*setting, values[setting])
    for name, value in zip(_REDUCTIONS, reductions, strict=True):
        if getattr(torch.backends.cuda.matmul, name) != value:
            setattr(torch.backends.cuda.matmul, name, value)


def exact() -> None:
    """Turn off TF32 and other reduced precision, also on the CPU, and accumulate sums in narrow dtypes in float32."""
    torch.set_float32_matmul_precision("highest")
    torch._C._set_cudnn_allow_tf32(False)
    for setting in _OPERATORS:
        if _get(*setting) not in ("ieee", "none") or _get(*_above(setting)) not in ("ieee", "none"):
            _set(*setting, "ieee")
    for name in _REDUCTIONS:
        setattr(torch.backends.cuda.matmul, name, False)


@contextmanager
def repeatable(tf32: bool = False) -> Iterator[None]:
    """Fix the rounding of float32 and cuDNN's choice of kernels, and restore both on exit.

    Args:
        tf32: whether matrix products and convolutions use TF32.
    """
    cudnn = torch.backends.cudnn
    before, chosen = kept(), (cudnn.deterministic, cudnn.benchmark)
    try:
        exact()
        cudnn.deterministic, cudnn.benchmark = True, False
        if tf32:
            torch.set_float32_matmul_precision("high")
            torch._C._set_cudnn_allow_tf32(True)
        yield
    finally:
        put_back(before)
        cudnn.deterministic, cudnn.benchmark = chosen


def _above(setting: tuple[str, str]) -> tuple[str, str]:
    return setting[0], "all"


def _said(getter: Callable[[], Any]) -> Any:
    try:
        return getter()
    except RuntimeError:
        return None
