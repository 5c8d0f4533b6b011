"""Hypotheses on a failure, each computed in a rank.

Either parts of the batch give the results (computed as on one device, in a rank that is alone in its world), or the
step leaves something on the CPU (it is tried again with the model or the batch on the device of the rank).
"""

from __future__ import annotations

import functools
import itertools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from mgpu_check.diagnosis.observations import Alternative, Division, Hypotheses, Other, Result
from mgpu_check.engine.failures import Account
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import RankDied, RankFailure, RankHang
from mgpu_check.gates.gate_arguments import Program, bound, modules_of
from mgpu_check.gates.run.shards import parameters_of
from mgpu_check.gates.run.step_runs import observe
from mgpu_check.gates.search.scenarios import Scenario, has_padding, samples_in
from mgpu_check.torch_hooks.nested import tensors_of, with_tensors
from mgpu_check.torch_hooks.switches import one_thread, seed_everything

_BOTH = ("model", "batch")
_SENTENCES = {
    ("batch",): "the batch arrives on the CPU: move it to rank.device",
    ("model",): "the model arrives on the CPU: move it to rank.device",
    _BOTH: "model and batch arrive on the CPU: move both to rank.device",
}
_OF_EVALUATION = "the batch of evaluate arrives on the CPU: move it to the device of the model"


def left_on_cpu(program: Any, error: BaseException, run: Callable[[Any], object]) -> str | None:
    """Return a sentence about what a failed step leaves on the CPU; None if it also fails with that moved.

    `program` is a dataclass with the step as a field, and `run` runs such a program on ranks.
    """
    # Only code that raised may have missed a device; a hang would cost another time limit.
    account = getattr(error, "account", None)
    if not (isinstance(account, Account) and account.raised):
        return None

    def fails(**changes: Any) -> bool:
        try:
            run(replace(program, **changes))
        except RankDied:
            raise
        except RankFailure:
            return True
        return False

    try:
        evaluate = getattr(program, "evaluate", None)
        if not fails(step=_MovedStep(program.step, _BOTH)):
            single = (moved for moved in _SENTENCES if moved != _BOTH)
            moved = next((moved for moved in single if not fails(step=_MovedStep(program.step, moved))), _BOTH)
            sentence = _SENTENCES[moved]
        elif evaluate is not None and not fails(evaluate=_MovedEvaluation(evaluate)):
            sentence = _OF_EVALUATION
        else:
            return None
        return sentence if fails() else None  # the failure may not repeat
    except (RankDied, RankHang):
        return None


@dataclass
class _MovedStep:
    step: Callable[..., Any]
    moved: tuple[str, ...]

    def __call__(self, model: Any, batch: Any, rank: Rank) -> Any:
        if "model" in self.moved:
            for module in modules_of(model).values():
                module.to(rank.device)
        if "call" not in vars(self):
            self.call = bound(self.step, model, rank)
        return self.call(_moved(batch, rank.device) if "batch" in self.moved else batch)


@dataclass(frozen=True)
class _MovedEvaluation:
    evaluate: Callable[[Any, Any], Any]

    def __call__(self, model: torch.nn.Module, batch: Any) -> Any:
        return self.evaluate(model, _moved(batch, next(model.parameters()).device))


def _moved(batch: Any, device: torch.device) -> Any:
    return with_tensors(batch, [tensor.to(device) for tensor in tensors_of(batch)])


_GROUPS = 8  # most groups of biases that are tried one by one, since each costs a run

Alter = Callable[[Any], Any]
Values = dict[Result, torch.Tensor]


def run_hypotheses(rank: Rank, program: Program, scenario: Scenario, windows: int) -> Hypotheses:
    """Run the reference, or the step at world size 1, on parts of the batch and on batches that mistakes make."""
    size = scenario.world_size
    divisions: list[Division] = []
    with one_thread():
        for name, along, take_shard in _ways(size):
            for count in dict.fromkeys((1, windows)):
                divisions += filter(None, [_divide(rank, program, scenario, name, along, take_shard, count)])
        alternatives = [
            Alternative(alteration, values, index)
            for alteration, index, alter in _alternatives(size)
            if (values := _run(rank, program, scenario, alter)) is not None
        ]
        for index, bias_names in enumerate(_biases(program)):
            build = functools.partial(_build_with, program.build, dict.fromkeys(bias_names, lambda value: value * size))
            of_model = replace(program, build=build)
            if (values := _run(rank, of_model, scenario, lambda batch: batch)) is not None:
                alternatives.append(Alternative("biases-several-times", values, index, bias_names))
        seed_everything(1000 * scenario.seed)
        batch = scenario.batches[0] if program.batch is None else program.batch(scenario.samples)
    return Hypotheses(divisions, alternatives, has_padding(batch))


def _biases(program: Program) -> list[tuple[str, ...]]:
    """Return groups of biases that one line of code adds: biases with the same last two names; and all biases."""
    groups: dict[str, list[str]] = {}
    for name, value in parameters_of(modules_of(program.build())):
        if name.rpartition(".")[2] == "bias" and value.dim() == 1 and value.is_floating_point():
            groups.setdefault(".".join(name.split(".")[-2:]), []).append(name)
    biases = [tuple(group) for group in groups.values()][:_GROUPS]
    return biases if len(groups) < 2 else [*biases, tuple(itertools.chain.from_iterable(groups.values()))]


def _build_with(build: Callable[[], Any], altered: Mapping[str, Callable[[torch.Tensor], torch.Tensor]]) -> Any:
    model = build()
    for name, value in parameters_of(modules_of(model)):
        if name in altered:
            value.data = altered[name](value.data)
    return model


_MOST_ORDERS = 64  # most orders of blocks that are tried, since each costs a run
_NEAR = 1e-3  # tolerance of a result, as a fraction of its largest element; `Tensors` compares again, more closely


@dataclass(frozen=True)
class _Blocks:
    """Blocks of one dimension in another order: block (i, j) of `outer` x `inner` blocks is in place (j, i)."""

    outer: int
    inner: int

    def moved(self, value: torch.Tensor, dim: int, back: bool = False) -> torch.Tensor:
        outer, inner = (self.inner, self.outer) if back else (self.outer, self.inner)
        blocks: torch.Tensor = value.unflatten(dim, (outer, inner, -1)).transpose(dim, dim + 1).flatten(dim, dim + 2)
        return blocks.contiguous()


def run_block_orders(
    rank: Rank, program: Program, scenario: Scenario, results: Mapping[Result, torch.Tensor]
) -> list[Alternative]:
    """Run the reference, or the step at world size 1, with blocks of parameters in other orders.

    Returns the orders that give `results`, the values on rank 0. Such an order is in the rows of the parameters of one
    module, as for a fused weight, or also in the columns of the next one, as for attention heads.
    """
    equal: list[Alternative] = []
    with one_thread():
        parameters = {name: value.shape for name, value in parameters_of(modules_of(program.build()))}
        orders = itertools.islice(_orders(parameters, scenario.world_size), _MOST_ORDERS)
        for index, (blocks, dims) in enumerate(orders):
            altered = {name: functools.partial(blocks.moved, dim=dim) for name, dim in dims.items()}
            model = functools.partial(_build_with, program.build, altered)
            values = _run(rank, replace(program, build=model), scenario, lambda batch: batch)
            if values is None:
                continue
            for name, value in values.items():
                if name.kind in ("grads", "params") and name.of in dims and value.shape == parameters[name.of]:
                    values[name] = blocks.moved(value, dims[name.of], back=True)
            if all(name in values and _near(values[name], own) for name, own in results.items()):
                of_blocks = (f"{blocks.outer} x {blocks.inner} blocks", *dims)
                equal.append(Alternative("blocks-in-other-order", values, index, of_blocks))
    return equal


def _near(value: torch.Tensor, own: torch.Tensor) -> bool:
    if value.shape != own.shape or not value.is_floating_point():
        return value.shape == own.shape
    return bool(((value - own).abs() <= _NEAR * own.abs().max()).all())


_NUMBER = re.compile(r"\d+")


def _orders(parameters: Mapping[str, torch.Size], size: int) -> Iterator[tuple[_Blocks, dict[str, int]]]:
    """Yield orders of blocks, and the dimension of each parameter that has them."""
    counts = sorted({2, 3, 4, size} - {1})
    alike = {name: _NUMBER.sub("#", name) for name in parameters}  # layers are alike, and so are their mistakes
    several = len({*alike.values()}) < len(alike)
    for places in [alike, {name: name for name in parameters}] if several else [alike]:
        kinds: dict[tuple[str, torch.Size], list[str]] = {}
        for name, shape in parameters.items():
            kinds.setdefault((places[name], shape), []).append(name)
        modules: dict[str, list[tuple[torch.Size, list[str]]]] = {}
        for (place, shape), names in kinds.items():
            modules.setdefault(place.rpartition(".")[0], []).append((shape, names))
        rows: list[tuple[dict[str, int], int]] = []
        for own in modules.values():
            length = next((shape[0] for shape, _ in own if len(shape) == 2), 0)
            divided = [name for shape, names in own if shape[:1] == (length,) for name in names]
            rows += [(dict.fromkeys(divided, 0), length)] if length else []
        pairs = [
            (dims | dict.fromkeys(names, 1), length)
            for dims, length in rows
            for (_, shape), names in kinds.items()
            if len(shape) == 2 and shape[1] == length and not dims.keys() & {*names}
        ]
        for (dims, length), outer, inner in itertools.product([*rows, *pairs], counts, counts):
            if length % (outer * inner) == 0:
                yield _Blocks(outer, inner), dims


def _ways(size: int) -> Iterator[tuple[str, int, Callable[[torch.Tensor, int], torch.Tensor]]]:
    ordinal = f"{size}th" if size > 3 else {2: "2nd", 3: "3rd"}.get(size, "")
    yield f"every {ordinal} sample", 0, lambda leaf, index: leaf[index::size]
    yield "blocks of samples", 0, lambda leaf, index: leaf.tensor_split(size)[index]
    yield "chunks of samples", 0, lambda leaf, index: (*leaf.chunk(size), *[leaf[:0]] * size)[index]
    yield "blocks of positions", 1, lambda leaf, index: leaf.tensor_split(size, dim=1)[index]
    yield "every other position", 1, lambda leaf, index: leaf[:, index::size]


def _divide(
    rank: Rank,
    program: Program,
    scenario: Scenario,
    name: str,
    along: int,
    take_shard: Callable[[torch.Tensor, int], torch.Tensor],
    windows: int,
) -> Division | None:
    results_by_rank: list[list[Values]] = []
    counts: list[int] = []
    for index in range(scenario.world_size):
        mine: list[Values] = []
        extents: list[int] = []
        for window in range(windows):

            def alter(batch: Any, index: int = index, window: int = window, extents: list[int] = extents) -> Any:
                cut = _cut(batch, along, lambda leaf: take_shard(leaf, index))
                extents.append(_extent(cut, along))
                return _cut(cut, 0, lambda leaf: leaf.tensor_split(windows)[window]) if windows > 1 else cut

            values = _run(rank, program, replace(scenario, world_size=1), alter)
            if values is None and extents and extents[0]:
                return None
            mine.append({} if values is None else values)
        results_by_rank.append(mine)
        counts.append(extents[0] if extents else 0)
    return Division(name, along, windows, results_by_rank, counts) if sum(counts) else None


def _run(rank: Rank, program: Program, scenario: Scenario, alter: Alter) -> Values | None:
    try:
        with warnings.catch_warnings(action="ignore"):  # about the shapes of a changed batch
            return observe(rank, program, scenario, of_reference=program.reference is not None, alter=alter).values
    except Exception:  # this hypothesis cannot be tried
        return None


def _cut(batch: Any, along: int, take_shard: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return `batch` with the part of each tensor that has the divided dimension; other tensors stay whole."""
    leaves = tensors_of(batch)
    extent = _extent(batch, along)
    new = [take_shard(leaf) if _divisible(leaf, along, extent) else leaf for leaf in leaves]
    if not extent or all(cut is leaf for cut, leaf in zip(new, leaves, strict=True)):
        raise ValueError("nothing to divide")
    return with_tensors(batch, new)


def _divisible(leaf: torch.Tensor, along: int, extent: int) -> bool:
    return leaf.dim() > along and leaf.shape[along] == extent


def _extent(batch: Any, along: int) -> int:
    if along == 0:
        return samples_in(batch)
    return next((leaf.shape[1] for leaf in tensors_of(batch) if leaf.dim() > 1), 0)


def _alternatives(size: int) -> Iterator[tuple[Other, int, Alter]]:
    def selected(order: Callable[[int], list[int]]) -> Alter:
        return lambda batch: _cut(batch, 0, lambda leaf: leaf[order(len(leaf))])

    yield "truncated", 0, selected(lambda n: list(range(n - n % size)))
    yield "padded", 0, selected(lambda n: [sample % n for sample in range(-(-n // size) * size)])
    yield "first-shard-only", 0, selected(lambda n: list(range(0, n, size)))
    yield "first-block-only", 0, selected(lambda n: list(range(-(-n // size))))
    for index in range(4):
        yield "first-part-of-a-tensor", index, functools.partial(_with_first_part, size=size, index=index)
    for index in range(4):
        yield "tensor-several-times", index, functools.partial(_with_repeated, size=size, index=index)


def _with_repeated(batch: Any, size: int, index: int) -> Any:
    """Repeat the positions of one tensor, as if each rank added its copy."""
    leaves = tensors_of(batch)
    leaves[index] = leaves[index].repeat(1, size, *[1] * (leaves[index].dim() - 2))
    return with_tensors(batch, leaves)


def _with_first_part(batch: Any, size: int, index: int) -> Any:
    leaves = tensors_of(batch)
    leaf = leaves[index]
    if not _divisible(leaf, 0, samples_in(batch)):
        raise ValueError("nothing to repeat")
    leaves[index] = torch.cat([leaf[: len(chunk)] for chunk in leaf.chunk(size)])
    return with_tensors(batch, leaves)
