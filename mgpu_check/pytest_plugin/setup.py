"""Set up tests that need devices, also one that nobody knew to need them."""

from __future__ import annotations

import dataclasses

import pytest

from mgpu_check.pytest_plugin.requirements import NEEDS, Needs
from mgpu_check.pytest_plugin.session import GpuSession
from mgpu_check.settings import activate

__all__ = ["adopt", "begin"]


def begin(item: pytest.Item, needs: Needs, session: GpuSession) -> None:
    """Give `item` its devices, and have fresh ranks."""
    devices = session.begin_test(item.nodeid, needs.count)
    activate(dataclasses.replace(session.settings, gpus=devices, host=needs.host))


def adopt(item: pytest.Item, session: GpuSession) -> None:
    """Make `item` a test of ours, as it uses ranks: by `request.getfixturevalue`, or through a fixture of another test."""
    if NEEDS in item.stash:
        return
    from mgpu_check.pytest_plugin.execution import modules_of
    from mgpu_check.pytest_plugin.serialization import by_value

    item.stash[NEEDS] = Needs("parent", 0)
    begin(item, item.stash[NEEDS], session)
    session.until_end.enter_context(by_value(modules_of(item)))
