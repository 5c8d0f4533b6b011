"""The hardware faults of a simulated node: their parameters, as names and plain values.

This module imports no torch, as the modules that register faults do; `implementations.py` imports it.
"""

from __future__ import annotations

from collections.abc import Mapping

PATTERNS = ("bit", "low-bit", "bits", "lane", "nan", "tile", "swap")
"""Patterns of wrong elements; see `mgpu_check.simulated.defects.implementations`."""

UNITS: Mapping[str, tuple[str, ...]] = {
    "products": ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_int_mm", "_scaled_mm"),
    "convolutions": ("convolution", "convolution_backward"),
    "attention": (
        *("_softmax", "_safe_softmax", "_scaled_dot_product_flash_attention"),
        *("_scaled_dot_product_efficient_attention", "_scaled_dot_product_cudnn_attention"),
        "_scaled_dot_product_flash_attention_for_cpu",
    ),
    "sums": ("sum", "mean", "var", "var_mean", "prod", "cumsum", "norm", "linalg_vector_norm"),
    "functions": (
        *("exp", "log", "sin", "cos", "tan", "tanh", "sqrt", "rsqrt", "erf", "sigmoid", "pow", "gelu", "exp2", "log2"),
    ),
    "sorting": ("sort", "topk", "argsort", "kthvalue", "msort", "median"),
    "elementwise": ("add", "add_", "mul", "mul_", "sub", "sub_"),
    "random numbers": ("rand", "randn", "randint", "rand_like", "randn_like", "normal_", "uniform_", "random_"),
}
"""Part of a GPU -> the operators that use it, as `mgpu_check.simulated.hardware.Operation` names them."""

Value = int | float | str
Parameters = Mapping[str, Value]
"""Values of the parameters of a defect by name, such as "device", "peer", "every" or "pattern"."""
