"""`mgpu-check compare` on scripts whose models are divided among ranks: right ones, and wrong ones."""

from __future__ import annotations

import pytest

from tests.compare.conftest import script

SLICED = ("by-hand",)  # whose ranks run again, to find slices
KINDS = {
    "by-hand": 4,
    "dtensor": 4,
    "experts": 2,
    "experts-alone": 2,
    "experts-same-samples": 2,
    "fsdp1": 4,
    "fsdp1-views": 4,
    "fsdp2": 4,
    "fsdp2-tp": 4,
    "pipeline": 4,
}
MISTAKES = {
    "by-hand": ("scaled", "no-reduction", "wrong-group", "no-average"),
    "dtensor": ("scaled", "no-reduction", "wrong-group", "no-average"),
    "experts": ("scaled", "no-reduction", "wrong-group"),
    "experts-alone": ("scaled", "no-reduction", "wrong-group"),
    "fsdp1": ("scaled", "no-reduction", "wrong-group"),
    "fsdp1-views": ("scaled",),
    "fsdp2": ("scaled", "no-reduction", "wrong-group"),
    "fsdp2-tp": ("scaled", "no-reduction", "wrong-group"),
    "pipeline": ("scaled", "no-average", "wrong-group"),
}

AXES = {
    ("by-hand", "no-reduction"): "ranks agree along the groups of ranks 0, 2 and of ranks 1, 3, "
    "and differ along the groups of ranks 0-1 and of ranks 2-3",
    ("dtensor", "no-average"): "ranks differ along dp",
}
"""The reports of some mistakes: of one with groups, and of one with a mesh."""


def compared(compare, kind, mistake, code):
    options = f"--gpus={KINDS[kind]}", "--simulate"
    more = KINDS[kind] if kind in SLICED else 0
    return compare(script("divided"), *options, code=code, arguments=[kind, *[mistake] * bool(mistake)], more=more)


OFTEN = {("fsdp1", ""), ("by-hand", "scaled")}


def cases(pairs):
    """Most of them are run less often: each takes some seconds."""
    return [pytest.param(*pair, marks=[] if pair in OFTEN else pytest.mark.slow) for pair in pairs]


@pytest.mark.parametrize(("kind", "mistake"), cases((kind, "") for kind in KINDS))
def test_a_divided_model_is_equal(compare, kind, mistake):
    outcome = compared(compare, kind, mistake, 0)
    assert outcome.json["verdict"] == "equal"
    assert outcome.json["not_compared"] == {}
    assert " of " not in outcome.json["headline"].partition("parameters")[0]  # all of them


@pytest.mark.parametrize(("kind", "mistake"), cases((kind, mistake) for kind in MISTAKES for mistake in MISTAKES[kind]))
def test_a_divided_model_that_is_trained_wrongly_differs(compare, kind, mistake):
    outcome = compared(compare, kind, mistake, 1)
    assert outcome.json["verdict"] == "differs"
    assert (outcome.json["step"], outcome.json["tensor"]) == (1, "gradient")
    assert outcome.json["axes"] == AXES.get((kind, mistake), outcome.json["axes"])
