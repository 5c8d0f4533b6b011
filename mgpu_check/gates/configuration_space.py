"""The gate for a space of configurations: a step gives the same results with each pair of values of its options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from mgpu_check.diagnosis.observations import KINDS
from mgpu_check.errors import ScalingMismatch
from mgpu_check.gates.agreement_gate import Configuration, assert_steps_agree
from mgpu_check.gates.gate_arguments import RanksFixture
from mgpu_check.numerics.placement import Placement
from mgpu_check.oracles.pairs import fewest_options, settings_in_pairs

_GATE = "assert_configurations_agree"
_TOGETHER = 8  # settings that run in one comparison: more would keep the results of all of them

Setting = Mapping[str, Any]


def assert_configurations_agree(
    ranks: RanksFixture,
    step: Callable[..., Any],
    *,
    space: Mapping[str, Sequence[Any]],
    build: Callable[[], Any],
    batch: Callable[[int], Any],
    on: Callable[..., int | Mapping[str, int]] | None = None,
    valid: Callable[..., bool] | None = None,
    reference: Callable[..., Any] | None = None,
    placement: Placement = None,
    returned_by: Callable[[Mapping[str, int]], bool] | str | None = None,
    sizes: Sequence[int] | str | None = None,
    observe: Collection[str] = KINDS,
    tolerance: float | Mapping[str, float] | None = None,
    max_examples: int = 2,
) -> None:
    """Assert that a step gives the same results with all options of a space.

    The first value of each option is the simplest, and other configurations are compared with that of all first values.
    First one option has another value. Then settings together have each pair of values of two options. A failure is
    shrunk to the fewest options: the report names those, and without any one of them the step agrees.

    Args:
        ranks: the fixture.
        step: ``step(model, batch, rank, **options)``, or a class that is called with ``(model, rank, **options)``
            first and then like a step; see `assert_step_scales`.
        space: the options and their values: ``{"tp": [1, 2], "recompute": [False, True]}``.
        on: ``on(**options)`` returns the number of ranks or the mesh of a configuration. Default: all ranks.
        valid: ``valid(**options)`` returns whether a configuration may run. Default: all may.
        max_examples: approximate number of cases for each configuration.

    The other arguments are those of `assert_steps_agree`. With a `reference`, each configuration is compared with one
    device instead.

    Raises:
        ScalingMismatch: a configuration differs. The message has the options that it takes.
        NotCompared, RankHang: as in `assert_steps_agree`.
        ValueError: an argument is wrong, or no configuration besides the simplest is valid.
    """
    simplest = _simplest(space)
    if valid is not None and not valid(**simplest):
        raise ValueError(f"{_GATE}: valid is False for the first value of each option, {described(simplest)}")

    def is_allowed(options: Setting) -> bool:
        return valid is None or bool(valid(**simplest | dict(options)))

    others = [(name, value) for name, values in space.items() for value in values[1:]]
    settings = settings_in_pairs(others, is_allowed)
    if not settings:
        raise ValueError(f"{_GATE}: valid leaves the first value of each option alone, {described(simplest)}")

    def configuration(options: Setting) -> Configuration:
        whole = simplest | dict(options)
        return Configuration(
            functools.partial(step, **whole), None if on is None else on(**whole), placement, returned_by
        )

    def failure(tried: Sequence[Setting]) -> ScalingMismatch | None:
        steps = {described(options) or described(simplest): configuration(options) for options in ({}, *tried)}
        try:
            assert_steps_agree(
                ranks,
                steps,
                build=build,
                batch=batch,
                reference=reference,
                one_device=reference is not None,
                sizes=sizes,
                observe=observe,
                tolerance=tolerance,
                max_examples=max_examples,
            )
        except ScalingMismatch as error:
            return error
        return None

    alone: dict[str, ScalingMismatch | None] = {}  # description -> the error of a setting beside the simplest one

    def fails(options: dict[str, Any]) -> bool:
        if not options or not is_allowed(options):
            return False
        if described(options) not in alone:
            alone[described(options)] = failure([options])
        return alone[described(options)] is not None

    for start in range(0, len(settings), _TOGETHER):
        together = settings[start : start + _TOGETHER]
        if (error := failure(together)) is None:
            continue
        # Several may fail, and the simplest come first.
        if (failing := next(filter(fails, together), None)) is None:
            raise error
        smallest = fewest_options(failing, fails)
        fewer = [{other: smallest[other] for other in smallest if other != name} for name in smallest]
        agreeing = [options for options in fewer if described(options) in alone]  # the control
        error = (failure([*agreeing, smallest]) if agreeing else None) or alone[described(smallest)]
        assert error is not None
        remark = f"fails with {described(smallest)}"
        if agreeing:
            remark += f"; agrees with {', and with '.join(map(described, agreeing))}"
        raise ScalingMismatch(f"{error}\n  {remark}", ranks=error.ranks, mistakes=error.mistakes, site=error.site)


def described(options: Setting) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in options.items())


def _simplest(space: Mapping[str, Sequence[Any]]) -> dict[str, Any]:
    example = 'give a mapping from options to values, such as {"tp": [1, 2], "recompute": [False, True]}'
    if not isinstance(space, Mapping) or not space:
        raise ValueError(f"{_GATE}: space={space!r:.80}; {example}")
    for name, values in space.items():
        if not isinstance(name, str) or not isinstance(values, list | tuple) or len(values) < 2:
            raise ValueError(f"{_GATE}: space has {name!r}: {values!r:.80}; {example}, with two values or more")
    return {name: values[0] for name, values in space.items()}
