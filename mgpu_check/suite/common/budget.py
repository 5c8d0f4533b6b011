"""Hypothesis settings of the packaged properties."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from mgpu_check.settings import active

MORE = st.builds(lambda: active().depth != "quick")
"""True above the level "quick". Drawn, because the options are known when examples are drawn, but not on ranks."""

_FEWEST = 12
_LEVELS = {"quick": 0.25, "standard": 1.0, "long": 10.0}
"""Number of examples at each level, as a share of the number at the level "standard"."""

_settings_by_id: dict[int, tuple[settings, int, int | None]] = {}
"""The settings that `examples` made, with its arguments, by their ``id``."""


def examples(count: int, *, quick: int | None = None) -> settings:
    """Make Hypothesis settings for a packaged property.

    There is no deadline, because the first example of a world size starts its ranks; and no example database, because a
    run leaves no files in its directory.

    Args:
        count: number of examples at the level "standard". The level "long" has ten times as many.
        quick: number of examples at the level "quick", at most `count`. Default a quarter of `count`, but at least 12.
    """
    adjusted = settings(
        max_examples=_count(count, quick, active().depth),
        phases=(Phase.explicit, Phase.generate, Phase.shrink),
        deadline=None,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    _settings_by_id[id(adjusted)] = adjusted, count, quick
    return adjusted


def at_level(original: settings, level: str) -> settings:
    """Return the settings with the number of examples of another level; unchanged if `examples` did not make them."""
    if id(original) not in _settings_by_id:
        return original
    _, count, quick = _settings_by_id[id(original)]
    return settings(original, max_examples=_count(count, quick, level))


def _count(count: int, quick: int | None, level: str) -> int:
    share = _LEVELS[level]
    if share >= 1:
        return round(count * share)
    return min(count, max(_FEWEST, round(count * share)) if quick is None else quick)
