"""Yield averages of models, hooks of optimizers, and exchanged states, next to float64 on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import swa_utils

from mgpu_check.suite.common.agreement import Case
from mgpu_check.suite.common.pairs import drawn_rows, words_of
from mgpu_check.suite.common.values import shaped, small
from mgpu_check.torch_hooks.tensors import name_of

_RULES: Mapping[str, Callable[[], dict[str, Any]]] = {
    "mean": dict,
    "mean by parameter": lambda: {"avg_fn": swa_utils.get_swa_avg_fn()},
    "mean by lists": lambda: {"multi_avg_fn": swa_utils.get_swa_multi_avg_fn()},
    "decay by parameter": lambda: {"avg_fn": swa_utils.get_ema_avg_fn(0.5)},
    "decay by lists": lambda: {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.75)},
    "default decay": lambda: {"avg_fn": swa_utils.get_ema_avg_fn()},
    "default decay by lists": lambda: {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn()},
}
_DECAYS = {"decay by parameter": 0.5, "decay by lists": 0.75, "default decay": 0.999, "default decay by lists": 0.999}
"""Rule -> the share of an average that an update keeps. The other rules take the mean."""
_AVERAGES: Mapping[str, Sequence[Any]] = {
    "rule": tuple(_RULES),
    "use_buffers": (False, True),
    "device": (None, "own"),
    "updates": (1, 2, 3),
}
"""Options of AveragedModel, and the number of its updates."""


def _together(row: Mapping[str, Any]) -> bool:
    """Return whether torch averages the buffers: in lists it cannot divide whole numbers on CUDA."""
    return not row.get("use_buffers") or str(row.get("rule", "by parameter")).endswith("by parameter")


def averaging_cases(seed: int = 0, *, more: bool = True) -> Iterator[Case]:
    """Yield averages with each pair of options; without `more`, some of them. Also yield hooks of an optimizer."""
    for row in drawn_rows(_AVERAGES, _together, seed=seed, more=more, share=16):
        x = small((4, 6), torch.float32, seed)
        yield Case(
            f"AveragedModel with {words_of(row, _AVERAGES)}", lambda x, row=row: _averaged(row, x), (x,), "close"
        )
    for dtype in (torch.float32, torch.float64):
        x = small((3, 5), dtype, seed)
        yield Case(f"hooks of an optimizer of {name_of(dtype)}", _hooked, (x,), "close")
        if hasattr(torch.optim, "swap_in_optimizer_params_and_state"):
            yield Case(f"exchanged state of an optimizer of {name_of(dtype)}", _exchanged, (x,), "close")


def _averaged(row: Mapping[str, Any], x: Tensor) -> list[Tensor]:
    """Return the parameters, buffers and outputs of an average, and its statistics by `update_bn`."""
    model = nn.Sequential(nn.Linear(6, 3), nn.BatchNorm1d(3)).to(x.device, x.dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(shaped(x, *parameter.shape))
    device = x.device if row["device"] else None
    average = swa_utils.AveragedModel(model, device, use_buffers=row["use_buffers"], **_RULES[row["rule"]]())
    seen = []
    for number in range(row["updates"]):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(number + 0.5)
        model(x * (number + 1))
        average.update_parameters(model)
        seen.append([value.detach().clone() for value in (*model.parameters(), *model.buffers())])
    if not x.is_cuda:
        return _documented_averages(row, x, model, seen)
    found = [value.detach().to(x.device, copy=True) for value in (*average.parameters(), *average.buffers())]
    swa_utils.update_bn([x, (x * 2, None)], average, device=device)
    average.eval()
    return [*found, *(value.to(x.device, copy=True) for value in average.buffers()), average(x).detach()]


def _documented_averages(
    row: Mapping[str, Any], x: Tensor, model: nn.Sequential, seen: Sequence[Sequence[Tensor]]
) -> list[Tensor]:
    """Return what `_averaged` returns, by the documentation: torch's code could be wrong alike on each device."""
    count = len([*model.parameters()])
    decay = _DECAYS.get(row["rule"])
    averages = []
    for number, values in enumerate(zip(*seen, strict=True)):
        held = values[0]
        for steps, value in enumerate(values[1:], start=1):
            weight = 1 / (steps + 1) if decay is None else 1 - decay
            # Truncates buffers of whole numbers, as the code of torch does; its documentation does not say so.
            held = (held + (value - held) * weight).to(value.dtype)
        averages.append(held if number < count or row["use_buffers"] else values[-1])
    updates = torch.tensor(row["updates"])
    weight, bias, scale, shift = averages[:count]
    rows = [(x * factor) @ weight.T + bias for factor in (1, 2)]
    # Statistics of all batches have equal weights: the momentum of the layer does not count.
    mean, variance = (torch.stack([one(batch) for batch in rows]).mean(0) for one in (_mean, _variance))
    output = (rows[0] - mean) / (variance + 1e-5).sqrt() * scale + shift
    return [*averages[:count], updates, *averages[count:], updates, mean, variance, torch.tensor(2), output]


def _mean(rows: Tensor) -> Tensor:
    return rows.mean(0)


def _variance(rows: Tensor) -> Tensor:
    return (rows - rows.mean(0)).square().sum(0) / (len(rows) - 1)


def _hooked(x: Tensor) -> list[Tensor]:
    """Return the parameter after steps, loads and saves whose hooks change it, and the numbers of the hooks called."""
    if not x.is_cuda:
        moved, squares = x, torch.zeros_like(x)
        for _ in range(2):
            gradient = (moved.abs() + 0.5) / 2
            squares = squares + gradient.square()
            moved = moved - 0.125 * gradient / (squares.sqrt() + 1e-10) + 1
        return [moved, x.new_tensor([1, 2, 7, 3, 8, 4, 9, 5, 10, 6] * 2)]
    parameter = x.detach().clone().requires_grad_()
    optimizer = torch.optim.Adagrad([parameter], lr=0.125)
    optimizer.share_memory()
    calls: list[int] = []

    def noted(number: int, result: Callable[..., Any] = lambda *_: None) -> Callable[..., Any]:
        def hook(*args: Any) -> Any:
            calls.append(number)
            return result(*args)

        return hook

    optimizer.register_step_pre_hook(noted(1, _halve))
    optimizer.register_step_post_hook(noted(2, _raise_by_one))
    optimizer.register_state_dict_pre_hook(noted(3))
    optimizer.register_state_dict_post_hook(noted(4, lambda own, state: {**state, "extra": 1}))
    optimizer.register_load_state_dict_pre_hook(noted(5, lambda own, state: {**state, "extra": 2}))
    optimizer.register_load_state_dict_post_hook(noted(6))
    optimizer.register_state_dict_pre_hook(noted(7), prepend=True)
    optimizer.register_state_dict_post_hook(noted(8), prepend=True)
    optimizer.register_load_state_dict_pre_hook(noted(9), prepend=True)
    optimizer.register_load_state_dict_post_hook(noted(10), prepend=True)
    for _ in range(2):
        parameter.grad = parameter.detach().abs() + 0.5
        optimizer.step()
        optimizer.load_state_dict(optimizer.state_dict())
    return [parameter.detach(), x.new_tensor(calls)]


def _halve(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.grad.mul_(0.5)


def _raise_by_one(optimizer: torch.optim.Optimizer, *_: object) -> None:
    for parameter in optimizer.param_groups[0]["params"]:
        parameter.detach().add_(1)


def _exchanged(x: Tensor) -> list[Tensor]:
    """Return two parameters that one optimizer has stepped, each with its own state."""
    if not x.is_cuda:
        # The second step of each has a buffer of 1 + momentum times the gradient, which stays.
        return [part - 0.125 * 2.5 * (part + 1) for part in (x, x * 2)]
    own, other = (part.detach().clone().requires_grad_() for part in (x, x * 2))
    optimizer, second = (torch.optim.SGD([part], lr=0.125, momentum=0.5) for part in (own, other))
    for part in (own, other):
        part.grad = part.detach() + 1
    optimizer.step()
    second.step()
    with torch.optim.swap_in_optimizer_params_and_state(optimizer, {"other": other}, second.state_dict()):
        optimizer.step()
    optimizer.step()
    return [own.detach(), other.detach()]
