"""Version of mgpu-check, and of what it was installed beside."""

from __future__ import annotations

import importlib.metadata

__version__ = "0.1.0"


def version() -> str:
    """Return the version of this package."""
    return _version("mgpu-check")


def torch_version() -> str:
    """Return the version of torch, without importing it."""
    return _version("torch")


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "of a source tree"
