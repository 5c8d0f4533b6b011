"""The integration of Megatron Core: the names of parameters and their slices; benchmarks/clients has its gates."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mgpu_check.integrations import megatron


@pytest.fixture
def state(monkeypatch):
    """`parallel_state` on the second of two ranks."""
    sizes = ("tensor_model_parallel", "expert_tensor_parallel")
    functions = {f"get_{name}_{what}": value for name in sizes for what, value in (("world_size", 2), ("rank", 1))}
    made = SimpleNamespace(**{name: lambda value=value: value for name, value in functions.items()})
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", made)


def marked(*shape: int, dim: int, stride: int = 1) -> nn.Parameter:
    made: Any = nn.Parameter(torch.zeros(shape))
    made.tensor_model_parallel, made.partition_dim, made.partition_stride = True, dim, stride
    return made


def plain(*shape: int) -> Any:
    return lambda: nn.Parameter(torch.zeros(shape))


def module(**children: Any) -> nn.Module:
    made = nn.Module()
    for name, child in children.items():
        setattr(made, name, child)
    return made


def layers(count: int, first: int = 1, **parameters: Any) -> nn.Module:
    own = [module(**{name: make() for name, make in parameters.items()}) for _ in range(count)]
    for index, layer in enumerate(own):
        layer.layer_number = first + index  # type: ignore[assignment]
    return module(layers=nn.ModuleList(own))


def test_layers_strides_and_offsets(state):
    whole = module(decoder=layers(3, up=lambda: marked(8, 2, dim=0), softmax_offset=plain(4)))
    here = module(decoder=layers(1, 3, up=lambda: marked(4, 2, dim=0, stride=2), softmax_offset=plain(2)))
    assert megatron.placements(here, whole, stage="chunk1.") == {
        "chunk1.decoder.layers.0.up": ("decoder.layers.2.up", ([2, 3, 6, 7],)),
        "chunk1.decoder.layers.0.softmax_offset": ("decoder.layers.2.softmax_offset", ([2, 3],)),
    }


def test_experts_and_the_shared_embedding(state):
    def mixture(indices: list[int], columns: int) -> nn.Module:
        experts = [module(up=marked(2, columns, dim=1)) for _ in indices]
        mlp = module(experts=module(local_experts=nn.ModuleList(experts)))
        mlp.local_expert_indices = indices  # type: ignore[assignment]
        return mlp

    words = module(word_embeddings=module(weight=marked(8, 2, dim=0)))
    whole = module(embedding=words, mlp=mixture([0, 1, 2, 3], 4))
    here = module(output_layer=module(weight=marked(4, 2, dim=0)), mlp=mixture([2, 3], 2))
    assert {name: place[0] for name, place in megatron.placements(here, whole).items()} == {
        "output_layer.weight": "embedding.word_embeddings.weight",
        "mlp.experts.local_experts.0.up": "mlp.experts.local_experts.2.up",
        "mlp.experts.local_experts.1.up": "mlp.experts.local_experts.3.up",
    }


def test_what_is_not_declared_is_named(state):
    whole = module(decoder=layers(1, a=lambda: marked(4, 4, dim=0), b=plain(4)))
    here = module(decoder=layers(1, 2, c=lambda: marked(2, 4, dim=0)), head=nn.Parameter(torch.zeros(2)))
    with pytest.raises(ValueError, match=r"place .*head: the whole model has no head.*layer_number 2"):
        megatron.placements(here, whole)
    here = module(decoder=layers(1, a=lambda: marked(2, 4, dim=1), b=plain(2)))
    with pytest.raises(ValueError, match=r"layers.0.a: dimension 1 is .*layers.0.b: no attribute says") as caught:
        megatron.placements(here, whole)
    assert 'declared={"*.NAME": 0}' in str(caught.value)
    here.decoder.layers[0].a.partition_dim = 0  # type: ignore[index, union-attr]
    assert megatron.placements(here, whole, declared={"*.b": 0})["decoder.layers.0.b"][1] == ([2, 3],)


def test_without_megatron(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron", None)
    monkeypatch.delitem(sys.modules, "megatron.core.parallel_state", raising=False)
    with pytest.raises(ModuleNotFoundError, match="pip install megatron-core"):
        megatron.step(nn.Linear, dict, torch.randn)
