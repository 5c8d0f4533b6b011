"""The gate on a small GPT of Megatron Core, at several meshes, right and with planted mistakes; see `clients.GATES`.

Without Transformer Engine and Apex: the layers of the local specification. Its LayerNorm refuses sequence parallelism,
so there `Norm` takes its place, which marks its parameters as Megatron's own do.
"""

import functools

import pytest
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from mgpu_check import assert_step_scales
from mgpu_check.integrations import megatron

VOCABULARY, LENGTH = 16, 4
PLAIN = {
    "num_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "gradient_accumulation_fusion": False,
    "persist_layer_norm": False,
}
LLAMA = {"gated_linear_unit": True, "activation_func": torch.nn.functional.silu, "add_bias_linear": False}
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_router_load_balancing_type": "none"}
# Without Transformer Engine, experts with biases change the view of a custom Function in place, which torch refuses.
EXPERTS |= {"moe_token_dispatcher_type": "alltoall", "add_bias_linear": False}
DISTRIBUTED = {"optimizer": {"use_distributed_optimizer": True}}


class Norm(torch.nn.LayerNorm):
    def __init__(self, config, hidden_size, eps=1e-5, **_):
        super().__init__(hidden_size, eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


def gpt(config, pre_process, post_process, tied=False, wrong=None, vp_stage=None):
    # Megatron Core 0.16.1 reads this name, which it defines with Transformer Engine only.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    layer = get_gpt_layer_local_spec(num_experts=config.num_moe_experts)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = Norm
    layers = TransformerBlockSubmodules([layer] * get_num_layers_to_build(config, vp_stage), Norm)
    ends = {"pre_process": pre_process, "post_process": post_process, "vp_stage": vp_stage}
    model = GPTModel(config, layers, VOCABULARY, LENGTH, share_embeddings_and_output_weights=tied, **ends)
    for name, parameter in model.named_parameters():
        if config.tensor_model_parallel_size > 1:
            if wrong == "dimension" and name.endswith("linear_fc1.weight"):
                parameter.partition_dim = 1
            if wrong == "stride" and name.endswith("linear_fc1.weight"):
                parameter.partition_stride = 1
            if wrong == "not reduced" and name.endswith("layernorm.weight"):
                parameter.sequence_parallel = False  # finalize_model_grads leaves it out
    return model


def batch(n):
    return torch.randint(VOCABULARY, (n, LENGTH + 1))


def check(ranks, mesh, config=(), tied=False, wrong=None, samples=2, **options):
    model = functools.partial(gpt, tied=tied, wrong=wrong)
    arguments = megatron.step(model, functools.partial(TransformerConfig, **PLAIN | dict(config)), batch, **options)
    assert_step_scales(ranks, **arguments, meshes=[mesh], sizes=[samples], max_examples=1)


CASES = {
    "tp": {"mesh": {"tp": 2}},
    "tp-sp": {"mesh": {"tp": 2}, "sequence_parallel": True},
    "tp-swiglu": {"mesh": {"tp": 2}, "config": LLAMA},
    "tp-offset": {"mesh": {"tp": 2}, "config": {"softmax_type": "learnable"}},
    "pp": {"mesh": {"pp": 2}, "config": {"num_layers": 2}},
    "pp-tied": {"mesh": {"pp": 2}, "config": {"num_layers": 2}, "tied": True},
    "pp-interleaved": {"mesh": {"pp": 2}, "config": {"num_layers": 4}, "chunks": 2},
    "dp": {"mesh": {"dp": 2}},
    "dp-distributed": {"mesh": {"dp": 2}, **DISTRIBUTED},
    "ep": {"mesh": {"ep": 2}, "config": EXPERTS},
}


@pytest.mark.parametrize("case", CASES)
def test_megatron(ranks, case):
    check(ranks, **CASES[case])


PAIRS = {
    "dp-tp": {"mesh": {"dp": 2, "tp": 2}, "sequence_parallel": True},
    "pp-tp": {"mesh": {"pp": 2, "tp": 2}, "config": {"num_layers": 2}},
    "pp-dp-distributed": {"mesh": {"pp": 2, "dp": 2}, "config": {"num_layers": 2}, **DISTRIBUTED},
    "ep-tp": {"mesh": {"ep": 2, "tp": 2}, "config": EXPERTS, "sequence_parallel": True},
}


@pytest.mark.parametrize("case", PAIRS)
def test_megatron_pairs(ranks, case):
    check(ranks, **PAIRS[case])


def test_megatron_context_parallel(ranks):
    check(ranks, {"cp": 2})


def test_megatron_gradient_not_reduced(ranks):
    check(ranks, {"tp": 2}, sequence_parallel=True, wrong="not reduced")


def test_megatron_wrong_dimension(ranks):
    check(ranks, {"tp": 2}, wrong="dimension")


def test_megatron_wrong_stride(ranks):
    check(ranks, {"tp": 2}, LLAMA, wrong="stride")
