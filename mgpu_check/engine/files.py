"""Open the files of ranks, and say what to do if the operating system refuses one."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import tempfile
from collections.abc import Iterator

from mgpu_check.errors import StartupFailure

_OF_TEMPORARY_FILES = "Make room in {directory}, or name another directory by the environment variable TMPDIR."
_REMEDIES = {
    errno.EMFILE: "Raise this limit of the shell, which is {soft} now: ulimit -n {more}.",
    errno.ENFILE: "Close files of other processes, or raise the limit of the machine: sysctl fs.file-max.",
    errno.EAGAIN: "End other processes, or raise their limit: ulimit -u.",
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.ENOENT), _OF_TEMPORARY_FILES),
}


@contextlib.contextmanager
def opening_files() -> Iterator[None]:
    """Raise a `StartupFailure` with the remedy for an error of the operating system."""
    try:
        yield
    except OSError as error:
        if error.errno not in _REMEDIES:
            raise
        soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        remedy = _REMEDIES[error.errno].format(soft=soft, more=2 * soft, directory=tempfile.gettempdir())
        raise StartupFailure(f"the files of ranks cannot be opened: {os.strerror(error.errno)}. {remedy}") from error
