"""List convolutions, resizing and padding of images that `layer_cases` calls."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from mgpu_check.suite.common.operators import Function
from mgpu_check.suite.common.values import shaped


def _convolved(image: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Convolve with taps and a bias from `x`. With a stride of 2 cuDNN has no algorithms that round differently."""
    return F.conv2d(image, shaped(x, 2, 4, 3, 3), x[0, :2], stride=2, padding=1)


def _images(name: str, *args: Any, **options: Any) -> Function:
    """Return a function that views a matrix as three images of four channels. It looks up `name` at each call."""
    return lambda x: getattr(F, name)(x.view(3, 4, 4, 4), *args, **options)


def _taps(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return shaped(x.flip(0), *shape)


SPATIAL: tuple[tuple[str, Function], ...] = (
    ("conv2d", lambda x: _convolved(x.view(3, 4, 4, 4), x)),
    ("conv2d channels_last", lambda x: _convolved(x.view(3, 4, 4, 4).contiguous(memory_format=torch.channels_last), x)),
    ("conv2d in groups", lambda x: F.conv2d(x.view(3, 4, 4, 4), _taps(x, 6, 2, 3, 3), stride=2, groups=2)),
    (
        "conv2d of each channel",
        lambda x: F.conv2d(x.view(3, 4, 4, 4), _taps(x, 4, 1, 3, 3), stride=2, padding=1, groups=4),
    ),
    ("conv2d with gaps", lambda x: F.conv2d(x.view(3, 1, 8, 8), _taps(x, 2, 1, 3, 3), stride=2, dilation=2)),
    (
        "conv_transpose2d",
        lambda x: F.conv_transpose2d(x.view(3, 4, 4, 4), _taps(x, 4, 2, 3, 3), stride=2, output_padding=1),
    ),
    ("interpolate, bilinear", _images("interpolate", scale_factor=2, mode="bilinear", align_corners=False)),
    (
        "interpolate, bilinear, from corner to corner",
        _images("interpolate", size=(7, 3), mode="bilinear", align_corners=True),
    ),
    ("pad around", _images("pad", (1, 2, 2, 1), mode="circular")),
    ("fold", lambda x: F.fold(x.view(3, 16, 4), (4, 4), 2, stride=2)),
)
"""Functions of one matrix with elements in (-2, 2)."""
