"""Attention on simulated devices: the operator that CUDA dispatches to, with its results, gradients and saved
tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from mgpu_check.simulated.operators import attention as attention_kernels
from mgpu_check.simulated.operators.attention import SINCE_2_14

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("node")

BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
TOLERANCE = {torch.float32: 2e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Called(TorchDispatchMode):
    """Notes which operators of attention are called."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name.removeprefix("aten::")
        if name.startswith("_scaled_dot_product"):
            self.names.append(name.removeprefix("_scaled_dot_product_").replace("_attention", ""))
        return func(*args, **(kwargs or {}))


def operands(
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cuda:1",
    keys: int | None = None,
    heads: int | None = None,
    grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query, key, value by the layout of a projection: batch, tokens, heads, width, transposed."""
    torch.manual_seed(3)
    batch, count, rows, width = shape
    query, key, value = (
        torch.randn(batch, tokens, own, width).to(dtype).to(device).transpose(1, 2).requires_grad_(grad)
        for tokens, own in ((rows, count), (keys or rows, heads or count), (keys or rows, heads or count))
    )
    return query, key, value


def reference(tensors, mask=None, causal=False, scale=None, gqa=False):
    """Return attention in float64, and the gradients of its sum, weighted by 1, 2, 3, ..."""
    query, key, value = (t.detach().cpu().double().requires_grad_() for t in tensors)
    added = None if mask is None else mask.cpu() if mask.dtype is torch.bool else mask.cpu().double()
    with sdpa_kernel(SDPBackend.MATH):
        out = F.scaled_dot_product_attention(query, key, value, added, is_causal=causal, scale=scale, enable_gqa=gqa)
    return out.detach(), torch.autograd.grad(weighted(out), (query, key, value))


def weighted(out):
    return (out * torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape)).sum()


def close(found, exact, dtype):
    scale = float(exact.abs().max())
    assert float((found.detach().cpu().double() - exact).abs().max()) <= TOLERANCE[dtype] * max(scale, 1)


half: dict[str, Any] = {"dtype": torch.bfloat16}
CHOSEN: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "float32": ({}, {}, "efficient"),
    "half": (half, {}, "flash"),
    "half with a mask": (half, {"mask": (8, 8)}, "efficient"),
    "half, causal": (half, {"is_causal": True}, "flash"),
    "half, causal, not square": ({**half, "keys": 16}, {"is_causal": True}, "efficient"),
    "half, groups of heads": ({**half, "heads": 2}, {"enable_gqa": True}, "flash"),
    "half, heads of 12": ({**half, "shape": (2, 4, 8, 12)}, {}, "flash"),
    "float32, heads of 6": ({"shape": (2, 4, 8, 6)}, {}, "math"),
    "float64": ({"dtype": torch.float64}, {}, "math"),
    "heads of 264": ({**half, "shape": (1, 1, 4, 264)}, {}, "efficient"),
    "dropout": (half, {"dropout_p": 0.5}, "flash"),
}


@pytest.mark.parametrize("what", CHOSEN)
def test_the_operator_is_that_of_cuda(what):
    made, options, expected = CHOSEN[what]
    shape, rest = made.get("shape", (2, 4, 8, 16)), {name: value for name, value in made.items() if name != "shape"}
    tensors = operands(*shape, grad=True, **rest)
    if "mask" in options:
        options = {"attn_mask": torch.zeros(options["mask"], dtype=tensors[0].dtype, device="cuda:1")}
    with Called() as called:
        out = F.scaled_dot_product_attention(*tensors, **options)
        out.sum().backward()
    # Math is taken apart before a mode sees it.
    assert called.names == ([] if expected == "math" else [expected, f"{expected}_backward"])
    chosen = torch._fused_sdp_choice(*tensors, **options)
    assert chosen == BACKENDS.get(expected, SDPBackend.MATH).value


@pytest.mark.parametrize("masked", [False, True])
def test_operands_of_three_dimensions_get_a_batch_from_torch_2_14_on(masked):
    query, key, value = (t[0].detach().requires_grad_() for t in operands(1, 4, 8, 16))
    tensors = query, key, value
    mask = torch.randn(8, 8, device="cuda:1") if masked else None
    with Called() as called:
        out = F.scaled_dot_product_attention(*tensors, mask)
        grads = torch.autograd.grad(weighted(out), tensors)
    assert called.names == (["efficient", "efficient_backward"] if SINCE_2_14 else [])
    exact, exact_grads = reference(tensors, mask)
    close(out, exact, torch.float32)
    for found, wanted in zip(grads, exact_grads, strict=True):
        close(found, wanted, torch.float32)


@pytest.mark.skipif(not SINCE_2_14, reason="from torch 2.14 on")
def test_one_head_of_keys_serves_all_queries():
    tensors = operands(2, 4, 8, 16, heads=1)
    with Called() as called:
        out = F.scaled_dot_product_attention(*tensors)
    assert called.names == ["efficient"]
    close(out, reference(tensors)[0], torch.float32)


def taken(name, case, dtype):
    """Return whether CUDA's kernel takes a case of the next test."""
    if name == "efficient":
        return case != "groups" or SINCE_2_14
    return dtype is not torch.float32 and (name == "cudnn" or "mask" not in case)


@pytest.mark.parametrize(
    ("name", "case", "dtype"),
    [
        (name, case, dtype)
        for name in BACKENDS
        for case in ("plain", "causal", "scale", "boolean mask", "added mask", "fewer keys", "groups", "one head")
        for dtype in TOLERANCE
        if taken(name, case, dtype)
    ],
    ids=str,
)
def test_results_are_those_of_math_in_float64(name, case, dtype):
    shape: dict[str, Any] = {"heads": 2} if case == "groups" else {"keys": 5} if case == "fewer keys" else {}
    tensors = operands(2, 1 if case == "one head" else 4, 19, 16, dtype=dtype, grad=True, **shape)
    options = {"is_causal": case == "causal", "scale": 0.7 if case == "scale" else None, "enable_gqa": case == "groups"}
    mask = None
    if case == "boolean mask":
        mask = (torch.rand(19, 19, device="cuda:1") > 0.3).fill_diagonal_(True)
    elif case == "added mask":
        mask = torch.randn(2, 1, 19, 19, device="cuda:1").to(dtype)
    with sdpa_kernel(BACKENDS[name]), Called() as called:
        out = F.scaled_dot_product_attention(*tensors, mask, **options)
        grads = torch.autograd.grad(weighted(out), tensors)
    assert called.names == [name, f"{name}_backward"]
    exact, exact_grads = reference(tensors, mask, options["is_causal"], options["scale"], options["enable_gqa"])
    close(out, exact, dtype)
    for found, wanted in zip(grads, exact_grads, strict=True):
        close(found, wanted, dtype)


def metadata(results):
    return [(t.shape, t.stride(), t.dtype) if isinstance(t, torch.Tensor) else t for t in results]


@pytest.mark.parametrize("rows", [32, 19])
@pytest.mark.parametrize("name", BACKENDS)
def test_results_have_the_shapes_strides_and_dtypes_that_torch_tells_of_cuda(name, rows):
    tensors = operands(2, 4, rows, 16, dtype=torch.bfloat16)
    on_meta = [torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device="meta") for t in tensors]
    operator = getattr(aten, f"_scaled_dot_product_{name}_attention")
    backward = getattr(aten, f"_scaled_dot_product_{name}_attention_backward")
    extra = () if name == "flash" else (None, True)
    found, wanted = operator(*tensors, *extra), operator(*on_meta, *extra)
    assert metadata(found) == metadata(wanted)

    def grads(given, results):
        out, logsumexp, *rest = results
        if name == "efficient":
            return backward(out, *given, None, out, logsumexp, *rest, 0.0, [True, True, True, False])
        if name == "flash":
            return backward(out, *given, out, logsumexp, *rest[:4], 0.0, False, *rest[4:6])
        return backward(out, *given, out, logsumexp, *rest[4:6], None, *rest[:4], 0.0, False)

    assert metadata(grads(tensors, found)) == metadata(grads(on_meta, wanted))


@pytest.mark.parametrize("name", BACKENDS)
def test_the_logsumexp_is_that_of_the_scores_and_rules_the_backward_function(name):
    """Ring attention gives the backward function of a part the logsumexp of all keys."""
    query, key, value = operands(1, 2, 8, 16, dtype=torch.float16, keys=32)
    exact = [t.detach().cpu().double().requires_grad_() for t in (query, key, value)]
    scores = exact[0] @ exact[1].mT / 4
    out = scores.softmax(-1) @ exact[2]
    gradient = torch.randn(out.shape, dtype=torch.float64)
    wanted = torch.autograd.grad(out, exact, gradient)
    operator = getattr(aten, f"_scaled_dot_product_{name}_attention")
    backward = getattr(aten, f"_scaled_dot_product_{name}_attention_backward")
    extra = () if name == "flash" else (None, True)
    results = operator(query, key, value, *extra)
    rows = results[1].squeeze(-1)[..., :8].cpu().double()
    assert torch.allclose(rows, scores.logsumexp(-1), atol=1e-3)
    assert bool(results[1].squeeze(-1)[..., 8:].isinf().all())
    total, given = results[0], gradient.half().to("cuda:1")
    sums = torch.zeros_like(exact[0])
    for part in range(2):
        keys, values = (t[:, :, 16 * part : 16 * part + 16].contiguous() for t in (key, value))
        state = operator(query, keys, values, *extra)[-3:-1] if name != "efficient" else results[2:]
        if name == "efficient":
            found = backward(given, query, keys, values, None, total, results[1], *state, 0.0, [True] * 3 + [False])
        elif name == "flash":
            found = backward(given, query, keys, values, total, results[1], None, None, 8, 16, 0.0, False, *state)
        else:
            found = backward(given, query, keys, values, total, results[1], *state, None, None, None, 8, 16, 0.0, False)
        sums += found[0].cpu().double()
        for one, whole in zip(found[1:3], wanted[1:], strict=True):
            close(one, whole[:, :, 16 * part : 16 * part + 16], torch.float16)
    close(sums, wanted[0], torch.float16)


@pytest.mark.parametrize("name", BACKENDS)
def test_dropout_is_drawn_by_the_device_and_is_the_same_in_backward(name):
    tensors = operands(2, 2, 64, 64, dtype=torch.bfloat16, grad=True)
    query, key, _ = tensors
    # Values that are the identity show the weights; the gradient of the values shows them a second time.
    value = torch.eye(64, dtype=torch.bfloat16, device="cuda:1").expand(2, 2, 64, 64).contiguous().requires_grad_()

    def attend():
        with sdpa_kernel(BACKENDS[name]):
            return F.scaled_dot_product_attention(query, key, value, dropout_p=0.25)

    torch.cuda.set_device(1)
    torch.cuda.manual_seed(5)
    host = torch.get_rng_state()
    first, second = attend(), attend()
    torch.cuda.manual_seed(5)
    assert torch.equal(attend(), first) and not torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), host)
    dropped = float((first == 0).float().mean())
    assert 0.2 < dropped < 0.3
    identity = torch.eye(64, dtype=torch.bfloat16, device="cuda:1").expand(2, 2, 64, 64)
    (of_value,) = torch.autograd.grad(first, value, identity)
    assert torch.equal(of_value.mT, first)  # the transposed weights, times one
    exact = (query.float() @ key.float().mT / 8).softmax(-1)
    kept = first != 0
    assert torch.allclose(first.float()[kept], (exact / 0.75)[kept], rtol=0.02)


def test_blocks_of_rows_give_what_all_rows_at_once_do(monkeypatch):
    tensors = operands(2, 2, 40, 16, grad=True)
    mask = torch.randn(40, 40, device="cuda:1").requires_grad_()

    def both():
        out = F.scaled_dot_product_attention(*tensors, mask, is_causal=True)
        return [out, *torch.autograd.grad(weighted(out), [*tensors, mask])]

    whole = both()
    monkeypatch.setattr(attention_kernels, "_AT_ONCE", 7 * 2 * 2 * 40)
    for found, wanted in zip(both(), whole, strict=True):
        torch.testing.assert_close(found, wanted)


def test_a_mask_has_its_gradient_and_rows_without_keys_are_zero():
    tensors = operands(2, 2, 8, 16, grad=True)
    mask = torch.randn(8, 8, device="cuda:1")
    mask[3] = -torch.inf
    mask.requires_grad_()
    with Called() as called:
        out = F.scaled_dot_product_attention(*tensors, mask)
        grads = torch.autograd.grad(weighted(out), [*tensors, mask])
    assert called.names == ["efficient", "efficient_backward"]
    assert not out[:, :, 3].any() and all(bool(g.isfinite().all()) for g in grads)
    exact = [t.detach().cpu().double().requires_grad_() for t in (*tensors, mask)]
    wanted = F.scaled_dot_product_attention(exact[0], exact[1], exact[2], exact[3])
    for found, one in zip(grads, torch.autograd.grad(weighted(wanted), exact), strict=True):
        close(found, one.nan_to_num(), torch.float32)


def test_autocast_casts_before_the_kernel_is_chosen():
    tensors = operands(2, 4, 8, 16, grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16), Called() as called:
        out = F.scaled_dot_product_attention(*tensors)
    out.float().sum().backward()
    assert called.names == ["flash"] and out.dtype is torch.bfloat16
    assert tensors[0].grad.dtype is torch.float32


def test_the_order_of_preference_that_the_code_sets_holds():
    tensors = operands(2, 4, 8, 16, dtype=torch.bfloat16)
    chosen = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]
    for order in (chosen, chosen[::-1]):
        with sdpa_kernel(order, set_priority=True), Called() as called:
            F.scaled_dot_product_attention(*tensors)
        assert called.names == ["cudnn" if order[0] is chosen[0] else "flash"]
