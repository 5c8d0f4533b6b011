"""The tensor of a simulated device: a real tensor on the backing device that names the simulated device.

Storage, views, in-place operations and autograd are the real ones. The tensor reports the simulated device, and every
operator passes :func:`dispatch.run`, which checks that operands are on one device.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NoReturn

import torch

from mgpu_check.simulated.node import BLOCK, Block, active_node

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

CLASS = "_mgpu_check_class"  # the user's class of a tensor on the host
_no_dispatch = torch._C._DisableTorchDispatch
_strided = torch.strided
_plain: type = torch.Tensor
TYPE_NAMES = {
    torch.float32: "FloatTensor",
    torch.float64: "DoubleTensor",
    torch.float16: "HalfTensor",
    torch.bfloat16: "BFloat16Tensor",
    torch.uint8: "ByteTensor",
    torch.int8: "CharTensor",
    torch.int16: "ShortTensor",
    torch.int32: "IntTensor",
    torch.int64: "LongTensor",
    torch.bool: "BoolTensor",
    torch.complex64: "ComplexFloatTensor",
    torch.complex128: "ComplexDoubleTensor",
}

Runner = Callable[[object, tuple[object, ...], dict[str, object]], object]
_run: Runner


def set_runner(run: Runner) -> None:
    """Set the function that runs the operators of simulated tensors; ``dispatch`` imports this module."""
    global _run
    _run = run


def tensors_in(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors among arguments, in lists and tuples too: functions written in C++ take no other containers."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)


class SimulatedTensor(torch.Tensor):
    """A tensor on a simulated ``cuda:i``.

    `tag` makes it around each result of the backing device. Torch passes every operator on it to `dispatch.run`. It may
    outlive its node: it keeps its values, and `to_real` still reads them.
    """

    _dev: torch.device
    is_cuda, is_cpu = True, False
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: object, types: object, args: tuple[object, ...] = (), kwargs: dict[str, object] | None = None
    ) -> object:
        return _run(func, args, kwargs or {})

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self._dev

    def get_device(self) -> int:
        return int(self._dev.index)

    def numpy(self, *, force: bool = False) -> object:  # type: ignore[override]
        if force:
            return to_real(self).resolve_conj().resolve_neg().numpy()
        raise _no_numpy(self)

    def tolist(self) -> object:  # type: ignore[override]
        return self.cpu().tolist()

    def __array__(self, dtype: object = None) -> NoReturn:
        raise _no_numpy(self)

    def __dlpack_device__(self) -> tuple[int, int]:  # type: ignore[override]
        return 2, int(self._dev.index)  # kDLCUDA

    def __dlpack__(self, **_: object) -> NoReturn:
        raise BufferError("a simulated CUDA tensor has no device memory to export through DLPack")

    def record_stream(self, stream: object) -> None:
        return None

    def is_shared(self) -> bool:
        return True

    def share_memory_(self) -> SimulatedTensor:
        return self

    def __format__(self, spec: str) -> str:
        if self.dim() == 0:
            return format(self.item(), spec)
        return object.__format__(self, spec)

    def __repr__(self, *, tensor_contents: str | None = None) -> str:  # type: ignore[override]
        name = type(self).__name__
        text = torch._tensor_str._str(self, tensor_contents=tensor_contents)
        text = text.replace(f"{name}(", "tensor(", 1).replace("\n" + " " * (len(name) + 1), "\n" + " " * 7)
        return f"Parameter containing:\n{text}" if getattr(self, "_is_param", False) else text

    def __deepcopy__(self, memo: dict[int, object]) -> object:
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            raise RuntimeError(
                "Only Tensors created explicitly by the user (graph leaves) support the deepcopy protocol at the "
                "moment.  If you were attempting to deepcopy a module, this may be because of a torch.nn.Module "
                "attribute's value being a computed tensor"
            )
        if isinstance(self, torch.nn.Parameter):  # without gradient and attributes, like `Parameter.__deepcopy__`
            memo[id(self)] = twin = torch.nn.Parameter(self.detach().clone(), self.requires_grad)
            if CLASS in self.__dict__:
                twin.__dict__[CLASS] = self.__dict__[CLASS]
            return twin
        with torch.no_grad():
            if self.layout is _strided:
                storage = copy.deepcopy(self.untyped_storage(), memo)
                out = _on_storage(self, storage)
            else:
                out = self.clone()
            out.requires_grad_(self.requires_grad)
            memo[id(self)] = out
            if self.grad is not None:
                out.grad = copy.deepcopy(self.grad, memo)
        for key, value in self.__dict__.items():
            if key != "_dev":
                out.__dict__[key] = copy.deepcopy(value, memo)
        return out

    def __reduce_ex__(self, protocol: object) -> tuple[object, ...]:
        hooks: OrderedDict[int, RemovableHandle] = OrderedDict()
        if self.layout is not _strided:
            return _of_sparse, (to_real(self.detach()), str(self._dev), self.requires_grad)
        storage = torch.storage.TypedStorage(wrap_storage=self.untyped_storage(), dtype=self.dtype, _internal=True)
        shape = (storage, self.storage_offset(), tuple(self.size()), self.stride())
        state = {k: v for k, v in self.__dict__.items() if k not in ("_dev", "_is_param", CLASS)}
        if getattr(self, "_is_param", False):
            arguments = (_on_storage(self, self.untyped_storage()), self.requires_grad, hooks)
            if state:
                return torch._utils._rebuild_parameter_with_state, (*arguments, state)
            return torch._utils._rebuild_parameter, arguments
        build = (torch._utils._rebuild_tensor_v2, (*shape, self.requires_grad, hooks))
        if state:
            return torch._tensor._rebuild_from_type_v2, (*build[:1], torch.Tensor, build[1], state)
        return build


def _no_numpy(t: SimulatedTensor) -> TypeError:
    return TypeError(
        f"can't convert {t._dev} device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first."
    )


def _on_storage(like: SimulatedTensor, storage: torch.UntypedStorage) -> torch.Tensor:
    node = active_node()
    with _no_dispatch(), torch.no_grad():
        bare = torch.empty(0, dtype=like.dtype, device="cpu" if node is None else node.backing)
        bare.set_(storage, like.storage_offset(), like.size(), like.stride())
        if like.is_conj():
            bare = bare.conj()
        if like.is_neg():
            bare = torch._neg_view(bare)
    return tag(bare, like._dev)


def _of_sparse(real: torch.Tensor, device: str, requires_grad: bool) -> torch.Tensor:
    return real.to(device).requires_grad_(requires_grad)


def tag(bare: torch.Tensor, device: torch.device) -> SimulatedTensor:
    """Return a tensor on the simulated ``device`` that shares memory with ``bare``, a plain tensor."""
    if bare.layout is not _strided:
        out = torch.Tensor._make_subclass(SimulatedTensor, bare)  # a sparse tensor has no alias
        out._dev = device
        return out
    out = bare.as_subclass(SimulatedTensor)
    out._dev = device
    if not bare.is_mkldnn:
        storage = bare.untyped_storage()
        attributes = storage.__dict__
        if BLOCK not in attributes:
            node = active_node()
            if node is not None:
                attributes[BLOCK] = Block(device, node.memory[device.index], storage.nbytes())
    return out


def raw(t: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor on the backing device over the memory of ``t``, outside autograd."""
    if not isinstance(t, SimulatedTensor):
        return t
    with _no_dispatch(), torch.no_grad():
        if t.layout is not _strided:
            return torch.Tensor._make_subclass(_plain, t)
        bare = t.as_subclass(_plain)  # type: ignore[var-annotated]
        return bare.detach() if bare.requires_grad else bare  # type: ignore[no-any-return]


def is_simulated(t: object) -> bool:
    return isinstance(t, SimulatedTensor)


def to_real(t: torch.Tensor) -> torch.Tensor:
    """Return a plain CPU tensor with the values of ``t``; it shares no memory with ``t`` and outlives the simulation.

    ``requires_grad`` is kept, the graph is not; an ``nn.Parameter`` stays one. Tensors of real devices are copied too.
    """
    # Methods of the C base class: they do the same inside a simulation, after it and in a process without one.
    with _no_dispatch(), torch.no_grad():
        bare = torch._C.TensorBase.detach(t)
        bare = torch._C.TensorBase.to(bare, "cpu", copy=True)
        if type(bare) is not _plain:
            bare = torch.Tensor._make_subclass(_plain, bare)
    if isinstance(t, torch.nn.Parameter):
        return torch.nn.Parameter(bare, requires_grad=t.requires_grad)
    return bare.requires_grad_(t.requires_grad)


def type_name(t: torch.Tensor) -> str:
    """Return ``t.type()`` as a machine with the device has it, e.g. "torch.cuda.FloatTensor"."""
    name = TYPE_NAMES.get(t.dtype, "Tensor")
    sparse = "sparse." if t.layout is torch.sparse_coo else ""
    return f"torch.{'cuda.' if isinstance(t, SimulatedTensor) else ''}{sparse}{name}"
