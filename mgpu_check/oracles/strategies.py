"""Hypothesis strategies of the cases that several properties share: world sizes, devices, tensors, batches, training.

Worlds and devices are limited to the devices of the run. Batches are split along one dimension over these devices.
Operators have their operands on two devices. `examples` makes Hypothesis' settings of the packaged properties.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import hypothesis
from hypothesis import strategies as st

from mgpu_check import settings
from mgpu_check.devices.inventory import Slot, WorldSize, slots_for, spread
from mgpu_check.oracles.devices.mixed_operands import OperatorTable
from mgpu_check.oracles.tensors import (
    COMPLEX_DTYPES,
    DTYPES,
    KINDS,
    LAYOUTS,
    PINNED,
    BatchSpec,
    Leaf,
    Nested,
    Split,
    TensorSpec,
    layouts_for,
)
from mgpu_check.oracles.training.cases import OPTIMIZERS, ExactTraining, TrainingSpec, WholeRun

T = TypeVar("T")

MORE = st.builds(lambda: settings.active().depth != "quick")
"""True above the level "quick". Drawn, because the options are known when examples are drawn, but not on ranks."""

_FEWEST = 12
_LEVELS = {"quick": 0.25, "standard": 1.0, "long": 10.0}
"""Number of examples at each level, as a share of the number at the level "standard"."""

_settings_by_id: dict[int, tuple[hypothesis.settings, int, int | None]] = {}
"""The settings that `examples` made, with its arguments, by their ``id``."""


def examples(count: int, *, quick: int | None = None) -> hypothesis.settings:
    """Make Hypothesis settings for a packaged property.

    There is no deadline, because the first example of a world size starts its ranks; and no example database, because a
    run leaves no files in its directory. `count` is the number of examples at the level "standard"; the level "long"
    has ten times as many. `quick` is that at the level "quick", at most `count`, by default a quarter of it, but at
    least 12.
    """
    adjusted = hypothesis.settings(
        max_examples=_count(count, quick, settings.active().depth),
        phases=(hypothesis.Phase.explicit, hypothesis.Phase.generate, hypothesis.Phase.shrink),
        deadline=None,
        database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    _settings_by_id[id(adjusted)] = adjusted, count, quick
    return adjusted


def at_level(original: hypothesis.settings, level: str) -> hypothesis.settings:
    """Return the settings with the number of examples of another level; unchanged if `examples` did not make them."""
    if id(original) not in _settings_by_id:
        return original
    _, count, quick = _settings_by_id[id(original)]
    return hypothesis.settings(original, max_examples=_count(count, quick, level))


def _count(count: int, quick: int | None, level: str) -> int:
    share = _LEVELS[level]
    if share >= 1:
        return round(count * share)
    return min(count, max(_FEWEST, round(count * share)) if quick is None else quick)


def _devices() -> int:
    return settings.active().gpus or 0


def is_only_example() -> bool:
    """Return whether the test that draws has one example.

    Hypothesis tries the simplest example first, so such a test would draw the same one in every run. Its seeds differ
    between runs, and its world sizes are those that the first of several examples has.
    """
    # While a test runs, the default is the settings of the test (hypothesis/core.py, local_settings, Hypothesis 6.170).
    return hypothesis.settings.default is not None and hypothesis.settings.default.max_examples == 1


def first_of(choices: Sequence[T]) -> st.SearchStrategy[T]:
    """Draw one of `choices`: the first one in the first example, also if it is the only example."""
    return st.sampled_from(choices[:1] if is_only_example() else choices)


@st.composite
def _when_drawn(draw: st.DrawFn, make: Callable[[], st.SearchStrategy[T]]) -> T:
    """Draw from the strategy that `make` returns now.

    `st.deferred` keeps its first result (hypothesis/strategies/_internal/deferred.py, Hypothesis 6.170).
    """
    return draw(make())


def _up_to(least: int, most: int | None, available: int, argument: str) -> st.SearchStrategy[int]:
    if least > available:
        raise ValueError(
            f"{argument}: at least {least} were asked for, but the run has {available} for this test; "
            f"run with --gpus={least}, and request no fewer by a mark of the test"
        )
    largest = available if most is None else min(most, available)
    # The largest size covers the most devices. Among it and the next smaller size, one is odd, and one no power of two.
    below = largest - 1 if largest > max(least, 2) else largest
    return st.integers(least, largest) | st.sampled_from((largest, below))


def _worlds(least: int, most: int | None, argument: str = "world_sizes") -> st.SearchStrategy[int]:
    per_host = settings.active().per_host
    sizes = _up_to(least, most, _devices(), argument)
    if len(per_host) < 2:
        return sizes
    # Simple worlds first, because examples shrink towards them.
    largest = min(most or sum(per_host), sum(per_host))
    return st.sampled_from([world for size in range(least, largest + 1) for world in placed(size, per_host)])


def placed(size: int, per_host: Sequence[int]) -> list[WorldSize]:
    """Return the useful distributions of a world of `size` over the hosts: within each host, and across hosts."""
    hosts = range(len(per_host))
    worlds = [WorldSize([size if host == only else 0 for host in hosts]) for only in hosts if size <= per_host[only]]
    counts_of_hosts = range(2, len(per_host) + 1)
    spreads = [spread(size, per_host[:n]).per_host for n in counts_of_hosts if size <= sum(per_host[:n])]
    # Fill the first hosts completely, so that hosts have unequal numbers of ranks.
    filled = slots_for(size, [Slot(host, index) for host in hosts for index in range(per_host[host])])
    spreads.append(tuple(sum(slot.host == host for slot in filled) for host in hosts))
    for counts in spreads:
        world = WorldSize([*counts, *([0] * (len(per_host) - len(counts)))])
        if world.per_host not in [candidate.per_host for candidate in worlds]:
            worlds.append(world)
    return worlds


def world_sizes(least: int = 1, most: int | None = None) -> st.SearchStrategy[int]:
    """Draw world sizes from `least` to the number of devices of the run, at most `most`.

    In a run on several hosts, they are `WorldSize`s with the number of ranks per host: within one host, or across
    hosts.

    The number of devices is read when an example is drawn, so a module may create the strategy before options are
    known.

    Raises:
        ValueError: when drawn, if the run has fewer than `least` devices.
    """
    return _when_drawn(lambda: _worlds(least, most))


def large_worlds(least: int = 1, most: int | None = None) -> st.SearchStrategy[int]:
    """Draw world sizes like `world_sizes`, the largest first: for checks with few examples, one with all ranks."""

    def make() -> st.SearchStrategy[int]:
        largest = min(_devices(), _devices() if most is None else most)
        if len(settings.active().per_host) >= 2 or largest < least:
            return _worlds(least, most, "large_worlds")
        return first_of(range(largest, least - 1, -1))

    return _when_drawn(make)


def world_pairs(least: int = 1, most: int | None = None) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw two world sizes for one example, the largest first; only one if no other size exists.

    For checks with few examples: the first example has the largest size and the next smaller one; one of them is odd.
    """

    def make() -> st.SearchStrategy[tuple[int, ...]]:
        if len(settings.active().per_host) >= 2:
            return st.lists(_worlds(least, most), min_size=2, max_size=2, unique=True).map(tuple)
        largest = min(_devices(), _devices() if most is None else most)
        if largest <= least:
            return _worlds(least, most, "world_pairs").map(lambda size: (size,))
        return first_of([(largest, smaller) for smaller in range(largest - 1, least - 1, -1)])

    return _when_drawn(make)


def device_counts(least: int = 1, most: int | None = None) -> st.SearchStrategy[int]:
    """Draw numbers of devices, like `world_sizes`; in a run on several hosts, of the devices of one host."""
    return _when_drawn(lambda: _up_to(least, most, settings.active().gpus_of_host, "device_counts"))


def device_orders(least: int = 1, most: int | None = None) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw distinct device indices of one host, in any order: from `least` to all devices, at most `most`.

    Most examples, the first included, use the largest number of devices. The first example starts with the last device.
    """

    def make() -> st.SearchStrategy[tuple[int, ...]]:
        available = settings.active().gpus_of_host
        largest = min(available, available if most is None else most)
        if is_only_example():
            return st.permutations(range(available - 2, -1, -1)).map(lambda others: (available - 1, *others)[:largest])
        # The largest once more, so that few examples find an error of one device.
        sizes = st.just(largest) | _up_to(least, most, available, "device_orders")
        shuffled = st.permutations(range(available - 1, -1, -1))
        return st.tuples(shuffled, sizes).map(lambda drawn: tuple(drawn[0][: drawn[1]]))

    return _when_drawn(make)


def all_devices() -> st.SearchStrategy[int]:
    """Draw the number of devices of the run; in a run on several hosts, that of the test's host."""
    return _when_drawn(lambda: st.just(settings.active().gpus_of_host))


def places(*, cpu: bool = True) -> st.SearchStrategy[str]:
    """Draw a device for a tensor: "cpu" (unless `cpu` is false), "cuda:0", ... up to the last device of the run."""
    return _when_drawn(lambda: st.sampled_from(_places(cpu)))


def device_pairs(*, cpu: bool = True) -> st.SearchStrategy[tuple[str, str]]:
    """Draw two different devices, in either order.

    Raises:
        ValueError: when drawn, if `cpu` is false and the run has one device.
    """
    return _when_drawn(lambda: st.sampled_from(all_pairs(cpu=cpu)))


def _places(cpu: bool) -> list[str]:
    return [*(["cpu"] if cpu else []), *(f"cuda:{index}" for index in range(settings.active().gpus_of_host))]


def all_pairs(*, cpu: bool = True) -> list[tuple[str, str]]:
    """Return all pairs that `device_pairs` can draw in this run."""
    pairs = [(source, target) for source in _places(cpu) for target in _places(cpu) if source != target]
    if not pairs:
        raise ValueError("device_pairs: cpu=False needs two devices, but the run has 1 for this test; give it more")
    return pairs


def seeds() -> st.SearchStrategy[int]:
    """Draw seeds for a spec's data; small numbers, so that a printed spec stays readable.

    A test draws a seed in place of data for one of these reasons. Sizes, roots, positions and orders have strategies of
    their own, because a smaller one simplifies a failure.

    - All elements must differ, or all sums must be exact, so that a misplaced, lost or rounded element shows. Drawn
      elements would repeat, and shrink to zeros.
    - The example is a table of all operators, dtypes, sizes or layouts. The first example must have all of it, and a
      failure names the wrong case and its first wrong element, so no smaller example would say more.
    - The seed itself is under test, as that of a generator or a sampler.

    A test of one example draws another seed in each run. A test of several begins with 0, and so with the first value
    of all its arguments.
    """
    return st.integers(0, 999).filter(lambda seed: seed or not is_only_example())


def dtypes(choices: Sequence[str] = DTYPES) -> st.SearchStrategy[str]:
    """Draw names of dtypes; simplest first."""
    return st.sampled_from(tuple(choices))


def layouts(dims: int) -> st.SearchStrategy[str]:
    """Draw names of layouts that exist for tensors with `dims` dimensions; shrinks to contiguous."""
    return st.sampled_from(layouts_for(dims))


def shapes(
    min_dims: int = 0, max_dims: int = 4, min_size: int = 0, max_size: int = 6
) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw shapes with `min_dims` to `max_dims` dimensions of `min_size` to `max_size` each."""
    return st.lists(st.integers(min_size, max_size), min_size=min_dims, max_size=max_dims).map(tuple)


@st.composite
def tensors(
    draw: st.DrawFn,
    *,
    shape: st.SearchStrategy[tuple[int, ...]] | tuple[int, ...] | None = None,
    dtypes: Sequence[str] = DTYPES,
    values: Sequence[str] = ("distinct",),
    layouts: Sequence[str] = LAYOUTS,
) -> TensorSpec:
    """Draw specs of tensors: shape, dtype, layout, seed and kind of values.

    Args:
        shape: a shape, or a strategy of shapes; by default 0 to 4 dimensions of 0 to 6 elements.
        dtypes: the dtypes to draw from, simplest first.
        values: the kinds of values to draw from, simplest first.
        layouts: the layouts to draw from, simplest first; those that do not exist for the shape are left out.
    """
    drawn = shape if isinstance(shape, tuple) else draw(shapes() if shape is None else shape)
    possible = [name for name in layouts if name in layouts_for(len(drawn))] or ["contiguous"]
    return TensorSpec(
        drawn,
        draw(st.sampled_from(tuple(dtypes))),
        draw(st.sampled_from(possible)),
        draw(seeds()),
        draw(st.sampled_from(tuple(values))),
    )


@st.composite
def whole_runs(
    draw: st.DrawFn,
    models: Sequence[str] = ("mlp",),
    *,
    least: int = 1,
    most: int = 3,
    rows: Sequence[int] = (8, 5, 13, 24, 12, 9, 7, 2, 1),
    small: bool = False,
) -> tuple[WholeRun, ...]:
    """Draw one run for each model, of `least` to `most` steps, with `rows` in a batch; `small` is as in `WholeRun`.

    Rows, optimizers and steps cycle through the models, from a drawn position. So the first example, which is always
    the same, already has even and uneven batches.
    """
    offset, seed = draw(st.integers(0, 999)), draw(st.integers(0, 999))
    runs = []
    for position, model in enumerate(models, start=offset):
        steps, optimizer = least + position % (most - least + 1), OPTIMIZERS[position % len(OPTIMIZERS)]
        runs.append(WholeRun(model, rows[position % len(rows)], steps, optimizer, small, seed + position))
    return tuple(runs)


@st.composite
def mostly_all(draw: st.DrawFn, least: int = 1) -> int:
    """Draw world sizes; two of three examples, the first included, use all devices, so that few examples find an error
    of one device."""
    sizes = () if is_only_example() else (all_devices(), world_sizes(least=least))
    return draw(st.one_of(all_devices(), *sizes))


@st.composite
def exact_trainings(
    draw: st.DrawFn, *, batch: Sequence[int] = (7, 8, 5, 2, 13), momentum: Sequence[float] = (0.5, 0.0)
) -> ExactTraining:
    """Draw exact training of a perceptron with one hidden layer, in two steps. `batch` and `momentum` are the values to
    draw from, simplest first."""
    return ExactTraining(
        widths=(6, draw(st.sampled_from((10, 7, 13))), 5),
        batch=draw(st.sampled_from(tuple(batch))),
        momentum=draw(st.sampled_from(tuple(momentum))),
        seed=draw(st.integers(0, 999)),
    )


def batch_sizes(devices: int, *, empty: bool = True) -> st.SearchStrategy[int]:
    """Draw batch sizes around a number of devices: smaller, multiples of it, and other sizes above it.

    Shrinks to 0 if `empty` is true, else to 1.
    """
    least = 0 if empty else 1
    fewer = st.integers(least, devices)
    multiple = st.integers(1, 4).map(lambda times: times * devices)
    uneven = st.builds(
        lambda times, rest: times * devices + rest, st.integers(1, 3), st.integers(1, max(1, devices - 1))
    )
    return st.one_of(fewer, uneven, multiple)


@st.composite
def sample_tensors(
    draw: st.DrawFn, size: int, dim: int, *, dtypes: Sequence[str] = DTYPES, values: Sequence[str] = ("distinct",)
) -> TensorSpec:
    """Draw a tensor of 1 to 4 dimensions with `size` elements along `dim`, which may be negative."""
    least = -dim if dim < 0 else dim + 1
    dims = draw(st.integers(least, max(least, 4)))
    # Sizes of 1 to 3 keep examples small; a size of 0 beside the batch is as legal as an empty batch, and rarer.
    shape = draw(st.lists(st.sampled_from((*(2, 1, 3) * 4, 0)), min_size=dims, max_size=dims))
    shape[dim] = size
    return draw(tensors(shape=tuple(shape), dtypes=dtypes, values=values))


@st.composite
def batches(
    draw: st.DrawFn,
    size: int | st.SearchStrategy[int],
    dim: int = 0,
    *,
    dtypes: Sequence[str] = DTYPES,
    values: Sequence[str] = ("distinct",),
    leaves: bool = False,
    kinds: Sequence[str] = KINDS,
) -> BatchSpec:
    """Draw a tensor, or tensors nested in tuples, lists, dicts and named tuples, each with `size` elements along `dim`.

    Args:
        size: the batch size, equal for all tensors, or a strategy for it.
        dim: the dimension along which the batch is split; may be negative.
        dtypes: of the tensors, simplest first.
        values: kinds of values of the tensors, simplest first.
        leaves: whether to mix in values that are not tensors.
        kinds: the containers to draw from; if empty, the batch is a single tensor.
    """
    length = size if isinstance(size, int) else draw(size)
    tensor: st.SearchStrategy[BatchSpec] = sample_tensors(length, dim, dtypes=dtypes, values=values)
    if not kinds:
        return draw(tensor)
    leaf = st.sampled_from([Leaf(value) for value in (None, 7, 0.5, "mean", True, (), frozenset({"train"}))])
    entry = st.one_of(tensor, leaf) if leaves else tensor
    return draw(st.one_of(tensor, st.recursive(entry, lambda inner: _containers(inner, kinds), max_leaves=4)))


def _containers(inner: st.SearchStrategy[BatchSpec], kinds: Sequence[str]) -> st.SearchStrategy[BatchSpec]:
    def of(container: str) -> st.SearchStrategy[BatchSpec]:
        least, most = (2, 2) if container == "namedtuple" else (1, 3)
        parts = st.lists(inner, min_size=least, max_size=most)
        return parts.map(lambda entries: Nested(container, tuple(entries)))

    return st.one_of([of(container) for container in kinds])


@st.composite
def splits(
    draw: st.DrawFn,
    *,
    dims: Sequence[int] = (0, 1, -1, 2, -2),
    dtypes: Sequence[str] = DTYPES,
    values: Sequence[str] = ("distinct",),
    leaves: bool = False,
    kinds: Sequence[str] = KINDS,
) -> Split:
    """Draw a batch, its source, the devices to split it over, and the device that gathers the shards.

    The batch is split over one up to all devices of the run, in any order. Batch sizes are around the number of
    devices. The source is the CPU, pinned memory or a device. Most examples use all devices, because that is where
    shards get lost.

    Args:
        dims: the dimensions to split along, simplest first; may be negative.
        dtypes: see `batches`. The default also gives complex dtypes if the drawn dimension is not negative.
        values: see `batches`; so are `leaves` and `kinds`.
    """
    total = draw(all_devices())
    devices = draw(st.one_of(device_counts(), st.just(total)))
    dim = draw(st.sampled_from(tuple(dims)))
    size = draw(batch_sizes(devices))
    # Scatter views a complex tensor as real with one more last dimension, so a negative dim would be off by one
    # (torch/nn/parallel/_functions.py, Scatter.forward, torch 2.13).
    possible = (*dtypes, *COMPLEX_DTYPES) if dim >= 0 and dtypes == DTYPES else dtypes
    batch = draw(batches(size, dim, dtypes=possible, values=values, leaves=leaves, kinds=kinds))
    source, target = draw(st.one_of(places(), st.just(PINNED))), draw(places())
    order = draw(st.one_of(st.just(()), st.permutations(range(total)).map(lambda drawn: tuple(drawn[:devices]))))
    return Split(batch, size, dim, devices, source, target, order)


def given_sizes() -> st.SearchStrategy[list[int]]:
    """Draw the sizes of the shards of all devices of the run: different ones, and 0 if there are two or more."""
    return all_devices().flatmap(lambda count: st.permutations([*(3 * index % 5 for index in range(count - 1)), 5]))


@st.composite
def operator_tables(
    draw: st.DrawFn, *, must_raise: bool, only: str | None = None, without: tuple[str, ...] = ()
) -> OperatorTable:
    """Draw tables of operators: the number of rows, the data, and the pairs of devices.

    Take the cases that must raise, or those that must work. `only`, a name in `GROUPS`, restricts the operators;
    `without` are names in `GROUPS` to leave out.
    """
    devices = draw(all_devices())
    turn = draw(st.integers(1, max(1, devices - 1)))
    return OperatorTable(must_raise, only, without, devices, turn, draw(st.integers(1, 4)), draw(seeds()))


@st.composite
def trainings(
    draw: st.DrawFn,
    models: Sequence[str] = ("mlp",),
    *,
    batch: st.SearchStrategy[int] | None = None,
    steps: st.SearchStrategy[int] | None = None,
    windows: st.SearchStrategy[int] | None = None,
) -> TrainingSpec:
    """Draw training runs with even and uneven batches, of one to three steps.

    `models` are names in `MODELS`; repeat a name to draw it more often. A `batch` has by default 1 to 13 samples, so
    that some ranks get fewer than others, or none. `steps`, by default 1 to 3, and `windows`, by default one, are as in
    `TrainingSpec`.
    """
    return TrainingSpec(
        model=draw(st.sampled_from(tuple(models))),
        batch=draw(st.integers(1, 13) if batch is None else batch),
        steps=draw(st.integers(1, 3) if steps is None else steps),
        windows=1 if windows is None else draw(windows),
        momentum=draw(st.sampled_from((0.0, 0.9))),
        seed=draw(st.integers(0, 999)),
    )
