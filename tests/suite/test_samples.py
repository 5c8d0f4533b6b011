"""Operators on the samples of torch's own tests: what is imported, tried, left out and compared, and how it is told."""

from __future__ import annotations

import re
import subprocess
import sys
import unittest
from collections.abc import Iterator

import hypothesis
import pytest
import torch

from mgpu_check.errors import DeviceMismatch
from mgpu_check.simulated import simulated_node
from mgpu_check.suite.common import error_bounds
from mgpu_check.suite.common.faults.registry import planted
from mgpu_check.suite.devices.samples import checks, rules, running, source
from mgpu_check.suite.devices.samples.checks import SampleCase, assert_samples_agree, difference_of
from tests.surface.classes import layout_of

Devices = list[torch.device]
PATTERNS = {
    name: patterns.split()
    for name, patterns in {
        "left out": " ".join(row.operators for row in rules.LEFT_OUT),
        "own layout": rules.OWN_LAYOUT,
        "undetermined": " ".join(rules.UNDETERMINED),
        "exact": rules.EXACT,
    }.items()
}


@pytest.fixture
def node() -> Iterator[Devices]:
    with simulated_node(4):
        yield [torch.device("cuda", index) for index in range(4)]


def only(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    some = {name: source.operators()[name] for name in names}
    monkeypatch.setattr(checks, "operators", lambda: some)


def test_the_import_changes_nothing_else():
    default = hypothesis.settings.default
    script = torch._C.ScriptFunction.__call__
    assert len(source.operators()) > 500
    torch.backends.cudnn.deterministic = torch.backends.cudnn.deterministic  # the tests of torch forbid it
    assert hypothesis.settings.default is default
    assert torch._C.ScriptFunction.__call__ is script
    assert getattr(sys.modules.get("expecttest"), "__file__", "") is not None


def test_the_table_is_not_imported_before_it_is_used():
    code = "import sys, mgpu_check.suite.devices.samples.checks; assert not [n for n in sys.modules if 'opinfo' in n]"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_without_the_table_the_check_is_skipped_for_a_reason(monkeypatch):
    monkeypatch.setattr(source, "_TABLE", "torch.testing.no_such_module")
    with pytest.raises(unittest.SkipTest, match=r"cannot be imported .*no_such_module.* no operator was tried"):
        source.operators.__wrapped__()


@pytest.mark.parametrize("table", PATTERNS)
def test_each_row_is_about_an_operator(table):
    names = source.operators()
    idle = [one for one in PATTERNS[table] if not any(rules.named(name, one) for name in names)]
    if torch.__version__ < "2.13":
        pytest.skip("this torch has fewer operators")
    assert idle == []


def test_an_operator_is_called_by_the_name_that_a_fault_replaces(monkeypatch):
    operator = source.operators()["acos"]
    assert operator.paths == ("torch.acos", "torch.arccos")
    monkeypatch.setattr(torch, "arccos", torch.cos)
    assert operator.call("torch.arccos") is torch.cos
    other = source.operators()["addmm.decomposed"]
    assert other.call(other.paths[0]) is other.info.op


def test_samples_have_the_same_elements_for_the_same_seed():
    operator = source.operators()["addcmul"]
    one, again, other = (operator.samples(torch.float64, seed, 3)[2] for seed in (1, 1, 2))
    assert torch.equal(one.input, again.input) and not torch.equal(one.input, other.input)
    assert one.input.requires_grad and not operator.samples(torch.float16, 1, 1)[0].input.requires_grad


@pytest.mark.parametrize(
    ("layout", "shape", "kind"),
    [
        ("", (3, 4), "contiguous"),
        ("transposed", (3, 4), "transposed"),
        ("with gaps", (3, 4), "strided"),
        ("with an offset", (3, 4), "contiguous"),
        ("channels_last", (2, 3, 4, 5), "channels_last"),
        ("channels_last", (3, 4), "transposed"),
        ("transposed", (4,), "contiguous"),
        ("with gaps", (), "contiguous"),
    ],
)
def test_layouts_keep_the_elements(layout, shape, kind):
    values = torch.randn(shape)
    laid = running._laid(values, layout)
    assert torch.equal(laid, values) and layout_of(laid) == kind
    assert bool(laid.storage_offset()) == (
        layout in ("with gaps", "with an offset") or (layout, shape) == ("transposed", (4,))
    )


def test_levels_choose_samples_for_each_device():
    def chosen(count, level, turn=1):
        return list(checks._chosen(count, rules.AMOUNTS[level], 4, turn))

    assert chosen(10, "quick") == [1]
    assert chosen(10, "standard") == [1, 3, 6, 8]
    assert chosen(2, "standard") == [1, 0, 1, 0]
    assert sorted(chosen(10, "long", 7)) == list(range(10))
    assert chosen(0, "long") == []


def test_different_seeds_try_all_operators_at_quick(node, monkeypatch):
    tried = []
    monkeypatch.setattr(checks._SampleTally, "add", lambda self, operator, *_: tried.append(operator.name))
    for seed in range(100, 116):
        assert_samples_agree(node, seed, "quick")
    assert set(tried) == {name for name, operator in source.operators().items() if operator.dtypes}


def test_a_sound_node_agrees_on_what_is_not_left_out(node, monkeypatch):
    only(monkeypatch, "cumprod", "linalg.qr", "rand_like", "view", "nn.functional.rrelu", "argsort")
    tried: list[SampleCase] = []
    run = checks._SampleTally._run

    def recorded(tally, case, *of):
        tried.append(case)
        run(tally, case, *of)

    monkeypatch.setattr(checks._SampleTally, "_run", recorded)
    assert 100 < assert_samples_agree(node, 3, "standard") < len(tried)
    assert len({case.operator for case in tried}) == 5
    assert {"float16", "complex64", "int64"} <= {case.dtype for case in tried}


FAULTS = {
    "gradient-of-cumulative-sums-halved": ("logcumsumexp", r"cuda:3 alone is wrong in torch.logcumsumexp of float\d\d.*"
                                           r": gradient 0: .*the other 3 agree with the CPU$"),
    "fraction-above-the-floor": ("frac", r"all 4 devices are wrong in torch.frac of bfloat16, [0-9x]+.* \(sample \d+\): \d"),
    "factor-of-outer-products-ignored": ("addr", r"all 4 devices are wrong in torch.addr of \w+, .*alpha=.*expected"),
    "transposed-matrix-misread": ("kron", r"all 4 devices are wrong in torch.kron of \w+, 5x5 (transposed|channels_last)"),
    "alias-with-exchanged-operands": ("atan2", r"all 4 devices are wrong in torch.arctan2 of"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_in_the_first_line_with_a_line_that_repeats_it(node, monkeypatch, fault):
    operator, line = FAULTS[fault]
    only(monkeypatch, operator)
    with planted(fault):
        with pytest.raises(DeviceMismatch) as caught:
            assert_samples_agree(node, 0, "standard")
        first, *_, last = str(caught.value).splitlines()
        assert last.startswith("to repeat it: python -c ")
        call = last.partition("print(")[2].rpartition(")")[0]
        again = eval(call, {"SampleCase": SampleCase, "difference_of": difference_of})
    assert again and again in first
    assert re.match(line, first)
    assert eval(call, {"SampleCase": SampleCase, "difference_of": difference_of}) == ""


def test_the_tolerance_is_that_of_rounding_and_no_more():
    """Inverses of matrices have the error that their condition allows."""
    for name, number in (("linalg.inv", 0), ("cumprod", 1), ("nn.functional.gelu", 0)):
        operator = source.operators()[name]
        call = operator.call(operator.paths[0])
        for dtype in (torch.float32, torch.float64):
            sample = operator.samples(dtype, 0, number + 1)[number]
            made, gradients = running.results(sample, call, torch.device("cpu"))
            bounds = running.allowed(sample, call, dtype, [*made, *gradients])
            for (reference, error), one in zip(bounds, [*made, *gradients], strict=True):
                assert bool((error_bounds._gaps(one, reference) <= error).all())
                assert float(error.max()) <= 1e5 * torch.finfo(dtype).eps * float(reference.abs().max())
