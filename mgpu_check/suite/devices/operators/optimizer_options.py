"""Step optimizers and GradScaler with each pair of values of their options, next to their documentation in float64."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mgpu_check.suite.common.agreement import Case
from mgpu_check.suite.common.documented_steps import DocumentedLBFGS, DocumentedSteps
from mgpu_check.suite.common.pairs import drawn_rows, words_of
from mgpu_check.suite.common.turns import in_turns
from mgpu_check.suite.common.values import small
from mgpu_check.suite.devices.operators.averaging import averaging_cases
from mgpu_check.suite.devices.operators.documented_scaling import RATE, STEPS, documented_scaling, scaled_parts
from mgpu_check.suite.devices.operators.learning_rates import learning_rate_cases
from mgpu_check.suite.devices.operators.optimizer_kinds import COARSE, FORMS, FUSED, KINDS, OptimizerKind, gradient

_Options = Mapping[str, Sequence[Any]]

_WAYS = (False, True)
_OTHERS: _Options = {
    "dtype": (torch.float32, torch.float64, torch.float16, torch.bfloat16),
    "groups": ("one", "two", "with other options"),
    "closure": _WAYS,
    "rate": (0.125, "tensor"),
    "idle": _WAYS,
    "loaded": _WAYS,
}
"""Options of each optimizer besides those of its constructor.

With `idle` the second parameter has no gradient in the first step, and the last parameter never has one. With `loaded`
another optimizer continues after the first step, from the state of the first one.
"""

_NARROW = (torch.float16, torch.bfloat16)

_SCALER: _Options = {
    "init_scale": (2.0**16, 4.0),
    "growth_factor": (2.0, 4.0),
    "backoff_factor": (0.5, 0.25),
    "growth_interval": (2000, 1, 2, 3),
    "enabled": (True, False),
    "unscaled": ("", "first", "and clipped"),
    "optimizers": (1, 2),
    "infinite": (None, 0, 1, 2),
    "new_scale": (None, 8.0, "tensor"),
    "dtype": (torch.float32, torch.float64),
}
"""Options of GradScaler and of the steps with it.

`infinite` is the step with an infinite gradient of the last optimizer, `new_scale` the one given to `update`.
"""
_SHARE = 32
"""A run of few examples takes every 32nd row, and one at least."""


def _together(kind: OptimizerKind, row: Mapping[str, Any]) -> bool:
    """Return whether an optimizer takes these options, and rounding stays small with them."""
    if row.get("nesterov") and (row.get("momentum") == 0 or row.get("dampening")):
        return False
    if row.get("centered") and row.get("eps") == 1e-8:
        return False  # a difference of two near numbers is the divisor
    form, dtype = row.get("form"), row.get("dtype")
    if kind.data == "loss":
        # Quotients of inner products enlarge roundings, and a search ends early or late by one.
        return (
            dtype not in (*_NARROW, torch.float32 if row.get("line_search_fn") else None)
            and row.get("groups") != "with other options"
            and not row.get("idle")
        )
    if kind.make is torch.optim.RAdam and form == "capturable" and row.get("betas") == (0.9, 0.999):
        return False  # a difference of two near numbers in float32 selects the branch
    if row.get("rate") == "tensor" and "lists" in kind.forms:
        # Documented for "fused" and "capturable"; kernels for lists refuse it in torch 2.13, loops accept it.
        loops = () if kind.make in (torch.optim.Adam, torch.optim.AdamW) else ("loop",)
        return form in (None, "fused", "capturable", *loops)
    if kind.make is torch.optim.NAdam and form in ("default", "lists") and row.get("idle") and row.get("loaded"):
        return False  # torch 2.13 raises: a loaded product is on the device, and a new one on the CPU
    if kind.make is torch.optim.SGD and form == "fused" and row.get("idle") and row.get("momentum"):
        return False  # torch 2.13 raises if only some of the parameters have a momentum
    if kind.make is torch.optim.SGD and form == "fused":
        return dtype not in _NARROW  # torch 2.13 takes the step twice on the CPU, which the simulated node computes on
    return form != "differentiable" or not (dtype in _NARROW or row.get("idle"))


def _in_turn(row: Mapping[str, Any]) -> bool:
    """Return whether an infinity of GradScaler is found: without it, the scaler steps to infinity."""
    return row.get("enabled") is not False or row.get("infinite") is None


def option_cases(seed: int = 0, *, more: bool = True) -> Iterator[Case]:
    """Yield steps of each optimizer, of GradScaler, averages of models, and learning rates.

    Each pair of values of two options of one of them occurs. Without `more`, some rows of some optimizers are left, by
    seed.
    """
    kinds = enumerate(KINDS if more else KINDS[seed % 3 :: 3])
    return in_turns(
        [
            *(_stepping(kind, seed, 5 * number, more=more) for number, kind in kinds),
            _scaling(seed, more=more),
            averaging_cases(seed, more=more),
            *learning_rate_cases(seed, more=more),
        ]
    )


def _stepping(kind: OptimizerKind, seed: int, number: int, *, more: bool) -> Iterator[Case]:
    fused = ("fused",) if kind.name in FUSED else ()
    options = {**kind.values, "form": ("default", *kind.forms, *fused), **_OTHERS}
    for row in drawn_rows(options, functools.partial(_together, kind), seed=seed + number, more=more, share=_SHARE):
        x = small((5, 13), row["dtype"], seed)
        yield Case(f"{kind.name} with {words_of(row, options)}", functools.partial(_stepped, kind, row), (x,), "close")


def _scaling(seed: int, *, more: bool) -> Iterator[Case]:
    for row in drawn_rows(_SCALER, _in_turn, seed=seed, more=more, share=_SHARE):
        x = small((3, 7), row["dtype"], seed)
        yield Case(f"GradScaler with {words_of(row, _SCALER)}", functools.partial(_scaled, row), (x,), "close")


def _stepped(kind: OptimizerKind, row: Mapping[str, Any], x: Tensor) -> list[Tensor]:
    """Return the parameters after steps, and the averages of ASGD; for a differentiable step, also its gradient."""
    inner = row["form"] == "differentiable"
    leaf = x.detach().clone().requires_grad_()
    before = _parts(leaf if inner else x, kind.data)
    parameters = [part.clone() if inner else part.detach().clone().requires_grad_() for part in before]
    steps = 1 if inner else 2 if row["dtype"] in _NARROW else kind.steps
    # A search along a line has no published formula: minFunc's interpolations are the code itself.
    if x.is_cuda or row.get("line_search_fn"):
        moved, averages = _by_torch(kind, row, parameters, steps)
    else:
        moved, averages = _documented(kind, row, parameters, steps)
    flat = torch.cat([one.reshape(-1) for one in moved])
    if kind.data == "loss" and row["dtype"] == torch.float32:
        return [flat.detach().to(torch.float16)]
    if kind.data == "matrices":
        # Muon computes in bfloat16. A movement of narrow parameters has their roundings, which Muon enlarges, too.
        start: Any = 0 if row["dtype"] in _NARROW else torch.cat([part.reshape(-1) for part in before])
        return [(flat - start).detach().bfloat16()]
    found = [flat.detach(), *(torch.autograd.grad(flat.sum(), [leaf]) if inner else ()), *averages]
    # Corrections of capturable and of differentiable steps are powers in float32.
    powers = row["form"] == "capturable" or (inner and "betas" in kind.values)
    # Quotients of inner products enlarge roundings of L-BFGS, whose sums torch has in another order.
    coarse = row["dtype"] == torch.float64 and (powers or kind.make in COARSE or kind.data == "loss")
    return [one.float() for one in found] if coarse else found


def _groups(kind: OptimizerKind, row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the options of each group of parameters."""
    own = {"lr": 0.125} | {name: row[name] for name in kind.values}
    if row["groups"] == "one" or kind.data == "loss":
        return [own]
    other = own | {"lr": 0.0625}
    if row["groups"] == "with other options":
        name = "weight_decay" if "weight_decay" in kind.values else "maximize"
        other[name] = next(value for value in kind.values[name] if value != own[name])
    return [own, other]


def _gradients(
    kind: OptimizerKind, row: Mapping[str, Any], parameters: Sequence[Tensor], step: int
) -> list[Tensor | None]:
    found: list[Tensor | None] = [
        gradient(one.detach(), kind.data, number, step) for number, one in enumerate(parameters, start=1)
    ]
    if row["idle"]:
        found[-1] = None
        if step == 0:
            found[1] = None
    return found


def _made(
    kind: OptimizerKind, row: Mapping[str, Any], parameters: list[Tensor], groups: Sequence[Mapping[str, Any]]
) -> torch.optim.Optimizer:
    form = FORMS[row["form"]]
    if row["groups"] == "one":
        return kind.make(parameters, **groups[0], **form)
    parts = [parameters] if len(groups) == 1 else [parameters[:2], parameters[2:]]
    given = [
        {"params": part, **{name: value for name, value in own.items() if value is not groups[0][name]}}
        for part, own in zip(parts, groups, strict=True)
    ]
    return kind.make(given, **groups[0], **form)


def _by_torch(
    kind: OptimizerKind, row: Mapping[str, Any], parameters: list[Tensor], steps: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters after steps of torch, and the averages of ASGD."""
    groups = _groups(kind, row)
    if row["rate"] == "tensor":
        # Forms that read a rate from the device need it there, and others refuse it there.
        device = parameters[0].device if row["form"] in ("fused", "capturable") else None
        wide = torch.float64 if row["dtype"] == torch.float64 else torch.float32
        groups = [own | {"lr": torch.tensor(own["lr"], device=device, dtype=wide)} for own in groups]
    optimizer = _made(kind, row, parameters, groups)
    for step in range(steps):
        if step == 1 and row["loaded"]:
            state = optimizer.state_dict()
            optimizer = _made(kind, row, parameters, [{"lr": 1.0}] * len(groups))
            optimizer.load_state_dict(state)
        _step(optimizer, parameters, kind, row, step)
    states = [optimizer.state[one] for one in parameters if one in optimizer.state]
    return parameters, [state["ax"].detach() for state in states if "ax" in state]


def _step(
    optimizer: torch.optim.Optimizer,
    parameters: Sequence[Tensor],
    kind: OptimizerKind,
    row: Mapping[str, Any],
    step: int,
) -> None:
    def loss() -> float:
        for parameter, found in zip(parameters, _gradients(kind, row, parameters, step), strict=True):
            parameter.grad = found
        if kind.data != "loss":
            return 0.0
        squares = (float((one.detach() - 1).square().sum()) for one in parameters)
        return sum(square * number / 2 for number, square in enumerate(squares, start=1))

    if row["closure"] or kind.data == "loss":
        optimizer.step(loss)
        return
    loss()
    optimizer.step()


def _documented(
    kind: OptimizerKind, row: Mapping[str, Any], parameters: list[Tensor], count: int
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the parameters after steps as torch documents them, and the averages of ASGD."""
    groups = _groups(kind, row)
    if kind.data == "loss":
        weights = torch.cat(
            [torch.full_like(one, number).reshape(-1) for number, one in enumerate(parameters, start=1)]
        )
        search = DocumentedLBFGS(weights.detach(), groups[0])
        x = torch.cat([one.detach().reshape(-1) for one in parameters])
        for _ in range(count):
            x = search.stepped(x)
        return [x], []
    if row["form"] != "differentiable":
        parameters = [one.detach() for one in parameters]
    steps = DocumentedSteps(kind.make)
    options = [{**groups[0 if number < 2 else -1], "dtype": row["dtype"]} for number in range(len(parameters))]
    for step in range(count):
        parameters = steps.stepped(parameters, _gradients(kind, row, parameters, step), options)
    states = [state for _, state in sorted(steps.states.items())]
    return parameters, [state["ax"].detach() for state in states if "ax" in state]


def _parts(x: Tensor, data: str) -> list[Tensor]:
    if data == "flat":
        # Odd, even and single numbers of elements: kernels for lists of tensors work in chunks and vectors.
        return [x, x[0], x[1, :8], x[2, :1]]
    return [x, x[:3, :6], x[2:, 1:5]]


def _scaled(row: Mapping[str, Any], x: Tensor) -> list[Tensor]:
    """Return the scales of four steps of GradScaler, and the parameters after them."""
    if not x.is_cuda:
        return documented_scaling(row, x)
    names = ("init_scale", "growth_factor", "backoff_factor", "growth_interval", "enabled")
    scaler = torch.amp.GradScaler(x.device.type, **{name: row[name] for name in names})
    parameters = [part.requires_grad_() for part in scaled_parts(row, x)]
    optimizers = [torch.optim.SGD([parameter], lr=RATE) for parameter in parameters[1:]]
    optimizers[0].add_param_group({"params": parameters[:1]})
    scales = []
    for step in range(STEPS):
        for parameter in parameters:
            parameter.grad = scaler.scale(parameter.detach() * 0.5 + step)
        if step == row["infinite"]:
            last = parameters[-1].grad
            assert last is not None
            last.view(-1)[-1] = torch.inf
        for optimizer in optimizers if row["unscaled"] else ():
            scaler.unscale_(optimizer)
        if row["unscaled"] == "and clipped":
            for parameter in parameters:
                torch.nn.utils.clip_grad_norm_([parameter], 1.0)
        for optimizer in optimizers:
            scaler.step(optimizer)
        new = row["new_scale"] if step == STEPS - 1 else None
        scaler.update(torch.full((), 2.0, device=x.device) if new == "tensor" else new)
        scales.append(scaler.get_scale())
    return [x.new_tensor(scales), torch.cat([parameter.detach().reshape(-1) for parameter in parameters])]
