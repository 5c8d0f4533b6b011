"""Write reports to files, in the format of the suffix."""

from __future__ import annotations

import pkgutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from mgpu_check import pages
from mgpu_check.acceptance.documents import write_whole
from mgpu_check.acceptance.report.brief import brief
from mgpu_check.acceptance.run_report import RunReport
from mgpu_check.option_values import ACCEPTANCE_SUFFIXES

_WRITERS: Mapping[str, str] = {
    ".html": "page:render",
    ".json": "values:to_json",
    ".prom": "prometheus:render",
}
"""Suffix -> the module beside this one, and its function that renders a report. A module is imported when needed."""
assert tuple(_WRITERS) == ACCEPTANCE_SUFFIXES


def check_paths(paths: Iterable[Path | str]) -> None:
    """Raise ValueError, with the file and the remedy, unless a report can be written to each path."""
    for path in map(Path, paths):
        _writer(path)
        check_place(path)
        if path.suffix.lower() == ".html":
            pages.require(f"the report {path.name}")


def check_place(path: Path) -> None:
    """Raise ValueError unless a file can be written at `path`."""
    if not path.absolute().parent.is_dir():
        raise ValueError(
            f"there is no directory {path.absolute().parent} for {path.name}; make it, or choose another one"
        )
    if path.is_dir():
        raise ValueError(f"{path} is a directory; give the name of a file in it, such as {path / 'report.html'}")
    try:
        tempfile.TemporaryFile(dir=path.absolute().parent).close()
    except OSError as error:
        raise ValueError(
            f"{path} cannot be written: {error.strerror}; choose a directory that you may write to"
        ) from None


def clear(paths: Iterable[Path | str]) -> None:
    """Remove reports of earlier runs, so that they cannot be mistaken for those of a run that was killed."""
    for path in map(Path, paths):
        path.unlink(missing_ok=True)


def shortened(path: Path, report: RunReport) -> RunReport:
    """Return what the file has without ``--evidence``: in JSON, like observations are joined; pages have no more."""
    return brief(report) if path.suffix.lower() == ".json" else report


def write(path: Path | str, report: RunReport) -> None:
    """Write a report atomically, in the format of the suffix of `path`, in upper or lower case."""
    path = Path(path)
    if path.suffix.lower() == ".html":
        pages.require(f"the report {path.name}")
    write_whole(path, _writer(path)(report))


def _writer(path: Path) -> Callable[[RunReport], str]:
    if path.suffix.lower() not in _WRITERS:
        *some, last = ACCEPTANCE_SUFFIXES
        raise ValueError(f"{path} does not end in {', '.join(some)} or {last}; choose one of them")
    writer: Callable[[RunReport], str] = pkgutil.resolve_name(f"{__package__}.{_WRITERS[path.suffix.lower()]}")
    return writer
