"""Version of mgpu-check, and of what it was installed beside."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys

__version__ = "0.1.0"


def version() -> str:
    """Return the version of this package."""
    return _version("mgpu-check")


def torch_version() -> str:
    """Return the version of torch, without importing it."""
    return _version("torch")


def without_torch() -> str | None:
    """Return a sentence if this Python has no torch; None if it has."""
    if "torch" in sys.modules or ((spec := importlib.util.find_spec("torch")) is not None and spec.origin is not None):
        return None
    return f"torch is not installed for {sys.executable}: install torch 2.11 or newer there, or run another Python"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "of a source tree"
