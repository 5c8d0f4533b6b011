"""The gate for whole scripts: `mgpu-check compare` as an assertion."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_check.compare.processes import fitted
from mgpu_check.errors import NotCompared, ScalingMismatch
from mgpu_check.processes.environments import FLOAT32

if TYPE_CHECKING:
    from mgpu_check.plugin.ranks import Ranks

_HOW_TO = "https://github.com/mgpu-check/mgpu-check/blob/main/docs/how-to/compare.md"


def assert_script_scales(
    ranks: Ranks,
    script: str | Path,
    *arguments: str,
    size: int | None = None,
    steps: int | None = None,
    timeout: float = 300.0,
    fresh_directory: bool = True,
    float32: bool = False,
    unjudged: Mapping[str, str] | None = None,
    fake_data: bool | str | Path = False,
) -> None:
    """Assert that a training script trains the same model on several ranks as on one device.

    The script runs unchanged, in processes of its own with the variables of torchrun, as under `mgpu-check compare`.

    Args:
        ranks: the fixture.
        script: path of the script, ``"-m package.module"``, or the name of a Python program that is installed here.
        arguments: arguments of the script. ``{…}`` with W in it is replaced by its value, where W is the number of
            processes: ``"--batch-size={64/W}"``.
        size: number of ranks, at least 2; default ``ranks.size``.
        steps: number of optimizer steps to compare; default all.
        timeout: seconds without progress until a run is ended.
        fresh_directory: start each run in a fresh copy of the current directory. Large files, and some directories, are
            links to the originals, which all runs share.
        float32: turn autocast and GradScaler off in all runs: rounding to narrower dtypes masks differences.
        unjudged: parameters that need not be compared, as pattern -> reason. The summary repeats the reason,
            and all other remarks on a comparison that passes.
        fake_data: make small random data, datasets and pretrained models in place of those that are missing; or the
            path of a plan of what to make, see ``--fake-data``. Each run then starts in a fresh directory.

    Raises:
        ScalingMismatch: the ranks train another model, fail, or hang. ``.mistakes`` are the likely classes, and
            ``.site`` is the line that the failure is about, or the first of the script; else empty.
        NotCompared: there is no verdict: the script is not comparable, or a trained parameter was not compared.
        ValueError: an argument is not valid.
    """
    size, words = _checked(ranks, script, arguments, size, steps, timeout)
    # Here, because most processes of pytest have no script to run, and the modules take time to import.
    from mgpu_check.compare.comparison import ComparisonPlan, compare
    from mgpu_check.compare.fake_data import FakeData

    single, several = (
        {**ranks._script_environment(world), **({FLOAT32: "1"} if float32 else {})} for world in (1, size)
    )
    command, shown, simulated = [sys.executable, *words], shlex.join(words), ranks._simulated
    plan = ComparisonPlan(command, shown, size, single, several, simulated, timeout, steps, fresh_directory)
    plan = replace(plan, unjudged=dict(unjudged or {}))
    with ExitStack() as undo:
        if fake_data:
            fake = undo.enter_context(FakeData(_plan_of(fake_data)))
            single, several = ({**own, **fake.variables} for own in (single, several))
            plan = replace(plan, single=single, several=several, fresh=True, fake=fake)
        comparison = compare(plan, lambda line: None)
        if fake_data:
            comparison.report_fake_data()
    verdict = comparison.verdict
    if verdict.kind == "differs":
        report = verdict.report
        site = report.site or (f"{script}:1" if Path(words[0]) == Path(script) else "")
        raise ScalingMismatch(str(report), ranks=verdict.ranks, mistakes=report.mistakes, site=site)
    if verdict.kind != "equal":
        message = f"{verdict.report}\n  see: {_HOW_TO}"
        raise NotCompared(message, names=verdict.not_compared, untrained=verdict.untrained)
    for line in verdict.report.remarks:  # what was replayed, not compared, or is worth a look
        ranks._remark(f"{plan.shown}: {line}")


def _plan_of(fake_data: bool | str | Path) -> Path:
    from mgpu_check.compare.fake_data import plan_file

    try:
        return Path() if fake_data is True else plan_file(str(fake_data))
    except argparse.ArgumentTypeError as error:
        raise ValueError(f"assert_script_scales: fake_data: {error}") from None


def _checked(
    ranks: Ranks,
    script: str | Path,
    arguments: tuple[str, ...],
    size: int | None,
    steps: int | None,
    timeout: float,
) -> tuple[int, list[str]]:
    """Return the number of ranks, and the script with its arguments as words."""
    gate = "assert_script_scales"
    if size is None:
        size = ranks.size
    if isinstance(size, bool) or not isinstance(size, int) or not 2 <= size <= ranks.size:
        raise ValueError(
            f"{gate}: size is {size!r}; give a number of ranks from 2 to {ranks.size}"
            if ranks.size > 1
            else f"{gate} needs 2 ranks or more, but the test has 1; mark it @pytest.mark.gpus(2)"
        )
    if steps is not None and (isinstance(steps, bool) or not isinstance(steps, int) or steps < 1):
        raise ValueError(f"{gate}: steps is {steps!r}; give an integer of at least 1, or None for all")
    if not 0 < timeout < float("inf"):
        raise ValueError(f"{gate}: timeout is {timeout!r}; give a number of seconds above 0")
    module = str(script).removeprefix("-m ").strip() if str(script).startswith("-m ") else ""
    path = Path(script)
    runs = path.is_file() or (path / "__main__.py").is_file()  # a directory may have the name of a program
    if not module and not runs and len(path.parts) == 1:
        path = Path(sys.executable).with_name(path.name)
    if not module and not path.exists():
        raise ValueError(
            f"{gate}: there is no script {str(script)!r} in {Path.cwd()}; give its path, '-m package.module', or the "
            "name of a Python program that is installed here"
        )
    words = [*(("-m", module) if module else (str(path),)), *map(str, arguments)]
    for world in (1, size):
        fitted(words, world)
    return size, words
