"""Draw programs whose model is divided among ranks, and try them: ``python benchmarks/divided.py --right N --wrong N``.

Right ones must give no alarm, and leave nothing that was not compared. In wrong ones a mistake is planted: the gate
must refute them, and name the axis of the mesh that the mistake is on. See benchmarks/README.md for what came of it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from programs.divided import WAYS, Draw, arguments_of, drawn, planted

from mgpu_check import NotCompared, ScalingMismatch, assert_step_scales
from mgpu_check.errors import RankHang

HERE = Path(__file__).parent
DEVICES = 8
SHOWN = 3000


def wrong_one(number: int, seed: int, ways: tuple[str, ...]) -> Draw:
    """A program with one mistake.

    Mistakes that fewer of the programs can have are drawn as often as the others there.
    """
    for attempt in range(20):
        program = drawn(number + attempt * 1000 * len(ways), seed, ways)
        if mistakes := planted(program, seed):
            return replace(program, plant=random.Random(f"{seed} {number}").choice(mistakes))
    raise ValueError(f"no mistake fits programs of {ways[number % len(ways)]}")


def outcome(ranks: Any, program: Draw) -> dict[str, Any]:
    """Run the gate on a program, and return its verdict."""
    started = time.perf_counter()
    said, text = "passes", ""
    try:
        assert_step_scales(ranks, **arguments_of(program))
    except ScalingMismatch as error:
        said, text = "refuted", str(error)
    except RankHang as error:
        said, text = "refuted", str(error)
    except NotCompared as error:
        said, text = "not compared", str(error)
    except Exception as error:
        said, text = "error", f"{type(error).__name__}: {error}"
    return {
        "program": str(program),
        "number": program.number,
        "way": program.way,
        "mistake": program.plant.name if program.plant else "",
        "axis": program.plant.axis if program.plant else "",
        "said": said,
        "named": named(program, text),
        "seconds": time.perf_counter() - started,
        "text": text[:SHOWN],
        "draw": repr(program),
    }


def named(program: Draw, text: str) -> bool | None:
    """Return whether the axis of the mistake is named; None if there is none to name."""
    plant = program.plant
    if plant is None or program.as_world or len(program.wide) < 2:
        return None
    by_itself = next((line for line in text.splitlines() if "> 1, each by itself" in line), "")
    together = next((line for line in text.splitlines() if "> 1 together" in line), "")
    if by_itself or together:
        told = (by_itself or together).partition(" > 1")[0].split()
        return any(axis in told for axis in plant.axes) and len(plant.axes) > 1
    return any(f"fails when {axis} > 1, for any" in text for axis in plant.axes)


# pytest runs this file, which has the ranks


def pytest_generate_tests(metafunc: Any) -> None:
    asked = json.loads(os.environ["BENCH_DIVIDED"])
    metafunc.parametrize(
        "entry", [*(("right", one) for one in asked["right"]), *(("wrong", one) for one in asked["wrong"])]
    )


@pytest.mark.gpus(DEVICES)
def test_program(ranks: Any, entry: tuple[str, int]) -> None:
    asked = json.loads(os.environ["BENCH_DIVIDED"])
    kind, number = entry
    ways = tuple(asked["ways"])
    program = (drawn if kind == "right" else wrong_one)(number, asked["seed"], ways)
    found = outcome(ranks, program)
    with open(asked["out"], "a") as file:
        file.write(json.dumps(found) + "\n")
    mistake = f" with {found['mistake']} ({found['axis']})" if found["mistake"] else ""
    print(f"{program}{mistake}: {found['said']}, {found['seconds']:.1f} s", flush=True)


# The table


def table(found: Iterable[dict[str, Any]]) -> list[str]:
    right: dict[str, list[dict[str, Any]]] = defaultdict(list)
    wrong: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for one in found:
        (wrong[one["mistake"]] if one["mistake"] else right[one["way"]]).append(one)
    lines = []
    if right:
        lines += [
            "| way of division | programs | alarms | not compared | errors | seconds |",
            "|---|---|---|---|---|---|",
        ]
        for way in (*(way for way in WAYS if way in right), ""):
            some = right[way] if way else [one for several in right.values() for one in several]
            said = [sum(one["said"] == what for one in some) for what in ("refuted", "not compared", "error")]
            mean = sum(one["seconds"] for one in some) / len(some)
            lines.append(f"| {way or 'all'} | {len(some)} | {said[0]} | {said[1]} | {said[2]} | {mean:.1f} |")
    if wrong:
        lines += [
            "",
            "| mistake | programs | refuted | missed | errors | axis named | seconds |",
            "|---|---|---|---|---|---|---|",
        ]
        for mistake in (*sorted(wrong), ""):
            some = wrong[mistake] if mistake else [one for several in wrong.values() for one in several]
            refuted = sum(one["said"] == "refuted" for one in some)
            errors = sum(one["said"] == "error" for one in some)
            axes = [one["named"] for one in some if one["named"] is not None and one["said"] == "refuted"]
            mean = sum(one["seconds"] for one in some) / len(some)
            of = f"{sum(axes)} of {len(axes)}" if axes else ""
            lines.append(
                f"| {mistake or 'all'} | {len(some)} | {refuted} | {len(some) - refuted - errors} | {errors} | {of} "
                f"| {mean:.1f} |"
            )
    return lines


def numbers(text: str) -> list[int]:
    """ "5" is the first five, "3,17" those two, "20-39" a range."""
    if "," not in text and "-" not in text:
        return list(range(int(text)))
    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--right", type=numbers, default=[], help="how many right programs, or their numbers: 20-39 or 3,17"
    )
    parser.add_argument("--wrong", type=numbers, default=[], help="how many with a mistake, or their numbers")
    parser.add_argument("--ways", nargs="*", choices=sorted(WAYS), default=list(WAYS), help="of division; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, help="add a line to this file for each program")
    parser.add_argument("--table", nargs="*", type=Path, help="show the table of such files, and run nothing")
    arguments = parser.parse_args()
    if arguments.table:
        texts = [path.read_text() for path in arguments.table]
        print("\n".join(table(json.loads(line) for text in texts for line in text.splitlines())))
        return 0
    with tempfile.TemporaryDirectory() as directory:
        out = (arguments.json or Path(directory, "out.jsonl")).absolute()
        before = len(out.read_text()) if out.exists() else 0
        asked = {name: value for name, value in vars(arguments).items() if name not in ("json", "table")} | {
            "out": str(out)
        }
        options = ["-o", f"pythonpath={HERE}", "-o", "addopts=", "-o", "filterwarnings=", "-p", "no:cacheprovider"]
        command = [sys.executable, "-m", "pytest", "-q", "-s", f"--gpus={DEVICES}", "--simulate", *options]
        environment = os.environ | {"BENCH_DIVIDED": json.dumps(asked)}
        ran = subprocess.run([*command, f"{__file__}::test_program"], env=environment, check=False)
        lines = out.read_text()[before:] if out.exists() else ""
    found = [json.loads(line) for line in lines.splitlines()]
    for one in found:
        if one["said"] != ("refuted" if one["mistake"] else "passes"):
            print(f"\n{one['draw']}\n{one['said']}: {one['text']}")
    print("\n".join(table(found)))
    return ran.returncode


if __name__ == "__main__":
    sys.exit(main())
