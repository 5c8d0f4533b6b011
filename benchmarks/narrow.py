"""Measure tolerances in narrow dtypes: ``python benchmarks/narrow.py [STEP ...] [--seeds N]``.

For each kind of step and each depth it prints, for gradients and parameters, the median over the tensors of two ratios: the
tolerance of the middle element and of the widest, over the largest error of any element in right steps on 2 and 4 ranks. Then
come the largest error over its own tolerance, which is a false alarm above 1, and how many planted mistakes are refuted: a flipped bit in the largest element of a gradient of one rank, no update, no
reduction, twice the rate and 1.25 times the rate. See benchmarks/README.md for what came of it.
"""

from __future__ import annotations

import argparse
import functools
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from mgpu_check.diagnosis.observations import KINDS
from mgpu_check.gates.run.step_runs import Program
from mgpu_check.gates.search.scenarios import Scenario
from mgpu_check.gates.search.trials import Trials
from tests.gates import formats

HERE = Path(__file__).parent
RATE = 0.5
MISTAKES = ("not updated", "not reduced", "twice the rate", "a quarter more")
BITS = (14, 10, 7, 5, 4)
"""Of bfloat16, from the lowest: the highest bit of the exponent, one in its middle, its lowest, and two of the fraction."""


class Plain:
    """Parameters, gradients and messages in one narrow dtype."""

    dtype, cast, wide, mistake, bit = torch.bfloat16, True, False, "", -1

    def __init__(self, model, rank):
        model.to(rank.device)
        self.masters = [parameter.detach().float() for parameter in model.parameters()]

    def loss(self, model, x, y):
        return F.mse_loss(model(x.to(model[0].weight.dtype)).float(), y)

    def __call__(self, model, batch, rank):
        x, y = (part.chunk(rank.size)[rank.index].to(rank.device) for part in batch)
        model.zero_grad()
        self.loss(model, x, y).backward()
        wrong = self.mistake if rank.size > 1 else ""
        if self.bit >= 0 and rank.size > 1 and rank.index == 1:
            flip(next(model.parameters()).grad, self.bit)
        for parameter in model.parameters():
            gradient = parameter.grad.float() if self.wide else parameter.grad.clone()
            if wrong != "not reduced":
                dist.all_reduce(gradient)
                parameter.grad.copy_(gradient / rank.size)
        if wrong != "not updated":
            with torch.no_grad():
                self.update(model, RATE * {"twice the rate": 2, "a quarter more": 1.25}.get(wrong, 1))

    def update(self, model, rate):
        for parameter in model.parameters():
            parameter.sub_(rate * parameter.grad)


class Buckets(Plain):
    wide = True


class Masters(Buckets):
    def update(self, model, rate):
        for parameter, master in zip(model.parameters(), self.masters, strict=True):
            master.sub_(rate * parameter.grad.float())
            parameter.copy_(master)


class Autocast(Plain):
    cast = False

    def loss(self, model, x, y):
        with torch.autocast("cuda", self.dtype):
            out = model(x)
        return F.mse_loss(out.float(), y)


class Float16(Masters):
    dtype = torch.float16


class Recipe(Buckets):
    """Products in the formats of a recipe of `tests.gates.formats`; all else in float32."""

    cast, layer, quantizers = False, nn.Linear, ()

    def loss(self, model, x, y):
        return F.mse_loss(model(x), y)


def recipe_step(name):
    layer = type("Linear", (formats.NarrowLinear,), {"recipe": name})
    quantizers = (formats.RECIPES[name],) if name in ("nvfp4", "stochastic") else ()
    return type(name, (Recipe,), {"layer": layer, "quantizers": quantizers})


RECIPES = [recipe_step(name) for name in formats.RECIPES]
STEPS = (Plain, Buckets, Masters, Autocast, Float16, *RECIPES)


def flip(gradient, bit):
    """Flip a bit of the largest element; in float32 the bit of the same place in its upper half."""
    flat = gradient.view(-1)
    place = int(flat.abs().argmax())
    wide = flat.dtype == torch.float32
    bits = flat.view(torch.int32 if wide else torch.int16)
    bits[place] ^= 1 << (bit + 16 * wide)


def build(step, depth):
    width = [6, *[16] * (depth - 1), 4]
    layer = getattr(step, "layer", nn.Linear)
    layers = [part for i in range(depth) for part in (layer(width[i], width[i + 1]), nn.Tanh())][:-1]
    return nn.Sequential(*layers).to(step.dtype if step.cast else torch.float32)


def batch(n):
    return torch.randn(n, 6), torch.randn(n, 4)


def trials_of(ranks: Any, step: Any, depth: int) -> Trials:
    quantizers = getattr(step, "quantizers", ())
    program = Program(step, functools.partial(build, step, depth), batch, quantizers=quantizers)
    return Trials(ranks, program, frozenset(KINDS), None, step.__name__)


def planted(step, **fault):
    return type(step.__name__, (step,), fault)


def measured(ranks: Any, step: Any, depth: int, seeds: int) -> dict[str, tuple[float, float, float]]:
    """Return kind -> the two median ratios, and the largest error over its own tolerance."""
    trials = trials_of(ranks, step, depth)
    tolerances: dict[Any, list[tuple[float, float]]] = {}
    errors: dict[Any, float] = {}
    worst = {"grads": 0.0, "params": 0.0}
    for seed in range(seeds):
        for size in (2, 4):
            scenario = Scenario(size, 8, seed=seed)
            expected = trials.expected(scenario)
            for run in trials.on_ranks(scenario, all_values=True):
                for name, exact in expected.exact.items():
                    if name.kind in worst:
                        error = (run.values[name].double() - exact).abs()
                        errors[name] = max(errors.get(name, 0.0), float(error.max()))
                        ratio = error / expected.tolerance[name].clamp_min(1e-300)
                        worst[name.kind] = max(worst[name.kind], float(ratio.max()))
            for name in errors:
                tolerance = expected.tolerance[name]
                tolerances.setdefault(name, []).append((float(tolerance.median()), float(tolerance.max())))
    of_kind = {kind: [name for name in errors if name.kind == kind and errors[name]] for kind in worst}

    def ratio(kind: str, which: int) -> float:
        medians = (statistics.median(pair[which] for pair in tolerances[name]) / errors[name] for name in of_kind[kind])
        return statistics.median(medians)

    return {kind: (ratio(kind, 0), ratio(kind, 1), worst[kind]) for kind in worst}


def caught(ranks: Any, step: Any, depth: int, faults: list[dict[str, Any]], seeds: int) -> int:
    count = 0
    for fault in faults:
        trials = trials_of(ranks, planted(step, **fault), depth)
        count += any(trials.run(Scenario(2, 8, seed=seed)) is not None for seed in range(seeds))
    return count


def test_measure(ranks: Any) -> None:
    seeds = int(os.environ["BENCH_SEEDS"])
    print("\n| step | layers | gradients | parameters | worst | mistakes | bits |\n|---|---|---|---|---|---|---|")
    for step in [step for step in STEPS if step.__name__ in os.environ["BENCH_STEPS"].split()]:
        for depth in (2, 6, 12):
            figures = measured(ranks, step, depth, seeds)
            mistakes = caught(ranks, step, depth, [{"mistake": mistake} for mistake in MISTAKES], 2)
            bits = caught(ranks, step, depth, [{"bit": bit} for bit in BITS], 1)
            print(
                f"| {step.__name__} | {depth} | {figures['grads'][0]:.1f}, {figures['grads'][1]:.1f} | "
                f"{figures['params'][0]:.1f}, {figures['params'][1]:.1f} | {max(row[2] for row in figures.values()):.2f} | "
                f"{mistakes} of {len(MISTAKES)} | {bits} of {len(BITS)} |",
                flush=True,
            )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    names = [step.__name__ for step in STEPS]
    parser.add_argument("steps", nargs="*", metavar="STEP", help=", ".join(names))
    parser.add_argument("--seeds", type=int, default=8, help="cases for each number of ranks")
    arguments = parser.parse_args()
    options = [
        "-o",
        f"pythonpath={HERE} {HERE.parent}",
        "-o",
        "addopts=",
        "-o",
        "filterwarnings=",
        "-p",
        "no:cacheprovider",
    ]
    command = [sys.executable, "-m", "pytest", "-q", "-s", "--gpus=4", "--simulate", *options]
    if unknown := {*arguments.steps} - {*names}:
        parser.error(f"STEP: {', '.join(sorted(unknown))} is unknown; choose from {', '.join(names)}")
    variables = {"BENCH_SEEDS": str(arguments.seeds), "BENCH_STEPS": " ".join(arguments.steps or names)}
    return subprocess.run([*command, f"{__file__}::test_measure"], env=os.environ | variables, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
