"""Stash keys for the state that the plugin carries from one hook to the next."""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import pytest

from mgpu_check.errors import RankFailure

if TYPE_CHECKING:
    from mgpu_check.plugin.report.replay import Invocation
    from mgpu_check.plugin.session import GpuSession

SESSION: pytest.StashKey[GpuSession] = pytest.StashKey()
MISUSE: pytest.StashKey[str] = pytest.StashKey()
FAILED: pytest.StashKey[bool] = pytest.StashKey()
TOLD: pytest.StashKey[RankFailure | None] = pytest.StashKey()
WATCHED: pytest.StashKey[ExitStack] = pytest.StashKey()
INVOCATION: pytest.StashKey[Invocation] = pytest.StashKey()
