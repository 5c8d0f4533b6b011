"""Run one operator on simulated tensors: check the devices, with CUDA's error for operands on different ones, run it
on the backing device, tag the results.

The rules are data (``fidelity.json``). The messages come from torch's own checks: the generated CUDA wrappers
(``check_and_update_common_device``), the tensor iterator, indexing and convolution.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import resources

import torch

from mgpu_check.simulated import hardware
from mgpu_check.simulated import tensor as storage
from mgpu_check.simulated.cuda.streams import host_waits
from mgpu_check.simulated.distributed import collectives
from mgpu_check.simulated.node import active_node
from mgpu_check.simulated.operators import arithmetic, kernels
from mgpu_check.simulated.operators.generators import device_of, drawing, owner_of
from mgpu_check.simulated.tensor import SUBCLASSES, SimulatedTensor, raw, set_runner, tag, tensors_in, type_name
from mgpu_check.torch_hooks.tensors import argument_values, written_by

_CONVOLUTIONS = frozenset({"convolution", "_convolution", "convolution_overrideable"})
_INDEXING = frozenset({"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index", "_unsafe_index_put"})
_MASKED_FILL = frozenset({"masked_fill", "masked_fill_"})


@dataclass(frozen=True)
class _Operand:
    name: str
    tensor: torch.Tensor
    written: bool

    @property
    def device(self) -> torch.device:
        return self.tensor.device


@dataclass(frozen=True)
class _Rules:
    any_device: frozenset[str]
    methods: dict[str, str]  # operator with overload -> name of the wrapper that checks its arguments
    through: dict[str, tuple[str, dict[str, str]]]
    temporaries: dict[str, str]  # operator -> the argument that C++ may have created


@cache
def _rules() -> _Rules:
    text = resources.files("mgpu_check.simulated").joinpath("fidelity.json").read_text(encoding="utf-8")
    table = json.loads(text)
    methods: dict[str, str] = dict(table["named"])
    for name in table["generated"]["structured"]:
        methods[name] = "wrapper_CUDA_" + name.replace(".", "_")
    for name in table["generated"]["plain"]:
        operator, _, overload = name.partition(".")
        methods[name] = f"wrapper_CUDA_{overload}_{operator}"
    through = {
        name: (methods.get(row["operator"], "wrapper_CUDA_" + row["operator"]), dict(row.get("arguments", {})))
        for name, row in table["through"].items()
    }
    return _Rules(frozenset(table["any"]), methods, through, dict(table["temporaries"]))


def _names(func: torch._ops.OpOverload) -> tuple[str, str]:
    """Name the operator without and with its overload, ("add", "add.Tensor"), as native_functions.yaml writes it."""
    name = func._schema.name.rpartition("::")[2]
    overload = func._schema.overload_name
    return name, f"{name}.{overload}" if overload else name


def allows_scalars(func: torch._ops.OpOverload) -> bool:
    """Return whether the operator accepts a CPU tensor of 0 dims beside device tensors."""
    name, full = _names(func)
    if func._schema.is_mutable or name in _CONVOLUTIONS or name in _INDEXING:
        return False
    return full not in _rules().methods and name not in _rules().through


def check(func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> bool:
    """Raise CUDA's error for these operands; return False if the operator accepts them.

    Return NotImplemented if an operand's type has its own dispatch, which then decides. Return True if the operator
    calls others: run those, so that the one that refuses its operands raises.
    """
    name, full = _names(func)
    rules = _rules()
    if not func._schema.name.startswith("aten::") or name in rules.any_device or full in rules.any_device:
        return False
    operands = []
    for operand in _operands(func, args, kwargs):
        tensor_class = type(operand.tensor)
        if tensor_class is SimulatedTensor or tensor_class in SUBCLASSES:
            operands.append(operand)
            continue
        if tensor_class.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:  # the class has its own dispatch
            return NotImplemented
        references = sys.getrefcount(operand.tensor)
        if _reference_counts is not None:
            _reference_counts.append(references)
        # If only this call holds a plain tensor, one of torch's own operators created it in C++. Operators in the table
        # create it with the options of the backing device, so it belongs to the simulated device. In other operators it
        # may be a view or a copy of an argument of the caller.
        made_here = references <= _held_by_this_call and (name in _MASKED_FILL or not operand.tensor._is_view())
        if not (made_here and rules.temporaries.get(name) == operand.name):
            operands.append(operand)
    if _reference_counts is not None or len({o.device for o in operands}) < 2 or _called_by_autograd():
        return False
    if func._can_decompose() and torch._C._dispatch_has_kernel_for_dispatch_key(
        func.name(), "CompositeImplicitAutograd"
    ):
        return True
    _refuse_if_mixed(name, full, operands, rules)
    return False


def _refuse_if_mixed(name: str, full: str, operands: list[_Operand], rules: _Rules) -> None:
    if name in _INDEXING:
        _check_indexing(operands)
    elif name in _CONVOLUTIONS:
        _check_convolution(operands)
    elif name in _MASKED_FILL:
        _check_masked_fill(operands)
    elif full in rules.methods:
        _check_arguments(operands, rules.methods[full], {})
    elif name in rules.through:
        _check_arguments(operands, *rules.through[name])
    else:
        _check_iterator(operands)


def _operands(func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> list[_Operand]:
    operands: list[_Operand] = []
    for position, argument in enumerate(func._schema.arguments):
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        written = argument.alias_info is not None and argument.alias_info.is_write
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, torch.Tensor):
                operands.append(_Operand(argument.name, item, written))
    return operands


_held_by_this_call = 0
_reference_counts: list[int] | None = None  # while calibrating: the reference count of each plain operand


def calibrate(tagged: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Measure the reference count of an operand that C++ created; it depends on the versions of Python and torch.

    ``one_hot`` compares its input with its own ``arange``. If an operand of the caller has no more references than
    that, the two cannot be distinguished, and every mismatch is refused.
    """
    global _held_by_this_call, _reference_counts
    of_temporary: list[int] = []
    of_caller: list[int] = []
    try:
        _reference_counts = of_temporary
        torch.nn.functional.one_hot(tagged(torch.zeros(1, dtype=torch.int64)), 1)
        _reference_counts = of_caller
        _ = tagged(torch.zeros(1)) + torch.ones(1)
    finally:
        _reference_counts = None
    _held_by_this_call = max(of_temporary) if of_temporary and of_caller and max(of_temporary) < min(of_caller) else 0


def _called_by_autograd() -> bool:
    """Return whether the caller is C++ in a running backward pass, not a hook or a backward written in Python.

    Frames of an active `TorchDispatchMode`, and those that torch puts around it, do not count as the caller.
    """
    if torch._C._current_graph_task_id() == -1:
        return False
    frame = sys._getframe(3).f_back
    while frame is not None and (
        frame.f_code.co_name == "__torch_dispatch__" or frame.f_globals.get("__name__") in _AROUND_A_MODE
    ):
        frame = frame.f_back
    return frame is None or frame.f_code.co_name == "_engine_run_backward"


_AROUND_A_MODE = {"torch._ops", "torch._compile", "torch._dynamo.eval_frame", "mgpu_check.simulated.cuda.graphs"}


def _check_iterator(operands: list[_Operand]) -> None:
    ordered = [o for o in operands if o.written] + operands
    common = next(o.device for o in ordered if o.device.type != "cpu")
    scalars = 0
    for o in ordered:
        if o.device == common:
            continue
        if o.device.type == "cpu" and o.tensor.dim() == 0 and not o.written:
            scalars += 1
            if scalars > 1 and len(operands) > 2:
                raise RuntimeError("Trying to pass too many CPU scalars to non-CPU kernel!")
            continue
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {common} and {o.device}!"
        )


def _check_arguments(operands: list[_Operand], method: str, labels: dict[str, str]) -> None:
    if labels:
        order = list(labels)
        operands = sorted(operands, key=lambda o: order.index(o.name) if o.name in order else len(order))
    ordered = [o for o in operands if o.name == "out"] + [o for o in operands if o.name != "out"]
    common = ordered[0].device
    for o in ordered:
        if o.device != common:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but got {labels.get(o.name, o.name)} is on "
                f"{o.device}, different from other tensors on {common} (when checking argument in method {method})"
            )


def _check_indexing(operands: list[_Operand]) -> None:
    home = next(o.device for o in operands if o.name == "self")
    for o in operands:
        if o.name == "indices" and o.device.type != "cpu" and o.device != home:
            raise RuntimeError(f"indices should be either on cpu or on the same device as the indexed tensor ({home})")
    rest = [o for o in operands if o.name != "indices" and not (o.name == "values" and o.tensor.dim() == 0)]
    if len({o.device for o in rest}) > 1:
        _check_iterator(rest)


def _check_convolution(operands: list[_Operand]) -> None:
    by_name = {o.name: o for o in operands}
    image = by_name["input"]
    for name in ("weight", "bias"):
        operand = by_name.get(name)
        if operand is None or operand.device == image.device:
            continue
        if operand.device.type == image.device.type:
            _check_arguments(operands, "wrapper_CUDA__cudnn_convolution", {})
        tail = f" or input should be a MKLDNN tensor and {name} is a dense tensor" if image.device.type == "cpu" else ""
        raise RuntimeError(
            f"Input type ({type_name(image.tensor)}) and {name} type ({type_name(operand.tensor)}) should be the "
            f"same{tail}"
        )


def _check_masked_fill(operands: list[_Operand]) -> None:
    by_name = {o.name: o for o in operands}
    me, mask = by_name["self"], by_name.get("mask")
    if mask is not None and mask.device != me.device:
        raise RuntimeError(
            f"expected self and mask to be on the same device, but got mask on {mask.device} and self on {me.device}"
        )
    rest = [o for o in operands if o.name != "value" or o.tensor.dim() > 0 or o.device.type != "cpu"]
    if len({o.device for o in rest}) > 1:
        _check_iterator(rest)


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


@cache
def _inspect(func: torch._ops.OpOverload) -> _Operator:
    schema = func._schema
    name = schema.name
    written = bool(schema.returns) and all(r.alias_info is not None and r.alias_info.is_write for r in schema.returns)
    views = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    kernel = kernels.KERNELS.get(f"{name}.{schema.overload_name}") or kernels.KERNELS.get(name, func)
    return _Operator(
        call=arithmetic.imitated(func, storage.operator(name, kernel)),  # type: ignore[arg-type]  # the table of kernels says `object`
        fresh=not written and not name.startswith("c10d::"),
        scalars=allows_scalars(func),
        random=torch.Tag.nondeterministic_seeded in func.tags,
        takes_generator=any(a.name == "generator" for a in schema.arguments),
        syncs=name in _SYNCING,
        by_mask=name in _BY_MASK,
        on_host=_ON_HOST.get(name, -1),
        instead=collectives.OPERATORS.get(name),
        name=name.rpartition("::")[2],
        computes=not views and name not in _IDLE and name.rpartition("::")[2] not in storage.EMPTY,
    )


def use_arithmetic(chosen: arithmetic.Arithmetic) -> None:
    """Compute so from now on, in this process."""
    if arithmetic.present.kinds != chosen.kinds:
        _inspect.cache_clear()
    arithmetic.present = chosen


def run(func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    """Run an operator as ``__torch_dispatch__`` of a simulated tensor does; see the module."""
    operator = _inspect(func)
    if operator.instead is not None:
        return operator.instead(*args, **kwargs)
    device, mixed = _device_of(operator, args, kwargs)
    if mixed:
        decomposes = check(func, args, kwargs)
        if decomposes is NotImplemented:
            return NotImplemented
        if decomposes:
            return func.decompose(*args, **kwargs)
    if device is None:
        with _no_dispatch():
            return func(*args, **kwargs)
    if (operator.syncs or (operator.by_mask and _counts(args))) and active_node() is not None:
        host_waits(device)
    below = hardware.present
    inputs: list[torch.Tensor] = []
    if below is not None:
        inputs = list(tensors_in([args, tuple(kwargs.values())]))
        below.touch(device)
        below.read(device, inputs)
    if operator.random:
        out = _run_random(operator, device, args, kwargs)
    else:
        try:
            with _no_dispatch():
                out = operator.call(*args, **kwargs)
        except torch.OutOfMemoryError:
            raise
        except RuntimeError:
            storage.refuse_oversized(func, device, args, kwargs)
            raise
    if below is not None and operator.computes:
        _spoil(below, operator, device, inputs, list(tensors_in(argument_values(written_by(func), args, kwargs))), out)
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
        value_class = type(value)
        if value_class is SimulatedTensor or value_class in SUBCLASSES:
            if device is None:
                device = value._dev  # type: ignore[attr-defined]
            elif device is not value._dev:  # type: ignore[attr-defined]
                mixed = True
        elif value_class is list or value_class is tuple:
            for item in value:  # type: ignore[attr-defined]
                if type(item) is SimulatedTensor or type(item) in SUBCLASSES:
                    if device is None:
                        device = item._dev
                    elif device is not item._dev:
                        mixed = True
                elif isinstance(item, torch.Tensor):
                    mixed = True
        elif isinstance(value, torch.Tensor) and not (operator.scalars and value_class is _plain and value.dim() == 0):
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
    inputs: list[torch.Tensor],
    changed: list[torch.Tensor],
    out: object,
) -> None:
    with _no_dispatch(), torch.no_grad():
        written = list(tensors_in(out)) if operator.fresh else []
        below.operated(device, operator.name, inputs, [raw(t) for t in written or changed])
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
        requested = kwargs.get("generator")
        if requested is None:
            kwargs = {**kwargs, "generator": generator}
        elif (owner := device_of(requested)).type != "cuda":  # type: ignore[arg-type]  # the schema says a generator
            raise RuntimeError(f"Expected a 'cuda' device type for generator but found '{owner.type}'")
        else:
            generator = owner_of(requested)  # type: ignore[arg-type]  # see above
    variant = arithmetic.draw_variant(args)
    with drawing(generator, None if operator.takes_generator else node.ambient, variant) as drawn, _no_dispatch():
        out = operator.call(*args, **kwargs)
        drawn.extend(tensors_in(out))
    return out


set_runner(run)  # type: ignore[arg-type]
