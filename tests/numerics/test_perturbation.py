"""Perturbed numbers, where tensors are distributed."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from mgpu_check.numerics.perturbation import Perturbed


def test_distributed_tensors_are_perturbed(tmp_path):
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    try:
        weight = distribute_tensor(torch.full((4, 4), 1.1), init_device_mesh("cpu", (1,)), [Shard(0)])
        with Perturbed(100.0, torch.Generator().manual_seed(0), 2.0**-24):
            product = weight * 3
        whole = product.full_tensor()
    finally:
        dist.destroy_process_group()
    moved = (whole / (weight.full_tensor() * 3) - 1).abs() / 2.0**-24
    assert bool(((moved > 90) & (moved < 110)).all())
