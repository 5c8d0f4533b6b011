"""The models are those that the tutorials teach."""

from __future__ import annotations

import pytest
import torch

from mgpu_check.oracles.training import models


def test_lenet_has_the_shapes_of_the_book() -> None:
    parameters = models.lenet_parameters()
    assert {name: tuple(value.shape) for name, value in parameters.items()} == {
        "W1": (20, 1, 3, 3),
        "b1": (20,),
        "W2": (50, 20, 5, 5),
        "b2": (50,),
        "W3": (800, 128),
        "b3": (128,),
        "W4": (128, 10),
        "b4": (10,),
    }
    assert models.lenet(torch.randn(3, 1, 28, 28), parameters).shape == (3, 10)
    assert models.lenet(torch.randn(0, 1, 28, 28), parameters).shape == (0, 10), "a rank without samples"


def test_lenet_as_a_module_is_the_same_function() -> None:
    torch.manual_seed(0)
    module = models.LeNet()
    torch.manual_seed(0)
    parameters = models.lenet_parameters()
    images = torch.randn(2, 1, 28, 28)
    assert torch.equal(module(images), models.lenet(images, parameters))


@pytest.mark.parametrize("width", [4, 64])
def test_resnet18(width) -> None:
    net = models.resnet18(width=width).eval()
    convolutions = [module for module in net.modules() if isinstance(module, torch.nn.Conv2d)]
    # 17 convolutions and one linear layer with weights make the 18; 3 more adapt shortcuts.
    assert len(convolutions) == 17 + 3
    assert sum(isinstance(module, torch.nn.BatchNorm2d) for module in net.modules()) == 17
    assert net(torch.randn(1, 1, 28, 28)).shape == (1, 10)
    assert convolutions[0].out_channels == width


def test_small_models() -> None:
    assert models.mlp(features=5, classes=3)(torch.randn(2, 5)).shape == (2, 3)
    assert models.small_convnet()(torch.randn(2, 1, 8, 8)).shape == (2, 10)
