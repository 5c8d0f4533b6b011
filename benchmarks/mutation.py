"""Change single expressions of torch's own Python code in memory, and count the changes that the packaged suite notices.

    python benchmarks/mutation.py trace MAP                     # which check executes which line of torch
    python benchmarks/mutation.py run MAP RESULTS --sample=200  # plant mutants; run the checks that execute their lines
    python benchmarks/mutation.py again MAP RESULTS --gpu-level=standard   # run those that no check has noticed
    python benchmarks/mutation.py table RESULTS [EQUIVALENT]    # print counts, and the mutants that no check notices

Other options go to `mgpu-check`; the level is quick unless they name another.

A *mutant* is one small change of one function: an operator is replaced, a number is one larger, a condition is negated,
a keyword argument or a statement is left out. Nothing on disk changes: ranks replace the code of the live function during
each call, as they plant faults. Each mutant has fresh ranks, because torch keeps results in caches. A mutant whose
statement no check executes does not run. Mutants are drawn so that each area counts the same, and each function that a
check enters. EQUIVALENT is a file of survivors, as lines of the table, that a person has found to change no result.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import tempfile
import time
import zlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings
from mutants import AREAS, NOT_PLANTED, Mutant, compiled, mutants

from mgpu_check.cli.suite import run as run_suite
from mgpu_check.plugin.serialization import Planting
from mgpu_check.plugin.stash import FAILED, SESSION

_PARAMETER = "mutant"
_OUTCOMES = ("killed", "equivalent", "not executed", "not planted", "survived")
_Map = dict[str, dict[str, Any]]
"""Check -> its seconds, and the lines of each module that it executes."""


class Plugin:
    """A pytest plugin that traces each check, or runs the checks of each mutant until one of them notices it.

    Args:
        checks: mutant -> names of its checks, in their order; empty to trace.
        results: the file that gets a line for each mutant.
    """

    def __init__(self, directory: str, checks: dict[Mutant, list[str]], results: Path, extra: list[str]) -> None:
        self.directory, self.checks, self.results, self.extra = Path(directory), checks, results, extra
        self.numbers = {mutant: number for number, mutant in enumerate(checks)}
        self.seconds: defaultdict[object, float] = defaultdict(float)
        self.killed: dict[Mutant, tuple[str, str]] = {}
        self.ends = False

    @pytest.hookimpl(trylast=True)  # after the plugin, which makes the session
    def pytest_configure(self, config: pytest.Config) -> None:
        config.stash[SESSION].preload.append("mutants")

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        check = _check(metafunc.definition)
        mine = [mutant for mutant, checks in self.checks.items() if check in checks]
        if self.checks:
            metafunc.fixturenames.append(_PARAMETER)
            metafunc.parametrize(_PARAMETER, mine, ids=[str(self.numbers[mutant]) for mutant in mine])

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        if self.checks:
            items[:] = [item for item in items if _mutant(item)]
            items.sort(key=lambda item: (self.numbers[_mutant(item)], self._place(item)))

    def _place(self, item: Any) -> int:
        return self.checks[_mutant(item)].index(_check(item))

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        session.config.stash[SESSION].first_failure = bool(self.checks)
        last = {_mutant(item): item for item in session.items}
        for item in session.items:
            mutant = _mutant(item)
            if mutant in self.killed:
                continue
            started, self.ends = time.perf_counter(), last[mutant] is item
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)
            self.seconds[mutant or _check(item)] += time.perf_counter() - started
            if mutant and (self.ends or mutant in self.killed):
                self.note(mutant)
        return True

    def note(self, mutant: Mutant, outcome: str = "survived") -> None:
        """Add a line to the results."""
        by = self.killed.get(mutant)
        if by is not None:
            outcome = "not planted" if NOT_PLANTED in by[1] else "killed"
        row = {"mutant": mutant, "outcome": outcome, "by": by, "seconds": round(self.seconds[mutant], 1)}
        with self.results.open("a") as out:
            out.write(json.dumps(row | {"checks": self.checks.get(mutant, []), "options": self.extra}) + "\n")

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: Any) -> None:
        mutant, session = _mutant(item), item.config.stash[SESSION]
        if not self.checks:
            session.fault = Planting("mutants:traced", str(self.directory / _check(item)))
            return
        session.fault = Planting("mutants:planted", str(self.directory / str(self.numbers[mutant])))
        made = getattr(item.function, "_hypothesis_internal_use_settings", None)
        if made is not None:
            item.function._hypothesis_internal_use_settings = settings(made, phases=(Phase.explicit, Phase.generate))
            item.function._hypothesis_internal_use_seed = zlib.crc32(str(mutant).encode())

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: Any, call: Any) -> Any:
        item.config.option.tbstyle = "value"
        report = yield
        mutant = _mutant(item)
        if mutant and report.failed:
            error = getattr(call.excinfo.value, "failure", call.excinfo.value)
            text = f"{type(error).__name__}: {error}"
            self.killed.setdefault(mutant, (_check(item), NOT_PLANTED if NOT_PLANTED in text else text[:300]))
            report.outcome, report.longrepr = "passed", None
            report.sections.clear()
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self, item: Any) -> None:
        mutant = _mutant(item)
        if mutant:
            item.stash[FAILED] = self.ends or mutant in self.killed  # so the next mutant has fresh ranks


def _check(item: Any) -> str:
    return f"{item.path.parent.name}::{item.originalname}"  # properties may have checks of the same name


def _mutant(item: Any) -> Any:
    found = item.callspec.params.get(_PARAMETER) if hasattr(item, "callspec") else None
    return found if isinstance(found, Mutant) else None


def _run(checks: dict[Mutant, list[str]], results: Path, extra: list[str]) -> Plugin:
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    level = [] if any(word.startswith("--gpu-level") for word in extra) else ["--gpu-level=quick"]
    with tempfile.TemporaryDirectory() as directory:
        plugin = Plugin(directory, checks, results, [*level, *extra])
        for mutant, number in plugin.numbers.items():
            Path(directory, str(number)).write_bytes(compiled(mutant))
        run_suite(["--gpus=4", "--simulate", "--rank-timeout=20", *plugin.extra], [plugin])
        if not checks:
            _write_map(plugin)
    return plugin


def _write_map(plugin: Plugin) -> None:
    """Write the lines of each check that has run, beside those of earlier runs."""
    found: _Map = json.loads(plugin.results.read_text()) if plugin.results.exists() else {}
    for file in plugin.directory.iterdir():
        row = found.setdefault(file.name, {"seconds": 0.0, "lines": {}})
        row["seconds"] = row["seconds"] or plugin.seconds[file.name]
        for module, line in sorted({(module, int(line)) for module, line in map(str.split, file.open())}):
            lines = row["lines"].setdefault(module, [])
            if line not in lines:
                lines.append(line)
    plugin.results.write_text(json.dumps(found))


def _sample(count: int, seed: int, executed: set[tuple[str, int]]) -> list[Mutant]:
    functions: dict[str, dict[str, list[Mutant]]] = {area: {} for area in AREAS}
    for mutant in mutants():
        functions[mutant.area].setdefault(f"{mutant.module}.{mutant.function}", []).append(mutant)
    for area, every in functions.items():
        functions[area] = {n: some for n, some in every.items() if any(executed & {*one.places} for one in some)}
    draw, found = random.Random(seed), []
    while len(found) < count and any(functions.values()):
        area = functions[draw.choice([area for area, every in functions.items() if every])]
        name = draw.choice(list(area))
        mutant = area[name].pop(draw.randrange(len(area[name])))
        if not area[name]:
            del area[name]
        if compiled(mutant):
            found.append(mutant)
    return found


def run(options: argparse.Namespace, extra: list[str]) -> None:
    """Run mutants that RESULTS lacks, or those that no check has noticed, and append their results."""
    lines: _Map = json.loads(options.map.read_text())
    rows = _read(options.results)
    executed = {(m, line) for row in lines.values() for m, some in row["lines"].items() for line in some}
    chosen = [mutant for mutant, row in rows.items() if row["outcome"] in ("not executed", "survived")]
    if options.command == "run":
        chosen = [mutant for mutant in _sample(options.sample, options.seed, executed) if mutant not in rows]
    checks: dict[Mutant, list[str]] = {}
    for mutant in chosen:
        wanted = {line for _, line in mutant.places}
        found = [name for name, row in lines.items() if wanted & {*row["lines"].get(mutant.module, ())}]
        # First the checks that execute most of the file in the least time.
        found.sort(key=lambda n: -len(lines[n]["lines"][mutant.module]) / (0.3 + lines[n]["seconds"]))
        if found:
            checks[mutant] = found[: options.checks]
        else:
            Plugin("", {}, options.results, extra).note(mutant, "not executed")
    if checks:
        _run(checks, options.results, extra)


def _read(results: Path) -> dict[Mutant, dict[str, Any]]:
    """Return the last result of each mutant."""
    rows = [json.loads(line) for line in results.open()] if results.exists() else []
    return {Mutant(*row["mutant"]): row for row in rows}


def table(results: Path, equivalent: Path | None) -> None:
    """Print the number of mutants of each area by their outcome, and those that no check notices."""
    equal = set(equivalent.read_text().splitlines()) if equivalent else set()
    rows = _read(results)
    outcomes = {
        m: "equivalent" if str(m) in equal and r["outcome"] != "killed" else r["outcome"] for m, r in rows.items()
    }
    print(f"{'':<24}{'mutants':>12}" + "".join(f"{outcome:>14}" for outcome in _OUTCOMES))
    for area in [*AREAS, "all"]:
        count = Counter(outcome for mutant, outcome in outcomes.items() if area in (mutant.area, "all"))
        print(f"{area:<24}{count.total():>12}" + "".join(f"{count[outcome]:>14}" for outcome in _OUTCOMES))
    for mutant, outcome in sorted(outcomes.items()):
        if outcome in ("not executed", "survived"):
            print(f"{outcome}: {mutant}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for command, files in (("trace", "map"), ("run", "map results"), ("again", "map results"), ("table", "results")):
        # Abbreviations would take options of mgpu-check.
        one = commands.add_parser(command, allow_abbrev=False)
        for file in files.split():
            one.add_argument(file, type=Path, metavar=file.upper())
        if command == "table":
            one.add_argument("equivalent", type=Path, nargs="?", metavar="EQUIVALENT")
        if "map results" in files:
            one.add_argument("--checks", type=int, default=20, help="the most checks to run for one mutant; default 20")
        if command == "run":
            one.add_argument("--sample", type=int, default=200, help="number of mutants; default 200")
            one.add_argument("--seed", type=int, default=0, help="of the sample; default 0")
    options, extra = parser.parse_known_args()
    if options.command == "trace":
        _run({}, options.map, extra)
    elif options.command == "table":
        table(options.results, options.equivalent)
    else:
        run(options, extra)


if __name__ == "__main__":
    main()
