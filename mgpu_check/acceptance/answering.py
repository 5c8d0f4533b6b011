"""Check that a device still answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mgpu_check.devices.observations import Observation, Subject, Work

if TYPE_CHECKING:
    from mgpu_check.engine.rank_side.rank import Rank


def answers(rank: Rank, check: str) -> list[Observation]:
    """Sum numbers on the device of a rank and check the result; a lost device raises, or never returns.

    Args:
        check: the name of the check to which the observation belongs.
    """
    import torch  # here, because the parent refers to this function

    total = int(torch.arange(1024, device=rank.device).sum().item())
    subject = Subject("gpu", (rank.index,))
    if total == 1024 * 1023 // 2:
        return [Observation(check, subject, "passed", case="sum of 0 to 1023", work=Work(operations=1))]
    return [Observation(check, subject, "failed", f"the sum of 0 to 1023 is {total}", "sum of 0 to 1023")]
