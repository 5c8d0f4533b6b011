"""The fixtures `ranks`, `rank` and `gpus`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mgpu_check.plugin.stash import SESSION

if TYPE_CHECKING:
    from mgpu_check.plugin.execution import Absent
    from mgpu_check.plugin.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(request: pytest.FixtureRequest) -> Ranks:
    """Run functions on ranks: `ranks.run(fn, *args, size=None)` calls fn on each and returns the results in rank order.

    Also takes `timeout=`, `devices=` and `environment=`.
    """
    from mgpu_check.plugin.ranks import Ranks

    session = request.config.stash[SESSION]
    if lack := session.lack(0):
        from mgpu_check.plugin.report import properties

        properties.add_lack(request._pyfuncitem, lack)
        pytest.skip(lack)  # here, because `request.getfixturevalue` is not known at collection
    return Ranks(session)


@pytest.fixture(scope="session")
def rank() -> Absent:
    """Give a test marked `ranks` the rank that runs its body: .index .size .local_index .node_index .device .group."""
    from mgpu_check.plugin.execution import Absent

    return Absent("rank")


@pytest.fixture(scope="session")
def gpus() -> Absent:
    """Give a test its GPUs, a tuple of torch.device, cuda:0 to cuda:N-1.

    The test runs in the node process, which sees all of them.
    """
    from mgpu_check.plugin.execution import Absent

    return Absent("gpus")
