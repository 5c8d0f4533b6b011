"""The gate is tested as users run it: by pytest in a process of its own."""

from __future__ import annotations

from tests.plugin.conftest import run as run
