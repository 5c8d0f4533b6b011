"""Prepare operations on elements: elementwise operations, reductions, sorting and moving, and random numbers.

- Elementwise: operations that IEEE 754 defines bit for bit, and functions with documented error bounds. The host makes
  the same data from the same counters, and computes the reference.
- Reductions of whole numbers: results are known by algebra and exact in every order.
- Sorting, searching and moving of elements: results are known beforehand.
- Random numbers: equal for equal seeds and on all GPUs, without repeats, and well distributed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch

from mgpu_check.numerics.reduction import significand_bits
from mgpu_check.oracles.agreement import wrong_elements
from mgpu_check.oracles.devices.cases import BINARY, FUNCTIONS, UNARY, ComputeCase, Function
from mgpu_check.oracles.devices.operations import DTYPES, Judge, Prepared, evidence_of, exactly, seeded
from mgpu_check.oracles.generated_data import counted, fractions, integers

_HOST = torch.device("cpu")
_MOST = 1 << 20  # most elements per operation, because the host computes each of them too


def _shape(case: ComputeCase) -> tuple[int, ...]:
    return (min(case.size**2, _MOST),)


def _patterns(case: ComputeCase, number: int, device: torch.device) -> torch.Tensor:
    """Return elements with pseudorandom bits; floats include subnormal, infinite and NaN ones."""
    dtype = DTYPES[case.dtype]
    words = counted(_shape(case), seeded(case, number), device)
    if not dtype.is_floating_point:
        return words.to(dtype)
    width = torch.finfo(dtype).bits
    return (words >> 64 - width).to(getattr(torch, f"int{width}")).view(dtype)


def _fractions(case: ComputeCase, device: torch.device, low: float, high: float) -> list[torch.Tensor]:
    """Return the same numbers on the device and on the host."""
    options: dict[str, Any] = {"seed": seeded(case, 0), "dtype": DTYPES[case.dtype], "low": low, "high": high}
    return [fractions(_shape(case), device=location, **options) for location in (device, _HOST)]


def _same(expected: torch.Tensor) -> Judge:
    """Judge by the host's result: the same bits, or NaN in both, because no standard fixes the bits of NaN."""

    def judge(got: torch.Tensor) -> dict[str, Any]:
        on_host = got.cpu()
        mismatches = wrong_elements(on_host, expected, "values")
        return {} if mismatches is None or not mismatches.any() else evidence_of(on_host, expected, mismatches)

    return judge


def exact(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare the operators of the table that have the name of the operation."""
    rows = [(row, count) for table, count in ((BINARY, 2), (UNARY, 1)) for row in table]
    rows = [(row, count) for row, count in rows if row.operation == case.operation]
    calls = [(row.call, count) for row, count in rows]
    reference_calls = [((device.type == "cuda" and row.reference) or row.call, count) for row, count in rows]
    on_device, on_host = ([_patterns(case, number, location) for number in range(2)] for location in (device, _HOST))
    return Prepared(lambda: _called(calls, on_device), _same(_called(reference_calls, on_host)))


def _called(calls: Sequence[tuple[Function, int]], operands: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the results of calls in one tensor; each takes the first operands."""
    results: list[torch.Tensor] = []
    for call, count in calls:
        result = call(*operands[:count])
        results += [result] if isinstance(result, torch.Tensor) else result
    return torch.cat(results) if results[1:] else results[0]


def conversion(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare conversions to narrower dtypes and to integers, and back, of numbers within their range."""

    def converted(x: torch.Tensor) -> torch.Tensor:
        kinds = (torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32)
        return torch.cat([x.to(dtype).double() for dtype in kinds])

    on_device, on_host = _fractions(case, device, -6e4, 6e4)
    return Prepared(lambda: converted(on_device), _same(converted(on_host)))


def within(function: str, dtype: str, x: torch.Tensor) -> Judge:
    """Judge by a float64 reference from the host: the error must not exceed the documented one.

    The documented error counts from the correctly rounded value, so half a unit is added. In float64 another unit is
    added for the reference, a bound that C libraries and SLEEF keep. For float16 and bfloat16 no bound is documented. A
    GPU computes in float32 and rounds; a simulated GPU may take two steps in the narrow dtype, as for the reciprocal of
    a root. The last rounding costs half a unit, and the error of the first step one.
    """
    row, narrow = FUNCTIONS[function], DTYPES[dtype]
    reference = row.call(x.double())
    units = row.double + 1.5 if dtype == "float64" else row.single + 0.5 + 2.0**-20
    if significand_bits(narrow) < significand_bits(torch.float32):
        units = 1.5

    def judge(got: torch.Tensor) -> dict[str, Any]:
        on_host = got.cpu()
        larger = torch.maximum(on_host.double().abs(), reference.abs())
        unit = torch.ldexp(torch.ones_like(larger), torch.frexp(larger).exponent - significand_bits(narrow))
        mismatches = ~((on_host.double() - reference).abs() <= units * unit)  # true for NaN
        return evidence_of(on_host, reference.to(narrow), mismatches) if bool(mismatches.any()) else {}

    return judge


def bounded(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare the function of the table that has the name of the operation."""
    row = FUNCTIONS[case.operation]
    on_device, on_host = _fractions(case, device, *row.arguments)
    # The bounds are NVIDIA's, so GPUs of other makers are only compared with each other.
    judge = within(case.operation, case.dtype, on_host) if torch.version.hip is None else None
    return Prepared(lambda: row.call(on_device), judge)


_TERMS = 8


def rows_with_known_sums(case: ComputeCase, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return a matrix of whole numbers from -7 to 7, float64, and the sums of its rows.
    A row is [x, y, -x], so its sum is that of y, which has 8 or 9 numbers."""
    half = (case.size - _TERMS) // 2
    x, y = (
        integers((case.size, width), -7, 7, seed=seeded(case, i), device=device, dtype=torch.float64)
        for i, width in enumerate((half, case.size - 2 * half))
    )
    sums = y[:, 0].clone()
    for column in y.unbind(dim=1)[1:]:
        sums += column
    return torch.cat([x, y, -x], dim=1), sums


def sums(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare sums of rows, and of the columns of the transposed matrix; sums of uint8 are modulo 256."""
    matrix, sums = rows_with_known_sums(case, device)
    dtype = DTYPES[case.dtype]
    rows, sums = (x.to(torch.int64).to(dtype) if dtype == torch.uint8 else x.to(dtype) for x in (matrix, sums))
    columns = rows.t().contiguous()
    return Prepared(
        lambda: torch.cat([rows.sum(dim=1, dtype=dtype), columns.sum(dim=0, dtype=dtype)]), exactly(sums.repeat(2))
    )


def means(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare means of rows whose length is a power of two."""
    matrix, _ = rows_with_known_sums(case, device)
    columns = 1 << (case.size.bit_length() - 1)
    wanted = matrix[:, :columns]
    sums = wanted.to(torch.int64).sum(dim=1)
    # Narrow dtypes round the mean once: its sum is below 2^24, and so exact in float32.
    expected = (sums.to(torch.float64) / columns).to(torch.float64 if case.dtype == "float64" else torch.float32)
    rows = wanted.to(DTYPES[case.dtype]).contiguous()
    return Prepared(lambda: rows.mean(dim=1), exactly(expected.to(rows.dtype)))


def extremes(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare minima and maxima of rows with their indices; both were put at drawn places."""
    dtype = DTYPES[case.dtype]
    low = 10 if dtype == torch.uint8 else -100
    matrix = integers((case.size, case.size), low, 100, seed=seeded(case, 0), device=device, dtype=torch.int64)
    places = integers((2, case.size), 0, case.size // 2 - 1, seed=seeded(case, 1), device=device)
    places[1] += case.size // 2
    least, greatest = low - 7, 111
    rows = torch.arange(case.size, device=device)
    matrix[rows, places[0]], matrix[rows, places[1]] = least, greatest
    values = matrix.to(dtype)
    expected = torch.stack([torch.full_like(rows, least), torch.full_like(rows, greatest), *places])

    def call() -> torch.Tensor:
        low, high = values.min(dim=1), values.max(dim=1)
        return torch.stack([low.values.to(torch.int64), high.values.to(torch.int64), low.indices, high.indices])

    return Prepared(call, exactly(expected))


def cumulative_sums(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare the cumulative sum of the differences of numbers, which gives the numbers back."""
    dtype = DTYPES[case.dtype]
    low, high = (0, 200) if dtype == torch.uint8 else (-60, 60)
    numbers = integers((case.size, case.size), low, high, seed=seeded(case, 0), device=device)
    steps = torch.diff(numbers, dim=1, prepend=torch.zeros_like(numbers[:, :1])).to(dtype)
    return Prepared(lambda: steps.cumsum(dim=1, dtype=dtype), exactly(numbers.to(dtype)))


def counts(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare counts of nonzero elements; their number was drawn for each row."""
    dtype = DTYPES[case.dtype]
    counts = integers((case.size,), 0, case.size, seed=seeded(case, 0), device=device)
    places = torch.arange(case.size, device=device)
    # Spread over the row: step and size have no common factor, so each place gets a different number.
    step = next(step for step in itertools.count(7) if math.gcd(step, case.size) == 1)
    order = places * step % case.size
    matrix = ((order[None, :] < counts[:, None]).to(torch.int64) * (order % 100 + 1)).to(dtype)
    return Prepared(lambda: torch.count_nonzero(matrix, dim=1), exactly(counts))


def logsumexp(case: ComputeCase, device: torch.device) -> Prepared:
    shape = case.size, case.size
    x = fractions(shape, seed=seeded(case, 0), device=device, dtype=DTYPES[case.dtype], high=9.0)
    return Prepared(lambda: torch.logsumexp(x, dim=1))


_LARGEST_NUMBERS = {"float16": 2048, "bfloat16": 256, "int16": 2**15 - 1, "int8": 127, "uint8": 255}
_FACTOR = 0x9E3779B1  # odd, and prime: any length below it is coprime to it


def _numbers(case: ComputeCase, places: torch.Tensor) -> torch.Tensor:
    """Return the numbers at `places` of an ascending sequence of size² numbers.
    They differ if the dtype has as many numbers."""
    count = case.size**2
    most = _LARGEST_NUMBERS.get(case.dtype, 2**24)
    low = 0 if case.dtype == "uint8" else -min(most, count // 2)
    span = min(most, count + low - 1) - low + 1
    return (places * span // count + low).to(DTYPES[case.dtype])


def _permutation(case: ComputeCase, device: torch.device) -> torch.Tensor:
    """Return a permutation of range(size²), int64, made by arithmetic alone."""
    count = case.size**2
    start = case.seed * 7919 % count
    return (torch.arange(count, device=device) * (_FACTOR % count) + start) % count


def _mixed_up(case: ComputeCase, device: torch.device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (ascending numbers, permutation, permuted numbers)."""
    ascending = _numbers(case, torch.arange(case.size**2, device=device))
    permutation = _permutation(case, device)
    return ascending, permutation, ascending[permutation]


def sort(case: ComputeCase, device: torch.device) -> Prepared:
    ascending, _, mixed = _mixed_up(case, device)
    return Prepared(lambda: torch.sort(mixed).values, exactly(ascending))


def topk(case: ComputeCase, device: torch.device) -> Prepared:
    ascending, _, mixed = _mixed_up(case, device)
    count = min(case.size, 1024)
    return Prepared(lambda: torch.topk(mixed, count).values, exactly(ascending[-count:].flip(0)))


def search(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare a search for each number among the ascending ones; it must find the first place that holds the number."""
    ascending, _, mixed = _mixed_up(case, device)
    count = case.size**2
    new = torch.ones(count, dtype=torch.int64, device=device)
    new[1:] = ascending[1:] != ascending[:-1]
    starts = torch.arange(count, device=device).mul_(new).cummax(dim=0).values
    order = _permutation(case, device)
    return Prepared(lambda: torch.searchsorted(ascending, mixed), exactly(starts[order]))


def gather(case: ComputeCase, device: torch.device) -> Prepared:
    ascending, permutation, _ = _mixed_up(case, device)
    # Place p of the result holds number permutation[p]: known by arithmetic, without another index.
    expected = _numbers(case, permutation)
    return Prepared(lambda: torch.gather(ascending, 0, permutation), exactly(expected))


def scatter(case: ComputeCase, device: torch.device) -> Prepared:
    ascending, permutation, mixed = _mixed_up(case, device)
    return Prepared(lambda: torch.zeros_like(mixed).scatter_(0, permutation, mixed), exactly(ascending))


def index(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare an index by drawn rows, an assignment by index, and masks."""
    dtype = DTYPES[case.dtype]
    row_values = (torch.arange(case.size, device=device) % 100).to(dtype)
    matrix = row_values[:, None].expand(case.size, case.size).contiguous()
    rows = integers((case.size,), 0, case.size - 1, seed=seeded(case, 0), device=device)
    keep = torch.arange(case.size, device=device) % 3 == case.seed % 3

    def call() -> torch.Tensor:
        copy = torch.empty_like(matrix)
        copy[torch.arange(case.size, device=device).flip(0)] = matrix
        return torch.cat([matrix[rows], copy, matrix[keep], torch.where(keep[:, None], matrix, copy)])

    kept = torch.arange(case.seed % 3, case.size, 3, device=device)
    positions = torch.arange(case.size, device=device)
    chosen = torch.cat([rows, positions.flip(0), kept, positions + (case.size - 1 - 2 * positions) * (~keep)]) % 100
    return Prepared(call, exactly(chosen.to(dtype)[:, None].expand(-1, case.size)))


def transpose(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare copies of a transposed and of a rolled matrix, for strided reads and writes."""
    dtype = DTYPES[case.dtype]
    words = counted((case.size, case.size), seeded(case, 0), device)
    positions = torch.arange(case.size, device=device)
    turned = counted((case.size**2,), seeded(case, 0), device)[positions[None, :] * case.size + positions[:, None]]

    matrix, turned, rolled = ((x & 127).to(dtype) for x in (words, turned, words[(positions - 3) % case.size]))
    expected = torch.cat([turned, rolled])
    return Prepared(lambda: torch.cat([matrix.t().contiguous(), torch.roll(matrix, 3, dims=0)]), exactly(expected))


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
            message = "the second draw repeats the first" if same else "words come more than once"
            return {"errors": len(words) - distinct, "elements": len(words), "what": message}
        most = math.sqrt(math.log(2 * 64 / _UNLIKELY) / (2 * len(words)))
        shares = [float((words >> bit & 1).double().mean()) for bit in range(64)]
        odd = {str(bit): share for bit, share in enumerate(shares) if abs(share - 0.5) > most}
        text = "bits are set too often or too seldom"
        return {"errors": len(odd), "elements": 64, "what": text, "shares": odd} if odd else {}

    return judge


def random_bits(case: ComputeCase, device: torch.device) -> Prepared:
    count = min(case.size**2, _MOST) // 2

    def call() -> torch.Tensor:
        generator = _generator(case, device)
        blocks = [torch.empty(count, dtype=torch.int64, device=device) for _ in range(2)]
        return torch.cat([block.random_(-(2**63), None, generator=generator) for block in blocks])

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
        outliers = ~(values.abs() < 8)  # true for NaN; true for a normal deviate with probability 10^-15
        share = math.log(2 / _UNLIKELY) / len(values)
        mean, square = float(values.mean()), float(values.square().mean())
        if bool(outliers.any()):
            return {"errors": int(outliers.sum()), "elements": len(values), "what": "deviates are beyond 8, or NaN"}
        if abs(mean) <= math.sqrt(2 * share) and abs(square - 1) <= 2 * math.sqrt(share) + 2 * share:
            return {}
        message = "mean or mean square does not fit a normal distribution"
        return {"errors": len(values), "elements": len(values), "what": message, "mean": mean, "mean square": square}

    return Prepared(call, judge)


def permutation(case: ComputeCase, device: torch.device) -> Prepared:
    """Prepare a permutation, which must contain each number once."""
    count = min(case.size**2, _MOST)

    def judge(got: torch.Tensor) -> dict[str, Any]:
        values = got.cpu()
        mismatches = values.sort().values != torch.arange(count, device="cpu")
        return {"errors": int(mismatches.sum()), "elements": count} if bool(mismatches.any()) else {}

    return Prepared(lambda: torch.randperm(count, generator=_generator(case, device), device=device), judge)
