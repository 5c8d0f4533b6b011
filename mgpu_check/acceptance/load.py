"""Keep a GPU and its links busy, so that they reach their full speed."""

from __future__ import annotations

import time

from mgpu_check.engine.rank_side.rank import Rank

_SIDES = (256, 8192)  # the first, and the largest
_SHORT = 0.002  # seconds; a faster round doubles the side of the matrix
_SHARE = 64  # of the free memory


def keep_busy(rank: Rank, seconds: float) -> int:
    """Multiply matrices, and copy the products to the host and back, for `seconds`."""
    import torch

    free, _ = torch.cuda.mem_get_info(rank.device)
    largest = min(_SIDES[1], int((free // _SHARE // 4) ** 0.5))
    matrix = torch.randn(min(_SIDES[0], largest), min(_SIDES[0], largest), device=rank.device)
    times = 0
    end = time.monotonic() + seconds
    while (begun := time.monotonic()) < end:
        product = (matrix @ matrix).clamp_(-1, 1)
        product.copy_(product.cpu())
        torch.cuda.synchronize(rank.device)
        times += 1
        side = 2 * len(matrix)
        if time.monotonic() - begun < _SHORT and side <= largest:
            matrix = torch.randn(side, side, device=rank.device)
    return times
