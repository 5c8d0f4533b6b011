"""Find what a step leaves on the CPU: try it again with the model or the batch on the device of the rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from mgpu_check.engine.failures import Account
from mgpu_check.engine.rank_side.rank import Rank
from mgpu_check.errors import RankDied, RankFailure, RankHang
from mgpu_check.gates.program import bound, modules_of
from mgpu_check.torch_hooks.nested import tensors_of, with_tensors

_BOTH = ("model", "batch")
_SENTENCES = {
    ("batch",): "the batch arrives on the CPU: move it to rank.device",
    ("model",): "the model arrives on the CPU: move it to rank.device",
    _BOTH: "model and batch arrive on the CPU: move both to rank.device",
}
_OF_EVALUATION = "the batch of evaluate arrives on the CPU: move it to the device of the model"


def left_on_cpu(program: Any, error: BaseException, run: Callable[[Any], object]) -> str:
    """Return a sentence about what a failed step leaves on the CPU; "" if it also fails with that moved.

    Args:
        program: a dataclass with the step as a field.
        error: the failure. Only code that raised may have missed a device; a hang would cost another time limit.
        run: runs a program on ranks.
    """
    account = getattr(error, "account", None)
    if not (isinstance(account, Account) and account.raised):
        return ""

    def fails(**changes: Any) -> bool:
        try:
            run(replace(program, **changes))
        except RankDied:
            raise
        except RankFailure:
            return True
        return False

    try:
        evaluate = getattr(program, "evaluate", None)
        if not fails(step=_MovedStep(program.step, _BOTH)):
            single = (moved for moved in _SENTENCES if moved != _BOTH)
            moved = next((moved for moved in single if not fails(step=_MovedStep(program.step, moved))), _BOTH)
            sentence = _SENTENCES[moved]
        elif evaluate is not None and not fails(evaluate=_MovedEvaluation(evaluate)):
            sentence = _OF_EVALUATION
        else:
            return ""
        return sentence if fails() else ""  # the failure may not repeat
    except (RankDied, RankHang):
        return ""


@dataclass
class _MovedStep:
    step: Callable[..., Any]
    moved: tuple[str, ...]

    def __call__(self, model: Any, batch: Any, rank: Rank) -> Any:
        if "model" in self.moved:
            for module in modules_of(model).values():
                module.to(rank.device)
        if "call" not in vars(self):
            self.call = bound(self.step, model, rank)
        return self.call(_moved(batch, rank.device) if "batch" in self.moved else batch)


@dataclass(frozen=True)
class _MovedEvaluation:
    evaluate: Callable[[Any, Any], Any]

    def __call__(self, model: torch.nn.Module, batch: Any) -> Any:
        return self.evaluate(model, _moved(batch, next(model.parameters()).device))


def _moved(batch: Any, device: torch.device) -> Any:
    return with_tensors(batch, [tensor.to(device) for tensor in tensors_of(batch)])
