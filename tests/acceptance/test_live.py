"""The line that lives while an acceptance runs."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from mgpu_check.acceptance.report.progress import Live
from mgpu_check.devices.observations import Observation, Subject

TESTS = {
    "test_memory.py::test_patterns": "memory",
    "test_links.py::test_copies[0]": "links",
    "test_links.py::test_copies[1]": "links",
    "test_soak.py::test_soak": "soak",
}
NAMES = list(TESTS)


class Terminal:
    """As much of pytest's terminal as is used, and what was written: (erased?, text)."""

    def __init__(self, isatty: bool, width: int = 200) -> None:
        self.isatty = isatty
        self._tw = SimpleNamespace(fullwidth=width)
        self.written: list[tuple[str, str]] = []
        self.config = SimpleNamespace(pluginmanager=SimpleNamespace(get_plugin=lambda name: None))

    def flush(self) -> None:
        pass

    def rewrite(self, text: str, erase: bool = False) -> None:
        self.written.append(("live" if erase else "back", text))

    def line(self, text: str, **markup: Any) -> None:
        self.written.append(("red" if markup.get("red") else "stays", text))


class Run:
    """A run with a clock that is set by hand."""

    def __init__(self, isatty: bool, known: dict[str, float] | None = None, width: int = 200) -> None:
        self.now = 1000.0
        self.terminal = Terminal(isatty, width)
        self.live = Live(self.terminal, TESTS, known, lambda: self.now)  # type: ignore[arg-type]

    def test(self, name: str, seconds: float, *seen: Observation) -> None:
        self.live.pytest_runtest_logstart(name)
        self.live.heard(seen)
        self.now += seconds
        self.live.pytest_runtest_logfinish(name)

    @property
    def last(self) -> str:
        return [text for kind, text in self.terminal.written if kind == "live" and text][-1]

    @property
    def stayed(self) -> list[str]:
        return [text for kind, text in self.terminal.written if kind not in ("live", "back")]


def seen(outcome: Any, gpu: int = 0) -> Observation:
    return Observation("memory", Subject("gpu", (gpu,)), outcome, "wrong" if outcome == "failed" else "")


def test_progress_time_left_and_the_verdict_so_far():
    run = Run(isatty=True, known={"soak": 100.0})
    run.live.pytest_runtest_logstart(NAMES[0])
    assert run.last == "[0/4] 0 s; no failure in 0 looks: memory: test_patterns"  # the duration is not known yet
    run.test(NAMES[0], 20.0, seen("passed"), seen("passed"), seen("unknown"))
    assert run.last == "[1/4] 20 s, 2 min 20 s left; no failure in 3 looks, 1 unknown: memory: test_patterns"
    run.test(NAMES[1], 4.0)
    run.live.pytest_runtest_logstart(NAMES[2])
    assert run.last.startswith("[2/4] 24 s, 1 min 40 s left")  # as long as the one of its check: 4 s, and the soak
    run.now += 30
    run.live.heard([seen("failed", 3), seen("failed", 3)])
    assert run.terminal.written[-2:] == [("red", "memory: GPU 3: wrong"), ("live", run.last)]
    assert run.last.endswith("; REJECTED so far, 2 failures, 1 unknown: links: test_copies[1]")
    run.live.pytest_runtest_logfinish(NAMES[2])
    run.live.pytest_runtest_logstart(NAMES[3])
    run.now += 60
    assert run.live.left() == 40.0
    run.now += 60
    assert run.live.left() == 0.0
    run.live.pytest_runtest_logfinish(NAMES[3])
    run.live.phase("second looks")
    assert run.last.startswith("[4/4] ") and run.last.endswith(": second looks")
    assert " left;" not in run.last  # their duration is not known
    assert run.stayed[-1] == "soak         nothing seen, 2 min"
    run.live.end()
    assert run.terminal.written[-2:] == [("live", ""), ("back", "")]


def test_a_log_has_a_line_for_each_check_and_one_a_minute():
    run = Run(isatty=False)
    run.test(NAMES[0], 5.0, seen("passed"), seen("skipped"))
    assert run.stayed == ["memory       1 passed, 1 skipped, 5 s"]
    run.live.pytest_runtest_logstart(NAMES[1])
    for _ in range(150):
        run.now += 1.0
        run.live.tick()
    assert [text.partition(",")[0] for text in run.stayed[1:]] == ["[1/4] 65 s", "[1/4] 2 min 5 s"]
    assert not [text for kind, text in run.terminal.written if kind in ("live", "back")]
    run.live.heard([seen("failed", 1), seen("failed", 1)])
    assert run.terminal.written[-1] == ("red", "memory: GPU 1: wrong")  # the first one is shown at once
