"""The tolerances of steps in bfloat16 and float16: samples of their rounding errors, and what follows from them."""

import contextlib
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from mgpu_check.numerics.steps import SAMPLES, Dithered, Unnarrowed, narrow_tolerance, unit_in_last_place

NARROW = [torch.bfloat16, torch.float16]


def generator(seed):
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("dtype", [torch.float32, *NARROW])
def test_the_unit_in_the_last_place_is_the_distance_of_neighbours(dtype):
    values = torch.tensor([1.0, 1.5, -1.99, 2.0, 0.1, -300.0]).to(dtype)
    bits = values.view(torch.int16 if dtype.itemsize == 2 else torch.int32)
    neighbours = (bits + 1).view(dtype)
    assert torch.equal(unit_in_last_place(values, dtype), (neighbours.double() - values.double()).abs())
    assert unit_in_last_place(torch.zeros(2), dtype).tolist() == [0, 0]


@pytest.mark.parametrize("dtype", NARROW)
def test_some_results_of_operators_move_by_one_unit(dtype):
    x = torch.randn(64, 64, generator=generator(0)).to(dtype)
    with Dithered(generator(1)):
        moved = x * 2
    units = (moved.double() - 2 * x.double()) / unit_in_last_place(2 * x, dtype)
    assert 1 / 40 < float((units != 0).double().mean()) < 1 / 15
    assert units[units != 0].abs().max() <= 1  # half a unit below a power of two
    assert units.sign().sum().abs() < 60


def test_wide_results_zeros_copies_and_results_in_place_stay():
    x = torch.randn(64, 64, generator=generator(0))
    narrow = x.bfloat16()
    with Dithered(generator(1)):
        wide, zeros, copy, written = x * 2, narrow * 0, narrow.clone(), narrow.clone().mul_(2)
    assert torch.equal(wide, x * 2)
    assert not zeros.any()
    assert torch.equal(copy, narrow)
    assert torch.equal(written, narrow * 2)


def test_code_that_casts_stays_in_float64():
    x = torch.randn(4, 4, dtype=torch.float64, generator=generator(0))
    with Unnarrowed():
        cast, summed = x.bfloat16(), x.sum(0, dtype=torch.float32)
        made, counted = torch.zeros(2, dtype=torch.float16), x.to(torch.int64)
    assert cast.dtype == summed.dtype == made.dtype == torch.float64
    assert torch.equal(cast, x)
    assert counted.dtype == torch.int64


def step(seed, dtype, act, parts, mode=None, double=False):
    """Train a small network by hand on `parts` of a batch under a mode; return its gradients and parameters."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 16), act(), nn.Linear(16, 16), act(), nn.Linear(16, 3)).to(dtype)
    x, y = torch.randn(8, 6), torch.randn(8, 3)
    if double:
        model, x, y = model.double(), x.double(), y.double()
    gradients = [torch.zeros_like(parameter) for parameter in model.parameters()]
    with mode or contextlib.nullcontext():
        for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
            model.zero_grad()
            out = model(a.to(x.dtype if double else dtype))
            F.mse_loss(out if double else out.float(), b).backward()
            gradients = [total + parameter.grad for total, parameter in zip(gradients, model.parameters(), strict=True)]
        gradients = [total / parts for total in gradients]
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter.sub_(0.1 * gradient)
    values = gradients + [parameter.detach() for parameter in model.parameters()]
    return [value.double() for value in values]


def tolerances(seed, dtype, act):
    exact, plain = step(seed, dtype, act, 1, double=True), step(seed, dtype, act, 1)
    samples = [plain, *(step(seed, dtype, act, 1, Dithered(generator(number))) for number in range(SAMPLES))]
    count = sum(value.numel() for value in exact)
    return exact, [
        narrow_tolerance(value, [sample[place] for sample in samples], [], dtype, count)
        for place, value in enumerate(exact)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("act", [nn.Tanh, nn.GELU])
@pytest.mark.parametrize("dtype", NARROW)
def test_tolerances_hold_for_steps_in_parts_and_are_near_their_errors(dtype, act):
    largest = [0.0] * 12
    allowed = []
    for seed in range(8):
        exact, tolerance = tolerances(seed, dtype, act)
        for parts in (2, 4, 8):
            errors = [(one - value).abs() for one, value in zip(step(seed, dtype, act, parts), exact, strict=True)]
            assert all(bool((error <= wide).all()) for error, wide in zip(errors, tolerance, strict=True))
            largest = [max(known, float(error.max())) for known, error in zip(largest, errors, strict=True)]
        allowed.append(torch.stack([wide.max() for wide in tolerance]))
    ratios = torch.stack(allowed).median(0).values / torch.tensor(largest)
    assert ratios.mean() < 3.5  # 10 to 30 with perturbations of several roundoffs
    assert ratios.max() < 10  # a bias of three elements: few samples tell little


def test_a_tie_is_granted_where_a_perturbed_run_shows_it():
    exact = torch.linspace(0.1, 0.2, 8, dtype=torch.float64)
    plain = exact.bfloat16().double()
    up = plain.clone()
    up[3] += 0.5
    allowed = narrow_tolerance(exact, [plain, plain], [(up, plain)], torch.bfloat16, 8)
    assert allowed[3] > 0.5
    assert allowed[[0, 1, 2, 4, 5, 6, 7]].max() < 0.02


def test_few_samples_give_a_wider_tolerance():
    exact = torch.ones(3, dtype=torch.float64)
    errors = [torch.tensor([1.0, -1.0, 1.0], dtype=torch.float64) * 0.05 * sign for sign in (1, -1)]
    few = narrow_tolerance(exact, [exact + error for error in errors], [], torch.bfloat16, 3)
    many = narrow_tolerance(exact, [exact + error for error in errors * 20], [], torch.bfloat16, 3)
    assert float(few.max()) > 2 * float(many.max())


def test_zeros_everywhere_must_be_zeros():
    zeros = torch.zeros(4, dtype=torch.float64)
    assert not narrow_tolerance(zeros, [zeros, zeros], [], torch.bfloat16, 4).any()


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 40])
def test_sums_over_ranks_are_moved_by_the_rounding_of_parts(count):
    total = torch.full((count,), 1.5, dtype=torch.bfloat16)
    mode, before = Dithered(generator(0)), total.clone()
    mode._after_collective(SimpleNamespace(_opname="allgather_"), [total])
    assert torch.equal(total, before)
    mode._after_collective(SimpleNamespace(_opname="allreduce_"), [total])
    units = (total.double() - before.double()).abs() / unit_in_last_place(before, torch.bfloat16)
    assert not count or units.max() < 40
    assert count < 15 or 0.2 < float(units.mean()) < 4
