"""`fsdp2`, but it is told of the GPUs of a node only: gradients are reduced among them, and nodes train models of their
own."""

from __future__ import annotations

import fsdp2
import torch.distributed as dist


class Trainer(fsdp2.Trainer):
    def shard(self, mesh: dist.DeviceMesh) -> None:
        super().shard(mesh["gpus"])  # mesh
