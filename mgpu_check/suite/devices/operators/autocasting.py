"""Check dtype and values of each operator in torch's *autocast op reference*, on each device."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from mgpu_check.suite.common.agreement import Places, WrongCase, difference, named_wrong
from mgpu_check.suite.common.counters import fractions
from mgpu_check.suite.common.operators import CALLS
from mgpu_check.suite.common.values import shaped
from mgpu_check.torch_hooks.precision import repeatable
from mgpu_check.torch_hooks.tensors import name_of

Operation = Callable[..., torch.Tensor]

_ROWS, _COLUMNS, _OUT = 4, 6, 5


_LOW: dict[str, Operation] = {
    "__matmul__": lambda a, b, c: a @ b,
    "mm": lambda a, b, c: torch.mm(a, b),
    "mv": lambda a, b, c: torch.mv(a, b[:, 0]),
    "bmm": lambda a, b, c: torch.bmm(a[None], b[None]),
    "addmm": lambda a, b, c: torch.addmm(c, a, b),
    "addmv": lambda a, b, c: torch.addmv(c[:, 0], a, b[:, 0]),
    "addr": lambda a, b, c: torch.addr(c, a[:, 0], b[0]),
    "addbmm": lambda a, b, c: torch.addbmm(c, a[None], b[None]),
    "baddbmm": lambda a, b, c: torch.baddbmm(c[None], a[None], b[None]),
    "multi_dot": lambda a, b, c: torch.linalg.multi_dot((a, b, c.t())),
    "linear": lambda a, b, c: F.linear(a, b.t(), c[0]),
    "prelu": lambda a, b, c: F.prelu(a - 0.5, b[0, :1]),
    "conv1d": lambda a, b, c: F.conv1d(a[None], shaped(b, 2, 4, 3), stride=2),
    "conv2d": lambda a, b, c: F.conv2d(a[None, None], shaped(b, 2, 1, 3, 3), stride=2),
    "conv3d": lambda a, b, c: F.conv3d(a.view(1, 1, 2, 2, 6), shaped(b, 2, 1, 2, 2, 2), stride=2),
    "conv_transpose1d": lambda a, b, c: F.conv_transpose1d(a[None], shaped(b, 4, 2, 3), stride=2),
    "conv_transpose2d": lambda a, b, c: F.conv_transpose2d(a[None, None], shaped(b, 1, 2, 3, 3), stride=2),
    "conv_transpose3d": lambda a, b, c: F.conv_transpose3d(a.view(1, 1, 2, 2, 6), shaped(b, 1, 2, 2, 2, 2), stride=2),
}
"""Operators that autocast runs in its own dtype, for float32 operands.

Convolutions have a stride of 2, because cuDNN then has no algorithms that round differently.
"""


def _signs(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(x.numel(), device=x.device).view(x.shape) % 2 * 2 - 1


def _classes(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(x), device=x.device)


_FLOAT32: dict[str, Operation] = {
    **{
        name: lambda x, y, name=name: getattr(torch, name)(x)
        for name in (
            *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log1p", "log2"),
            *("norm", "pdist", "prod", "reciprocal", "rsqrt", "sinh", "sum", "tan"),
        )
    },
    **{
        name: lambda x, y, name=name: getattr(F, name)(x, y)
        for name in (
            *("binary_cross_entropy_with_logits", "cosine_similarity", "l1_loss", "mse_loss"),
            *("poisson_nll_loss", "smooth_l1_loss"),
        )
    },
    "__pow__": lambda x, y: x**2.5,
    "__rpow__": lambda x, y: 2.5**x,
    "__rtruediv__": lambda x, y: 2.5 / x,
    "pow": lambda x, y: torch.pow(x, y),
    "cdist": lambda x, y: torch.cdist(x, y),
    "dist": lambda x, y: torch.dist(x, y),
    "cumprod": lambda x, y: torch.cumprod(x, 1),
    "cumsum": lambda x, y: torch.cumsum(x, 1),
    "renorm": lambda x, y: torch.renorm(x, 2, 0, 1.0),
    "softmax": lambda x, y: F.softmax(x, 1),
    "softmin": lambda x, y: F.softmin(x, 1),
    "log_softmax": lambda x, y: F.log_softmax(x, 1),
    "softplus": lambda x, y: F.softplus(x),
    "normalize": lambda x, y: F.normalize(x),
    "layer_norm": lambda x, y: F.layer_norm(x, (_COLUMNS,), y[0], y[1]),
    "group_norm": lambda x, y: F.group_norm(x, 2, y[0], y[1]),
    "cross_entropy": lambda x, y: F.cross_entropy(x, _classes(x)),
    "nll_loss": lambda x, y: F.nll_loss(x, _classes(x)),
    "kl_div": lambda x, y: F.kl_div(x, y, reduction="sum"),
    "cosine_embedding_loss": lambda x, y: F.cosine_embedding_loss(x, y, _signs(x[:, 0])),
    "hinge_embedding_loss": lambda x, y: F.hinge_embedding_loss(x, _signs(x)),
    "margin_ranking_loss": lambda x, y: F.margin_ranking_loss(x[0], y[0], _signs(x[0])),
    "multi_margin_loss": lambda x, y: F.multi_margin_loss(x, _classes(x)),
    "multilabel_margin_loss": lambda x, y: F.multilabel_margin_loss(x, _classes(x.t()).expand(_ROWS, -1) % 3),
    "soft_margin_loss": lambda x, y: F.soft_margin_loss(x, _signs(x)),
    "triplet_margin_loss": lambda x, y: F.triplet_margin_loss(x, y, y.flip(0)),
}
"""Operators that autocast runs in float32, for operands in the dtype of autocast."""

_WIDEST: dict[str, Operation] = {
    "addcdiv": lambda x, y: torch.addcdiv(x, y, x),
    "addcmul": lambda x, y: torch.addcmul(x, y, x),
    "atan2": lambda x, y: torch.atan2(x, y),
    "bilinear": lambda x, y: F.bilinear(x, y, shaped(torch.cat((y, y, y)), 2, _COLUMNS, _COLUMNS)),
    "cross": lambda x, y: torch.cross(x[:, :3], y[:, :3], dim=1),
    "dot": lambda x, y: torch.dot(x[0], y[0]),
    "grid_sample": lambda x, y: F.grid_sample(x[None, None], y[None, :, :4].reshape(1, 2, 4, 2), align_corners=False),
    "index_put": lambda x, y: x.index_put((_classes(x)[::2],), y[0]),
    "scatter_add": lambda x, y: x.scatter_add(0, _classes(x)[:, None].expand_as(x).flip(0), y),
    "tensordot": lambda x, y: torch.tensordot(x, y, dims=([1], [1])),
    "__add__": CALLS["+"],  # not listed: it promotes by itself
}
"""Operators that autocast runs in the widest dtype of their operands: one has the dtype of autocast, the other
float32."""


def assert_autocast_as_documented(devices: Sequence[torch.device], seed: int = 0) -> int:
    """Assert that operators under `torch.autocast` give the documented dtype and the right values on each device.

    Ineligible operators must keep their dtype. Nested regions, and functions with `torch.amp.custom_fwd`, must get the
    dtype that they ask for. A region must use the current values of parameters, and must restore the state of autocast
    at its end.

    Returns:
        the number of cases.
    """
    wrong: list[WrongCase] = []
    count = 0
    with repeatable():
        for low in (torch.float16, torch.bfloat16):
            able = [device for device in devices if _has(device, low)]
            cases = _cases(low, seed) if able else []
            count += len(cases)
            for device in able:
                places = Places(device)
                for case in cases:
                    if what := _off(case, places):
                        wrong.append(WrongCase(device, f"{case.name}, autocast to {name_of(low)}", what))
    if wrong:
        raise named_wrong(wrong, devices, count, "the documentation")
    return count


def _has(device: torch.device, low: torch.dtype) -> bool:
    with torch.cuda.device(device):
        return low != torch.bfloat16 or torch.cuda.is_bf16_supported(including_emulation=False)


@dataclass(frozen=True)
class _AutocastCase:
    """A call under autocast, with its operands.

    Attributes:
        call: enters regions of autocast, and returns a result.
        right: the right result, in float64 on the CPU.
        dtype: the dtype that the result must have.
        inside: the dtype of a part of the computation, if it may be narrower than that of the result.
    """

    name: str
    call: Operation
    operands: Sequence[torch.Tensor]
    right: torch.Tensor
    dtype: torch.dtype
    inside: torch.dtype | None = None


def _off(case: _AutocastCase, places: Places) -> str:
    """Describe the error of a case on a device; "" if there is no error."""
    try:
        got = case.call(*[places.held(one) for one in case.operands])
    except Exception as error:
        return f"it raised {type(error).__name__}: {error}"
    if got.dtype != case.dtype:
        return f"its result is of {name_of(got.dtype)}, expected {name_of(case.dtype)}"
    allowed = torch.finfo(case.inside).eps * case.right.abs() if case.inside else None
    return difference(got, case.right.to(case.dtype), "close", allowed)


def _cases(low: torch.dtype, seed: int) -> list[_AutocastCase]:
    """Return all cases for one dtype of autocast."""
    host = torch.device("cpu")
    shapes = ((_ROWS, _COLUMNS), (_COLUMNS, _OUT), (_ROWS, _OUT), (_ROWS, _COLUMNS))
    # Between 1/8 and 7/8: every function is defined there, and no sum of products cancels.
    a, b, c, y = (
        fractions(shape, seed=seed + number, device=host, dtype=torch.float32, low=0.125, high=0.875)
        for number, shape in enumerate(shapes)
    )
    narrow = a.to(low), y.to(low)
    found = []
    for operations, operands, dtype in (
        (_LOW, (a, b, c), low),
        (_FLOAT32, narrow, torch.float32),
        (_WIDEST, (narrow[0], y), torch.float32),
    ):
        exactly = [(one.to(low) if dtype == low else one).double() for one in operands]
        turn = None if dtype == low else (seed + (low == torch.bfloat16)) % 2
        # Operators that run in float32 do so from either dtype, so each dtype tries half of them.
        for name, operation in list(operations.items())[turn :: 1 if turn is None else 2]:
            # `cross_entropy` calls `log_softmax` with the dtype of its operand, so that part runs in `low`.
            inside = low if name == "cross_entropy" else None
            call = partial(_within, low, operation)
            found.append(_AutocastCase(name, call, operands, operation(*exactly), dtype, inside))
    return [*found, *_regions(a, b, low), *_functions(a, b, low)]


def _within(low: torch.dtype, operation: Operation, *operands: torch.Tensor, **inner: Any) -> torch.Tensor:
    """Call `operation` in two nested regions of autocast; `inner` overrides options of the inner one."""
    with torch.autocast("cuda", low), torch.autocast("cuda", **{"dtype": low, **inner}):
        return operation(*operands)


def _refused(x: torch.Tensor) -> torch.Tensor:
    """Return `x` if torch refuses a loss that is unsafe in low precision, as documented; else zeros."""
    try:
        F.binary_cross_entropy(x, x)
    except RuntimeError:
        return x
    return torch.zeros_like(x)


def _regions(a: torch.Tensor, b: torch.Tensor, low: torch.dtype) -> Iterator[_AutocastCase]:
    """Yield cases of ineligible operators, of nested regions, and of code after a region."""
    full, double, half = torch.float32, torch.float64, torch.float16
    wide, narrow, in_half = (_product(a, b, dtype) for dtype in (full, low, half))
    eighths = (a * 8).round() / 8  # their sums are exact in any dtype
    within = partial(_within, low)

    def after(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        before = _set()
        within(torch.mm, a, b, enabled=False)
        _require_set(before)
        return a @ b

    def after_inner(inner: dict[str, Any], escape: bool, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", low):
            before = _set()
            with contextlib.suppress(_Escaped), torch.autocast("cuda", **{"dtype": low, **inner}):
                torch.add(a, a)  # no product: the GPU may lack products in this dtype
                if escape:
                    raise _Escaped
            _require_set(before)
            return a @ b

    def changed(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        weight = torch.zeros_like(b, requires_grad=True)
        for value in (torch.ones_like(b), b):
            with torch.no_grad():
                weight.copy_(value)
            product = within(torch.mm, a, weight)
        return product.detach()

    def backward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        weight = b.clone().requires_grad_()
        within(torch.mm, a, weight).sum().backward()
        assert weight.grad is not None
        return weight.grad

    def in_place(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return torch.zeros(_ROWS, _OUT, device=a.device).addmm_(a, b)

    sums = eighths.sum(0)[:, None].expand_as(b).double()
    with_dtype = partial(torch.sum, dtype=double)
    yield _AutocastCase(
        "mm of float64", partial(within, torch.mm), (a.double(), b.double()), a.double() @ b.double(), double
    )
    yield _AutocastCase("addmm_, which is in place", partial(within, in_place), (a, b), wide, full)
    yield _AutocastCase("sum with dtype=torch.float64", partial(within, with_dtype), (a,), a.double().sum(), double)
    yield _AutocastCase("binary_cross_entropy, which is refused", partial(within, _refused), (a,), a.double(), full)
    yield _AutocastCase(
        "mm in a region with enabled=False", partial(within, torch.mm, enabled=False), (a, b), wide, full
    )
    yield _AutocastCase("mm in a region of float16", partial(within, torch.mm, dtype=half), (a, b), in_half, half)
    yield _AutocastCase("mm after the regions", after, (a, b), wide, full)
    inners: list[dict[str, Any]] = [
        {"enabled": False},
        {"dtype": torch.bfloat16 if low == half else half},
        {"cache_enabled": False},
    ]
    for inner, escape in itertools.product(inners, (False, True)):
        asked = ", ".join(f"{key}={value}" for key, value in inner.items())
        name = f"mm after an inner region with {asked}" + ", left by an exception" * escape
        yield _AutocastCase(name, partial(after_inner, inner, escape), (a, b), narrow, low)
    yield _AutocastCase("mm with a parameter that was changed between regions", changed, (a, b), narrow, low)
    yield _AutocastCase("the gradient of a parameter of float32", backward, (eighths, b), sums, full)


class _Escaped(Exception):
    """Raised to leave a region by an exception."""


def _set() -> tuple[bool, torch.dtype, bool]:
    """Return the state that regions of autocast set."""
    return torch.is_autocast_enabled("cuda"), torch.get_autocast_dtype("cuda"), torch.is_autocast_cache_enabled()


def _require_set(before: tuple[bool, torch.dtype, bool]) -> None:
    names = ("whether it is enabled", "its dtype", "whether it caches")
    for name, was, now in zip(names, before, _set(), strict=True):
        if was != now:
            raise AssertionError(f"a region did not restore the state of autocast: {name} was {was}, and is now {now}")


def _product(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return a.to(dtype).double() @ b.to(dtype).double()


def _functions(a: torch.Tensor, b: torch.Tensor, low: torch.dtype) -> Iterator[_AutocastCase]:
    """Yield products in autograd functions with `torch.amp.custom_fwd`.

    Backward must use the autocast state of forward, even when it is called outside the region. With
    `cast_inputs=torch.float32` both must run in float32, without autocast.
    """

    def called(cast: torch.dtype | None, place: int, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        made: list[torch.Tensor] = []
        with torch.autocast("cuda", low):
            result = _noting(cast, made).apply(a.clone().requires_grad_(), b).sum()
            if cast is not None:
                result.backward()
        if cast is None:
            result.backward()
        return made[place]

    for cast, how in ((None, "custom_fwd"), (torch.float32, "custom_fwd with cast_inputs=torch.float32")):
        for place, when in enumerate(("forward", "backward")):
            name = f"mm {when} in a function of {how}"
            operands = a.to(low), b.to(low)
            yield _AutocastCase(name, partial(called, cast, place), operands, _product(a, b, low), cast or low)


def _noting(cast: torch.dtype | None, made: list[torch.Tensor]) -> Any:
    """Return an autograd function that appends the product of its forward and that of its backward to `made`."""

    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        made.append(x @ y)
        return made[-1].clone()

    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        x, y = ctx.saved_tensors
        made.append(x.float() @ y.float())
        return torch.ones_like(x), None

    wrapped = {
        "forward": staticmethod(torch.amp.custom_fwd(forward, device_type="cuda", cast_inputs=cast)),
        "backward": staticmethod(torch.amp.custom_bwd(backward, device_type="cuda")),
    }
    return type("Noting", (torch.autograd.Function,), wrapped)
