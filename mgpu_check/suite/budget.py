"""Choose how many examples a packaged property draws."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

from mgpu_check.settings import active

__all__ = ["at_level", "examples", "limit"]

_FEWEST = 12
_LEVELS = {"quick": 0.25, "standard": 1.0, "long": 10.0}
"""Examples of a property at each level, as a share of those at the standard one."""

_share: float | None = None
_made: dict[int, tuple[settings, int, int | None]] = {}
"""The settings that `examples` has made, by their identity, with its arguments."""


def limit(share: float | None) -> None:
    """Let every property of the suite draw that share of its examples, and none shrink; `None` lifts the limit.

    For runs that ask only whether a property can pass. Properties that are imported already keep their number.
    """
    global _share
    _share = share


def examples(count: int, *, quick: int | None = None) -> settings:
    """Hypothesis settings for a packaged property of `count` examples.

    They are as many at the level "standard", ten times as many at "long", and `quick` of them at "quick": where that is
    not given a quarter, but not below 12.

    There is no deadline, because the first example of a world size starts its ranks; and no example database, because
    an acceptance run leaves no files where it was started.
    """
    phases: tuple[Phase, ...] = (Phase.explicit, Phase.generate, Phase.shrink)
    share = _LEVELS[active().gpu_level]
    if _share is not None:
        share, phases = _share, (Phase.explicit, Phase.generate)
    made = settings(
        max_examples=_count(count, quick, share),
        phases=phases,
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    _made[id(made)] = made, count, quick
    return made


def at_level(made: settings, level: str | None) -> settings:
    """Return settings that `examples` has made, with as many examples as at another level, None for that of the run.

    Settings that it has not made come back as they are.
    """
    if id(made) not in _made:
        return made
    _, count, quick = _made[id(made)]
    return settings(made, max_examples=_count(count, quick, _LEVELS[level or active().gpu_level]))


def _count(count: int, quick: int | None, share: float) -> int:
    if share >= 1:
        return round(count * share)
    return min(count, max(_FEWEST, round(count * share)) if quick is None else quick)
