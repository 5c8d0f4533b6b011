"""Models: an MLP, LeNet as a function of its parameters, a small convolutional network, ResNet-18, and two for tests.

Of the two, one is the model of PyTorch's tutorial on data parallelism, which shows the inputs of each replica. The
other has parameters and buffers of every dtype and random bits, to test that copies and broadcasts are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn
from torch.nn import functional as F

LENET_SHAPES = {
    "W1": (20, 1, 3, 3),
    "b1": (20,),
    "W2": (50, 20, 5, 5),
    "b2": (50,),
    "W3": (800, 128),
    "b3": (128,),
    "W4": (128, 10),
    "b4": (10,),
}
"""Shapes of the parameters of `lenet`, as in the chapter on multiple GPUs of *Dive into Deep Learning*."""


def mlp(features: int = 6, classes: int = 4) -> nn.Sequential:
    """Build an MLP with two hidden layers and ReLU: (batch, features) -> (batch, classes)."""
    return nn.Sequential(nn.Linear(features, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, classes))


def lenet(images: torch.Tensor, parameters: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Run LeNet, with ReLU and average pooling, on parameters: images (batch, 1, 28, 28) -> logits (batch, 10)."""
    p = parameters
    hidden = F.avg_pool2d(F.relu(F.conv2d(images, p["W1"], p["b1"])), 2)
    hidden = F.avg_pool2d(F.relu(F.conv2d(hidden, p["W2"], p["b2"])), 2)
    # Not reshape(len(images), -1): a rank may have no images, and torch cannot infer -1 then.
    return torch.mm(F.relu(torch.mm(hidden.flatten(1), p["W3"]) + p["b3"]), p["W4"]) + p["b4"]


class LeNet(nn.Module):
    """`lenet` with weights that are normal with standard deviation `scale`, and biases 0."""

    def __init__(self, scale: float = 0.01) -> None:
        super().__init__()
        for name, shape in LENET_SHAPES.items():
            value = torch.zeros(shape) if name.startswith("b") else torch.randn(shape) * scale
            self.register_parameter(name, nn.Parameter(value))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # Not named_parameters(): the replicas of DataParallel hold their parameters as plain attributes
        # (torch/nn/parallel/replicate.py, replicate, torch 2.13).
        return lenet(images, {name: getattr(self, name) for name in LENET_SHAPES})


def small_convnet(classes: int = 10) -> nn.Sequential:
    """Build a network with one convolution and BatchNorm: (batch, 1, height, width) -> (batch, classes)."""
    before = nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU()
    return nn.Sequential(*before, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(16, classes))


class _Residual(nn.Module):
    """Two 3x3 convolutions with BatchNorm around a shortcut."""

    def __init__(self, in_channels: int, channels: int, stride: int, activation: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, 3, padding=1, stride=stride)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        self.conv3 = nn.Conv2d(in_channels, channels, 1, stride=stride) if stride > 1 else None
        self.bn1 = nn.BatchNorm2d(channels)
        self.bn2 = nn.BatchNorm2d(channels)
        self.activation = activation()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.activation(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        return self.activation(y + (self.conv3(x) if self.conv3 is not None else x))


def resnet18(classes: int = 10, width: int = 64, activation: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """Build ResNet-18 for images of up to about 28x28: (batch, 1, height, width) -> (batch, classes).

    The variant of *Dive into Deep Learning*, without the large first kernel, stride and pooling. `width` is the number
    of channels of the first block; each of the next three doubles it. 64 gives 11 million parameters.
    """

    def block(inside: int, outside: int, stride: int = 2) -> nn.Sequential:
        head = _Residual(inside, outside, stride, activation)
        return nn.Sequential(head, _Residual(outside, outside, 1, activation))

    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        activation(),
        block(width, width, stride=1),
        block(width, 2 * width),
        block(2 * width, 4 * width),
        block(4 * width, 8 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8 * width, classes),
    )


class TutorialModel(nn.Module):
    """A linear layer that records its inputs; the tutorial prints their sizes."""

    def __init__(self, input_size: int, output_size: int) -> None:
        super().__init__()
        self.fc = nn.Linear(input_size, output_size)
        # Replicas are shallow copies (torch/nn/modules/module.py, _replicate_for_data_parallel, torch 2.13), so they
        # share this list. Appending to a list is atomic among threads.
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return scores, (n, output_size), for inputs (n, input_size)."""
        self.seen.append(x)
        return self.fc(x)


def inputs_seen(batch: torch.Tensor, devices: Sequence[torch.device]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Run DataParallel on `batch`, (n, features).
    Return the inputs of the replicas, in device order, and the output."""
    model = TutorialModel(batch.shape[1], 2)
    net = nn.DataParallel(model, device_ids=list(devices)).to(devices[0])
    output = net(batch)
    return sorted(model.seen, key=lambda x: list(devices).index(x.device)), output


_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64)
# Without int16, because neither NCCL nor gloo sends it.
_WHOLE = (torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool, torch.float32)
_MANY = 66_000


class Everything(nn.Module):
    """A module with parameters of different sizes, buffers, and shared and frozen parts.

    Parameters have no dimensions, 7 or 64 elements; in float32, 66,000 in place of 64. All bits are random: the values
    include NaN with payloads, infinities and subnormals.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def bits(dtype: torch.dtype, count: int) -> torch.Tensor:
            most = 2 if dtype == torch.bool else 256
            return torch.randint(0, most, (count * dtype.itemsize,), dtype=torch.uint8, generator=generator).view(dtype)

        for dtype in _FLOATS:
            for count in (1, 7, _MANY if dtype == torch.float32 else 64):
                name = f"{str(dtype).removeprefix('torch.')}_{count}"
                values = bits(dtype, count)
                self.register_parameter(name, nn.Parameter(values[0] if count == 1 else values))
        for dtype in _WHOLE:
            self.register_buffer(f"buffer_{str(dtype).removeprefix('torch.')}", bits(dtype, 9))
        self.frozen = nn.Parameter(bits(torch.float32, 5), requires_grad=False)
        self.inner = nn.Linear(3, 2)
        self.inner.weight = nn.Parameter(bits(torch.float32, 6).view(2, 3))
        self.inner.bias = nn.Parameter(bits(torch.float32, 2))
        self.twin = self.inner
        self.tied = self.inner.weight
