"""Check all data that reach a loss from outside of the replay: tensors, and numbers among the arguments of operators.

If an operator in the graph of a loss gets a tensor from outside, the ranks record it. One device compares its own, or
gets the joint tensor in its place. Numbers are not replaced: those of one device must follow from those of the ranks.

The data that a script computes with are followed, operator by operator, from where they enter to the loss. Data are
*known* if one device and the ranks have the same: parameters and buffers, batches and tensors that a replay has joined,
and results of operators on these alone. All other data come from *outside*, however the script got them.

Numbers that enter a graph as tensors, such as noise, are data from outside. Dropout and similar operators draw within
the graph: the random numbers that a rank draws there are recorded, and one device is given those of all ranks.
"""

from __future__ import annotations

import abc
import contextlib
import enum
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from mgpu_check.compare.in_script.joining import NotJoinedError, SampleRows, sample_dimension
from mgpu_check.compare.in_script.tape import Tape, Tapes, Unstored, is_within_gradients, nearest_line, place
from mgpu_check.simulated.tensor import tensors_in
from mgpu_check.torch_hooks.patches import replaced
from mgpu_check.torch_hooks.tensors import Argument, argument_values, draws, is_capturing, plain, written_by

if TYPE_CHECKING:
    from mgpu_check.compare.in_script.replay import Points

_CONSTANT = (
    *("aten::arange", "aten::eye", "aten::zeros", "aten::ones", "aten::new_zeros", "aten::new_ones"),
    *("aten::zeros_like", "aten::ones_like"),
)
"""Operators whose results depend on sizes alone, if they get no other numbers."""
_FORM = ("dim", "dim0", "dim1", "start_dim", "end_dim", "chunks", "split_size", "reduction")
"""Numbers that say how an operator treats dimensions. Others may be data."""


class Origin(enum.Enum):
    """The origin of the data in a storage."""

    KNOWN = enum.auto()
    CONSTANT = enum.auto()
    OUTSIDE = enum.auto()


class OperatorSchema(NamedTuple):
    """The parts of an operator's schema that are used."""

    name: str
    arguments: Sequence[str]  # the names of the arguments
    written: Sequence[Argument]  # the arguments that it changes in place
    overwrites: bool  # it replaces all of their elements
    constant: bool  # its results depend on sizes alone, if it gets no other numbers

    def changed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
        """Return the tensors among the arguments that it changes in place."""
        return list(tensors_in(argument_values(self.written, args, kwargs)))

    def numbers(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[float, ...]:
        """Return the numbers among the arguments that may be data."""
        named_values = [*zip(self.arguments, args, strict=False), *kwargs.items()]
        return tuple(value for name, value in named_values if type(value) in (int, float) and name not in _FORM)

    def indexed(self, args: Sequence[Any]) -> dict[int, int]:
        """Return the `id` of each tensor that has positions along a dimension of the first one -> its size there."""
        if self.name.startswith("aten::index_put") or self.name == "aten::index":
            positions = [
                (i, index) for i, index in enumerate(args[1]) if index is not None and index.dtype != torch.bool
            ]
            return {id(index): args[0].shape[i] for i, index in positions}
        if self.arguments[:3] == ("self", "dim", "index") and isinstance(args[2], torch.Tensor) and args[0].dim():
            return {id(args[2]): args[0].shape[args[1]]}
        return {}


@functools.cache
def schema_of(func: Any) -> OperatorSchema:
    """Return the parts of an operator's schema."""
    arguments, name = func._schema.arguments, func._schema.name
    # Their schemas do not say what they change: `torch.ops.c10d.allreduce_.default._schema` has no alias in torch 2.13.
    collective = name.startswith("c10d::")
    outputs = [(i, a.name) for i, a in enumerate(arguments) if collective and a.name.startswith("output")]
    written = list(dict.fromkeys([*written_by(func), *outputs]))
    overwrites = collective or name == "aten::copy_"
    return OperatorSchema(name, tuple(argument.name for argument in arguments), written, overwrites, name in _CONSTANT)


class Origins:
    """The origins of storages. Data without an origin come from outside.
    Each `OutsideData` has one, from the start of the script to the last replayed step. It drops ended storages at each
    micro-batch."""

    def __init__(self) -> None:
        # A weak reference keeps the address of its storage from being used again: it is the `cdata` of
        # torch/multiprocessing/reductions.py, StorageWeakRef, torch 2.13.
        self._known: dict[int, tuple[StorageWeakRef, Origin]] = {}

    def of(self, tensor: torch.Tensor) -> Origin | None:
        """Return the origin of a tensor. Parameters and results of operators with gradients are known."""
        if tensor.grad_fn is not None:
            return Origin.KNOWN
        origin = self.of_storage(tensor)
        if origin is None and tensor.requires_grad and isinstance(tensor, torch.nn.Parameter):
            return Origin.KNOWN
        return origin

    def of_storage(self, tensor: torch.Tensor) -> Origin | None:
        """Return the origin of the tensor's storage, whether it has gradients or not."""
        try:
            entry = self._known.get(tensor.untyped_storage()._cdata)
        except (NotImplementedError, RuntimeError):  # of a sparse tensor
            return None
        return None if entry is None else entry[1]

    def set(self, tensors: Iterable[torch.Tensor], origin: Origin | None = Origin.KNOWN) -> None:
        """Set the origin of the storages of tensors."""
        for tensor in tensors:
            try:
                storage = tensor.untyped_storage()
            except (NotImplementedError, RuntimeError):
                continue
            if origin is None:
                self._known.pop(storage._cdata, None)
            else:
                self._known[storage._cdata] = StorageWeakRef(storage), origin

    def drop_ended(self) -> None:
        """Forget the storages that no tensor has any more."""
        self._known = {key: entry for key, entry in self._known.items() if not entry[0].expired()}

    @contextlib.contextmanager
    def known(self, tensors: Sequence[torch.Tensor]) -> Iterator[None]:
        """Let the storages of tensors be known for a while."""
        before = [(tensor, self.of_storage(tensor)) for tensor in tensors]
        self.set(tensors)
        try:
            yield
        finally:
            for tensor, origin in before:
                self.set([tensor], origin)


_EQUAL = 1e-5  # the relative difference that rounding explains
MOST = 2**12  # calls of a line and a micro-batch that are kept

Calls = dict[tuple[str, str, bool], list[tuple[float, ...]]]
"""Operator, line, and whether its result is in a graph -> the numbers of each call in a micro-batch."""


def follows(own: float, ranks: Sequence[float], world: int, computed: Iterable[float] = ()) -> bool:
    """Return whether a number of one device follows from those of the ranks.
    If the ranks agree, it may have the number of ranks as a factor, or its root: the script says so. If they do not, it
    is their sum or mean, or was computed from known tensors."""
    if own in computed:
        return True
    head = ranks[0]
    if all(value == head or (value != value and head != head) for value in ranks):
        explained = [head * world**power for power in (0, 1, -1, 0.5, -0.5)]
    else:
        explained = [sum(ranks), sum(ranks) / len(ranks)]
    return any(math.isclose(own, value, rel_tol=_EQUAL) or (own != own and value != value) for value in explained)


def unexplained(
    operator: str,
    own: list[tuple[float, ...]] | None,
    ranks: Sequence[list[tuple[float, ...]] | None],
    world: int,
    computed: Iterable[float] = (),
) -> str | None:
    """Return why the calls of an operator on one device do not follow from those of the ranks; None if they do."""
    recorded = [calls for calls in ranks if calls is not None]
    if not recorded or (own is None and len(recorded) == len(ranks)):
        return None  # the code depends on the number of ranks
    if len(recorded) < len(ranks) or own is None:
        return "only some ranks run it"
    joined = [numbers for calls in recorded for numbers in calls]
    if own == joined or (len(own) >= MOST and all(len(calls) >= MOST for calls in recorded)):
        return None
    if len({len(calls) for calls in recorded}) > 1:
        return f"ranks run it {', '.join(str(len(calls)) for calls in recorded)} times"
    for numbers, *rank_numbers in zip(own, *recorded, strict=False):
        if operator == "aten::slice" and len(numbers) > 1:
            # The slices of the ranks, one after the other, may be the slice of one device.
            ends = [numbers[0], *(bounds[1] for bounds in rank_numbers)]
            if [bounds[0] for bounds in rank_numbers] == ends[:-1] and ends[-1] == numbers[1]:
                continue
        for value, *values in zip(numbers, *rank_numbers, strict=False):
            if not follows(value, values, world, computed):
                shown = ", ".join(f"{number:g}" for number in values)
                return f"its number is {value:g} on one device, and {shown} on the ranks"
    return None


_OUTSIDE = (None, Origin.OUTSIDE)
_LARGEST = 2**24  # elements of a sparse tensor


class OutsideData(abc.ABC):
    """Follows the operators of the script.
    A `Points` makes it; an `InterceptedDraws` passes each operator to `run`. `end` closes a micro-batch, and is called
    before each step."""

    def __init__(self, now: Points) -> None:
        self._now = now
        self.origins = Origins()
        self.applying = False  # a `torch.autograd.Function` of the script runs its forward pass
        self._micro = -1
        self._calls: Calls = {}
        self._computed: set[float] = set()  # numbers that the script has read from known tensors
        self._checked: dict[Any, tuple[StorageWeakRef, torch.Tensor | None]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator, check what it gets from outside, and return its result."""
        self._advance()
        operator = schema_of(func)
        tensors = list(tensors_in([*args, *kwargs.values()] if kwargs else args))
        written = operator.changed(args, kwargs) if operator.written else []
        overwritten = [id(tensor) for tensor in written if operator.overwrites and tensor._base is None]
        sources = [tensor for tensor in tensors if id(tensor) not in overwritten] if overwritten else tensors
        origins = [self.origins.of(tensor) for tensor in sources]
        outside = [i for i, origin in enumerate(origins) if origin in _OUTSIDE]
        if outside and not self._now.optimizers:  # one device is given the parameters that the ranks start with
            outside = [i for i in outside if not isinstance(sources[i], torch.nn.Parameter)]
        numbers = operator.numbers(args, kwargs)
        has_known = Origin.KNOWN in origins
        graph = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in sources)
        reaches = graph or (self.applying and has_known)
        line = nearest_line() if reaches or (numbers and has_known and not outside) else None
        if line and outside and not is_capturing():
            self._check(operator, args, {i: _reaching(sources[i], written) for i in outside})
        result = func(*args, **kwargs)
        if operator.name == "aten::_local_scalar_dense":
            if not outside and isinstance(result, (int, float)):
                self._computed.add(float(result))
            return result
        origin: Origin | None = Origin.KNOWN
        if operator.constant:
            origin = Origin.CONSTANT if len(numbers) < 2 or not numbers[0] else None
        elif outside and not reaches:
            origin = Origin.OUTSIDE
        elif not reaches and not has_known:
            origin = Origin.CONSTANT if origins and not numbers else None
        for tensor in written:
            if not tensor.requires_grad:
                self._change(tensor, origin, id(tensor) in overwritten, sources, bool(numbers))
        in_graph = False
        for output in tensors_in([result]):
            differentiable = graph and output.is_floating_point() and operator.name != "aten::detach"
            in_graph = in_graph or differentiable
            if not differentiable and all(output is not tensor for tensor in tensors):
                self.origins.set([output], origin)
        if line and (numbers or in_graph):
            self._add(operator.name, line, in_graph, numbers)
        return result

    def apply(self, function: Callable[..., Any], name: str, args: Sequence[Any]) -> Any:
        """Run the forward pass of a `torch.autograd.Function` of the script, which has no graph."""
        self._advance()
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        origins = [self.origins.of(tensor) for tensor in tensors]
        known_tensors = [tensor for tensor, origin in zip(tensors, origins, strict=True) if origin is Origin.KNOWN]
        if known_tensors:
            numbers = tuple(arg for arg in args if type(arg) in (int, float))
            outside = {i: t for i, t in enumerate(tensors) if origins[i] in _OUTSIDE}
            if line := nearest_line():
                self._check(OperatorSchema(name, (), (), False, False), tensors, outside)
                self._add(name, line, True, numbers)
            self.origins.set(known_tensors)  # within the function, their data and views have no graph
        with replaced(self, "applying", bool(known_tensors)):
            result = function()
        self.judge("an autograd function", (output for output in tensors_in([result]) if output.requires_grad))
        return result

    def _add(self, operator: str, line: str, in_graph: bool, numbers: tuple[float, ...]) -> None:
        calls = self._calls.setdefault((operator, line, in_graph), [])
        if len(calls) < MOST:
            calls.append(numbers)

    def _change(
        self,
        tensor: torch.Tensor,
        origin: Origin | None,
        overwritten: bool,
        sources: Sequence[torch.Tensor],
        numbers: bool,
    ) -> None:
        before = self.origins.of_storage(tensor)
        outside = any(self.origins.of(source) in _OUTSIDE for source in sources if source is not tensor)
        if overwritten or (origin is Origin.KNOWN and before is Origin.CONSTANT):
            self.origins.set([tensor], origin)
        elif (before is Origin.CONSTANT and numbers) or (origin is Origin.OUTSIDE and outside):
            self.origins.set([tensor], Origin.OUTSIDE)

    def _advance(self) -> None:
        if self._micro != self._now.micro():
            self.end()
            self._micro = self._now.micro()
            self._checked.clear()
            self._computed.clear()
            self.origins.drop_ended()
            self.origins.set(self._now.gradients())

    def _key(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided:
            return None
        version = 0 if tensor.is_inference() else tensor._version
        position = tensor.untyped_storage()._cdata, tensor.storage_offset()
        return *position, tensor.shape, tensor.stride(), tensor.dtype, version

    def keep(self, tensor: torch.Tensor, value: torch.Tensor | None = None) -> None:
        """Take note that a tensor was checked in this micro-batch, and of the data that take its place."""
        self._advance()
        if (key := self._key(tensor)) is not None:
            self._checked[key] = StorageWeakRef(tensor.untyped_storage()), value

    @abc.abstractmethod
    def _check(self, operator: OperatorSchema, args: Sequence[Any], outside: Mapping[int, torch.Tensor]) -> None:
        """Record the tensors from outside that an operator gets, or replace them; keys are their positions."""

    @abc.abstractmethod
    def end(self) -> None:
        """Record or judge the calls since the last end, at the end of a micro-batch and before a step."""

    def judge(self, by: str, results: Iterable[torch.Tensor]) -> None:
        """Judge results of code that runs outside of the graph: data from outside must not be among their sources."""
        return


class RecordedData(OutsideData):
    """Writes the data from outside to the tape of a rank."""

    def __init__(self, now: Points, tape: Tape) -> None:
        super().__init__(now)
        self._tape = tape

    def _check(self, operator: OperatorSchema, args: Sequence[Any], outside: Mapping[int, torch.Tensor]) -> None:
        sizes = operator.indexed(args)
        values = {}
        for i, tensor in outside.items():
            if self._key(tensor) not in self._checked:
                self.keep(tensor)
                values[i] = _stored(tensor), sizes.get(id(tensor))
        if values:
            self._tape.put("outside", f"{operator.name} {place()} {self._micro}", values)

    def end(self) -> None:
        if self._micro >= 0:
            self._tape.put("calls", f"all {self._micro}", self._calls)
            self._calls = {}


class ReplayedData(OutsideData):
    """Gives one device the joint tensors of the ranks.

    `replaced`: called with each tensor that was replaced. `missing`: called with a tensor or an operator, the reason
    and the line of the user, for data of one device that neither follow from those of the ranks nor could be replaced;
    without a line it is the present one.
    """

    def __init__(
        self,
        now: Points,
        tapes: Tapes,
        rows: SampleRows,
        replaced: Callable[[str], None],
        missing: Callable[[str, str, str], None],
    ) -> None:
        super().__init__(now)
        self._tapes, self._rows, self._replaced, self._missing = tapes, rows, replaced, missing
        self._batch: tuple[int, list[int]] = (-1, [])  # the micro-batch, and the numbers of samples of the ranks
        self.ordered = False  # a joint tensor has the samples of the ranks one after the other

    def _check(self, operator: OperatorSchema, args: Sequence[Any], outside: Mapping[int, torch.Tensor]) -> None:
        unchecked = [i for i, tensor in outside.items() if self._key(tensor) not in self._checked]
        shards = self._tapes.turn("outside", f"{operator.name} {place()}", self._micro) if unchecked else []
        sizes = operator.indexed(args)
        written = {id(_reaching(tensor, [tensor])) for tensor in operator.changed(args, {})}
        for i, tensor in outside.items():
            subject = f"a tensor of shape {list(tensor.shape)}"
            if i in unchecked:
                try:
                    value = self._joint(tensor, [shard.get(i) for shard in shards], sizes.get(id(tensor)))
                    if value is not None and (id(tensor) in written or tensor.layout is not torch.strided):
                        raise NotJoinedError("ranks have other values, and it cannot be replaced there")
                    if value is not None and _saves_elsewhere():
                        raise NotJoinedError("ranks have other values, and torch has saved those of one device")
                except NotJoinedError as error:
                    self._missing(subject, str(error), "")
                    value = None
            else:
                value = self._checked[self._key(tensor)][1]
            self.keep(tensor, value)
            if value is not None:
                self.ordered = True
                self._replaced(subject)

    def keep(self, tensor: torch.Tensor, value: torch.Tensor | None = None) -> None:
        super().keep(tensor, value)
        if value is not None:  # other views of its storage keep their data
            tensor.data = value.to(tensor.device, tensor.dtype)
            self.origins.set([tensor])

    def _joint(self, own: torch.Tensor, shards: Sequence[Any], size: int | None) -> torch.Tensor | None:
        if not shards or any(shard is None for shard in shards):
            raise NotJoinedError("not every rank has it there")
        values = [shard[0] for shard in shards]
        own = _stored(own)
        if unstored := [value for value in (own, *values) if isinstance(value, Unstored)]:
            raise NotJoinedError(unstored[0].reason)
        sizes = [shard[1] for shard in shards]
        if size is not None and None not in sizes and sum(sizes) == size and own.dim():  # positions of samples
            values = [value + sum(sizes[:rank]) for rank, value in enumerate(values)]
        guesses: list[str] = []
        value = self.joint(own, values, guesses)
        if guesses:
            raise NotJoinedError(guesses[0])
        return value

    def joint(
        self, own: torch.Tensor, shards: Sequence[torch.Tensor], guesses: list[str], input_: bool = False
    ) -> torch.Tensor | None:
        """Return the tensor that one device gets in place of its own; None if its own follows from those of the ranks.

        Args:
            guesses: receives a clause for each decision that the values do not determine.
            input_: it is an input of a model or loss, which may have samples in another number than the first input.

        Raises:
            NotJoinedError: it does not follow, and there is no joint tensor.
        """
        local, head = plain(own), shards[0]
        if all(torch.equal(local, shard) for shard in shards):
            return None
        if len(shards) == 1:
            return head
        if any(shard.dtype != head.dtype or shard.dim() != own.dim() for shard in shards):
            raise NotJoinedError("ranks have tensors of different dtypes or dimensions")
        if not own.dim():
            numbers = [shard.item() for shard in shards]
            if not own.is_complex() and follows(own.item(), numbers, len(shards), self._computed):
                return None
            raise NotJoinedError("it is one number for all samples, and does not follow from those of the ranks")
        dimension = sample_dimension(shards, local)
        if dimension:
            joined = torch.cat(list(shards), dimension)
        elif dimension == 0 or self._has_samples(shards):
            joined = self._rows.join(shards, guesses)
        elif _agree(local, shards):
            return None
        elif head.shape == own.shape and all(torch.equal(shard, head) for shard in shards):
            joined = head  # the ranks have one tensor for all samples
        elif input_ and (not self._batch[1] or len({len(shard) for shard in shards}) > 1):
            joined = self._rows.join(shards, guesses)
        else:
            shapes = ", ".join(dict.fromkeys(str(list(shard.shape)) for shard in shards))
            raise NotJoinedError(f"ranks have tensors of shape {shapes} with other values, which are not its samples")
        return None if torch.equal(local, joined) else joined

    def learn(self, own: torch.Tensor, shards: Sequence[torch.Tensor]) -> None:
        """Learn the numbers of samples from the first input of a model in a micro-batch."""
        if self._batch[0] != self._now.micro() and own.dim():
            along_rows = sample_dimension(shards, own) in (None, 0)
            self._batch = self._now.micro(), [len(shard) for shard in shards] if along_rows else []

    def _has_samples(self, shards: Sequence[torch.Tensor]) -> bool:
        sizes = self._rows.sizes or self._batch[1]
        if len(sizes) != len(shards) or not all(sizes):
            return False
        shares = {divmod(len(shard), size) for shard, size in zip(shards, sizes, strict=True)}
        return len(shares) == 1 and not shares.pop()[1]

    def end(self) -> None:
        if self._micro < 0:
            return
        calls, self._calls = self._calls, {}
        rank_calls = self._tapes.turn("calls", "all", self._micro)
        if any(isinstance(recorded, Unstored) for recorded in rank_calls) or (calls and not rank_calls):
            self._missing("the operators of a micro-batch", "not every rank has recorded them", " of one device")
            return
        for key in {key: None for recorded in [calls, *rank_calls] for key in recorded}:
            operator, line, in_graph = key
            ranks = [recorded.get(key) for recorded in rank_calls]
            if not in_graph and None in ranks:  # such as a report of rank 0
                continue
            if reason := unexplained(operator, calls.get(key), ranks, self._tapes.world, self._computed):
                self._missing(operator.removeprefix("aten::"), reason, f" at {line}")

    def judge(self, by: str, results: Iterable[torch.Tensor]) -> None:
        for result in results:
            if self.origins.of_storage(result) is Origin.OUTSIDE:
                subject = f"a tensor of shape {list(result.shape)}"
                self._missing(subject, f"{by} has computed it with data that are not replayed", "")


def _reaching(tensor: torch.Tensor, written: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensor whose data reach a loss: if an operator changes a view, also the rest of its base."""
    base = tensor._base
    return base if base is not None and any(tensor is changed for changed in written) else tensor


def _saves_elsewhere() -> bool:
    """Return whether tensors of the graph are saved before operators run: by hooks, as of a checkpointed part."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return is_within_gradients() or (top is not None and top(True) is not None)


def _stored(tensor: torch.Tensor) -> Any:
    """Return the values of a tensor for the tape; those of a sparse tensor are dense."""
    if tensor.layout is torch.strided and not tensor.is_meta:
        return tensor.detach()
    if tensor.layout is torch.strided or tensor.numel() > _LARGEST:
        return Unstored("it has no dense values")
    try:
        return tensor.detach().to_dense()
    except RuntimeError as error:  # such as of a nested tensor
        return Unstored(f"it has no dense values: {error}")


def _agree(own: torch.Tensor, shards: Sequence[torch.Tensor]) -> bool:
    """Return whether the ranks have the tensor of one device, or the beginning of a table.
    The values agree up to rounding, or have the number of ranks as a factor: then the script says so."""
    head = shards[0]
    if own.is_complex() or any(shard.shape == head.shape and not torch.equal(shard, head) for shard in shards):
        return False
    if any(size > most for shard in shards for size, most in zip(shard.shape, own.shape, strict=True)):
        return False
    finite = [shard[shard.isfinite()].double().abs() for shard in shards]
    scale = _EQUAL * max((float(values.max()) for values in finite if values.numel()), default=0.0)
    blocks = [(own[tuple(slice(size) for size in shard.shape)].double(), shard.double()) for shard in shards]
    factors = (1.0, len(shards), 1 / len(shards)) if own.is_floating_point() else (1.0,)
    return any(all(torch.allclose(block * f, rank, rtol=0, atol=scale) for block, rank in blocks) for f in factors)


_FUSED = ("attention", "rnn", "lstm", "gru", "rrelu", "_fused_dropout", "alpha_dropout", "flash")
"""Parts of the names of operators whose results are no random numbers, but computed with them."""
_ALSO = ("aten::random_", "aten::binomial")  # operators that draw, but lack torch's tag


class InterceptedDraws(TorchDispatchMode, abc.ABC):
    """Passes the draws in a graph to `take`, and other operators to `outside`.
    `replay.install` enters it for the whole process, and `Points.after_step` leaves it after the last replayed step."""

    def __init__(self, now: Points, outside: OutsideData) -> None:
        super().__init__()
        self.now, self.outside = now, outside
        self._drawing: dict[Any, bool] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not self.now.active():
            return func(*args, **kwargs)
        name = func._schema.name
        drawing = self._drawing.get(func)
        if drawing is None:
            drawing = self._drawing[func] = torch.Tag.nondeterministic_seeded in func.tags or name in _ALSO
        if drawing and (name in _ALSO or draws(func, args, kwargs)):
            graph = not name.endswith("_like") and any(tensor.grad_fn is not None for tensor in tensors_in(args))
            result = self.take(func, args, kwargs) if graph else func(*args, **kwargs)
            self.outside.origins.set(tensors_in([result]), None)
            return result
        # Models that are divided are not replayed.
        if not self.now.follows() or any(hasattr(tensor_type, "full_tensor") for tensor_type in types):
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunctionSubclass():  # a class of the user may override what is read here
            return self.outside.run(func, args, kwargs)

    @abc.abstractmethod
    def take(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of a draw: its own, which is recorded, or that of the ranks."""


def _drawn(func: Any, result: Any) -> tuple[str, Any]:
    """Return an operator's name, and the random numbers among its results; None if they are not among them."""
    name = str(func._schema.name.removeprefix("aten::"))
    drawn = result[1] if name == "native_dropout" else result
    usable = isinstance(drawn, torch.Tensor) and not hasattr(drawn, "full_tensor") and drawn.layout is torch.strided
    return name, drawn if usable and not any(fragment in name for fragment in _FUSED) else None


class RecordedDraws(InterceptedDraws):
    """Writes each draw of a rank to its tape."""

    def __init__(self, now: Points, tape: Tape, outside: OutsideData) -> None:
        super().__init__(now, outside)
        self._tape = tape

    def take(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        name, value = _drawn(func, result)
        if value is None:
            value = Unstored("the operator does not return its random numbers")
        elif value.numel() > _LARGEST:
            value = Unstored(f"it has {value.numel()} elements")
        self._tape.put("draw", f"{name} {place()} {self.now.micro()}", value)
        return result


class ReplayedDraws(InterceptedDraws):
    """Gives one device the draws of the ranks, joined along the samples.
    `missing`: called with the operator and the reason for each draw that could not be given."""

    outside: ReplayedData

    def __init__(self, now: Points, tapes: Tapes, missing: Callable[[str, str], None], outside: ReplayedData) -> None:
        super().__init__(now, outside)
        self._tapes, self._missing = tapes, missing

    def take(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = func(*args, **kwargs)
        name, own = _drawn(func, result)
        shards = self._tapes.turn("draw", f"{name} {place()}", self.now.micro())
        guesses: list[str] = []
        try:
            if not shards:
                raise NotJoinedError("not every rank draws there")
            if unstored := [shard for shard in shards if isinstance(shard, Unstored)]:
                raise NotJoinedError(unstored[0].reason)
            value = self.outside.joint(own, shards, guesses)
            if value is not None and value.shape != own.shape:
                raise NotJoinedError(f"ranks draw the shape {list(shards[0].shape)}, and one device {list(own.shape)}")
        except NotJoinedError as error:
            guesses, value = [str(error)], None
        for guess in guesses:
            self._missing(name, guess)
        if value is None:
            return result
        if name == "native_dropout":
            data, share = args[0], 1 - args[1]
            return data * value.to(data.device) * (1 / share if share else 0.0), own.copy_(value)
        return own.copy_(value)
