"""Check how ranks divide a dataset: samplers, loaders with workers and pinned memory, streams, and resumed epochs.

The properties of samplers come from the documentation of `torch.utils.data.distributed.DistributedSampler`. The samples
of `Numbered` show their number, in values of several dtypes and all bit patterns. A sample follows from its number
alone, so the right batch can be computed for many samples at once, without collation.
"""

from __future__ import annotations

import io
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.utils.data.graph_settings  # each worker process imports it, unless it has it from here
from torch.utils.data import DataLoader, Dataset, DistributedSampler, random_split

from mgpu_check.asserts.collectives import first_difference, same_bits
from mgpu_check.asserts.findings import Findings
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import ShardError
from mgpu_check.oracles.generated_data import mix_
from mgpu_check.suite.recipes import tutorials

WORLDS = (*range(1, 10), 16)
LENGTHS = (*range(19), 31, 32, 33)
LONG = ((1000, (3, 8)), (4097, (2, 7)))  # longer datasets, each with its world sizes
_ORDERED = 13  # samples; two of their 13! orders are equal with probability 2e-10


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
    large = ((length, world) for length, worlds in LONG for world in worlds)
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
    for drop_last in (False, True):
        orders: dict[tuple[int, int], list[list[int]]] = {}
        for own_seed, epoch in itertools.product((seed, seed + 17), (0, 1, 2, 5)):
            label = f"DistributedSampler of {length} samples, {drop_last=}, seed={own_seed}, {epoch=}"
            shares = []
            for rank in range(world):
                torch.manual_seed(rank)
                before = torch.get_rng_state()
                sampler = sampler_over(length, world, rank, seed=own_seed, drop_last=drop_last)
                sampler.set_epoch(epoch)
                shares.append(list(sampler))
                unchanged = torch.equal(before, torch.get_rng_state())
                require(unchanged, f"{label}: rank {rank} draws from torch's global generator", (rank,))
                sampler.set_epoch(epoch + 1)
                list(sampler)
                sampler.set_epoch(epoch)
                text = f"rank {rank} of {world} has a different order when it repeats the epoch"
                require(list(sampler) == shares[-1], f"{label}: {text}", (rank,))
            assert_shares(shares, length, drop_last=drop_last, label=label)
            for rank, share in enumerate(shares):
                require(share != sorted(share), f"{label}: rank {rank} of {world} is not shuffled", (rank,))
            for (other_seed, other_epoch), other_shares in orders.items():
                # torch draws from seed + epoch, so different seeds and epochs may share an order: these sums differ.
                if same := [rank for rank in range(world) if shares[rank] == other_shares[rank]]:
                    text = f"of {world} has the order of epoch {other_epoch} with seed={other_seed}"
                    raise ShardError(f"{label}: rank {same[0]} {text}", ranks=same)
            orders[own_seed, epoch] = shares


def batches_of(indices: Iterable[int], batch_size: int, drop_last: bool) -> list[list[int]]:
    """Return `indices` in batches of `batch_size`; `drop_last` drops a smaller last batch."""
    every = list(indices)
    batches = [every[start : start + batch_size] for start in range(0, len(every), batch_size)]
    return batches[:-1] if drop_last and batches and len(batches[-1]) < batch_size else batches


_FIELDS = {
    "image": torch.float32,
    "half": torch.bfloat16,
    "wide": torch.complex64,
    "mask": torch.bool,
    "pixel": torch.uint8,
    "turned": torch.float64,
}


def _bits(indices: torch.Tensor, words: int, seed: int) -> torch.Tensor:
    """Return (n, words) words of 64 bits; all bits of a word depend on its sample and place."""
    places = (indices[:, None] << 24) + torch.arange(words, device="cpu")
    return mix_(places, seed, torch.empty_like(places))


def _rows(indices: torch.Tensor, name: str, features: int) -> torch.Tensor:
    """Return a field of n samples: (n, features) for "image", (n, 3, 2) for "turned", (n, k), with a small k, else."""
    dtype, seed = _FIELDS[name], list(_FIELDS).index(name)
    if name == "mask":
        return _bits(indices, 3, seed) > 0
    if name == "turned":  # as images in channels_last: a sample is dense, but not contiguous
        return _bits(indices, 6, seed).view(dtype).view(-1, 2, 3).transpose(1, 2)
    words = _bits(indices, -(-features // 2) if name == "image" else 2, seed)
    return words.view(dtype)[:, :features] if name == "image" else words.view(dtype)


class Numbered(Dataset[Any]):
    """A dataset of `length` samples: dicts of a number, tensors with `features` floats and others, a text, and a pair.
    The floats have arbitrary bits, including all kinds of NaN, infinities and subnormals."""

    def __init__(self, length: int, features: int = 5) -> None:
        self.length, self.features = length, features

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if not 0 <= index < self.length:
            raise IndexError(f"sample {index} of {self.length}")
        own = torch.tensor([index], device="cpu")
        rows: dict[str, Any] = {name: _rows(own, name, self.features)[0] for name in _FIELDS}
        return {"number": index, **rows, "score": index / 3, "name": f"sample {index}", "pair": (own, index % 2 == 0)}


def indices_of(batch: dict[str, Any]) -> list[int]:
    """Return the numbers of the samples in a batch, read from the batch."""
    numbers: list[int] = batch["number"].tolist()
    return numbers


def assert_batch(
    batch: Any,
    indices: Sequence[int],
    dataset: Numbered,
    label: str,
    device: torch.device | str = "cpu",
    pinned: bool = False,
) -> None:
    """Assert that `batch` has the samples `indices` of `dataset` in this order, bit for bit, as torch collates them."""
    require(isinstance(batch, dict), f"{label}: it is a {type(batch).__name__}, expected a dict")
    own = torch.tensor(list(indices), dtype=torch.int64, device="cpu")
    expected: dict[str, Any] = {name: _rows(own, name, dataset.features) for name in _FIELDS}
    expected |= {"number": own, "score": own.to(torch.float64) / 3}
    names = sorted({*expected, "name", "pair"})
    require(sorted(batch) == names, f"{label}: it has the entries {sorted(batch)}, expected {names}")
    named = batch["name"] == [f"sample {index}" for index in indices]
    require(named, f"{label}: the names are {batch['name']}, expected those of the samples {list(indices)}")
    pair = batch["pair"]
    if type(pair) not in (list, tuple) or len(pair) != 2:
        raise ShardError(f"{label}: the pair is {pair!r}, expected one of two tensors")
    entries = {name: batch[name] for name in expected} | {"pair[0]": pair[0], "pair[1]": pair[1]}
    expected |= {"pair[0]": own[:, None], "pair[1]": own % 2 == 0}
    for name, wanted in expected.items():
        got = entries[name]
        if not isinstance(got, torch.Tensor):
            raise ShardError(f"{label}: {name} is a {type(got).__name__}, expected a tensor")
        require(got.device == torch.device(device), f"{label}: {name} is on {got.device}, expected on {device}")
        require(not pinned or got.is_pinned(), f"{label}: {name} is not in pinned memory")
        text = f"{tuple(got.shape)} of {got.dtype}, expected {tuple(wanted.shape)} of {wanted.dtype}"
        require((got.shape, got.dtype) == (wanted.shape, wanted.dtype), f"{label}: {name} is {text}")
        if not same_bits(wanted, got):
            at = first_difference(wanted, got)
            raise ShardError(
                f"{label}: {name}, {got.nbytes} bytes of {got.dtype}: row {at[0]} (sample {indices[at[0]]}), element "
                f"{list(at)}: expected {wanted[at].item()}, got {got[at].item()}"
            )


LARGE = 300_000  # features of a large sample, which takes 1.2 MB in float32


@contextmanager
def torchs_own_warnings() -> Iterator[None]:
    """Ignore torch's warnings about more workers than cores, and about empty parts."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        warnings.filterwarnings("ignore", message="Length of split at index")
        yield


@contextmanager
def workers_ending(loader: DataLoader[Any]) -> Iterator[None]:
    """End persistent workers at the end of the context, even after a failure: they would keep their rank alive."""
    try:
        yield
    finally:
        running: Any = loader._iterator
        if running is not None:
            running._shutdown_workers()


def assert_batches(
    batches: Iterable[Any],
    expected: Sequence[Sequence[int]],
    dataset: Numbered,
    label: str,
    device: torch.device | str = "cpu",
    pinned: bool = False,
    ranks: Sequence[int] = (),
) -> None:
    """Assert that exactly the expected batches come; see `assert_batch`. Errors of their number have `ranks`."""
    count = 0
    for count, batch in enumerate(batches, 1):
        if count > len(expected):
            text = f"more than {len(expected)} batches come; the next holds {indices_of(batch)}"
            raise ShardError(f"{label}: {text}", ranks=ranks)
        where = f"{label}: batch {count - 1} of {len(expected)}"
        assert_batch(batch, expected[count - 1], dataset, where, device, pinned)
    if count < len(expected):
        text = f"{count} batches come, expected {len(expected)}; {expected[count]} is missing"
        raise ShardError(f"{label}: {text}", ranks=ranks)


def sent(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on `device`, by copies that do not block."""
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, dict):
        return {name: sent(element, device) for name, element in batch.items()}
    return [sent(element, device) for element in batch] if isinstance(batch, (list, tuple)) else batch


@torchs_own_warnings()
def assert_partitions(seed: int) -> None:
    """Assert that `recipes.tutorials.partitions` and `random_split` make the same disjoint parts on all ranks.
    Each place of a part must hold the right sample."""
    for length, sizes in itertools.product((0, 1, 5, 10, 23), ((1.0,), (0.5, 0.5), (0.7, 0.2, 0.1), (0.25,) * 4)):
        dataset = Numbered(length)
        ways: dict[str, Any] = {
            "partitions": lambda data, fractions: tutorials.partitions(data, fractions, seed),
            "random_split": lambda data, fractions: random_split(data, fractions, torch.Generator().manual_seed(seed)),
        }
        for name, divide in ways.items():
            parts_by_rank = []
            for rank in range(2):
                torch.manual_seed(rank)
                parts_by_rank.append([list(subset.indices) for subset in divide(dataset, sizes)])
            label, (parts, others) = f"{name} of {length} samples in {sizes}", parts_by_rank
            require(parts == others, f"{label}, of one seed: rank 0 has {parts}, rank 1 has {others}", (1,))
            every = sorted(itertools.chain.from_iterable(parts))
            require(every == [*range(length)], f"{label}: the parts are {parts}, which is not each sample once")
            if odd := [at for at, size in enumerate(sizes) if abs(len(parts[at]) - size * length) >= len(sizes)]:
                raise ShardError(f"{label}: part {odd[0]} has {len(parts[odd[0]])} samples", ranks=odd)
            assert_shares([every], length, drop_last=False, label=label)
            for subset in divide(dataset, sizes):
                for position, index in enumerate(subset.indices):
                    held = subset[position]["number"]
                    require(held == index, f"{label}: place {position} holds sample {held}, expected {index}")


def assert_resumes(seed: int) -> None:
    """Assert that an epoch that is interrupted after any batch can be resumed, and that the next epoch is whole.
    It resumes by skipping the seen batches, and by a sampler with its own state."""
    world, length, size, epoch = 2, 11, 2, 2
    dataset = Numbered(length)
    for rank in range(world):
        sampler: Any = tutorials.ResumableSampler(dataset, world, rank, seed=seed)
        sampler.set_epoch(epoch)
        epoch_batches = [indices_of(batch) for batch in DataLoader(dataset, size, sampler=sampler)]
        for consumed in range(len(epoch_batches) + 1):
            label = f"loader of rank {rank} of {world}, epoch {epoch}, after {consumed} of {len(epoch_batches)} batches"
            resumed: Any = tutorials.ResumableSampler(dataset, world, rank, seed=seed)
            resumed.load_state_dict({"epoch": epoch, "start": 0})
            skipped = itertools.islice(DataLoader(dataset, size, sampler=resumed), consumed, None)
            assert_batches(skipped, epoch_batches[consumed:], dataset, f"{label}, skipped")
            state = _checkpointed(sampler.state_dict(min(consumed * size, len(sampler))))
            resumed = tutorials.ResumableSampler(dataset, world, rank, seed=seed)
            resumed.load_state_dict(state)
            loader, left = DataLoader(dataset, size, sampler=resumed), len(epoch_batches) - consumed
            require(len(loader) == left, f"{label}, resumed: len is {len(loader)}, expected {left}", (rank,))
            assert_batches(loader, epoch_batches[consumed:], dataset, f"{label}, resumed")
            assert_batches(loader, epoch_batches, dataset, f"{label}, gone through again")


def _checkpointed(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()))


@torchs_own_warnings()
def assert_pinned_batches(devices: Sequence[torch.device]) -> None:
    """Assert that ``pin_memory`` pins each tensor of a batch, in dicts and lists too, without changing a bit.
    A non-blocking copy sends each batch to the next of `devices`, where it is compared too."""
    for features, workers, length in ((4, 0, 9), (LARGE, 0, 2), (LARGE, 1, 3)):
        dataset = Numbered(length, features=features)
        loader = DataLoader(dataset, batch_size=2, pin_memory=True, num_workers=workers)
        label = f"pinned loader, {workers} workers, {features} features"
        expected = batches_of(range(length), 2, False)
        batches = list(loader)
        assert_batches(batches, expected, dataset, label, pinned=True)
        for number, batch in enumerate(batches):
            device = devices[number % len(devices)]
            on_device = sent(batch, device)
            assert_batch(on_device, expected[number], dataset, f"{label}: batch {number}, copied to {device}", device)


_BATCH = 3


def assert_samplers_of_ranks(rank: Rank, seed: int) -> None:
    """Assert that a `DistributedSampler` without a rank argument finds rank and world, and that all ranks agree.
    Torch's global generators differ between ranks."""
    torch.manual_seed(seed + rank.index)
    with Findings() as findings:
        for length, shuffle, drop_last in itertools.product((0, 1, 7, 60), (False, True), (False, True)):
            sampler = sampler_over(length, shuffle=shuffle, drop_last=drop_last, seed=seed)
            label = f"DistributedSampler of {length} samples, {shuffle=}, {drop_last=}"
            here, own = (rank.size, rank.index), (sampler.num_replicas, sampler.rank)
            with findings.collected():
                text = f"on rank {rank.index} of {rank.size}: it takes itself for rank {own[1]} of {own[0]}"
                require(own == here, f"{label}, {text}", (rank.index,))
            if findings.anywhere(rank):
                return
            sampler.set_epoch(1)
            with findings.collected():
                assert_shares(_of_all(list(sampler)), length, drop_last=drop_last, label=label)


def _of_all(own: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return gathered


@torchs_own_warnings()
def assert_loaders_cover(rank: Rank, seed: int) -> None:
    """Assert that the ranks' loaders yield each sample once per epoch, on their devices, bit for bit, in equal batches.
    They load as training code does: with a persistent worker, pinned memory, non-blocking copies, and `set_epoch`."""
    dataset = Numbered(5 * rank.size + 2)
    sampler: Any = DistributedSampler(dataset, seed=seed)
    loader = DataLoader(dataset, _BATCH, sampler=sampler, num_workers=1, persistent_workers=True, pin_memory=True)
    with workers_ending(loader), Findings() as findings:
        for epoch in range(3):
            sampler.set_epoch(epoch)
            expected = batches_of(sampler, _BATCH, False)
            on_device = (sent(batch, rank.device) for batch in loader)
            label = f"loader of rank {rank.index} of {rank.size}, epoch {epoch}"
            with findings.collected():
                assert_batches(on_device, expected, dataset, label, rank.device, ranks=(rank.index,))
            if findings.anywhere(rank):
                return
            # The expected samples are those that came, as checked above.
            share = list(itertools.chain.from_iterable(expected))
            label = f"loaders of {rank.size} ranks, epoch {epoch}"
            with findings.collected():
                assert_shares(_of_all(share), len(dataset), drop_last=False, label=label)


@torchs_own_warnings()
def assert_streams_cover(rank: Rank) -> None:
    """Assert that an iterable dataset that ranks and their workers share yields each sample once, also in last batches.
    Each worker has its own last batch, which must come unless ``drop_last`` drops it."""
    dataset = Numbered(7 * rank.size + 3)
    with Findings() as findings:
        for workers, drop_last in ((0, False), (0, True), (2, False), (2, True)):
            label = f"stream of rank {rank.index} of {rank.size} with {workers} workers, {drop_last=}"
            with findings.collected():
                got = _streamed(dataset, workers, drop_last, rank, label)
            if findings.anywhere(rank):
                return
            if drop_last:
                continue
            every = sorted(itertools.chain.from_iterable(itertools.chain.from_iterable(_of_all(got))))
            with findings.collected():
                text = f"over all ranks come the samples {every}, expected each of {len(dataset)} once"
                require(every == list(range(len(dataset))), f"{label}: {text}")


def _streamed(dataset: Numbered, workers: int, drop_last: bool, rank: Rank, label: str) -> list[list[int]]:
    """Return the samples in a rank's batches, which must be its own, in turn from each of its workers."""
    stream: Any = tutorials.SharedStream(dataset, rank.index, rank.size)
    own, step = max(1, workers), rank.size * max(1, workers)
    of_workers = [
        batches_of(range(rank.index * own + worker, len(dataset), step), _BATCH, drop_last) for worker in range(own)
    ]
    # Workers take turns as long as they have batches.
    turns = itertools.zip_longest(*of_workers)
    expected = [batch for turn in turns for batch in turn if batch is not None]
    loader = DataLoader(stream, _BATCH, num_workers=workers, drop_last=drop_last, persistent_workers=workers > 0)
    with workers_ending(loader):
        batches = list(loader)
    got = [indices_of(batch) for batch in batches]
    require(got == expected, f"{label}: expected the batches {expected}, got {got}", (rank.index,))
    assert_batches(batches, expected, dataset, label)
    return got
