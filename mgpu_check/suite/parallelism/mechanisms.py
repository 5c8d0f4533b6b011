"""Mechanisms of model parallelism, each with its step on one device, and its step divided among ranks.

`assert_mechanisms_agree` runs them, and compares what each rank has with one device.
"""

from __future__ import annotations

import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from mgpu_check.asserts.findings import Findings, on_any_rank
from mgpu_check.asserts.known_defects import left_out
from mgpu_check.asserts.models import assert_gradients_agree, gradient_or_zeros
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.numerics.reduction import unit_roundoff
from mgpu_check.numerics.steps import full_precision
from mgpu_check.oracles.training.gradient_exchange import chunks
from mgpu_check.oracles.training.training_steps import weighted
from mgpu_check.simulated import simulated_device_count
from mgpu_check.suite.common.pairs import near_square
from mgpu_check.suite.parallelism.cases import MECHANISMS, MechanismCase
from mgpu_check.suite.recipes import model_parallel
from mgpu_check.torch_hooks.tensors import copied


class Portion(NamedTuple):
    """A rank's part of a result: the indices `at` of dimension `dim` of the whole."""

    value: torch.Tensor
    dim: int
    at: Sequence[int] | torch.Tensor | slice

    def of(self, full_tensor: torch.Tensor) -> torch.Tensor:
        at = torch.arange(full_tensor.shape[self.dim], device="cpu")[self.at] if isinstance(self.at, slice) else self.at
        return full_tensor.index_select(self.dim, torch.as_tensor(at, dtype=torch.int64, device="cpu"))


Results = dict[str, torch.Tensor | Portion]  # results of a rank by name: whole, or its part


class DividedStep(ABC):
    """A case of a mechanism, with data that all ranks and the reference make alike.
    `step_of` makes it on each rank; `assert_mechanisms_agree` runs it once divided and once undivided, and drops it."""

    def __init__(self, case: MechanismCase, ranks: int) -> None:
        self.case, self.ranks = case, ranks
        self.dtype: torch.dtype = getattr(torch, case.dtype)

    def __getitem__(self, size: str) -> int:
        number = self.case.sizes[size]
        assert isinstance(number, int), size
        return number

    def numbers(self, salt: int, *shape: int) -> torch.Tensor:
        """Return eighths from -1 to 1, float64 on the CPU. `salt` separates the tensors of a case."""
        generator = torch.Generator().manual_seed(self.case.seed * 64 + salt)
        return torch.randint(-8, 9, shape, generator=generator, device="cpu").double() / 8

    def tensors(self, dtype: torch.dtype, *shapes: Sequence[int]) -> tuple[torch.Tensor, ...]:
        return tuple(self.numbers(salt, *shape).to(dtype) for salt, shape in enumerate(shapes))

    def lacks(self, rank: Rank) -> str | None:
        """Return what these devices lack for the mechanism, or None; the same on all ranks. A collective."""
        return None

    @abstractmethod
    def undivided(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """Run the step on the CPU; return the whole results by name: outputs, losses, gradients."""

    @abstractmethod
    def divided(self, rank: Rank) -> Results:
        """Run the step with the recipe, in `dtype`; return what this rank has of each result. A collective."""


def _gradients(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"gradient of {name}": gradient_or_zeros(value) for name, value in tensors.items()}


def _portions(results: Mapping[str, torch.Tensor], places: Mapping[str, tuple[int, Any]]) -> Results:
    """Return results; those of the tensors in `places` are parts, at indices of a dimension."""
    chosen = {name: places.get(name.removeprefix("gradient of ")) for name in results}
    return {name: Portion(value, *place) if (place := chosen[name]) else value for name, value in results.items()}


def total(own: torch.Tensor) -> torch.Tensor:
    """Return the sum of the ranks' parts of a loss. A collective."""
    summed = own.detach().clone()
    dist.all_reduce(summed)
    return summed


def step_of(case: MechanismCase, ranks: int) -> DividedStep:
    step: DividedStep = pkgutil.resolve_name(f"{__name__}:{MECHANISMS[case.name].class_name}")(case, ranks)
    return step


def tolerance_of(expected: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, float]:
    """Return the tolerance of each result: 2^8 unit roundoffs of its largest element, or of 1.

    No result depends on more than some 2^6 roundings in sequence, each relative to a number that is at most some times
    as large as the result, or than 1. Exponents are at most some units: logits are shifted by their maximum.
    """
    return {
        name: 2.0**8 * unit_roundoff(dtype) * max(1.0, float(value.abs().max()) if value.numel() else 0.0)
        for name, value in expected.items()
    }


def assert_mechanisms_agree(rank: Rank, cases: Sequence[MechanismCase]) -> None:
    """Assert that each mechanism has the outputs, losses and gradients of one device. A collective."""
    with Findings() as findings:
        for case in cases:
            step = step_of(case, rank.size)
            if lack := step.lacks(rank):
                left_out(case.name, lack)
                continue
            with full_precision():
                got = step.divided(rank)
            expected = step.undivided(torch.float64)
            tolerance = tolerance_of(expected, step.dtype)
            results: dict[str, torch.Tensor] = {}
            for name, result in got.items():
                results[name] = copied(result.value if isinstance(result, Portion) else result)
                if isinstance(result, Portion) and name in expected:
                    expected[name] = result.of(expected[name])
            sizes = ", ".join(f"{name} {value}" for name, value in case.sizes.items())
            label = f"{case.name} ({sizes}, {case.dtype}) on {rank.size} ranks, {rank.device}"
            with findings.collected():
                assert_gradients_agree(results, expected, tolerance=tolerance, rank=rank.index, what=label)
            if findings.enough(rank):
                break


_TOKEN_WIDTH = 4
_OF_BALANCE = 0.5


class ExpertsByHand(DividedStep):
    """`ExpertParallel`: tokens in uneven parts, experts in chunks, capacity for each rank's tokens."""

    @property
    def experts(self) -> int:
        return self["experts"]

    def routing(self) -> tuple[int, int, bool]:
        """Return the experts of a token, the capacity, and whether balance is over the tokens of all ranks."""
        return self["top"], self["capacity"], self.case.sizes["balance"] == "all ranks"

    def model(self, dtype: torch.dtype) -> tuple[nn.Linear, model_parallel.Experts]:
        count = self.experts
        router = nn.Linear(_TOKEN_WIDTH, count, dtype=dtype, device="cpu")
        with torch.no_grad():
            router.weight.copy_(self.numbers(1, count, _TOKEN_WIDTH))
            # Products are multiples of 1/64, so no two logits of a token are equal, and no choice depends on rounding.
            router.bias.copy_(torch.arange(count, device="cpu") / 1024)
        return router, model_parallel.Experts(
            self.numbers(2, count, _TOKEN_WIDTH, _TOKEN_WIDTH).to(dtype), self.numbers(3, count, _TOKEN_WIDTH).to(dtype)
        )

    def data(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens, and the factors of their outputs in the loss."""
        shape = self["tokens"], _TOKEN_WIDTH
        return self.numbers(4, *shape).to(dtype), self.numbers(5, *shape).to(dtype)

    def undivided(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        (router, experts), (x, factors) = self.model(dtype), self.data(dtype)
        x.requires_grad_()
        logits = router(x)
        of_each = F.silu(torch.einsum("ti,eoi->teo", x, experts.weight) + experts.bias)
        outputs = (self._shares(logits).unsqueeze(-1) * of_each).sum(1)
        owned = [slice(None)] if self.routing()[2] else chunks(len(x), self.ranks)
        balance = torch.stack([self._balance(logits[own]) for own in owned]).mean()
        loss = weighted(outputs, factors) + _OF_BALANCE * balance
        loss.backward()
        results = {"outputs": outputs.detach(), "balance": balance.detach(), "loss": loss.detach()}
        return results | _gradients_of_experts(x, router, experts)

    def _shares(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the factor of each expert for each token: 0 unless it is chosen and takes the token."""
        top, capacity, _ = self.routing()
        kept = torch.zeros(logits.shape, dtype=torch.bool, device="cpu")
        for own in chunks(len(logits), self.ranks):
            loads = [0] * self.experts
            for token in range(own.start, own.stop):
                for expert in logits[token].argsort(descending=True)[:top].tolist():
                    loads[expert] += 1
                    kept[token, expert] = not capacity or loads[expert] <= capacity
        share = logits.softmax(1) * kept
        return share if top == 1 else share / share.sum(1, keepdim=True).where(kept.any(1, keepdim=True), 1)

    def _balance(self, logits: torch.Tensor) -> torch.Tensor:
        if not len(logits):
            return logits.sum()
        top = self.routing()[0]
        chosen = torch.zeros_like(logits).scatter(1, logits.topk(top).indices, 1.0)
        return self.experts * (chosen.mean(0) / top * logits.softmax(1).mean(0)).sum()

    def divided(self, rank: Rank) -> Results:
        (router, experts), (x, factors) = self.model(self.dtype), self.data(self.dtype)
        top, capacity, of_all = self.routing()
        model, finish = self.parallel(router, experts, rank, top=top, capacity=capacity)
        own = chunks(len(x), rank.size)[rank.index]
        x = x[own].to(rank.device).requires_grad_()
        outputs, logits = model(x)
        balance = model_parallel.balance_loss(logits, top, of_all=of_all)
        loss = weighted(outputs, factors[own].to(rank.device)) + _OF_BALANCE * balance
        loss.backward()
        finish()
        whole = {"outputs": outputs.detach(), "balance": total(balance), "loss": total(loss)}
        whole |= _gradients_of_experts(x, model.router, model.experts)
        at = {"outputs": own, "tokens": own, "expert": model.owned[model.place]}
        owned = [(name, part) for name in whole for word, part in at.items() if word in name]
        return {**whole, **{name: Portion(whole[name], 0, part) for name, part in owned}}

    def parallel(self, router: nn.Linear, experts: model_parallel.Experts, rank: Rank, **options: Any) -> Any:
        """Return the divided model, and a function to call after backward."""
        model = model_parallel.ExpertParallel(router, experts, rank.device, **options)
        return model, model.sum_partial_gradients


def _gradients_of_experts(x: torch.Tensor, router: nn.Module, experts: nn.Module) -> dict[str, torch.Tensor]:
    gradients = {"gradient of tokens": gradient_or_zeros(x)}
    for label, module in (("router", router), ("experts", experts)):
        for name, value in module.named_parameters():
            gradient = gradient_or_zeros(value)
            gradients[f"gradient of {label}: {name}"] = getattr(gradient, "full_tensor", lambda local=gradient: local)()
    return gradients


class ShardedExperts(ExpertsByHand):
    """`ExpertParallel` under `fully_shard`: experts over the ranks that hold them, the router over all (HSDP)."""

    @property
    def expert_ranks(self) -> int:
        """The number of ranks that have all experts together: a divisor of the world size."""
        few, many = near_square(self.ranks)
        return {"few": few, "many": many, "all": self.ranks}[str(self.case.sizes["expert ranks"])]

    @property
    def experts(self) -> int:
        return self["experts"] * self.expert_ranks

    def routing(self) -> tuple[int, int, bool]:
        return 1, 0, True

    def parallel(self, router: nn.Linear, experts: model_parallel.Experts, rank: Rank, **options: Any) -> Any:
        shape = self.ranks // self.expert_ranks, self.expert_ranks
        mesh = init_device_mesh("cuda", shape, mesh_dim_names=("replicas", "experts"))
        model = model_parallel.ExpertParallel(
            router, experts, rank.device, group=mesh["experts"].get_group(), **options
        )
        model_parallel.shard(model, mesh)
        return model, lambda: None


_HEADS, _WIDTH = 2, 4
_FEATURES = _HEADS * _WIDTH


def _projected(x: torch.Tensor, weight: torch.Tensor) -> list[torch.Tensor]:
    """Return queries, keys and values: (batch, length, features) -> (batch, heads, length, width) each."""
    return list(F.linear(x, weight).unflatten(-1, (3, _HEADS, _WIDTH)).permute(2, 0, 3, 1, 4))


class ContextByHand(DividedStep):
    """`ring_attention`: projection and causal attention, as a ring or with keys gathered."""

    def data(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return inputs, the factors of outputs in the loss, and the weight of the projection."""
        shape = self["batch"], 2 * self.ranks * self["piece"], _FEATURES
        return self.tensors(dtype, shape, shape, (3 * _FEATURES, _FEATURES))

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
        return {"outputs": outputs.detach(), "loss": loss.detach()} | _gradients({"inputs": x, "weight": weight})

    def divided(self, rank: Rank) -> Results:
        x, factors, weight = self.data(self.dtype)
        positions = model_parallel.positions_of(x.shape[1], rank.size, zigzag=self.case.sizes["order"] == "zigzag")
        own = positions[rank.index]
        x, factors = (tensor[:, own].to(rank.device) for tensor in (x, factors))
        parameter = nn.Parameter(weight.to(rank.device))
        q, k, v = _projected(x.requires_grad_(), parameter)
        ways = {"ring": model_parallel.ring_attention, "gathered": model_parallel.gathered_attention}
        attend = ways[str(self.case.sizes["way"])]
        outputs = attend(q, k, v, positions, rank.index).transpose(1, 2).flatten(2)
        loss = weighted(outputs, factors)
        loss.backward()
        model_parallel.sum_gradients([parameter])
        results = {"outputs": model_parallel.restored(outputs.detach(), positions, 1), "loss": total(loss)}
        return _portions(results | _gradients({"inputs": x, "weight": parameter}), {"inputs": (1, own)})


class ContextOfTorch(DividedStep):
    """`torch.distributed.tensor.experimental.context_parallel`, around `scaled_dot_product_attention`."""

    def data(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return queries, keys, values, and the factors of outputs in the loss."""
        # The memory-efficient kernel pads its logsumexp to 32 rows: each half of a rank's part must be a multiple.
        return self.tensors(dtype, *[(1, _HEADS, 64 * self.ranks, _WIDTH)] * 4)

    def undivided(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        q, k, v, factors = (tensor.requires_grad_() for tensor in self.data(dtype))
        outputs = F.scaled_dot_product_attention(q, k, v, is_causal=self.case.sizes["causal"] != "not causal")
        weighted(outputs, factors).backward()
        return {"outputs": outputs.detach()} | _gradients({"q": q, "k": k, "v": v})

    def divided(self, rank: Rank) -> Results:
        from torch.distributed.tensor.experimental import _attention as attention
        from torch.distributed.tensor.experimental import context_parallel

        mesh = init_device_mesh("cuda", (rank.size,), mesh_dim_names=("cp",))
        q, k, v, factors = buffers = [tensor.to(rank.device) for tensor in self.data(self.dtype)]
        causal = self.case.sizes["causal"]
        options = attention._cp_options
        before = options.enable_load_balance, options.rotate_method
        try:
            options.enable_load_balance = causal == "balanced"
            attention.set_rotate_method(str(self.case.sizes["rotation"]))
            with context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4, no_restore_buffers={factors}):
                q, k, v = (tensor.detach().clone().requires_grad_() for tensor in (q, k, v))
                outputs = F.scaled_dot_product_attention(q, k, v, is_causal=causal != "not causal")
                weighted(outputs, factors).backward()
                # The outputs with the sequence before the heads, as a model has them outside of its attention.
                shards = {"outputs": outputs.detach().transpose(1, 2)} | _gradients({"q": q, "k": k, "v": v})
                full_tensors = attention.context_parallel_unshard(mesh, [*shards.values()], [1, 2, 2, 2])
                full_tensors[0] = full_tensors[0].transpose(1, 2)
        finally:
            options.enable_load_balance, options.rotate_method = before
        return dict(zip(shards, full_tensors, strict=True))


class SequenceByHand(DividedStep):
    """`SequenceParallelMlp`: a norm of parts of the sequence around divided layers."""

    def model(self, dtype: torch.dtype) -> tuple[nn.LayerNorm, nn.Linear, nn.Linear]:
        norm = nn.LayerNorm(_FEATURES, dtype=dtype, device="cpu")
        up = nn.Linear(_FEATURES, self["hidden"], dtype=dtype, device="cpu")
        down = nn.Linear(self["hidden"], _FEATURES, dtype=dtype, device="cpu")
        with torch.no_grad():
            for salt, value in enumerate(parameter for layer in (norm, up, down) for parameter in layer.parameters()):
                value.copy_(self.numbers(salt + 8, *value.shape))
        return norm, up, down

    def data(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        shape = self["own"] * self.ranks, self["batch"], _FEATURES
        # One feature far from the others bounds the variance of a row away from 0.
        far = 4 * F.one_hot(torch.tensor(0, device="cpu"), _FEATURES)
        return (self.numbers(1, *shape) + far).to(dtype), self.numbers(2, *shape).to(dtype)

    def undivided(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        (norm, up, down), (x, factors) = self.model(dtype), self.data(dtype)
        outputs = x.requires_grad_() + down(F.gelu(up(norm(x))))
        weighted(outputs, factors).backward()
        gradients = norm.weight, norm.bias, down.bias, up.weight, up.bias, down.weight, x
        return {"outputs": outputs.detach()} | self._gradients_of(*gradients)

    def divided(self, rank: Rank) -> Results:
        (norm, up, down), (x, factors) = self.model(self.dtype), self.data(self.dtype)
        mlp = model_parallel.SequenceParallelMlp(norm, up, down, rank.device)
        own, hidden = chunks(len(x), rank.size)[rank.index], chunks(self["hidden"], rank.size)[rank.index]
        x = x[own].to(rank.device).requires_grad_()
        outputs = mlp(x)
        weighted(outputs, factors[own].to(rank.device)).backward()
        mlp.sum_partial_gradients()
        gradients = *mlp.norm.parameters(), mlp.down_bias, mlp.up_weight, mlp.up_bias, mlp.down_weight, x
        results = {"outputs": outputs.detach()} | self._gradients_of(*gradients)
        of_up, of_tokens = (0, hidden), (0, own)
        return _portions(
            results,
            {"outputs": of_tokens, "up": of_up, "up bias": of_up, "down": (1, hidden), "inputs": of_tokens},
        )

    def _gradients_of(self, *values: torch.Tensor) -> dict[str, torch.Tensor]:
        labels = ("norm", "norm bias", "down bias", "up", "up bias", "down", "inputs")
        return _gradients(dict(zip(labels, values, strict=True)))


_LAYER_FEATURES = 6


class Vocabulary(DividedStep):
    """`recipes.model_parallel`: an embedding that is also the output layer, and its cross entropy."""

    def data(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """Return embedding, tokens, labels, and the label to ignore. Labels are on all ranks, if there are enough."""
        classes, tokens = self.ranks + self["more"], self["tokens"]
        generator = torch.Generator().manual_seed(self.case.seed)
        token_ids = torch.randint(classes, (tokens,), generator=generator, device="cpu")
        labels = (torch.arange(tokens, device="cpu") * (classes // 2 * 2 - 1) + self.case.seed) % classes
        ignored = {"a class": int(labels[1]), "no class": -100, "nothing": -100}[str(self.case.sizes["ignored"])]
        if self.case.sizes["ignored"] == "no class":
            labels[::3] = ignored
        return self.numbers(1, classes, _LAYER_FEATURES).to(dtype), token_ids, labels, ignored

    def undivided(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        embedding, tokens, labels, ignored = self.data(dtype)
        embedding.requires_grad_()
        hidden = F.embedding(tokens, embedding)
        logits = F.linear(hidden.tanh() * self["scale"], embedding)
        loss = F.cross_entropy(logits, labels, ignore_index=ignored)
        loss.backward()
        return {
            "embedded": hidden.detach(),
            "logits": logits.detach(),
            "loss": loss.detach(),
            "gradient": gradient_or_zeros(embedding),
        }

    def divided(self, rank: Rank) -> Results:
        embedding, *others, ignored = self.data(self.dtype)
        tokens, labels = (tensor.to(rank.device) for tensor in others)
        vocabulary = model_parallel.VocabularyParallel(embedding, rank.device)
        hidden = vocabulary.embed(tokens)
        logits = vocabulary.logits(hidden.tanh() * self["scale"])
        loss = model_parallel.cross_entropy(logits, labels, vocabulary.own, ignore_index=ignored)
        loss.backward()
        return {
            "embedded": hidden.detach(),
            "logits": Portion(logits.detach(), 1, vocabulary.own),
            "loss": loss.detach(),
            "gradient": Portion(gradient_or_zeros(vocabulary.weight), 0, vocabulary.own),
        }


class AsynchronousLayers(DividedStep):
    """`recipes.model_parallel`: two layers whose products overlap with their collectives."""

    def lacks(self, rank: Rank) -> str | None:
        peers = {*range(torch.cuda.device_count())} - {rank.device.index}
        unreachable = not all(torch.cuda.can_device_access_peer(rank.device, peer) for peer in peers)
        if on_any_rank(rank, unreachable or rank.node_index > 0):
            return "GPUs that do not reach the memory of each other"
        refused = False
        if simulated_device_count() is None:
            from torch.distributed import _symmetric_memory as symmetric

            try:
                symmetric.get_symm_mem_workspace(rank.group.group_name, 1 << 16)
            except RuntimeError:  # the driver, or the container, does not share memory between processes
                refused = True
        return "no symmetric memory" if on_any_rank(rank, refused) else None

    def data(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return inputs, factors of outputs in the loss, and the weights of both layers."""
        rows, hidden = self["own"] * self.ranks, self["hidden"] * self.ranks
        shapes = (rows, _LAYER_FEATURES), (rows, _LAYER_FEATURES), (hidden, _LAYER_FEATURES), (_LAYER_FEATURES, hidden)
        return self.tensors(dtype, *shapes)

    def undivided(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        x, factors, up, down = (tensor.requires_grad_() for tensor in self.data(dtype))
        outputs = F.linear(F.gelu(F.linear(x, up)), down)
        weighted(outputs, factors).backward()
        return {"outputs": outputs.detach()} | _gradients({"inputs": x, "up": up, "down": down})

    def divided(self, rank: Rank) -> Results:
        x, factors, up, down = self.data(self.dtype)
        rows, hidden = (chunks(count, rank.size)[rank.index] for count in (len(x), len(up)))
        x, up, down = (tensor.to(rank.device).requires_grad_() for tensor in (x[rows], up[hidden], down[:, hidden]))
        outputs = model_parallel.scattered_linear(F.gelu(model_parallel.gathered_linear(x, up)), down)
        weighted(outputs, factors[rows].to(rank.device)).backward()
        results = {"outputs": outputs.detach()} | _gradients({"inputs": x, "up": up, "down": down})
        return _portions(results, {"outputs": (0, rows), "inputs": (0, rows), "up": (0, hidden), "down": (1, hidden)})


class GroupedQueries(DividedStep):
    """`recipes.model_parallel`: attention by heads, from one fused weight."""

    def heads(self) -> model_parallel.FusedHeads:
        """Return the heads: one number, of ranks and of heads of keys, is a multiple of the other."""
        fewer = max((count for count in range(1, self.ranks) if self.ranks % count == 0), default=1)
        numbers = {"fewer": fewer, "as many": self.ranks, "more": 2 * self.ranks, "one": 1}
        shared = numbers[str(self.case.sizes["shared"])]
        queries = max(shared, self.ranks) * self["each"]
        return model_parallel.FusedHeads(queries, shared, 2, self.case.sizes["layout"] == "interleaved")

    def data(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return inputs, factors of outputs in the loss, the fused weight, and that of the outputs."""
        heads = self.heads()
        shape = 2, 5, _LAYER_FEATURES
        of_heads = heads.queries * heads.width
        fused = of_heads + 2 * heads.shared * heads.width, _LAYER_FEATURES
        return self.tensors(dtype, shape, shape, fused, (_LAYER_FEATURES, of_heads))

    def undivided(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        x, factors, fused, out = (tensor.requires_grad_() for tensor in self.data(dtype))
        heads = self.heads()
        each, width = heads.queries // heads.shared, heads.width
        projected = F.linear(x, fused)
        if heads.interleaved:
            groups = projected.unflatten(-1, (heads.shared, each + 2, width))
            q, k, v = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
        else:
            sizes = [heads.queries * width, heads.shared * width, heads.shared * width]
            q, k, v = (projection.unflatten(-1, (-1, width)) for projection in projected.split(sizes, -1))
        k, v = (tensor.repeat_interleave(each, 2) for tensor in (k, v))
        scores = torch.einsum("bqhw,bkhw->bhqk", q, k) / width**0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cpu").triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        outputs = F.linear(torch.einsum("bhqk,bkhw->bqhw", weights, v).flatten(2), out)
        weighted(outputs, factors).backward()
        return {"outputs": outputs.detach()} | _gradients({"inputs": x, "queries, keys and values": fused, "out": out})

    def divided(self, rank: Rank) -> Results:
        x, factors, fused, out = self.data(self.dtype)
        attention = model_parallel.GroupedQueryAttention(fused, out, self.heads(), rank.device)
        x = x.to(rank.device).requires_grad_()
        outputs = attention(x)
        weighted(outputs, factors.to(rank.device)).backward()
        attention.sum_partial_gradients()
        columns = attention.out.shape[1]
        own = slice(rank.index * columns, (rank.index + 1) * columns)
        results = {"outputs": outputs.detach()}
        results |= _gradients({"inputs": x, "queries, keys and values": attention.fused, "out": attention.out})
        return _portions(results, {"queries, keys and values": (0, attention.rows), "out": (1, own)})
