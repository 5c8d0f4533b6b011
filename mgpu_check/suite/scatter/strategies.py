"""Strategies of batches, split along one dimension over the devices of the run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from hypothesis import strategies as st

from mgpu_check.suite.common.strategies import all_devices, device_counts, places, seeds
from mgpu_check.suite.common.tensors import COMPLEX_DTYPES, DTYPES, PINNED, TensorSpec, layouts_for
from mgpu_check.suite.scatter.cases import KINDS, BatchSpec, Leaf, Nested, Split


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
    return TensorSpec(
        tuple(shape),
        draw(st.sampled_from(tuple(dtypes))),
        draw(st.sampled_from(layouts_for(dims))),
        draw(seeds()),
        draw(st.sampled_from(tuple(values))),
    )


def _leaves() -> st.SearchStrategy[Leaf]:
    return st.sampled_from([Leaf(value) for value in (None, 7, 0.5, "mean", True, (), frozenset({"train"}))])


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
    entry = st.one_of(tensor, _leaves()) if leaves else tensor
    return draw(st.one_of(tensor, st.recursive(entry, lambda inner: _containers(inner, kinds), max_leaves=4)))


def _containers(inner: st.SearchStrategy[BatchSpec], kinds: Sequence[str]) -> st.SearchStrategy[BatchSpec]:
    def of(container: str) -> st.SearchStrategy[BatchSpec]:
        least, most = (2, 2) if container == "namedtuple" else (1, 3)
        build: Callable[[Sequence[BatchSpec]], BatchSpec] = lambda entries: Nested(container, tuple(entries))  # noqa: E731
        return st.lists(inner, min_size=least, max_size=most).map(build)

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
    # scatter views a complex tensor as real with one more last dimension, so a negative dim would be off by one.
    possible = (*dtypes, *COMPLEX_DTYPES) if dim >= 0 and dtypes == DTYPES else dtypes
    batch = draw(batches(size, dim, dtypes=possible, values=values, leaves=leaves, kinds=kinds))
    source, target = draw(st.one_of(places(), st.just(PINNED))), draw(places())
    order = draw(st.one_of(st.just(()), st.permutations(range(total)).map(lambda drawn: tuple(drawn[:devices]))))
    return Split(batch, size, dim, devices, source, target, order)


def given_sizes() -> st.SearchStrategy[list[int]]:
    """Draw the sizes of the shards of all devices of the run: different ones, and 0 if there are two or more."""
    return all_devices().flatmap(lambda count: st.permutations([*(3 * index % 5 for index in range(count - 1)), 5]))
