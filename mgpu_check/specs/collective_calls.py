"""Specs of calls of collectives, and which of them no backend takes."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = [
    "COPIED",
    "COPYING",
    "FLOATING",
    "INTEGERS",
    "OPERATIONS",
    "REDUCED",
    "REDUCING",
    "ROOTED",
    "CollectiveCall",
    "left_out",
]

FLOATING = ("float32", "float64", "float16", "bfloat16")
INTEGERS = ("int64", "int32", "int8", "uint8")
_COMPLEX = ("complex64", "complex128")

REDUCED = (*FLOATING, *INTEGERS, "bool", *_COMPLEX)
"""The dtypes that NCCL and gloo reduce. Neither has int16, nor unsigned integers above uint8, and torch refuses to reduce float8."""

COPIED = (*REDUCED, "float8_e4m3fn", "float8_e5m2")

OPERATIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")

REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
COPYING = (
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "gather",
    "scatter",
    "all_to_all",
    "all_to_all_single",
)
ROOTED = ("reduce", "broadcast", "gather", "scatter")


@dataclass(frozen=True)
class CollectiveCall:
    """One call of a collective, the same on all members of its group.

    Attributes:
        function: of `REDUCING` or `COPYING`.
        elements: of one rank's part of the result; None for as many as `values` has.
        values: what ranks give. For reductions "exact": one result in every order; "extremes": the borders of the dtype, each against
            each, from each rank; "borders": both of these; "special": NaN, infinities, zeros of both signs, subnormals, likewise; "random": all
            bits in use. For copies "bits": any bits.
        place: "device" or "cpu".
        members: ranks of the group, in its order; none for all.
        root: place in the group of the rank that gives or gets.
        root_by: "global" or "group": by which number the root is named.
        asynchronous: whether it is waited for later.
        layout: "dense", a vector; "in place": the input is a part of the output, or the other way round; "uneven": parts of
            different sizes; "channels_last", "matrix"; "transposed" has no gaps, "gaps" has: both may be refused.
    """

    function: str
    dtype: str
    elements: int | None = None
    op: str = "SUM"
    values: str = "exact"
    place: str = "device"
    members: tuple[int, ...] = ()
    root: int = 0
    root_by: str = "global"
    asynchronous: bool = False
    layout: str = "dense"
    seed: int = 0

    def __str__(self) -> str:
        parts = [f"{self.function} {self.op}" if self.function in REDUCING else self.function, self.dtype]
        if self.elements is not None:
            parts.append(f"{self.elements} elements")
        parts += [f"{self.values} values", f"{self.place} tensors"]
        if self.layout != "dense":
            parts.append(self.layout)
        if self.function in ROOTED:
            parts.append(f"root {self.root} by {self.root_by} rank")
        if self.members:
            parts.append(f"group {list(self.members)}")
        if self.asynchronous:
            parts.append("async")
        return ", ".join((*parts, f"seed {self.seed}"))


_BITWISE = ("BAND", "BOR", "BXOR")


_LAYOUTS_WITHOUT_GLOO = {
    ("all_to_all", "uneven"): "gloo takes lists of tensors of one size only",
    ("all_gather_into_tensor", "scalar"): "gloo wants an input with dimensions",
    ("reduce_scatter_tensor", "scalar"): "gloo ends the process with a signal 11: a defect of torch",
}


def left_out(call: CollectiveCall) -> str:
    """Return why no backend is asked for a call; "" where it must be right."""
    dtype, op = call.dtype, call.op
    if call.layout == "channels_last" and dtype in _COMPLEX:
        return "torch hands its real numbers over, in five dimensions that are not contiguous"
    if reason := (_no_device_takes if call.place == "device" else _gloo_does_not_take)(call):
        return reason
    if call.function in COPYING:
        if call.function == "gather" and dtype in _COMPLEX:
            return "torch does not view complex numbers as real ones for gather"
        return ""
    if dtype not in REDUCED:
        return "torch refuses to reduce it"
    if op in _BITWISE and dtype not in (*INTEGERS, "bool"):
        return "bits are those of integers"
    if op in ("AVG", "PREMUL_SUM") and dtype in _COMPLEX and call.values == "special":
        return "infinity times a complex factor is not defined"
    if op in ("AVG", "PREMUL_SUM") and dtype in (*INTEGERS, "bool"):
        return "a fraction of integers is not defined"
    if op in ("PRODUCT", "MIN", "MAX") and dtype in _COMPLEX:
        return "torch reduces complex numbers as pairs of real ones, by sums only"
    return ""


def _gloo_does_not_take(call: CollectiveCall) -> str:
    if reason := _LAYOUTS_WITHOUT_GLOO.get((call.function, call.layout)):
        return reason
    if call.function in COPYING:
        return "gloo has no float8" if call.dtype not in REDUCED else ""
    return "gloo has no PREMUL_SUM" if call.op == "PREMUL_SUM" else ""


def _no_device_takes(call: CollectiveCall) -> str:
    if call.function == "scatter" and call.layout == "gaps":
        return "NCCL scatters views with gaps as if they had none, silently: a defect of torch"
    if call.function.startswith("reduce_scatter") and call.dtype in _COMPLEX:
        return "torch does not view complex numbers as real ones for NCCL's reduce_scatter"
    if call.function in COPYING:
        return ""
    if call.op in _BITWISE:
        return "NCCL has no bitwise operations"
    if call.op == "PREMUL_SUM" and call.dtype == "bfloat16":
        return "torch hands NCCL a factor in float32, of which it reads the half that is zero: pytorch#190745"
    return ""
