"""Check that ZeroRedundancyOptimizer steps as one optimizer does, while each rank keeps part of the state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils import _pytree as pytree

from mgpu_check.asserts.findings import Findings, run_all
from mgpu_check.asserts.models import assert_gradients_agree, assert_same
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import ReplicaMismatch
from mgpu_check.numerics.steps import full_precision
from mgpu_check.oracles.training.cases import ExactTraining
from mgpu_check.oracles.training.reference_training import ADAM_RATE, DocumentedSteps, adam_tolerance, one_device, seen
from mgpu_check.oracles.training.training_steps import weighted
from mgpu_check.suite.common.pairs import drawn_rows, words_of
from mgpu_check.torch_hooks.tensors import copied

_DECAY = 0.25
_DEFAULTS = {"lr": ADAM_RATE, "betas": (0.9, 0.999), "eps": 1e-8, "amsgrad": False, "weight_decay": _DECAY / 4}
"""Options of the optimizer. A group may have others."""

_OPTIONS: Mapping[str, Sequence[Any]] = {
    "parameters_as_bucket_view": (False, True),
    "later": (False, True),
    "process_group": (None, "world"),
    "closure": (False, True),
    "joined": (False, True),
}
"""Options of ZeroRedundancyOptimizer and of its steps, the default first.

`later` adds all parameters but the first as a group of their own. `joined` steps under `Join`, with equal numbers of
steps on all ranks.
"""


def assert_zero_agrees(training: ExactTraining, rank: Rank) -> None:
    """Assert that ranks have the parameters of one device after each step, with each pair of options. A collective."""
    expected = one_device(training)

    def together(row: Mapping[str, Any]) -> bool:
        return not (row.get("later") and row.get("parameters_as_bucket_view"))  # an added group cannot be a view

    with Findings() as findings:
        for row in drawn_rows(_OPTIONS, together, seed=training.seed, more=False, share=2):
            model = training.model().to(rank.device)
            parameters = list(model.parameters())
            later = 1 if row["later"] else len(parameters)
            options: dict[str, Any] = {"parameters_as_bucket_view": row["parameters_as_bucket_view"]}
            options |= {"process_group": rank.group if row["process_group"] else None, "lr": training.rate}
            sgd = torch.optim.SGD
            optimizer = ZeroRedundancyOptimizer(parameters[:later], sgd, momentum=training.momentum, **options)
            if parameters[later:]:
                optimizer.add_param_group({"params": parameters[later:]})
            got: dict[str, torch.Tensor] = {}
            with full_precision(), Join([optimizer], enable=row["joined"]):
                for step, (inputs, factors) in enumerate(training.batches(), 1):
                    optimizer.zero_grad()

                    def backward(inputs: torch.Tensor = inputs, factors: torch.Tensor = factors) -> float:
                        # Each rank has the gradients of all samples, as after DDP.
                        loss = weighted(model(inputs.to(rank.device)), factors.to(rank.device))  # noqa: B023  # called at once
                        loss.backward()
                        return float(loss.detach())

                    if row["closure"]:
                        optimizer.step(backward)
                    else:
                        backward()
                        optimizer.step()
                    got |= seen(model, step)
            subject = f"ZeroRedundancyOptimizer with {words_of(row, _OPTIONS)}, on {rank.device}"
            with findings.collected():
                assert_same(got, {name: expected[name] for name in got}, subject, rank.index)


def assert_zero_state_agrees(training: ExactTraining, rank: Rank) -> None:
    """Assert that the ranks together keep the state of one AdamW optimizer, and that it can be reloaded. A collective.

    Two groups of parameters have different rates and weight decays, which a schedule has halved; the first has the
    defaults of the optimizer. The last rank consolidates the state twice, and the second state must be the current one.
    A new optimizer loads this state and takes one more step.
    """
    single = _with_gradients(training, torch.device("cpu"))
    groups, steps = _groups(single), DocumentedSteps(torch.optim.AdamW)
    options = [_DEFAULTS | group for group in groups for _ in group["params"]]
    parameters = [parameter for group in groups for parameter in group["params"]]
    gradients = [parameter.grad.double() for parameter in parameters]
    after = steps.stepped([parameter.detach().double() for parameter in parameters], gradients, options)
    expected = {
        f"{name} of parameter {number}": steps.states[number][key]
        for number in range(len(parameters))
        for name, key in (("exp_avg", "m"), ("exp_avg_sq", "v"))
    }
    last = dict(zip(map(id, parameters), steps.stepped(after, gradients, options), strict=True))
    expected |= {name: last[id(value)] for name, value in single.named_parameters()}
    run_all(partial(_judge_state, training, rank, expected, parameters_as_bucket_view=view) for view in (False, True))


def _judge_state(training: ExactTraining, rank: Rank, expected: Mapping[str, torch.Tensor], **view: bool) -> None:
    model = _with_gradients(training, rank.device)
    groups, adam = _groups(model, 2 * ADAM_RATE, 2 * _DECAY), torch.optim.AdamW
    optimizer = ZeroRedundancyOptimizer(groups, adam, lr=2 * ADAM_RATE, weight_decay=_DECAY / 2, **view)
    last = rank.size - 1
    optimizer.consolidate_state_dict(to=last)  # before the changes, which it would hand to the rank's own optimizer
    for group in optimizer.param_groups:
        group["lr"] /= 2
        group["weight_decay"] /= 2
    optimizer.step()
    kept = sum(state["exp_avg"].numel() for state in optimizer.optim.state.values())
    total = torch.tensor([kept], device=rank.device)
    dist.all_reduce(total)
    optimizer.consolidate_state_dict(to=last)
    # consolidate_state_dict copies to the host without waiting: its calls of _recursive_copy_to_device in
    # torch/distributed/optim/zero_redundancy_optimizer.py, torch 2.13, are non-blocking.
    torch.cuda.synchronize()
    # On the host, because tensors of a device belong to their process.
    box: list[Any] = [None]
    if rank.index == last:
        box = [pytree.tree_map_only(torch.Tensor, copied, optimizer.state_dict())]
    dist.broadcast_object_list(box, src=last, device=rank.device)
    entries = box[0]["state"].items()  # before loading, which drops the state of other ranks
    got = {f"{key} of parameter {at}": copied(entry[key]) for at, entry in entries for key in ("exp_avg", "exp_avg_sq")}
    fresh_optimizer = ZeroRedundancyOptimizer(_groups(model), torch.optim.AdamW, lr=1.0, weight_decay=1.0, **view)
    fresh_optimizer.load_state_dict(box[0])
    fresh_optimizer.step()
    got |= {name: copied(value) for name, value in model.named_parameters()}
    subject = f"ZeroRedundancyOptimizer with AdamW, {words_of(view, _OPTIONS)}, on {rank.device}"
    wanted = sum(value.numel() for value in model.parameters())
    if int(total) != wanted:
        text = f"the ranks together keep the state of {int(total)} elements, expected {wanted}, each of them once"
        raise ReplicaMismatch(f"{subject}: {text}")
    assert_gradients_agree(got, expected, tolerance=adam_tolerance(expected, ADAM_RATE), rank=rank.index, what=subject)


def _with_gradients(training: ExactTraining, device: torch.device) -> nn.Module:
    model = training.model().to(device)
    inputs, factors = training.batches()[0]
    with full_precision():
        weighted(model(inputs.to(device)), factors.to(device)).backward()
    return model


def _groups(model: nn.Module, rate: float = ADAM_RATE, decay: float = _DECAY) -> list[dict[str, Any]]:
    biases = [value for name, value in model.named_parameters() if name.endswith("bias")]
    weights = [value for name, value in model.named_parameters() if not name.endswith("bias")]
    return [{"params": weights}, {"params": biases, "lr": rate / 4, "weight_decay": decay}]
