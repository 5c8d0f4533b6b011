"""Strategies of mechanisms of model parallelism."""

from __future__ import annotations

from hypothesis import strategies as st

from mgpu_check.oracles.strategies import seeds
from mgpu_check.settings import active
from mgpu_check.suite.parallelism.cases import MECHANISMS, MechanismCase


@st.composite
def mechanism_cases(draw: st.DrawFn) -> list[MechanismCase]:
    """Draw a case of each mechanism; at the level "quick" of one."""
    mechanisms = list(MECHANISMS) if active().depth != "quick" else [draw(st.sampled_from(list(MECHANISMS)))]
    return [
        MechanismCase(
            name,
            {key: draw(st.sampled_from(values)) for key, values in MECHANISMS[name].sizes.items()},
            draw(st.sampled_from(MECHANISMS[name].dtypes)),
            draw(seeds()),
        )
        for name in mechanisms
    ]
