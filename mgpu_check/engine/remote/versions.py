"""The versions of the software that must be the same on all hosts of a run."""

from __future__ import annotations

import importlib.metadata
import platform

from mgpu_check.version import __version__


def versions() -> dict[str, str]:
    """Return name -> version, as seen by this process."""
    return {
        "Python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "mgpu-check": __version__,
    }
