"""Check samplers: the samples of each rank, their order, and the dependence on the epoch and on a generator.

The properties come from the documentation of `torch.utils.data.distributed.DistributedSampler`.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from mgpu_check.errors import ShardError

WORLDS = (*range(1, 10), 16)
LENGTHS = (*range(19), 31, 32, 33)
LARGE = ((1000, (3, 8)), (4097, (2, 7)))  # longer datasets, each with its world sizes

BATCH_SIZES = (1, 2, 3, 4, 5, 7, 8, 16, 64)
_ORDERED = 13  # samples; two of their 13! orders are equal with probability 2e-10
_PERMUTED = 4
_EXPECTED = 60
_MOST_UNEVEN = 102.0
"""Limit of Pearson's statistic for 24 orders that are each expected 60 times.

Chi-squared with 23 degrees of freedom exceeds it with a probability below 1e-11: ``scipy.stats.chi2.sf(102, 23)`` =
6.3e-12.
"""


def sampler_over(length: int, *args: Any, **options: Any) -> Any:
    """Return a `DistributedSampler` over `length` samples; of a dataset it needs only the length."""
    dataset: Any = range(length)
    return DistributedSampler(dataset, *args, **options)


def require(holds: bool, message: str, ranks: Sequence[int] = ()) -> None:
    """Raise a ShardError with this message, unless `holds`."""
    __tracebackhide__ = True
    if not holds:
        raise ShardError(message, ranks=ranks)


def assert_shares(shares: Sequence[Sequence[int]], length: int, *, drop_last: bool, label: str) -> None:
    """Assert that the ranks' shares are disjoint parts of ``range(length)``, up to the documented padding.

    All shares have ceil(length / ranks) samples, or floor(length / ranks) with `drop_last`; then no sample comes twice.
    Without, each occurs, and their counts differ by at most one. No share may hold a sample twice.
    """
    world = len(shares)
    size = length // world if drop_last else math.ceil(length / world)
    for rank, share in enumerate(shares):
        here, own = f"{label}: rank {rank} of {world} has", (rank,)
        require(len(share) == size, f"{here} {len(share)} of {length} samples, expected {size}", own)
        invalid = next((index for index in share if type(index) is not int or not 0 <= index < length), None)
        require(invalid is None, f"{here} {invalid!r}, not an index of {length} samples", own)
        if len(set(share)) < len(share):
            twice = next(index for index, count in Counter(share).items() if count > 1)
            raise ShardError(f"{here} sample {twice} twice", ranks=own)
    counts = Counter(itertools.chain.from_iterable(shares))
    least = 0 if drop_last else size * world // max(length, 1)
    most = 1 if drop_last else math.ceil(size * world / max(length, 1))
    for sample in range(length):
        if not least <= counts[sample] <= most:
            holders = [rank for rank, share in enumerate(shares) if sample in share]
            expected = f"{least}" if least == most else f"{least} or {most}"
            raise ShardError(
                f"{label}: sample {sample} of {length} is there {counts[sample]} times over {world} ranks "
                f"(on {', '.join(f'rank {rank}' for rank in holders) or 'none'}), expected {expected}",
                ranks=holders,
            )


def assert_sampler_covers() -> None:
    """Assert that `DistributedSampler` divides datasets of many lengths among 1 to 9 and 16 ranks.

    Without shuffling, rank r must have the samples r, r + ranks, and so on, and padding must start again at sample 0.
    Code that puts gathered predictions back in order depends on it.
    """
    small = itertools.product(LENGTHS, WORLDS)
    large = ((length, world) for length, worlds in LARGE for world in worlds)
    for (length, world), drop_last, shuffle in itertools.product([*small, *large], (False, True), (False, True)):
        samplers = [sampler_over(length, world, rank, shuffle=shuffle, drop_last=drop_last) for rank in range(world)]
        for epoch in (0, 3) if shuffle else (0,):
            label = f"DistributedSampler of {length} samples, {drop_last=}, {shuffle=}, {epoch=}"
            shares = []
            for rank, sampler in enumerate(samplers):
                sampler.set_epoch(epoch)
                shares.append(list(sampler))
                text = f"rank {rank} of {world} has {len(shares[-1])} samples, but len(sampler) is {len(sampler)}"
                require(len(sampler) == len(shares[-1]), f"{label}: {text}", (rank,))
            assert_shares(shares, length, drop_last=drop_last, label=label)
            if not shuffle:
                _assert_in_turn(shares, length, label)


def _assert_in_turn(shares: Sequence[Sequence[int]], length: int, label: str) -> None:
    world = len(shares)
    for rank, share in enumerate(shares):
        for position, index in enumerate(share):
            due = (rank + world * position) % length
            text = f"is {index}, expected {due}: ranks take samples in turn"
            require(index == due, f"{label}: sample {position} of rank {rank} of {world} {text}", (rank,))


def assert_sampler_shuffles(world: int, seed: int) -> None:
    """Assert that only `set_epoch` and ``seed`` determine the order of a shuffled `DistributedSampler`.

    The order must differ between epochs and between seeds. It must be the same when an epoch is repeated, and on each
    rank. Torch's global generator, which differs between ranks, must have no influence and must not change.
    """
    length = _ORDERED * world + 1
    orders: dict[tuple[int, int], list[list[int]]] = {}
    for own_seed, epoch in itertools.product((seed, seed + 17), (0, 1, 2, 5)):
        label = f"DistributedSampler of {length} samples, seed={own_seed}, {epoch=}"
        shares = []
        for rank in range(world):
            torch.manual_seed(rank)
            before = torch.get_rng_state()
            sampler = sampler_over(length, world, rank, seed=own_seed)
            sampler.set_epoch(epoch)
            shares.append(list(sampler))
            unchanged = torch.equal(before, torch.get_rng_state())
            require(unchanged, f"{label}: rank {rank} draws from torch's global generator", (rank,))
            sampler.set_epoch(epoch + 1)
            list(sampler)
            sampler.set_epoch(epoch)
            text = f"rank {rank} of {world} has a different order when it repeats the epoch"
            require(list(sampler) == shares[-1], f"{label}: {text}", (rank,))
        assert_shares(shares, length, drop_last=False, label=label)
        for rank, share in enumerate(shares):
            require(share != sorted(share), f"{label}: rank {rank} of {world} is not shuffled", (rank,))
        for (other_seed, other_epoch), other_shares in orders.items():
            # torch draws from seed + epoch, so different seeds and epochs may share an order; these sums are all
            # different.
            if same := [rank for rank in range(world) if shares[rank] == other_shares[rank]]:
                text = f"of {world} has the order of epoch {other_epoch} with seed={other_seed}"
                raise ShardError(f"{label}: rank {same[0]} {text}", ranks=same)
        orders[own_seed, epoch] = shares


def assert_orders_are_likely(seed: int) -> None:
    """Assert that over 1,440 epochs each order of four samples is about equally frequent, by Pearson's statistic."""
    sampler = sampler_over(_PERMUTED, 1, 0, seed=seed)
    orders = list(itertools.permutations(range(_PERMUTED)))
    counts: Counter[tuple[int, ...]] = Counter()
    for epoch in range(_EXPECTED * len(orders)):
        sampler.set_epoch(epoch)
        counts[tuple(sampler)] += 1
    statistic = sum((counts[order] - _EXPECTED) ** 2 / _EXPECTED for order in orders)
    if statistic > _MOST_UNEVEN:
        order, count = counts.most_common(1)[0]
        raise ShardError(
            f"DistributedSampler of {_PERMUTED} samples, {seed=}: over {_EXPECTED * len(orders)} epochs {len(counts)} "
            f"of {len(orders)} orders come, {list(order)} {count} times, expected {_EXPECTED}: its shuffling is not "
            f"uniform (chi-squared {statistic:.0f}, expected at most {_MOST_UNEVEN:.0f})"
        )


def batches_of(indices: Iterable[int], batch_size: int, drop_last: bool) -> list[list[int]]:
    """Return `indices` in batches of `batch_size`; `drop_last` drops a smaller last batch."""
    every = list(indices)
    batches = [every[start : start + batch_size] for start in range(0, len(every), batch_size)]
    return batches[:-1] if drop_last and batches and len(batches[-1]) < batch_size else batches


def assert_batch_sampler_covers(seed: int) -> None:
    """Assert that `BatchSampler` cuts the order of its sampler into batches, for each small length and batch size.
    Each batch must be a new list, because users change them. A second iteration must give the same."""
    generator = torch.Generator().manual_seed(seed)
    for length, batch_size, drop_last in itertools.product(range(19), BATCH_SIZES, (False, True)):
        samplers: list[Any] = [SequentialSampler(range(length)), SubsetRandomSampler(range(length), generator)]
        samplers.append(sampler_over(length, 3, length % 3, seed=seed, drop_last=drop_last))
        if length:
            samplers.append(RandomSampler(range(length), generator=generator))
            samplers.append(RandomSampler(range(length), True, length + 1, generator))
        for sampler in samplers:
            order = list(sampler)
            # The order itself, because a random sampler would draw a new one in each iteration.
            _assert_cut(order, batch_size, drop_last, type(sampler).__name__)
            text = f"{type(sampler).__name__} of {length} samples: len is {len(sampler)}, but {len(order)} come"
            require(len(sampler) == len(order), text)


def _assert_cut(order: list[int], batch_size: int, drop_last: bool, name: str) -> None:
    batches = BatchSampler(order, batch_size, drop_last)
    label = f"BatchSampler over {name} of {len(order)} samples, {batch_size=}, {drop_last=}"
    expected = batches_of(order, batch_size, drop_last)
    for _ in range(2):
        got = list(batches)
        for number, (due, batch) in enumerate(itertools.zip_longest(expected, got, fillvalue="none")):
            require(batch == due, f"{label}: batch {number}: expected {due}, got {batch}")
    require(len(batches) == len(expected), f"{label}: len is {len(batches)}, but {len(expected)} batches come")
    apart = len({id(batch) for batch in got}) == len(got)
    require(apart, f"{label}: two batches are one list, so a change of one changes the other")


_COUNT = 26
"""Samples; two of their 26! orders are equal with probability 2e-27, and 26 draws of 26 with probability 2e-37."""
_EPOCHS = 3

_SAMPLES: Any = range(_COUNT)
_WEIGHTS = [0.0, *(1.0 + index % 3 for index in range(_COUNT)), 0.0]
"""Weights with one more sample at either end, whose weight is 0, so that it must not be drawn."""

_Make = Callable[[torch.Generator], Any]


_ONCE: dict[str, _Make] = {
    "RandomSampler": lambda generator: RandomSampler(_SAMPLES, generator=generator),
    "SubsetRandomSampler": lambda generator: SubsetRandomSampler(_SAMPLES, generator),
    "WeightedRandomSampler without replacement": lambda generator: WeightedRandomSampler(
        _WEIGHTS[1:-1], _COUNT, replacement=False, generator=generator
    ),
    "DataLoader with shuffle": lambda generator: DataLoader(
        _SAMPLES, batch_size=None, shuffle=True, generator=generator
    ),
}
"""Samplers that yield each sample once per epoch."""

_DRAWN: dict[str, _Make] = {
    "RandomSampler with replacement": lambda generator: RandomSampler(_SAMPLES, True, generator=generator),
    "RandomSampler of twice as many": lambda generator: RandomSampler(
        _SAMPLES, num_samples=2 * _COUNT, generator=generator
    ),
    "WeightedRandomSampler": lambda generator: WeightedRandomSampler(_WEIGHTS, _COUNT, generator=generator),
}


def assert_samplers_draw(seed: int) -> None:
    """Assert that random samplers and shuffling loaders draw the order of each epoch from their generator.

    Each epoch must have a new order, and generators with the same seed must give the same epochs. Torch's global
    generator, which differs between ranks, must have no influence and must not change. The order of a
    `DistributedSampler` must depend on `set_epoch` alone.
    """
    for name, make in (_ONCE | _DRAWN).items():
        epochs = _epochs(make, seed, name)
        for earlier, later in itertools.combinations(range(_EPOCHS), 2):
            text = f"{name}: epochs {earlier} and {later} have the same order: {epochs[earlier]}"
            require(epochs[earlier] != epochs[later], text)
        torch.manual_seed(seed + 1)
        same = _epochs(make, seed, name) == epochs
        require(same, f"{name}: two generators of one seed, {seed}, give different orders")
        other = _epochs(make, seed + 1, name)[0]
        require(epochs[0] != other, f"{name}: seeds {seed} and {seed + 1} give the same order: {other}")
    # `set_epoch` determines the order, with a padded and with a dropped tail.
    for drop_last in (False, True):
        sampler = sampler_over(_COUNT * 2 + 1, 2, 1, seed=seed, drop_last=drop_last)
        orders = []
        for epoch in (0, 1, 0):
            sampler.set_epoch(epoch)
            orders.append((list(sampler), list(sampler)))
        label = f"DistributedSampler with {drop_last=}"
        require(orders[0][0] != orders[1][0], f"{label}: set_epoch(1) does not change the order")
        stays = all(order == repeated for order, repeated in orders) and orders[0] == orders[2]
        require(stays, f"{label}: the order of an epoch changes when it is iterated again")


def _epochs(make: _Make, seed: int, name: str) -> list[list[int]]:
    drawing = make(torch.Generator().manual_seed(seed))
    before = torch.get_rng_state()
    epochs = [list(map(int, drawing)) for _ in range(_EPOCHS)]
    unchanged = torch.equal(before, torch.get_rng_state())
    require(unchanged, f"{name}: it draws from torch's global generator, not from the given one")
    for number, order in enumerate(epochs):
        for deviation in _odd(name, order):
            raise ShardError(f"{name}, epoch {number}: {deviation}: {order}")
    return epochs


def _odd(name: str, order: list[int]) -> Iterator[str]:
    counts = Counter(order)
    if name in _ONCE and sorted(order) != list(_SAMPLES):
        yield "not each sample once"
    if name == "RandomSampler of twice as many" and (
        set(counts.values()) != {2} or set(order[:_COUNT]) != set(_SAMPLES) or order[:_COUNT] == order[_COUNT:]
    ):
        yield "not each sample once, and once again in another order"
    if name == "WeightedRandomSampler" and (len(order) != _COUNT or counts[0] or counts[_COUNT + 1]):
        yield f"not {_COUNT} samples with a weight above 0"
