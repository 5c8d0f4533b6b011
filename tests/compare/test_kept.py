"""`mgpu-check compare` on what training keeps beside parameters: the state of optimizers, and buffers."""

from __future__ import annotations

import pytest

from tests.compare.conftest import script

GPUS = {"slices": 4, "stages": 2, "zero": 2}


def kept(compare, kind, mistake, code):
    more = {"slices": 13, "stages": 0, "zero": 0}[kind]
    options = f"--gpus={GPUS[kind]}", "--simulate"
    return compare(script("kept"), *options, code=code, arguments=[kind, *[mistake] * bool(mistake)], more=more)


@pytest.mark.parametrize(
    "kind", [*(pytest.param(kind, marks=pytest.mark.slow) for kind in ("slices", "stages")), "zero"]
)
def test_a_state_that_is_divided_is_equal(compare, kind):
    outcome = kept(compare, kind, "", 0)
    assert (outcome.json["verdict"], outcome.json["not_compared"]) == ("equal", {})


@pytest.mark.parametrize(
    ("kind", "mistake", "tensor", "step", "named"),
    [
        pytest.param("slices", "state", "state", 3, "optimizer-differs", marks=pytest.mark.slow),
        pytest.param("slices", "scaled", "gradient", 1, "gradients-not-synchronized", marks=pytest.mark.slow),
        pytest.param("slices", "lost-state", "state", 1, "optimizer-differs", marks=pytest.mark.slow),
        pytest.param("slices", "buffer", "state", 3, "buffers-drift", marks=pytest.mark.slow),
        pytest.param("stages", "state", "state", 3, "optimizer-differs", marks=pytest.mark.slow),
        ("zero", "state", "parameter", 3, "optimizer-differs"),
        pytest.param("slices", "rate", "parameter", 1, "optimizer-differs", marks=pytest.mark.slow),
    ],
)
def test_a_state_that_is_wrong_is_found(compare, kind, mistake, tensor, step, named):
    outcome = kept(compare, kind, mistake, 1)
    found = outcome.json
    assert (found["verdict"], found["tensor"], found["step"], found["mistakes"]) == (
        "differs",
        tensor,
        step,
        [named],
    ), outcome.text
