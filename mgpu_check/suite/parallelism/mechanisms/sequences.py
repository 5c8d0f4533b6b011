"""Sequences that are divided among ranks: attention over all of them, and norms of parts."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from mgpu_check.asserts.gradients import gradient_or_zeros
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.suite.parallelism.mechanisms.driver import DividedStep, Portion, Results, total
from mgpu_check.suite.recipes import context_parallel as context
from mgpu_check.suite.recipes import sequence_parallel as sequence
from mgpu_check.suite.recipes.allreduce import chunks
from mgpu_check.suite.recipes.training import weighted

_HEADS, _WIDTH = 2, 4
_FEATURES = _HEADS * _WIDTH


def _projected(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """Return queries, keys and values: (batch, length, features) -> (batch, heads, length, width) each."""
    return list(F.linear(x, weight).unflatten(-1, (3, _HEADS, _WIDTH)).permute(2, 0, 3, 1, 4))


class ContextByHand(DividedStep):
    """`recipes.context_parallel`: projection and causal attention, as a ring or with keys gathered."""

    def data(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return inputs, the factors of outputs in the loss, and the weight of the projection."""
        shape = self["batch"], 2 * self.ranks * self["piece"], _FEATURES
        x, factors, weight = self.numbers(1, *shape), self.numbers(2, *shape), self.numbers(3, 3 * _FEATURES, _FEATURES)
        return x.to(dtype), factors.to(dtype), weight.to(dtype)

    def undivided(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        x, factors, weight = self.data(dtype)
        x.requires_grad_()
        weight.requires_grad_()
        q, k, v = _projected(x, weight)
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device="cpu").triu(1)
        scores = (q @ k.mT / _WIDTH**0.5).masked_fill(later, -torch.inf)
        outputs = (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)
        loss = weighted(outputs, factors)
        loss.backward()
        return {
            "outputs": outputs.detach(),
            "loss": loss.detach(),
            "gradient of inputs": gradient_or_zeros(x),
            "gradient of weight": gradient_or_zeros(weight),
        }

    def divided(self, rank: Rank) -> Results:
        x, factors, weight = self.data(self.dtype)
        positions = context.positions_of(x.shape[1], rank.size, zigzag=self.case.sizes["order"] == "zigzag")
        own = positions[rank.index]
        x, factors = (one[:, own].to(rank.device) for one in (x, factors))
        held = nn.Parameter(weight.to(rank.device))
        q, k, v = _projected(x.requires_grad_(), held)
        attend = context.ring_attention if self.case.sizes["way"] == "ring" else context.gathered_attention
        outputs = attend(q, k, v, positions, rank.index).transpose(1, 2).flatten(2)
        loss = weighted(outputs, factors)
        loss.backward()
        sequence.sum_gradients([held])
        return {
            "outputs": context.restored(outputs.detach(), positions, 1),
            "loss": total(loss),
            "gradient of inputs": Portion(gradient_or_zeros(x), 1, own),
            "gradient of weight": gradient_or_zeros(held),
        }


class ContextOfTorch(DividedStep):
    """`torch.distributed.tensor.experimental.context_parallel`, around `scaled_dot_product_attention`."""

    def data(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return queries, keys, values, and the factors of outputs in the loss."""
        # The memory-efficient kernel pads its logsumexp to 32 rows: each half of a rank's part must be a multiple.
        shape = 1, _HEADS, 64 * self.ranks, _WIDTH
        return self.tensors(dtype, *[shape] * 4)

    def undivided(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        q, k, v, factors = (one.requires_grad_() for one in self.data(dtype))
        causal = self.case.sizes["causal"] != "not causal"
        outputs = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        weighted(outputs, factors).backward()
        gradients = {f"gradient of {name}": gradient_or_zeros(one) for name, one in zip("qkv", (q, k, v), strict=True)}
        return {"outputs": outputs.detach(), **gradients}

    def divided(self, rank: Rank) -> Results:
        from torch.distributed.tensor.experimental import _attention as attention
        from torch.distributed.tensor.experimental import context_parallel

        mesh = init_device_mesh("cuda", (rank.size,), mesh_dim_names=("cp",))
        q, k, v, factors = buffers = [one.to(rank.device) for one in self.data(self.dtype)]
        causal = self.case.sizes["causal"]
        options = attention._cp_options
        before = options.enable_load_balance, options.rotate_method
        try:
            options.enable_load_balance = causal == "balanced"
            attention.set_rotate_method(str(self.case.sizes["rotation"]))
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers={factors}):
                q, k, v = (one.detach().clone().requires_grad_() for one in (q, k, v))
                outputs = F.scaled_dot_product_attention(q, k, v, is_causal=causal != "not causal")
                weighted(outputs, factors).backward()
                # The outputs with the sequence before the heads, as a model has them outside of its attention.
                found = [outputs.detach().transpose(1, 2), *map(gradient_or_zeros, (q, k, v))]
                whole = attention.context_parallel_unshard(mesh, found, [1, 2, 2, 2])
                whole[0] = whole[0].transpose(1, 2)
        finally:
            options.enable_load_balance, options.rotate_method = before
        return dict(zip(("outputs", *(f"gradient of {name}" for name in "qkv")), whole, strict=True))


class SequenceByHand(DividedStep):
    """`recipes.sequence_parallel`: a norm of parts of the sequence around divided layers."""

    def model(self, dtype: torch.dtype) -> tuple[nn.LayerNorm, nn.Linear, nn.Linear]:
        """Return norm, and the two layers."""
        norm = nn.LayerNorm(_FEATURES, dtype=dtype, device="cpu")
        up = nn.Linear(_FEATURES, self["hidden"], dtype=dtype, device="cpu")
        down = nn.Linear(self["hidden"], _FEATURES, dtype=dtype, device="cpu")
        with torch.no_grad():
            for salt, value in enumerate(one for layer in (norm, up, down) for one in layer.parameters()):
                value.copy_(self.numbers(salt + 8, *value.shape))
        return norm, up, down

    def data(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return inputs, and the factors of outputs in the loss."""
        shape = self["own"] * self.ranks, self["batch"], _FEATURES
        # One feature far from the others bounds the variance of a row away from 0.
        far = 4 * F.one_hot(torch.tensor(0, device="cpu"), _FEATURES)
        return (self.numbers(1, *shape) + far).to(dtype), self.numbers(2, *shape).to(dtype)

    def undivided(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        (norm, up, down), (x, factors) = self.model(dtype), self.data(dtype)
        outputs = x.requires_grad_() + down(F.gelu(up(norm(x))))
        weighted(outputs, factors).backward()
        gradients = [norm.weight, norm.bias, down.bias, up.weight, up.bias, down.weight, x]
        return {"outputs": outputs.detach()} | _named(gradients)

    def divided(self, rank: Rank) -> Results:
        (norm, up, down), (x, factors) = self.model(self.dtype), self.data(self.dtype)
        held = sequence.SequenceParallelMlp(norm, up, down, rank.device)
        own, hidden = chunks(len(x), rank.size)[rank.index], chunks(self["hidden"], rank.size)[rank.index]
        x = x[own].to(rank.device).requires_grad_()
        outputs = held(x)
        weighted(outputs, factors[own].to(rank.device)).backward()
        held.sum_partial_gradients()
        gradients = [*held.norm.parameters(), held.down_bias, held.up_weight, held.up_bias, held.down_weight, x]
        places = {"up": (0, hidden), "up bias": (0, hidden), "down": (1, hidden), "inputs": (0, own)}
        found: Results = {"outputs": Portion(outputs.detach(), 0, own)}
        for name, value in _named(gradients).items():
            place = places.get(name.removeprefix("gradient of "))
            found[name] = Portion(value, *place) if place else value
        return found


def _named(values: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    names = ("norm", "norm bias", "down bias", "up", "up bias", "down", "inputs")
    return {f"gradient of {name}": gradient_or_zeros(value) for name, value in zip(names, values, strict=True)}
