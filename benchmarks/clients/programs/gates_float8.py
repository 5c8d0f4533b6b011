"""Training in float8 by torchao: its recipes, and FSDP2 that gathers weights in float8. Processors emulate the products."""

import dataclasses
import functools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torchao.float8 import Float8LinearConfig, convert_to_float8_training, precompute_float8_dynamic_scale_for_fsdp

from mgpu_check import assert_step_scales

RECIPES = ["tensorwise", "rowwise", "rowwise_with_gw_hp"]


def build(recipe):
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    if recipe:
        config = dataclasses.replace(Float8LinearConfig.from_recipe_name(recipe), emulate=True)
    else:
        config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    return convert_to_float8_training(model, config=config)


def batch(n):
    return torch.randn(n, 16), torch.randn(n, 16)


def step(model, samples, rank, factor=1.0):
    model.to(rank.device)
    x, y = (leaf.tensor_split(rank.size)[rank.index].to(rank.device) for leaf in samples)
    (F.mse_loss(model(x), y, reduction="sum") / samples[1].numel()).backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        if rank.size > 1:
            parameter.grad *= factor


class Sharded:
    def __init__(self, model, rank):
        model.to(rank.device)
        if rank.size > 1:
            for module in (model[0], model[2], model):
                fully_shard(module)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def __call__(self, model, samples, rank):
        x, y = (leaf.tensor_split(rank.size)[rank.index].to(rank.device) for leaf in samples)
        self.optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        self.optimizer.step()
        if rank.size > 1:
            precompute_float8_dynamic_scale_for_fsdp(model)


def scales(ranks, step, recipe, **options):
    made = functools.partial(build, recipe)
    assert_step_scales(ranks, step, build=made, batch=batch, sizes="divisible", max_examples=6, **options)


@pytest.mark.parametrize("recipe", RECIPES)
def test_torchao(ranks, recipe):
    scales(ranks, step, recipe)


def test_torchao_factor(ranks):
    scales(ranks, functools.partial(step, factor=1.3), "tensorwise")


def test_torchao_all_gather(ranks):
    """FSDP2 gathers tensors of several dtypes as bytes."""
    scales(ranks, Sharded, "", wire={"all_gather*": torch.uint8})


def test_torchao_wide_all_gather(ranks):
    scales(ranks, Sharded, "", wire={"all_gather*": torch.float8_e4m3fn})
