"""Print the summary at the end of a run."""

from __future__ import annotations

import contextlib
import sys
from types import SimpleNamespace

import pytest

from mgpu_check.plugin import leasing
from mgpu_check.plugin.report import table
from mgpu_check.plugin.report.properties import defects_met, lacks_devices
from mgpu_check.plugin.session import GpuSession


def print_to(terminal: pytest.TerminalReporter, session: GpuSession) -> None:
    """Print the closing table, interrupted and dead ranks, remarks, and tests skipped because of too few devices."""
    table.print_to(terminal, session.settings.depth)
    if session.notes.interrupted:
        terminal.section("ranks that were interrupted", red=True)
        terminal.line(session.notes.interrupted)
    if session.notes.deaths:
        terminal.section("ranks that died while no test used them", red=True)
        for line in session.notes.deaths:
            terminal.line(line, red=True)
    for line in [*session.notes.lines, *leasing.told(session.notes.waits)]:
        terminal.line(f"mgpu-check: {line}", yellow=True)
    skipped = [report for report in terminal.stats.get("skipped", []) if lacks_devices(report)]
    if skipped:
        terminal.line(
            f"mgpu-check: {len(skipped)} tests were skipped because there are too few GPUs; --strict-gpus makes that "
            "a failure",
            yellow=True,
        )
    reports = [report for kind in list(terminal.stats.values()) for report in kind]
    showed, unseen = ({name for report in reports for name in defects_met(report)[which]} for which in (0, 1))
    for name in sorted(unseen - showed):
        terminal.line(f"mgpu-check: {table.told_unseen(name)}", yellow=True)
    if session.settings.simulate and session.settings.asked:
        # A category of its own appears in pytest's last line: "3 passed, 4 SIMULATED GPUs in 1.20s".
        terminal._known_types = None  # pytest has cached it if the run stopped early
        terminal.stats.setdefault("SIMULATED GPUs", [SimpleNamespace() for _ in range(session.settings.gpus or 0)])


def tell(config: pytest.Config, line: str) -> None:
    """Print a line to stderr at once, past pytest's capturing."""
    capture = config.pluginmanager.get_plugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture is not None else contextlib.nullcontext():
        print(f"\nmgpu-check: {line}", file=sys.stderr, flush=True)
