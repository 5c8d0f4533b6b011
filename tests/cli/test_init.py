"""`mgpu-check init`: scripts that train are found, and their arguments fit a comparison."""

from __future__ import annotations

import textwrap

import pytest

from mgpu_check.cli.init import fitted_arguments, main
from mgpu_check.cli.init_survey import survey

LOOP = "loss.backward()\noptimizer.step()\n"
DDP = "from torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(model)\n"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Write files, name -> text, into the current directory."""

    def repository(**files):
        monkeypatch.chdir(tmp_path)
        for name, text in files.items():
            path = tmp_path / name.replace("__", "/").replace("_py", ".py")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        return survey(tmp_path)

    return repository


def options(*names):
    return "import argparse\nparser = argparse.ArgumentParser()\n" + "".join(
        f"parser.add_argument({name})\n" for name in names
    )


def test_the_likeliest_script_comes_first(repository):
    found = repository(
        evaluate_py=f"{LOOP}",
        train_py=f"{DDP}{LOOP}",
        tests__test_train_py=f"{DDP}{LOOP}",
        model_py="def step(loss):\n    loss.backward()\n",
        broken_py="def (",
        venv__pyvenv_cfg="",
        build__train_py=LOOP,
    )
    assert [str(entry.path) for entry in found.entries] == ["train.py", "evaluate.py"]
    assert found.entries[0].parallel == ("DistributedDataParallel",) and found.entries[1].parallel == ()
    assert (found.files, found.unread) == (4, 1)


def test_a_script_whose_loop_is_in_another_module(repository):
    found = repository(
        main_py="from engine import loop\nif __name__ == '__main__':\n    loop()\n",
        engine_py="from lib.more import step\ndef loop(): step()\n",
        lib__more_py="import torch.distributed as dist\ndist.init_process_group()\ndef step(): loss.backward()\n",
    )
    assert [(str(entry.path), entry.parallel) for entry in found.entries] == [("main.py", ("init_process_group",))]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (options('"-b", "--batch-size", default=256'), ["--batch-size={8/W}"]),
        (options('"--batch_size_per_gpu"', '"--val-batch-size"'), ["--batch_size_per_gpu={8/W}"]),
        (options('"--batch-size"') + "n = args.batch_size // dist.get_world_size()\n", ["--batch-size=8"]),
        (options('"--global-batch-size"'), ["--global-batch-size=8"]),
        (options('"--test-batch-size"', '"--epochs"', '"--num-workers"'), ["--epochs=1", "--num-workers=0"]),
        (
            "accumulation_steps = 5 * 8\nbatch_size = 12\nexec(open('configurator.py').read())\n"
            "accumulation_steps //= world_size\n",
            ["--accumulation_steps=8"],
        ),
        (
            "parser = HfArgumentParser(TrainingArguments)\nTrainer().train()\n",
            ["--output_dir=out", "--per_device_train_batch_size={8/W}"],
        ),
        ("import click\n@click.option('--batch', type=int)\ndef main(batch): pass\n", ["--batch={8/W}"]),
    ],
)
def test_arguments_share_a_global_batch_among_the_ranks(repository, source, expected):
    (entry,) = repository(train_py=source + LOOP).entries
    words, assumed = fitted_arguments(entry, [])
    assert words == expected and len(assumed) >= 1
    name = expected[0].partition("=")[0]
    assert fitted_arguments(entry, [f"{name}=3"])[0][0] == f"{name}=3"


def test_a_test_is_written_once(repository, capsys):
    repository(train_py=options('"--batch-size"', '"data"', '"--out", required=True') + DDP + LOOP)
    assert main(["--no-run"]) == 2
    assert "nothing was written: the script needs --out, data" in capsys.readouterr().out
    assert main(["--no-run", "--", "train.py", "samples", "--out=x"]) == 0
    said = capsys.readouterr().out
    assert "script: train.py, which uses DistributedDataParallel" in said
    assert "assumed: --batch-size is the batch of one rank" in said
    assert "run it: pytest --gpus=2 --simulate tests/test_scaling.py" in said
    with open("tests/test_scaling.py") as file:
        written = file.read()
    compile(written, "test_scaling.py", "exec")
    for line in ('"train.py",', '"samples",', '"--out=x",', '"--batch-size={8/W}",', "steps=2,"):
        assert f"        {line}\n" in written
    with pytest.raises(SystemExit, match="4"):
        main(["--no-run"])
    assert "tests/test_scaling.py exists; remove it, or name another file" in capsys.readouterr().err


def test_without_a_script_it_says_what_to_do(repository, capsys):
    repository(model_py="class Model: pass\n")
    assert main([]) == 2
    assert "no script that trains was found" in capsys.readouterr().out
    for wrong in (["--", "missing.py"], ["--gpus=3"]):
        with pytest.raises(SystemExit, match="4"):
            main(wrong)
    assert "give 2, 4 or 8" in capsys.readouterr().err
