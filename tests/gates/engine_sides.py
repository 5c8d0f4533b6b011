"""A small trainer, fully sharded, and an engine: fused weights, divided over ranks, with a cache of keys; and faults."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from mgpu_check import Rank

VOCABULARY, WIDTH, HEADS, LAYERS, PLACES = 32, 16, 4, 2, 24
Tensors = Mapping[str, torch.Tensor]


class Block(nn.Module):
    q: nn.Module
    k: nn.Module
    v: nn.Module
    o: nn.Module
    gate: nn.Module
    up: nn.Module
    down: nn.Module

    def __init__(self) -> None:
        super().__init__()
        for name in ("q", "k", "v", "o", "gate", "up", "down"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=name == "q"))
        self.norm, self.after = nn.RMSNorm(WIDTH, eps=1e-5), nn.RMSNorm(WIDTH, eps=1e-5)

    def forward(self, x: torch.Tensor, visible: torch.Tensor) -> torch.Tensor:
        h = self.norm(x)
        query, key, value = (of(h).unflatten(-1, (HEADS, -1)).transpose(1, 2) for of in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        h = self.after(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(PLACES, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.register_buffer("scale", torch.ones(1))

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None, position_ids: Any = None) -> torch.Tensor:
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        places = torch.arange(input_ids.shape[1], device=mask.device)[None] if position_ids is None else position_ids
        x = self.words(input_ids) + self.places(places)
        visible = visible_by(mask.bool(), 0)
        for layer in self.layers:
            x = layer(x, visible)
        return F.linear(x, self.words.weight) * self.scale


def visible_by(mask: torch.Tensor, start: int) -> torch.Tensor:
    """Return which keys each query of the tokens from `start` on sees: ``[batch, 1, queries, keys]``."""
    count = mask.shape[1]
    causal = torch.ones(count, count, dtype=torch.bool, device=mask.device).tril()[start:]
    own = torch.eye(count, dtype=torch.bool, device=mask.device)[start:]
    return (causal & mask[:, None, :] | own)[:, None]


def trainer(rank: Rank, sharded: bool = True, fault: str = "") -> nn.Module:
    torch.manual_seed(0)
    model = Decoder().to(rank.device)
    if fault == "dropout":
        model.get_submodule("layers.0.norm").register_forward_hook(lambda module, args, output: F.dropout(output))
    if sharded and rank.size > 1:
        for layer in model.layers:
            fully_shard(layer)
        fully_shard(model)
    return model


class Engine:
    """Tensor parallelism over all ranks: each has some heads, and a part of the feed-forward layers."""

    def __init__(self, rank: Rank, fault: str = "", dtype: torch.dtype = torch.float32) -> None:
        self.rank, self.fault, self.loads = rank, fault, 0
        part = WIDTH // rank.size
        shapes: dict[str, tuple[int, ...]] = {"words": (VOCABULARY, WIDTH), "places": (PLACES, WIDTH), "scale": (1,)}
        for layer in range(LAYERS):
            shapes |= {
                f"{layer}.qkv": (3 * part, WIDTH), f"{layer}.q_bias": (part,), f"{layer}.o": (WIDTH, part),
                f"{layer}.gate_up": (2 * part, WIDTH), f"{layer}.down": (WIDTH, part),
                f"{layer}.norm": (WIDTH,), f"{layer}.after": (WIDTH,),
            }  # fmt: skip
        self.named = {name: torch.zeros(shape, dtype=dtype, device=rank.device) for name, shape in shapes.items()}
        self.prefixes: dict[tuple[int, ...], torch.Tensor] = {}

    def tensors(self) -> Tensors:
        return self.named

    def load(self, named: Tensors) -> None:
        """Take the weights of the trainer, all of them whole."""
        self.loads += 1
        fault, index = self.fault, self.rank.index
        if (fault == "stale" and self.loads > 1) or (fault == "one rank" and index):
            return
        if self.fault == "bfloat16 on the way":
            named = {name: value.bfloat16().float() for name, value in named.items()}
        if fault == "wrong shard":
            index = 0

        def rows(name: str) -> torch.Tensor:
            return named[name].chunk(self.rank.size)[index]

        def columns(name: str) -> torch.Tensor:
            return named[name].chunk(self.rank.size, dim=1)[index]

        new = {"words": named["words.weight"], "places": named["places.weight"], "scale": named["scale"]}
        for layer in range(LAYERS):
            of = f"layers.{LAYERS - 1 if fault == 'other layer' else layer}."
            fused = ["q", "v", "k"] if fault == "swapped" else ["q", "k", "v"]
            pair = ["up", "gate"] if fault == "gate" else ["gate", "up"]
            new |= {
                f"{layer}.qkv": torch.cat([rows(f"{of}{name}.weight") for name in fused]),
                f"{layer}.q_bias": rows(f"{of}q.bias"), f"{layer}.o": columns(f"{of}o.weight"),
                f"{layer}.gate_up": torch.cat([rows(f"{of}{name}.weight") for name in pair]),
                f"{layer}.down": columns(f"{of}down.weight"),
                f"{layer}.norm": named[f"{of}norm.weight"], f"{layer}.after": named[f"{of}after.weight"],
            }  # fmt: skip
        left_out = {"no norm": "1.after", "no buffer": "scale", "no bias": "0.q_bias"}.get(fault)
        for name, value in new.items():
            if name != left_out:
                self.named[name].copy_(value)
        if fault == "toggles" and self.loads > 2:
            self.named["0.o"].copy_(self.named["0.o"].flip(0))
        if fault != "prefixes stay":
            self.prefixes.clear()

    def log_probabilities(
        self, tokens: torch.Tensor, mask: torch.Tensor | None = None, pieces: Sequence[int] | None = None
    ) -> torch.Tensor:
        mask = torch.ones_like(tokens).bool() if mask is None or self.fault == "no mask" else mask
        places = (mask.long().cumsum(-1) - 1).clamp_min(0)
        if self.fault == "places of padding":
            places = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        cache: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        logits, start = [], 0
        for count in pieces or [tokens.shape[1]]:
            part = slice(start, start + count)
            at = places[:, part] - (start if self.fault == "places restart" else 0)
            with torch.autocast(tokens.device.type, torch.bfloat16, enabled=self.fault == "narrow"):
                logits.append(self._forward(tokens[:, part], at, mask[:, : start + count], start, cache))
            start += count
        out = torch.cat(logits, dim=1).float()
        if self.fault == "temperature":
            out = out / 0.7
        if self.fault == "top-k":
            out = torch.where(out >= out.topk(5).values[..., -1:], out, -torch.inf)
        if self.fault == "logits":
            return out
        out = out.log_softmax(-1)
        if self.fault == "shifted":
            out = torch.cat([out[:, :1], out[:, :-1]], dim=1)
        if self.fault == "of tokens":
            return out[:, :-1].gather(-1, tokens[:, 1:, None])[..., 0]
        return out

    def _forward(
        self, tokens: torch.Tensor, places: torch.Tensor, mask: torch.Tensor, start: int, cache: dict[int, Any]
    ) -> torch.Tensor:
        w, heads = self.named, HEADS // self.rank.size
        eps = 1e-2 if self.fault == "epsilon" else 1e-5
        visible = visible_by(mask, start)
        if self.fault == "window":
            count = mask.shape[1]
            near = torch.ones(count, count, dtype=torch.bool, device=mask.device).triu(-5)[start:]
            visible = visible & near
        x = w["words"][tokens] + w["places"][places]
        for layer in range(LAYERS):
            h = F.rms_norm(x, (WIDTH,), w[f"{layer}.norm"], eps)
            query, key, value = F.linear(h, w[f"{layer}.qkv"]).chunk(3, dim=-1)
            query = query + w[f"{layer}.q_bias"]
            query, key, value = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in (query, key, value))
            if self.fault == "prefixes stay" and not start and len(tokens) == 1:
                key = self.prefixes.setdefault((layer, *tokens[0].tolist()), key)
            if layer in cache:
                key, value = (torch.cat(pair, dim=2) for pair in zip(cache[layer], (key, value), strict=True))
            cache[layer] = key, value
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=visible)
            x = x + self._summed(F.linear(attended.transpose(1, 2).flatten(2), w[f"{layer}.o"]))
            h = F.rms_norm(x, (WIDTH,), w[f"{layer}.after"], eps)
            gate, up = F.linear(h, w[f"{layer}.gate_up"]).chunk(2, dim=-1)
            activation = functools.partial(F.gelu, approximate="tanh") if self.fault == "gelu" else F.silu
            x = x + self._summed(F.linear(activation(gate) * up, w[f"{layer}.down"]))
        return F.linear(x, w["words"]) * w["scale"]

    def _summed(self, x: torch.Tensor) -> torch.Tensor:
        if self.rank.size > 1:
            if self.fault == "no sum on rank 1" and self.rank.index == 1:
                dist.all_reduce(x.clone())
            else:
                dist.all_reduce(x)
        return x


def synchronize(trainer: nn.Module, engine: Engine, rank: Rank) -> None:
    whole = {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in trainer.state_dict().items()
    }
    engine.load(whole)
