"""Objects of scripts: replaced attributes, tensors that wrap others, and values that cannot be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.compare.conftest import script

CLIENTS = Path(__file__).parents[2] / "benchmarks" / "clients" / "programs"
SIMULATED = ("--gpus=2", "--simulate")
UNREADABLE = (
    ("from torch import nn\n", "from torch import nn\nfrom torch.testing._internal.two_tensor import TwoTensor\n"),
    ("optimizer = ", "net.two = nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2)))\noptimizer = "),
    ("y[part])\n", "y[part]) + net.two.square().sum().a\n"),
    ("in net.parameters():", "in [*net.parameters()][1:]:"),
    ("    nn.utils.clip_grad_norm_(net.parameters(), 0.5)\n", ""),
)


@pytest.mark.slow  # beside the modules and tensors of `tests/torch_hooks/test_values.py`
def test_replaced_and_overridden_attributes_are_not_called(compare):
    outcome = compare(script("shadowed"), *SIMULATED, "--steps=2", code=0)
    assert "equal: 2 steps on 2 ranks train the same 7 parameters" in outcome.text


@pytest.mark.slow
def test_outputs_that_are_pending_collectives(compare):
    text = (CLIENTS / "parallelized.py").read_text()
    outcome = compare(text, *SIMULATED, "--steps=2", code=0, arguments=["--how=tensor"])
    assert "equal: 2 steps on 2 ranks train the same 4 parameters" in outcome.text


def test_values_in_an_unknown_wrapper_are_listed(compare, by_hand, changed):
    outcome = compare(changed(by_hand, *UNREADABLE), "--gpus=2", code=2)
    assert outcome.json["verdict"] == "undecided"
    kind = "compare cannot read the values of its type TwoTensor"
    assert outcome.json["not_compared"] == {"two": kind}


def test_an_error_of_the_recorder_is_not_one_of_the_script(compare, by_hand, python, tmp_path):
    broken = "import mgpu_check.compare.in_script.models as models\nmodels.has_state = None\n"
    tmp_path.joinpath("train.py").write_text(broken + by_hand)
    code, _, stderr = python("-m", "mgpu_check", "compare", "--gpus=2", "--", "train.py", processes=5)
    assert code == 3
    assert "could not record the script in the run “one device”: TypeError: 'NoneType' object is not callable" in (
        stderr.decode()
    )
    assert "the script is not at fault" in stderr.decode()
