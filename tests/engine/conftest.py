"""A pool of simulated ranks, shared by all tests that leave it in order."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from mgpu_check.engine.launcher import LocalLauncher
from mgpu_check.engine.pool import RankPool
from mgpu_check.plugin.serialization import by_value


@pytest.fixture(scope="session")
def warm_pool() -> Iterator[RankPool]:
    pool = RankPool(LocalLauncher(simulate="cpu"), slots=4, simulate="cpu", timeout=30.0)
    yield pool
    pool.close()


@pytest.fixture
def pool(warm_pool: RankPool) -> Iterator[RankPool]:
    warm_pool.begin_test()
    yield warm_pool
    warm_pool.end_test(failed=True)


@pytest.fixture
def this_module_by_value(request: pytest.FixtureRequest) -> Iterator[None]:
    """Send the functions of the test module by value: ranks cannot import it everywhere."""
    with by_value([request.module]):
        yield
