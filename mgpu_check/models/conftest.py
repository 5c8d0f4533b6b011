"""Pytest hooks of the examination of a model: one examination for all tests, and the table at the end."""

from __future__ import annotations

from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from mgpu_check.models.application import ModelSettings
from mgpu_check.models.examination import Examination
from mgpu_check.models.targets import UnusableModel
from mgpu_check.models.verdict import ModelReport, WayResult, read_golden
from mgpu_check.plugin.ranks import Ranks
from mgpu_check.plugin.stash import SESSION

EXAMINATION: pytest.StashKey[Examination] = pytest.StashKey()
GOLDEN: pytest.StashKey[dict[str, str]] = pytest.StashKey()
FAILED: pytest.StashKey[int] = pytest.StashKey()
RESULTS: pytest.StashKey[dict[str, WayResult]] = pytest.StashKey()


@pytest.fixture
def examination(request: pytest.FixtureRequest, ranks: Ranks) -> Examination:
    """Give the examination of this run. The first test makes it."""
    config = request.config
    if EXAMINATION not in config.stash:
        settings = config.stash[SESSION].settings.of(ModelSettings)
        if settings.model_target is None:
            pytest.exit("mgpu-check model: no model; give one, such as transformers:Qwen3ForCausalLM", 4)
        try:
            config.stash[EXAMINATION] = Examination(
                ranks, settings, config.stash[SESSION].settings.simulate is not None
            )
        except UnusableModel as error:
            pytest.exit(f"mgpu-check model: {error}", 4)
    examined = config.stash[EXAMINATION]
    examined.ranks = ranks
    return examined


@pytest.fixture
def note(request: pytest.FixtureRequest) -> Callable[[WayResult], None]:
    """Give a function that adds a result to the table."""
    results = request.config.stash.setdefault(RESULTS, {})

    def add(result: WayResult) -> None:
        row = results.setdefault(result.way, result)
        row.settings, row.untried = result.settings, result.untried
        row.failures, row.on_one_device = result.failures, result.on_one_device
        row.not_compared = result.not_compared

    return add


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the ways that were not asked for, and read the golden table before time is spent."""
    asked = config.stash[SESSION].settings.of(ModelSettings)
    ours = [item for item in items if Path(__file__).parent in item.path.parents]
    left_out = [item for item in ours if item.callspec.params["way"] not in asked.model_ways]  # type: ignore[attr-defined]  # of a Function
    items[:] = [item for item in items if item not in left_out]
    config.hook.pytest_deselected(items=left_out)
    if asked.model_golden is not None and Path(asked.model_golden).exists():
        try:
            config.stash[GOLDEN] = read_golden(asked.model_golden)
        except ValueError as error:
            raise pytest.UsageError(f"mgpu-check model: {error}") from None


def _report(config: pytest.Config) -> ModelReport | None:
    """Return the table; None if no test has begun. A way that was asked for and not tried is in it."""
    examined = config.stash.get(EXAMINATION, None)
    if examined is None:
        return None
    settings = config.stash[SESSION].settings
    asked = settings.of(ModelSettings)
    gpus = f"{examined.ranks.size}{' SIMULATED' if settings.simulate else ''} GPUs"
    results, traits = config.stash.get(RESULTS, {}), examined.traits
    rows = [results.get(way) or WayResult(way, "not tried", reason="the run ended") for way in asked.model_ways]
    return ModelReport(
        asked.model_target or "", traits.name, traits.parameters, str(examined.recipe), gpus, examined.alone, rows
    )


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Count the failures of the tests here. If one of the user fails, the table does not decide the exit code."""
    report = yield
    item.config.stash[FAILED] = item.config.stash.get(FAILED, 0) + report.failed
    return report


@pytest.hookimpl(wrapper=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, object, object]:
    """Set the exit code to that of the table, or 1 if it is another one than the golden one, which a run writes."""
    config = session.config
    report = _report(config) if session.testsfailed == config.stash.get(FAILED, 0) else None
    if report is not None and session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        session.exitstatus = report.exit_code
        golden = config.stash.get(GOLDEN, None)
        if golden is not None:
            session.exitstatus = 1 if report.changes(golden) else 2 if report.exit_code == 2 else 0
        elif file := config.stash[SESSION].settings.of(ModelSettings).model_golden:
            report.write(file)
    return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if (report := _report(config)) is None:
        return
    terminalreporter.section("model")
    for line in report.lines():
        terminalreporter.line(line)
    settings = config.stash[SESSION].settings.of(ModelSettings)
    if settings.model_report is not None:
        report.write(settings.model_report)
        terminalreporter.line(f"written to {settings.model_report}")
    if (golden := config.stash.get(GOLDEN, None)) is not None:
        for line in [f"CHANGED: {change}" for change in report.changes(golden)] or ["nothing has changed"]:
            terminalreporter.line(f"since {settings.model_golden}: {line}")
