"""How much a property of the acceptance draws at each level."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from mgpu_check.settings import active

__all__ = ["SEEDS", "drawn", "seconds_for_a_call"]

SEEDS = st.integers(0, 2**16).filter(bool)
"""Seeds of data. Hypothesis begins with the simplest value, 0, which would be the only one of a single example: it is refused."""

_SECONDS = {"quick": 20.0, "standard": 120.0, "long": 600.0}


def drawn(*, quick: int, standard: int, long: int) -> settings:
    """Make Hypothesis settings for a property with so many examples at each level.

    An example looks at all GPUs and notes what is wrong, so none is shrunk: which GPU is at fault is found by another look,
    and not by a smaller example. There is no deadline, because ranks have one; and no example database, because a run leaves
    no files where it was started.
    """
    return settings(
        max_examples={"quick": quick, "standard": standard, "long": long}[active().gpu_level],
        phases=(Phase.explicit, Phase.generate),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def seconds_for_a_call() -> float:
    """Return the seconds that all GPUs get for one call; ``--rank-timeout`` where that is less."""
    return min(_SECONDS[active().gpu_level], active().rank_timeout)
