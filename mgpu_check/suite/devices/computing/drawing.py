"""Check a device's random numbers: equal for equal seeds and on all GPUs, without repeats, and well distributed."""

from __future__ import annotations

import math
from typing import Any

import torch

from mgpu_check.suite.devices.computing.cases import ComputeCase
from mgpu_check.suite.devices.computing.prepared import DTYPES, Judge, Prepared

_MOST = 1 << 20
_UNLIKELY = 1e-12


def _generator(case: ComputeCase, device: torch.device) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(case.seed)


def spread(case: ComputeCase) -> Judge:
    """Judge two successive draws of random words: all words are distinct, and each bit is set about half the time.

    Among n words of 64 bits two are equal with probability n²/2^65, or 3·10^-8 for 2^20 words. The share of words with
    a given bit set deviates from a half by more than t with probability at most 2·e^(-2nt²) (Hoeffding, *Probability
    inequalities for sums of bounded random variables*, 1963). The bound t is chosen for 10^-12 over all 64 bits.
    """

    def judge(got: torch.Tensor) -> dict[str, Any]:
        words = got.cpu()
        distinct = len(words.unique())
        if distinct < len(words):
            same = bool((words[: len(words) // 2] == words[len(words) // 2 :]).all())
            what = "the second draw repeats the first" if same else "words come more than once"
            return {"errors": len(words) - distinct, "elements": len(words), "what": what}
        most = math.sqrt(math.log(2 * 64 / _UNLIKELY) / (2 * len(words)))
        shares = [float((words >> bit & 1).double().mean()) for bit in range(64)]
        odd = {str(bit): share for bit, share in enumerate(shares) if abs(share - 0.5) > most}
        return (
            {"errors": len(odd), "elements": 64, "what": "bits are set too often or too seldom", "shares": odd}
            if odd
            else {}
        )

    return judge


def random_bits(case: ComputeCase, device: torch.device) -> Prepared:
    count = min(case.size**2, _MOST) // 2

    def call() -> torch.Tensor:
        generator = _generator(case, device)
        return torch.cat(
            [
                torch.empty(count, dtype=torch.int64, device=device).random_(-(2**63), None, generator=generator)
                for _ in range(2)
            ]
        )

    return Prepared(call, spread(case))


def normal_numbers(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare normal deviates: none is beyond 8, the mean is near 0, and the mean square is near 1.

    The mean of n deviates is off by more than t with probability at most 2·e^(-nt²/2). The mean square is off by more
    than 2·√(t/n) + 2·t/n with probability at most 2·e^(-t). Source: Laurent and Massart, *Adaptive estimation of a
    quadratic functional by model selection*, 2000, lemma 1.
    """

    def call() -> torch.Tensor:
        size = min(case.size**2, _MOST)
        return torch.randn(size, generator=_generator(case, device), device=device, dtype=DTYPES[case.dtype])

    def judge(got: torch.Tensor) -> dict[str, Any]:
        values = got.cpu().double()
        wrong = ~(values.abs() < 8)  # true for NaN; true for a normal deviate with probability 10^-15
        share = math.log(2 / _UNLIKELY) / len(values)
        mean, square = float(values.mean()), float(values.square().mean())
        if bool(wrong.any()):
            return {"errors": int(wrong.sum()), "elements": len(values), "what": "deviates are beyond 8, or NaN"}
        if abs(mean) <= math.sqrt(2 * share) and abs(square - 1) <= 2 * math.sqrt(share) + 2 * share:
            return {}
        what = "mean or mean square does not fit a normal distribution"
        return {"errors": len(values), "elements": len(values), "what": what, "mean": mean, "mean square": square}

    return Prepared(call, judge)


def permutation(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare a permutation, which must contain each number once."""
    count = min(case.size**2, _MOST)

    def judge(got: torch.Tensor) -> dict[str, Any]:
        values = got.cpu()
        wrong = values.sort().values != torch.arange(count, device="cpu")
        return {"errors": int(wrong.sum()), "elements": count} if bool(wrong.any()) else {}

    return Prepared(lambda: torch.randperm(count, generator=_generator(case, device), device=device), judge)
