"""`mgpu-check compare` as a gate: scripts are compared unchanged, or refused with all reasons."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from mgpu_check.compare import processes
from mgpu_check.compare.processes import fitted, fresh_directory
from tests.compare.conftest import script

WITH_A_SNAPSHOT = script("with_a_snapshot")


@pytest.mark.slow
def test_a_script_that_saves_and_divides_its_batch(compare, tmp_path):
    tmp_path.joinpath("out").mkdir()
    outcome = compare(WITH_A_SNAPSHOT, "--fresh-directory", code=0, arguments=["--batch={8/W}", "0.0"])
    assert outcome.json["headline"].startswith("equal: 3 steps on 2 ranks train the same 4 parameters")
    assert list(tmp_path.joinpath("out").iterdir()) == []


@pytest.mark.slow
def test_all_that_stands_in_the_way_is_said_at_once(compare, tmp_path):
    tmp_path.joinpath("out").mkdir()
    script = WITH_A_SNAPSHOT.replace("torch.manual_seed(0)\n", "torch.default_generator.manual_seed(0)\n")
    outcome = compare(script, code=2, arguments=["--batch=8", "0.1"])
    assert "the run “2 ranks” has loaded" in outcome.json["headline"]
    assert len(outcome.json["runs"]) == 2
    for words in (
        "--fresh-directory",
        "also: Dropout(p=0.1) drops different elements on ranks than on one device",
        "also: torch.manual_seed was never called on one device",
        "also: each rank has a batch as large as that of one device (8)",
        "--batch-size={8/W}",
    ):
        assert any(words in remark for remark in outcome.json["remarks"]), words


@pytest.mark.slow
def test_data_parallel_in_one_process(compare):
    outcome = compare(script("data_parallel"), "--simulate", code=0, more=1)
    assert "equal: 2 steps on 2 GPUs of one process train the same 4 parameters" in outcome.text
    assert [run["label"] for run in outcome.json["runs"]][1:3] == ["2 ranks", "one process with 2 GPUs"]


def test_a_script_that_leaves_with_a_message(compare):
    """And one that starts its ranks itself, and would wait for them for the whole timeout."""
    outcome = compare("import torch\nprint('two GPUs, please')\nraise SystemExit\n", code=2)
    assert "no optimizer step was seen on one device" in outcome.json["headline"]
    assert "  two GPUs, please" in outcome.json["remarks"]
    outcome = compare(
        """
        import torch, torch.multiprocessing as mp
        def rank(i): raise AssertionError
        if __name__ == "__main__": mp.spawn(rank, nprocs=2)
        """,
        code=2,
    )
    assert "the script starts its ranks itself, 2 on 1 device in the run “one device”" in outcome.json["headline"]
    assert "cuda:{R} for a word for each rank" in outcome.text


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fork", *(way for way in ("spawn", "subprocess"))])
def test_a_script_that_starts_its_ranks_itself(compare, way):
    """The run on one device shows that it does, so that it runs once for several devices."""
    outcome = compare(script("own_launcher"), code=0, arguments=[way, "{W}"])
    assert "2 ranks, which the script starts: 2 optimizer steps" in outcome.text
    assert len(outcome.json["runs"]) == 2, "rounding cannot explain less than nothing"
    outcome = compare(script("own_launcher"), code=1, arguments=[way, "{W}", "summed"])
    assert "world-size-factor" in outcome.text and "at step 1" in outcome.text


@pytest.mark.parametrize(
    ("word", "world", "value"),
    [
        ("--batch-size={64/W}", 4, "--batch-size=16"),
        ("{W}", 3, "3"),
        ("lr={0.1*W}", 3, "lr=0.3"),
        ("{64//W}-{(W+1)*2}", 3, "21-8"),
        ('{"a": 1}', 2, '{"a": 1}'),
        ('{"W": 1}', 2, '{"W": 1}'),
        ("{}", 2, "{}"),
        ("{x}", 2, "{x}"),
        ("cuda:{R}", 2, "cuda:0 cuda:1"),
        ("--ids={R,}", 3, "--ids=0,1,2"),
    ],
)
def test_arguments_by_world_size(word, world, value):
    assert " ".join(fitted([word], world)) == value


def test_a_directory_of_its_own(tmp_path, monkeypatch):
    tmp_path = tmp_path / "own"
    tmp_path.mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("src", "data", ".git", "env"):
        tmp_path.joinpath(name).mkdir()
    (tmp_path / "src" / "small.py").write_text("old")
    (tmp_path / "env" / "pyvenv.cfg").touch()
    (tmp_path / "large.bin").write_bytes(b"0" * (2**20 + 1))
    (tmp_path / "link").symlink_to("src/small.py")
    for number in range(1001):
        (tmp_path / "data" / str(number)).touch()
    with fresh_directory() as made:
        assert sorted(os.listdir(made)) == sorted(os.listdir(tmp_path))
        (made / "src" / "small.py").write_text("new")
        (made / "src" / "other.py").touch()
        assert {p.name for p in made.iterdir() if p.is_symlink()} == {".git", "data", "env", "large.bin", "link"}
        assert (made / "large.bin").stat().st_size == 2**20 + 1 and (made / "link").read_text() == "old"
    assert not made.exists() and not made.parent.exists()
    assert os.listdir(tmp_path / "src") == ["small.py"] and (tmp_path / "src" / "small.py").read_text() == "old"
    assert len(os.listdir(tmp_path / "data")) == 1001


def test_what_is_beside_a_directory_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "own").mkdir()
    (tmp_path / ".hidden").mkdir()
    beside = tmp_path / "beside"
    (beside / "deep").mkdir(parents=True)
    (tmp_path / "old").write_text("old")
    (beside / "old").write_text("old")
    (beside / "large").write_bytes(b"0" * (2**20 + 1))
    (tmp_path / "to_file").symlink_to(beside / "old")
    (tmp_path / "to_nothing").symlink_to("nowhere")
    monkeypatch.chdir(tmp_path)
    with fresh_directory(Path("own")) as made:
        copy = made / ".." / "beside"
        assert sorted(os.listdir(made.parent)) == ["beside", "old", "own", "to_file", "to_nothing"]
        assert {path.name for path in copy.iterdir() if path.is_symlink()} == {"deep", "large"}
        assert (copy / "large").stat().st_size == 2**20 + 1 and (made / ".." / "to_file").read_text() == "old"
        for path in (copy / "new", copy / "old", made / ".." / "old"):
            path.write_text("new")
    assert not (beside / "new").exists() and (beside / "old").read_text() == (tmp_path / "old").read_text() == "old"
    monkeypatch.setattr(processes, "_BESIDE_COPIED", 5)
    with fresh_directory(tmp_path / "own") as made:  # the second of two files of three bytes is linked
        assert [(made.parent / name).is_symlink() for name in ("beside/old", "old")] == [False, True]
    monkeypatch.setattr(processes, "_BESIDE_ENTRIES", 2)
    with fresh_directory(tmp_path / "own") as made:
        assert (made.parent / "beside").is_symlink()
    monkeypatch.setattr(processes, "_ENTRIES", 3)
    with fresh_directory(tmp_path / "own") as made:
        assert os.listdir(made.parent) == ["own"]
