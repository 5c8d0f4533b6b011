"""Launch: ranks get the right environment, and a script in the style of tutorials trains like on one device.

The time of an epoch on one device and on all is measured and reported, but does not decide the outcome.
"""

from __future__ import annotations

from collections.abc import Callable

from mgpu_check.plugin.ranks import Ranks
from mgpu_check.settings import active

_SECONDS_OF_A_RANK = 20.0  # for the import of torch, while other ranks import it too


def test_ranks_are_told_who_they_are(ranks: Ranks) -> None:
    """The environment variables of each rank hold its rank, local rank and world size, in worlds of every size."""
    for size in range(1, ranks.size + 1):
        ranks.run("mgpu_check.suite.launch.launching:assert_rank_is_told", size=size)


def test_samples_of_replicas(ranks: Ranks) -> None:
    """DistributedSampler gives each replica as many samples, and all of them each sample, for data sets of any size."""
    ranks.run("mgpu_check.suite.launch.launching:assert_samplers_cover", size=1)


def test_script_under_torchrun(ranks: Ranks, record_property: Callable[[str, object], None]) -> None:
    """A script in the style of tutorials, launched by torchrun's agent, learns on all devices like on one.

    `torch.multiprocessing` reports which of its processes failed, and how.
    """
    timeout = active().rank_timeout + _SECONDS_OF_A_RANK * ranks.size
    (measured,) = ranks.run(
        "mgpu_check.suite.launch.launching:assert_trains_under_torchrun", ranks.size, size=1, timeout=timeout
    )
    record_property("mgpu_check.measured", measured)


def test_script_that_spawns_its_ranks(ranks: Ranks) -> None:
    """A script that spawns a rank for each visible GPU learns on all of them."""
    # More than two ranks would show nothing more, and each has to import torch.
    count = min(2, ranks.size)
    timeout = active().rank_timeout + _SECONDS_OF_A_RANK * count
    ranks.run("mgpu_check.suite.launch.launching:assert_trains_when_spawned", count, size=1, timeout=timeout)
