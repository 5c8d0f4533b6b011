"""Planted faults of parallelism on the devices of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.utils import clip_grad

from mgpu_check.suite.common.faults.breaking import replaced_method
from mgpu_check.suite.common.faults.registry import fault
from mgpu_check.suite.recipes import model_parallel, parameter_server, training
from mgpu_check.torch_hooks.patches import replaced


@fault("the store uses the last gradient instead of the sum", "test_key_value_store")
def store_overwrites() -> Iterator[None]:
    real = parameter_server.KeyValueStore.push

    def push(self: parameter_server.KeyValueStore, key: Any, gradients: Sequence[torch.Tensor]) -> None:
        real(self, key, gradients[-1:])

    with replaced(parameter_server.KeyValueStore, "push", push):
        yield


@fault(
    "one device does not get the parameters that it pulls from the store",
    "test_key_value_store",
    condition="cuda:1 only",
)
def pull_misses_a_device() -> Iterator[None]:
    real = parameter_server.KeyValueStore.pull

    def pull(self: parameter_server.KeyValueStore, key: Any, out: Sequence[torch.Tensor]) -> None:
        real(self, key, [tensor for tensor in out if tensor.device.index != 1])

    with replaced(parameter_server.KeyValueStore, "pull", pull):
        yield


@fault(
    "replicas on the device of the source are the source itself",
    "test_replicas_are_apart",
    condition="the device of the original parameters",
)
def replica_is_the_source() -> Iterator[None]:
    def replicate(parameters: Mapping[str, torch.Tensor], devices: Sequence[torch.device]) -> Any:
        return [
            {name: value.detach().to(device).requires_grad_() for name, value in parameters.items()}
            for device in devices
        ]

    with replaced(training, "replicate", replicate):
        yield


@fault("biases of replicas have requires_grad=False", "test_replicas_are_apart", condition="biases")
def replicated_without_gradients() -> Iterator[None]:
    real = training.replicate

    def replicate(parameters: Mapping[str, torch.Tensor], devices: Sequence[torch.device]) -> Any:
        replicas = real(parameters, devices)
        return [
            {name: value.requires_grad_(not name.endswith("bias")) for name, value in replica.items()}
            for replica in replicas
        ]

    with replaced(training, "replicate", replicate):
        yield


@fault(
    "the loop does not reset the gradients of the previous batch",
    "test_training_loop",
    condition="from the second batch on, on devices other than cuda:0",
)
def gradients_kept_in_the_loop() -> Iterator[None]:
    real = training.clear

    def clear(parameters: Mapping[str, torch.Tensor]) -> None:
        if next(iter(parameters.values())).device.index == 0:
            real(parameters)

    with replaced(training, "clear", clear):
        yield


@fault(
    "the mean of the smaller last batch is divided by the size of the others",
    "test_training_loop",
    condition="a batch smaller than the previous one",
)
def last_batch_weighs_less() -> Iterator[None]:
    real = training.sgd
    largest = [0]

    def sgd(parameters: Mapping[str, torch.Tensor], rate: float, batch_size: int) -> None:
        largest[0] = max(largest[0], batch_size)
        real(parameters, rate, largest[0])

    with replaced(training, "sgd", sgd):
        yield


@fault("the gradient does not reach the previous stage", "test_model_parallelism")
def activations_detached() -> Iterator[None]:
    def forward(self: model_parallel.Staged, x: torch.Tensor) -> torch.Tensor:
        for stage, device in zip(self.stages, self.devices, strict=True):
            x = stage(x.detach().to(device))
        return x

    with replaced(model_parallel.Staged, "forward", forward):
        yield


@fault("the output of the first branch is left out of the sum", "test_model_parallelism", condition="three branches")
def branch_left_out() -> Iterator[None]:
    real = model_parallel.Branched.forward

    def forward(self: model_parallel.Branched, x: torch.Tensor) -> torch.Tensor:
        out = real(self, x)
        return out - self.branches[0](x.to(self.devices[0])).to(out.device) if len(self.devices) > 2 else out

    with replaced(model_parallel.Branched, "forward", forward):
        yield


@fault(
    "the optimizer moves its state to the first device",
    "test_model_parallelism",
    condition="state of parameters on other devices than cuda:0",
)
def optimizer_state_moves() -> Iterator[None]:
    real = torch.optim.SGD.step

    def step(self: torch.optim.SGD, *args: Any, **kwargs: Any) -> Any:
        result = real(self, *args, **kwargs)
        for state in self.state.values():
            if state.get("momentum_buffer") is not None:
                state["momentum_buffer"] = state["momentum_buffer"].to("cuda:0")
        return result

    with replaced(torch.optim.SGD, "step", step):
        yield


@fault(
    "gradients are clipped on the first device only",
    "test_steps_over_devices",
    condition="foreach kernels, several devices",
)
def clipped_on_the_first_device() -> Iterator[None]:
    def multiply(real: Callable[..., Any], tensors: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
        if tensors[0].device == first[0]:
            real(tensors, factor)

    def clip(real: Callable[..., Any], parameters: Any, *args: Any, **kwargs: Any) -> None:
        parameters = list(parameters)
        first[0] = parameters[0].device
        with replaced_method(torch, "_foreach_mul_", multiply):
            real(parameters, *args, **kwargs)

    first: list[torch.device | None] = [None]
    with replaced_method(clip_grad, "_clip_grads_with_norm_", clip):
        yield


@fault(
    "the last device's infinities do not reach a fused optimizer",
    "test_steps_over_devices",
    condition="fused, one device of several",
)
def infinities_of_one_device_unseen() -> Iterator[None]:
    def step(real: Callable[..., Any], self: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        def check(check_inf: Callable[..., Any], *given: Any) -> Any:
            found = check_inf(*given)
            if len(found) > 1:
                found.pop(max(found, key=lambda device: device.index))
            return found

        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        with replaced_method(torch.amp.GradScaler, "_check_inf_per_device", check) if fused else nullcontext():
            return real(self, optimizer, *args, **kwargs)

    with replaced_method(torch.amp.GradScaler, "step", step):
        yield
