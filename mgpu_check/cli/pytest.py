"""`mgpu-check pytest ARGUMENTS`: run pytest on the user's tests, on ranks that torchrun or srun has launched."""

from __future__ import annotations

from collections.abc import Sequence

import pytest


def main(argv: Sequence[str]) -> int:
    """Run pytest with the arguments `argv`, and return its exit code."""
    return int(pytest.main(list(argv)))
