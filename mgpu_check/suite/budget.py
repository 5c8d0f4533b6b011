"""Choose how many examples a packaged property draws."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

__all__ = ["examples", "limit"]

_FEWEST = 25

_share: float | None = None


def limit(share: float | None) -> None:
    """Let every property of the suite draw that share of its examples, and none shrink; `None` lifts the limit.

    For runs that ask only whether a property fails at all. Properties that are imported already keep their number.
    """
    global _share
    _share = share


def examples(count: int) -> settings:
    """Hypothesis settings for a packaged property of `count` examples.

    There is no deadline, because the first example of a world size starts its ranks; and no example database, because
    an acceptance run leaves no files where it was started.
    """
    phases: tuple[Phase, ...] = (Phase.explicit, Phase.generate, Phase.shrink)
    if _share is not None:
        count, phases = min(count, max(_FEWEST, round(count * _share))), (Phase.explicit, Phase.generate)
    return settings(
        max_examples=count,
        phases=phases,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
