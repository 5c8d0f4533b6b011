"""`mgpu-check pytest ARGUMENTS`: pytest itself, for tests of one's own on ranks that torchrun or srun has launched."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

__all__ = ["main"]


def main(argv: Sequence[str]) -> int:
    """Run pytest with the arguments `argv`; its exit code."""
    return int(pytest.main(list(argv)))
