"""Check `torch.multinomial`: it follows the weights, never draws weight 0, and repeats nothing without replacement."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from mgpu_check.suite.common.agreement import WrongCase, named_wrong
from mgpu_check.torch_hooks.tensors import name_of

_ROWS = 1 << 13
_UNLIKELY = 1e-12
_WEIGHTS = (4.0, 0.0, 8.0, 1.0, 0.0, 2.0, 1.0)
_MANY = 257


def assert_drawn_by_weight(devices: Sequence[torch.device], seed: int = 0) -> int:
    """Assert that `torch.multinomial` draws by its weights on each device; return the number of cases.

    In n rows the share of an element deviates from its probability by more than t with probability at most 2·e^(-2nt²)
    (Hoeffding, *Probability inequalities for sums of bounded random variables*, 1963). The bound t is chosen so that a
    right generator fails a case with probability at most 10^-12.
    """
    wrong: list[WrongCase] = []
    names: set[str] = set()
    for device in devices:
        for name, what in _judged(device, seed):
            names.add(name)
            if what:
                wrong.append(WrongCase(device, name, what))
    if wrong:
        raise named_wrong(wrong, devices, len(names), "the weights")
    return len(names)


def _judged(device: torch.device, seed: int) -> Iterator[tuple[str, str]]:
    """Yield the name of each case with a description of its error on a device, or ""."""
    generator = torch.Generator(device).manual_seed(seed)
    weights = torch.tensor(_WEIGHTS, dtype=torch.float64, device="cpu")
    some = int((weights > 0).sum())
    first, second = _shares(weights)
    for dtype in (torch.float32, torch.float64):
        rows = weights.to(device, dtype).repeat(_ROWS, 1)
        drawn = torch.multinomial(rows, some, generator=generator).cpu()
        kind = f"multinomial of {name_of(dtype)}"
        yield f"{kind} without replacement", _distinct(drawn, weights) or _spread(drawn, (first, second))
        drawn = torch.multinomial(rows, 2, replacement=True, generator=generator).cpu()
        yield f"{kind} with replacement", _possible(drawn, weights) or _spread(drawn, (first, first))
    many = torch.arange(_MANY, device="cpu") % 3
    row = many.to(device, torch.float32)
    drawn = torch.multinomial(row, int((many > 0).sum()), generator=generator).cpu()
    yield f"multinomial of a vector of {_MANY} without replacement", _distinct(drawn[None], many)


def _shares(weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the probability of each element to be drawn first, and to be drawn second without replacement."""
    first = weights / weights.sum()
    odds = first / (1 - first)
    return first, first * (odds.sum() - odds)


def _possible(drawn: torch.Tensor, weights: torch.Tensor) -> str:
    if drawn.dtype != torch.int64 or bool(((drawn < 0) | (drawn >= len(weights))).any()):
        return (
            f"it drew {drawn.dtype} numbers from {drawn.min().item()} to {drawn.max().item()}, of {len(weights)} "
            "elements"
        )
    never = int((weights[drawn] == 0).sum())
    return f"{never} of {drawn.numel()} elements that it drew have the weight 0" if never else ""


def _distinct(drawn: torch.Tensor, weights: torch.Tensor) -> str:
    if what := _possible(drawn, weights):
        return what
    ordered = drawn.sort(dim=1).values
    twice = int((ordered[:, 1:] == ordered[:, :-1]).any(dim=1).sum())
    return f"{twice} of {len(drawn)} rows have an element twice" if twice else ""


def _spread(drawn: torch.Tensor, shares: Sequence[torch.Tensor]) -> str:
    most = math.sqrt(math.log(2 * len(shares) * len(shares[0]) / _UNLIKELY) / (2 * len(drawn)))
    for place, expected in enumerate(shares):
        seen = drawn[:, place].bincount(minlength=len(expected)) / len(drawn)
        off = (seen - expected).abs()
        if bool((off > most).any()):
            element = int(off.argmax())
            return (
                f"draw {place} is element {element} in a share of {seen[element].item():.4f} of {len(drawn)} rows, "
                f"expected {expected[element].item():.4f} to within {most:.4f}"
            )
    return ""
