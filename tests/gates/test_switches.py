"""Options of training, switched in this process: what each changes, and that it is put back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mgpu_check.gates.run.switches import AXES, Switch, switched
from tests.gates.agreed import Dropped, Mlp, OtherIfCompiled


@contextlib.contextmanager
def counted(axis: str, on: bool | None, model: nn.Module) -> Iterator[list[int]]:
    counts: list[int] = []
    with switched(Switch(axis, on), {"": model}, torch.device("cpu"), lambda: counts.append(1)):
        yield counts


def trained(model: nn.Module) -> torch.Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    out: torch.Tensor = model(torch.ones(2, 8))
    out.sum().backward()
    optimizer.step()
    return out.detach()


def test_no_switch_changes_nothing():
    with switched(None, {}, torch.device("cpu"), lambda: pytest.fail("has an effect")):
        trained(Mlp())


def test_compiled():
    torch.manual_seed(0)
    model = OtherIfCompiled()
    plain = model(torch.ones(2, 8)).detach()
    with counted("compiled", None, model) as uses:
        model(torch.ones(2, 8))
    with counted("compiled", True, model) as effects:
        assert not torch.equal(model(torch.ones(2, 8)), plain)
    assert not uses and effects
    with counted("compiled", None, model) as uses:
        model(torch.ones(2, 8))  # it stays compiled, as if its code compiled it
    with counted("compiled", False, model):
        assert torch.equal(model(torch.ones(2, 8)), plain)
    assert uses


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed(reentrant):
    calls: list[int] = []

    def forward(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x.sin()

    def step() -> None:
        calls.clear()
        x = torch.ones(2, requires_grad=True)
        checkpoint(forward, x, use_reentrant=reentrant).sum().backward()

    with counted("checkpointed", None, Mlp()) as uses:
        step()
    assert len(uses) == 1 and len(calls) == 2
    with counted("checkpointed", False, Mlp()) as effects:
        step()
    assert len(effects) == 1 and len(calls) == 1
    step()
    assert len(calls) == 2


def test_checkpointed_blocks():
    model = nn.Sequential(nn.ModuleDict({"block": nn.Linear(8, 8)})["block"], nn.Dropout(0.0))
    with counted("checkpointed", True, model) as effects:
        trained(model)
        with torch.no_grad():
            model(torch.ones(2, 8))
    assert len(effects) == 2
    with counted("checkpointed", None, Mlp()) as uses:
        trained(Dropped())
    assert len(uses) == 1


def test_bfloat16():
    model = Mlp()
    with counted("bfloat16", True, model) as effects:
        assert trained(model).dtype == torch.bfloat16
        with pytest.raises(RuntimeError):
            model(torch.ones(3))
        assert not torch.is_autocast_enabled("cpu")
    with counted("bfloat16", None, model) as uses, torch.autocast("cpu", torch.bfloat16):
        assert model(torch.ones(2, 8)).dtype == torch.bfloat16
    with counted("bfloat16", False, model) as off, torch.autocast("cpu", torch.bfloat16):
        assert model(torch.ones(2, 8)).dtype == torch.float32
    with counted("bfloat16", None, model) as none, torch.autocast("cpu", enabled=False):
        model(torch.ones(2, 8))
    assert (len(effects), len(uses), len(off), len(none)) == (2, 1, 1, 0)
    assert model(torch.ones(2, 8)).dtype == torch.float32


class Derived(torch.optim.AdamW):
    pass


@pytest.mark.parametrize("option", ["fused", "foreach"])
@pytest.mark.parametrize("kind", [torch.optim.SGD, Derived])
def test_options_of_optimizers(option, kind):
    other = {"fused": "foreach", "foreach": "fused"}[option]
    with counted(option, True, Mlp()) as effects:
        made = kind(Mlp().parameters(), lr=0.1, **{other: True})
        assert made.param_groups[0][option] and not made.param_groups[0][other]
    with counted(option, None, Mlp()) as uses:
        kind(Mlp().parameters(), lr=0.1)
        kind(Mlp().parameters(), lr=0.1, **{option: True})
    with counted(option, False, Mlp()) as off:
        assert not kind(Mlp().parameters(), lr=0.1, **{option: True}).param_groups[0][option]
    assert min(map(len, (effects, uses, off))) > 0
    assert not kind(Mlp().parameters(), lr=0.1).param_groups[0][option]


def test_each_axis_says_what_it_does():
    assert all(axis.on and axis.off and axis.needs for axis in AXES.values())
