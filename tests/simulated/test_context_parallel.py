"""Attention of DTensors, and ring attention of ``context_parallel``: on ranks what one device gives."""

from __future__ import annotations

import contextlib
import importlib
import itertools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

pytestmark = pytest.mark.filterwarnings("ignore")  # the functions are experimental, and say so

KERNELS = {
    SDPBackend.FLASH_ATTENTION: (torch.bfloat16, 1e-2),
    SDPBackend.CUDNN_ATTENTION: (torch.bfloat16, 1e-2),
    SDPBackend.EFFICIENT_ATTENTION: (torch.float32, 5e-6),
}
TOKENS = 64
"""Of each rank: the logsumexp of the memory-efficient kernel comes in rows of 32, and half of them is one part."""


def ring():
    """Return the module of ring attention, by the name that this version of torch has for it."""
    for name in ("_context_parallel._attention", "_attention"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"torch.distributed.tensor.experimental.{name}")
    raise AssertionError("torch has no ring attention")


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Ranks share what is imported before they are forked."""
    ring()
    importlib.import_module("torch.distributed.tensor.debug")


def mesh_of(size):
    return importlib.import_module("torch.distributed.device_mesh").init_device_mesh("cuda", (size,))


def operands(dtype, tokens, grad=False):
    """Return query, key, value and a gradient, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    made = [torch.randn(2, 4, tokens, 16, generator=generator).to(dtype) for _ in range(4)]
    return [t.cuda().requires_grad_(grad) for t in made]


def exact(tensors, causal):
    """Return attention in float64 on the host, and its gradients."""
    *given, gradient = (t.detach().cpu().double() for t in tensors)
    given = [t.requires_grad_() for t in given]
    out = F.scaled_dot_product_attention(given[0], given[1], given[2], is_causal=causal)
    return [out.detach(), *torch.autograd.grad(out, given, gradient)]


def error(found, wanted):
    pairs = zip(found, wanted, strict=True)
    return max(float((f.cpu().double() - w).abs().max() / w.abs().max()) for f, w in pairs)


def in_a_ring(rank, size):
    parallel, mesh, errors = ring(), mesh_of(size), {}
    ways = itertools.product(("allgather", "alltoall"), ("balanced", "causal", "full"))
    few = zip(ways, [*KERNELS, *reversed(KERNELS)], strict=True)
    for (method, kind), backend in itertools.product(ways, KERNELS) if size == 2 else few:
        dtype, tolerance = KERNELS[backend]
        parallel.set_rotate_method(method)
        parallel._cp_options.enable_load_balance = kind == "balanced"
        causal = kind != "full"
        buffers = operands(dtype, TOKENS * size)
        wanted = exact(buffers, causal)
        with sdpa_kernel(backend), parallel.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
            assert buffers[0].size(2) == TOKENS
            given = [t.detach().requires_grad_() for t in buffers[:3]]
            out = F.scaled_dot_product_attention(given[0], given[1], given[2], is_causal=causal)
            out.backward(buffers[3])
            parts = [out.detach(), *(t.grad for t in given)]
            found = parallel.context_parallel_unshard(mesh, parts, [2] * 4)
        assert buffers[0].size(2) == TOKENS * size
        errors[method, kind, backend.name] = error(found, wanted) / tolerance
    return {case: error for case, error in errors.items() if error > 1}, len(errors)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_ring_attention_gives_what_one_device_gives(on_ranks, size):
    assert on_ranks(in_a_ring, size=size) == [({}, 18 if size == 2 else 6)] * size


def without_a_handler(rank, size):
    """Attention in float64 is computed by math, and torch has no ring for math."""
    parallel, mesh = ring(), mesh_of(size)
    buffers = operands(torch.float64, TOKENS * size)
    with parallel.context_parallel(mesh, buffers=buffers, buffer_seq_dims=[2] * 4):
        try:
            F.scaled_dot_product_attention(buffers[0], buffers[1], buffers[2], is_causal=True)
        except Exception as error:
            return type(error).__name__
    return None


def sharded(rank, size):
    tensors = importlib.import_module("torch.distributed.tensor")
    mesh, worst = mesh_of(size), 0.0
    for (dim, causal), backend in itertools.product(((0, False), (1, True)), KERNELS):
        dtype, tolerance = KERNELS[backend]
        given = operands(dtype, 24)
        wanted = exact(given, causal)
        placed = [tensors.distribute_tensor(t, mesh, [tensors.Shard(dim)]).requires_grad_() for t in given]
        with sdpa_kernel(backend):
            out: Any = F.scaled_dot_product_attention(placed[0], placed[1], placed[2], is_causal=causal)
        assert out.placements == (tensors.Shard(dim),) and out.device == torch.device("cuda", rank)
        grads = torch.autograd.grad(out, placed[:3], placed[3].detach())
        found = [out.detach().full_tensor(), *(g.full_tensor() for g in grads)]  # type: ignore[attr-defined]
        worst = max(worst, error(found, wanted) / tolerance)
    return worst < 1


def chosen_of_dtensors(rank, size):
    tensors = importlib.import_module("torch.distributed.tensor")
    debug = importlib.import_module("torch.distributed.tensor.debug").CommDebugMode()
    mesh, given = mesh_of(size), operands(torch.float32, 24)
    placed = [tensors.distribute_tensor(t, mesh, [tensors.Shard(1)]) for t in given]
    with debug:
        plain = F.scaled_dot_product_attention(*placed[:3])
        with torch.autocast("cuda", torch.bfloat16):
            narrow = F.scaled_dot_product_attention(*placed[:3])
    return str(plain.dtype), str(narrow.dtype), debug.get_total_counts()


def on_two(rank, size):
    return without_a_handler(rank, size), sharded(rank, size), chosen_of_dtensors(rank, size)


def test_heads_and_batches_of_dtensors_need_no_collective_and_float64_has_no_ring(on_ranks):
    for refused, right, chosen in on_ranks(on_two):
        assert refused is not None and right and chosen == ("torch.float32", "torch.bfloat16", 0)
