"""Planted faults of mechanisms of model parallelism: experts, sequences, vocabularies and heads."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from mgpu_check.suite.common.faults.breaking import around, given, returned
from mgpu_check.suite.common.faults.conditions import Count, is_last, ranks_here
from mgpu_check.suite.common.faults.registry import FaultRow, fault, register
from mgpu_check.suite.common.faults.when import When
from mgpu_check.suite.recipes import (
    asynchronous_tensor,
    context_parallel,
    experts,
    grouped_query,
    sequence_parallel,
    vocabulary_parallel,
)

_CHECK = "test_mechanisms"

# By name, because these modules take seconds to import.
_RING = "torch.distributed.tensor.experimental._context_parallel._attention"
_CONTEXT = "torch.distributed.tensor.experimental._attention"

_SEVERAL_EXPERTS = When("several experts on a rank", lambda order, counts: counts.shape[1] > 1)
_OF_EACH = When("balance of each rank's tokens", lambda real, *_, of_all, **__: not of_all)
_ZIGZAG = When("zigzag order", lambda real, whole, positions, dim: len(positions[0]) > 1)
_INTERLEAVED = When("the layout of Megatron", lambda real, heads: heads.interleaved)


def _unsynchronized(real: Any, model: Any) -> None:
    return None


def _counting_dropped(real: Any, logits: torch.Tensor, top: int, capacity: int = 0) -> Any:
    """Divide the weights of a token by the sum over all its choices, dropped ones included."""
    kept = real(logits, top, capacity)
    share = logits.softmax(-1)
    return kept._replace(weight=share[kept.token, kept.expert] / share.topk(top).values.sum(-1)[kept.token])


def _sharded_otherwise(real: Any, model: Any, mesh: Any, *, experts: str, others: str) -> None:
    from torch.distributed import fsdp

    one_or_all = {"all": mesh, **{name: mesh[name] for name in mesh.mesh_dim_names}}
    fsdp.fully_shard(model.experts, mesh=one_or_all[experts])
    fsdp.fully_shard(model, mesh=one_or_all[others])
    for part in (model.experts, model):
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)


def _in_order_of_ranks(real: Any, *args: Any) -> Any:
    from torch.distributed.tensor.experimental import _attention as attention

    options = attention._cp_options
    before, options.enable_load_balance = options.enable_load_balance, False
    try:
        return real(*args)
    finally:
        options.enable_load_balance = before


def _in_order_of_ranks_in_one(real: Any, mesh: Any, buffers: Any, dims: Any) -> list[Any]:
    """Leave buffers in the order of the ranks unless their sequence is the third dimension."""
    found: list[Any] = []
    for buffer, dim in zip(buffers, dims, strict=True):
        one = mesh, [buffer], [dim]
        found += real(*one) if dim == 2 else _in_order_of_ranks(real, *one)
    return found


def _averaged(real: Any, parameters: list[torch.nn.Parameter], group: Any) -> None:
    real(parameters, group)
    for parameter in parameters:
        assert parameter.grad is not None
        parameter.grad /= dist.get_world_size(group)


def _in_chunks(held: tuple[list[int], Any], rank: int) -> tuple[list[int], Any]:
    count = len(held[0])
    return list(range(rank * count, (rank + 1) * count)), held[1]


def _own_product(whole: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    return whole.chunk(ranks_here())[dist.get_rank()] @ factor


register(
    __name__,
    FaultRow("router-sees-own-tokens", "the gradient of the router is not summed over the ranks", _CHECK,
        around(experts.ExpertParallel, "sum_partial_gradients"), _unsynchronized),
    FaultRow("router-gradient-missing", "the router gets no gradient from the outputs", _CHECK,
        returned(experts, "route"), lambda found, *_: found._replace(weight=found.weight.detach())),
    FaultRow("balance-of-own-tokens", "the loss for balance is the mean of the losses of the ranks", _CHECK,
        around(experts, "balance_loss"), lambda real, *args, **kwargs: real(*args, **kwargs | {"of_all": False}),
        When("balance over the tokens of all ranks", lambda real, *_, of_all, **__: of_all)),
    FaultRow("balance-not-averaged", "the loss for balance is the sum of the losses of the ranks", _CHECK,
        around(experts, "balance_loss"), lambda real, *args, **kwargs: real(*args, **kwargs) * ranks_here(), _OF_EACH),
    FaultRow("rows-of-ranks-swapped", "rows from other ranks are taken in the reverse order of the ranks", _CHECK,
        returned(experts, "exchange"),
        lambda rows, sent, send, receive, *_: torch.cat(list(rows.split(receive))[::-1])),
    FaultRow("rows-not-sorted-by-expert", "rows from several ranks are not sorted by expert", _CHECK,
        returned(experts, "by_expert"), lambda order, counts: order.sort().values, _SEVERAL_EXPERTS),
    FaultRow("dropped-choices-counted", "weights are divided by a sum that includes dropped choices", _CHECK,
        around(experts, "route"), _counting_dropped,
        When("two experts a token, a capacity", lambda real, logits, top, capacity=0: top > 1 and capacity)),
    FaultRow("one-choice-too-many", "an expert takes one choice more than its capacity", _CHECK,
        given(experts, "route"), lambda logits, top, capacity=0: (logits, top, capacity + bool(capacity)),
        When("a capacity", lambda logits, top, capacity=0: capacity)),
    FaultRow("last-expert-of-a-token-only", "the output of a token is that of its last expert", _CHECK,
        around(experts, "combined"),
        lambda real, rows, routing, tokens: rows.new_zeros(tokens, rows.shape[1]).index_copy(
            0, routing.token, rows * routing.weight.unsqueeze(1)),
        "two experts a token"),
    FaultRow("experts-sharded-over-others", "an expert is sharded over the ranks that hold other experts", _CHECK,
        around(experts, "shard"),
        lambda real, model, mesh: _sharded_otherwise(real, model, mesh, experts="experts", others="all"),
        "experts under fully_shard"),
    FaultRow("experts-averaged-over-all", "gradients of experts are divided by the number of all ranks", _CHECK,
        returned(experts, "shard"), lambda _, model, mesh: model.experts.set_gradient_divide_factor(float(mesh.size())),
        "experts under fully_shard"),
    FaultRow("router-reduced-in-one-dimension", "gradients of the router are not reduced over the replicas", _CHECK,
        around(experts, "shard"),
        lambda real, model, mesh: _sharded_otherwise(real, model, mesh, experts="replicas", others="experts"),
        When("two replicas and more", lambda real, model, mesh: mesh.size(0) > 1)),
    FaultRow("mask-by-local-position", "the causal mask compares positions within a rank's part", _CHECK,
        around(context_parallel, "visible"),
        lambda real, queries, keys: real(torch.arange(len(queries)), torch.arange(len(keys)))),
    FaultRow("zigzag-not-undone", "gathered outputs stay in the order of the ranks", _CHECK,
        around(context_parallel, "in_order"), lambda real, whole, *_: whole, _ZIGZAG),
    FaultRow("blocks-not-rescaled", "the outputs of blocks of a ring are added without their weights", _CHECK,
        around(context_parallel, "merged"),
        lambda real, out, total, other, of_other: (out + other, torch.logaddexp(total, of_other)), "ring attention"),
    FaultRow("gradient-of-gathered-keys-local", "the gradient of gathered parts is not summed over the ranks", _CHECK,
        around(sequence_parallel, "_scattered"),
        lambda real, whole, dim: whole.chunk(ranks_here(), dim)[dist.get_rank()]),
    FaultRow("later-blocks-seen", "attention over parts of a sequence sees later parts", _CHECK,
        around(_RING, "_is_causal_behavior"),
        lambda real, *, i, is_causal, **place: real(**place, i=i, is_causal=is_causal and i == 0),
        "context_parallel, causal, not balanced"),
    FaultRow("balanced-order-kept", "results of context_parallel are gathered in the order of the ranks", _CHECK,
        around(_CONTEXT, "context_parallel_unshard"), _in_order_of_ranks, "context_parallel, balanced"),
    FaultRow("balanced-order-kept-in-one", "results are put in order only if their sequence is the third dimension",
        _CHECK, around(_CONTEXT, "context_parallel_unshard"),
        _in_order_of_ranks_in_one, "context_parallel, balanced"),
    FaultRow("second-halves-replaced", "gradients of half of a part replace those of other blocks", _CHECK,
        around(_RING, "_partial_update"), lambda real, *args, add, **kwargs: real(*args, add=False, **kwargs),
        "context_parallel, balanced"),
    FaultRow("partial-gradients-of-norms", "gradients of norms and biases of a part of a sequence are not summed",
        _CHECK, around(sequence_parallel.SequenceParallelMlp, "sum_partial_gradients"), _unsynchronized),
    FaultRow("gradients-averaged-over-the-sequence", "partial gradients are averaged in place of summed", _CHECK,
        around(sequence_parallel, "sum_gradients"),
        lambda real, parameters, group=None: _averaged(real, list(parameters), group)),
    FaultRow("ignored-on-one-rank", "only the rank that has the ignored class ignores its rows", _CHECK,
        around(vocabulary_parallel, "cross_entropy"),
        lambda real, logits, labels, own, *, ignore_index:
            real(logits, labels, own, ignore_index=ignore_index if own.start <= ignore_index < own.stop else -100),
        When("an ignored label that is a class", lambda real, *_, ignore_index: ignore_index >= 0)),
    FaultRow("ignored-rows-divide", "the mean of a loss counts ignored rows", _CHECK,
        around(vocabulary_parallel, "cross_entropy"),
        lambda real, logits, labels, own, *, ignore_index: (
            real(logits, labels, own, ignore_index=ignore_index) * (labels != ignore_index).double().mean())),
    FaultRow("maximum-of-own-classes", "logits are shifted by the maximum of the rank's own classes", _CHECK,
        around(vocabulary_parallel, "largest"), lambda real, logits: logits.amax(-1, keepdim=True)),
    FaultRow("maximum-left-out", "logits are not shifted by their maximum", _CHECK,
        around(vocabulary_parallel, "largest"), lambda real, logits: torch.zeros_like(logits[:, :1]), "large logits"),
    FaultRow("rows-of-others-embedded", "tokens of other ranks add a rank's first row", _CHECK,
        returned(vocabulary_parallel, "class_of"), lambda found, *_: (found[0], torch.ones_like(found[1]))),
    FaultRow("gathered-before-complete", "a product overlaps with a gather that lacks the last rank's rows", _CHECK,
        given(asynchronous_tensor, "_gathered_product"), lambda part, factor: (part * (not is_last()), factor)),
    FaultRow("own-product-scattered", "a rank's own product is missing from a sum that overlaps with it", _CHECK,
        around(asynchronous_tensor, "_scattered_product"),
        lambda real, whole, factor: real(whole, factor) - _own_product(whole, factor)),
    FaultRow("fused-weight-in-thirds", "a fused weight is split in thirds, not by head", _CHECK,
        around(grouped_query, "_places"), lambda real, heads: real(heads._replace(interleaved=False)), _INTERLEAVED),
    FaultRow("fused-weight-in-chunks", "a rank holds its chunk of the rows of a fused weight", _CHECK,
        around(grouped_query, "rows_of"), lambda real, heads, rank, ranks: _in_chunks(real(heads, rank, ranks), rank),
        When("queries, keys and values one after another", lambda real, heads, rank, ranks: not heads.interleaved)),
    FaultRow("shared-heads-apart", "ranks that hold the same keys do not sum their gradients", _CHECK,
        around(grouped_query.GroupedQueryAttention, "sum_partial_gradients"), _unsynchronized,
        "fewer heads of keys than ranks"),
)  # fmt: skip


@fault("gradients of keys make one step too few around the ring", _CHECK, when="ring attention")  # fmt: skip
def gradient_of_keys_one_rank_off() -> Iterator[None]:
    count = Count()

    def passed_on(real: Any, tensors: Any) -> Any:
        last = len(tensors) == 4 and count.every(ranks_here())
        return list(tensors) if last else real(tensors)

    with around(context_parallel, "_passed_on")(passed_on):
        yield
