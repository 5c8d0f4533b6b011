"""Collect the answers of a trained model on a rank, and compare them between ranks. Imports torch: for ranks only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.engine.rank_side.worker import pause
from mgpu_check.gates.gate_arguments import bound
from mgpu_check.gates.run.states import Opaque, digest_of_value, flattened, is_real
from mgpu_check.numerics.differences import difference, show
from mgpu_check.numerics.perturbation import Perturbed
from mgpu_check.numerics.reduction import unit_roundoff
from mgpu_check.numerics.steps import PAIRS, deviations, envelopes, full_precision
from mgpu_check.processes.rank_lists import few, grouped
from mgpu_check.torch_hooks.nested import named_buffers, named_parameters, tensors_of
from mgpu_check.torch_hooks.switches import seed_everything
from mgpu_check.torch_hooks.tensors import as_real, name_of, plain_copy

_SEED = 7
_SHOWN_RANKS = 8


@dataclass(frozen=True)
class Evaluated:
    """The functions and numbers of `assert_evaluation_agrees`. The gate sends one to the ranks for each case."""

    step: Callable[..., Any]  # or a class, see `bound`
    build: Callable[[], Any]
    batch: Callable[[int], Any]
    evaluate: Callable[[Any, Any], Any] | None
    steps: int
    samples: int


@dataclass(frozen=True)
class Compared:
    """A value that should be the same on all ranks, as compared."""

    # "initial", "parameter", "buffer" or "answer"; "repeated" for a second answer of the same rank; "batches" and
    # "untouched" for functions that cannot be used.
    kind: str
    name: str
    wrong: tuple[int, ...]  # the ranks that differ from rank 0; for "repeated", from their own first answer
    detail: str  # the element with the largest difference, with the values of the ranks
    rounding: bool  # whether rounding errors explain the difference


def train_and_evaluate(program: Evaluated, directory: Path, measure: bool, rank: Rank) -> str | None:
    """Train and evaluate on this rank, and save the values to compare in `directory`.

    Returns why the user's functions cannot be used, if so.
    """
    seed_everything(_SEED)
    model = program.build()
    if not isinstance(model, nn.Module):
        return f"build() returned a {type(model).__name__}; return a torch.nn.Module"
    saved: dict[str, Any] = {"initial": _state(model)}
    batches = []
    for number in range(program.steps + 1):
        seed_everything(_SEED + 1 + number)
        batches.append(program.batch(program.samples))
    *training, evaluation_batch = batches
    saved["batches"] = str({name: digest_of_value(v) for name, v in flattened(batches, strict=False).items()})
    seed_everything(_SEED)
    step = bound(program.step, model, rank)
    for number, batch in enumerate(training, start=1):
        step(batch)
        pause(f"step {number}", last=number == len(training))
    state = _state(model)
    parameters = {name for name, _ in named_parameters(model)}
    saved["parameter"] = {name: value for name, value in state.items() if name in parameters}
    saved["buffer"] = {name: value for name, value in state.items() if name not in parameters}
    model.eval()
    with torch.no_grad(), full_precision():
        # Evaluation must not depend on the seed: the seed differs between ranks and between the two runs.
        for key, seed in (("answer", 1000), ("again", 2000)):
            seed_everything(_SEED + seed + rank.index)
            try:
                saved[key] = _answer(program, model, evaluation_batch)
            except Opaque as error:
                return f"evaluate(model, batch) returned an answer that cannot be compared: {error}"
        saved["granted"] = _granted(program, model, evaluation_batch, rank) if measure else {}
    if not any(isinstance(value, torch.Tensor) for value in saved["answer"].values()):
        return "evaluate(model, batch) returned no tensor or float; return the output of the model"
    directory.mkdir(exist_ok=True)
    torch.save(saved, directory / f"{rank.index}.pt")
    return None


def _state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: plain_copy(value) for name, value in (*named_parameters(model), *named_buffers(model))}


def _answer(program: Evaluated, model: nn.Module, batch: Any) -> dict[str, Any]:
    if program.evaluate is not None:
        return flattened(program.evaluate(model, batch), "answer", take=plain_copy)
    inputs = next(iter(tensors_of(batch)), None)
    if inputs is None:
        raise ValueError(
            "batch(n) holds no tensor to call the model with; pass evaluate=, a function of model and batch"
        )
    device = next((t.device for _, t in (*named_parameters(model), *named_buffers(model))), inputs.device)
    return flattened(model(inputs.to(device)), "answer", take=plain_copy)


def _granted(program: Evaluated, model: nn.Module, batch: Any, rank: Rank) -> dict[str, torch.Tensor]:
    """Measure how far rounding may move each element of the answers, by Monte Carlo arithmetic."""
    seed_everything(_SEED + 1000 + rank.index)
    usual = {n: v.double() for n, v in _answer(program, model, batch).items() if is_real(v)}
    spread = deviations(sum(value.numel() for value in usual.values()))
    generator = torch.Generator().manual_seed(_SEED)

    def perturbed(sign: int) -> dict[str, Any]:
        seed_everything(_SEED + 1000 + rank.index)
        # The model runs in its own dtypes, so float64 is perturbed by its own roundoff.
        with Perturbed(sign * spread, generator, unit_roundoff(torch.float64)):
            return _answer(program, model, batch)

    return envelopes(usual, map(perturbed, (1, -1) * PAIRS))


def compare_ranks(directory: Path, size: int) -> list[Compared]:
    """Compare the values that `size` ranks saved. Called on one rank."""
    saved: list[dict[str, Any]] = [torch.load(directory / f"{r}.pt", weights_only=False) for r in range(size)]
    batches = grouped((values_of_rank["batches"], rank) for rank, values_of_rank in enumerate(saved))
    comparisons = [] if len(batches) == 1 else [Compared("batches", "batch", tuple(batches[1][1]), "", False)]
    pairs = [(value, own["initial"].get(name)) for own in saved for name, value in own["parameter"].items()]
    if not any(digest_of_value(value) != digest_of_value(before) for value, before in pairs):
        comparisons.append(Compared("untouched", "parameters", tuple(range(size)), "", False))
    ranks = [f"on rank {rank}" for rank in range(size)]
    for value_kind in ("initial", "parameter", "buffer", "answer"):
        granted = saved[0]["granted"] if value_kind == "answer" else {}
        comparisons += _compared(value_kind, [own[value_kind] for own in saved], ranks, granted)
    for rank, own in enumerate(saved):
        rows = _compared("repeated", [own["answer"], own["again"]], ["first", "then"], own["granted"])
        comparisons += [dataclasses.replace(row, wrong=(rank,)) for row in rows if row.wrong]
    return comparisons


def _compared(
    value_kind: str, states: list[dict[str, Any]], owners: list[str], granted: Mapping[str, torch.Tensor]
) -> Iterator[Compared]:
    for name in dict.fromkeys(name for state in states for name in state):
        values = [state.get(name) for state in states]
        digests = [digest_of_value(value) for value in values]
        differing = tuple(index for index, digest in enumerate(digests) if digest != digests[0])
        detail, rounding = _detail(values, owners, differing, granted.get(name)) if differing else ("", False)
        yield Compared(value_kind, name, differing, detail, rounding)


def _detail(
    values: list[Any], owners: list[str], differing: tuple[int, ...], granted: torch.Tensor | None
) -> tuple[str, bool]:
    """Return the values of all ranks at the largest difference, and whether all differences are within `granted`."""
    if len({_kind(value) for value in values}) > 1 or not isinstance(values[0], torch.Tensor):
        texts = [_kind(value) if isinstance(value, torch.Tensor) else repr(value)[:40] for value in values]
        return _said(texts, owners), False
    if values[0].is_complex():
        values, granted = [as_real(value) for value in values], None
    reference = values[0]
    rounding = granted is not None and all(difference(values[i], reference, 2 * granted) is None for i in differing)
    deviation = next(filter(None, (difference(values[i], reference) for i in differing)), None)
    if deviation is None:
        return "only the sign of zeros or the bits of NaN differ", True
    location = f"element {list(deviation.worst)} is " if deviation.worst else ""
    return location + _said([show(value[deviation.worst].item(), value.dtype) for value in values], owners), rounding


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {name_of(value.dtype)}"
    return type(value).__name__


def _said(texts: list[str], owners: list[str]) -> str:
    return few([f"{text} {owner}" for text, owner in zip(texts, owners, strict=True)], _SHOWN_RANKS)
