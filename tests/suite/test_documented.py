"""The references of optimizers and learning rates: each class of torch has one.

The tests fail with a version of torch that has another class, as a reminder to give it a reference.
"""

from __future__ import annotations

import torch
from torch.optim import Optimizer, lr_scheduler

from mgpu_check.suite.common.documented_steps import STEPS
from mgpu_check.suite.devices.operators import learning_rates
from mgpu_check.suite.devices.operators.optimizer_kinds import KIND_OF, KINDS

_WITHOUT_REFERENCE = {torch.optim.SparseAdam}  # its gradients are sparse, which the simulated node lacks
_PARTS = {"SequentialLR", "ChainedScheduler"}  # made by functions


def _classes(module, base):
    found = {one for one in vars(module).values() if isinstance(one, type) and issubclass(one, base)}
    return found - {base}


def test_each_optimizer_of_torch_has_documented_steps():
    assert _classes(torch.optim, Optimizer) - _WITHOUT_REFERENCE == set(KIND_OF)
    assert set(KIND_OF) - set(STEPS) == {torch.optim.LBFGS}


def test_the_first_value_of_each_option_is_the_default_of_torch():
    for kind in KINDS:
        if kind.make is not torch.optim.LBFGS:  # its test draws few iterations
            made = kind.make([torch.zeros(2, 2)])
            assert {name: made.defaults[name] for name in kind.values} == kind.defaults, kind.name


def test_each_scheduler_of_torch_has_a_closed_form():
    known = {one.make.__name__ for one in learning_rates._SCHEDULERS} | _PARTS
    classes = {one.__name__ for one in _classes(lr_scheduler, lr_scheduler.LRScheduler)}
    assert {name for name in classes if not name.startswith("_")} <= known
