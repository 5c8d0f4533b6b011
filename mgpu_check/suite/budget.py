"""Choose how many examples a packaged property draws."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings

from mgpu_check.settings import active

__all__ = ["at_level", "examples"]

_FEWEST = 12
_LEVELS = {"quick": 0.25, "standard": 1.0, "long": 10.0}
"""Examples of a property at each level, as a share of those at the standard one."""

_made: dict[int, tuple[settings, int, int | None]] = {}
"""The settings that `examples` has made, by their identity, with its arguments."""


def examples(count: int, *, quick: int | None = None) -> settings:
    """Hypothesis settings for a packaged property of `count` examples.

    They are as many at the level "standard", ten times as many at "long", and `quick` of them at "quick": where that is
    not given a quarter, but not below 12.

    There is no deadline, because the first example of a world size starts its ranks; and no example database, because
    an acceptance run leaves no files where it was started.
    """
    made = settings(
        max_examples=_count(count, quick, active().gpu_level),
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    _made[id(made)] = made, count, quick
    return made


def at_level(made: settings, level: str) -> settings:
    """Return settings that `examples` has made, with as many examples as at another level.

    Settings that it has not made come back as they are.
    """
    if id(made) not in _made:
        return made
    _, count, quick = _made[id(made)]
    return settings(made, max_examples=_count(count, quick, level))


def _count(count: int, quick: int | None, level: str) -> int:
    share = _LEVELS[level]
    if share >= 1:
        return round(count * share)
    return min(count, max(_FEWEST, round(count * share)) if quick is None else quick)
