"""`fsdp2` on a mesh of one node's GPUs: gradients are reduced within a node only, and each node trains a model of its
own."""

from __future__ import annotations

import fsdp2
import torch.distributed as dist


class Trainer(fsdp2.Trainer):
    def shard(self, mesh: dist.DeviceMesh) -> None:
        super().shard(mesh["gpus"])  # mesh
