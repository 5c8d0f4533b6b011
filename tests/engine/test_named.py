"""Objects that are pickled by name (torch's modules of a class of their own, operators, switches), and functions that
ranks call by name, which are imported there and nowhere else."""

from __future__ import annotations

import pickle
import sys
import types

import cloudpickle
import pytest
import torch
import torch.distributed as dist
import torch.distributed.algorithms.model_averaging.averagers
import torch.nn.attention
from torch.backends import cudnn
from torch.backends.cuda import matmul
from torch.nn.attention import SDPBackend

from mgpu_check.processes import pickling
from mgpu_check.processes.pickling import dumps, loads

aten = torch.ops.aten
ONE_PER_PROCESS = {
    "torch.backends.cudnn": cudnn,
    "a switch": matmul,
    "torch.ops": torch.ops,
    "a namespace": aten,
    "an operator": aten.add,
    "an overload": aten.add.Tensor,
    "the overload without a name": aten.relu.default,
    "of c10d": torch.ops.c10d.allreduce_,
    "of higher order": torch.ops.higher_order.cond,
    "torch.classes": torch.classes,
    "a namespace of classes": torch.classes.prim,
    "functions below a module": torch._C._functions,
    "a namespace of functions": torch._C._VariableFunctions,
    "a dtype": torch.float32,
    "a layout": torch.strided,
    "a generator": torch.default_generator,
    "plans": torch.backends.cuda.cufft_plan_cache,
    "a class elsewhere": SDPBackend,
    "an operation": dist.ReduceOp.SUM,
}


@pytest.mark.parametrize("what", ONE_PER_PROCESS)
def test_what_is_there_once_is_found_again(what):
    value = ONE_PER_PROCESS[what]
    assert pickle.loads(dumps(value)) is value or value == pickle.loads(dumps(value))
    assert len(dumps(value)) < 300, "it went as a copy of what it holds"


def test_every_module_of_a_class_of_its_own():
    own = {
        name: module
        for name, module in sys.modules.items()
        if isinstance(module, types.ModuleType) and type(module) is not types.ModuleType and name.startswith("torch")
    }
    assert len(own) > 5
    assert [name for name, module in own.items() if loads(dumps(module)) is not module] == []


def test_members_and_limits_of_dtypes_are_equal():
    assert loads(dumps(SDPBackend.MATH)) == SDPBackend.MATH
    assert loads(dumps(torch.finfo(torch.bfloat16))).max == torch.finfo(torch.bfloat16).max
    assert loads(dumps(torch.iinfo(torch.int8))).max == 127


def test_a_generator_of_ones_own_is_a_value():
    mine = torch.Generator().manual_seed(3)
    found = loads(dumps(mine))
    assert found is not torch.default_generator
    assert torch.equal(found.get_state(), mine.get_state())


def test_a_module_is_found_only_where_it_has_its_name():
    class Lazy(types.ModuleType):
        pass

    lazy = Lazy("not_imported_anywhere")
    with pytest.raises(TypeError, match="cannot pickle 'Lazy' object"):
        dumps(lazy)
    sys.modules["not_imported_anywhere"] = lazy
    try:
        assert loads(dumps(lazy)) is lazy
    finally:
        del sys.modules["not_imported_anywhere"]


def a_submodule():
    return torch.nn.attention.SDPBackend.MATH


def submodules_deep_down():
    return torch.distributed.algorithms.model_averaging.averagers, torch.nn.functional.relu, dist.nn, cudnn.benchmark  # type: ignore[attr-defined]


def none_of_them():
    return torch.ones(1), dist.get_rank, sys.version


@pytest.mark.parametrize("function", [a_submodule, submodules_deep_down, none_of_them])
def test_the_submodules_that_a_function_names_are_those_that_cloudpickle_finds(function):
    """They are found by looking names up, and not by reading through all modules."""
    theirs = cloudpickle.cloudpickle._find_imported_submodules
    arguments = function.__code__, [torch, dist, cudnn, sys]
    assert set(pickling._find_imported_submodules(*arguments)) == set(theirs(*arguments))
    assert cloudpickle.loads(dumps(function)).__name__ == function.__name__
    assert cloudpickle.cloudpickle._find_imported_submodules is theirs  # others of this process have their own


NAMED = "mgpu_check.suite.collectives.calls"


def test_ranks_import_the_function_and_it_gets_its_rank(ranks, tmp_path, monkeypatch):
    tmp_path.joinpath("only_on_ranks.py").write_text(
        "def last(a, rank, *, b=0):\n    return a, rank.index, b\n"
        "def given(rank, a):\n    return rank, a\n"
        "def keyword(*, rank):\n    return rank.index\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert ranks.run("only_on_ranks:last", 5, b=7, size=2) == [(5, 0, 7), (5, 1, 7)]
    assert [rank.index for rank, a in ranks.run("only_on_ranks:given", 1, size=3)] == [0, 1, 2]
    assert ranks.run("only_on_ranks:given", rank="mine", a=2, size=1) == [("mine", 2)]
    assert ranks.run("only_on_ranks:keyword", size=2) == [0, 1]
    assert "only_on_ranks" not in sys.modules


def test_an_error_in_it_is_an_error_of_its_rank(ranks):
    with pytest.raises(Exception, match="no attribute 'missing'"):
        ranks.run(f"{NAMED}:missing", size=1)


@pytest.mark.parametrize("text", ["module", "module.function", "a b:c", ""])
def test_a_text_that_names_no_function_is_refused(ranks, text):
    with pytest.raises(ValueError, match=rf"fn='{text}' is no function; give a function, or its name such as"):
        ranks.run(text)
