"""What happened in the ranks, put into pytest's reports."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from _pytest._code.code import ReprEntryNative, ReprExceptionInfo, ReprFileLocation, ReprTraceback

from mgpu_check.errors import RankFailure, RankHang
from mgpu_check.session import GpuSession

__all__ = ["add_identity", "add_output", "add_properties", "replace_traceback"]


def add_output(item: pytest.Item, session: GpuSession, when: str) -> None:
    """Add what each rank has written as a section of its own; show it at once where nothing is captured (``-s``)."""
    for who, stream, text in session.output():
        item.add_report_section(when, f"{stream} of {who}", text)
        if item.config.option.capture == "no":
            lines = "".join(f"[{who}] {line}\n" for line in text.splitlines())
            encoding = sys.stdout.encoding or "utf-8"
            sys.stdout.write(lines.encode(encoding, "backslashreplace").decode(encoding))


def add_identity(item: pytest.Item) -> None:
    """Record of which property of the packaged suite a test is a check, and what it says."""
    module = getattr(item, "module", None)
    package, _, name = getattr(module, "__name__", "").rpartition(".test_")
    if package == "mgpu_check.suite":
        title = (getattr(item, "function", item).__doc__ or item.name).strip().splitlines()[0]
        item.user_properties.append(("mgpu_check.property", name))
        item.user_properties.append(("mgpu_check.check", title.rstrip(".")))


def add_properties(item: pytest.Item, session: GpuSession) -> None:
    """Record what the test has used, for the closing table and for JUnit files."""
    sizes = session.pool.sizes
    item.user_properties.append(("mgpu_check.examples", session.examples))
    item.user_properties.append(("mgpu_check.world_sizes", " ".join(map(str, sorted(sizes)))))
    item.user_properties.append(("mgpu_check.simulated", session.settings.simulate or ""))


def replace_traceback(
    item: pytest.Item, report: pytest.TestReport, call: pytest.CallInfo[None], session: GpuSession, in_parent: bool
) -> None:
    """Show the ranks' story in place of the engine's traceback."""
    error = call.excinfo.value if call.excinfo is not None else None
    if not isinstance(error, (RankFailure, RankHang)) or report.outcome != "failed":
        return
    assert call.excinfo is not None
    session.pool.explain(error)
    text = str(error)
    place = _place_in_test(call.excinfo, item, report)
    # A test that calls `ranks.run` itself has a place of its own to tell, besides that in the rank.
    lines = [f"{place.path}:{place.lineno}: in {item.name}", "", text] if in_parent else [text]
    lines += [line for note in getattr(error, "__notes__", ()) for line in ("", note)]
    kind = type(error).__name__
    crash = ReprFileLocation(place.path, place.lineno, f"{kind}: {text.splitlines()[0]}")
    entry = ReprEntryNative([line + "\n" for line in "\n".join(lines).split("\n")])
    entries = [] if item.config.option.tbstyle == "line" else [entry]  # pytest itself prints that line
    report.longrepr = ReprExceptionInfo(ReprTraceback(entries, None, style="native"), crash)


def _place_in_test(
    info: pytest.ExceptionInfo[BaseException], item: pytest.Item, report: pytest.TestReport
) -> ReprFileLocation:
    """The innermost line of the test's file that the error passed, in this process or, as `_raised_at` has it, in a rank."""
    path, line, _ = report.location
    for entry in reversed(info.traceback):
        if Path(str(entry.path)) == item.path:
            return ReprFileLocation(path, entry.lineno + 1, "")
    return ReprFileLocation(path, (line or 0) + 1, "")
