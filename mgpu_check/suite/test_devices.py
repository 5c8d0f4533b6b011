"""Devices: each computes, keeps, copies and counts as it must, alone and beside the others, in every dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from mgpu_check import strategies
from mgpu_check.settings import active
from mgpu_check.suite.budget import examples

if TYPE_CHECKING:
    import torch

    from mgpu_check import Ranks
    from mgpu_check.checks.seeded_ranks import DrawnBy
    from mgpu_check.rank_side.rank import Rank


MORE = st.builds(lambda: active().gpu_level != "quick")
"""Drawn, because options are known where examples are, and not where devices are."""


@examples(3, quick=1)
@given(seed=strategies.seeds())
def test_elementwise_results(gpus: tuple[torch.device, ...], seed: int) -> None:
    """Functions of elements give what the CPU gives, in each dtype, for special values in all pairs; so do conversions."""
    from mgpu_check.checks.operating.agreement import assert_devices_agree
    from mgpu_check.checks.operating.elementwise import elementwise_cases

    assert_devices_agree(gpus, elementwise_cases(seed))


@examples(3, quick=1)
@given(seed=strategies.seeds())
def test_products(gpus: tuple[torch.device, ...], seed: int) -> None:
    """Products and convolutions, in every spelling and floating dtype, lose no digit of a factor and none of a sum."""
    from mgpu_check.checks.operating.agreement import assert_devices_agree
    from mgpu_check.checks.operating.products import product_cases

    assert_devices_agree(gpus, product_cases(seed))


@examples(3, quick=1)
@given(seed=strategies.seeds())
def test_reductions(gpus: tuple[torch.device, ...], seed: int) -> None:
    """Sums, extremes, orders and searches are exact in each dtype."""
    from mgpu_check.checks.operating.agreement import assert_devices_agree
    from mgpu_check.checks.operating.reductions import reduction_cases

    assert_devices_agree(gpus, reduction_cases(seed))


@examples(3, quick=1)
@given(seed=strategies.seeds())
def test_moves_keep_every_bit(gpus: tuple[torch.device, ...], seed: int) -> None:
    """What moves elements within a device keeps every bit of each dtype, contiguous or not."""
    from mgpu_check.checks.operating.agreement import assert_devices_agree
    from mgpu_check.checks.operating.moves import move_cases

    assert_devices_agree(gpus, move_cases(seed))


@examples(3, quick=1)
@given(seed=strategies.seeds(), more=MORE)
def test_layers_and_gradients(gpus: tuple[torch.device, ...], seed: int, more: bool) -> None:
    """Layers, losses and gradients are as near to those in float64 as their dtype allows."""
    from mgpu_check.checks.operating.agreement import assert_devices_agree
    from mgpu_check.checks.operating.layers import layer_cases

    assert_devices_agree(gpus, layer_cases(seed, more=more))


@examples(2, quick=1)
@given(seed=strategies.seeds(), more=MORE)
def test_large_results(gpus: tuple[torch.device, ...], seed: int, more: bool) -> None:
    """What reads or writes more than 4 MiB is as right as what is small."""
    from mgpu_check.checks.operating.agreement import assert_devices_agree
    from mgpu_check.checks.operating.large import large_cases

    assert_devices_agree(gpus, large_cases(seed, more=more))


@examples(3, quick=1)
@given(seed=strategies.seeds())
def test_functions_and_drawing(gpus: tuple[torch.device, ...], seed: int) -> None:
    """Functions are within their documented bounds; random numbers are spread as they should be, those drawn by weight, too."""
    from mgpu_check.checks.operating.drawn import assert_drawn_by_weight
    from mgpu_check.checks.operating.judged import assert_arithmetic_known

    assert_arithmetic_known(gpus, ("functions", "drawing"), seed)
    assert_drawn_by_weight(gpus, seed)


@examples(3, quick=1)
@given(seed=strategies.seeds())
def test_autocast_of_operators(gpus: tuple[torch.device, ...], seed: int) -> None:
    """Each operator that autocast is documented to know gives its dtype and values, in regions within others and functions, too."""
    from mgpu_check.checks.operating.autocasting import assert_autocast_as_documented

    assert_autocast_as_documented(gpus, seed)


@examples(2, quick=1)
@given(seed=strategies.seeds(), more=MORE)
def test_copies_around_borders(gpus: tuple[torch.device, ...], seed: int, more: bool) -> None:
    """Copies of sizes around 64 KiB and 1 MiB, up to 4 MiB, arrive whole between all devices and the host, and touch nothing else."""
    from mgpu_check.checks.device_copies import assert_copies_whole

    assert_copies_whole(gpus, seed, more=more)


@examples(4, quick=1)
@given(seed=strategies.seeds())
def test_copies_of_every_dtype(gpus: tuple[torch.device, ...], seed: int) -> None:
    """Every call that copies keeps every bit of each dtype and layout, NaN payloads too, in both directions."""
    from mgpu_check.checks.device_copies import assert_copies_arrive

    assert_copies_arrive(gpus, seed)


@examples(4, quick=1)
@given(seed=strategies.seeds())
def test_copies_that_convert(gpus: tuple[torch.device, ...], seed: int) -> None:
    """A copy to another device and dtype gives what the CPU's conversion gives."""
    from mgpu_check.checks.device_copies import assert_casts_arrive

    assert_casts_arrive(gpus, seed)


@examples(4, quick=1)
@given(seed=strategies.seeds())
def test_copies_of_pinned_memory(gpus: tuple[torch.device, ...], seed: int) -> None:
    """Copies from and to pinned memory arrive, also where only a stream or an event is waited for."""
    from mgpu_check.checks.device_copies import assert_pinned_copies_arrive

    assert_pinned_copies_arrive(gpus, seed)


@examples(4, quick=1)
@given(seed=strategies.seeds())
def test_modules_move(gpus: tuple[torch.device, ...], seed: int) -> None:
    """A module takes all that it holds to another device: parameters, gradients, buffers that are not saved, ties and modes."""
    from mgpu_check.checks.device_modules import assert_modules_move

    assert_modules_move(gpus, seed)


@examples(4, quick=1)
@given(seed=strategies.seeds())
def test_copies_have_memory_of_their_own(gpus: tuple[torch.device, ...], seed: int) -> None:
    """What is documented as a copy has memory of its own; what is documented as a view shares that of its source."""
    from mgpu_check.checks.device_modules import assert_memory_owned

    assert_memory_owned(gpus, seed)


def test_cuda_follows_the_current_device(gpus: tuple[torch.device, ...]) -> None:
    """What "cuda" names without an index is the device that was made current, in any order of devices."""
    from mgpu_check.checks.device_context import assert_cuda_follows

    assert_cuda_follows(gpus)


def test_guards_restore(gpus: tuple[torch.device, ...]) -> None:
    """Guards of devices and streams put back what was current, nested, and left by an exception."""
    from mgpu_check.checks.device_context import assert_guards_restore

    assert_guards_restore(gpus)


def test_threads_have_their_own_device(gpus: tuple[torch.device, ...]) -> None:
    """Each thread has a current device of its own."""
    from mgpu_check.checks.device_context import assert_threads_apart

    assert_threads_apart(gpus)


@examples(4, quick=1)
@given(seed=strategies.seeds())
def test_host_waits_for_streams(gpus: tuple[torch.device, ...], seed: int) -> None:
    """Whoever waits for a stream, an event or a stream behind them has what was queued."""
    from mgpu_check.checks.device_streams import assert_host_waits

    assert_host_waits(gpus, seed)


@examples(4, quick=1)
@given(seed=strategies.seeds())
def test_streams_wait_for_each_other(gpus: tuple[torch.device, ...], seed: int) -> None:
    """A stream that waits for one of any device sees what that one has written; memory in use is not handed out."""
    from mgpu_check.checks.device_streams import assert_devices_wait

    assert_devices_wait(gpus, seed)


def test_events_tell_the_time(gpus: tuple[torch.device, ...]) -> None:
    """An event is done when its stream has come to it, and not before."""
    from mgpu_check.checks.device_streams import assert_events_tell

    assert_events_tell(gpus)


@examples(4, quick=1)
@given(seed=strategies.seeds())
def test_generators_are_apart(gpus: tuple[torch.device, ...], seed: int) -> None:
    """Seeds rule the devices that they name; drawing on one changes nothing on others."""
    from mgpu_check.checks.device_random import assert_generators_apart

    assert_generators_apart(gpus, seed)


@examples(4, quick=1)
@given(seed=strategies.seeds())
def test_states_of_generators_return(gpus: tuple[torch.device, ...], seed: int) -> None:
    """A state that is set again gives the same numbers again."""
    from mgpu_check.checks.device_random import assert_states_return

    assert_states_return(gpus, seed)


@examples(4, quick=1)
@given(seed=strategies.seeds())
def test_dropout(gpus: tuple[torch.device, ...], seed: int) -> None:
    """Dropout drops what its seed says, the share that was asked for, and the same backward as forward."""
    from mgpu_check.checks.device_random import assert_dropout_as_seeded

    assert_dropout_as_seeded(gpus, seed)


@examples(4, quick=1)
@given(size=strategies.all_devices(), seed=strategies.seeds())
def test_ranks_draw_as_seeded(ranks: Ranks, size: int, seed: int) -> None:
    """Ranks with one seed draw the same numbers on GPUs of one model; with seeds of their own, none draws what another does."""
    from mgpu_check.checks.seeded_ranks import assert_ranks_draw_as_seeded

    assert_ranks_draw_as_seeded(ranks.run(_drawn, seed, size=size))


def _drawn(rank: Rank, seed: int) -> DrawnBy:
    from mgpu_check.checks.device_random import drawn_by

    return drawn_by(rank, seed)


@examples(4, quick=1)
@given(seed=strategies.seeds())
def test_map_location(gpus: tuple[torch.device, ...], seed: int) -> None:
    """`torch.load` puts tensors where each form of `map_location` says, every bit, and shared memory shared."""
    from mgpu_check.checks.device_memory import assert_loads_arrive

    assert_loads_arrive(gpus, seed)


def test_memory_recovers(gpus: tuple[torch.device, ...]) -> None:
    """A device refuses what it cannot hold, keeps what it holds, counts both, and goes on."""
    from mgpu_check.checks.device_memory import assert_memory_recovers

    assert_memory_recovers(gpus)
