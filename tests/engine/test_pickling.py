"""Functions that travel by value keep the names of their files, with every version of cloudpickle."""

from __future__ import annotations

import inspect
import types
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mgpu_check.errors import RankFailure
from mgpu_check.processes.pickling import Pickler, dumps, loads


@pytest.fixture(params=["as installed", "without names"])
def reducer(request, monkeypatch):
    """Let cloudpickle drop the names of files, as 3.1.3 does; or keep its behaviour."""
    kept = Pickler.dispatch_table

    def without_name(code: types.CodeType):
        return kept[types.CodeType](code.replace(co_filename="<dynamic-code>"))

    if request.param == "without names":
        monkeypatch.setattr(Pickler, "dispatch_table", kept.new_child({types.CodeType: without_name}))
    return request.param


def outer(start):
    class Counter:
        def step(self, by=1):
            return [start + by for _ in range(1)]

    return Counter, lambda: start


def codes(code):
    return [code, *(found for one in code.co_consts if isinstance(one, types.CodeType) for found in codes(one))]


def by_value(value, monkeypatch):
    monkeypatch.setattr(value, "__module__", "a_module_that_is_nowhere")
    return loads(dumps(value))


def test_code_keeps_its_file_and_lines(reducer, monkeypatch):
    sent = by_value(outer, monkeypatch)
    assert sent is not outer
    known = [(code.co_name, code.co_filename, list(code.co_positions())) for code in codes(outer.__code__)]
    assert [(code.co_name, code.co_filename, list(code.co_positions())) for code in codes(sent.__code__)] == known
    assert {name for _, name, _ in known} == {__file__}
    assert inspect.getsource(sent) == inspect.getsource(outer)
    # It may travel on: ranks send functions too.
    assert by_value(sent, monkeypatch).__code__ == outer.__code__


def test_code_keeps_a_name_that_is_no_file(reducer, monkeypatch):
    names: dict[str, Any] = {}
    exec(compile("def made(): pass", "<made>", "exec"), names)
    assert by_value(names["made"], monkeypatch).__code__.co_filename == "<made>"


def test_functions_that_ranks_spawn_keep_their_file(reducer):
    from mgpu_check.processes import rank_pickling

    elsewhere = outer(1)[1]
    reduced = rank_pickling._reduce(ForkingPickler, elsewhere)  # type: ignore[arg-type]  # it takes nothing of it
    made = reduced[0](*reduced[1])
    assert made is not elsewhere
    assert (made.__code__.co_filename, made()) == (__file__, 1)


def entered(rank):
    dist.all_reduce(torch.ones(1, dtype=[torch.int32, torch.float32][rank.index], device=rank.device))


def raised(rank):
    raise ValueError(f"rank {rank.index}")


@pytest.mark.usefixtures("this_module_by_value")
def test_an_error_in_ranks_ends_on_their_line(pool):
    with pytest.raises(RankFailure) as info:
        pool.run(raised, size=2)
    last = info.traceback[-1]
    lines, first = inspect.getsourcelines(raised)
    assert (str(last.path), last.lineno) == (__file__, first)
    assert str(last.statement).strip() == lines[1].strip()


@pytest.mark.usefixtures("this_module_by_value")
def test_the_record_of_collectives_names_file_and_line(pool):
    with pytest.raises(RankFailure, match=rf"test_pickling.py:{inspect.getsourcelines(entered)[1] + 1}\b"):
        pool.run(entered, size=2)
