"""Devices that are wrong for equal elements or for options with a value other than the default."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional as F

from mgpu_check.suite.common.faults.operators import altered, last, on
from mgpu_check.suite.common.faults.registry import fault


@fault(
    "argmax takes the last of equal elements on one device", "test_reductions", condition="one device, equal elements"
)
def last_of_equals() -> Iterator[None]:
    """A maximum that occurs once is found."""

    def instead(argmax: Any, x: torch.Tensor, dim: int) -> Any:
        return x.shape[dim] - 1 - argmax(x.flip(dim), dim=dim)

    with altered(torch, "argmax", lambda x, *_, **__: on(x, last()), instead):
        yield


@fault("a stable sort reverses equal elements", "test_reductions", condition="stable sorts, equal elements")
def stable_sorts_turned_round() -> Iterator[None]:
    """Values are in order."""

    def instead(sort: Any, x: torch.Tensor, dim: int, **kwargs: Any) -> Any:
        values, places = sort(x.flip(dim), dim=dim, **kwargs)
        return torch.return_types.sort((values, x.shape[dim] - 1 - places))

    with altered(torch, "sort", lambda x, **kwargs: x.is_cuda and bool(kwargs.get("stable")), instead):
        yield


@fault(
    "var ignores correction and divides by n - 1", "test_layers_and_gradients", condition="a correction other than 1"
)
def corrections_ignored() -> Iterator[None]:
    """Always use the default."""

    def instead(var: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return var(x, *args, **{**kwargs, "correction": 1})

    with altered(torch, "var", lambda x, *_, **kwargs: x.is_cuda and "correction" in kwargs, instead):
        yield


@fault(
    "the embedding of padding_idx has a gradient on one device",
    "test_layers_and_gradients",
    condition="one device, padding_idx",
)
def padding_trained() -> Iterator[None]:
    """Forward is right."""

    def instead(embedding: Any, *args: Any, **kwargs: Any) -> Any:
        return embedding(*args, **{**kwargs, "padding_idx": None})

    def concerns(words: torch.Tensor, *_: Any, **kwargs: Any) -> bool:
        return on(words, last()) and kwargs.get("padding_idx") is not None

    with altered(F, "embedding", concerns, instead):
        yield


@fault(
    "grouped convolutions of channels_last images shift their output channels by one",
    "test_products",
    condition="groups, channels_last",
)
def groups_taken_for_each_other() -> Iterator[None]:
    """Contiguous images are right."""

    def instead(conv: Any, *args: Any, **kwargs: Any) -> Any:
        return conv(*args, **kwargs).roll(1, 1)

    def concerns(x: torch.Tensor, *_: Any, **kwargs: Any) -> bool:
        return x.is_cuda and kwargs.get("groups", 1) > 1 and x.stride(1) == 1

    with altered(F, "conv2d", concerns, instead):
        yield


@fault(
    "interpolation on one device ignores align_corners",
    "test_layers_and_gradients",
    condition="one device, align_corners",
)
def corners_not_aligned() -> Iterator[None]:
    """Always use the default."""

    def instead(interpolate: Any, *args: Any, **kwargs: Any) -> Any:
        return interpolate(*args, **{**kwargs, "align_corners": False})

    def concerns(x: torch.Tensor, *_: Any, **kwargs: Any) -> bool:
        return on(x, last()) and bool(kwargs.get("align_corners"))

    with altered(F, "interpolate", concerns, instead):
        yield


@fault(
    "the second layer of a GRU on one device starts from a wrong state",
    "test_layers_and_gradients",
    condition="one device, two layers",
)
def state_of_the_second_layer_lost() -> Iterator[None]:
    """The first layer starts from the right state."""

    def instead(gru: Any, x: torch.Tensor, state: torch.Tensor, *args: Any) -> Any:
        begun = state.clone()
        begun[1:] += 1
        return gru(x, begun, *args)

    with altered(torch._VF, "gru", lambda x, state, *_: on(x, last()) and len(state) > 1, instead):
        yield
