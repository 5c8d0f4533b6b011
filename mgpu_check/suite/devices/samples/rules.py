"""Say which samples are left out and why, how results of operators are compared, and how much each level tries."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple


class Amount(NamedTuple):
    """The amount that a level tries.

    Attributes:
        share: the number of parts that operators are divided into; an example tries one part.
        samples: samples of each operator and dtype; None for all.
        among: the number of first samples that these are chosen from; None for all.
        every: whether each device gets a sample of each operator and dtype; otherwise the samples are dealt.
    """

    share: int
    samples: int | None
    among: int | None
    every: bool


AMOUNTS: Mapping[str, Amount] = types.MappingProxyType({
    "quick": Amount(share=16, samples=1, among=12, every=False),
    "standard": Amount(share=1, samples=4, among=48, every=True),
    "long": Amount(share=1, samples=None, among=None, every=True),
})  # fmt: skip
"""Level -> what it tries. The seed of an example chooses the part, the samples, their elements and their layouts."""


class LeftOutSample(NamedTuple):
    """Samples that are not tried.

    Attributes:
        operators: patterns of names, separated by spaces.
        where: the devices that leave them out: "real", "simulated", or "" for both.
        holds: takes the options of a sample; returns whether the row is about it.
    """

    reason: str
    operators: str
    where: str = ""
    holds: Callable[[Mapping[str, Any]], bool] = lambda options: True


LEFT_OUT: tuple[LeftOutSample, ...] = (
    LeftOutSample("it draws random numbers, which differ between devices; other checks judge their distribution",
        "bernoulli cauchy exponential geometric log_normal multinomial normal* rand* uniform svd_lowrank pca_lowrank "
        "nn.functional.*dropout* nn.functional.fractional_max_pool* nn.functional.multi_head_attention_forward"),
    LeftOutSample("it draws random numbers with these options",
        "nn.functional.scaled_dot_product_attention nn.functional.rrelu",
        holds=lambda options: bool(options.get("dropout_p") or options.get("training"))),
    LeftOutSample("it returns memory without values", "empty* new_empty*"),
    LeftOutSample("it compiles a kernel of CUDA for a text", "jiterator*"),
    LeftOutSample("torch's own comparison of CUDA with the CPU leaves it out: the values are not defined, or CUDA "
        "computes them in another way",
        "bitwise_left_shift bitwise_right_shift native_batch_norm _native_batch_norm_legit "
        "*_scaled_mm* mode byte char int long short linalg.lu linalg.lu_factor* special.zeta special.*polynomial*",
        where="real"),
    LeftOutSample("an operator written in Python chooses a kernel of CUDA, and runs below the simulated device",
        "nn.functional.linear_cross_entropy*", where="simulated",
        holds=lambda options: options.get("options") is not None),
)  # fmt: skip

OWN_LAYOUT = "as_strided* view view_as view_as_complex view_as_real resize_* unfold_copy native_group_norm"
"""Operators whose result depends on the layout of an operand, or which refuse some layouts.

The kernel `native_group_norm` reads weights as if they were contiguous; `group_norm` makes them so.
"""

UNDETERMINED: Mapping[str, tuple[int, ...]] = types.MappingProxyType({
    "sort topk kthvalue median nanmedian mode msort cummax cummin": (1,),
    "argsort": (0,),
})  # fmt: skip
"""Operators -> their results that are not compared: of equal elements they may name any."""

EXACT = (
    "__getitem__ amax amin aminmax as_strided* atleast_* block_diag broadcast_* cartesian_prod cat ceil chunk "
    "clamp* clone column_stack combinations conj* constant_pad_nd contiguous copysign cummax cummin diag* dsplit "
    "dstack expand* fill flatten flip* floor fmax fmin fmod frac gather hsplit hstack imag index_copy index_fill "
    "index_select kthvalue mH mT masked_fill masked_scatter masked_select max.* maximum meshgrid* min.* minimum "
    "mode movedim msort narrow* neg nextafter nn.functional.channel_shuffle nn.functional.hardtanh "
    "nn.functional.max_pool* nn.functional.pad* nn.functional.pixel_* nn.functional.relu nn.functional.relu6 "
    "nn.functional.threshold nn.functional.unfold permute* positive ravel real repeat* reshape* resolve_* roll "
    "rot90 round scatter select* sign slice* sort split* squeeze* stack t take* tensor_split tile topk transpose* "
    "tril triu trunc unbind* unflatten unfold* unique* unsafe_* unsqueeze* view* vsplit vstack where zeros_like"
)
"""Operators whose floating results are exact: they move or choose elements, or change the sign, or round to integers.

Results of other dtypes are exact for all operators.
"""


def reason_for(operator: str, options: Mapping[str, Any], *, real: bool) -> str:
    """Return why a sample is left out; "" if it is not."""
    here = "real" if real else "simulated"
    rows = (row for row in LEFT_OUT if named(operator, row.operators) and row.where in ("", here))
    return next((row.reason for row in rows if row.holds(options)), "")


@functools.cache
def named(operator: str, patterns: str) -> bool:
    """Return whether the name of an operator matches one of the patterns, which spaces separate."""
    return any(fnmatchcase(operator, pattern) for pattern in patterns.split())
