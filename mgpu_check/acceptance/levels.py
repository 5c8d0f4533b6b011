"""Hypothesis settings and time limits of the acceptance at each level."""

from __future__ import annotations

import math
import os

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from mgpu_check.settings import active

SEEDS = st.integers(0, 2**16).filter(bool)
"""Seeds of data, except 0.

Hypothesis tries the simplest value first, so a property with one example would always draw 0.
"""

_SECONDS = {"quick": 20.0, "standard": 120.0, "long": 600.0}


def drawn(*, quick: int, standard: int, long: int) -> settings:
    """Make Hypothesis settings for a property, with the given number of examples at each level.

    Examples are not shrunk: each covers all GPUs and records its failures, and second looks find the GPU at fault.
    There is no deadline, because ranks have their own; and no example database, because a run leaves no files in its
    directory.
    """
    return settings(
        max_examples={"quick": quick, "standard": standard, "long": long}[active().depth],
        phases=(Phase.explicit, Phase.generate),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


_MOST_SLOWDOWN = 3.0


def slowdown(most: float = math.inf) -> float:
    """Return how many processes share a core here, from 1 to `most`: ranks that wait for a core answer later."""
    return min(most, max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0))))


def seconds_for_a_call() -> float:
    """Return the seconds that a call on all GPUs may take: more on a busy host, at most ``--rank-timeout`` if given."""
    own = _SECONDS[active().depth] * slowdown(_MOST_SLOWDOWN)
    return min(own, active().rank_timeout) if active().given("rank_timeout") else own
