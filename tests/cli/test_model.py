"""`mgpu-check model`: the table, the report, the golden table, the exit codes, and refused arguments."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from mgpu_check.__main__ import main
from mgpu_check.plugin.report.replay import CommandLine
from mgpu_check.settings import resolve
from tests.models.test_examination import report, way

NETS = Path(__file__).parents[1] / "models" / "nets.py"


WRONG = {"tp-layers": "differs"}  # tests of the examination find it on each day


@pytest.mark.parametrize("wrong", [{}, pytest.param(WRONG, marks=pytest.mark.slow)], ids=["right", "wrong"])
def test_the_table_says_what_is_equal_what_differs_and_what_has_changed(command, tmp_path, wrong):
    expected = {"ddp": "equal", **wrong, "hsdp": "not applicable"}
    report(*map(way, ("ddp", *wrong))).write(str(tmp_path / "golden.json"))
    options = (f"--ways={','.join(expected)}", "--report=model.json", "--golden=golden.json", "-k", "not options")
    text = command("model", f"{NETS}:Tied", "--gpus=2", "--simulate", *options, code=1)
    assert "Tied, 273 parameters, on 2 SIMULATED GPUs\n  batch: tokens [n, 8] of integers below 16" in text
    assert f"trains as on one device under ddp{'; differs under tp-layers' if wrong else ''}" in text
    assert (f" model {NETS}:Tied --gpus=2 --simulate" in text) == bool(wrong)  # the line that repeats a failure
    changed = [line for line in text.splitlines() if line.startswith("since golden.json: CHANGED: ")]
    assert [line.split()[3] for line in changed] == [f"{name}:" for name in (*wrong, "hsdp")]
    table = json.loads((tmp_path / "model.json").read_text())
    statuses = {result["way"]: result["status"] for result in table["results"]}
    assert statuses == expected
    assert table["exit_code"] == (1 if wrong else 0)


@pytest.mark.slow
def test_functions_beside_the_model_give_batch_and_loss(command, tmp_path):
    functions = (
        "def batch(n):\n    return torch.randint(16, (n, 3)), torch.randint(16, (n, 3))\n\n"
        "def loss(output, target):\n    return F.cross_entropy(output.flatten(0, 1), target.flatten())\n"
    )
    (tmp_path / "train.py").write_text(f"{NETS.read_text()}\n\n{functions}")
    text = command("model", "train:Net", "--gpus=2", "--simulate", "--ways=ddp", "--time=15s", "--report=model.md")
    assert "  batch: train:batch(n)\n  loss: train:loss\n" in text
    assert "| ddp | 2 | equal | equal | equal |" in (tmp_path / "model.md").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the first argument is the model, such as transformers:Qwen3ForCausalLM"),
        (["train:Net", "--simulate"], "--simulate needs the number of GPUs"),
    ],
)
def test_wrong_arguments_are_refused(capsys, arguments, message):
    assert main(["model", *arguments]) == 4
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("model_ways", "ddp,sp", "--ways: 'ddp,sp' is not valid; 'sp' is no way"),
        ("model_golden", "a.md", "--golden: 'a.md' is not valid; choose a file"),
        ("model_report", "no/a.md", "--report: 'no/a.md' is not valid; there is no directory no"),
    ],
)
def test_wrong_values_are_refused_by_the_name_that_was_typed(option, value, message):
    typed = CommandLine(("model", "train:Net"), (), "--model-").origin_of
    with pytest.raises(ValueError, match=re.escape(message)):
        resolve({"gpus": "2", "simulate": "cpu", option: value}, {}, {}, typed)


@pytest.mark.slow  # beside the table, of which the same hooks of pytest decide the exit code
@pytest.mark.parametrize(("test", "code", "counts"), [("right", 2, "1 passed, 2 skipped"), ("wrong", 1, "1 failed")])
def test_the_ways_run_beside_the_tests_of_the_user(command, tmp_path, test, code, counts):
    (tmp_path / "test_own.py").write_text("def test_right(): pass\n\ndef test_wrong(): assert False\n")
    options = [f"--model-target={NETS}:Net", "--model-ways=hsdp", "-c", "/dev/null", f"test_own.py::test_{test}"]
    text = command("--gpus=2", "--simulate", "--rootdir=.", *options, code=code, program="pytest")
    assert counts in text
    assert "no way to train applies" in text
