"""``autograd.Function`` and ``torch.autocast("cuda")`` for simulated tensors.

C++ creates gradients of zeros, for outputs that the loss does not use, on the backing device; here they get the
devices of the outputs. During backward the device of the output is current, and so are the streams of the forward,
as the engine of autograd ensures for real devices.

Autocast is above autograd as in torch. A simulated tensor has the dispatch keys of the CPU. While autocast is on
for CUDA, the autocast key of the CPU is on too. Its kernels, which this module registers, cast simulated tensors
by CUDA's lists, and leave plain tensors to the setting of the CPU. The dispatcher knows which operators CUDA's
autocast covers; the lists here say how each is cast.
"""

from __future__ import annotations

import functools
import threading
import warnings
from collections.abc import Callable

import torch
from torch.autograd.function import BackwardCFunction, Function

from mgpu_check.simulated.cuda.streams import as_on, chosen_streams
from mgpu_check.simulated.tensor import SimulatedTensor, mapped, tag, tensors_in
from mgpu_check.torch_hooks.patches import Patches, around

_DEVICES = "_mgpu_check_devices"
_STREAMS = "_mgpu_check_streams"
_plain: type = torch.Tensor


@around
def _apply(original: Callable[..., object], cls: type, *args: object, **kwargs: object) -> object:
    out = original(cls, *args, **kwargs)
    # An output that is not differentiable has no node, and a view may have another node.
    for value in out if type(out) is tuple else (out,):
        node = getattr(value, "grad_fn", None)
        if isinstance(node, BackwardCFunction):
            if type(out) is tuple:
                node.__dict__[_DEVICES] = [o._dev if isinstance(o, SimulatedTensor) else None for o in out]
            if isinstance(value, SimulatedTensor):
                node.__dict__[_STREAMS] = value._dev.index, chosen_streams()
            break
    return out


def _backward(original: Callable[..., object]) -> Callable[..., object]:
    @functools.wraps(original)
    def apply(self: object, *grads: object) -> object:
        devices = self.__dict__.get(_DEVICES)
        if devices is not None and len(devices) == len(grads):
            grads = tuple(
                tag(grad, device) if device is not None and type(grad) is _plain else grad  # type: ignore[arg-type]
                for grad, device in zip(grads, devices, strict=True)
            )
        forward = self.__dict__.get(_STREAMS)
        if forward is None:
            return original(self, *grads)
        with as_on(*forward):
            return original(self, *grads)

    return apply


@around
def _hook(original: Callable[..., object], self: torch.Tensor, hook: Callable[..., object]) -> object:
    """Run hooks on the streams that are current at registration: mostly those that computed the tensor."""
    streams = chosen_streams()
    if not streams or not isinstance(self, SimulatedTensor):
        return original(self, hook)
    index = self._dev.index

    @functools.wraps(hook)
    def on_streams(*args: object) -> object:
        with as_on(index, streams):
            return hook(*args)

    return original(self, on_streams)


def install_functions(patches: Patches) -> None:
    patches.wrap(Function, "apply", _apply)
    patches.set(BackwardCFunction, "apply", _backward(vars(BackwardCFunction)["apply"]))
    patches.wrap(torch.Tensor, "register_hook", _hook)


_LOWER = [
    *("_convolution.deprecated", "_convolution", "conv1d", "conv1d.padding", "conv2d", "conv2d.padding", "conv3d"),
    *("conv3d.padding", "conv_tbc", "conv_transpose1d", "conv_transpose2d.input", "conv_transpose3d.input"),
    *("convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm", "mv", "linalg_vecdot", "linear"),
    *("addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell"),
    *("_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell"),
    *("_scaled_dot_product_flash_attention", "scaled_dot_product_attention", "cudnn_convolution"),
    *("cudnn_convolution_transpose", "_cudnn_rnn"),
]
_FLOAT32 = [
    *("acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt"),
    *("sinh", "tan", "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm"),
    *("native_layer_norm", "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim"),
    *("cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d"),
    *("hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss"),
    *("multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss"),
    *("binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp", "upsample_nearest1d"),
    *("upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"),
    *("upsample_bicubic2d", "_upsample_bicubic2d_aa", "_upsample_bilinear2d_aa", "_upsample_nearest_exact1d"),
    *("_upsample_nearest_exact2d", "_upsample_nearest_exact3d", "rms_norm", "linalg_matrix_sqrth", "norm.Scalar"),
    *("norm.ScalarOpt_dim", "norm.names_ScalarOpt_dim"),
]
_FLOAT32_RESULT = [
    *("prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm"),
    *("linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList"),
    # dimensions by name, up to torch 2.12
    *("cumprod.dimname", "cumsum.dimname", "log_softmax.Dimname", "prod.dim_Dimname", "softmax.Dimname"),
    "sum.dim_DimnameList",
]
_WIDEST = [
    *("addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot"),
    *("scatter_add", "cat", "stack"),
]
_UNSAFE = (
    "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast.\n"
    "Many models use a sigmoid layer right before the binary cross entropy layer.\n"
    "In this case, combine the two layers using torch.nn.functional.binary_cross_entropy_with_logits\n"
    "or torch.nn.BCEWithLogitsLoss.  binary_cross_entropy_with_logits and BCEWithLogits are\n"
    "safe to autocast."
)

Op = torch._ops.OpOverload
Args = tuple[object, ...]
Named = dict[str, object]
Policy = Callable[[Op, Args, Named, torch.dtype, type], object]


def _is_simulated(value: object) -> bool:
    """Return whether a value is a simulated tensor, or a DTensor whose part is one."""
    return isinstance(value, SimulatedTensor) or isinstance(getattr(value, "_local_tensor", None), SimulatedTensor)


def _eligible(t: torch.Tensor, tensor_class: type) -> bool:
    mine = _is_simulated(t) is (tensor_class is SimulatedTensor)
    return mine and t.is_floating_point() and t.dtype is not torch.float64


def _lower(op: Op, args: Args, kwargs: Named, dtype: torch.dtype, tensor_class: type) -> object:
    """Call ``op`` with eligible tensors (of ``tensor_class``, floating, not float64) in ``dtype``."""

    def cast(t: torch.Tensor) -> torch.Tensor:
        return t.to(dtype) if _eligible(t, tensor_class) else t

    return op(*mapped(args, cast), **{name: mapped(value, cast) for name, value in kwargs.items()})


def _float32_result(op: Op, args: Args, kwargs: Named, dtype: torch.dtype, tensor_class: type) -> object:
    operand = args[0]
    position = [a.name for a in op._schema.arguments].index("dtype")
    requested = args[position] if position < len(args) else kwargs.get("dtype")
    if requested is None and isinstance(operand, torch.Tensor) and _eligible(operand, tensor_class):
        args = args[:position]
        return op(*args, **{**kwargs, "dtype": torch.float32})
    return op(*args, **kwargs)


def _widest(op: Op, args: Args, kwargs: Named, dtype: torch.dtype, tensor_class: type) -> object:
    tensors = tensors_in([*args, *kwargs.values()])
    wide = torch.float32 if any(t.dtype is torch.float32 for t in tensors) else dtype
    return _lower(op, args, kwargs, wide, tensor_class)


def _unsafe(op: Op, args: Args, kwargs: Named, dtype: torch.dtype, tensor_class: type) -> object:
    raise RuntimeError(_UNSAFE)


_POLICIES: tuple[tuple[list[str], Policy], ...] = (
    (_LOWER, _lower),
    (_FLOAT32, lambda op, args, kwargs, dtype, tensor_class: _lower(op, args, kwargs, torch.float32, tensor_class)),
    (_FLOAT32_RESULT, _float32_result),
    (_WIDEST, _widest),
    (["binary_cross_entropy"], _unsafe),
)


KNOWN = frozenset(name for operations, _ in _POLICIES for name in operations)


class _Wanted(threading.local):
    cpu: bool = False  # whether the user enabled autocast for the CPU


class _Autocast:
    """The kernels of autocast, and whether the user enabled autocast for the CPU.

    Entering a node makes it in place of torch's switches. The first use of autocast registers the kernels, and the exit
    of the node removes them.
    """

    def __init__(self) -> None:
        self.wanted = _Wanted()
        self.is_enabled = torch.is_autocast_enabled
        self.set_enabled = torch.set_autocast_enabled
        self._library: torch.library.Library | None = None
        self._lock = threading.Lock()

    def enable(self, *args: object) -> None:
        device_type, on = args if len(args) == 2 else ("cuda", args[0])
        if device_type not in ("cuda", "cpu"):
            self.set_enabled(str(device_type), bool(on))
            return
        if device_type == "cpu":
            self.wanted.cpu = bool(on)
        else:
            self.set_enabled("cuda", bool(on))
        if on:
            self._register()
        self.set_enabled("cpu", self.wanted.cpu or self.is_enabled("cuda"))

    def enabled(self, device_type: str | None = None) -> bool:
        if device_type == "cpu":
            return self.wanted.cpu
        return self.is_enabled() if device_type is None else self.is_enabled(device_type)

    def close(self) -> None:
        self.set_enabled("cpu", self.wanted.cpu)
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def _register(self) -> None:
        with self._lock:
            if self._library is not None:
                return
            library = torch.library.Library("aten", "IMPL")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch warns that its own kernels are replaced, which is intended
                for operations, policy in _POLICIES:
                    for name in operations:
                        self._register_one(library, name, policy)
            self._library = library

    def _register_one(self, library: torch.library.Library, name: str, policy: Policy) -> None:
        base, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, base, None)
        op = None if packet is None else getattr(packet, overload or "default", None)
        if op is None:
            return
        on_cuda, on_cpu = (
            torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", f"Autocast{backend}")
            for backend in ("CUDA", "CPU")
        )
        if not on_cuda and not on_cpu:
            return
        cpu_policy = policy if on_cpu else None
        # The CPU's kernel must not cast a simulated tensor, even for an operator that only the CPU's autocast covers.
        # On CUDA such an operator promotes natively (`cat`), or calls operators that are cast (convolutions with a
        # padding by name).
        as_it_is: Policy = lambda op, args, kwargs, dtype, tensor_class: op(*args, **kwargs)  # noqa: E731
        cuda_policy = policy if on_cuda or policy is _lower else as_it_is
        key = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)

        def kernel(*args: object, **kwargs: object) -> object:
            with torch._C._ExcludeDispatchKeyGuard(key):
                if self.is_enabled("cuda") and any(map(_is_simulated, tensors_in([*args, *kwargs.values()]))):
                    return cuda_policy(op, args, kwargs, torch.get_autocast_dtype("cuda"), SimulatedTensor)
                if cpu_policy is not None and self.wanted.cpu:
                    return cpu_policy(op, args, kwargs, torch.get_autocast_dtype("cpu"), torch.Tensor)
                return op(*args, **kwargs)

        library.impl(name, kernel, "AutocastCPU")


def install_autocast(patches: Patches) -> None:
    autocast = _Autocast()
    autocast.wanted.cpu = torch.is_autocast_enabled("cpu")
    patches.replace(torch.set_autocast_enabled, autocast.enable)
    patches.replace(torch.is_autocast_enabled, autocast.enabled)
    patches.replace(torch.is_autocast_cpu_enabled, lambda: autocast.enabled("cpu"))
    patches.replace(torch.set_autocast_cpu_enabled, lambda on: autocast.enable("cpu", on))
    patches.at_exit(autocast.close)
