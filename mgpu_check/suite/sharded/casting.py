"""Cast the inputs of a sharded model by hand, where FSDP must not cast them."""

from __future__ import annotations

import torch
from torch import nn

from mgpu_check.asserts.findings import Findings
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.torch_hooks.tensors import name_of


def cast_by_hand(
    module: nn.Module, optimizer: torch.optim.Optimizer, rank: Rank, what: str, findings: Findings
) -> None:
    """Cast the inputs of a module to float64, and require before each step that they arrived in float32."""
    arrived: set[str] = set()

    def cast(_: nn.Module, arguments: tuple[torch.Tensor, ...]) -> torch.Tensor:
        (x,) = arguments
        arrived.add(name_of(x.dtype))
        return x.double()

    def judge(*_: object) -> None:
        text = f"inputs of float32 arrived as {', '.join(sorted(arrived))}" if arrived else "its module was not called"
        findings.require(arrived == {"float32"}, f"{what}, rank {rank.index}: {text}", ranks=[rank.index])
        arrived.clear()

    module.register_forward_pre_hook(cast)
    optimizer.register_step_pre_hook(judge)
