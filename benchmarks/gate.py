"""Measure the gate: ``python benchmarks/gate.py false-alarms|bit-flips|cost``.

See benchmarks/README.md for what came of it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from programs import PROGRAMS, Program

from mgpu_check.diagnosis.observations import KINDS
from mgpu_check.gates.comparison.relations import relations_of
from mgpu_check.gates.run import step_runs
from mgpu_check.gates.run.measurement import measure, measure_provisionally
from mgpu_check.gates.run.step_runs import run_step
from mgpu_check.gates.search.scenarios import CHANGES, Scenario
from mgpu_check.gates.search.trials import Effort, Trials

HERE = Path(__file__).parent
WORLD_SIZES = (2, 3, 4)


def of_gate(program: Program) -> step_runs.Program:
    return step_runs.Program(program.step, program.build, program.batch, program.reference, program.single_process)


def drawn(program: Program, generator: random.Random) -> Scenario:
    """A case that the program is right in."""
    world_size = generator.choice(WORLD_SIZES)
    if program.divisible:
        samples = world_size * generator.randint(program.least, 5)
    else:
        samples = generator.randint(1, 5 * world_size)
    steps = generator.choice((1, 1, 2, 3))
    change = generator.choice(("", "", *CHANGES))
    return Scenario(world_size, samples, steps, change, seed=generator.randrange(1_000_000))


# False alarms


def false_alarms(ranks: Any, names: list[str], steps: int, seed: int) -> dict[str, Any]:
    """Try random cases of right programs in turns, until the given number of steps was compared."""
    generator = random.Random(seed)
    trials = {name: Trials(ranks, of_gate(PROGRAMS[name]), frozenset(KINDS), None, name) for name in names}
    judged = dict.fromkeys(names, 0)
    alarms: list[dict[str, str]] = []
    while sum(judged.values()) < steps:
        for name in names:
            one = trials[name]
            scenario = drawn(PROGRAMS[name], generator)
            before = one.completed.total()
            failed = one.run(scenario)
            if one.completed.total() > before or failed is not None:
                judged[name] += scenario.steps * scenario.world_size
            if failed is not None:
                alarms.append({"program": name, "scenario": repr(failed.scenario), "what": _what(failed)})
                print(alarms[-1], flush=True)
    return {"steps": sum(judged.values()), "of each": judged, "alarms": alarms}


def _what(failed: Any) -> str:
    if failed.relations is None:
        return str(failed.error)[:3000]
    wrong = [name for name, relations in failed.relations.held.items() if False in relations.values()]
    return "; ".join(
        f"{name}: {failed.relations.held[name]} {failed.relations.details.get(name, '')}" for name in wrong[:4]
    )


# Flipped bits


@dataclasses.dataclass(frozen=True)
class Flip:
    """One bit of one element of the gradient that one rank computes, before it is combined with those of others.

    Attributes:
        parameter: its name.
        victim: the rank.
        chosen: 0 to 1, which element; None for the largest one.
        bit: of float32, from the lowest; 12 changes a number by 2^-11 to 2^-12 of it.
    """

    parameter: str
    victim: int
    chosen: float | None = None
    bit: int = 12

    def __call__(self, gradient):
        import torch

        new = gradient.detach().clone().contiguous()
        flat = new.view(-1)
        place = int(flat.abs().argmax()) if self.chosen is None else int(self.chosen * flat.numel())
        plain = flat[place : place + 1].cpu()
        flat[place] = (plain.view(torch.int32) ^ (1 << self.bit)).view(torch.float32)[0].item()
        return new


def on_gradient(program: step_runs.Program, name: str, do: Any) -> step_runs.Program:
    """The program, with ``do(rank, gradient)`` called once, on each rank, with what that computes for a parameter."""

    def plant(module, rank):
        _hook(module, name, lambda gradient: do(rank, gradient))

    class Step:
        def __init__(self, model, rank):
            import programs

            self.step = program.step
            if isinstance(program.step, type):
                with programs.planting(plant):
                    self.step = program.step(model, rank)

        def __call__(self, model, batch, rank):
            import programs

            with programs.planting(plant):
                return self.step(model, batch, rank)

    return dataclasses.replace(program, step=Step)


def _hook(model, name, do):
    done = []

    def once(gradient):
        if done or not gradient.count_nonzero():
            return None
        done.append(True)
        return do(gradient)

    parameter = dict(model.named_parameters())[name]
    if not hasattr(parameter, "full_tensor"):
        parameter.register_hook(once)
        return
    owner, _, last = name.rpartition(".")

    def before_forward(module, args):
        # FSDP2 has put a plain parameter in the place of the sharded one, for the time of the forward pass.
        if not done:
            module._parameters[last].register_hook(once)

    model.get_submodule(owner).register_forward_pre_hook(before_forward)


def largest(rank, program, scenario, name):
    """The largest magnitude in the gradient that this rank computes."""
    seen = [0.0]

    def note(rank, gradient):
        seen.append(float(gradient.abs().max()))

    run_step(rank, on_gradient(program, name, note), scenario)
    return max(seen)


def bit_flips(ranks: Any, names: list[str], flips: int, seed: int) -> dict[str, Any]:
    """For each program how many flips are caught: of the largest element that any rank has, and of random ones; and how
    many of these what is measured provisionally would have let pass.
    """
    generator = random.Random(seed)
    found: dict[str, Any] = {}
    for name in names:
        rows = found[name] = {"largest": [0, 0], "random": [0, 0], "without effect": 0, "hidden": 0, "missed": []}
        program, right = PROGRAMS[name], of_gate(PROGRAMS[name])
        for parameter in ranks.run(_names_of, right, size=1)[0]:
            for kind in ("largest", *["random"] * flips):
                world_size = generator.choice((2, 4))
                size = 1 if program.single_process else world_size
                scenario = Scenario(world_size, world_size * max(2, program.least), seed=generator.randrange(1000))
                victim, chosen = generator.randrange(size), generator.random()
                if kind == "largest":
                    magnitudes = ranks.run(largest, right, scenario, parameter, size=size)
                    victim, chosen = magnitudes.index(max(magnitudes)), None
                flip = Flip(parameter, victim, chosen)

                def do(rank, gradient, flip=flip):
                    return flip(gradient) if rank.index == flip.victim else None

                expected = ranks.run(measure, right, scenario, size=1)[0]
                seen = ranks.run(run_step, on_gradient(right, parameter, do), scenario, True, size=size)
                as_ever = ranks.run(run_step, right, scenario, True, size=size)
                if all(one.digests == other.digests for one, other in zip(seen, as_ever, strict=True)):
                    rows["without effect"] += 1  # the element was zero, or what it is added to much larger
                    continue
                first = ranks.run(measure_provisionally, right, scenario, size=1)[0]
                let_pass = first is not None and relations_of(first, seen, KINDS, None).holds
                refuted = not relations_of(expected, seen, KINDS, None).holds
                caught = refuted and not let_pass
                rows["hidden"] += refuted and let_pass
                rows[kind][0] += caught
                rows[kind][1] += 1
                if not caught:
                    rows["missed"].append(f"{kind} {flip} {scenario}")
        print(
            name,
            {key: value for key, value in rows.items() if key != "missed"},
            *rows["missed"],
            sep="\n  ",
            flush=True,
        )
    return found


def _names_of(rank, program):
    model = program.build()
    modules = model.values() if isinstance(model, dict) else [model]
    # Of several models the first is trained.
    return [name for name, parameter in next(iter(modules)).named_parameters() if parameter.requires_grad]


# What it costs


def cost(ranks: Any, examples: int, in_full: bool) -> dict[str, Any]:
    """Seconds for each part of a case on 4 ranks, and of the step alone on one device: medians, ratios last.

    The parts belong to a case that the first pair of perturbations decides. Whole cases are those that a gate tries,
    also the undecided ones: their mean is the cost of many.

    Args:
        in_full: measure in full, too, as every case was before it was done provisionally.
    """
    import cost_of

    found = {}
    for name, program in cost_of.PROGRAMS.items():
        right = of_gate(program)
        parts: dict[str, list[float]] = {}

        def timed(part: str, work: Any, parts: dict[str, list[float]] = parts) -> Any:
            start = time.perf_counter()
            result = work()
            parts.setdefault(part, []).append(time.perf_counter() - start)
            return result

        measuring, trials = (Trials(ranks, right, frozenset(KINDS), None, name) for _ in range(2))
        for number in range(examples + 1):
            of_case = right, Scenario(4, cost_of.SAMPLES, seed=number)
            alone = ranks.run(cost_of.timed, *of_case, size=1)[0]
            expected = timed(
                "measuring", lambda of=of_case, by=measuring: by.expected(of[1], effort=Effort.PROVISIONAL)
            )
            seen = timed("on ranks", lambda of=of_case: ranks.run(run_step, *of, size=4))
            holds = timed("comparing", lambda one=expected, all_=seen: relations_of(one, all_, KINDS, None).holds)
            full = None
            if in_full:
                full = timed("measuring in full", lambda of=of_case: ranks.run(measure, *of, size=1, timeout=600)[0])
                assert relations_of(full, seen, KINDS, None).holds, name
            parts.setdefault("step on 4 ranks", []).append(max(ranks.run(cost_of.timed, *of_case, size=4)))
            parts.setdefault("step alone", []).append(alone)
            case = sum(parts[part][-1] for part in ("measuring", "on ranks", "comparing"))
            parts.setdefault("case", []).append(case)
            parts.setdefault("case ÷ step alone", []).append(case / alone)
            parts.setdefault("decided by the first pair", []).append(float(holds))
            assert timed("whole case", lambda of=of_case, trials=trials: trials.run(of[1])) is None, name
            parts.setdefault("whole case ÷ step alone", []).append(parts["whole case"][-1] / alone)
            if full is not None:
                before = case - parts["measuring"][-1] + parts["measuring in full"][-1]
                parts.setdefault("case in full ÷ step alone", []).append(before / alone)
        # The first warms the ranks up.
        found[name] = {part: statistics.median(values[1:]) for part, values in parts.items()}
        for part in ("decided by the first pair", "whole case", "whole case ÷ step alone"):
            found[name][f"{part}, mean"] = statistics.mean(parts[part][1:])
    return found


# The command: it runs this file by pytest, which has the ranks


def test_measure(ranks: Any) -> None:
    asked = json.loads(os.environ["BENCH_GATE"])
    names = asked["programs"] or list(PROGRAMS)
    if asked["what"] == "false-alarms":
        result = false_alarms(ranks, names, asked["steps"], asked["seed"])
    elif asked["what"] == "bit-flips":
        narrow = [name for name in names if PROGRAMS[name].narrow or not PROGRAMS[name].observes_gradients]
        result = bit_flips(ranks, [name for name in names if name not in narrow], asked["flips"], asked["seed"])
    else:
        result = cost(ranks, asked["examples"], asked["in_full"])
    Path(asked["out"]).write_text(json.dumps(result))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("false-alarms", "bit-flips", "cost"))
    parser.add_argument("--programs", nargs="*", choices=sorted(PROGRAMS), help="some of them; default: all")
    parser.add_argument("--steps", type=int, default=10_000, help="false-alarms: steps to compare")
    parser.add_argument("--flips", type=int, default=2, help="bit-flips: random elements of each parameter")
    parser.add_argument("--examples", type=int, default=5, help="cost: number of cases; the median counts")
    parser.add_argument("--in-full", action="store_true", help="cost: beside it what measuring in full takes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="write the figures there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory, "out.json")
        asked = {name: value for name, value in vars(arguments).items() if name != "json"} | {"out": str(out)}
        options = ["-o", f"pythonpath={HERE}", "-o", "addopts=", "-o", "filterwarnings=", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", "-q", "-s", "--gpus=4", "--simulate", *options]
        ran = subprocess.run(
            [*command, f"{__file__}::test_measure"], env=os.environ | {"BENCH_GATE": json.dumps(asked)}, check=False
        )
        if ran.returncode:
            return ran.returncode
        figures = json.loads(out.read_text())
    print(json.dumps(figures, indent=1))
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
