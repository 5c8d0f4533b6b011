"""List convolutions, pooling, resizing and padding of images, signals and volumes that `layer_cases` calls."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from mgpu_check.suite.common.agreement import Function
from mgpu_check.suite.common.values import shaped

__all__ = ["SPATIAL", "WIDE_SPATIAL"]


def _convolved(image: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Convolve with taps and a bias from `x`. With a stride of 2 cuDNN has no algorithms that round differently."""
    return F.conv2d(image, shaped(x, 2, 4, 3, 3), x[0, :2], stride=2, padding=1)


def _images(name: str, *args: Any, **options: Any) -> Function:
    """Return a function that views a matrix as three images of four channels. It looks up `name` at each call."""
    return lambda x: getattr(F, name)(x.view(3, 4, 4, 4), *args, **options)


def _signals(name: str, *args: Any, **options: Any) -> Function:
    """Return a function that views a matrix as three signals of four channels."""
    return lambda x: getattr(F, name)(x.view(3, 4, 16), *args, **options)


def _volumes(name: str, *args: Any, **options: Any) -> Function:
    """Return a function that views a matrix as three volumes of one channel."""
    return lambda x: getattr(F, name)(x.view(3, 1, 4, 4, 4), *args, **options)


def _taps(x: torch.Tensor, *shape: int) -> torch.Tensor:
    return shaped(x.flip(0), *shape)


SPATIAL: tuple[tuple[str, Function], ...] = (
    ("conv2d", lambda x: _convolved(x.view(3, 4, 4, 4), x)),
    ("conv2d channels_last", lambda x: _convolved(x.view(3, 4, 4, 4).contiguous(memory_format=torch.channels_last), x)),
    ("max_pool2d", lambda x: F.max_pool2d(x.view(3, 4, 4, 4), 2)),
    ("avg_pool2d", lambda x: F.avg_pool2d(x.view(3, 4, 4, 4), 3, 1)),
    ("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x.view(3, 4, 4, 4), 1)),
    ("interpolate", lambda x: F.interpolate(x.view(3, 4, 4, 4), scale_factor=2, mode="nearest")),
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
    ("conv1d", lambda x: F.conv1d(x.view(3, 4, 16), _taps(x, 2, 4, 3), x[0, :2], stride=2)),
    ("conv_transpose1d", lambda x: F.conv_transpose1d(x.view(3, 4, 16), _taps(x, 4, 2, 3), stride=2)),
    ("conv3d", lambda x: F.conv3d(x.view(3, 1, 4, 4, 4), _taps(x, 2, 1, 2, 2, 2), stride=2)),
    ("max_pool1d", _signals("max_pool1d", 3, 2)),
    ("max_pool2d, overlapping", _images("max_pool2d", 3, 1, 1)),
    ("max_pool3d", _volumes("max_pool3d", 2)),
    ("avg_pool1d", _signals("avg_pool1d", 3, 2)),
    ("avg_pool2d without the padding", _images("avg_pool2d", 3, 2, 1, count_include_pad=False)),
    ("adaptive_max_pool2d", _images("adaptive_max_pool2d", 3)),
    ("interpolate, bilinear", _images("interpolate", scale_factor=2, mode="bilinear", align_corners=False)),
    (
        "interpolate, bilinear, from corner to corner",
        _images("interpolate", size=(7, 3), mode="bilinear", align_corners=True),
    ),
    ("interpolate, linear", _signals("interpolate", size=11, mode="linear")),
    ("pad by reflection", _images("pad", (1, 2, 2, 1), mode="reflect")),
    ("pad by repetition", _images("pad", (1, 2, 2, 1), mode="replicate")),
    ("pad around", _images("pad", (1, 2, 2, 1), mode="circular")),
    ("unfold", _images("unfold", 3, padding=1, stride=2)),
    ("fold", lambda x: F.fold(x.view(3, 16, 4), (4, 4), 2, stride=2)),
    ("pixel_shuffle", _images("pixel_shuffle", 2)),
    ("pixel_unshuffle", _images("pixel_unshuffle", 2)),
    ("instance_norm", _images("instance_norm")),
)
"""Functions of one matrix with elements in (-2, 2)."""

WIDE_SPATIAL: tuple[tuple[str, Function], ...] = (
    ("avg_pool3d", _volumes("avg_pool3d", 2)),
    ("local_response_norm", _images("local_response_norm", 3, alpha=0.5)),
)
"""Functions without kernels for float16 and bfloat16 on some devices."""
