"""Forward the reports of a function on a rank besides its result: warnings, log records, notes, events.

Notes and events are for Hypothesis. Ranks use `Collector`. The pytest process uses `deliver`, without importing torch
or Hypothesis. Ranks log as pytest logs in its own process: with its levels and formats, and with records for `caplog`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import sys
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TextIO

import pytest

from mgpu_check.asserts import known_defects
from mgpu_check.asserts.known_defects import left_out
from mgpu_check.plugin.private_names import LogCaptureHandler
from mgpu_check.processes.rank_lists import grouped
from mgpu_check.processes.tracebacks import calling_line, is_engine

_MOST_RECORDS = 1000  # of a call, for `caplog`: bounds the memory of a loop that logs; the file has all lines


@dataclass(frozen=True)
class Logging:
    """How a rank logs."""

    levels: Mapping[str, int]  # of the loggers of the pytest process that have one, by name; "" is the root
    # form, dates: the formats of a line and its time
    form: str
    dates: str

    @classmethod
    def of(cls, config: pytest.Config) -> Logging | None:
        """Return how pytest logs now, which its options, `caplog` and fixtures decide; None without its plugin."""
        if not config.pluginmanager.has_plugin("logging-plugin"):
            return None
        loggers = {"": logging.root, **logging.root.manager.loggerDict}
        levels = {name: logger.level for name, logger in loggers.items() if isinstance(logger, logging.Logger)}
        form, dates = (config.getoption(name) or config.getini(name) for name in ("log_format", "log_date_format"))
        return cls({name: level for name, level in levels.items() if level}, form, dates)


class _Records(logging.Handler):
    def __init__(self, tell: Callable[[tuple[str, Any]], None]) -> None:
        super().__init__()
        self._tell, self._left = tell, _MOST_RECORDS

    def emit(self, record: logging.LogRecord) -> None:
        self._left -= 1
        if self._left < 0:
            return
        try:
            plain = {name: value for name, value in vars(record).items() if isinstance(value, str | int | float)}
            trace = logging.Formatter().formatException(record.exc_info) if record.exc_info else record.exc_text
            self._tell(("log", plain | {"msg": record.getMessage(), "args": None, "exc_text": trace}))
        except Exception:
            self.handleError(record)


@contextlib.contextmanager
def logged(how: Logging | None, files: Iterable[TextIO], tell: Callable[[tuple[str, Any]], None]) -> Iterator[None]:
    """Within the context, log in a rank to `files`, and send the records."""
    if how is None:
        yield
        return
    lines = [logging.StreamHandler(file) for file in files]
    for handler in lines:
        handler.setFormatter(logging.Formatter(how.form, how.dates))
    # A new level makes `logging` visit every logger, which takes longer than a short call.
    loggers = ((logging.getLogger(name), level) for name, level in how.levels.items())
    levels = {logger: level for logger, level in loggers if logger.level != level}
    before = {logger: logger.level for logger in levels}
    logging.root.handlers += [*lines, records := _Records(tell)]
    try:
        for logger, level in levels.items():
            logger.setLevel(level)
        yield
    finally:
        logging.root.handlers[:] = [handler for handler in logging.root.handlers if handler not in (*lines, records)]
        for logger, level in before.items():
            logger.setLevel(level)


def repeat(records: Iterable[Mapping[str, Any]]) -> None:
    """Pass records of a rank to the handlers of pytest, but for that of its section, because ranks have their own."""
    captures = [handler for handler in logging.root.handlers if isinstance(handler, LogCaptureHandler)]
    for record in map(logging.makeLogRecord, records):
        for handler in logging.root.handlers:
            if handler not in captures[1:] and record.levelno >= handler.level:  # the first is that of `caplog`
                handler.handle(record)


_flat = itertools.chain.from_iterable
_STEPS = "_mgpu_check_steps"
_MOST_WARNINGS = 1000  # per test and rank: bounds the memory of a loop that issues a new text each time

_Warning = tuple[tuple[tuple[str, str], ...], str, str, int]
"""Names of the category and its bases, each with its module; text, file, line."""


class Collector:
    """Forwards the warnings and Hypothesis notes of one rank to the pytest process, each warning once per test.

    `in_rank` makes one when it is imported. A rank uses it in each call, and makes it forget at the end of each test.
    """

    def __init__(self, tell: Callable[[tuple[str, Any]], None]) -> None:
        self._tell = tell
        self._seen: set[_Warning] = set()

    def forget(self) -> None:
        """Forget the forwarded warnings, at the start of a test."""
        self._seen.clear()

    @contextlib.contextmanager
    def filtered(self, filters: Iterable[tuple[Any, ...]]) -> Iterator[None]:
        """Within the context, apply these warning filters, lowest priority first, and forward each new warning."""
        with warnings.catch_warnings():
            warnings.resetwarnings()
            for arguments in filters:
                warnings.filterwarnings(*arguments)
            warnings.showwarning = self._note
            yield

    def _note(
        self,
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if is_engine(filename):  # torch attributes a warning to its caller, which may be a wrapper of this package
            filename, lineno = calling_line()
        kinds = tuple((base.__module__, base.__qualname__) for base in category.__mro__[:-1])
        warning = kinds, str(message), filename, lineno
        if warning not in self._seen and len(self._seen) < _MOST_WARNINGS:
            self._seen.add(warning)
            self._tell(("warning", warning))

    @contextlib.contextmanager
    def example(self, function: Callable[..., Any]) -> Iterator[None]:
        """Make `note`, `event`, `target` and `assume` work in `function`, as in a test that runs in the pytest process.

        Hypothesis has no public interface for an example that another process drew. These are the attributes that its
        functions read in the current context (hypothesis/control.py, BuildContext and current_build_context, 6.170).
        """
        code = getattr(getattr(function, "func", function), "__code__", None)
        if "hypothesis" not in sys.modules and code is not None and _imports_hypothesis(code):
            import hypothesis.control  # noqa: F401  # now: an import in the body would come after the set-up below
        control, reporting = sys.modules.get("hypothesis.control"), sys.modules.get("hypothesis.reporting")
        if control is None or reporting is None:
            yield  # Hypothesis is not imported, so `function` cannot call it
            return
        notes: list[str] = []
        data = SimpleNamespace(
            events={},
            target_observations={},
            provider=SimpleNamespace(avoid_realization=False),
            note=notes.append,
            _observability_predicates=defaultdict(lambda: SimpleNamespace(update_count=lambda *, condition: None)),
        )
        context = SimpleNamespace(data=data, is_final=True, tasks=[], known_object_printers=defaultdict(list))
        try:
            with control._current_build_context.with_value(context), reporting.with_reporter(notes.append):
                yield
        finally:
            for task in context.tasks:
                task()
            if notes:
                self._tell(("notes", tuple(notes)))
            if data.events:
                self._tell(("events", tuple(data.events.items())))
            if data.target_observations:
                self._tell(("targets", tuple(data.target_observations.items())))


@functools.lru_cache(maxsize=64)
def _imports_hypothesis(code: types.CodeType) -> bool:
    return any(name.partition(".")[0] == "hypothesis" for name in code.co_names) or any(
        isinstance(constant, types.CodeType) and _imports_hypothesis(constant) for constant in code.co_consts
    )


def keep_steps(error: BaseException) -> None:
    """Attach the steps of the running Hypothesis state machine, if any, to `error`, for `steps_to`.
    The traceback cannot provide them, because Hypothesis removes its own frames from it."""
    control: Any = sys.modules.get("hypothesis.control")
    if control is not None:
        with contextlib.suppress(Exception):
            # The list itself, not a copy: the last step is appended only when the error ends it
            # (hypothesis/stateful.py, 6.170).
            setattr(error, _STEPS, control.current_build_context().data._stateful_repr_parts)


def steps_to(error: BaseException) -> list[str]:
    """Return the steps of the state machine that led to `error`, as Hypothesis prints them; empty without one."""
    return list(getattr(error, _STEPS, None) or ())


def deliver(messages: Mapping[int, Iterable[tuple[str, Any]]]) -> None:
    """Repeat the reports of the ranks in this process; equal reports of several ranks once.
    `messages`: rank -> the reports of its `Collector`, in order."""
    contents: dict[str, dict[int, list[Any]]] = {}
    for rank, asides in sorted(messages.items()):
        for topic, content in asides:
            contents.setdefault(topic, {}).setdefault(rank, []).append(content)
    repeat(_flat(contents.pop("log", {}).values()))
    for warning in dict.fromkeys(_flat(contents.pop("warning", {}).values())):
        _warn(warning)
    for name, text, file, line in dict.fromkeys(_flat(contents.pop("stray", {}).values())):
        # Of an uncaught exception, as of a thread, that came after the function returned; the current filters apply.
        warnings.warn_explicit(text, getattr(pytest, name), file, line)
    met = set(_flat(contents.pop("known", {}).values()))
    for name in sorted({name for name, _ in met}):
        known_defects.report(known_defects.Met(name, failed=(name, True) in met))
    for case, reason in dict.fromkeys(_flat(contents.pop("left_out", {}).values())):
        left_out(case, reason)
    hypothesis: Any = sys.modules.get("hypothesis")
    if not contents or hypothesis is None or not hypothesis.currently_in_test_context():
        return
    _note(hypothesis, contents.get("notes", {}), ranks=len(messages))
    for value, payload in dict.fromkeys(_flat(_flat(contents.get("events", {}).values()))):
        hypothesis.event(value, payload)
    targets: dict[str, float] = {}
    for label, observation in _flat(_flat(contents.get("targets", {}).values())):
        targets[label] = max(observation, targets.get(label, observation))
    for label, observation in targets.items():
        hypothesis.target(observation, label=label)


def _note(hypothesis: Any, contents: Mapping[int, list[tuple[str, ...]]], ranks: int) -> None:
    """Pass the ranks' notes to Hypothesis: equal texts once, prefixed with the ranks if not all `ranks` agree."""
    notes = ((tuple(note for many in content for note in many), rank) for rank, content in contents.items())
    for texts, who in grouped(notes):
        prefix = "" if len(who) == ranks else f"{'rank' if len(who) == 1 else 'ranks'} {', '.join(map(str, who))}: "
        for text in texts:
            hypothesis.note(prefix + text)


def _warn(warning: _Warning) -> None:
    """Issue a warning of a rank again, for pytest to collect. The rank has applied the filters already."""
    kinds, text, filename, line = warning
    category = next(filter(None, map(_category, kinds)), UserWarning)
    name = kinds[0][1].rpartition(".")[2]
    if category.__name__ != name:
        text = f"{name}: {text}"  # only the rank can import the warning's class
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn_explicit(text, category, filename, line)


def _category(name: tuple[str, str]) -> type[Warning] | None:
    resolved: Any = sys.modules.get(name[0])  # without an import, because the module may be torch
    for attribute in name[1].split("."):
        resolved = getattr(resolved, attribute, None)
    return resolved if isinstance(resolved, type) and issubclass(resolved, Warning) else None
