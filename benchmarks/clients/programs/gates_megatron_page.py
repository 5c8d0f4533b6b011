import functools

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig

from mgpu_check import assert_step_scales
from mgpu_check.integrations import megatron

SIZES = {"num_layers": 2, "hidden_size": 8, "num_attention_heads": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0}
LOCAL = {"gradient_accumulation_fusion": False, "persist_layer_norm": False}  # without Apex
config = functools.partial(TransformerConfig, **SIZES, **LOCAL)


def model(config, pre_process, post_process):
    return GPTModel(config, get_gpt_layer_local_spec(), 16, 4, pre_process=pre_process, post_process=post_process)


def batch(n):
    return torch.randint(16, (n, 5))  # one token more than a sequence has


@pytest.mark.parametrize("mesh", [{"tp": 2}, {"pp": 2}, {"dp": 2}], ids=["tp", "pp", "dp"])
def test_small_gpt(ranks, mesh):
    step = megatron.step(model, config, batch)
    assert_step_scales(ranks, **step, meshes=[mesh], sizes=[2], max_examples=1)
