"""The gate for a trainer and an engine: right pairs pass, and faults are refuted with what makes the two equal."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from mgpu_check import Rank, ScalingMismatch, assert_engines_agree
from tests.gates.engine_sides import VOCABULARY, Engine, synchronize, trainer

pytestmark = pytest.mark.gpus(2)

FUSED = {"*.qkv": ["layers.*.q.weight", "layers.*.k.weight", "layers.*.v.weight"]}


def run(ranks: Any, engine: Any = Engine, trainer: Any = trainer, **options: Any) -> None:
    assert_engines_agree(ranks, trainer, engine, synchronize, **{"prompts": VOCABULARY} | options)


QUICK = ("temperature",)
FAULTS = [
    ("no norm", r"1\.after of the engine on ranks 0-1 hold the values that it had before"),
    ("no buffer", "scale of the engine on ranks 0-1 hold the values that it had before"),
    ("no bias", r"0\.q_bias of the engine on ranks 0-1 hold the values that it had before"),
    ("stale", "hold the trainer's weights of the synchronization before"),
    ("one rank", "on rank 1 hold the values that it had before"),
    ("bfloat16 on the way", "hold the trainer's weights rounded to bfloat16, in float32"),
    ("wrong shard", r"(?s)log-probabilities differ.*rows of layers\.\d\.\w+\.weight of the trainer arrive"),
    ("other layer", r"(?s)log-probabilities differ.*layers\.0\.q\.weight.* of the trainer arrive nowhere whole"),
    ("gate", "log-probabilities differ"),
    ("toggles", r"a second synchronization of the same weights changes 0\.o of the engine on rank 0"),
    ("temperature", "they are the trainer's at temperature 0.7"),
    ("top-k", r"filtered to 5 tokens and normalized again \(top-k or top-p\)"),
    ("logits", "the engine's are not normalized: after log_softmax they are equal"),
    ("shifted", "they are those of the previous position of the trainer"),
    ("prefixes stay", "log-probabilities differ"),
    ("no mask", "(?s)gives other log-probabilities for .*padded on the left.*the mask has no effect"),
    ("places of padding", "the engine gives other log-probabilities for .*padded on the left"),
    ("places restart", "the engine gives other log-probabilities for prompts that are given in pieces"),
    ("window", "they agree at positions 0 to 5, and differ from 6 on"),
    ("epsilon", "log-probabilities differ"),
    ("gelu", "log-probabilities differ"),
    ("narrow", "log-probabilities differ"),
    ("no sum on rank 1", "ranks of the engine differ: rank 1 from rank 0"),
]


@pytest.mark.slow  # test_a_step_of_the_trainer has a right pair each day
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"names": FUSED},
        {"trainer": functools.partial(trainer, sharded=False)},
        {"engine": functools.partial(Engine, fault="of tokens")},
        {"engine": functools.partial(Engine, dtype=torch.bfloat16)},
    ],
    ids=["alike", "names", "replicated", "of-tokens", "bfloat16"],
)
def test_right_pairs_pass(ranks, options):
    run(ranks, **options)


@pytest.mark.parametrize(
    ("fault", "match"),
    [pytest.param(*row, id=row[0], marks=() if row[0] in QUICK else pytest.mark.slow) for row in FAULTS],
)
def test_a_fault_of_the_engine(ranks, fault, match):
    with pytest.raises(ScalingMismatch, match=match):
        run(ranks, functools.partial(Engine, fault=fault))


class Routed:
    """A side that says the experts of tokens; `moved` of them go elsewhere in the second layer."""

    def __init__(self, model: torch.nn.Module, moved: int = 0) -> None:
        self.model, self.moved = model, moved

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.model.state_dict()

    def log_probabilities(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens)
        return logits.log_softmax(-1)

    def experts(self, tokens: torch.Tensor) -> torch.Tensor:
        chosen = torch.stack([tokens % 4, tokens % 3], dim=-1)[..., None].repeat(1, 1, 1, 2)
        chosen[:, : self.moved, 1, 0] += 3
        return chosen


def routed(rank: Rank, moved: int = 0) -> Routed:
    return Routed(trainer(rank, sharded=False), moved)


def copied(trainer: Routed, engine: Routed, rank: Rank) -> None:
    engine.model.load_state_dict(trainer.model.state_dict())


class Opaque:
    """An engine that shows no tensors."""

    def __init__(self, rank: Rank, dtype: torch.dtype = torch.float32) -> None:
        self.engine = Engine(rank, dtype=dtype)
        self.load = self.engine.load

    def log_probabilities(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.engine.log_probabilities(tokens)[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]


class Trained(Routed):
    """A trainer that changes its weights by a step of its own."""

    def __init__(self, rank: Rank, rate: float = 0.1) -> None:
        super().__init__(trainer(rank, sharded=False))
        self.tokens = torch.arange(8, device=rank.device)[None]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=rate)

    def step(self) -> None:
        F.cross_entropy(self.model(self.tokens)[0, :-1], self.tokens[0, 1:]).backward()
        self.optimizer.step()


class Copying(Routed):
    def tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in super().tensors().items()}


def copying(rank: Rank) -> Copying:
    return Copying(trainer(rank, sharded=False))


def test_a_step_of_the_trainer(ranks):
    assert_engines_agree(ranks, Trained, routed, copied, prompts=VOCABULARY)
    still = functools.partial(Trained, rate=0.0)
    for side, match in (still, r"its step\(\) changes none of them"), (copying, r"its tensors\(\) returns copies"):
        with pytest.raises(ValueError, match=f"the weights of the trainer stay as they are: {match}"):
            assert_engines_agree(ranks, side, routed, copied, prompts=VOCABULARY)
    with pytest.raises(ValueError, match=r"the trainer has neither tensors\(\) nor step\(\)"):
        assert_engines_agree(ranks, Opaque, routed, copied, prompts=VOCABULARY)


@pytest.mark.slow
def test_experts(ranks):
    moved = functools.partial(routed, moved=2)
    assert_engines_agree(ranks, routed, routed, copied, prompts=VOCABULARY)
    match = r"the engine routes 6 of 29 tokens to other experts than the trainer: first in layer 1, at position 0 of prompt 1"
    with pytest.raises(ScalingMismatch, match=match):
        assert_engines_agree(ranks, routed, moved, copied, prompts=VOCABULARY, routing=0.1)
    assert_engines_agree(ranks, routed, moved, copied, prompts=VOCABULARY, routing=0.3)


@pytest.mark.slow
def test_an_engine_without_tensors(ranks):
    narrow = functools.partial(Opaque, dtype=torch.bfloat16)
    run(ranks, Opaque)
    run(ranks, narrow, dtype=torch.bfloat16)
    with pytest.raises(ScalingMismatch, match="its dtype is unknown: give dtype= if it is narrower"):
        run(ranks, narrow)


@pytest.mark.slow
def test_a_trainer_whose_dropout_is_on(ranks):
    match = "the trainer gives other log-probabilities for a second call with the same prompts"
    with pytest.raises(ScalingMismatch, match=match):
        run(ranks, trainer=functools.partial(trainer, fault="dropout"))


@pytest.mark.slow
def test_swapped_tensors_are_named_by_their_names(ranks):
    match = (
        r"0\.qkv of the engine on rank 0 holds layers\.0\.q\.weight, layers\.0\.v\.weight, layers\.0\.k\.weight in this"
    )
    with pytest.raises(ScalingMismatch, match=match):
        run(ranks, functools.partial(Engine, fault="swapped"), names=FUSED)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"prompts": 1}, "prompts=1; give the size of the vocabulary"),
        ({"prompts": lambda: [torch.ones(1)]}, r"prompts\(\) must return a list"),
        ({"engine": lambda rank: 3}, r"engine\(rank\) returned a int without log_probabilities"),
        ({"dtype": torch.int8}, "dtype=torch.int8; give a floating-point dtype"),
        ({"routing": 1}, "routing=1; give the share of tokens"),
        ({"bitwise": 1}, "bitwise=1; give True or False"),
        ({"names": ["qkv"]}, r"names=\['qkv'\]; give a mapping"),
        ({"names": {"qkv": [1]}}, r"names has 'qkv': \[1\]; give a mapping"),
        ({"names": {"qkv": "layers.*.q"}}, "give one \\* at most"),
    ],
)
def test_arguments(ranks, options, match):
    with pytest.raises(ValueError, match=match):
        run(ranks, **options)
