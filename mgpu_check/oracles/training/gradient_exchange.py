"""Exchange of gradients by hand, on the devices of one process and over point-to-point messages between ranks.

There are allreduce and parameter servers. The allreduce for devices is that of the chapter on multiple GPUs of *Dive
into Deep Learning*. Collective libraries use the algorithms for ranks: ring, tree, and recursive halving and
doubling.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist


def allreduce(data: Sequence[torch.Tensor]) -> None:
    """Replace each tensor by the sum of all, in place. They have one shape and dtype, and a device each.
    The sum is computed on the device of the first tensor, and copied to all others."""
    for tensor in data[1:]:
        data[0].add_(tensor.to(data[0].device))
    for tensor in data[1:]:
        tensor.copy_(data[0])


def chunks(elements: int, count: int) -> list[slice]:
    """Return `count` slices that cover `elements` in order. Sizes differ by at most one; the first slices are larger.
    The last slices are empty if there are fewer elements than parts."""
    size, larger = divmod(elements, count)
    ends = [size * (index + 1) + min(index + 1, larger) for index in range(count)]
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


def ring_allreduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum `tensor` over the ranks of `group`, in place on every rank, around a ring. Any shape, dtype and layout.

    In each step, every rank sends one chunk to its right neighbour. After n-1 steps, rank r holds the sum of chunk r+1
    (reduce-scatter); after n-1 more, every rank holds all chunks (all-gather). Each rank sends 2·(n-1)/n of the tensor.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    flat = tensor.detach().reshape(-1).clone()
    pieces = chunks(flat.numel(), size)
    following, previous = (rank + 1) % size, (rank - 1) % size
    for step in range(size - 1):
        out, into = pieces[(rank - step) % size], pieces[(rank - step - 1) % size]
        flat[into] += _exchange(flat, out, following, into, previous, group)
    for step in range(size - 1):
        out, into = pieces[(rank - step + 1) % size], pieces[(rank - step) % size]
        flat[into] = _exchange(flat, out, following, into, previous, group)
    tensor.detach().copy_(flat.reshape(tensor.shape))


def _exchange(
    flat: torch.Tensor, out: slice, target: int, into: slice, source: int, group: dist.ProcessGroup | None
) -> torch.Tensor:
    """Send the chunk `out` to rank `target`, and return the chunk `into` received from rank `source`."""
    sent, received = flat[out].clone(), torch.empty_like(flat[into])
    transfers = []
    # An empty chunk is empty on both sides, and not sent.
    if sent.numel():
        transfers.append(dist.P2POp(dist.isend, sent, _global_rank(target, group), group))
    if received.numel():
        transfers.append(dist.P2POp(dist.irecv, received, _global_rank(source, group), group))
    for work in dist.batch_isend_irecv(transfers) if transfers else ():
        work.wait()
    return received


def tree_allreduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum `tensor` over the ranks of `group`, in place on every rank, up and down a binomial tree.

    Rank r receives from r+1, r+2, r+4, … as long as these bits of r are zero, then sends to r without its lowest set
    bit. The sum returns by the same path. Takes 2·⌈log2 n⌉ steps, for any number of ranks.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    flat = tensor.detach().reshape(-1).clone()
    if not flat.numel():
        return
    children = []
    step = 1
    while step < size and not rank & step:
        if rank + step < size:
            children.append(rank + step)
        step *= 2
    received = torch.empty_like(flat)
    for child in children:
        dist.recv(received, _global_rank(child, group), group)
        flat += received
    if rank:
        parent = _global_rank(rank & (rank - 1), group)
        dist.send(flat, parent, group)
        dist.recv(flat, parent, group)
    for child in reversed(children):
        dist.send(flat, _global_rank(child, group), group)
    tensor.detach().copy_(flat.reshape(tensor.shape))


def halving_doubling_allreduce(tensor: torch.Tensor, group: dist.ProcessGroup | None = None) -> None:
    """Sum `tensor` over the ranks of `group`, in place on every rank, by recursive halving and doubling.

    Halving: partners at distances n/2, n/4, …, 1 split their current range in halves; each keeps one half, and adds the
    partner's values to it. Doubling: partners at distances 1, …, n/2 exchange their results. Ranks beyond the largest
    power of two first send their data to a lower rank, and receive the sum from it at the end.

    Source: R. Rabenseifner, *Optimization of Collective Reduction Operations*, ICCS 2004.
    """
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    flat = tensor.detach().reshape(-1).clone()
    if not flat.numel():
        return
    power = 1 << (size.bit_length() - 1)
    if rank >= power:
        dist.send(flat, _global_rank(rank - power, group), group)
        dist.recv(flat, _global_rank(rank - power, group), group)
    else:
        if rank + power < size:
            received = torch.empty_like(flat)
            dist.recv(received, _global_rank(rank + power, group), group)
            flat += received
        span, rounds, distance = slice(0, flat.numel()), [], power // 2
        while distance:
            middle = (span.start + span.stop) // 2
            kept, passed = slice(span.start, middle), slice(middle, span.stop)
            if rank & distance:
                kept, passed = passed, kept
            flat[kept] += _exchange(flat, passed, rank ^ distance, kept, rank ^ distance, group)
            rounds.append((rank ^ distance, kept, passed))
            span, distance = kept, distance // 2
        for partner, kept, passed in reversed(rounds):
            flat[passed] = _exchange(flat, kept, partner, passed, partner, group)
        if rank + power < size:
            dist.send(flat, _global_rank(rank + power, group), group)
    tensor.detach().copy_(flat.reshape(tensor.shape))


def reduce_broadcast(tensor: torch.Tensor, root: int = 0, group: dist.ProcessGroup | None = None) -> None:
    """Sum `tensor` over the ranks of `group` on its rank `root`, then broadcast the sum to all, in place."""
    source = _global_rank(root, group)
    dist.reduce(tensor, source, group=group)
    dist.broadcast(tensor, source, group=group)


def _global_rank(rank: int, group: dist.ProcessGroup | None) -> int:
    return rank if group is None else dist.get_global_rank(group, rank)
