"""`mgpu-check init`: write a first test for the training script of a repository, and run it."""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from mgpu_check.cli.codes import RIGHT, UNDECIDED, WRONG, Parser
from mgpu_check.cli.comparing import after_options, is_python, launched_by
from mgpu_check.cli.init_arguments import learned
from mgpu_check.cli.init_documented import Command
from mgpu_check.cli.init_source import ScriptArgument
from mgpu_check.cli.init_survey import Survey, TrainingScript, survey
from mgpu_check.errors import ScalingMismatch

_USAGE = "mgpu-check init [--gpus=N] [--output=FILE] [--no-run] [-- script.py [args...]]"
_SAMPLES = 8  # of all ranks together: 1, 2, 4 and 8 ranks divide it
_DIVIDED = f"{{{_SAMPLES}/W}}"
_NAMED = 5  # entries
_LONGEST = 200  # characters of a command
_DIGEST = re.compile(r"(?<=Written by `mgpu-check init`), ([0-9a-f]{8})(?=\.)")
_HOW_TO = "https://github.com/mgpu-check/mgpu-check/blob/main/docs/how-to"


@dataclass(frozen=True)
class _Fit:
    """How to set an argument of a name, if the script has it, and what that assumes."""

    name: str
    value: str
    assumes: str
    unless: str = r"(?!)"
    integer: bool = False

    def fits(self, option: ScriptArgument) -> bool:
        named = re.fullmatch(self.name, option.variable) and not re.search(self.unless, option.variable)
        return bool(named) and option.integer >= self.integer


_BATCH = _Fit(
    r"(.*_)?(batch(_?size)?|bsz?)(_per_.*)?",
    _DIVIDED,
    f"{{}} is the batch of one rank, so that {_SAMPLES} samples are divided among all ranks",
    unless="val|eval|test|global|total",
)
_GLOBAL_BATCH = _Fit(
    r"(.*_)?(batch(_?size)?|bsz?)",
    str(_SAMPLES),
    f"{{}} is the batch of all ranks: {_SAMPLES} samples",
    unless="val|eval|test",
)
_ACCUMULATION = _Fit(
    r"(.*_)?accum(ulat(e|ion))?(_.*)?",
    str(_SAMPLES),
    f"{{}} is divided by the number of ranks: {_SAMPLES} micro-batches",
)
_MICRO_BATCHES = _Fit(
    _ACCUMULATION.name,
    "{2*W}",
    "{} is divided by the number of ranks: each has two micro-batches, which share the samples of one device",
)
_SIZES = (_BATCH, _GLOBAL_BATCH, _ACCUMULATION)
"""The rows that set the size of the global batch."""

_DEVICES = _Fit(r"(n_?|num_)?(devices|gpus)", "{W}", "{} is the number of ranks", integer=True)
_ROWS = (
    _Fit(r"(n_?|num_|max_)?epochs?", "1", "one epoch has two optimizer steps"),
    _Fit(r"(n_?|num_)?(data_?|loader_)?(num_)?workers?|n_?j|dataloader_num_workers", "0", "loading needs no workers"),
    _Fit(r"(random_?|manual_?)?seed", "1", "one device and all ranks start from one seed"),
    _DEVICES,
)


def main(argv: Sequence[str]) -> int:
    """Survey the current directory, write a test, and run it.

    Returns:
        0 if the test passed, and with ``--no-run``; 1 if it failed; 2 if no script was found, or if nothing was
        compared; 4 for wrong usage.
    """
    parser = Parser(
        prog="mgpu-check init",
        usage=_USAGE,
        description="Find the training script of the current directory, write a test that compares it on one device "
        "and on several, and run it on simulated GPUs. The script runs until it parses its arguments.",
        epilog="Name the script after -- if another one is found, or if it needs arguments: mgpu-check init -- "
        "train.py --data=samples",
        allow_abbrev=False,
    )
    parser.add_argument("--gpus", type=_gpus, default=2, metavar="N", help="simulated GPUs of the run (default: 2)")
    parser.add_argument("--output", type=Path, default=Path("tests/test_scaling.py"), metavar="FILE", help="the test")
    parser.add_argument("--no-run", action="store_true", help="write the test, and do not run it")
    at = list(argv).index("--") if "--" in argv else len(argv)
    own, program = list(argv[:at]), list(argv[at + 1 :])
    given = parser.parse_args(own)
    if os.path.lexists(given.output) and not _unchanged(given.output):
        parser.error(f"{given.output} exists; remove it, or name another file with --output=FILE")
    script, arguments = _named_script(program)
    found = survey(Path.cwd(), script)
    print(f"mgpu-check init: {found.files} Python files" + (f", {found.unread} not readable" if found.unread else ""))
    if script and found.named is None:
        parser.error(f"there is no script {script} in {Path.cwd()}; give its path, with its arguments")
    entry = found.named or next(iter(found.entries), None)
    if entry is None:
        print(
            "no script that trains was found: none that starts by itself calls backward() and step(), or a Trainer\n"
            f"do: name it, mgpu-check init -- train.py --args; or test a step or a loader: {_HOW_TO}/gate.md"
        )
        return UNDECIDED
    unknown = ""
    if entry.parses and not entry.options and not entry.hydra:
        options, unknown = learned(entry.started, arguments)
        entry = replace(entry, options=options)
    words, assumed = fitted_arguments(entry, arguments)
    if entry.autocast:
        assumed.append("autocast and GradScaler are off: rounding to narrower dtypes hides mistakes")
    _tell(entry, found, assumed, unknown)
    example = f"mgpu-check init -- {shlex.join(program) or f'{entry.started} {_example(entry)}'}"
    if missing := _missing(entry, words):
        print(f"nothing was written: the script needs {', '.join(missing)}")
        print(f"do: give what it needs, as in\n    mgpu-check init -- {entry.started} {_example(entry)}")
        return UNDECIDED
    try:
        text = _test(entry.started, words, assumed, entry.autocast)
    except UnicodeEncodeError as error:
        parser.error(f"the command has bytes that are no UTF-8 text: {error.object[error.start : error.end]!a}")
    given.output.parent.mkdir(parents=True, exist_ok=True)
    given.output.write_text(text, encoding="utf-8")
    print(f"wrote {given.output}")
    command = ["pytest", f"--gpus={given.gpus}", "--simulate", str(given.output)]
    if given.no_run:
        print(f"run it: {shlex.join(command)}")
        return RIGHT
    print(f"running: {shlex.join(command)}", flush=True)
    seen = _ComparisonWatch()
    code = int(pytest.main(command[1:], plugins=[seen]))
    if (code == RIGHT and seen.passed) or (code == WRONG and seen.compared):
        return code
    print(f"no verdict: nothing was compared, for the reason above, and {given.output} is no test yet")
    print("do: install or give what the script lacks, and call init again, which replaces the test if it is unchanged:")
    print(f"    {example}")
    print(f"see: {_HOW_TO}/compare.md")
    return UNDECIDED


class _ComparisonWatch:
    """A plugin that sees whether the test compared the script."""

    passed = False
    compared = False

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        # The workers of pytest-xdist keep their exceptions.
        self.compared = session.config.pluginmanager.hasplugin("dsession")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.passed |= report.when == "call" and report.passed

    def pytest_exception_interact(self, call: pytest.CallInfo[None]) -> None:
        self.compared |= call.excinfo is not None and isinstance(call.excinfo.value, ScalingMismatch)


def _gpus(text: str) -> int:
    if not text.isdecimal() or int(text) not in (2, 4, 8):
        raise argparse.ArgumentTypeError(f"{text!r} is no number of GPUs for a first test; give 2, 4 or 8")
    return int(text)


def _named_script(program: Sequence[str]) -> tuple[str, list[str]]:
    """Return the script of a command, as "train.py" or "-m package.train", and its arguments."""
    launcher, _ = launched_by(program)
    words = list(program[len(launcher) :])
    if words and is_python(Path(words[0]).name):
        words = list(after_options(words[1:]))
    if words[:1] in (["-m"], ["--module"]):
        words[:2] = [shlex.join(["-m", *words[1:2]])]
    return (words[0].removeprefix("./"), words[1:]) if words else ("", [])


def fitted_arguments(entry: TrainingScript, given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the arguments of the test's script, and what they assume.

    Args:
        given: the user's arguments, which are kept.
    """
    sizes = [] if entry.training_arguments else _sizes(entry, given)
    words, assumed, fits = list(given), [], [*sizes, *_others(entry)]
    for option, row in fits:
        if not option.is_in(given) and (option.name.startswith("--") or entry.hydra):
            words.append(f"{option.name}={row.value}")
            assumed.append(row.assumes.format(option.name))
    devices = next((option.name for option, row in fits if row is _DEVICES), "")
    strategies = [word for word in (*words, *(option.name for option in entry.options)) if ".strategy" in word]
    if entry.hydra and "." in devices and "a Trainer" in entry.parallel and not strategies:
        words.append(f"++{devices.rpartition('.')[0]}.strategy=ddp")
        assumed.append("one device has the strategy ddp too, so that its inputs are those of the ranks")
    if entry.training_arguments and not any("train_batch" in word for word in words):
        words += ["--output_dir=out", f"--per_device_train_batch_size={_DIVIDED}"]
        assumed.append(f"TrainingArguments reads the arguments; {_SAMPLES} samples are divided among all ranks")
    elif not any(row in _SIZES for _, row in fits):
        why = "its code does so" if any(map(_divides, entry.divided)) else "no argument for its size was found"
        assumed.append(f"the script itself divides a global batch among its ranks: {why}")
    return words, assumed


def _divides(variable: str) -> bool:
    return re.fullmatch(_GLOBAL_BATCH.name, variable) is not None


def _sizes(entry: TrainingScript, given: Sequence[str]) -> list[tuple[ScriptArgument, _Fit]]:
    """Return the options that set the size of the global batch, each with its row."""
    split = [option for option in entry.options if option.variable in entry.divided]
    accumulated, batch = _fitting(_ACCUMULATION, split), _fitting(_BATCH, entry.options)
    if accumulated and batch and not (accumulated.is_in(given) or batch.is_in(given)):
        # So that one device, with as many micro-batches as a rank, can be given their samples.
        return [(accumulated, _MICRO_BATCHES), (batch, _BATCH)]
    fits = [
        (accumulated, _ACCUMULATION),
        (_fitting(_GLOBAL_BATCH, split), _GLOBAL_BATCH),
        (batch, _BATCH),
        (_fitting(_GLOBAL_BATCH, entry.options), _GLOBAL_BATCH),
    ]
    return [(option, row) for option, row in fits if option is not None][:1]


def _others(entry: TrainingScript) -> list[tuple[ScriptArgument, _Fit]]:
    fits = [(_fitting(row, entry.options), row) for row in _ROWS]
    return [(option, row) for option, row in fits if option is not None]


def _fitting(row: _Fit, options: Sequence[ScriptArgument]) -> ScriptArgument | None:
    return min(filter(row.fits, options), key=lambda option: len(option.name), default=None)


def _tell(entry: TrainingScript, found: Survey, assumed: Sequence[str], unknown: str) -> None:
    print(f"script: {entry.path}, which uses {', '.join(entry.parallel) or 'one device, as far as its source shows'}")
    if not entry.parallel:
        print("  the test fails until ranks share the work, as with DistributedDataParallel")
    others = [str(other.path) for other in found.entries if other.path != entry.path]
    if others:
        more = f", and {len(others) - _NAMED} more" if len(others) > _NAMED else ""
        print(f"  not chosen: {', '.join(others[:_NAMED])}{more}; name one after -- to choose it")
    if command := _documented(entry):
        text = command.arguments
        print(f"  {command.place} starts it with {text if len(text) <= _LONGEST else f'{text[:_LONGEST]}…'}")
    for line in assumed:
        print(f"  assumed: {line}")
    if entry.needs:
        state = "assumed" if _installed(entry.needs) else "MISSING"
        print(f"  {state}: the installed package {entry.needs}, as by pip install -e .")
    if entry.subcommands:
        print("  not read: what each of its subcommands needs; give them after --")
    elif not entry.options:
        print(f"  its arguments are not known: {unknown or 'no parser of them was found'}; give them after --")


def _installed(package: str) -> bool:
    """Return whether a script can import a package."""
    kept = sys.path[:]  # starts with the current directory under `python -m mgpu_check`
    sys.path[:] = kept[kept[0] in ("", str(Path.cwd())) :]
    try:
        return package.isidentifier() and importlib.util.find_spec(package) is not None
    finally:
        sys.path[:] = kept


def _documented(entry: TrainingScript) -> Command | None:
    """Return the first command of the repository's pages that gives the script arguments."""
    return next((command for command in entry.documented if command.arguments), None)


def _example(entry: TrainingScript) -> str:
    """Return arguments that a user may give."""
    if command := _documented(entry):
        return command.arguments
    words = [(option.name, option.variable.upper()) for option in entry.required]
    return " ".join(f"{name}={value}" if name.startswith("-") else value for name, value in words) or "--args"


def _missing(entry: TrainingScript, given: Sequence[str]) -> list[str]:
    """Return the names of the arguments that the script needs, and that were not given."""
    positional = sum(not word.startswith("-") for word in given)
    options = [option.name for option in entry.required if option.name.startswith("-") and not option.is_in(given)]
    return options + [option.name for option in entry.required if not option.name.startswith("-")][positional:]


def _test(started: str, words: Sequence[str], assumed: Sequence[str], autocast: bool) -> str:
    name = re.sub(r"\W+", "_", re.split(r"[ .]", started)[-1] if started.startswith("-m ") else Path(started).stem)
    arguments = "".join(f"        {json.dumps(word, ensure_ascii=False)},\n" for word in words)
    precision = "        float32=True,\n" if autocast else ""
    comments = "".join(f"    # assumed: {line}\n" for line in assumed)
    text = f'''"""{started} trains the same model on several GPUs as on one. Written by `mgpu-check init`."""

from mgpu_check import assert_script_scales


def test_{name}(ranks):
    # W is the number of ranks. See {_HOW_TO}/compare.md
{comments}    assert_script_scales(
        ranks,
        {json.dumps(started, ensure_ascii=False)},
{arguments}        steps=2,
{precision}    )
'''
    return text.replace("`mgpu-check init`.", f"`mgpu-check init`, {_digest(text)}.", 1)


def _digest(text: str) -> str:
    """Return a digest of a test, apart from the digest that it has."""
    return hashlib.sha256(_DIGEST.sub("", text, count=1).encode()).hexdigest()[:8]


def _unchanged(path: Path) -> bool:
    """Return whether a file is as `mgpu-check init` wrote it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (ValueError, OSError):
        return False
    found = _DIGEST.search(text)
    return found is not None and found[1] == _digest(text)
