"""Record the batches, calls and draws of a rank, or give one device those of all ranks, joined along the samples.

The ranks write tapes, and a later run on one device replays them: `install` starts either in the script's process. A
batch is replayed where a DataLoader gives it; else at the outermost module or loss that gets it. The initial parameters
and buffers are those of rank 0, and so are the learning rates.
"""

from __future__ import annotations

import contextlib
import importlib
import operator
import os
import random
import sys
import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data import DataLoader
from torch.utils.data import dataloader as loaders

from mgpu_check.compare.replay_giving import RankReplaying
from mgpu_check.compare.replay_points import Points, RecordedScript
from mgpu_check.compare.replay_recording import RankRecording
from mgpu_check.compare.tape import STEPS, Tape, Tapes
from mgpu_check.torch_hooks.patches import Patches

_LOSSES = (
    *("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits", "soft_margin_loss", "cosine_embedding_loss"),
)
"""Functions that may get targets outside of all modules."""
_OTHER_SEED = 20260101


def install(recorder: RecordedScript, steps: int | None, rank: int, tape: int | None, replay: int | None) -> None:
    """Record to the file `tape`, or replay the file `replay`, for the first steps."""
    until = steps or STEPS
    made: Points
    if tape is not None:
        made = RankRecording(recorder, until, rank, Tape(tape))
        recorder.finish = made.finish
    else:
        assert replay is not None
        tapes = Tapes(replay)
        made = RankReplaying(recorder, until, tapes)
    patches = Patches(among="torch")
    patches.set(nn.Module, "__call__", made.around_call(nn.Module.__call__))
    for name in _LOSSES:
        original = getattr(nn.functional, name)
        patches.replace(original, made.around_loss(original))
    attention = nn.functional.scaled_dot_product_attention
    patches.replace(attention, made.around_attention(attention))
    patches.set(DataLoader, "__iter__", made.around_iter(DataLoader.__iter__))
    patches.set(DataLoader, "__len__", made.around_len(DataLoader.__len__))
    base = loaders._BaseDataLoaderIter
    patches.set(base, "__next__", made.around_next(base.__next__))
    patches.apply()
    patches.wrap(torch.optim.Optimizer, "__init__", made.around_optimizer)
    patches.wrap(torch.autograd.Function, "apply", made.around_apply)
    patches.wrap(torch.autograd, "grad", made.around_backward)
    patches.wrap(torch.autograd, "backward", made.around_backward)
    patches.wrap(torch.Tensor, "register_hook", made.around_hook)
    patches.wrap(torch.Tensor, "numpy", made.around_numpy)
    if replay is not None and tapes.other_seeds:
        _seed_otherwise()
    for name in ("enter", "leave", "before_step", "after_step"):
        patches.set(recorder, name, made.unfollowed(getattr(recorder, name)))
    register_optimizer_step_pre_hook(made.step_begins)
    register_optimizer_step_post_hook(made.after_step)
    made.draws.__enter__()
    os.register_at_fork(after_in_child=made.leave)


def _seed_otherwise() -> None:
    """Change the seeds that the script sets: numbers that are replayed do not depend on them."""
    patches = Patches()
    for function in {torch.manual_seed, torch.random.manual_seed}:
        patches.replace(function, with_other_seeds(function))
    patches.apply()
    with contextlib.suppress(ImportError):
        importlib.import_module("numpy.random")
    for module in filter(None, (random, sys.modules.get("numpy.random"))):
        patches.wrap(module, "seed", with_other_seeds)
        module.seed(0)
    torch.manual_seed(0)


def with_other_seeds(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that sets another seed than it is given; None, a seed of the system, stays."""

    def other(value: Any) -> Any:
        if value is None:
            return None
        try:
            number = operator.index(value)  # also of NumPy
        except TypeError:  # a text, or several numbers
            number = zlib.crc32(repr(value).encode())
        return (number + _OTHER_SEED) % 2**32

    def seed(*args: Any, **kwargs: Any) -> Any:
        others = {name: other(value) if name in ("seed", "a") else value for name, value in kwargs.items()}
        return original(*map(other, args[:1]), *args[1:], **others)

    return seed
