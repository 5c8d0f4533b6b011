"""Devices: copies between them arrive, and each keeps its own streams, random numbers and memory."""

from __future__ import annotations

from hypothesis import given

from mgpu_check import strategies
from mgpu_check.engine.rank_side.rank import NamedFunction
from mgpu_check.oracles.strategies import MORE, examples
from mgpu_check.plugin.ranks import Gpus, Ranks

COPIES = "mgpu_check.oracles.devices.copies"
CHECKS = "mgpu_check.suite.devices.checks"


@examples(2, quick=1)
@given(seed=strategies.seeds(), more=MORE)
def test_copies_around_borders(gpus: Gpus, seed: int, more: bool) -> None:
    """Copies around 64 KiB, 1 MiB and 4 MiB arrive whole between all devices and the host, and write nothing else."""
    NamedFunction(f"{COPIES}:assert_copies_whole")(gpus, seed, more=more)


@examples(4, quick=1)
@given(seed=strategies.seeds())
def test_copies_of_every_dtype(gpus: Gpus, seed: int) -> None:
    """Every copying call keeps every bit of each dtype and layout in both directions, NaN payloads included."""
    NamedFunction(f"{COPIES}:assert_copies_arrive")(gpus, seed)


@examples(4, quick=1)
@given(seed=strategies.seeds())
def test_copies_that_convert(gpus: Gpus, seed: int) -> None:
    """A copy to another device and dtype gives the same values as a conversion on the CPU."""
    NamedFunction(f"{COPIES}:assert_casts_arrive")(gpus, seed)


@examples(4, quick=1)
@given(seed=strategies.seeds())
def test_copies_of_pinned_memory(gpus: Gpus, seed: int) -> None:
    """Copies from and to pinned memory arrive, also if the host waits only for a stream or an event."""
    NamedFunction(f"{COPIES}:assert_pinned_copies_arrive")(gpus, seed)


@examples(4, quick=1)
@given(seed=strategies.seeds())
def test_modules_move(gpus: Gpus, seed: int) -> None:
    """A module moves with all its state: parameters, gradients, non-persistent buffers, tied weights and modes.

    A packed sequence moves with its order.
    """
    NamedFunction(f"{COPIES}:assert_modules_move")(gpus, seed)


def test_cuda_follows_the_current_device(gpus: Gpus) -> None:
    """The device "cuda" without an index is the current device, in any order of devices."""
    NamedFunction(f"{CHECKS}:assert_cuda_follows")(gpus)


def test_guards_restore(gpus: Gpus) -> None:
    """Guards of devices and streams restore the previous one, also when nested or left by an exception."""
    NamedFunction(f"{CHECKS}:assert_guards_restore")(gpus)


def test_threads_have_their_own_device(gpus: Gpus) -> None:
    """Each thread has a current device of its own."""
    NamedFunction(f"{CHECKS}:assert_threads_apart")(gpus)


@examples(4, quick=1)
@given(seed=strategies.seeds())
def test_streams_wait_for_each_other(gpus: Gpus, seed: int) -> None:
    """A stream that waits for a stream of any device sees its writes, and memory in use is not allocated again."""
    NamedFunction(f"{CHECKS}:assert_devices_wait")(gpus, seed)


@examples(4, quick=1)
@given(seed=strategies.seeds())
def test_generators_are_apart(gpus: Gpus, seed: int) -> None:
    """Seeds affect the named devices only, and drawing on one device does not change the others."""
    NamedFunction(f"{CHECKS}:assert_generators_apart")(gpus, seed)


@examples(4, quick=1)
@given(seed=strategies.seeds())
def test_states_of_generators_return(gpus: Gpus, seed: int) -> None:
    """A restored generator state gives the same numbers again, also where a checkpoint computes dropout again."""
    NamedFunction(f"{CHECKS}:assert_states_return")(gpus, seed)


@examples(4, quick=1)
@given(size=strategies.all_devices(), seed=strategies.seeds())
def test_ranks_draw_as_seeded(ranks: Ranks, size: int, seed: int) -> None:
    """Ranks with one seed draw the same numbers on GPUs of one model, and with different seeds different ones."""
    from mgpu_check.suite.devices.seeded_ranks import assert_ranks_draw_as_seeded

    assert_ranks_draw_as_seeded(ranks.run(f"{CHECKS}:drawn_by", seed, size=size))


@examples(4, quick=1)
@given(seed=strategies.seeds())
def test_map_location(gpus: Gpus, seed: int) -> None:
    """`torch.load` puts tensors where each form of `map_location` says, bit for bit, and keeps shared memory shared."""
    NamedFunction(f"{CHECKS}:assert_loads_arrive")(gpus, seed)


def test_memory_recovers(gpus: Gpus) -> None:
    """A device refuses an allocation that does not fit, keeps its data, counts both, and continues to work."""
    NamedFunction(f"{CHECKS}:assert_memory_recovers")(gpus)
