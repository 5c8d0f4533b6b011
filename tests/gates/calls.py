"""Strategies of what ranks have called, as a gate records it."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import strategies as st

from mgpu_check.diagnosis.observations import CallEvent, RankTrace, Result
from mgpu_check.gates.run.call_events import contents, layout
from mgpu_check.torch_hooks.collective_table import COLLECTIVES
from mgpu_check.torch_hooks.tensors import as_real, name_of

__all__ = ["NAMES", "RESULTS", "few", "traces", "values"]

NAMES = ("weight", "bias", "head.bias")
RESULTS = (
    *(Result(kind, name) for name in NAMES for kind in ("grads", "params")),
    Result("buffers", "bn.running_mean"),
    Result("buffers", "bn.num_batches_tracked"),
    Result("optimizer", "learning rate of group 0"),
    Result("optimizer", "exp_avg of weight"),
    Result("returned", ""),
    Result("returned", "loss"),
    Result("returned", "weight"),
    Result("returned", "logits", 1),
    Result("returned", "logits", 2),
)
SHAPES = ((), (0,), (1,), (2,), (4,), (4,), (2, 3), (3, 0), (4, 3), (4, 3), (2, 2, 2))
DTYPES = (
    *[torch.float32] * 6,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.bool,
)
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, 1e30)
few = st.integers(0, 3)
sites = st.sampled_from(("train.py:3", "train.py:8", "model.py:12", ""))


@st.composite
def values(draw: st.DrawFn, shape: tuple[int, ...] | None = None, dtype: torch.dtype | None = None) -> torch.Tensor:
    """One tensor as a gate keeps it: complex numbers as pairs of real ones."""
    shape = draw(st.sampled_from(SHAPES)) if shape is None else shape
    dtype = draw(st.sampled_from(DTYPES)) if dtype is None else dtype
    generator = torch.Generator().manual_seed(draw(st.integers(0, 5)))
    value = (3 * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
    if dtype.is_floating_point and value.numel() and draw(st.integers(0, 5)) == 5:
        value.view(-1)[0] = draw(st.sampled_from(SPECIAL))
    if draw(st.integers(0, 7)) == 7:
        value = torch.zeros_like(value)
    return as_real(value)


@st.composite
def operands(draw: st.DrawFn, tensor: torch.Tensor) -> dict[str, Any]:
    said = {
        "dtype": name_of(tensor.dtype),
        "shape": tuple(tensor.shape),
        "gaps": draw(st.integers(0, 9)) == 9,
        "layout": layout(tensor),
        "differentiable": draw(st.booleans()),
        "detached": draw(st.booleans()),
        "result": draw(st.none() | st.sampled_from(RESULTS)),
        "upstream": draw(_some_names),
    }
    return said | ({"value": float(tensor.double().sum())} if tensor.numel() == 1 else {})


@st.composite
def collectives(draw: st.DrawFn, size: int) -> CallEvent:
    details: dict[str, Any] = {"in_function": draw(st.booleans())}
    if draw(st.booleans()):
        details["group"] = draw(st.sampled_from([tuple(range(size)), (0,), tuple(range(size // 2))]))
    if draw(st.booleans()):
        details["op"] = draw(st.sampled_from(["sum", "avg", "max", "min", "product", "premul_sum", "none"]))
    if draw(st.booleans()):
        details[draw(st.sampled_from(["src", "dst"]))] = draw(st.integers(0, size - 1))
    given = draw(st.lists(values(), max_size=2))
    if given:
        details["tensors"] = [draw(operands(one)) | {"before": contents(one)} for one in given]
    listed = draw(st.lists(values(), max_size=2))
    if listed:
        details |= {"list": [draw(operands(one)) for one in listed], "aliased": draw(st.integers(0, 9)) == 9}
    how = draw(st.sampled_from(["done", "raised", "pending", "waited"]))
    if how in ("done", "waited"):
        details["after"] = [contents(draw(values(tuple(one.shape)))) for one in given]
    if how in ("pending", "waited"):
        details |= {"asynchronous": True, "waited": how == "waited", "touched": draw(st.booleans())}
    return CallEvent("collective", draw(st.sampled_from(sorted(COLLECTIVES))).lstrip("_"), draw(sites), details)


_sums = st.dictionaries(st.sampled_from(NAMES), st.sampled_from((0.0, 1.5, math.nan)), max_size=3)
_some_names = st.lists(st.sampled_from(NAMES), unique=True).map(tuple)


@st.composite
def backwards(draw: st.DrawFn) -> CallEvent:
    said: dict[str, Any] = {"loss": draw(st.sampled_from((0.5, math.nan)))} if draw(st.booleans()) else {}
    said |= {"parameters": draw(_sums), "layouts": dict.fromkeys(draw(_some_names), (0,))}
    said |= {"trained": draw(_some_names)}
    if draw(st.booleans()):
        said["left"] = {name: contents(draw(values())) for name in draw(_some_names)}
    return CallEvent("backward", "backward", draw(sites), said)


@st.composite
def models(draw: st.DrawFn) -> CallEvent:
    samples = st.none() | st.lists(st.tuples(st.integers(0, 1), st.integers(0, 4)), max_size=4)
    said = {
        "parameters": draw(_sums),
        "samples": draw(samples),
        "owns": draw(_some_names),
        "training": {"": draw(st.booleans())},
    }
    return CallEvent("model", "Linear", draw(sites), said)


def plain(kind: str, name: str, **details: st.SearchStrategy[Any]) -> st.SearchStrategy[CallEvent]:
    return st.builds(lambda site, said: CallEvent(kind, name, site, said), sites, st.fixed_dictionaries(details))


rates = st.lists(st.sampled_from((0.1, 0.2)), max_size=2).map(tuple)


def events(size: int) -> st.SearchStrategy[CallEvent]:
    return st.one_of(
        collectives(size),
        backwards(),
        models(),
        plain("step", "SGD", rates=rates),
        plain("clip", "clip_grad_norm_"),
        plain("clip", "clip_grad_norm_", norm=st.sampled_from((0.0, 1.0, 2.0, math.nan, math.inf))),
        plain("scale", "GradScaler.scale", scale=st.sampled_from((1024.0, 512.0))),
        plain("seed", "manual_seed", seed=few),
        plain("generator", "Generator.manual_seed", seed=few),
        plain(
            "sampler",
            "DistributedSampler",
            samples=st.integers(0, 9),
            shuffle=st.booleans(),
            drop_last=st.booleans(),
            seed=few,
            replicas=st.just(size),
        ),
        plain("iterate", "DistributedSampler", epoch=few, shuffle=st.booleans(), seed=few),
        plain("epoch", "set_epoch", epoch=few),
        plain("split", "random_split", own_generator=st.booleans()),
        plain(
            "loader",
            "DataLoader",
            streams=st.booleans(),
            sampler=st.just("RandomSampler"),
            samples=st.none() | few,
            dropped=few,
        ),
        plain("schedule", "LRScheduler.step"),
        plain("schedule", "ReduceLROnPlateau.step", metric=st.sampled_from((0.5, math.nan))),
        plain(
            "wrap", "DistributedDataParallel", parameters=_some_names, find_unused=st.booleans(), static=st.booleans()
        ),
        plain("forward", "DataParallel", lists=st.booleans()),
        plain("no_sync", "no_sync"),
        plain("load", "load_state_dict"),
        plain("group", "new_group"),
    )


@st.composite
def sums(draw: st.DrawFn, size: int) -> list[RankTrace]:
    """Sums that are reduced, now and then with what was reduced before still in them."""
    shapes = draw(st.lists(st.sampled_from(((), (1,), (2,), (0,))), max_size=6))
    found = [RankTrace() for _ in range(size)]
    for shape in shapes:
        after = draw(values(shape, torch.float32))
        for trace in found:
            given = draw(values(shape if draw(st.integers(0, 5)) else (2,), torch.float32))
            said = {"op": "sum", "tensors": [draw(operands(given)) | {"before": contents(given)}]}
            trace.events.append(
                CallEvent("collective", "all_reduce", "train.py:8", said | {"after": [contents(after)]})
            )
    return found


@st.composite
def traces(draw: st.DrawFn, size: int) -> list[RankTrace]:
    """The calls of ranks: unknown, or mostly the same on all."""
    if draw(st.integers(0, 5)) == 5:
        return []
    if draw(st.integers(0, 3)) == 3:
        return draw(sums(size))
    common = draw(st.lists(events(size), max_size=7))
    found = []
    for _ in range(size):
        own = [draw(events(size)) if draw(st.integers(0, 5)) == 5 else event for event in common]
        own = own[: len(own) - draw(st.sampled_from((0, 0, 0, 1)))]
        numbers = draw(st.sampled_from([((), ()), (((3,),), (1.0,)), (((3,),), (None,)), (((),), (math.nan,))]))
        found.append(RankTrace(own, *numbers))
    return found
