"""Set up tests that need devices, including tests that use ranks without having declared it."""

from __future__ import annotations

import dataclasses

import pytest

from mgpu_check.plugin.requirements import NEEDS, Needs
from mgpu_check.plugin.session import GpuSession
from mgpu_check.settings import activate


def begin(item: pytest.Item, needs: Needs, session: GpuSession) -> None:
    """Lease the devices of `item`, and start its account in the session."""
    from mgpu_check.plugin.execution import modules_of

    devices = session.begin_test(item.nodeid, needs.count)
    session.test.modules = modules_of(item)
    activate(dataclasses.replace(session.settings, gpus=devices, host=needs.host))


def adopt(item: pytest.Item, session: GpuSession) -> None:
    """Set up `item` when it first uses ranks through `request.getfixturevalue` or a fixture of wider scope."""
    if NEEDS in item.stash:
        return
    from mgpu_check.plugin.serialization import by_value

    item.stash[NEEDS] = Needs("parent", 0)
    begin(item, item.stash[NEEDS], session)
    session.until_end.enter_context(by_value(session.test.modules))
