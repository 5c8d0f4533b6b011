"""Choose how many examples a packaged property draws."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

from mgpu_check.settings import active

__all__ = ["examples", "limit"]

_FEWEST = 25
_LEVELS = {"quick": 0.25, "standard": 1.0, "long": 10.0}
"""Examples of a property at each level, as a share of those at the standard one."""

_share: float | None = None


def limit(share: float | None) -> None:
    """Let every property of the suite draw that share of its examples, and none shrink; `None` lifts the limit.

    For runs that ask only whether a property fails at all. Properties that are imported already keep their number.
    """
    global _share
    _share = share


def examples(count: int, *, quick: int | None = None) -> settings:
    """Hypothesis settings for a packaged property of `count` examples.

    They are as many at the level "standard", ten times as many at "long", and `quick` of them at "quick": where that is
    not given a quarter, but not below 25.

    There is no deadline, because the first example of a world size starts its ranks; and no example database, because
    an acceptance run leaves no files where it was started.
    """
    phases: tuple[Phase, ...] = (Phase.explicit, Phase.generate, Phase.shrink)
    share = _LEVELS[active().gpu_level]
    if _share is not None:
        share, phases = _share, (Phase.explicit, Phase.generate)
    if share >= 1:
        count = round(count * share)
    else:
        count = min(count, max(_FEWEST, round(count * share)) if quick is None else quick)
    return settings(
        max_examples=count,
        phases=phases,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
