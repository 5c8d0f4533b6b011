"""Change one call of the code under test during one run: if a wrong step is then right, it is the cause.

Runs in ranks. Changes are to collectives and other calls, to the terms of a loss (where each is computed, what depends
on it, and the scale of its gradient), and to gradients, which can be combined after each backward pass.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
import re
import sys
import types
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from mgpu_check.diagnosis.observations import Change, ObservedRun, Term
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.gates.gate_arguments import Program, modules_of
from mgpu_check.gates.run.call_events import profiled, site, upstream
from mgpu_check.gates.run.shards import parameters_of
from mgpu_check.gates.run.step_runs import observe
from mgpu_check.gates.search.scenarios import Scenario
from mgpu_check.processes.collective_records import relative
from mgpu_check.processes.rank_lists import grouped
from mgpu_check.processes.tracebacks import is_file_under_test
from mgpu_check.torch_hooks.collective_table import COLLECTIVES, OPERATIONS, Form
from mgpu_check.torch_hooks.collectives import Recorder, group_of, own_groups, recorder
from mgpu_check.torch_hooks.nested import named_parameters
from mgpu_check.torch_hooks.patches import entered, function_of, replaced
from mgpu_check.torch_hooks.tensors import draws

_MOST = 6  # most terms of one loss that are recorded, the nearest to the loss first: trying one costs runs
_MOST_NODES = 1000  # most nodes of a graph that are visited: terms of a loss are near its root
_ADDS = {"AddBackward0", "SubBackward0", "StackBackward0", "CatBackward0"}
# Functions that are linear in one operand if the other operands need no gradient.
_SCALES = {
    *("MulBackward0", "DivBackward0", "NegBackward0", "SumBackward0", "SumBackward1", "MeanBackward0", "MeanBackward1"),
    *("CloneBackward0", "ToCopyBackward0", "ViewBackward0", "ReshapeAliasBackward0", "UnsqueezeBackward0"),
    *("SqueezeBackward0", "SqueezeBackward1"),
}
_FRAME = re.compile(r'File "(.+)", line (\d+)')

Paths = tuple[tuple[int, ...], ...]
_Edge = tuple[Any, int]  # a node of the graph, and the index of its operand that is a term


def noting_terms(model: Any, terms: dict[tuple[str, Paths], Term]) -> contextlib.AbstractContextManager[None]:
    """Record each loss that backward is called on, and its terms, by the calling line and the graph path."""
    named = [pair for module in modules_of(model).values() for pair in named_parameters(module)]

    def note(line: str, roots: Sequence[Any]) -> list[RemovableHandle]:
        for root in roots:
            if isinstance(root, torch.Tensor) and root.numel() == 1 and root.grad_fn is not None:
                for paths, edges in [(((),), []), *_terms(root.grad_fn)]:
                    node = root.grad_fn
                    if edges:
                        adding, index = edges[0]
                        node = adding.next_functions[index][0]
                    terms.setdefault((line, paths), Term(line, paths, _line_of(node), upstream(node, named)))
        return []

    # Anomaly detection makes each node keep the traceback of its creation (pytorch/pytorch#7677), in its metadata under
    # "traceback_" (torch/csrc/autograd/python_anomaly_mode.h, ANOMALY_TRACE_KEY, torch 2.13).
    return entered(torch.autograd.set_detect_anomaly(True, check_nan=False), around_backward(note))


def scaling_term(term: Term, times: float) -> contextlib.AbstractContextManager[None]:
    """Multiply the gradient that reaches one term of a loss, or the loss itself."""

    def scale(line: str, roots: Sequence[Any]) -> list[RemovableHandle]:
        if line != term.backward:
            return []
        if not term.paths[0]:
            return [root.grad_fn.register_prehook(_multiplied(None, times)) for root in roots]
        matches = [edges for root in roots for paths, edges in _terms(root.grad_fn) if paths == term.paths]
        return [node.register_hook(_multiplied(index, times)) for edges in matches for node, index in edges]

    return around_backward(scale)


def _weighed_by_samples(model: Any) -> contextlib.AbstractContextManager[None]:
    """Weigh the gradients of backward passes by their samples: the rows that the forward pass before each has got."""
    parameters = [value for _, value in parameters_of(modules_of(model))]
    rows: list[int] = []  # of the first module that is called after the last backward pass
    passes, samples = 0, 0

    def called(module: nn.Module, args: Any) -> None:
        if not rows and args and isinstance(args[0], torch.Tensor) and args[0].dim():
            rows.append(len(args[0]))

    def weigh(line: str, roots: Sequence[Any]) -> list[RemovableHandle]:
        nonlocal passes, samples
        if all(parameter.grad is None or not parameter.grad.any() for parameter in parameters):
            passes, samples = 0, 0
        # The mean of all passes so far counts each of their samples alike.
        before = passes / samples if samples else 0.0
        passes, samples = passes + 1, samples + (rows[0] if rows else 1)
        now, own = passes / samples, rows[0] if rows else 1
        rows.clear()
        for parameter in parameters if before else ():
            if parameter.grad is not None:
                parameter.grad.mul_(now / before)
        nodes = (root.grad_fn for root in roots if isinstance(root, torch.Tensor) and root.grad_fn is not None)
        return [node.register_prehook(_multiplied(None, own * now)) for node in nodes]

    return entered(register_module_forward_pre_hook(called), around_backward(weigh))


def _multiplied(index: int | None, times: float) -> Callable[..., Any]:
    """Return a hook that multiplies the gradient of one operand, or of all for None."""

    def hook(gradients: tuple[torch.Tensor | None, ...], outputs: Any = None) -> tuple[torch.Tensor | None, ...]:
        return tuple(
            gradient * times if index in (None, number) and gradient is not None else gradient
            for number, gradient in enumerate(gradients)
        )

    return hook


def around_backward(
    look: Callable[[str, Sequence[Any]], list[RemovableHandle]] = lambda line, roots: [],
    then: Callable[[], object] = lambda: None,
) -> contextlib.AbstractContextManager[None]:
    """Call `look` before each backward pass, with its line and its losses, and `then` after it.

    The hooks that `look` returns are removed after the pass. Passes inside of others do not count.
    """
    # `backward` and `grad` call the engine by this imported name (torch/autograd/__init__.py, torch 2.13).
    run = torch.autograd._engine_run_backward  # type: ignore[attr-defined]
    inside = 0

    def watched(roots: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        nonlocal inside
        hooks = [] if inside else look(site(sys._getframe()), roots)
        inside += 1
        try:
            result = run(roots, *args, **kwargs)
        finally:
            inside -= 1
            for hook in hooks:
                hook.remove()
        if not inside:
            then()
        return result

    return replaced(torch.autograd, "_engine_run_backward", watched)


def _terms(root: Any) -> list[tuple[Paths, list[_Edge]]]:
    """Return the terms of a loss: its summands, and losses that an autograd function attaches to another tensor."""
    injected = grouped((edge[0].name(), (path, edge)) for path, edge in _injected(root))
    several = [(tuple(path for path, _ in own), [edge for _, edge in own]) for _, own in injected]
    return [*(((path,), [edge]) for path, edge in _added(root)), *several]


def _added(root: Any) -> Iterator[tuple[tuple[int, ...], _Edge]]:
    """Yield the summands of a loss, the nearest first, each with its path through the graph."""
    waiting: deque[tuple[tuple[int, ...], Any]] = deque([((), root)])
    yielded = visited = 0
    while waiting and visited < _MOST_NODES:
        path, node = waiting.popleft()
        visited += 1
        operands, name = _operands(node), node.name()
        adds = name in _ADDS and len(operands) > 1
        if not adds and not (name in _ADDS | _SCALES and len(operands) == 1):
            continue
        for index, below in operands:
            if adds:
                yield (*path, index), (node, index)
                yielded += 1
                if yielded == _MOST:
                    return
            waiting.append(((*path, index), below))


def _injected(root: Any) -> Iterator[tuple[tuple[int, ...], _Edge]]:
    """Yield scalar operands, such as losses of layers, that an autograd function takes beside others."""
    waiting: deque[tuple[tuple[int, ...], Any]] = deque([((), root)])
    visited = {root}
    while waiting and len(visited) < _MOST_NODES:
        path, node = waiting.popleft()
        operands = _operands(node)
        several = isinstance(node, torch.autograd.function.BackwardCFunction) and len(operands) > 1
        for index, below in operands:
            if several and [tuple(metadata.shape) for metadata in below._input_metadata] == [()]:
                yield (*path, index), (node, index)
            if below not in visited:
                visited.add(below)
                waiting.append(((*path, index), below))


def _operands(node: Any) -> list[tuple[int, Any]]:
    return [(index, below) for index, (below, _) in enumerate(node.next_functions) if below is not None]


def _line_of(node: Any) -> str:
    """Return the line of the code under test that computed a term, ignoring operations that only scale it."""
    while node.name() in _SCALES and len(below := _operands(node)) == 1:
        node = below[0][1]
    for traceback_entry in reversed(node.metadata.get("traceback_", [])):
        for file, number in _FRAME.findall(traceback_entry):
            if is_file_under_test(file):
                return f"{relative(file)}:{number}"
    return ""


def _combine(model: Any, group: dist.ProcessGroup, parameter_names: Collection[str], mean: bool) -> None:
    """Give all ranks of a group the mean, or the sum, of their gradients of some parameters."""
    # A mean may be repeated without effect, so gradients that accumulate over several passes come out right.
    parameters = {
        name: parameter
        for name, parameter in parameters_of(modules_of(model))
        if name in parameter_names and not hasattr(parameter, "full_tensor")
    }
    shapes = {name: tuple(parameter.shape) for name, parameter in parameters.items()}
    of_ranks: list[dict[str, tuple[int, ...]]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(of_ranks, shapes, group=group)
    for name, parameter in parameters.items():
        if any(others.get(name) != shapes[name] for others in of_ranks):
            continue  # ranks hold different slices, or a module that others lack
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.detach().clone()
        dist.all_reduce(gradient, group=group)
        parameter.grad = gradient / len(of_ranks) if mean else gradient


_ADDING = ("add", "add_", "__add__", "__iadd__", "__radd__")
_SUMS = 8  # most sums that are kept: an operand is added up right before its reduction
_OPS = {"max": dist.ReduceOp.MAX, "sum": dist.ReduceOp.SUM}
_OUTPUTS = tuple(dict.fromkeys(row.taken for row in COLLECTIVES.values() if row.taken and row.taken != row.operand))
"""Parameters that collectives write their results to; collectives without such a parameter overwrite the operand."""


def run_changed(rank: Rank, program: Program, scenario: Scenario, change: Change) -> ObservedRun:
    return observe(rank, program, scenario, around=lambda model, batches: _changed(change, rank, model))


def run_noting_ranges(rank: Rank, program: Program, scenario: Scenario) -> dict[str, Range]:
    """Return the lines that call `torch.arange` or slice a parameter, each with its first range."""
    noting = _NotingRanges()
    observe(rank, program, scenario, digests=False, around=lambda model, batches: _noting(noting))
    return noting.slices | {line: Range(len(values), start) for line, (values, start) in noting.ranges.items()}


def part_of(shift: Change, rank: int, size: int) -> int:
    """Return the index of the part of a range that a rank has."""
    part_count, order = shift.value
    return int(rank % part_count if order == "inner" else rank // max(1, size // part_count))


def run_noting_terms(rank: Rank, program: Program, scenario: Scenario) -> list[Term]:
    terms: dict[tuple[str, Paths], Term] = {}
    observe(rank, program, scenario, digests=False, around=lambda model, batches: noting_terms(model, terms))
    return list(terms.values())


def _changed(change: Change, rank: Rank, model: Any) -> contextlib.AbstractContextManager[Any]:
    around = _AROUND.get(change.kind)
    return _with_calls(change) if around is None else around(change, rank, model)


def _combining(change: Change, rank: Rank, model: Any) -> contextlib.AbstractContextManager[None]:
    index, parameter_names, how = change.value
    combine = functools.partial(_combine, model, own_groups()[index], parameter_names, how == "mean")
    return around_backward(then=lambda: recorder.aside(combine))


class _DrawsOfRank0(TorchDispatchMode):
    """Gives the generator of each draw the state that it has on rank 0, so that all ranks draw the same numbers."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if draws(func, args, kwargs):
            generator = kwargs.get("generator") or self._generator_of(args, kwargs)
            recorder.aside(functools.partial(self._take_state, generator))
        return func(*args, **kwargs)

    @staticmethod
    def _generator_of(args: Any, kwargs: Any) -> torch.Generator:
        """Return the generator of the device where an operator draws."""
        devices = [value.device for value in args if isinstance(value, torch.Tensor)]
        device = torch.device(kwargs.get("device") or (devices[0] if devices else "cpu"))
        if device.type != "cuda":
            return torch.default_generator
        index = torch.cuda.current_device() if device.index is None else device.index
        return torch.cuda.default_generators[index]

    @staticmethod
    def _take_state(generator: torch.Generator) -> None:
        state = [generator.get_state()]
        dist.broadcast_object_list(state)
        generator.set_state(state[0])


def _always_synchronized() -> contextlib.AbstractContextManager[None]:
    """Let wrappers synchronize gradients in each backward pass."""

    set_as_usual: Any = nn.Module.__setattr__  # annotated for tensors and modules only

    def set_attribute(self: DistributedDataParallel, name: str, value: Any) -> None:
        set_as_usual(self, name, True if name == "require_backward_grad_sync" else value)

    synchronize = FSDPModule.set_requires_gradient_sync

    def require(self: FSDPModule, *args: Any, **kwargs: Any) -> None:
        synchronize(self, True)

    # `no_sync` and users clear this attribute (torch/nn/parallel/distributed.py, torch 2.13).
    return entered(
        replaced(FSDPModule, "set_requires_gradient_sync", require),
        replaced(DistributedDataParallel, "__setattr__", set_attribute),
    )


def _without_recomputation() -> contextlib.AbstractContextManager[None]:
    """Let checkpointed functions keep their activations, as if they were called directly."""

    def keep(function: Any, *options: Any, **named: Any) -> Iterator[None]:
        yield

    class Direct:
        @staticmethod
        def apply(function: Callable[..., Any], preserves_state: bool, *args: Any) -> Any:
            return function(*args)

    # `checkpoint` and its kin end in these two (torch/utils/checkpoint.py, torch 2.13).
    return entered(
        replaced(checkpoint, "_checkpoint_without_reentrant_generator", keep),
        replaced(checkpoint, "CheckpointFunction", Direct),
    )


_CallingLine = tuple[str, str]  # the name of a function, and the line that calls it


class _Writes(TorchFunctionMode):
    """Counts the writes in place of each line to each tensor, or lets only every nth one happen.

    A run enters one around its steps: `run_noting_repetitions` one that counts, a changed run one with the change.
    """

    def __init__(self, change: Change | None = None) -> None:
        super().__init__()
        self._change = change
        self.counts: dict[_CallingLine, Counter[tuple[int, int]]] = {}  # line -> address and size of a tensor -> writes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        targets = args[0] if args and isinstance(args[0], (list, tuple)) else args[:1]
        tensors = [target for target in targets if isinstance(target, torch.Tensor)]
        if not tensors or not _WRITING.fullmatch(name) or not (line := site(sys._getframe())):
            return func(*args, **(kwargs or {}))
        # The addresses of a step's temporary tensors differ, or are used again by others.
        key = tensors[0].data_ptr(), tensors[0].numel()
        count = self.counts.setdefault((name, line), Counter())
        count[key] += 1
        change = self._change
        if change is not None and (name, line) == (change.name, change.site) and count[key] % change.value:
            return args[0]
        return func(*args, **(kwargs or {}))


_WRITING = re.compile(r"(?!_)(?!requires_grad_|retain_|detach_|zero_).*[a-z]_|_foreach_[a-z]+_|__i[a-z]+__|__setitem__")
"""The names of functions that write to their first argument."""


def _noting_procedures(
    counts: Counter[_CallingLine], codes: dict[_CallingLine, types.CodeType | None]
) -> contextlib.AbstractContextManager[None]:
    """Count the calls of functions under test that return nothing, and note their code; None if one returned more."""

    def note(frame: types.FrameType, profile_event: str, result: Any) -> None:
        code = frame.f_code
        if profile_event != "return" or code.co_flags & _RESUMED or not is_file_under_test(code.co_filename):
            return
        if frame.f_back is not None and code.co_name.isidentifier() and code.co_name != "__init__":
            line = code.co_name, site(frame)
            counts[line] += 1
            codes[line] = code if result is None and codes.get(line, code) is code else None

    return profiled(note)


_RESUMED = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


@contextlib.contextmanager
def _last_calls(change: Change) -> Iterator[None]:
    """Let only every nth call of a function happen, wherever its name is bound."""
    times, file, line = change.value
    counts: Counter[int] = Counter()
    # Its own code is replaced, because callers may have the function under any name.
    functions = [
        function
        for function in gc.get_objects()
        if type(function) is types.FunctionType and not function.__closure__
        if (function.__code__.co_filename, function.__code__.co_firstlineno) == (file, line)
    ]
    codes = [function.__code__ for function in functions]
    detours = [_detour.__code__.replace() for _ in functions]  # equal, and each an object of its own

    def call(detour: types.CodeType, *args: Any, **kwargs: Any) -> Any:
        index = next(number for number, code in enumerate(detours) if code is detour)
        counts[index] += 1
        if counts[index] % times:
            return None
        function = functions[index]
        original = types.FunctionType(codes[index], function.__globals__, function.__name__, function.__defaults__)
        original.__kwdefaults__ = function.__kwdefaults__
        return original(*args, **kwargs)

    _called.append(call)
    try:
        for function, code in zip(functions, detours, strict=True):
            function.__code__ = code
        yield
    finally:
        for function, code in zip(functions, codes, strict=True):
            function.__code__ = code
        _called.pop()


_called: list[Callable[..., Any]] = []  # what a detour calls, while a change is made


def _detour(*args: Any, **kwargs: Any) -> Any:
    """Take the place of a function's code. It has the globals of that function, so it imports all that it needs."""
    import sys

    from mgpu_check.gates.run.interventions import _called

    return _called[-1](sys._getframe().f_code, *args, **kwargs)


Repetition = tuple[str, str, tuple[int, ...] | tuple[int, str, int]]
"""A function, the line that calls it, and how often: writes of one tensor, or calls with the file and line of the
function."""


def run_noting_repetitions(rank: Rank, program: Program, scenario: Scenario) -> list[Repetition]:
    """Return the functions that lines call: those that return nothing, and those that write in place.

    Lines are left out that write to tensors unequally often, because these are temporary.
    """
    writes, counts, codes = _Writes(), Counter[_CallingLine](), dict[_CallingLine, types.CodeType | None]()
    noting = entered(_noting_procedures(counts, codes), writes)
    observe(rank, program, scenario, digests=False, around=lambda model, batches: noting)
    several = {line: set(count.values()) for line, count in writes.counts.items()}
    return [
        *(
            (*line, (counts[line], code.co_filename, code.co_firstlineno))
            for line, code in codes.items()
            if code is not None
        ),
        *((*line, tuple(numbers)) for line, numbers in several.items() if len(numbers) == 1),
    ]


@contextlib.contextmanager
def _with_calls(change: Change) -> Iterator[None]:
    """Change the collectives of one name that one line calls, or those of several lines."""
    lines = change.value if change.kind == "wait" else ((change.name, change.site),)
    call, apply = Recorder.call, function_of(torch.autograd.Function.__dict__["apply"])
    alter = _ALTERED.get(change.kind)
    kept: list[torch.Tensor] = []
    sizes: list[int] = []  # group sizes of changed collectives, one per running autograd function

    def changed(
        recorder: Recorder, function: Callable[..., Any], form: Form, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if recorder._inside.depth or (form.name, site(sys._getframe())) not in lines:
            return call(recorder, function, form, args, kwargs)
        if change.kind == "wait":
            result = call(recorder, function, form, args, kwargs)
            if isinstance(result, dist.Work):
                result.wait()
            return result
        if change.kind == "skip":
            return _done(form, args, kwargs)
        if change.kind in ("new", "once") or change.value == "norm":
            operand = form.argument(form.operand, args, kwargs)
            with torch.no_grad(), _prepared(change, operand, kept):
                result = call(recorder, function, form, args, kwargs)
                if isinstance(result, dist.Work):
                    result.wait()
            kept.append(operand.detach().clone())
            return result
        if alter is None:
            if change.kind == "group":
                name, value = form.group, own_groups()[change.value]
            else:
                name, value = next(name for name in OPERATIONS if name in form.parameters), _OPS[change.value]
            position = form.parameters.index(name)
            if position >= len(args):
                return call(recorder, function, form, args, kwargs | {name: value})
            return call(recorder, function, form, (*args[:position], value, *args[position + 1 :]), kwargs)
        group = group_of(form.argument(form.group, args, kwargs))
        size = len(group.ranks) if group is not None else 1
        result = call(recorder, function, form, args, kwargs)
        if sizes:
            sizes[-1] = size
            return result
        return _with_results(form, args, kwargs, result, lambda tensors: alter(tensors, size, change.value))

    def applied(cls: Any, *args: Any, **kwargs: Any) -> Any:
        """Alter the result of an autograd function, not of its collective: autograd then changes gradients too."""
        sizes.append(0)
        try:
            result = apply(cls, *args, **kwargs)
        finally:
            size = sizes.pop()
        if not size or alter is None:
            return result
        several = isinstance(result, (list, tuple))
        tensors = alter(list(result) if several else [result], size, change.value)
        return type(result)(tensors) if several else tensors[0]

    additions = _Additions() if change.kind == "once" else contextlib.nullcontext()
    with (
        additions,
        replaced(Recorder, "call", changed),
        replaced(torch.autograd.Function, "apply", classmethod(applied)),
    ):
        yield


def _multiplied_tensors(tensors: list[torch.Tensor], by: float) -> list[torch.Tensor]:
    wide = [tensor if tensor.is_floating_point() else tensor.double() for tensor in tensors]
    return [own if own.dtype is torch.bool else each * by for own, each in zip(tensors, wide, strict=True)]


def _reordered(tensors: list[torch.Tensor], size: int, pieces: int) -> list[torch.Tensor]:
    """Put the first pieces of all ranks first, then the second ones, if the rows divide into pieces."""
    rows = sum(map(len, tensors))
    if rows % (size * pieces):
        return tensors
    joined = torch.cat(tensors).unflatten(0, (size, pieces, -1)).transpose(0, 1).flatten(0, 2)
    return list(joined.split([len(tensor) for tensor in tensors]))


_ALTERED: dict[str, Callable[[list[torch.Tensor], int, Any], list[torch.Tensor]]] = {
    "divide": lambda tensors, size, value: _multiplied_tensors(tensors, 1 / size),
    "multiply": lambda tensors, size, value: _multiplied_tensors(tensors, float(size)),
    "reorder": _reordered,
}
"""By kind of change: a function from the results of a collective, the group size and a value to the changed results."""


@contextlib.contextmanager
def _prepared(change: Change, operand: torch.Tensor, kept: Sequence[torch.Tensor]) -> Iterator[None]:
    """Prepare the operand of a reduction in place, and finish its result. `kept`: the results of earlier calls."""
    if change.value == "norm":
        operand.square_()
        yield
        operand.sqrt_()
    elif change.kind == "new":
        before = kept[-change.value].clone() if len(kept) >= change.value else torch.zeros_like(operand)
        operand.sub_(before)
        yield
        operand.add_(before)
    else:
        # An addend that all ranks have counts on the first rank of the group only.
        several = () if dist.get_rank() in {ranks[0] for ranks in change.now} else reversed(_Additions.recent)
        for addends in (own for sum_, *own in several if sum_.shape == operand.shape and sum_.equal(operand)):
            operand.sub_(addends[change.value].expand_as(operand))
            break
        yield


class _Additions(TorchFunctionMode):
    """Keeps the latest sums of two tensors, each with its addends. A changed run enters one around its steps."""

    recent: deque[tuple[torch.Tensor, ...]] = deque(maxlen=_SUMS)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        both = [value for value in args if isinstance(value, torch.Tensor)]
        is_sum = getattr(func, "__name__", "") in _ADDING and len(both) == len(args) == 2 and not kwargs
        if is_sum and result.dim():  # an addend may have no dimension, such as a bias of one value
            self.recent.append(tuple(value.detach().clone() for value in (result, *both)))
        return result


class _Settled(dist.Work):
    def wait(self, timeout: Any = None) -> bool:
        return True


def _done(form: Form, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if "self" in form.parameters:
        return form.argument(form.operand, args, kwargs)
    return _Settled() if form.argument("async_op", args, kwargs) else None


def _with_results(
    form: Form,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,
    alter: Callable[[list[torch.Tensor]], list[torch.Tensor]],
) -> Any:
    if isinstance(result, torch.Tensor):
        return alter([result])[0]
    if isinstance(result, dist.Work):
        result.wait()
    value = next((output for name in _OUTPUTS if (output := form.argument(name, args, kwargs)) is not None), None)
    if value is None:
        value = form.argument(form.operand, args, kwargs)
    tensors = list(value) if isinstance(value, (list, tuple)) else [value]
    if all(isinstance(tensor, torch.Tensor) for tensor in tensors):
        with torch.no_grad():
            for tensor, new in zip(tensors, alter(tensors), strict=True):
                tensor.copy_(new)
    return result


class _AroundRanges(TorchFunctionMode):
    """Watches calls of `arange` in the code under test, by any name or method, and slices of parameters.

    One subclass notes the ranges in a run, another shifts them in a later one, each entered around the steps.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "__getitem__" and isinstance(args[0], nn.Parameter):
            position, line = _place_of_slice(args[1]), site(sys._getframe())
            if position is not None and line:
                args = args[0], self.sliced(line, args[1], position)
        result = func(*args, **(kwargs or {}))
        if getattr(func, "__name__", "") == "arange":
            line = site(sys._getframe())
            return self.made(line, result) if line else result
        self.called(func, args, result)
        return result

    def made(self, line: str, values: torch.Tensor) -> torch.Tensor:
        return values

    def sliced(self, line: str, index: Any, position: int) -> Any:
        return index

    def called(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        pass


def _place_of_slice(index: Any) -> int | None:
    """Return the place of the one slice with an end in an index of a tensor; None if there is not just one."""
    entries = index if isinstance(index, tuple) else (index,)
    slices = ((position, entry) for position, entry in enumerate(entries) if isinstance(entry, slice))
    positions = [position for position, entry in slices if isinstance(entry.stop, int)]
    return positions[0] if len(positions) == 1 and entries[positions[0]].step is None else None


def _slice_in(index: Any, position: int) -> tuple[int, int]:
    row_slice = index[position] if isinstance(index, tuple) else index
    return row_slice.start or 0, row_slice.stop


@dataclass(frozen=True)
class Range:
    """A range that a line makes."""

    length: int
    start: float  # the first number, including an offset that is added to the range later
    name: str = "arange"  # "arange", or "slice" for the rows of a parameter that the line takes


class _NotingRanges(_AroundRanges):
    def __init__(self) -> None:
        super().__init__()
        self.ranges: dict[str, tuple[torch.Tensor, float]] = {}
        self.slices: dict[str, Range] = {}

    def sliced(self, line: str, index: Any, position: int) -> Any:
        start, end = _slice_in(index, position)
        if 0 <= start < end:
            self.slices.setdefault(line, Range(end - start, start, "slice"))
        return index

    def made(self, line: str, values: torch.Tensor) -> torch.Tensor:
        if values.numel():
            self.ranges.setdefault(line, (values, float(values[0])))
        return values

    def called(self, func: Any, args: tuple[Any, ...], result: Any) -> None:
        if getattr(func, "__name__", "") not in _ADDING or not isinstance(result, torch.Tensor):
            return
        for line, (values, _) in self.ranges.items():
            if any(argument is values for argument in args) and result.shape == values.shape:
                self.ranges[line] = values, float(result[0])


def _noting(mode: _NotingRanges) -> contextlib.AbstractContextManager[None]:
    """Record ranges as the code under test receives them: a simulated device moves the tensors that torch makes."""
    arange, recorded = torch.arange, set[str]()

    def noted(*args: Any, **kwargs: Any) -> Any:
        values = arange(*args, **kwargs)
        if (line := site(sys._getframe())) not in recorded and line in mode.ranges:
            recorded.add(line)
            mode.ranges[line] = values, float(values[0])
        return values

    return entered(mode, replaced(torch, "arange", noted))


class _Shifting(_AroundRanges):
    """Lets the ranges of one line continue where the ranges of earlier ranks end."""

    def __init__(self, change: Change, rank: Rank) -> None:
        super().__init__()
        self._line, self._index = (change.name, change.site), part_of(change, rank.index, rank.size)

    def made(self, line: str, values: torch.Tensor) -> torch.Tensor:
        return values + self._index * values.numel() if ("arange", line) == self._line else values

    def sliced(self, line: str, index: Any, position: int) -> Any:
        if ("slice", line) != self._line:
            return index
        start, end = _slice_in(index, position)
        by = self._index * (end - start)
        moved = slice(start + by, end + by)
        return (*index[:position], moved, *index[position + 1 :]) if isinstance(index, tuple) else moved


_AROUND: dict[str, Callable[[Change, Rank, Any], contextlib.AbstractContextManager[Any]]] = {
    "combine": _combining,
    "term": lambda change, rank, model: scaling_term(*change.value),
    "shift": lambda change, rank, model: _Shifting(change, rank),
    "last": lambda change, rank, model: _last_calls(change) if isinstance(change.value, tuple) else _Writes(change),
    "weigh": lambda change, rank, model: _weighed_by_samples(model),
    "draw": lambda change, rank, model: _DrawsOfRank0(),
    "keep": lambda change, rank, model: _without_recomputation(),
    "synchronize": lambda change, rank, model: _always_synchronized(),
}
"""By kind of change: the context of a run that has it. The others change calls of collectives."""
