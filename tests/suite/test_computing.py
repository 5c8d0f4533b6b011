"""The check of arithmetic: each oracle is right on right results, and sees one wrong element."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch

from mgpu_check.devices.observations import Subject
from mgpu_check.oracles.devices import arithmetic, products
from mgpu_check.oracles.devices import cases as compute
from mgpu_check.oracles.devices.arithmetic import OPERATIONS
from mgpu_check.oracles.devices.cases import ComputeCase
from mgpu_check.oracles.devices.operations import DTYPES, CaseUnsupported, bits, evidence_of
from mgpu_check.oracles.generated_data import integers

CPU = torch.device("cpu")
GPU = Subject("gpu", (0,))
CASES = [(name, dtype) for name, dtypes in compute.OPERATIONS.items() for dtype in dtypes]
SHAPES = "products of many shapes"
OPERATIONS_OF_SHAPES = compute.OPERATIONS[SHAPES]
NARROW = ("float8_e4m3fn", "float8_e5m2", "int8")
BY_VOTE = {name for name in compute.OPERATIONS if "of random numbers" in name}


@pytest.fixture(autouse=True)
def _one_thread():
    """Operands are small: threads would wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def cases(size=32, seed=1, repeats=1):
    return [ComputeCase(name, dtype, size, seed, repeats) for name, dtype in CASES]


def looked_at(case):
    entry, *_, ballot = arithmetic.examine_case(case, CPU, GPU)
    return entry, ballot


@pytest.mark.slow
@pytest.mark.parametrize(("size", "seed"), [(32, 0), *((size, seed) for size, seed in ((48, 1), (77, 2)))])
def test_right_results_pass_and_give_the_same_ballot_again(size, seed):
    seen = [looked_at(case) for case in cases(size, seed, repeats=3)]
    assert {str(entry) for entry, _ in seen if entry.outcome != "passed"} == set()
    assert {entry.work.operations for entry, _ in seen} == {3}
    again = [looked_at(case)[1] for case in cases(size, seed)]
    assert [ballot.digest for _, ballot in seen] == [ballot.digest for ballot in again]


def spoiled(result, place):
    """A result with one element that is wrong by its second highest bit, or by its lowest where it is an integer."""
    wrong = result.clone()
    flat = bits(wrong)
    flat[place] ^= 1 << (8 * flat.element_size() - 3 if result.dtype.is_floating_point else 0)
    return flat.view(result.dtype).reshape(result.shape)


def test_each_oracle_sees_one_wrong_element_and_nan():
    missed = []
    for case in cases():
        made = OPERATIONS[case.operation](case, CPU)
        assert (made.judge is None) == (case.operation in BY_VOTE), case
        if made.judge is None:
            continue
        result = made.call()
        if result.dtype.is_floating_point and case.operation not in ("quotient", "square root"):
            spoiled_by_nan = result.clone()
            spoiled_by_nan.view(-1)[result.reshape(-1).isfinite().nonzero()[0]] = torch.nan
            assert made.judge(spoiled_by_nan), case
        place = 13 % result.numel()
        seen = made.judge(spoiled(result, place))
        if case.operation in ("random bits", "normal numbers"):
            continue  # their spread is judged, and not their elements: see below
        if seen.get("errors") != 1 and not (case.operation == "permutation" and seen):
            missed.append((str(case), seen))
        elif "indices" in seen:
            flat = 0
            for index, side in zip(seen["indices"][0], result.shape, strict=True):
                flat = flat * side + index
            assert flat == place, case
    assert missed == []


@pytest.mark.parametrize("dtype", OPERATIONS_OF_SHAPES)
def test_products_of_many_shapes_have_each_length_and_layout(dtype):
    drawn = [products.shapes_of(ComputeCase(SHAPES, dtype, 64, seed)) for seed in range(1, 8)]
    for found in drawn:
        inner = {shape.k for shape in found}
        assert {1 << power for power in range(4, 11)} <= inner and {48, 96, 192, 384, 768} <= inner
        assert dtype in NARROW or {1, 2, 3, 255, 257, 383, 385} <= inner
        assert max(shape.m for shape in found) > 48 < max(shape.n for shape in found)
    layouts = {shape.layout for found in drawn for shape in found}
    assert layouts == ({"nt"} if "float8" in dtype or dtype == "int8" else set(products.LAYOUTS))
    assert len({tuple(found) for found in drawn}) == len(drawn), "the seed changes the sizes"
    assert all(found == products.shapes_of(ComputeCase(SHAPES, dtype, 64, seed)) for seed, found in enumerate(drawn, 1))


def test_products_of_many_shapes_fit_a_small_memory_and_use_a_large_one():
    """A GPU of 16 MiB has products of size 64 at the level quick. Without a limit, some seeds filled it."""
    for seed in range(100):
        found = products.shapes_of(ComputeCase(SHAPES, "float64", 64, seed))
        kept = sum((s.k * (s.m + s.n) + 8 * s.m * s.n) * (3 if s.layout == "batched" else 1) for s in found)
        assert 8 * kept <= 16 << 19, seed
    largest = [
        max(min(s.m, s.n) for s in products.shapes_of(ComputeCase(SHAPES, "float64", size, 1))) for size in (64, 1024)
    ]
    assert largest[0] < 31 < largest[1]


@pytest.mark.parametrize("dtype", OPERATIONS_OF_SHAPES)
def test_a_wrong_product_is_named_by_its_shape(dtype):
    case = ComputeCase(SHAPES, dtype, 32, 3)
    made, drawn = products.shapes_known_by_algebra(case, CPU), products.shapes_of(case)
    result = made.call()
    assert made.judge(result) == {}
    seen = made.judge(spoiled(result, len(result) - 1))
    assert seen["errors"] == 1 and seen["products"] == [str(drawn[-1])]
    assert re.fullmatch(r"m=\d+, k=\d+, n=\d+, \w+", seen["products"][0])
    everything = made.judge(result + 1 if dtype == "int8" else result * 0 + 3000)
    assert len(everything["products"]) == 9 and everything["products"][8].startswith("and ")


@pytest.mark.parametrize("dtype", [*products.LARGEST])
def test_products_by_algebra_are_those_of_the_definition(dtype):
    a, b, product = products.factors(
        (2,), 24, 40, 16, products.LARGEST[dtype], ComputeCase("product known by algebra", dtype, 32, 5), CPU
    )
    assert torch.equal((a.unsqueeze(-1) * b.unsqueeze(-3)).sum(-2), product)
    assert a.unique().numel() > 2
    for operand in (a, b):
        assert torch.equal(operand.to(DTYPES[dtype]).double(), operand)


def test_freivalds_finds_rows_and_columns():
    a, b = (integers(shape, -31, 31, seed=i, device=CPU) for i, shape in enumerate([(70, 50), (50, 60)]))
    right = (a.double() @ b.double()).float()
    assert products.freivalds(a, b, right, 3) == {}
    wrong = right.clone()
    wrong[5, 7] += 1
    wrong[9, 40] = torch.nan
    seen = products.freivalds(a, b, wrong, 3)
    assert (seen["wrong rows"], seen["wrong columns"], seen["errors"]) == (2, 2, 2)
    assert seen["indices"] == [[5, 7], [9, 40]] and seen["share of NaN"] == 0.5
    with pytest.raises(ValueError, match=r"k=50, n=60 .* not exact in float64"):
        products.wrong_rows(a * 2**20, b * 2**20, right, 3)


def test_freivalds_draws_smaller_numbers_for_larger_sums(monkeypatch):
    largest: list[int] = []

    def drawn(shape: Any, low: int, high: int, **options: Any) -> torch.Tensor:
        largest.append(high)
        return integers(shape, low, high, **options)

    monkeypatch.setattr(products, "integers", drawn)
    for value in (2.0**20, 3.0):  # the first has sums as large as those of 16384 columns of numbers up to 256
        a, b = torch.full((2, 4), value), torch.full((4, 4), value)
        right = a.double() @ b.double()
        assert not products.wrong_rows(a, b, right, 3).any()
        right[1, 2] += 1
        assert products.wrong_rows(a, b, right, 3).tolist() == [False, True]
    assert largest == [511, 511, 1024, 1024]


def test_scores_of_attention_fit_into_the_memory_of_a_large_gpu():
    for dtype in ("float32", "float64"):
        heads, tokens, width = products._sequence(ComputeCase("attention known by algebra", dtype, 16384, 0))
        assert heads * tokens**2 * 8 * 3 < 140 << 30 and heads * tokens * width > 1 << 24


def test_freivalds_sees_a_wrong_element_whatever_it_draws(monkeypatch):
    monkeypatch.setattr(products, "_CHOICES", 1)  # the least number that can be drawn, everywhere
    assert products.wrong_rows(torch.ones(2, 2), torch.ones(2, 2), torch.tensor([[2.0, 2.0], [2.0, 3.0]]), 0)[1]


@pytest.mark.parametrize("spoil", [torch.zeros_like, lambda x: x + 0.5, lambda x: 2 * x, lambda x: x * torch.nan])
def test_normal_numbers_are_spread_as_they_should_be(spoil):
    judge = OPERATIONS["normal numbers"](ComputeCase("normal numbers", "float64", 32, 1), CPU).judge
    drawn = torch.randn(1024, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert judge(drawn) == {}
    assert judge(spoil(drawn))


@pytest.mark.parametrize("size", [35, 49, 70])
def test_counts_are_right_in_rows_of_any_length(size):
    assert looked_at(ComputeCase("count", "int64", size, 1))[0].outcome == "passed"


def test_evidence_has_the_shape_of_what_is_wrong():
    right = torch.ones(64, 64)
    got = right.clone()
    got.view(-1)[5::32] = 3.0
    seen = evidence_of(got, right, got != right)
    assert (seen["errors"], seen["period"], seen["lanes"], seen["box"]) == (128, 32, 1, [[0, 63], [5, 37]])
    assert seen["values"][0] == ["0x3f800000", "0x40400000"]
    assert seen["bits"] == dict.fromkeys(("22", "23", "24", "25", "26", "27", "28", "29", "30"), 128)


def with_call(monkeypatch, spoil):
    """One product is `spoil`ed; counts from 1."""
    name = "product known by algebra"
    prepare, times = OPERATIONS[name], []

    def prepare_spoiled(case, device):
        made = prepare(case, device)

        def call():
            times.append(1)
            return spoil(made.call(), len(times))

        return dataclasses.replace(made, call=call)

    monkeypatch.setitem(OPERATIONS, name, prepare_spoiled)
    return ComputeCase(name, "float32", 32, 0, repeats=40)


def test_one_wrong_repeat_of_many_is_found(monkeypatch):
    case = with_call(monkeypatch, lambda result, time: spoiled(result, 70) if time == 31 else result)
    entry, _ = looked_at(case)
    assert (
        entry.outcome == "failed" and entry.seen == "1 element of 1024, the first at [2, 6], not as before in repeat 30"
    )
    assert (entry.evidence["wrong results"], entry.evidence["results"], entry.evidence["repeat"]) == (1, 40, 30)


def test_a_result_that_is_wrong_each_time_is_found_by_the_oracle(monkeypatch):
    entry, _ = looked_at(with_call(monkeypatch, lambda result, time: spoiled(result, 70)))
    assert entry.seen == "1 element of 1024, the first at [2, 6], wrong in the first result"


def test_a_comparison_that_sees_nothing_is_found_out(monkeypatch):
    case = with_call(monkeypatch, lambda result, time: result)
    monkeypatch.setattr(arithmetic, "differing", lambda rows, right: torch.zeros(rows.shape[:-1], dtype=torch.int64))
    entry, _ = looked_at(case)
    assert (entry.outcome, entry.seen) == ("failed", "the device did not find an element that was changed on purpose")


def test_random_numbers_that_repeat_are_found():
    case = ComputeCase("random bits", "int64", 64, 3)
    made = OPERATIONS[case.operation](case, CPU)
    right = made.call()
    again = torch.cat([right[:2048], right[:2048]])
    assert made.judge(right) == {}
    assert made.judge(again)["what"] == "the second draw repeats the first"
    assert made.judge(right & ~8)["shares"] == {"3": 0.0}


def test_what_a_device_lacks_is_skipped(monkeypatch):
    def lacks(dtype, device):
        raise CaseUnsupported("bfloat16 needs compute capability 8.0; this device has 7.0")

    monkeypatch.setattr(arithmetic, "require", lacks)
    entry: Any
    (entry,) = arithmetic.examine_case(ComputeCase("product known by algebra", "bfloat16", 32, 0), CPU, GPU)
    assert (entry.outcome, entry.seen) == ("skipped", "bfloat16 needs compute capability 8.0; this device has 7.0")
