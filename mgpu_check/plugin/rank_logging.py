"""Log on ranks as pytest logs in its own process: with its levels and formats, and with records for `caplog`."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

import pytest
from _pytest.logging import LogCaptureHandler

_MOST_RECORDS = 1000  # of a call, for `caplog`: bounds the memory of a loop that logs; the file has all lines


@dataclass(frozen=True)
class Logging:
    """How a rank logs.

    Attributes:
        levels: of the loggers of the pytest process that have one, by name; "" is the root.
        form, dates: the formats of a line and its time.
    """

    levels: Mapping[str, int]
    form: str
    dates: str

    @classmethod
    def of(cls, config: pytest.Config) -> Logging | None:
        """Return how pytest logs now, which its options, `caplog` and fixtures decide; None without its plugin."""
        if not config.pluginmanager.has_plugin("logging-plugin"):
            return None
        loggers = {"": logging.root, **logging.root.manager.loggerDict}
        levels = {
            name: logger.level
            for name, logger in loggers.items()
            if isinstance(logger, logging.Logger) and logger.level
        }
        form, dates = (config.getoption(name) or config.getini(name) for name in ("log_format", "log_date_format"))
        return cls({name: level for name, level in levels.items() if level}, form, dates)


class _Records(logging.Handler):
    """Sends records to the pytest process."""

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
