"""Defects of compute."""

from __future__ import annotations

from typing import Any

from mgpu_check.acceptance.faults import HardwareFault, gpu, hardware_fault, made_by
from mgpu_check.simulated.defects.parameters import UNITS, Parameters


def _fault(name: str, summary: str, unit: str, defaults: Parameters, level: str = "quick", **arguments: Any) -> None:
    defect = made_by("Unit", operations=UNITS[unit], **arguments)
    parameters = {"device": 1, "pattern": "bits", "seed": 0, **defaults}
    hardware_fault(HardwareFault(name, summary, parameters, gpu, ("compute",), level, defect))


_fault(
    "product-dtype", "matrix products of one dtype have a wrong bit", "products", {"dtype": "float16", "pattern": "bit"}
)
_fault("product-lane", "one lane of each warp is wrong in matrix products", "products", {"pattern": "lane"})
_fault("product-tile", "one tile of large matrix products is wrong", "products", {"pattern": "tile", "above": 4096})
_fault("product-nan", "matrix products sometimes have a NaN", "products", {"pattern": "nan", "every": 5})
_fault("product-tf32", "matrix products are wrong if TF32 is on", "products", {}, tf32=True)
_fault("product-hot", "matrix products are wrong on a GPU that has been busy", "products", {"heat": 1e-3})
_fault("product-rare", "a matrix product is wrong one time in 10000", "products", {"every": 10000}, level="long")
_fault("product-seldom", "a matrix product is wrong one time in 50", "products", {"every": 50}, level="standard")
_fault(
    "product-flutters",
    "every other matrix product is off by its lowest bit",
    "products",
    {"pattern": "low-bit", "every": 2},
)
_fault("product-inner", "matrix products with an inner dimension of 256 are wrong", "products", {"inner": 256})
_fault("product-vector", "matrix products with one column are wrong", "products", {"columns": 1})
_fault("product-row", "matrix products with one row are wrong", "products", {"rows": 1})
_fault(
    "product-transposed",
    "matrix products are wrong if the second factor is column-major",
    "products",
    {"transposed": 1},
)
_fault("convolution", "convolutions are wrong", "convolutions", {})
_fault("attention", "attention is wrong", "attention", {})
_fault("reduction", "sums are wrong in one bit", "sums", {"pattern": "bit"})
_fault("functions", "transcendental functions are off by their lowest bit", "functions", {"pattern": "low-bit"})
_fault("sorting", "sorting swaps two elements", "sorting", {"pattern": "swap"})
_fault("elementwise", "sums and products of elements are sometimes wrong", "elementwise", {"every": 3})
hardware_fault(
    HardwareFault(
        "random-repeats",
        "the second half of random numbers repeats the first",
        {"device": 1},
        gpu,
        ("compute",),
        defect=made_by("RepeatingRandom"),
    )
)
