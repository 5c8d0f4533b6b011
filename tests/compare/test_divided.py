"""`mgpu-check compare` on scripts whose models, states and buffers are divided among ranks: right ones, wrong ones."""

from __future__ import annotations

import pytest

from tests.compare.conftest import script

KINDS = {
    **dict.fromkeys(("by-hand", "dtensor", "fsdp1", "fsdp1-views", "fsdp2", "fsdp2-tp", "pipeline"), 4),
    **dict.fromkeys(("experts", "experts-alone", "experts-same-samples"), 2),
    "slices": 4,
    "stages": 2,
    "zero": 2,
}
"""Number of ranks; the last three kinds are of the script `kept`."""
MORE = {"by-hand": 4, "slices": 13}  # whose ranks run again, to find slices
MISTAKES = {
    "by-hand": ("scaled", "no-reduction", "wrong-group", "no-average"),
    "dtensor": ("scaled", "no-reduction", "wrong-group", "no-average"),
    "fsdp1-views": ("scaled",),
    "pipeline": ("scaled", "no-average", "wrong-group"),
    **dict.fromkeys(
        ("experts", "experts-alone", "fsdp1", "fsdp2", "fsdp2-tp"), ("scaled", "no-reduction", "wrong-group")
    ),
}
AXES = {
    ("by-hand", "no-reduction"): "ranks agree along the groups of ranks 0, 2 and of ranks 1, 3, "
    "and differ along the groups of ranks 0-1 and of ranks 2-3",
    ("dtensor", "no-average"): "ranks differ along dp",
}
"""The reports of some mistakes: of one with groups, and of one with a mesh."""
KEPT = {
    ("slices", "state"): ("state", 3, "optimizer-differs"),
    ("slices", "scaled"): ("gradient", 1, "gradients-not-synchronized"),
    ("slices", "lost-state"): ("state", 1, "optimizer-differs"),
    ("slices", "buffer"): ("state", 3, "buffers-drift"),
    ("slices", "rate"): ("parameter", 1, "optimizer-differs"),
    ("stages", "state"): ("state", 3, "optimizer-differs"),
    ("zero", "state"): ("parameter", 3, "optimizer-differs"),
}
"""What differs first: its tensor, its step, and the mistake that is named."""
OFTEN = {("by-hand", "scaled"), ("zero", "state")}


def cases(pairs):
    """Most of them are run less often: each takes some seconds."""
    return [pytest.param(*pair, marks=[] if pair in OFTEN else pytest.mark.slow) for pair in pairs]


def compared(compare, kind, mistake, code):
    text = script("kept" if kind in ("slices", "stages", "zero") else "divided")
    options = f"--gpus={KINDS[kind]}", "--simulate"
    words = [kind, *[mistake] * bool(mistake)]
    return compare(text, *options, code=code, arguments=words, more=MORE.get(kind, 0)).json


@pytest.mark.parametrize(("kind", "mistake"), cases((kind, "") for kind in KINDS))
def test_a_divided_model_is_equal(compare, kind, mistake):
    outcome = compared(compare, kind, mistake, 0)
    assert (outcome["verdict"], outcome["not_compared"]) == ("equal", {})
    assert " of " not in outcome["headline"].partition("parameters")[0]  # all of them


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mistake"), cases((kind, mistake) for kind in MISTAKES for mistake in MISTAKES[kind]))
def test_a_divided_model_that_is_trained_wrongly_differs(compare, kind, mistake):
    outcome = compared(compare, kind, mistake, 1)
    assert (outcome["verdict"], outcome["step"], outcome["tensor"]) == ("differs", 1, "gradient")
    assert outcome["axes"] == AXES.get((kind, mistake), outcome["axes"])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "mistake"), cases(KEPT))
def test_a_state_that_is_wrong_is_found(compare, kind, mistake):
    outcome = compared(compare, kind, mistake, 1)
    tensor, step, named = KEPT[kind, mistake]
    assert (outcome["verdict"], outcome["tensor"], outcome["step"]) == ("differs", tensor, step), outcome["headline"]
    assert outcome["mistakes"] == [named]
