"""`assert_bitwise` on a rank: run the function again in each way that should leave its bits unchanged, and name the
first operator that gets the same operands and gives other bits.

Imports torch: for ranks only.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.gates.gate_arguments import Unusable
from mgpu_check.gates.run.states import Opaque, flattened
from mgpu_check.numerics.perturbation import effects
from mgpu_check.option_values import ArithmeticSettings, arithmetic_of_environment, parse_arithmetic
from mgpu_check.processes.collective_records import relative
from mgpu_check.processes.tracebacks import calling_line
from mgpu_check.torch_hooks.collectives import recorder
from mgpu_check.torch_hooks.nested import tensors_of, with_tensors
from mgpu_check.torch_hooks.patches import temporarily
from mgpu_check.torch_hooks.switches import seed_everything
from mgpu_check.torch_hooks.tensors import as_bits, digest_of, plain_copy

if TYPE_CHECKING:
    from mgpu_check.simulated.operators.arithmetic import Arithmetic

WAYS = {
    "repeated": "a second call with the same batch",
    "order": "another order of the additions in operators and collectives",
    "batch_size": "samples in a smaller batch",
    "position": "samples in reversed order",
    "ranks": "other world sizes",
}
"""A name for `unchanged` -> the other run that it stands for."""

_SEED = 11
_MOST_OPERATORS = 20_000  # a longer run is recorded up to this one
_COLLECTIVES = ("c10d", "_c10d_functional")
_UNINITIALIZED = ("empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided")

Results = dict[str, Any]
"""The results of one run by dotted names: CPU tensors, numbers and texts."""


@dataclass(frozen=True)
class Declaration:
    """The functions and declarations of `assert_bitwise`. The gate sends them to the ranks."""

    run: Callable[[Any, Rank], Any]
    batch: Callable[[], Any]
    unchanged: tuple[str, ...]
    others: Mapping[str, Callable[[Any, Rank], Any]]


@dataclass(frozen=True)
class OtherBits:
    """A declaration that does not hold on this rank.

    Attributes:
        way: a key of `WAYS`, or of `others`.
        change: which samples, or which world size; "" if the way says it all.
        result: the first result that differs, with its element and both values.
        facts: what else is known, a line each.
        site: the line of the first operator; "" if it is unknown.
    """

    way: str
    change: str
    result: str
    facts: tuple[str, ...] = ()
    site: str = ""


@dataclass
class Verdict:
    """The report of one rank: its results, the first declaration that fails, and results that it could not compare."""

    results: Results
    failure: OtherBits | None = None
    not_compared: list[str] = field(default_factory=list)


def examine(declaration: Declaration, of_one_device: Results | None, rank: Rank) -> Verdict:
    """Try all declared ways at this world size. `of_one_device`: the results at world size 1, for the way "ranks"."""
    return _Examination(declaration, rank).verdict(of_one_device)


@dataclass(frozen=True)
class _Run:
    """One way to call a function: with these samples, in this order, on devices that compute so."""

    function: Callable[[Any, Rank], Any]
    batch: Any
    arithmetic: Arithmetic | None
    rows: Sequence[int] | None = None  # the sample of the whole batch that is sample i; None for the whole batch


@dataclass(frozen=True)
class _Comparison:
    """Results that should have equal bits, and the run that made the second ones; None if no run explains them."""

    way: str
    change: str
    expected: Results
    results: Results
    run: _Run | None


class _Examination:
    """All runs on one rank. All ranks make the same runs in one order: the function may use collectives."""

    def __init__(self, declaration: Declaration, rank: Rank) -> None:
        self.declaration, self.rank = declaration, rank
        own = arithmetic_of_environment()
        settings = own if own.kinds else parse_arithmetic("gpu,seed=1")
        other = ArithmeticSettings(settings.kinds, (settings.seed or 0) + 1)
        # One for all runs, so that each draws other orders of atomics.
        self._arithmetic, self._other_order = _arithmetic(settings), _arithmetic(other)
        self._whole = _Run(declaration.run, declaration.batch(), self._arithmetic)
        self._sizes = {t.shape[:1] for t in tensors_of(self._whole.batch)}
        self.not_compared: list[str] = []

    def verdict(self, of_one_device: Results | None) -> Verdict:
        base = self._results(self._whole)
        failure: OtherBits | None = None
        for comparison in self._comparisons(base, of_one_device):
            text = difference_of_results(comparison.expected, comparison.results)
            failure = None if text is None else OtherBits(comparison.way, comparison.change, text)
            if self._on_any_rank(failure is not None):
                facts, site = self._facts(comparison)
                failure = failure and replace(failure, facts=facts, site=site)
                break
        return Verdict(base, failure, self.not_compared)

    def _on_any_rank(self, holds: bool) -> bool:
        if self.rank.size == 1:
            return holds
        count = torch.tensor([float(holds)], device=self.rank.device)
        recorder.aside(lambda: dist.all_reduce(count, op=dist.ReduceOp.MAX))
        return bool(count)

    def _facts(self, comparison: _Comparison) -> tuple[tuple[str, ...], str]:
        """Run both again, on all ranks; return what is known of the first operator of other bits, and its line."""
        if comparison.run is None:
            return (), ""
        before, after = self._recorded(self._whole), self._recorded(comparison.run)
        fact, site = first_other_operator(before, after, comparison.run.rows)
        return (fact, *[self._deterministic()] * (comparison.way == "repeated")), site

    # ------------------------------------------------------------------------------------------------ the comparisons

    def _comparisons(self, base: Results, of_one_device: Results | None) -> Iterator[_Comparison]:
        for way in self.declaration.unchanged:
            if way == "repeated":
                yield self._comparison(way, base, self._whole)
            elif way == "order" and self._other_order is not None:
                yield self._comparison(way, base, replace(self._whole, arithmetic=self._other_order))
            elif way == "order":
                self.not_compared.append("order: only simulated devices can change the order of additions (--simulate)")
            elif way == "ranks" and of_one_device is not None:
                change = f"world size {self.rank.size} gives other bits than one device"
                yield _Comparison(way, change, of_one_device if base else {}, base, None)
            elif way in ("batch_size", "position"):
                yield from self._of_samples(way, base)
        for name, other in self.declaration.others.items():
            yield self._comparison(name, base, replace(self._whole, function=other))

    def _comparison(self, way: str, base: Results, run: _Run) -> _Comparison:
        return _Comparison(way, "", base, self._results(run), run)

    def _of_samples(self, way: str, base: Results) -> Iterator[_Comparison]:
        """Compare the results of some samples, or of all in another order, with those in the whole batch."""
        count, size = self._samples(way), self.rank.size
        half = max(count // 2 // size * size, size)
        parts: tuple[Sequence[int], ...] = (range(half), range(count - size, count), range(size))
        names = self._of_each_sample(way, base, count)
        batch = self._whole.batch
        for rows in parts if way == "batch_size" else (range(count)[::-1],):
            change = f"samples {_span(rows)} alone" if way == "batch_size" else f"{count} samples in reversed order"
            chosen = with_tensors(batch, [t[list(rows)] for t in tensors_of(batch)])
            run = replace(self._whole, batch=chosen, rows=rows)
            results = self._results(run)
            expected = {name: base[name][list(rows)] for name in names}
            yield _Comparison(way, change, expected, {name: results[name] for name in names if name in results}, run)

    def _of_each_sample(self, way: str, base: Results, count: int) -> list[str]:
        """Return the results with the samples as their first dimension."""
        tensors = {name: value for name, value in base.items() if isinstance(value, torch.Tensor)}
        names = sorted(name for name, value in tensors.items() if value.shape[:1] == (count,))
        if base and not names:
            raise Unusable(
                f"{way!r} compares the results of each sample, but no result of run has {count} as its first "
                f"dimension, the number of samples; there are {_listed(base)}"
            )
        for name in base.keys() - set(names):
            line = f"{name} with other samples: its first dimension is not that of the {count} samples"
            self.not_compared += [line] * (line not in self.not_compared)
        return names

    def _samples(self, way: str) -> int:
        if len(self._sizes) != 1 or () in self._sizes:
            raise Unusable(f"{way!r} needs a batch whose tensors all have the samples as their first dimension")
        (count,) = (size[0] for size in self._sizes)
        if count < 2 * self.rank.size:
            raise Unusable(
                f"{way!r} needs a batch of at least {2 * self.rank.size} samples at world size {self.rank.size}; "
                f"batch() returned {count}"
            )
        return count

    # ------------------------------------------------------------------------------------------------------- the runs

    def _results(self, run: _Run) -> Results:
        batch = with_tensors(run.batch, [t.clone() for t in tensors_of(run.batch)])
        with _computing(run.arithmetic):
            seed_everything(_SEED)
            value = run.function(batch, self.rank)
        if value is None:
            return {}
        try:
            return flattened(value, take=plain_copy)
        except Opaque as error:
            raise Unusable(f"run(batch, rank) returned what cannot be compared: {error}") from None

    def _recorded(self, run: _Run) -> list[OperatorCall]:
        samples = next((t.size(0) for t in tensors_of(run.batch) if t.dim()), 1)
        with _Recorder(samples) as operators:
            self._results(run)
        return operators.calls

    def _deterministic(self) -> str:
        """Return whether torch's deterministic algorithms make two calls equal."""
        if torch.are_deterministic_algorithms_enabled():
            return "torch.use_deterministic_algorithms(True) is on, and does not cover this"
        variable = "CUBLAS_WORKSPACE_CONFIG"
        with (
            mock.patch.dict(os.environ, {variable: os.environ.get(variable, ":4096:8")}),
            temporarily(torch.use_deterministic_algorithms, True, False),
        ):
            try:
                differs = difference_of_results(self._results(self._whole), self._results(self._whole))
            except RuntimeError as error:
                return f"torch.use_deterministic_algorithms(True) raises: {str(error).splitlines()[0]:.100}"
        verdict = "have equal bits" if differs is None else "differ, too"
        return f"with torch.use_deterministic_algorithms(True) two calls {verdict}"


def difference_of_results(expected: Results, results: Results) -> str | None:
    """Return how the first result that differs does so; None if the bits of all are equal."""
    if odd := expected.keys() ^ results.keys():
        names = ", ".join(sorted(odd)[:4]) or "the result"
        return f"{names}: only one of the two runs returns it"
    texts = (_difference(name or "the result", value, results[name]) for name, value in expected.items())
    return next(filter(None, texts), None)


def _arithmetic(settings: ArithmeticSettings) -> Arithmetic | None:
    """Return a new arithmetic for simulated devices; None on real ones."""
    from mgpu_check import simulated

    if simulated.simulated_device_count() is None:
        return None
    from mgpu_check.simulated.operators import arithmetic

    return arithmetic.Arithmetic(settings)


def _computing(chosen: Arithmetic | None) -> AbstractContextManager[object]:
    """Let simulated devices compute so."""
    if chosen is None:
        return contextlib.nullcontext()
    from mgpu_check.simulated import dispatch
    from mgpu_check.simulated.operators import arithmetic

    return temporarily(dispatch.use_arithmetic, chosen, arithmetic.present)


def _span(rows: Sequence[int]) -> str:
    return str(rows[0]) if len(rows) == 1 else f"{rows[0]} to {rows[-1]}"


def _listed(results: Results) -> str:
    shapes = [
        f"{name or 'the result'} {tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__}"
        for name, value in results.items()
    ]
    return ", ".join(shapes[:4])


def _difference(name: str, expected: Any, value: Any) -> str | None:
    """Return how two results differ, with the first element and both values; None if their bits are equal."""
    if not isinstance(expected, torch.Tensor) or not isinstance(value, torch.Tensor):
        return (
            None if type(expected) is type(value) and expected == value else f"{name}: {expected!r:.40}, {value!r:.40}"
        )
    if expected.shape != value.shape or expected.dtype != value.dtype:
        described = [f"{tuple(t.shape)} of {str(t.dtype).removeprefix('torch.')}" for t in (expected, value)]
        return f"{name}: {described[0]}, {described[1]}"
    other = as_bits(expected.contiguous()) != as_bits(value.contiguous())
    if not bool(other.any()):
        return None
    place = other.nonzero()[0].tolist()
    index = f"[{', '.join(map(str, place))}]" if place else ""
    first, second = expected[tuple(place)].item(), value[tuple(place)].item()
    count = f"{int(other.sum())} of {other.numel()} elements differ"
    if not expected.is_complex():
        count += f", by at most {float((expected.double() - value.double()).abs().nan_to_num().max()):.2g}"
    return f"{name}{index}: {first!r}, {second!r}; {count}"


# ------------------------------------------------------------------------------------------------------- the operators


@dataclass(frozen=True)
class Bits:
    """The bits of an operand or a result: a digest of all, and one for each sample if dimension 0 has them."""

    shape: tuple[int, ...]
    whole: str
    samples: tuple[str, ...] = ()

    def agrees(self, other: Bits, rows: Sequence[int] | None) -> bool | None:
        """Return whether the other run has the same bits; None if the two cannot be compared.

        `rows`: the sample of this run that is sample i of the other; None for the same batch.
        """
        if rows is None or not self.samples or self.shape[1:] != other.shape[1:] or not other.samples:
            return self.whole == other.whole if self.shape == other.shape else None
        if self.shape == other.shape and self.whole == other.whole:
            return True  # such as a weight with as many rows
        return all(other.samples[i] == self.samples[row] for i, row in enumerate(rows))


@dataclass(frozen=True)
class OperatorCall:
    """One call of an operator, or of a collective, whose results come later and are not recorded."""

    name: str  # "aten.addmm"
    line: str  # of the code under test: "model.py:12"; "" if it is unknown
    module: str  # "layers.0 (Linear)"; "" outside modules, and in backward
    backward: bool
    operands: tuple[Bits, ...]
    results: tuple[Bits, ...]

    def __str__(self) -> str:
        shapes = ", ".join(str(list(bits.shape)) for bits in self.operands[:3])
        where = [f"at {self.line}"] * bool(self.line) + [f"in {self.module}"] * bool(self.module)
        return " ".join([f"{self.name}({shapes})", *["in backward"] * self.backward, *where])


class _Recorder(TorchDispatchMode):
    """Records the bits of all operators of a run. `samples`: the number of samples of its batch."""

    def __init__(self, samples: int) -> None:
        super().__init__()
        self.calls: list[OperatorCall] = []
        self._samples, self._names, self._stack = samples, {}, []  # type: tuple[int, dict[int, str], list[str]]
        self._hooks = contextlib.ExitStack()

    def __enter__(self) -> _Recorder:
        for handle in (
            register_module_forward_pre_hook(self._entered),
            register_module_forward_hook(self._left, always_call=True),
        ):
            self._hooks.callback(handle.remove)
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.close()

    def _entered(self, module: nn.Module, args: Any) -> None:
        if id(module) not in self._names:
            self._names.update({id(inner): name for name, inner in module.named_modules()})
        name = self._names[id(module)]
        self._stack.append(f"{name} ({type(module).__name__})" if name else type(module).__name__)

    def _left(self, module: nn.Module, args: Any, output: Any) -> None:
        self._stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.rpartition("::")[2]
        computes, _ = effects(func)
        if len(self.calls) >= _MOST_OPERATORS or not computes:  # equal runs may make other numbers of views
            return func(*args, **(kwargs or {}))
        operands = tuple(self._bits(t) for t in tree_leaves((args, kwargs or {})) if isinstance(t, torch.Tensor))
        result = func(*args, **(kwargs or {}))
        if name in _UNINITIALIZED:
            result.zero_()  # or its first bits would differ, which are never read
            return result
        made = [] if func.namespace in _COLLECTIVES else [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
        if func._schema.is_mutable and not made:  # such as of the foreach operators
            made = [t for t in tree_leaves(args) if isinstance(t, torch.Tensor)]
        file, number = calling_line()
        backward = torch._C._current_graph_task_id() != -1
        self.calls.append(
            OperatorCall(
                f"{func.namespace}.{name}",
                f"{relative(file)}:{number}" if file else "",
                self._stack[-1] if self._stack and not backward else "",
                backward,
                operands,
                tuple(map(self._bits, made)),
            )
        )
        return result

    def _bits(self, tensor: torch.Tensor) -> Bits:
        local = getattr(tensor, "_local_tensor", tensor)
        value = plain_copy(local) if local.layout is torch.strided and not local.is_meta else torch.empty(0)
        shape, count = tuple(tensor.shape), self._samples
        parts = value.chunk(count) if count > 0 and shape and shape[0] and shape[0] % count == 0 else ()
        return Bits(shape, digest_of(value), tuple(map(digest_of, parts)))


def first_other_operator(
    before: Sequence[OperatorCall], after: Sequence[OperatorCall], rows: Sequence[int] | None
) -> tuple[str, str]:
    """Return what is known of the first operator that makes other bits, as a line, and the line of its call.

    `before`: the operators with the whole batch. `after`: those of the other run, whose sample i is sample `rows[i]`.
    """
    collective = None
    for one, two in zip(before, after, strict=False):
        if one.name != two.name or len(one.operands) != len(two.operands):
            return f"from {one} on the runs call other operators: {two.name}", one.line
        operands = [a.agrees(b, rows) for a, b in zip(one.operands, two.operands, strict=True)]
        results = [a.agrees(b, rows) for a, b in zip(one.results, two.results, strict=False)]
        if False in operands:
            last = f"; the last collective before it: {collective}" if collective is not None else ""
            return f"the first operator with other operands is {one}{last}", one.line
        if False in results and None not in operands:
            return f"the first operator with the same operands and other results is {one}", one.line
        if one.name.partition(".")[0] in _COLLECTIVES:
            collective = one
    if len(before) >= _MOST_OPERATORS:
        return f"the first {_MOST_OPERATORS} operators have equal results", ""
    return "with memory that is zero before it is written, all operators give the same bits in two further runs", ""
