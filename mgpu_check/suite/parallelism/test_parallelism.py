"""Parallelism by hand: every way to divide a step among devices or ranks gives the result of one device.

Data are exact, so every order of sums must give the bits of one device; see
`mgpu_check.oracles.training.cases`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_check import strategies
from mgpu_check.engine.rank_side.rank import NamedFunction
from mgpu_check.oracles.strategies import MORE, exact_trainings, examples
from mgpu_check.oracles.training.cases import ExactTraining
from mgpu_check.plugin.ranks import Gpus, Ranks
from mgpu_check.suite.parallelism.cases import MECHANISMS, MechanismCase

CHECKS = "mgpu_check.suite.parallelism"
BY_HAND = f"{CHECKS}.handwritten_parallelism"
TRAININGS = exact_trainings()


@st.composite
def mechanism_cases(draw: st.DrawFn) -> list[MechanismCase]:
    """Draw a case of each mechanism."""
    cases = []
    for name in MECHANISMS:
        sizes = {key: draw(st.sampled_from(values)) for key, values in MECHANISMS[name].sizes.items()}
        dtype = draw(st.sampled_from(MECHANISMS[name].dtypes))
        cases.append(MechanismCase(name, sizes, dtype, draw(strategies.seeds())))
    return cases


@examples(8, quick=2)
@given(sizes=strategies.world_pairs(), seed=strategies.seeds())
def test_allreduce_by_hand(ranks: Ranks, sizes: tuple[int, ...], seed: int) -> None:
    """Ring, tree, halving-doubling, and reduce with broadcast leave the exact sum on every rank, for all sizes."""
    for size in sizes:
        ranks.run(f"{BY_HAND}:assert_allreduce_by_hand_matches", seed, size=size)


@pytest.mark.gpus(least=2)
@examples(12, quick=3)
@given(training=TRAININGS, order=strategies.device_orders(least=2, most=3))
def test_model_parallelism(gpus: Gpus, training: ExactTraining, order: tuple[int, ...]) -> None:
    """Parts of a model on two and three devices train like on one, and each parameter stays on its device."""
    for count in range(2, len(order) + 1):
        deep = replace(training, widths=(6, training.widths[1], *(4,) * (count - 2), 5))
        NamedFunction(f"{BY_HAND}:assert_model_parallel_agrees")(deep, [gpus[index] for index in order[:count]])


@pytest.mark.gpus(least=2)
@examples(12, quick=1)
@given(order=strategies.device_orders(least=2), seed=strategies.seeds())
def test_steps_over_devices(gpus: Gpus, order: tuple[int, ...], seed: int) -> None:
    """Parameters on several devices are clipped by one norm, and stepped or skipped by GradScaler together."""
    NamedFunction(f"{BY_HAND}:assert_clipped_over_devices")([gpus[index] for index in order], seed)
    NamedFunction(f"{BY_HAND}:assert_stepped_over_devices")([gpus[index] for index in order], seed)


@examples(8, quick=1)
@given(sizes=strategies.world_pairs(), training=TRAININGS)
def test_parallelized_modules(ranks: Ranks, sizes: tuple[int, ...], training: ExactTraining) -> None:
    """`parallelize_module` with all its styles, and with the batch replicated or divided, trains like on one device."""
    for size in sizes:
        ranks.run(
            f"{CHECKS}.torch_parallelism:assert_parallelized_agree",
            replace(training, widths=(6, 3 * size, 5), batch=2 * size),
            size=size,
        )
    ranks.run(f"{CHECKS}.torch_parallelism:assert_styles_agree", training.seed, size=min({*sizes} - {1}, default=1))


@pytest.mark.gpus(least=2)
@examples(8, quick=1)
@given(sizes=strategies.world_pairs(least=2, most=4), training=TRAININGS)
def test_pipeline_schedules(ranks: Ranks, sizes: tuple[int, ...], training: ExactTraining) -> None:
    """Schedules of `torch.distributed.pipelining` train like one device, also with two stages per rank."""
    for size in sizes:
        # The messages of a schedule with two stages per rank grow with both numbers, so only the smaller world runs it.
        most = 2 if size == min(sizes) else 1
        ranks.run(
            f"{CHECKS}.torch_parallelism:assert_schedules_agree",
            _deep(replace(training, batch=16), size),
            most,
            size=size,
        )


@pytest.mark.gpus(least=2)
@examples(10, quick=2)
@given(size=strategies.large_worlds(least=2), cases=mechanism_cases())
def test_mechanisms(ranks: Ranks, size: int, cases: list[MechanismCase]) -> None:
    """Mechanisms of model parallelism, from experts to attention by heads, give the results of one device."""
    ranks.run(f"{CHECKS}.torch_parallelism:assert_mechanisms_agree", cases, size=size)


@pytest.mark.gpus(least=2)
@examples(2, quick=1)
@given(sizes=strategies.world_pairs(least=2, most=4), training=TRAININGS, more=MORE)
def test_options_of_schedules(ranks: Ranks, sizes: tuple[int, ...], training: ExactTraining, more: bool) -> None:
    """Schedules of `torch.distributed.pipelining` train like one device with each pair of their options."""
    size = min(sizes)  # the messages of a schedule grow with the number of its stages
    ranks.run(
        f"{CHECKS}.torch_parallelism:assert_schedule_options_agree",
        _deep(replace(training, batch=16), size),
        more=more,
        size=size,
    )


def _deep(training: ExactTraining, layers: int) -> ExactTraining:
    """Deepen a training to `layers` layers, as wide as exact results allow: gradients of narrow layers are often 0."""
    hidden, most = ((6, 5)[: layers - 1], 16) if layers < 4 else ((3, 2, 3), 8)
    return replace(training, widths=(4, *hidden, 2), batch=min(training.batch, most))
