"""`mgpu-check selftest --surface`, as a user calls it."""

from __future__ import annotations

import json

import pytest

ONE = (
    "--gpus=2",
    "--simulate",
    "--gpu-level=quick",
    "test_mismatch.py",
    "-k",
    "test_data_parallel_wants_its_first_device",
)


def test_surface_lists_what_a_run_never_draws_and_continues_its_record(command, tmp_path):
    text = command("selftest", "--surface=record.json", *ONE, code=1)
    assert "1 passed" in text
    row = next(line for line in text.splitlines() if line.startswith("all  "))
    functions, called, variants, drawn, left_out, undrawn = map(int, row.split()[1:])
    assert functions > called > 0 and drawn + left_out + undrawn == variants
    assert undrawn > 0 and "\nundrawn:\n" in text
    record = tmp_path / "record.json"
    content = json.loads(record.read_text())
    assert content["drawn"]["torch.nn.parallel.DataParallel"][""] == ["called"]
    content["drawn"]["torch.distributed.frobnicate"] = {"": ["called"]}
    record.write_text(json.dumps(content))
    command("selftest", "--surface=record.json", *ONE, code=1)
    assert "torch.distributed.frobnicate" in json.loads(record.read_text())["drawn"]


def test_a_file_that_is_no_record_is_refused(command, tmp_path):
    (tmp_path / "notes.txt").write_text("my notes")
    text = command("selftest", "--surface=notes.txt", *ONE, code=4)
    assert "--surface=notes.txt: it holds no record of a surface" in text
    assert (tmp_path / "notes.txt").read_text() == "my notes"


@pytest.mark.parametrize(("words", "why"), [(("-n", "2"), "leave out -n"), (("--quick",), "leave out --quick")])
def test_what_does_not_fit_is_refused(command, words, why):
    assert why in command("selftest", "--surface", *words, *ONE, code=4)
