"""Versions of what must be the same wherever a run has processes."""

from __future__ import annotations

import importlib.metadata
import platform

from mgpu_check.version import __version__

__all__ = ["versions"]


def versions() -> dict[str, str]:
    """Return the versions of this process."""
    return {
        "Python": platform.python_version(),
        "torch": importlib.metadata.version("torch"),
        "mgpu-check": __version__,
    }
