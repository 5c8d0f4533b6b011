"""Check random samplers with a generator: each epoch has a new order, and equal seeds give equal epochs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler, SubsetRandomSampler, WeightedRandomSampler

from mgpu_check.errors import ShardError
from mgpu_check.suite.loading.sampling import sampler_over

_COUNT = (
    26  # samples; two of their 26! orders are equal with probability 2e-27, and 26 draws of 26 with probability 2e-37
)
_EPOCHS = 3

_SAMPLES = range(_COUNT)
_WEIGHTS = [0.0, *(1.0 + one % 3 for one in range(_COUNT)), 0.0]
"""Weights with one more sample at either end, whose weight is 0, so that it must not be drawn."""

_Make = Callable[[torch.Generator], Any]


def _loader(generator: torch.Generator) -> Any:
    samples: Any = _SAMPLES
    return DataLoader(samples, batch_size=None, shuffle=True, generator=generator)


_ONCE: dict[str, _Make] = {
    "RandomSampler": lambda generator: RandomSampler(_SAMPLES, generator=generator),
    "SubsetRandomSampler": lambda generator: SubsetRandomSampler(_SAMPLES, generator),
    "WeightedRandomSampler without replacement": lambda generator: WeightedRandomSampler(
        _WEIGHTS[1:-1], _COUNT, replacement=False, generator=generator
    ),
    "DataLoader with shuffle": _loader,
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
    generator, which differs between ranks, must have no influence and must not change. Samples of weight 0 must not be
    drawn. Without replacement each sample must come once before any is repeated. The order of a `DistributedSampler`
    must depend on `set_epoch` alone.
    """
    for name, make in (_ONCE | _DRAWN).items():
        first = _epochs(make, seed, name)
        for one, other in combinations(range(_EPOCHS), 2):
            if first[one] == first[other]:
                raise ShardError(f"{name}: epochs {one} and {other} have the same order: {first[one]}")
        torch.manual_seed(seed + 1)
        if _epochs(make, seed, name) != first:
            raise ShardError(f"{name}: two generators of one seed, {seed}, give different orders")
        if first[0] == _epochs(make, seed + 1, name)[0]:
            raise ShardError(f"{name}: seeds {seed} and {seed + 1} give the same order: {first[0]}")
    _epochs_are_told(seed)


def _epochs(make: _Make, seed: int, name: str) -> list[list[int]]:
    drawing = make(torch.Generator().manual_seed(seed))
    before = torch.get_rng_state()
    epochs = [list(map(int, drawing)) for _ in range(_EPOCHS)]
    if not torch.equal(before, torch.get_rng_state()):
        raise ShardError(f"{name}: it draws from torch's global generator, not from the given one")
    for number, order in enumerate(epochs):
        for what in _odd(name, order):
            raise ShardError(f"{name}, epoch {number}: {what}: {order}")
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


def _epochs_are_told(seed: int) -> None:
    """Require that `set_epoch` determines the order, with a padded and with a dropped tail."""
    for drop_last in (False, True):
        sampler = sampler_over(_COUNT * 2 + 1, 2, 1, seed=seed, drop_last=drop_last)
        orders = []
        for epoch in (0, 1, 0):
            sampler.set_epoch(epoch)
            orders.append((list(sampler), list(sampler)))
        what = f"DistributedSampler with {drop_last=}"
        if orders[0][0] == orders[1][0]:
            raise ShardError(f"{what}: set_epoch(1) does not change the order")
        if any(one != other for one, other in orders) or orders[0] != orders[2]:
            raise ShardError(f"{what}: the order of an epoch changes when it is iterated again")
