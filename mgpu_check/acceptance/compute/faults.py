"""Defects of compute."""

from __future__ import annotations

from typing import Any

from mgpu_check.acceptance.faults import HardwareFault, gpu, hardware_fault, made_by
from mgpu_check.simulated.defects.parameters import Parameters

__all__: list[str] = []

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "_int_mm", "_scaled_mm")
_SUMS = ("sum", "mean", "var", "var_mean", "prod", "cumsum", "norm", "linalg_vector_norm")
_FUNCTIONS = (
    "exp",
    "log",
    "sin",
    "cos",
    "tan",
    "tanh",
    "sqrt",
    "rsqrt",
    "erf",
    "sigmoid",
    "pow",
    "gelu",
    "exp2",
    "log2",
)
_ATTENTION = (
    "_softmax", "_safe_softmax", "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention", "_scaled_dot_product_flash_attention_for_cpu",
)  # fmt: skip
_SORTING = ("sort", "topk", "argsort", "kthvalue", "msort", "median")
_ELEMENTWISE = ("add", "add_", "mul", "mul_", "sub", "sub_")


def _fault(
    name: str, summary: str, operations: tuple[str, ...], defaults: Parameters, level: str = "quick", **given: Any
) -> None:
    defect = made_by("compute", "Unit", operations=operations, **given)
    parameters = {"device": 1, "pattern": "bits", "seed": 0, **defaults}
    hardware_fault(HardwareFault(name, summary, parameters, gpu, ("compute",), level, defect))


_fault(
    "product-dtype", "matrix products of one dtype have a wrong bit", _PRODUCTS, {"dtype": "float16", "pattern": "bit"}
)
_fault("product-lane", "one lane of each warp is wrong in matrix products", _PRODUCTS, {"pattern": "lane"})
_fault("product-tile", "one tile of large matrix products is wrong", _PRODUCTS, {"pattern": "tile", "above": 4096})
_fault("product-nan", "matrix products sometimes have a NaN", _PRODUCTS, {"pattern": "nan", "every": 5})
_fault("product-tf32", "matrix products are wrong if TF32 is on", _PRODUCTS, {}, tf32=True)
_fault("product-hot", "matrix products are wrong on a GPU that has been busy", _PRODUCTS, {"heat": 1e-3})
_fault("product-rare", "a matrix product is wrong one time in 10000", _PRODUCTS, {"every": 10000}, level="long")
_fault("product-seldom", "a matrix product is wrong one time in 50", _PRODUCTS, {"every": 50}, level="standard")
_fault(
    "product-flutters",
    "every other matrix product is off by its lowest bit",
    _PRODUCTS,
    {"pattern": "low-bit", "every": 2},
)
_fault("product-inner", "matrix products with an inner dimension of 256 are wrong", _PRODUCTS, {"inner": 256})
_fault("product-vector", "matrix products with one column are wrong", _PRODUCTS, {"columns": 1})
_fault("convolution", "convolutions are wrong", ("convolution", "convolution_backward"), {})
_fault("attention", "attention is wrong", _ATTENTION, {})
_fault("reduction", "sums are wrong in one bit", _SUMS, {"pattern": "bit"})
_fault("functions", "transcendental functions are off by their lowest bit", _FUNCTIONS, {"pattern": "low-bit"})
_fault("sorting", "sorting swaps two elements", _SORTING, {"pattern": "swap"})
_fault("elementwise", "sums and products of elements are sometimes wrong", _ELEMENTWISE, {"every": 3})
hardware_fault(
    HardwareFault(
        "random-repeats",
        "the second half of random numbers repeats the first",
        {"device": 1},
        gpu,
        ("compute",),
        defect=made_by("compute", "RepeatingRandom"),
    )
)
