"""The arithmetic of a GPU: change the results of operators on simulated tensors as a healthy GPU may.

`dispatch` asks `imitated` for the kernel of each operator. A row of `_ROWS` names the kinds, the operators, and how it
wraps their kernels; `option_values.ARITHMETIC_KINDS` has the sources. All devices compute alike, as GPUs of one model
do. Plain CPU tensors keep the arithmetic of the processor: checks compute their expectations there.

The kernel runs, too: it raises the errors, makes the results, and draws from the generator. Then the values of another
order of additions, or rounded elsewhere, replace its own.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mgpu_check.option_values import ArithmeticSettings
from mgpu_check.simulated.operators.generators import drawn_permutation
from mgpu_check.simulated.tensor import CHANNELS_LAST, SimulatedTensor, is_channels_last, mapped, raw, tensors_in
from mgpu_check.torch_hooks.tensors import INTEGER_OF_SIZE, argument_values, written_by

Kernel = Callable[..., Any]
Arguments = dict[str, Any]
"""The arguments of one call by their names in the schema; their tensors are plain."""
Values = Sequence[Tensor | None] | Tensor | None
"""The results of a call in their order; None where the kernel's own value stays."""

_aten = torch.ops.aten
_HALF = (torch.float16, torch.bfloat16)
_WIDER = {
    torch.float32: torch.float64,
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.complex64: torch.complex128,
}
_LARGEST_PERMUTATION = 4096  # terms; larger sums are added in pieces alone
_SPLIT_K_TERMS, _SPLIT_K_OUTPUTS = 512, 128 * 128
"""cuBLAS splits the terms of a product with many terms and few outputs."""


class Arithmetic:
    """The kinds that are on in this process, and the orders of their additions."""

    def __init__(self, settings: ArithmeticSettings) -> None:
        self.kinds = settings.kinds
        self._permutations: dict[tuple[int, ...], Tensor] = {}
        self._seed = settings.seed or 0
        self._of_calls = int.from_bytes(os.urandom(7), "little") if settings.seed is None else settings.seed
        self._calls = 0

    @property
    def varies(self) -> bool:
        return "atomics" in self.kinds and not torch.are_deterministic_algorithms_enabled()

    def permutation(self, n: int, device: torch.device, *shape: int, varies: bool = False) -> Tensor:
        """Return an order of n terms: int64 `[n]`, the same for equal shapes; with `varies`, another in each call."""
        if varies:
            self._calls += 1
            rank = int(os.environ.get("RANK", "0"))
            return drawn_permutation(n, hash((self._of_calls, rank, self._calls)), device)
        key = (n, *shape)
        if (kept := self._permutations.get(key)) is None:
            kept = drawn_permutation(n, hash((self._seed, *key)), device)
            if n <= _LARGEST_PERMUTATION:
                self._permutations[key] = kept
        return kept


present = Arithmetic(ArithmeticSettings())
"""The arithmetic of this process. `dispatch.use_arithmetic` replaces it."""


def _order(n: int, like: Tensor, *shape: int, varies: bool = False) -> Tensor:
    return present.permutation(n, like.device, *shape, varies=varies)


@contextlib.contextmanager
def _outside_torch() -> Iterator[None]:
    with torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction(), torch.no_grad():
        yield


def _bound(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Arguments) -> Arguments:
    bound = {}
    for position, argument in enumerate(func._schema.arguments):
        if position < len(args):
            bound[argument.name] = mapped(args[position], raw)
        elif argument.name in kwargs:
            bound[argument.name] = mapped(kwargs[argument.name], raw)
        elif argument.has_default_value():
            bound[argument.name] = argument.default_value
    return bound


def _written(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: Arguments, out: Any) -> list[Any]:
    """Return the tensors whose values a call has computed: its results, or else the arguments that it wrote."""
    if out is not None and not func._schema.is_mutable:
        return list(out) if isinstance(out, (list, tuple)) else [out]
    return list(tensors_in(argument_values(written_by(func), args, kwargs)))


_left_alone: set[str] = set()


def _leave_alone(func: torch._ops.OpOverload, error: Exception) -> None:
    if str(func) not in _left_alone:
        _left_alone.add(str(func))
        print(
            f"mgpu-check: {func} has the CPU's arithmetic for some operands: {type(error).__name__}: {error!s:.120}",
            file=sys.stderr,
        )


def _replacing(compute: Callable[[str, Arguments], Values]) -> Callable[[torch._ops.OpOverload, Kernel], Kernel]:
    """Return a wrapper whose kernel has the values that ``compute(name, arguments)`` returns."""

    def wrap(func: torch._ops.OpOverload, kernel: Kernel) -> Kernel:
        name = _name(func)

        @functools.wraps(kernel)
        def run(*args: Any, **kwargs: Any) -> Any:
            values: Values = None
            failure = None
            with _outside_torch():
                try:
                    values = compute(name, _bound(func, args, kwargs))
                except Exception as error:  # mostly the one that the kernel raises below
                    failure = error
            out = kernel(*args, **kwargs)
            if failure is not None:
                _leave_alone(func, failure)
            if values is not None:
                _store(_written(func, args, kwargs, out), values)
            return out

        return run

    return wrap


def _store(targets: Sequence[Any], values: Values) -> None:
    with _outside_torch():
        for target, value in zip(targets, [values] if isinstance(values, Tensor) else values or [], strict=False):
            if isinstance(target, Tensor) and value is not None and target.shape == value.shape:
                raw(target).copy_(value)


def _altering(alter: Callable[[Tensor], Tensor | None]) -> Callable[[torch._ops.OpOverload, Kernel], Kernel]:
    """Return a wrapper whose kernel's floating-point results are those that ``alter(result)`` returns."""

    def wrap(func: torch._ops.OpOverload, kernel: Kernel) -> Kernel:
        @functools.wraps(kernel)
        def run(*args: Any, **kwargs: Any) -> Any:
            out = kernel(*args, **kwargs)
            targets = [t for t in tensors_in(_written(func, args, kwargs, out)) if t.layout is torch.strided]
            with _outside_torch():
                values = [alter(raw(t)) if t.is_floating_point() else None for t in targets]
            _store(targets, values)
            return out

        return run

    return wrap


def _name(func: torch._ops.OpOverload) -> str:
    """Name an operator without namespace and overload, and without the underscore of its form in place."""
    name = func._schema.name.rpartition("::")[2]
    return name if name.startswith("_fused") else name.rstrip("_")


def _wide(value: Any) -> Any:
    """Return an argument in float64."""
    if isinstance(value, torch.dtype):
        return _WIDER.get(value, value)
    return mapped(value, lambda t: t.to(_WIDER[t.dtype]) if t.dtype in _WIDER and t.layout is torch.strided else t)


_UNSCALED = frozenset({"grad_scale", "found_inf"})  # of optimizers: they stay float32


def _rounded_once(func: torch._ops.OpOverload, kernel: Kernel, only: torch.dtype | None = None) -> Kernel:
    """Wrap a kernel so that it computes in float64, and rounds only its results; with `only`, calls in that dtype."""

    def compute(name: str, arguments: Arguments) -> Values:
        dtypes = {t.dtype for t in tensors_in(list(arguments.values()))}
        if not dtypes & _WIDER.keys() or (only is not None and dtypes != {only}):
            return None
        wide = {key: value if key in _UNSCALED else _wide(value) for key, value in arguments.items()}
        schema = func._schema.arguments
        args = [wide[a.name] for a in schema if not a.kwarg_only and a.name in wide]
        out = kernel(*args, **{a.name: wide[a.name] for a in schema if a.kwarg_only and a.name in wide})
        return _written(func, args, wide, out)

    return _replacing(compute)(func, kernel)


def _accumulated(t: Tensor) -> Tensor:
    """Return a tensor in the accumulating dtype of GPUs."""
    return t.float() if t.dtype in _HALF else t


def draw_variant(args: Sequence[Any]) -> int:
    """Return what the numbers of a call that draws depend on, besides seed and offset: how many are drawn."""
    if "philox" not in present.kinds:
        return 0
    first = next((value for value in args if isinstance(value, Tensor)), None)
    if first is not None:
        return first.numel()
    sizes = [n for value in args for n in (value if isinstance(value, (list, tuple)) else (value,))]
    return math.prod(n for n in sizes if isinstance(n, int) and not isinstance(n, bool) and n > 0)


# ------------------------------------------------------------------------------------------------ products and sums


def _tf32(t: Tensor) -> Tensor:
    """Round to TF32: 10 bits of mantissa, to nearest, ties away from zero (PTX: cvt.rna.tf32)."""
    rounded = ((t.contiguous().view(torch.int32) + 0x1000) & -0x2000).view(torch.float32)
    return torch.where(t.isfinite(), rounded, t)


def _allows_tf32(switch: Callable[[], bool]) -> bool:
    if "tf32" not in present.kinds or os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        return False
    try:
        return bool(switch())
    except RuntimeError:  # the old and the new switches of torch contradict each other
        return False


def _cudnn_tf32() -> bool:
    return bool(torch._C._get_cudnn_enabled() and torch._C._get_cudnn_allow_tf32())


def _splits(dtype: torch.dtype, terms: int, outputs: int) -> bool:
    if "split-k" not in present.kinds or dtype not in _HALF or terms < _SPLIT_K_TERMS or outputs > _SPLIT_K_OUTPUTS:
        return False
    name = "fp16" if dtype is torch.float16 else "bf16"
    allowed = getattr(torch.backends.cuda.matmul, f"allow_{name}_reduced_precision_reduction", True)
    return bool(allowed[0] if isinstance(allowed, tuple) else allowed)


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return ``a @ b`` of matrices, or of batches of them, in the accumulating dtype of GPUs.

    a: `[..., rows, terms]`; b: `[..., terms, columns]`.
    """
    if not present.kinds:
        return a @ b
    rows, terms, columns, dtype = a.size(-2), a.size(-1), b.size(-1), a.dtype
    if dtype is torch.float32 and _allows_tf32(torch._C._get_cublas_allow_tf32):
        a, b = _tf32(a), _tf32(b)
    a, b = _accumulated(a), _accumulated(b)
    rounds = _splits(dtype, terms, rows * columns)
    total: Tensor | None = None
    if terms >= 2 and (rounds or "order" in present.kinds):
        if "order" in present.kinds and terms <= _LARGEST_PERMUTATION:
            order = _order(terms, a, rows, columns)
            a, b = a.index_select(-1, order), b.index_select(-2, order)
        pieces = 4 if rounds else min(2 + (rows * 31 + columns * 17 + terms) % 3, terms)
        size = math.ceil(terms / pieces)
        for part, other in zip(a.split(size, -1), b.split(size, -2), strict=True):
            piece = part @ other
            piece = piece.to(dtype).to(piece.dtype) if rounds else piece
            total = piece if total is None else total + piece
    else:
        total = a @ b
    assert total is not None
    return total + 0.0 if "zeros" in present.kinds or dtype in _HALF else total


def rounded_weights(weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 weights of an attention whose operands have `dtype`, as its second product reads them."""
    return weights.to(dtype).float() if "split-k" in present.kinds and dtype in _HALF else weights


_FACTORS = {
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
    "mv": ("self", "vec"),
    "addmv": ("mat", "vec"),
    "dot": ("self", "tensor"),
    "vdot": ("self", "other"),
}


def _matmul(name: str, a: Arguments) -> Values:
    first, second = (a[factor] for factor in _FACTORS[name])
    if not first.is_floating_point() or first.layout is not torch.strided or second.layout is not torch.strided:
        return None
    if second.dim() == 1:
        result = product(first if first.dim() == 2 else first.unsqueeze(0), second.unsqueeze(1)).squeeze(-1)
        result = result if first.dim() == 2 else result.squeeze(0)
    else:
        result = product(first, second)
    if "beta" not in a:
        return result
    result = result if a["alpha"] == 1 else result * a["alpha"]
    return result if a["beta"] == 0 else result + _accumulated(a["self"]) * a["beta"]


def _sum(x: Tensor, dims: Sequence[int] | None, keep: bool) -> Tensor:
    """Return the sum in another order, in the accumulating dtype of GPUs."""
    x = _accumulated(x)
    axes = [d % x.dim() for d in (dims or range(x.dim()))] if x.dim() else []
    for d in axes:
        if x.size(d) > 2 and "order" in present.kinds:
            x = x.index_select(d, _order(x.size(d), x, x.numel()))
    return x.sum(axes, keep) if axes else x.clone()


def _sums(name: str, a: Arguments) -> Values:
    x: Tensor = a["self"] if a.get("dtype") is None else a["self"].to(a["dtype"])
    if not x.is_floating_point() or x.numel() < 2 or x.layout is not torch.strided:
        return None
    dims = a.get("dim")
    result = _sum(x, [dims] if isinstance(dims, int) else dims, bool(a.get("keepdim")))
    if name == "sum":
        return result
    count = x.numel() // max(result.numel(), 1)
    return result * (result.new_ones(()) / count) if "reciprocal" in present.kinds else result / count


def _cumsum(name: str, a: Arguments) -> Values:
    x = _accumulated(a["self"])
    d: int = a["dim"]
    if a.get("dtype") not in (None, a["self"].dtype) or not x.is_floating_point() or not x.dim() or x.size(d) < 3:
        return None
    n = x.size(d)
    cut = 1 + int(_order(n - 1, x, varies=True)[0]) if present.varies else n // 2
    head, tail = x.split([cut, n - cut], d)
    head = head.cumsum(d)
    return torch.cat([head, tail.cumsum(d) + head.narrow(d, cut - 1, 1)], d)


# -------------------------------------------------------------------------------------------------------- convolutions


def _geometry(a: Arguments) -> tuple[Any, ...]:
    return tuple(a[key] for key in ("stride", "padding", "dilation", "transposed", "output_padding", "groups"))


def _narrowed(a: Arguments, *tensors: Tensor) -> list[Tensor]:
    """Return the operands as cuDNN reads them; a depthwise convolution has a kernel without TF32."""
    depthwise = a["groups"] == a["input"].size(1) and a["groups"] > 1
    if a["input"].dtype is torch.float32 and not depthwise and _allows_tf32(_cudnn_tf32):
        return [_tf32(t) for t in tensors]
    return [_accumulated(t) for t in tensors]


def _convolution(name: str, a: Arguments) -> Values:
    x, w = _narrowed(a, a["input"], a["weight"])
    if not x.is_floating_point() or x.dim() != w.dim():
        return None
    compute, rest = _aten.convolution.default, _geometry(a)
    channels, axis = x.size(1), 0 if a["transposed"] else 1
    result: Tensor
    if "order" in present.kinds and a["groups"] == 1 and channels > 1:  # the second half of the channels first
        order = _order(channels, x, *x.shape)
        parts = zip(x.index_select(1, order).chunk(2, 1), w.index_select(axis, order).chunk(2, axis), strict=True)
        first, second = (compute(of_x, of_w, None, *rest) for of_x, of_w in parts)
        result = second + first
    elif "order" in present.kinds and x.dtype is torch.float32:
        result = compute(x.double(), w.double(), None, *rest)
    else:
        result = compute(x, w, None, *rest)
    result = result + 0.0 if "zeros" in present.kinds else result
    bias: Tensor | None = a["bias"]
    return result if bias is None else result + bias.to(result.dtype).view(1, -1, *[1] * (result.dim() - 2))


def _convolution_backward(name: str, a: Arguments) -> Values:
    if not a["input"].is_floating_point() or a["input"].dim() != a["weight"].dim():
        return None
    mask = a["output_mask"]
    of_bias = _sum(a["grad_output"], [0, *range(2, a["input"].dim())], False) if mask[2] else None
    gradient, x, w = _narrowed(a, a["grad_output"], a["input"], a["weight"])
    axis, rest = 1 if a["transposed"] else 0, _geometry(a)

    def backward(i: int, gradient: Tensor, x: Tensor, w: Tensor) -> Tensor:
        return _aten.convolution_backward(gradient, x, w, None, *rest, [i == 0, i == 1, False])[i]

    of_x = of_w = None
    if mask[0]:
        order = _order(gradient.size(1), x, *x.shape)
        permutes = a["groups"] == 1 and gradient.size(1) > 1
        pair = (gradient.index_select(1, order), w.index_select(axis, order)) if permutes else (gradient, w)
        of_x = backward(0, pair[0], x, pair[1])
    if mask[1]:
        if x.size(0) > 2:
            order = _order(x.size(0), x, *x.shape, varies=present.varies and not torch._C._get_cudnn_deterministic())
            first, second = (backward(1, gradient[part], x[part], w) for part in order.chunk(2))
            of_w = second + first
        else:
            of_w = backward(1, gradient.double(), x.double(), w.double())
    return [of_x, of_w, of_bias]


# ------------------------------------------------------------------------------------------------------------- atomics


def _index_add(name: str, a: Arguments) -> Values:
    x, d, index, source = a["self"], a["dim"], a["index"], a["source"]
    if not x.is_floating_point() or index.dim() != 1 or index.numel() < 2 or not source.dim():
        return None
    order = _order(index.numel(), x, varies=present.varies)
    return _aten.index_add(x, d, index[order], source.index_select(d, order), alpha=a["alpha"])


def _scatter_add(name: str, a: Arguments) -> Values:
    x, d, index, source = a["self"], a["dim"], a["index"], a["src"]
    if not x.is_floating_point() or not index.dim() or index.size(d) < 2 or source.size(d) < index.size(d):
        return None
    order = _order(index.size(d), x, varies=present.varies)
    return _aten.scatter_add(x, d, index.index_select(d, order), source.index_select(d, order))


def _embedding_backward(name: str, a: Arguments) -> Values:
    index = a["indices"].reshape(-1)
    if index.numel() < 2:
        return None
    order = _order(index.numel(), index)
    gradient = _accumulated(a["grad_output"]).reshape(-1, a["grad_output"].size(-1))[order]
    rest = (a[key] for key in ("num_weights", "padding_idx", "scale_grad_by_freq"))
    return _aten.embedding_dense_backward(gradient, index[order], *rest)


def _index_put(name: str, a: Arguments) -> Values:
    x, indices = a["self"], a["indices"]
    if not a["accumulate"] or not x.is_floating_point():
        return None
    if any(index is None or index.dtype in (torch.bool, torch.uint8) for index in indices):
        return None
    places = torch.broadcast_tensors(*indices)
    count, inner = places[0].numel(), x.shape[len(indices) :]
    if count < 2:
        return None
    order = _order(count, x)
    spread = a["values"].expand(*places[0].shape, *inner).reshape(count, *inner)
    return _aten.index_put(x, [p.reshape(-1)[order] for p in places], spread[order], True)


def _by_chance(func: torch._ops.OpOverload, kernel: Kernel) -> Kernel:
    """Wrap a kernel that adds by atomics: each element has the sum in float32, or the correctly rounded one."""
    once = _rounded_once(func, lambda *args, **kwargs: func(*args, **kwargs))

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not present.varies:
            return once(*args, **kwargs) if "order" in present.kinds else kernel(*args, **kwargs)
        out = kernel(*args, **kwargs)
        targets = [raw(t) for t in _written(func, args, kwargs, out) if t.is_floating_point()]
        with _outside_torch():
            kept = [t.clone() for t in targets]
            named = {name: mapped(value, raw) for name, value in kwargs.items()}
            exact = _written(func, args, kwargs, once(*mapped(args, raw), **named))
            for target, own, rounded in zip(targets, kept, map(raw, exact), strict=False):
                chance = _order(own.numel(), own, varies=True).view(own.shape) % 2 == 0
                target.copy_(torch.where(chance, own, rounded))
        return out

    return run


# ------------------------------------------------------------------------------------------------------------ functions

_ULPS = {
    **dict.fromkeys(("exp", "expm1", "log", "log2", "log1p", "_log_softmax", "logsumexp"), 1),
    **dict.fromkeys(("exp2", "log10", "sin", "cos", "asin", "acos", "atan", "cosh", "tanh", "erf", "erfinv"), 2),
    **dict.fromkeys(("rsqrt", "sigmoid", "silu", "gelu", "softplus", "log_sigmoid_forward", "elu", "mish"), 2),
    **dict.fromkeys(("celu", "selu", "_softmax", "logaddexp"), 2),
    **dict.fromkeys(("atan2", "sinh", "asinh", "atanh", "hypot"), 3),
    **dict.fromkeys(("tan", "acosh", "pow", "erfc"), 4),
    "lgamma": 6,
    "_foreach_exp": 1,
    "_foreach_log": 1,
    **dict.fromkeys(("_foreach_tanh", "_foreach_rsqrt", "_foreach_sigmoid"), 2),
    "_foreach_pow": 4,
}
"""Operator -> maximal error of its float32 kernel in ulp (CUDA C++ Programming Guide, Mathematical Functions)."""

_WITHIN_ONE = frozenset({"sin", "cos", "tanh", "erf", "sigmoid", "_softmax", "_foreach_tanh", "_foreach_sigmoid"})
_EXACT_POWERS = (0, 1, 2, 3, 0.5, -0.5, -1, -2)  # pow has kernels of their own for these (PowKernel.cu)


def nudged(t: Tensor, most: int) -> Tensor:
    """Return values moved by up to `most` ulp, as a function of their bits; whole numbers, inf and NaN stay."""
    bits = t.contiguous().view(INTEGER_OF_SIZE[t.itemsize])
    wide = bits.long()
    mixed = (((wide ^ (wide >> 11)) * 0x9E3779B97F4A7C1) >> 24) & 0xFFFF
    far = mixed & 0xF000 == 0  # one of 16 has an error above one ulp
    step = torch.where(far, (mixed >> 4) % (2 * most + 1) - most, mixed % 3 - 1)
    free = (t != t.round()) & (t.abs() > 4 * torch.finfo(t.dtype).tiny) & t.isfinite()
    return (bits + torch.where(free, step, 0).to(bits.dtype)).view(t.dtype)


def _function(func: torch._ops.OpOverload, kernel: Kernel) -> Kernel:
    name = _name(func)

    def alter(t: Tensor) -> Tensor | None:
        if t.dtype is not torch.float32:
            return None
        moved = nudged(t, _ULPS[name])
        return moved.clamp(-1, 1) if name in _WITHIN_ONE else moved

    inner = _altering(alter)(func, _rounded_once(func, kernel, torch.float32))

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        exponent = args[1] if "pow" in name and len(args) > 1 else None
        exact = isinstance(exponent, (int, float)) and exponent in _EXACT_POWERS
        return (kernel if exact else inner)(*args, **kwargs)

    return run


# ------------------------------------------------------------------------------------------ ties, casts, zeros, memory


def _topk(name: str, a: Arguments) -> Values:
    x = a["self"]
    if not x.dim():
        return None
    values, places = _aten.topk(x.flip(a["dim"]), a["k"], a["dim"], a["largest"], a["sorted"])
    return [values, x.size(a["dim"]) - 1 - places]


def _sort(name: str, a: Arguments) -> Values:
    x = a["self"]
    if not x.dim() or a.get("stable"):
        return None
    values, places = _aten.sort(x.flip(a["dim"]), a["dim"], a["descending"])
    return [values, x.size(a["dim"]) - 1 - places]


def _cast(name: str, a: Arguments) -> Values:
    source, dtype = (a["src"], a["self"].dtype) if name == "copy" else (a["self"], a.get("dtype"))
    if not source.is_floating_point() or dtype not in (torch.int32, torch.int64):
        return None
    limits, wide = torch.iinfo(dtype), source.double()
    high, low = wide >= float(limits.max), wide <= float(limits.min)
    outside = high | low | wide.isnan()
    if not bool(outside.any()):
        return None
    result: Tensor = wide.masked_fill(outside, 0.0).to(dtype).masked_fill_(high, limits.max)
    result.masked_fill_(low, limits.min)
    like: Tensor = a["self"]
    return result.expand(like.shape)


def _division(func: torch._ops.OpOverload, kernel: Kernel) -> Kernel:
    """Wrap a division: by an integer 0 it has a result, which CUDA does not define."""

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return kernel(*args, **kwargs)
        except RuntimeError as error:
            if "ZeroDivisionError" not in str(error):
                raise
            divisor = args[1]
            with _outside_torch():
                safe = raw(divisor).masked_fill(raw(divisor) == 0, 1) if isinstance(divisor, Tensor) else 1
            return kernel(args[0], safe, *args[2:], **kwargs)

    return run


def _extreme(name: str, a: Arguments) -> Values:
    x, y = a["self"], a["other"]
    if not x.is_floating_point() or x.dtype != y.dtype:
        return None
    return joined_extreme(x, y, low=name == "minimum")


def joined_extreme(x: Tensor, y: Tensor, low: bool, ignores_nan: bool = False) -> Tensor:
    """Return the maximum, or with `low` the minimum, where +0.0 is above -0.0 (PTX ISA)."""
    if ignores_nan:
        result = x.fmin(y) if low else x.fmax(y)
    else:
        result = x.minimum(y) if low else x.maximum(y)
    return (
        torch.where((x == 0) & (y == 0), -(-x + -y) if low else x + y, result) if "zeros" in present.kinds else result
    )


_NAN = {
    torch.float32: 0x7FFFFFFF,
    torch.float16: 0x7FFF,
    torch.bfloat16: 0x7FFF,
    torch.float64: 0x7FF8000000000000,
}
"""dtype -> the bits of the canonical NaN (PTX ISA, Floating-point instructions)."""


def _canonical(t: Tensor) -> None:
    if t.dtype in _NAN and t.numel():
        t.view(INTEGER_OF_SIZE[t.itemsize]).masked_fill_(t.isnan(), _NAN[t.dtype])


def _reciprocal(func: torch._ops.OpOverload, kernel: Kernel) -> Kernel:
    """Wrap a division of floats by a number of the host."""

    def compute(name: str, a: Arguments) -> Values:
        x, number = a["self"], a["other"]
        number = number.item() if isinstance(number, Tensor) else number
        if not x.is_floating_point() or not isinstance(number, (int, float)) or a.get("rounding_mode") or not number:
            return None
        wide = _accumulated(x)
        return wide * wide.new_full((), float(number)).reciprocal()

    by_number = _replacing(compute)(func, kernel)

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        divisor = args[1] if len(args) > 1 else None
        of_host = not isinstance(divisor, SimulatedTensor) and (not isinstance(divisor, Tensor) or not divisor.dim())
        return (by_number if of_host else kernel)(*args, **kwargs)

    return run


def _laid_out(func: torch._ops.OpOverload, kernel: Kernel) -> Kernel:
    """Wrap a convolution: its results are channels_last if its image or weight is."""

    def last(t: Any) -> Any:
        memory_format = CHANNELS_LAST.get(t.dim()) if isinstance(t, Tensor) else None
        return t if memory_format is None else t.contiguous(memory_format=memory_format)

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        out = kernel(*args, **kwargs)
        with _outside_torch():
            a = _bound(func, args, kwargs)
            if a["input"].dtype is torch.float64 or not (is_channels_last(a["input"]) or is_channels_last(a["weight"])):
                return out
            if not torch._C._get_cudnn_enabled():
                return out
            return tuple(map(last, out)) if isinstance(out, tuple) else last(out)

    return run


def _contiguous(func: torch._ops.OpOverload, kernel: Kernel) -> Kernel:
    return functools.wraps(kernel)(lambda *args, **kwargs: kernel(*args, **kwargs).contiguous())


_CUBLAS = (
    "Deterministic behavior was enabled with either `torch.use_deterministic_algorithms(True)` or "
    "`at::Context::setDeterministicAlgorithms(true)`, but this operation is not deterministic because it uses CuBLAS "
    "and you have CUDA >= 10.2. To enable deterministic behavior in this case, you must set an environment variable "
    "before running your PyTorch application: CUBLAS_WORKSPACE_CONFIG=:4096:8 or CUBLAS_WORKSPACE_CONFIG=:16:8."
)


def _refused(func: torch._ops.OpOverload, kernel: Kernel) -> Kernel:
    name = func._schema.name.rpartition("::")[2]

    @functools.wraps(kernel)
    def run(*args: Any, **kwargs: Any) -> Any:
        if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
            if name.rstrip("_") not in _FACTORS:
                raise RuntimeError(
                    f"{name}_cuda does not have a deterministic implementation, but you set "
                    "'torch.use_deterministic_algorithms(True)'."
                )
            if os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
                raise RuntimeError(_CUBLAS)
        return kernel(*args, **kwargs)

    return run


# ------------------------------------------------------------------------------------------------------------ the table


@dataclass(frozen=True)
class _Row:
    kinds: frozenset[str]  # it acts if one of them is on
    operators: frozenset[str]  # names without namespace and overload; also their forms in place
    wrap: Callable[[torch._ops.OpOverload, Kernel], Kernel]


def _row(kinds: str, operators: str, wrap: Callable[[torch._ops.OpOverload, Kernel], Kernel]) -> _Row:
    return _Row(frozenset(kinds.split()), frozenset(operators.split()), wrap)


_PRODUCTS = " ".join(_FACTORS)
_ROUNDED_ONCE = """
    native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward native_batch_norm
    _native_batch_norm_legit _native_batch_norm_legit_no_training _batch_norm_with_update native_batch_norm_backward
    batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward batch_norm_stats batch_norm_gather_stats
    batch_norm_gather_stats_with_counts batch_norm_backward_reduce _fused_rms_norm _fused_rms_norm_backward
    _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data logsumexp var std var_mean std_mean
    linalg_vector_norm norm _foreach_norm prod mse_loss smooth_l1_loss huber_loss binary_cross_entropy
    binary_cross_entropy_backward nll_loss_forward nll_loss2d_forward avg_pool2d avg_pool3d _adaptive_avg_pool2d
    _adaptive_avg_pool3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d grid_sampler_2d
    grid_sampler_3d _cdist_forward _cdist_backward cumprod logcumsumexp _ctc_loss renorm _weight_norm_interface
    _weight_norm_interface_backward _fft_r2c _fft_c2r _fft_c2c _embedding_bag trace linalg_inv_ex linalg_cholesky_ex
    _linalg_det _linalg_solve_ex linalg_solve_triangular kl_div multi_margin_loss soft_margin_loss nansum
    _pdist_forward polar
"""
_CONTRACTED = """
    addcmul addcdiv _foreach_addcmul _foreach_addcdiv _fused_adam_ _fused_adamw_ _fused_sgd_
    _fused_adagrad_ tanh_backward sigmoid_backward gelu_backward silu_backward softplus_backward mish_backward
    elu_backward log_sigmoid_backward batch_norm_elemt batch_norm_backward_elemt
"""
_BY_ATOMICS = """
    upsample_linear1d_backward upsample_bilinear2d_backward upsample_bicubic2d_backward upsample_trilinear3d_backward
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward reflection_pad1d_backward reflection_pad2d_backward
    reflection_pad3d_backward replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward
    grid_sampler_2d_backward grid_sampler_3d_backward _ctc_loss_backward avg_pool3d_backward
    _embedding_bag_dense_backward bincount
"""
_WITHOUT_DETERMINISTIC = """
    _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward reflection_pad2d_backward reflection_pad3d_backward
    upsample_linear1d_backward upsample_bicubic2d_backward upsample_trilinear3d_backward grid_sampler_2d_backward
    grid_sampler_3d_backward _ctc_loss_backward avg_pool3d_backward max_pool3d_with_indices_backward
    adaptive_max_pool2d_backward adaptive_max_pool3d_backward fractional_max_pool2d_backward
    fractional_max_pool3d_backward nll_loss2d_forward histc kthvalue max_unpool2d max_unpool3d
"""
_COMPUTES_NAN = """
    add sub rsub mul div sqrt rsqrt exp log log2 log1p pow sin cos tanh sigmoid sum mean cumsum addcmul addcdiv lerp
    reciprocal fmod remainder _foreach_add _foreach_mul _foreach_div _foreach_sub _foreach_sqrt square asin acos
"""

_ROWS = (
    _row("order split-k tf32 zeros", _PRODUCTS, _replacing(_matmul)),
    _row("order reciprocal", "sum mean", _replacing(_sums)),
    _row("order atomics", "cumsum", _replacing(_cumsum)),
    _row("order tf32 zeros", "convolution", _replacing(_convolution)),
    _row("order tf32 atomics", "convolution_backward", _replacing(_convolution_backward)),
    _row("order atomics", "index_add", _replacing(_index_add)),
    _row("order atomics", "scatter_add", _replacing(_scatter_add)),
    _row("order", "embedding_dense_backward", _replacing(_embedding_backward)),
    _row("order", "index_put _index_put_impl", _replacing(_index_put)),
    _row("order", _ROUNDED_ONCE, _rounded_once),
    _row("order atomics", _BY_ATOMICS, _by_chance),
    _row("fma", _CONTRACTED, functools.partial(_rounded_once, only=torch.float32)),
    _row("ulp", " ".join(_ULPS), _function),
    _row("ties", "topk", _replacing(_topk)),
    _row("ties", "sort", _replacing(_sort)),
    _row("casts", "_to_copy copy", _replacing(_cast)),
    _row("casts", "div floor_divide remainder fmod", _division),
    _row("zeros", "maximum minimum", _replacing(_extreme)),
    _row("reciprocal", "div", _reciprocal),
    _row("nan", f"{_COMPUTES_NAN} {_PRODUCTS} {_ROUNDED_ONCE}", _altering(_canonical)),
    _row("layout", "convolution convolution_backward", _laid_out),
    _row("layout", "nonzero", _contiguous),
    _row("nondeterministic", f"{_WITHOUT_DETERMINISTIC} {_PRODUCTS}", _refused),
)
"""From the inside to the outside: a later row wraps the kernels of an earlier one."""


def imitated(func: torch._ops.OpOverload, kernel: Kernel) -> Kernel:
    """Return the kernel of an operator with the kinds of arithmetic that are on."""
    schema = func._schema
    if not present.kinds or not schema.name.startswith("aten::") or any(a.is_out for a in schema.arguments):
        return kernel
    name = _name(func)
    for row in _ROWS:
        if name in row.operators and row.kinds & present.kinds:
            kernel = row.wrap(func, kernel)
    return kernel
