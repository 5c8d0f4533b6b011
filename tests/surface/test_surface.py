"""The surface of torch: what it lists, how it sorts values, and that nothing new of torch goes undrawn unnoticed."""

from __future__ import annotations

import enum
import functools
import inspect
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch.nn.parallel import comm
from torch.utils.data.distributed import DistributedSampler

from tests.surface import names, report
from tests.surface.demands import Variant, demanded, values_of
from tests.surface.names import SurfaceParameter, entries
from tests.surface.reasons import LEFT_OUT
from tests.surface.recorder import bound, classes_of, recording, written_to
from tests.surface.report import RECORD, SurfaceRecord, judged


@functools.cache
def recorded() -> SurfaceRecord:
    return SurfaceRecord.read(RECORD)


def version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


def test_nothing_of_the_installed_torch_is_undrawn():
    """A new function or option of torch must be drawn by a check, or left out with a reason.

    The record is of one run at the level standard. To draw more: `python -m tests.surface`.
    """
    if version(names.tagged()) < version(recorded().torch):
        pytest.skip(f"the record is of torch {recorded().torch}, which has other options")
    undrawn = [str(one.variant) for one in judged(recorded()) if one.state == "undrawn"]
    assert undrawn == []


def variants_of_this_torch() -> set[Variant]:
    if version(names.tagged()) != version(recorded().torch):
        pytest.skip(f"the record is of torch {recorded().torch}")
    return {variant for variants in demanded() for variant in variants}


def test_each_reason_is_about_something_that_is_not_drawn():
    left = {variant for variant in variants_of_this_torch() if not recorded().has(variant)}
    idle = [row for row in LEFT_OUT if not any(row.covers(variant) for variant in left)]
    assert idle == []


def test_a_new_function_and_a_new_option_of_torch_are_undrawn(monkeypatch):
    def frobnicate(tensor, *, fast: bool = False):
        return tensor

    frobnicate.__module__ = "torch.nn.parallel.comm"
    monkeypatch.setattr(comm, "frobnicate", frobnicate, raising=False)
    path = "torch.nn.parallel.comm.frobnicate"

    def undrawn(record: SurfaceRecord) -> set[Variant]:
        return {one.variant for one in judged(record) if one.variant.path == path and one.state == "undrawn"}

    assert undrawn(SurfaceRecord()) == {Variant(path, "", "called")}
    record = SurfaceRecord()
    record.add([(path, "", "called"), (path, "fast", "False")])
    assert undrawn(record) == {Variant(path, "fast", "True")}


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


def parameters(function) -> dict[str, SurfaceParameter]:
    return {p.name: p for p in names._parameters(function)}


def test_options_are_asked_for_by_their_types():
    def function(x, flag=False, maybe: bool | None = None, colour=Colour.RED, scale=1.0):
        pass

    found = {name: set(values_of(one)) for name, one in parameters(function).items()}
    assert found == {
        "x": set(),
        "flag": {"True", "False"},
        "maybe": {"True", "False", "None"},
        "colour": {"RED", "BLUE"},
        "scale": {"not the default"},
    }


def test_arguments_are_the_default_or_not_and_values_of_an_option():
    assert classes_of(SurfaceParameter("x", default=(0.9, 0.99)), (0.9, 0.99)) == {"default"}
    assert classes_of(SurfaceParameter("x", default=None), 0) == {"not the default"}
    assert classes_of(SurfaceParameter("x", default=1), True) == {"not the default"}
    assert classes_of(SurfaceParameter("x"), torch.ones(2)) == set()

    def function(flag=False, colour=Colour.RED, mode: Literal["sum", "mean"] = "sum"):
        pass

    of = parameters(function)
    assert classes_of(of["flag"], True) == {"not the default", "True"}
    assert classes_of(of["colour"], Colour.RED) == {"default", "RED"}
    assert classes_of(of["mode"], "mean") == {"not the default", "'mean'"}
    assert classes_of(of["mode"], "max") == {"not the default"}


def test_arguments_are_bound_to_parameters():
    def function(a, b=2, *more, c=3, **others):
        pass

    given = bound(names._parameters(function), (1, 5, 6), {"d": 4})
    assert [(p.name, value) for p, value in given] == [("a", 1), ("b", 5), ("more", 6), ("c", 3), ("d", 4)]
    assert [(p.name, value) for p, value in bound(names._parameters(function), (), {"a": 1})][:2] == [
        ("a", 1),
        ("b", 2),
    ]


def test_the_surface_has_functions_constructors_and_methods():
    found = {entry.path: entry for entry in entries()}
    assert found["torch.distributed.all_reduce"].kind == "function"
    assert found["torch.utils.data.distributed.DistributedSampler"].kind == "constructor"
    method = found["torch.utils.data.distributed.DistributedSampler.set_epoch"]
    assert [p.name for p in method.parameters] == ["epoch"]
    assert found["torch.distributed.all_gather_into_tensor"].deprecated or names.tagged() < "2.13"


def test_calls_are_recorded_under_each_name_and_written_once(tmp_path):
    module: Any = inspect.getmodule(test_calls_are_recorded_under_each_name_and_written_once)
    rows: Any = range(2)
    before = vars(comm)["scatter"], DistributedSampler.__init__
    module.early = comm.scatter  # as an import before the recording

    def recorded(name: str, rank: int) -> set[tuple[str, str, str]]:
        directory = Path(tmp_path, name)
        directory.mkdir()
        with recording(str(directory)):
            DistributedSampler(rows, 3, rank)
            with pytest.raises(Exception):  # noqa: B017  # there is no device
                module.early(torch.ones(3, 3), [1, 0])
        assert (vars(comm)["scatter"], DistributedSampler.__init__) == before
        return set(written_to(directory))

    calls = recorded("first", 1)
    DistributedSampler(rows, 3, 2)  # not within the context
    assert {
        ("torch.utils.data.distributed.DistributedSampler", "", "called"),
        ("torch.utils.data.distributed.DistributedSampler", "num_replicas", "not the default"),
        ("torch.utils.data.distributed.DistributedSampler", "shuffle", "True"),
        ("torch.nn.parallel.comm.scatter", "", "called"),
        ("torch.nn.parallel.comm.scatter", "devices", "not the default"),
    } <= calls
    assert recorded("second", 1) == set()


def test_a_file_that_a_killed_rank_has_not_finished_is_left_out(tmp_path):
    (tmp_path / "unfinished").write_text('[["torch.f", "", "cal')
    assert list(written_to(tmp_path)) == []


def test_a_record_is_read_as_it_was_written(tmp_path):
    record = SurfaceRecord("2.13.0")
    record.add([("torch.f", "", "called"), ("torch.f", "x", "True"), ("torch.g", "", "called")])
    record.write(tmp_path / "record.json")
    again = SurfaceRecord.read(tmp_path / "record.json")
    assert (again.drawn, again.torch) == (record.drawn, "2.13.0")
    (tmp_path / "record.json").write_text("[]")
    with pytest.raises(ValueError, match="it holds no record of a surface"):
        SurfaceRecord.read(tmp_path / "record.json")


def test_the_report_lists_what_is_undrawn(monkeypatch):
    path = "torch.distributed.broadcast"
    monkeypatch.setattr(report, "demanded", lambda: [(Variant(path, "", "called"), Variant(path, "async_op", "True"))])
    record = SurfaceRecord()
    assert report.report(record)[0].endswith(f"undrawn:\n  {path}")
    record.add([(path, "", "called")])
    text, undrawn = report.report(record)
    assert undrawn == 1 and text.endswith(f"undrawn:\n  {path}  async_op: True")
    record.add([(path, "async_op", "True")])
    assert report.report(record)[1] == 0
