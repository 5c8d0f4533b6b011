"""Check that operators on DTensors give the results and gradients of whole tensors, for each placement."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.nn import functional as F

from mgpu_check.asserts.known_defects import is_known, known_defect, left_out
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.sharded.operator_rows import OF_ALIKE, OF_ONE, lacks
from mgpu_check.suite.sharded.redistribution import part_of, placed, require_none_wrong, text_of
from mgpu_check.torch_hooks.tensors import plain

_DIVIDED: tuple[Placement, ...] = (Shard(0), Shard(1), Partial("sum"))
_PLACES: tuple[Placement, ...] = (*_DIVIDED, Replicate())


def assert_operators_agree(rank: Rank, seed: int, *, more: bool) -> None:
    """Assert that operators on DTensors give each rank its part of the right results and gradients. A collective.

    Operands are divided unevenly, and no part is empty. Each operator runs with one placement per operand; `seed`
    selects it, and the operators. The operands are small whole numbers. Results may differ by rounding, which depends
    on how sums are divided.

    Args:
        more: whether to run half of the operators, or a quarter.
    """
    mesh = init_device_mesh("cuda", (rank.size,))
    shape = max(3, 2 * rank.size - 1), max(5, 3 * rank.size - 1)  # torch refuses the maximum of an empty part
    wholes = [_numbers(shape, seed + number) for number in range(2)]
    step = 2 if more else 4
    calls = list(_calls(wholes, seed // step, rank.size))[seed % step :: step]
    require_none_wrong(_described(calls, mesh), rank)


_Call = tuple[str, Callable[..., torch.Tensor], list[torch.Tensor], tuple[Placement, ...]]


def _calls(wholes: list[torch.Tensor], seed: int, ranks: int) -> Iterator[_Call]:
    for number, (name, unary) in enumerate(OF_ONE, seed):
        # Norms of partial tensors have no gradient. Before 2.12 and since 2.14 torch refuses `add_` to them.
        places = _DIVIDED[:2] if "norm" in name or name == "in place" else _DIVIDED
        if name == "rms_norm" and ranks == 1:
            places = _DIVIDED[:1]  # on one rank torch refuses `rms_norm` of divided columns
        yield name, unary, wholes[:1], (places[number % len(places)],)
    pairs = [pair for pair in itertools.product(_PLACES, repeat=2) if pair != (Replicate(), Replicate())]
    for number, (name, binary) in enumerate(OF_ALIKE):
        yield name, binary, wholes, pairs[(seed + 4 * number) % len(pairs)]


def _described(calls: Iterable[_Call], mesh: DeviceMesh) -> Iterator[str]:
    """Yield a description of each call, "" if it is right, up to one that raises: ranks may then be out of step."""
    for name, call, wholes, places in calls:
        if lacks(name):
            left_out(name, "this torch does not have it for all placements")
            continue
        what = f"{name} of {' and '.join(text_of([place]) for place in places)}"
        try:
            judged = functools.partial(_wrong, what, call, wholes, places, mesh)
            wrong = judged()
            yield "" if name == "filled" and _fills_each_part(placed(wholes[0], places, mesh), judged, wrong) else wrong
        except Exception as error:
            if type(error).__module__ != "builtins":
                raise  # full memory and broken connections have types of their own, which show their cause
            yield f"{what} raised {type(error).__name__}: {error}"
            return


def _fills_each_part(given: DTensor, judged: Callable[..., str], wrong: str) -> bool:
    """Return whether `fill_` of a partial copy has the result of a known defect, not met if `clone` sums the parts.

    Args:
        judged: describes the error of the call by a reference.
        wrong: the error of the call.
    """
    copy, size = given.clone(), given.device_mesh.size()
    if not (isinstance(copy, DTensor) and copy.placements[0].is_partial()):
        return False
    otherwise = judged(lambda x: x.new_full(x.shape, 2.0 * size) + x)
    if wrong and otherwise:  # all ranks have computed both, because they call collectives
        return False
    return is_known("dtensor-fills-each-part", failed=bool(wrong), size=size)


def _numbers(shape: tuple[int, int], seed: int) -> torch.Tensor:
    """Return whole numbers drawn from -3 to 3, float32 on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, shape, generator=generator, device="cpu").float()


def _wrong(
    what: str,
    call: Callable[..., torch.Tensor],
    wholes: list[torch.Tensor],
    places: tuple[Placement, ...],
    mesh: DeviceMesh,
    reference: Callable[..., torch.Tensor] | None = None,
) -> str:
    """Describe the error of a call; "" if it is right: as on whole tensors, or as the `reference` is on them."""
    leaves = [whole.clone().requires_grad_() for whole in wholes]
    right = (reference or call)(*leaves)
    given = [placed(whole, [place], mesh).requires_grad_() for whole, place in zip(wholes, places, strict=True)]
    got = call(*given)
    if not isinstance(got, DTensor):
        return f"{what} is not a DTensor"
    wrong = _differs(what, got, right, mesh)
    if got.requires_grad != right.requires_grad:
        return wrong or f"{what} has requires_grad={got.requires_grad}, expected {right.requires_grad}"
    if not right.requires_grad:
        return wrong
    weights = (torch.arange(right.numel(), device="cpu").view(right.shape) % 5 - 1.0).to(right.dtype)
    back = [Replicate() if isinstance(place, Partial) else place for place in got.placements]
    # With allow_unused they may be None, which torch's annotations lack.
    expected_gradients: Any = torch.autograd.grad(right, leaves, weights, allow_unused=True)
    gradients: Any = torch.autograd.grad(got, given, placed(weights, back, mesh), allow_unused=True)
    for number, (gradient, expected) in enumerate(zip(gradients, expected_gradients, strict=True)):
        if gradient is None or expected is None:
            lost = "lost" if gradient is None else "made"
            wrong = wrong or ("" if gradient is expected else f"the gradient of operand {number} of {what} is {lost}")
            continue
        assert isinstance(gradient, DTensor)
        wrong = wrong or _differs(f"the gradient of operand {number} of {what}", gradient, expected, mesh)
    return wrong


@torch.no_grad()
def _differs(what: str, got: DTensor, right: torch.Tensor, mesh: DeviceMesh) -> str:
    if got.shape != right.shape or got.dtype != right.dtype:
        return f"{what} is {got.dtype}{list(got.shape)}, expected {right.dtype}{list(right.shape)}"
    partial = any(isinstance(place, Partial) for place in got.placements)
    here = plain(got.full_tensor() if partial else got.to_local())
    expected = right if partial else part_of(right, got.placements, mesh)
    if here.shape != expected.shape:
        return f"{what}, {text_of(got.placements)}, has a part of {list(here.shape)}, expected {list(expected.shape)}"
    off = (here.double() - expected.double()).abs()
    # Sums of fewer than 2^8 terms below 2^8 are exact; functions of these sums round about ten times.
    most = float(right.double().abs().max()) * 2.0**-18
    if bool((off <= most).all()):
        return ""
    at = int(torch.where(off.isnan(), torch.inf, off).argmax())
    values = f"got {here.flatten()[at].item()}, expected {expected.flatten()[at].item()}"
    return (
        f"{what}, {text_of(got.placements)}: {int((~(off <= most)).sum())} of {here.numel()} elements differ: {values}"
    )


_LOSSES = ("mse_loss", "l1_loss", "huber_loss", "smooth_l1_loss")
_OF_CLASSES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("nll_loss", {}),
    ("nll_loss with ignored classes", {"ignore_index": 0}),
    ("weighted nll_loss", {"weight": torch.arange(1.0, 6.0, device="cpu")}),
)


def assert_losses_agree(rank: Rank, seed: int) -> None:
    """Assert that the mean losses of DTensors average over all samples, divided evenly or not. A collective."""
    mesh = init_device_mesh("cuda", (rank.size,))
    for rows in (2 * rank.size, max(3, 2 * rank.size - 1)):
        even = rows % rank.size == 0
        x, y = _numbers((rows, 5), seed), _numbers((rows, 5), seed + 1)
        for name in _LOSSES:
            _judge_loss(name, getattr(F, name), (x, y), {}, rank, mesh)
        if even:  # torch up to 2.13 refuses nll_loss of unequal parts
            for name, options in _OF_CLASSES:
                _judge_loss(name, F.nll_loss, (x, torch.arange(rows, device="cpu") % 5), options, rank, mesh)


def _judge_loss(
    name: str,
    loss: Callable[..., torch.Tensor],
    wholes: tuple[torch.Tensor, ...],
    options: Mapping[str, torch.Tensor | int],
    rank: Rank,
    mesh: DeviceMesh,
) -> None:
    """Compare the loss of operands that are divided by samples with that of the whole operands."""
    divided = [placed(whole, [Shard(0)], mesh) for whole in wholes]
    given = {
        key: placed(value, [Replicate()], mesh) if isinstance(value, torch.Tensor) else value
        for key, value in options.items()
    }
    got = loss(*divided, **given)
    assert isinstance(got, DTensor)
    here = plain(got.full_tensor())
    rows = len(wholes[0])
    what = f"{name} of {rows} samples on {rank.size} ranks"

    def judge(right: torch.Tensor) -> None:
        if not bool((here - right).abs() <= 2.0**-18 * (right.abs() + 1)):
            require_none_wrong([f"{what}: got {here.item()}, expected {right.item()}"], rank)

    def explained() -> None:
        parts = zip(*(whole.chunk(rank.size) for whole in wholes), strict=True)
        judge(torch.stack([loss(*part, **options) for part in parts]).mean())

    even = rows % rank.size == 0
    defect = "dtensor-weighted-mean-of-parts" if "nll" in name else "dtensor-mean-of-unequal-parts"
    with known_defect(defect, explained=explained, loss=name, even=even, size=rank.size):
        judge(loss(*wholes, **options))
