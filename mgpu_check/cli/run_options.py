"""Options of runs, the command of a script, and its plan, for `mgpu-check compare` and `mgpu-check record`."""

from __future__ import annotations

import argparse
import os
import re
import shlex
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from mgpu_check.annotations import annotation, wanted
from mgpu_check.cli import simulate
from mgpu_check.cli.codes import RIGHT, UNDECIDED, WRONG, number
from mgpu_check.compare.comparison import ComparisonPlan, ScriptComparison
from mgpu_check.compare.fake_data import FakeData
from mgpu_check.compare.processes import fitted
from mgpu_check.processes.environments import FLOAT32, simulating

_CODES = {"equal": RIGHT, "differs": WRONG, "not comparable": UNDECIDED, "undecided": UNDECIDED}

_LAUNCHERS = {
    **dict.fromkeys(("torchrun", "accelerate", "deepspeed"), "torchrun"),
    **dict.fromkeys(("mpiexec", "mpirun", "jsrun"), "mpiexec"),
    "srun": "srun",
}
"""Launcher -> the row of `mgpu_check.processes.environments.VARIABLES` that its ranks get."""
OF_RUNS = (
    *("gpus", "simulate", "steps", "timeout", "fresh_directory", "float32", "fake_data"),
    *("against", "a", "b", "golden", "update_golden", "space"),
)
"""Options of runs, which have no effect on files."""
_LAUNCHING = re.compile(r"torch\.distributed\.(run|launch)$|accelerate\.commands\.|deepspeed\.launcher\.")
_SHELLS = ("sh", "bash", "zsh", "dash")
_REFUSED = {
    "horovodrun": "Horovod's ranks find each other by Horovod alone; give a script that uses torch.distributed",
    "env": "env before the script would have no effect; set the variables before mgpu-check",
    "numactl": "numactl before the script would have no effect; leave it out",
    **dict.fromkeys(_SHELLS, "a shell is no Python script; give the script that it starts"),
}
"""Program before a script -> what to do."""
_PYTHON = re.compile(r"python[\d.]*")
_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time; give a number of seconds above 0")
    return value


def writable(text: str) -> Path:
    path = Path(text)
    if not text or path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file; give the name of the file to write, or leave it out")
    if not path.absolute().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no directory {path.absolute().parent} for {path.name}")
    return path


def _steps(text: str) -> int:
    try:
        return 0 if text == "all" else number(1, "number of steps")(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, or all") from None


def add_run_options(parser: argparse.ArgumentParser, steps: str, default: str = "all") -> None:
    add = parser.add_argument
    add("--gpus", type=number(1, "number of ranks"), default=2, metavar="N", help="number of ranks (default: 2)")
    simulate.add_simulate(parser)
    add("--steps", type=_steps, metavar="N", help=f"{steps} N optimizer steps, or all (default: {default})")
    text = "end a run if no rank makes progress for this time (default: 300)"
    add("--timeout", type=_seconds, default=300.0, metavar="SECONDS", help=text)
    text = "start each run in a fresh copy of the current directory; large files are links to the originals"
    add("--fresh-directory", action="store_true", help=text)
    text = "turn autocast and GradScaler off in all runs: the rounding of narrower dtypes masks differences"
    add("--float32", action="store_true", help=text)
    simulate.add_fake_data(parser)


def refuse(
    options: argparse.Namespace, attributes: Sequence[str], reason: str, parser: argparse.ArgumentParser
) -> None:
    """Refuse options, by their attributes of `options`, that would have no effect."""
    if conflicting := [name for name in attributes if getattr(options, name) != parser.get_default(name)]:
        parser.error(f"{', '.join('--' + name.replace('_', '-') for name in conflicting)}: {reason}")


def launched_by(program: Sequence[str]) -> tuple[list[str], str]:
    """Return the words of a launcher before its script, and the row of variables that its ranks get.
    The words are empty if `program` starts with no launcher."""
    name = Path(program[0]).name if program else ""
    module = program.index("-m") + 1 if (is_python(name) or name == "-m") and "-m" in program[:-1] else 0
    if name not in _LAUNCHERS and not (module and _LAUNCHING.match(program[module])):
        return [], "torchrun"
    row = _LAUNCHERS.get(name, "torchrun")
    modules = ("-m", "--module") if row == "torchrun" else ()  # other launchers have another option -m
    # A script may start with a Python file, a Python, or an option of a module.
    words = [word in modules or word.endswith(".py") or is_python(Path(word).name) for word in program]
    indices = [i for i in range(max(module, 1) + bool(module), len(program)) if words[i]]
    while len(indices) > 1 and _is_value(program, indices[0], indices[1]):
        del indices[0]
    return list(program[: next(iter(indices), len(program))]), row


def _is_value(program: Sequence[str], index: int, following: int) -> bool:
    """Return whether a Python file is the value of an option of the launcher: a Python with its script follows.
    A file alone that follows may be an argument of the script, as in `torchrun --standalone train.py config.py`."""
    if not program[index].endswith(".py") or "=" in program[index]:
        return "=" in program[index]
    starts = is_python(Path(program[following]).name) and program[following + 1 : following + 2]
    return bool(starts) and program[index - 1].startswith("-") and "=" not in program[index - 1]


def _before_script(words: Sequence[str]) -> Iterator[str]:
    """Yield programs that a launcher would start before the script; not a value of an option, as in --log-dir env."""
    for before, word, after in zip(["", *words], words, [*words[1:], ""], strict=False):
        name = Path(word).name
        value = before.startswith("-") and "=" not in before and (after.startswith("-") or "=" not in after)
        if name in _REFUSED and not value and (len(words) > 1 or name not in _SHELLS):
            yield name


def is_python(name: str) -> bool:
    return _PYTHON.fullmatch(name) is not None


def after_options(words: Sequence[str]) -> Sequence[str]:
    """Return the words of a Python command without Python's own options: the script, or -m, and what follows."""
    start = 0
    while words[start:] and words[start].startswith("-") and words[start] != "-m":
        start += 1 + (words[start] in ("-W", "-X"))  # which have a value
    return words[start:]


def script_command(program: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Return the command of a script, which may start with a launcher or a Python interpreter.
    Each rank runs the script directly, without the launcher."""
    own = parser.prog.rpartition(" ")[2]
    launcher, _ = launched_by(program)
    for word in _before_script(launcher or program[:1]):
        parser.error(f"{own} starts the ranks in place of {shlex.join(launcher) or word}: {_REFUSED[word]}")
    if "torch.distributed.launch" in launcher and not {"--use-env", "--use_env"} & {*launcher}:
        parser.error(
            f"torch.distributed.launch gives scripts --local-rank, and {own} does not: let the script read LOCAL_RANK, "
            "and add --use-env, or give the script alone"
        )
    if launcher and len(launcher) == len(program):
        parser.error(
            f"{shlex.join(launcher)} names no Python script: {own} starts the ranks in place of the launcher; give the "
            f"script and its arguments, such as {own} --gpus=4 -- train.py --epochs=2"
        )
    program = program[len(launcher) :]
    if launcher and program[0] == "--module":
        program = ["-m", *program[1:]]
    name = Path(program[0]).name if program else ""
    python = is_python(name) and not Path(program[0]).is_dir()
    words = program[1:] if python else program
    if python and not after_options(words):
        parser.error(f"no script given for {name}: name one, or a module with -m")
    command = simulate.program_command(program, parser)
    if command[0] != sys.executable and not python:
        parser.error(
            f"{program[0]} is a program, but {own} runs Python scripts only: give the script that it starts, with "
            "the script's arguments"
        )
    return command


def _environments(gpus: int, backing: str | None) -> tuple[Mapping[str, str], Mapping[str, str]]:
    if backing is not None:
        return simulating(os.environ, 1, backing), simulating(os.environ, gpus, backing)
    import torch

    several = dict(os.environ)
    mask_variables = ["HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"] if torch.version.hip else ["CUDA_VISIBLE_DEVICES"]
    # The first variable that is set takes effect.
    visible = next((several[name] for name in mask_variables if name in several), "0")
    return {**several, mask_variables[0]: visible.split(",")[0]}, several


def _count(gpus: int, parser: argparse.ArgumentParser) -> int:
    """Return the number of devices. Reject a number below that of ranks, because the ranks would fail.
    No device at all is accepted: the script may run on CPUs."""
    import torch

    # It asks NVML, and creates no CUDA context, which would occupy memory (torch/cuda/__init__.py, device_count, 2.13).
    count = torch.cuda.device_count()
    if 0 < count < gpus:
        parser.error(
            f"--gpus={gpus}, but torch sees {count} GPU{'s' * (count > 1)} here; give a smaller number, or "
            f"--simulate. For a script that uses no GPU, hide them: CUDA_VISIBLE_DEVICES= {parser.prog} …"
        )
    return count


def _interrupted(number: int, frame: FrameType | None) -> None:
    for another in _ENDING:
        signal.signal(another, signal.SIG_IGN)  # a second signal must not interrupt the clean-up
    raise KeyboardInterrupt


@contextmanager
def interruptible() -> Iterator[None]:
    """Turn signals that end the command into `KeyboardInterrupt`, so that it ends all processes first."""
    kept = {number: signal.signal(number, _interrupted) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


def counted(
    options: argparse.Namespace, command: Sequence[str], worlds: Sequence[int], parser: argparse.ArgumentParser
) -> int:
    """Check that the arguments of the script have values for each number of ranks. Return the number of devices."""
    for world in worlds:
        try:
            fitted(command, world)
        except ValueError as error:
            parser.error(str(error))
    return options.gpus if options.simulate else _count(options.gpus, parser)


def plan_of(options: argparse.Namespace, program: Sequence[str], command: Sequence[str], count: int) -> ComparisonPlan:
    """Return the plan of runs. `count`: number of devices; 0: torch sees none.
    Runs with made data start in fresh directories, so that no file that a script derives from such data stays."""
    fake = None if options.fake_data is None else FakeData(options.fake_data)
    added = {**({FLOAT32: "1"} if options.float32 else {}), **(fake.variables if fake else {})}
    single, several = ({**own, **added} for own in _environments(options.gpus, options.simulate))
    launcher, variables = launched_by(program)
    return ComparisonPlan(
        command,
        shlex.join(program[len(launcher) :]),
        options.gpus,
        single,
        several,
        f"SIMULATED {options.simulate}" if options.simulate else "",
        options.timeout,
        options.steps or None,
        options.fresh_directory or fake is not None,
        without_gpus=not count,
        fake=fake,
        launcher=variables,
        replaced=shlex.join(launcher),
    )


def tell(line: str) -> None:
    """Print a line about a run that has ended."""
    print(f"  {line}", flush=True)


def conclude(done: ScriptComparison, *, json: Path | None) -> int:
    """Print the verdict, write it to a file, and return the exit code."""
    from mgpu_check.compare.page import write_json

    plan, report = done.plan, done.verdict.report
    print(f"\n{report}")
    if done.verdict.kind == "differs" and wanted(None):
        script = next((f"{word}:1" for word in plan.command if word.endswith(".py")), "")
        print(annotation(f"{plan.shown} differs on {plan.world} ranks", str(report), report.site or script))
    if json:
        write_json(json, done)
    if plan.simulated:
        print(f"{done.verdict.kind}, on {plan.world} {plan.simulated} GPUs")
    return _CODES[done.verdict.kind]
