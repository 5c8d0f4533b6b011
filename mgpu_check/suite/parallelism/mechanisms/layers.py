"""Layers that are divided among ranks by classes or by heads."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from mgpu_check.asserts.findings import on_any_rank
from mgpu_check.asserts.gradients import gradient_or_zeros
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.simulated import simulated_device_count
from mgpu_check.suite.parallelism.mechanisms.driver import DividedStep, Portion, Results
from mgpu_check.suite.recipes import asynchronous_tensor, grouped_query, vocabulary_parallel
from mgpu_check.suite.recipes.allreduce import chunks
from mgpu_check.suite.recipes.training import weighted

_FEATURES = 6


class Vocabulary(DividedStep):
    """`recipes.vocabulary_parallel`: an embedding that is also the output layer, and its cross entropy."""

    def data(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int]:
        """Return embedding, tokens, labels, and the label to ignore. Labels are on all ranks, if there are enough."""
        classes, tokens = self.ranks + self["more"], self["tokens"]
        generator = torch.Generator().manual_seed(self.case.seed)
        given = torch.randint(classes, (tokens,), generator=generator, device="cpu")
        labels = (torch.arange(tokens, device="cpu") * (classes // 2 * 2 - 1) + self.case.seed) % classes
        ignored = {"a class": int(labels[1]), "no class": -100, "nothing": -100}[str(self.case.sizes["ignored"])]
        if self.case.sizes["ignored"] == "no class":
            labels[::3] = ignored
        return self.numbers(1, classes, _FEATURES).to(dtype), given, labels, ignored

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
        tokens, labels = (one.to(rank.device) for one in others)
        held = vocabulary_parallel.VocabularyParallel(embedding, rank.device)
        hidden = held.embed(tokens)
        logits = held.logits(hidden.tanh() * self["scale"])
        loss = vocabulary_parallel.cross_entropy(logits, labels, held.own, ignore_index=ignored)
        loss.backward()
        return {
            "embedded": hidden.detach(),
            "logits": Portion(logits.detach(), 1, held.own),
            "loss": loss.detach(),
            "gradient": Portion(gradient_or_zeros(held.weight), 0, held.own),
        }


class AsynchronousLayers(DividedStep):
    """`recipes.asynchronous_tensor`: two layers whose products overlap with their collectives."""

    def can_run(self, rank: Rank) -> bool:
        here, count = rank.device.index, torch.cuda.device_count()
        apart = not all(torch.cuda.can_device_access_peer(here, other) for other in range(count) if other != here)
        if on_any_rank(rank, apart or rank.node_index > 0):
            return False
        refused = False
        if simulated_device_count() is None:
            from torch.distributed import _symmetric_memory as symmetric

            try:
                symmetric.get_symm_mem_workspace(rank.group.group_name, 1 << 16)
            except RuntimeError:  # the driver, or the container, does not share memory between processes
                refused = True
        return not on_any_rank(rank, refused)

    def data(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return inputs, factors of outputs in the loss, and the weights of both layers."""
        rows, hidden = self["own"] * self.ranks, self["hidden"] * self.ranks
        shapes = (rows, _FEATURES), (rows, _FEATURES), (hidden, _FEATURES), (_FEATURES, hidden)
        return self.tensors(dtype, *shapes)

    def undivided(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        x, factors, up, down = (one.requires_grad_() for one in self.data(dtype))
        outputs = F.linear(F.gelu(F.linear(x, up)), down)
        weighted(outputs, factors).backward()
        gradients = {"inputs": x, "up": up, "down": down}
        return {"outputs": outputs.detach()} | {
            f"gradient of {name}": gradient_or_zeros(value) for name, value in gradients.items()
        }

    def divided(self, rank: Rank) -> Results:
        x, factors, up, down = self.data(self.dtype)
        rows, hidden = (chunks(count, rank.size)[rank.index] for count in (len(x), len(up)))
        x, up, down = (one.to(rank.device).requires_grad_() for one in (x[rows], up[hidden], down[:, hidden]))
        outputs = asynchronous_tensor.scattered_linear(F.gelu(asynchronous_tensor.gathered_linear(x, up)), down)
        weighted(outputs, factors[rows].to(rank.device)).backward()
        return {
            "outputs": Portion(outputs.detach(), 0, rows),
            "gradient of inputs": Portion(gradient_or_zeros(x), 0, rows),
            "gradient of up": Portion(gradient_or_zeros(up), 0, hidden),
            "gradient of down": Portion(gradient_or_zeros(down), 1, hidden),
        }


class GroupedQueries(DividedStep):
    """`recipes.grouped_query`: attention by heads, from one fused weight."""

    def heads(self) -> grouped_query.FusedHeads:
        """Return the heads: one number, of ranks and of heads of keys, is a multiple of the other."""
        fewer = max((count for count in range(1, self.ranks) if self.ranks % count == 0), default=1)
        shared = {"fewer": fewer, "as many": self.ranks, "more": 2 * self.ranks, "one": 1}[
            str(self.case.sizes["shared"])
        ]
        queries = max(shared, self.ranks) * self["each"]
        return grouped_query.FusedHeads(queries, shared, 2, self.case.sizes["layout"] == "interleaved")

    def data(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """Return inputs, factors of outputs in the loss, the fused weight, and that of the outputs."""
        heads = self.heads()
        shape = 2, 5, _FEATURES
        of_heads = heads.queries * heads.width
        fused = of_heads + 2 * heads.shared * heads.width, _FEATURES
        return self.tensors(dtype, shape, shape, fused, (_FEATURES, of_heads))

    def undivided(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        x, factors, fused, out = (one.requires_grad_() for one in self.data(dtype))
        heads = self.heads()
        each, width = heads.queries // heads.shared, heads.width
        made = F.linear(x, fused)
        if heads.interleaved:
            groups = made.unflatten(-1, (heads.shared, each + 2, width))
            q, k, v = groups[..., :-2, :].flatten(2, 3), groups[..., -2, :], groups[..., -1, :]
        else:
            sizes = [heads.queries * width, heads.shared * width, heads.shared * width]
            q, k, v = (part.unflatten(-1, (-1, width)) for part in made.split(sizes, -1))
        k, v = (one.repeat_interleave(each, 2) for one in (k, v))
        scores = torch.einsum("bqhw,bkhw->bhqk", q, k) / width**0.5
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device="cpu").triu(1)
        weights = scores.masked_fill(later, -torch.inf).softmax(-1)
        outputs = F.linear(torch.einsum("bhqk,bkhw->bqhw", weights, v).flatten(2), out)
        weighted(outputs, factors).backward()
        return {"outputs": outputs.detach()} | _gradients(x, fused, out)

    def divided(self, rank: Rank) -> Results:
        x, factors, fused, out = self.data(self.dtype)
        held = grouped_query.GroupedQueryAttention(fused, out, self.heads(), rank.device)
        x = x.to(rank.device).requires_grad_()
        outputs = held(x)
        weighted(outputs, factors.to(rank.device)).backward()
        held.sum_partial_gradients()
        found = _gradients(x, held.fused, held.out)
        columns = held.out.shape[1]
        return {
            "outputs": outputs.detach(),
            "gradient of inputs": found["gradient of inputs"],
            "gradient of queries, keys and values": Portion(
                found["gradient of queries, keys and values"], 0, held.rows
            ),
            "gradient of out": Portion(
                found["gradient of out"], 1, slice(rank.index * columns, (rank.index + 1) * columns)
            ),
        }


def _gradients(x: torch.Tensor, fused: torch.Tensor, out: torch.Tensor) -> dict[str, torch.Tensor]:
    return {
        "gradient of inputs": gradient_or_zeros(x),
        "gradient of queries, keys and values": gradient_or_zeros(fused),
        "gradient of out": gradient_or_zeros(out),
    }
