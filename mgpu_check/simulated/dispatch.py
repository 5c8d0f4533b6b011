"""Run one operator on simulated tensors: check the devices, run it on the backing device, tag the results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mgpu_check.simulated import functional, hardware, kernels, mismatch, unwritten
from mgpu_check.simulated.generators import device_of, drawing, owner_of
from mgpu_check.simulated.state import active_node
from mgpu_check.simulated.tensor import SimulatedTensor, raw, set_runner, tag, tensors_in

_no_dispatch = torch._C._DisableTorchDispatch
_plain: type = torch.Tensor
_SYNCING = frozenset(
    [
        *("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal", "aten::is_nonzero"),
        *("aten::_unique2", "aten::unique_dim", "aten::unique_consecutive", "aten::repeat_interleave"),
    ]
)
_BY_MASK = frozenset({"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"})
_IDLE = frozenset({"aten::_unsafe_view", "aten::set_", "aten::resize_", "aten::resize_as_"})  # they write no values
_ON_HOST = {"aten::_pack_padded_sequence": 1}
_sync: Callable[[torch.device], object] | None = None


def on_sync(call: Callable[[torch.device], object] | None) -> None:
    """Register a function to call with the device whenever an operator waits for it, as ``.item()`` does."""
    global _sync
    _sync = call


@dataclass(eq=False)
class _Operator:
    """Facts about an operator that the runner needs, computed once."""

    call: Callable[..., object]
    fresh: bool  # whether results are new tensors (or views), not the arguments written to
    scalars: bool  # whether device tensors accept a CPU tensor of 0 dims beside them
    random: bool
    takes_generator: bool
    syncs: bool
    by_mask: bool  # whether it also waits, to count the elements that a mask among its indices selects
    on_host: int  # the position of the one result that lives on the CPU, or -1
    instead: Callable[..., object] | None  # replaces it, and takes the simulated tensors
    name: str  # without its namespace
    computes: bool  # whether it writes values: not a view, not memory without values
    written: tuple[tuple[int, str], ...]  # arguments that it writes, by position and name


_operators: dict[object, _Operator] = {}


def _inspect(func: torch._ops.OpOverload) -> _Operator:
    schema = func._schema
    name = schema.name
    written = bool(schema.returns) and all(r.alias_info is not None and r.alias_info.is_write for r in schema.returns)
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    kernel = kernels.KERNELS.get(f"{name}.{schema.overload_name}") or kernels.KERNELS.get(name, func)
    found = _Operator(
        call=unwritten.operator(name, kernel),  # type: ignore[arg-type]
        fresh=not written and not name.startswith("c10d::"),
        scalars=mismatch.allows_scalars(func),
        random=torch.Tag.nondeterministic_seeded in func.tags,
        takes_generator=any(a.name == "generator" for a in schema.arguments),
        syncs=name in _SYNCING,
        by_mask=name in _BY_MASK,
        on_host=_ON_HOST.get(name, -1),
        instead=functional.OPERATORS.get(name),
        name=name.rpartition("::")[2],
        computes=not views and name not in _IDLE and name.rpartition("::")[2] not in unwritten.EMPTY,
        written=tuple((i, a.name) for i, a in enumerate(schema.arguments) if a.alias_info and a.alias_info.is_write),
    )
    _operators[func] = found
    return found


def run(func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Run an operator as ``__torch_dispatch__`` of a simulated tensor does; see the module."""
    operator = _operators.get(func) or _inspect(func)
    if operator.instead is not None:
        return operator.instead(*args, **kwargs)
    device, mixed = _device_of(operator, args, kwargs)
    if mixed:
        answer = mismatch.check(func, args, kwargs)
        if answer is NotImplemented:
            return NotImplemented
        if answer is not None:
            return answer.decompose(args, kwargs)
    if device is None:
        with _no_dispatch():
            return func(*args, **kwargs)
    if _sync is not None and (operator.syncs or (operator.by_mask and _counts(args))):
        _sync(device)
    below = hardware.present
    given: list[torch.Tensor] = []
    if below is not None:
        given = list(tensors_in([args, tuple(kwargs.values())]))
        below.touch(device)
        below.read(device, given)
    if operator.random:
        out = _run_random(operator, device, args, kwargs)
    else:
        try:
            with _no_dispatch():
                out = operator.call(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            unwritten.refuse_oversized(func, device, args, kwargs)
            raise
    if below is not None and operator.computes:
        _spoil(below, operator, device, given, args, kwargs, out)
    if not operator.fresh:
        return out
    if operator.on_host >= 0 and type(out) is tuple:
        return tuple(o if i == operator.on_host else _tagged(o, device) for i, o in enumerate(out))
    return _tagged(out, device)


def _device_of(
    operator: _Operator, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[torch.device | None, bool]:
    """Return the device of the first simulated tensor, and whether another tensor argument is on another device."""
    device: torch.device | None = None
    mixed = False
    for value in args if not kwargs else (*args, *kwargs.values()):
        kind = type(value)
        if kind is SimulatedTensor:
            if device is None:
                device = value._dev  # type: ignore[attr-defined]
            elif device is not value._dev:  # type: ignore[attr-defined]
                mixed = True
        elif kind is list or kind is tuple:
            for item in value:  # type: ignore[attr-defined]
                if type(item) is SimulatedTensor:
                    if device is None:
                        device = item._dev
                    elif device is not item._dev:
                        mixed = True
                elif isinstance(item, torch.Tensor):
                    mixed = True
        elif isinstance(value, torch.Tensor) and not (operator.scalars and kind is _plain and value.dim() == 0):
            mixed = True
    return device, mixed


def _counts(args: tuple[object, ...]) -> bool:
    """Return whether an operator with these indices must count the elements of a mask."""
    value = args[2] if len(args) > 2 else None
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return False
    return any(index.dtype in (torch.bool, torch.uint8) for index in tensors_in(args[1]))


def _spoil(
    below: hardware.Hardware,
    operator: _Operator,
    device: torch.device,
    given: list[torch.Tensor],
    args: tuple[object, ...],
    kwargs: dict[str, object],
    out: object,
) -> None:
    """Pass the operator with its inputs and outputs to the simulated hardware, which may spoil the outputs."""
    changed = list(tensors_in([args[i] if i < len(args) else kwargs.get(name) for i, name in operator.written]))
    with _no_dispatch(), torch.no_grad():
        written = list(tensors_in(out)) if operator.fresh else []
        below.operated(device, operator.name, given, [raw(t) for t in written or changed])
        below.read(device, changed)


def _tagged(out: object, device: torch.device) -> object:
    if type(out) is _plain:
        return tag(out, device)  # type: ignore[arg-type]
    if type(out) is tuple or type(out) is list:
        return type(out)(_tagged(o, device) for o in out)
    return out


def _run_random(
    operator: _Operator, device: torch.device, args: tuple[object, ...], kwargs: dict[str, object]
) -> object:
    """Draw from the generator of the device, as ``torch.cuda.manual_seed`` seeded it, and not from the CPU's."""
    node = active_node()
    if node is None:
        with _no_dispatch():
            return operator.call(*args, **kwargs)
    generator = node.generators[device.index]
    if operator.takes_generator:
        given = kwargs.get("generator")
        if given is None:
            kwargs = {**kwargs, "generator": generator}
        elif (owner := device_of(given)).type != "cuda":  # type: ignore[arg-type]  # the schema says a generator
            raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{owner.type}'")
        else:
            generator = owner_of(given)  # type: ignore[arg-type]  # see above
    with drawing(generator, None if operator.takes_generator else node.ambient) as drawn, _no_dispatch():
        out = operator.call(*args, **kwargs)
        drawn.extend(tensors_in(out))
    return out


set_runner(run)  # type: ignore[arg-type]
