"""Wrap what creates tensors, so that it accepts simulated devices: ``torch.device``, functions with ``device=``, and
constructors older than dtypes, such as ``torch.cuda.FloatTensor`` and ``Tensor.new``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch._subclasses
import torch.utils._device
import torch.utils._python_dispatch

from mgpu_check.simulated import hardware
from mgpu_check.simulated.cuda.graphs import recorder_of
from mgpu_check.simulated.cuda.streams import host_waits
from mgpu_check.simulated.node import BLOCK, active_node, present_node, refused, simulated_device
from mgpu_check.simulated.operators import arithmetic
from mgpu_check.simulated.operators.generators import drawing
from mgpu_check.simulated.tensor import EMPTY, TYPE_NAMES, SimulatedTensor, never_written, raw, require, tag
from mgpu_check.simulated.tensor_methods import convert_local
from mgpu_check.simulated.transfer import move
from mgpu_check.torch_hooks.patches import Patches, around
from mgpu_check.torch_hooks.tensors import is_distributed

_real: type = type(torch.device("cpu"))


class _DeviceMeta(type):
    """Metaclass of the replacement, which creates real devices, compares equal to the real type and has its hash."""

    def __call__(cls, *args: object, **kwargs: object) -> torch.device:
        argument = args[0] if args else kwargs.get("device")
        if isinstance(argument, int) and not isinstance(argument, bool) and len(args) + len(kwargs) == 1:
            if argument < 0:
                raise RuntimeError(f"Device index must not be negative, got {argument}")
            return _real("cuda", argument)
        return _real(*args, **kwargs)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, _real)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, _real)

    def __getattr__(cls, name: str) -> object:
        return getattr(_real, name)

    def __eq__(cls, other: object) -> bool:
        return other is cls or other is _real

    def __hash__(cls) -> int:
        return hash(_real)


def install_device_type(patches: Patches) -> None:
    patches.replace(_real, _DeviceMeta("device", (), {"__module__": "torch", "__doc__": _real.__doc__}))


class _Typed(type):
    """Metaclass of ``torch.cuda.FloatTensor``: a call makes a tensor, and device tensors of its dtype are instances."""

    dtype: torch.dtype
    layout: torch.layout
    is_cuda = True

    def __call__(cls, *args: object, **kwargs: object) -> torch.Tensor:
        if cls.layout is not torch.strided:
            refused(f"{cls.__module__}.{cls.__name__}")()
        device = kwargs.pop("device", None)
        return _made(torch.empty(0, dtype=cls.dtype), simulated_device("cuda" if device is None else device), args)

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, SimulatedTensor) and (instance.dtype, instance.layout) == (cls.dtype, cls.layout)

    @property
    def is_sparse(cls) -> bool:
        return cls.layout is torch.sparse_coo


def _made(like: torch.Tensor, device: torch.device | None, args: tuple[object, ...]) -> torch.Tensor:
    """Return ``like.new(*args)`` on ``device``, from sizes, from a sequence, or over a tensor's own memory."""
    assert device is not None
    if len(args) == 1:
        (argument,) = args
        if isinstance(argument, torch.Tensor):
            if argument.device != device:
                raise RuntimeError(
                    f"legacy constructor expects device type: {device.type} but device type: {argument.device.type} "
                    "was passed"
                )
            return argument.detach()
        if isinstance(argument, (list, tuple)) and not isinstance(argument, torch.Size):
            return torch.tensor(argument, dtype=like.dtype, device=device)
    if any(isinstance(a, (torch.TypedStorage, torch.UntypedStorage)) for a in args):
        tensor = like.new(*args)
        return tensor.to(device)
    sizes = args[0] if len(args) == 1 and isinstance(args[0], torch.Size) else args or (0,)
    return torch.empty(sizes, dtype=like.dtype, device=device)  # type: ignore[arg-type]


@around
def _new(original: Callable[..., torch.Tensor], self: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
    if active_node() is None or not isinstance(self, SimulatedTensor):
        return original(self, *args, **kwargs)
    device = simulated_device(kwargs.get("device", self.device))
    if device is None:
        raise RuntimeError(
            f"legacy constructor expects device type: cuda but device type: {kwargs.get('device')} was passed"
        )
    return _made(torch.empty(0, dtype=self.dtype), device, args)


@around
def _default_type(original: Callable[..., None], tensor_type: object, /) -> None:
    name = tensor_type if isinstance(tensor_type, str) else ""
    chosen = (
        getattr(torch.cuda, name.removeprefix("torch.cuda."), None) if name.startswith("torch.cuda.") else tensor_type
    )
    if type(chosen) is _Typed:
        torch.set_default_dtype(chosen.dtype)
        torch.set_default_device("cuda")
    else:
        torch.set_default_device(None)
        original(tensor_type)


def install_typed(patches: Patches) -> None:
    for owner, layout in ((torch.cuda, torch.strided), (torch.cuda.sparse, torch.sparse_coo)):
        for dtype, name in TYPE_NAMES.items():
            if hasattr(owner, name):
                body = {"__module__": owner.__name__, "dtype": dtype, "layout": layout}
                patches.set(owner, name, _Typed(name, (), body))
    patches.wrap(torch.Tensor, "new", _new)
    patches.replace(torch.set_default_tensor_type, _default_type(torch.set_default_tensor_type))
    patches.at_exit(lambda: torch.set_default_device(None) if torch.get_default_device().type == "cuda" else None)


Maker = Callable[..., torch.Tensor]

# By name, because no version of torch has all of them.
_FROM_SIZES = [
    *("arange", "bartlett_window", "blackman_window", "empty", "empty_permuted", "empty_strided", "eye", "from_file"),
    *("full", "hamming_window", "hann_window", "kaiser_window", "linspace", "logspace", "ones", "rand", "randint"),
    *("randn", "randperm", "range", "scalar_tensor", "sparse_bsc_tensor", "sparse_bsr_tensor"),
    *("sparse_compressed_tensor", "sparse_coo_tensor", "sparse_csc_tensor", "sparse_csr_tensor", "tril_indices"),
    *("triu_indices", "zeros", "normal"),
]
_LIKE = ["empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like"]
_FROM_DATA = ["tensor", "as_tensor", "asarray"]
_RANDOM = frozenset(["rand", "randint", "randn", "randperm", "normal"])
_NEW = ["new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"]


def _default_device() -> torch.device | None:
    """Return the simulated device of ``torch.set_default_device`` or ``with torch.device(...)``, if it is one."""
    for level in range(torch._C._len_torch_function_stack() - 1, -1, -1):
        mode = torch._C._get_function_stack_at(level)
        if isinstance(mode, torch.utils._device.DeviceContext):
            return simulated_device(mode.device)
    return None


def _on_device(make: Maker, device: torch.device, args: tuple[object, ...], kwargs: dict[str, object]) -> torch.Tensor:
    node = present_node()
    if torch._C._len_torch_dispatch_stack() and _faking():
        return make(*args, device=device, **kwargs)
    requires_grad = kwargs.pop("requires_grad", False)
    if kwargs.get("pin_memory"):
        raise RuntimeError("Only dense CPU tensors can be pinned")
    if make.__name__ in _RANDOM:
        generator = kwargs.get("generator")
        if generator is None:
            kwargs["generator"] = node.generators[device.index]
        elif generator.device.type != "cuda":  # type: ignore[attr-defined]
            raise RuntimeError(
                f"Expected a 'cuda' device type for generator but found '{generator.device.type}'"  # type: ignore[attr-defined]
            )
    require(make, device, args, kwargs)
    recorder = None if make.__name__ in EMPTY else recorder_of(device)
    if recorder is not None:
        if make.__name__ in _FROM_DATA:
            host_waits(device)
        tensor: torch.Tensor = recorder.record(
            lambda operands, named: _made_on(make, device, operands, named), args, kwargs, [], device
        )
    else:
        tensor = _made_on(make, device, args, kwargs)
    return tensor.requires_grad_() if requires_grad else tensor


def _made_on(make: Maker, device: torch.device, args: tuple[object, ...], kwargs: dict[str, object]) -> torch.Tensor:
    node = present_node()
    if hardware.present is not None:
        hardware.present.touch(device)
    generator = kwargs.get("generator")
    if generator is None:
        tensor = make(*args, device=node.backing, **kwargs)
    else:
        variant = arithmetic.draw_variant((*args, *kwargs.values()))
        with drawing(generator, variant=variant) as drawn:  # type: ignore[arg-type]  # `make` refuses any other type
            tensor = make(*args, device=node.backing, **kwargs)
            drawn.append(tensor)
    if type(tensor) is SimulatedTensor and tensor.device != device:
        # For a tensor on `meta`, torch runs functions of Python. These take the backing device for a simulated one.
        tensor = raw(tensor)
        tensor.untyped_storage().__dict__.pop(BLOCK, None)
    if hardware.present is not None and make.__name__ not in EMPTY:
        _on_hardware(hardware.present, make.__name__, device, tensor)
    # It is simulated if an argument is, as in torch.full((2,), scalar_on_device).
    if type(tensor) is not SimulatedTensor:
        tensor = tag(tensor.detach() if tensor.requires_grad else tensor, device)
        if make.__name__ in EMPTY:
            never_written(tensor)
    return tensor


def _on_hardware(below: hardware.Hardware, name: str, device: torch.device, tensor: torch.Tensor) -> None:
    with torch._C._DisableTorchDispatch(), torch.no_grad():
        bare = raw(tensor)
        if name in _FROM_DATA:
            below.copied(None, device, bare, None, pinned=False)
        else:
            below.operated(device, name, (), (bare,))


def _faking() -> bool:
    """Return whether a mode of torch creates tensors without data; these may name any device."""
    modes = torch.utils._python_dispatch._get_current_dispatch_mode_stack()
    return any(isinstance(mode, torch._subclasses.FakeTensorMode) for mode in modes)


def _from_sizes(make: Maker) -> Maker:
    @functools.wraps(make)
    def factory(*args: object, **kwargs: object) -> torch.Tensor:
        device = kwargs.get("device")
        if device is None:
            if not torch._C._len_torch_function_stack() or "out" in kwargs:
                return _pinned(make, args, kwargs)
            target = _default_device()
        else:
            target = simulated_device(device)
        if target is None:
            return _pinned(make, args, kwargs)
        kwargs.pop("device", None)
        return _on_device(make, target, args, kwargs)

    return factory


def _pinned(make: Maker, args: tuple[object, ...], kwargs: dict[str, object]) -> torch.Tensor:
    if kwargs.get("pin_memory") and active_node() is not None:
        kwargs["pin_memory"] = False
        return make(*args, **kwargs).pin_memory()
    return make(*args, **kwargs)


def _like(make: Maker) -> Maker:
    """Wrap ``empty_like`` and its kin, or a method such as ``new_empty``, whose result is like its first argument."""

    @functools.wraps(make)
    def factory(input: torch.Tensor, *args: object, **kwargs: object) -> torch.Tensor:
        device = kwargs.get("device")
        if device is None or active_node() is None:
            return _pinned(make, (input, *args), kwargs)
        target = simulated_device(device)
        if target is None:
            return _pinned(make, (raw(input), *args), kwargs)
        kwargs.pop("device")
        if input.device == target:
            return make(input, *args, **kwargs)
        if is_distributed(input):
            if make.__name__ == "empty_like":  # also of a tensor without values, on 'meta'
                return convert_local(input, lambda local: factory(local, *args, device=target, **kwargs))
            return make(input, *args, **kwargs).to(target)
        return _on_device(make, target, (raw(input), *args), kwargs)

    return factory


def _from_data(make: Maker) -> Maker:
    @functools.wraps(make)
    def factory(data: object = None, *args: object, **kwargs: object) -> torch.Tensor:
        node = active_node()
        if node is None:
            return make(*(() if data is None else (data,)), *args, **kwargs)
        if data is None:  # torch.asarray(obj=...), torch.tensor(data=...)
            data = kwargs.pop("obj", kwargs.pop("data", None))
        device = kwargs.pop("device", None)
        if device is None and make.__name__ == "as_tensor" and len(args) > 1:
            device, args = args[1], args[:1]
        if device is None:
            target = None if isinstance(data, torch.Tensor) else _default_device()
            if target is None:
                return _pinned(make, (data, *args), kwargs)
        else:
            target = simulated_device(device)
        if target is None:
            if isinstance(data, SimulatedTensor):
                return make(move(data, torch.device(device)), *args, **kwargs)  # type: ignore[call-overload]
            return _pinned(make, (data, *args), {**kwargs, "device": device})
        if isinstance(data, torch.Tensor):
            if data.device == target:
                return make(data, *args, **kwargs)
            kwargs.pop("pin_memory", None)
            if make.__name__ == "tensor":
                grad = kwargs.pop("requires_grad", False)
                tensor = move(make(raw(data), *args, **kwargs), target)
                return tensor.requires_grad_() if grad else tensor
            kwargs.pop("copy", None)
            return make(move(data, target), *args, **kwargs)
        return _on_device(make, target, (data, *args), kwargs)

    return factory


def install_factories(patches: Patches) -> None:
    for function_names, wrap in ((_FROM_SIZES, _from_sizes), (_LIKE, _like), (_FROM_DATA, _from_data)):
        for name in function_names:
            original = getattr(torch, name, None)
            if original is not None:
                patches.replace(original, wrap(original))
    for name in ("fftfreq", "rfftfreq"):
        original = getattr(torch.fft, name)
        patches.replace(original, _from_sizes(original))
    for name in _NEW:
        patches.wrap(torch.Tensor, name, _like)
    patches.wrap(torch.Tensor, "new_tensor", _new_tensor)


def _new_tensor(method: Maker) -> Maker:
    @functools.wraps(method)
    def new_tensor(self: torch.Tensor, data: object, **kwargs: object) -> torch.Tensor:
        if isinstance(self, SimulatedTensor) or simulated_device(kwargs.get("device")) is not None:
            kwargs.setdefault("dtype", self.dtype)
            if kwargs.get("device") is None:
                kwargs["device"] = self.device
            return torch.tensor(data, **kwargs)  # type: ignore[arg-type]
        return method(self, data, **kwargs)

    return new_tensor
