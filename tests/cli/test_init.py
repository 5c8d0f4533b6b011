"""`mgpu-check init`: scripts that train are found, and their arguments fit a comparison."""

from __future__ import annotations

import re
import sys
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from mgpu_check.cli.init import console_scripts, fitted_arguments, main, survey
from mgpu_check.cli.init_arguments import learned

LOOP = "loss.backward()\noptimizer.step()\n"
DDP = "from torch.nn.parallel import DistributedDataParallel as DDP\nmodel = DDP(model)\n"


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """Write files, name -> text, into the current directory."""

    def repository(named="", **files):
        monkeypatch.chdir(tmp_path)
        for name, text in files.items():
            name = name if "." in name else name.replace("__", "/").replace("_py", ".py")
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        return survey(tmp_path, named)

    return repository


def options(*names):
    adds = "".join(f"parser.add_argument({name})\n" for name in names)
    return f"import argparse\nparser = argparse.ArgumentParser()\n{adds}args = parser.parse_args()\n"


def fitted(entry, given):
    """Return the arguments and assumptions of a script that has run up to its parser."""
    unknown = entry.parses and not entry.options and not entry.hydra
    return fitted_arguments(replace(entry, options=learned(entry.started, given)[0]) if unknown else entry, given)


def test_the_likeliest_script_comes_first(repository):
    found = repository(
        evaluate_py=f"{LOOP}",
        train_py=f"{DDP}{LOOP}",
        tests__test_train_py=f"{DDP}{LOOP}",
        model_py="def step(loss):\n    loss.backward()\n    if model.__class__.__name__ == 'Net': optimizer.step()\n",
        saliency_py="loss.backward()\n",
        broken_py="def (",
        venv__pyvenv_cfg="",
        build__train_py=LOOP,
    )
    assert [str(entry.path) for entry in found.entries] == ["train.py", "evaluate.py"]
    assert found.entries[0].parallel == ("DistributedDataParallel",) and found.entries[1].parallel == ()
    assert (found.files, found.unread) == (5, 1)


def test_a_script_whose_loop_is_in_another_module(repository):
    found = repository(
        main_py="from engine import loop\nif __name__ == '__main__':\n    loop()\n",
        engine_py="from lib.more import step\ndef loop(): step()\n",
        lib__more_py="import torch.distributed as dist\ndist.init_process_group()\n"
        "def step():\n    loss.backward()\n    optimizer.step()\n",
    )
    assert [(str(entry.path), entry.parallel) for entry in found.entries] == [("main.py", ("init_process_group",))]


@pytest.mark.parametrize(
    "source",
    [
        "def train(): \n    loss.backward()\n    optimizer.step()\nfor epoch in range(2):\n    train()\n",
        "trainer = instantiate(config)\ntrainer.fit(model)\n",
        "import lightning\nif __name__ == '__main__':\n    lightning.Trainer().fit(model)\n",
        "args = TrainingArguments()\nown = DPOTrainer(args)\nown.train()\n",
        "with fabric.launch():\n    fabric.backward(loss)\n    optimizer.step()\n",
    ],
)
def test_what_trains_when_it_is_run(repository, source):
    assert [str(entry.path) for entry in repository(start_py=source).entries] == ["start.py"]


def test_a_trainer_of_the_repository_may_train_on_one_device(repository):
    own = "class Trainer:\n    def fit(self):\n        loss.backward()\n        optimizer.step()\n"
    found = repository(
        one_py="from own import Trainer\ntrainer = Trainer()\ntrainer.fit()\n", own_py=own, two_py="Trainer().fit()\n"
    )
    assert {str(entry.path): entry.parallel for entry in found.entries} == {"two.py": ("a Trainer",), "one.py": ()}


def test_a_script_that_the_pages_start_comes_first(repository):
    found = repository(
        train_py=DDP + LOOP,
        tools__main_py=DDP + LOOP,
        benchmarks__train_py=DDP + LOOP,
        other__main_py=DDP + LOOP,
        README="Don't forget:\n\n    torchrun --nproc-per-node=<N> \\\n        tools/main.py --data <DIR> > log\n",
    )
    assert [str(entry.path) for entry in found.entries] == [
        *("tools/main.py", "train.py", "other/main.py", "benchmarks/train.py")
    ]
    (command,) = found.entries[0].documented
    assert (command.location, command.arguments) == ("README:3", "--data <DIR>")


@pytest.mark.parametrize(
    ("files", "named", "started", "needs"),
    [
        ({"tools/go.py": "import lib.data", "lib/data.py": ""}, "tools/go.py", "-m tools.go", ""),
        ({"tools/go.py": "import data", "tools/data.py": ""}, "tools/go.py", "tools/go.py", ""),
        ({"tools/go.py": "import data, lib", "tools/data.py": "", "lib.py": ""}, "tools/go.py", "tools/go.py", "lib"),
        ({"pkg/go.py": "from .data import f", "pkg/data.py": ""}, "pkg/go.py", "-m pkg.go", ""),
        ({"src/pkg/go.py": "import pkg.x", "src/pkg/x.py": ""}, "src/pkg/go.py", "-m pkg.go", "pkg"),
        ({"go.py": "import pkg.x", "src/pkg/x.py": ""}, "go.py", "go.py", "pkg"),
        (
            {"pkg/go.py": "def main(): pass", "pyproject.toml": "project.scripts.go = 'pkg.go:main'"},
            *("go", "go", "pkg"),
        ),
        ({"src/pkg/__main__.py": ""}, "-m pkg", "-m pkg", "pkg"),
        (
            {"v1.0/sub/go.py": "import lib, x", "v1.0/sub/x.py": "", "v1.0/lib.py": ""},
            *("v1.0/sub/go.py", "v1.0/sub/go.py", "lib"),
        ),
        ({"vendor/go.py": ""}, "vendor/go.py", "vendor/go.py", ""),
        ({"bin/go.": "import lib", "lib.py": ""}, "bin/go.", "bin/go.", ""),
        ({"../go.py": ""}, "../go.py", "../go.py", ""),
    ],
)
def test_how_a_script_is_started(repository, files, named, started, needs):
    entry = repository(named, **files).named
    assert (entry.started, entry.needs) == (started, needs)


def test_a_script_is_named_as_in_a_shell(repository, tmp_path, capsys):
    repository(train_py=DDP + LOOP, broken_py="def (")
    for words in (["python3", "-u", "-X", "dev", "train.py"], [str(tmp_path / "train.py")], ["sub/../train.py"]):
        assert main(["--no-run", "--", *words]) == 0
        assert '        "train.py",\n        steps=2' in Path("tests/test_scaling.py").read_text()
    capsys.readouterr()
    assert main(["--no-run", "--", "broken.py"]) == 0
    assert (
        "script: broken.py, which uses code that init cannot parse\n  not chosen: train.py" in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("name", "text", "programs"),
    [
        ("pyproject.toml", "project.scripts.go = 'pkg.go:main'\nproject.gui-scripts.no = 'pkg.go:main'", ["go"]),
        ("pyproject.toml", "[tool.poetry.scripts]\ngo = 'pkg.go:main'\nno = {file = 'no.sh'}", ["go"]),
        ("pyproject.toml", "[project.entry-points.'pytest11']\ngo = 'pkg.go:main'", []),
        ("pyproject.toml", "[project\n", []),
    ],
)
def test_only_programs_of_a_console_are_installed_programs(repository, tmp_path, name, text, programs):
    repository(**{"pkg/go.py": "", name: text})
    assert list(console_scripts(tmp_path, {"pkg.go": Path("pkg/go.py")}).values()) == programs


def test_the_current_directory_installs_nothing(repository, tmp_path, monkeypatch, capsys):
    repository(**{"tools/go.py": "import data, lib\n" + LOOP, "tools/data.py": "", "lib.py": ""})
    monkeypatch.syspath_prepend(tmp_path)  # as by python -m
    main(["--no-run", "--", "tools/go.py"])
    assert "MISSING: the installed package lib" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (options('"-b", "--batch-size", default=256'), ["--batch-size={8/W}"]),
        (options('"--batch_size_per_gpu"', '"--val-batch-size"'), ["--batch_size_per_gpu={8/W}"]),
        (options('"--batch-size"') + "n = args.batch_size // dist.get_world_size()\n", ["--batch-size=8"]),
        (options('"--test-batch-size"', '"--epochs"', '"--num-workers"'), ["--epochs=1", "--num-workers=0"]),
        (
            "accumulation_steps = 5 * 8\nbatch_size = 12\nexec(open('configurator.py').read())\n"
            "accumulation_steps //= world_size\n",
            ["--accumulation_steps={2*W}", "--batch_size={8/W}"],
        ),
        (
            options('"--output_dir"', '"--per_device_train_batch_size", type=int', '"--per_gpu_train_batch_size"'),
            ["--output_dir=out", "--per_device_train_batch_size={8/W}"],
        ),
        (
            options('"total_epochs", type=int', '"save_every", type=int', '"--batch_size"'),
            ["--batch_size={8/W}", "1", "1"],
        ),
        (options('"epochs", type=int', '"path"', '"--bs"'), ["--bs={8/W}"]),  # "1 data" would be a guess
        (options('"--batch", help="Total batch size"', '"--n", help="Per GPU"'), ["--batch=8"]),
        (options('"--devices", type=int', '"--gpus"', '"--seed"'), ["--seed=1", "--devices={W}"]),
    ],
)
def test_arguments_share_a_global_batch_among_the_ranks(repository, source, expected):
    (entry,) = repository(train_py=source + LOOP).entries
    words, assumed = fitted(entry, [])
    assert words == expected and len(assumed) >= 1
    name = expected[0].partition("=")[0]
    assert fitted(entry, [f"{name}=3"])[0][0] == f"{name}=3"


README = """
    python train.py --data-path <imagenet> --resume x.pt --eval
    python train.py --cfg configs/base.json --name first --data-path /path/to/images --steps 500 run images
"""


def test_arguments_of_a_documented_command(repository):
    """It gives those that the script needs, and those that name files or data. A model is a small one."""
    needed = ('"--name", required=True', '"--data-path"', '"--cfg"', '"--steps"', '"--resume"', '"what"', '"data_dir"')
    model = "'--arch', choices=['vit_base', 'vit_tiny'], default='vit_base'"
    repository_files = {"README.md": README, "configs/base.json": "{}", "train.py": options(*needed, model) + LOOP}
    (entry,) = repository(**repository_files).entries
    expected = ["--name=first", "--data-path=/path/to/images", "--cfg=configs/base.json", "--arch=vit_tiny"]
    assert fitted(entry, [])[0] == [*expected, "run", "images"]
    assert "--name is first, as in README.md:3" in fitted(entry, [])[1]
    assert fitted(entry, ["--name=mine"])[0] == ["--name=mine", "--arch=vit_tiny"]
    (entry,) = repository(
        **{"train.py": options('"data"', '"--data-dir", required=True') + LOOP, "README.md": ""}
    ).entries
    assert fitted(entry, [])[0] == ["--data-dir=data", "data"]


def test_packages_that_are_not_installed_are_named_at_once(repository, capsys):
    files = {
        "pkg/__init__.py": "import absent_one.part",
        "pkg/ops.py": "try:\n    import fast\nexcept ImportError: pass\n",
    }
    own = "import sys, numpy, pkg.ops, local\nfrom absent_two import f\n"
    repository(**{**files, "train.py": own + LOOP, "tools/local.py": "", "requirements.txt": ""})
    assert main([]) == 2 and not Path("tests").exists()
    assert capsys.readouterr().out.endswith(
        "nothing was written: train.py imports what is not installed: absent_two, absent_one\n"
        "do: install what provides it, as by pip install -r requirements.txt, and call init again\n"
    )
    repository(**{"train.py": "import sys\nsys.path.append('elsewhere')\nimport absent_two\n" + LOOP})
    assert main(["--no-run"]) == 0  # it may be there


@pytest.mark.parametrize(
    ("option", "given", "words"),
    [
        ('"-b", "--batch-size"', ["-b32"], []),
        ('"-b", "--batch-size"', ["-b", "32"], []),
        ('"--batch-size"', ["-b32"], ["--batch-size={8/W}"]),
        ('"--seed", action="store_true"', [], []),
        ('"--gpus", action=argparse.BooleanOptionalAction, default=1', [], []),
        ('"--workers", action="count", default=0', [], []),
    ],
)
def test_arguments_that_are_not_set(repository, option, given, words):
    (entry,) = repository(train_py=options(option) + LOOP).entries
    assert fitted(entry, given)[0] == [*given, *words]


def test_the_arguments_of_hydra(repository):
    files = {
        "src/train.py": """
            @hydra.main(version_base=None, config_path="../configs", config_name="train.yaml")
            def main(config):
                trainer.fit(model)
            if __name__ == "__main__":
                main()
            """,
        "configs/train.yaml": """
            defaults:
              - _self_
              - data: images.yaml  # comment
              - trainer: default
            seed: null
            """,
        "configs/data/images.yaml": "_target_: src.images.Images\nbatch_size: 64\nloader:\n  num_workers: 4\n",
        "configs/data/texts.yaml": "train_batch: 64\n",
        "configs/trainer/default.yaml": "devices: 1\n",
        "src/images.py": "size = batch_size // trainer.world_size\n",
    }
    (entry,) = repository(**files).entries
    words, _ = fitted_arguments(entry, ["seed=3"])
    assert words == [
        *("seed=3", "data.batch_size=8", "data.loader.num_workers=0"),
        *("trainer.devices={W}", "++trainer.strategy=ddp"),
    ]


USED = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", required=True)
parser.add_argument("stage")
if __name__ == "__main__":
    parser.parse_args()
def step():
    loss.backward()
    optimizer.step()
"""
PARSERS = {
    "import used, torch\noptimizer = torch.optim.SGD([torch.ones(1)], lr=1)\nused.step()": (
        [],
        "no parser ran before it ended or began to train",
    ),
    "import used, missing\nused.step()": (
        [],
        "it ended before it parsed them: ModuleNotFoundError: No module named 'missing'",
    ),
    "import used, sys\nused.parser.parse_args(['--batch_size=1', 'x'])\nsys.exit(3)\nused.step()": ([], "exit code 3"),
    "import used\nused.parser.parse_args()\nused.step()": (["--batch_size", "stage"], ""),
    "import used\nused.parser.add_subparsers().add_parser('one')\nused.parser.parse_args()\nused.step()": (
        ["--batch_size", "stage", ""],
        "",
    ),
    "import click\n@click.command()\n@click.option('--lr', '-l', type=int, required=True)\n@click.option('--on', is_flag=True)\n"
    "@click.argument('data')\ndef main(**named): pass\nmain()\n" + LOOP: (["--lr", "data"], ""),
}
CLICK = """
INT = type("Type", (), {"name": "integer"})

class Parameter:
    is_flag = count = False
    def __init__(self, *opts, type=INT, required=False, is_flag=False):
        self.opts, self.type, self.required, self.is_flag = opts, type, required, is_flag

def added(parameter):
    def add(command):
        command.params = [parameter, *getattr(command, "params", [])]
        return command
    return add

def option(*names, type=INT, **how): return added(Parameter(*names, **how))
def argument(name): return added(Parameter(name, required=True))

class Command:
    def __init__(self, function): self.params = function.params
    def main(self): raise AssertionError
    def __call__(self): return self.main()

def command(): return Command
"""


@pytest.mark.parametrize(
    "source", [pytest.param(one, marks=pytest.mark.slow) if "torch" in one else one for one in PARSERS]
)
def test_the_arguments_are_those_of_the_parser_that_runs(repository, monkeypatch, tmp_path, source):
    """The module click is a small one here, because its package may not be installed."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = repository("train.py", train_py=source + "\n", used_py=USED, click_py=CLICK)
    assert found.named.parses and found.named.options == ()
    options, why = learned("train.py", [])
    names, expected = PARSERS[source]
    assert ([option.name for option in options], bool(why)) == (names, bool(expected)) and expected in (why or "")
    assert all(option.required for option in options if option.name in ("stage", "data", "--lr", "--batch_size"))


def test_an_argument_that_the_script_does_not_take_is_not_assumed(repository, capsys):
    repository(train_py="import used\nused.step()\n", used_py=USED)
    assert main(["--no-run", "--", "train.py"]) == 0
    said = capsys.readouterr().out
    assert "its arguments are not known: it ended before it parsed them: NameError" in said and "batch_size" not in said


def test_a_test_is_written_once(repository, capsys):
    repository(
        train_py=options('"--batch-size", required=True', '"data"', '"to"', '"-o", "--out", required=True') + DDP + LOOP
    )
    assert main(["--no-run"]) == 2
    said = capsys.readouterr().out
    assert "nothing was written: the script needs --out, data, to" in said
    assert "as in\n    mgpu-check init -- train.py --batch-size=BATCH_SIZE DATA TO --out=OUT\n" in said
    assert main(["--no-run", "--", "torchrun", "--standalone", "./train.py", "samples", "here", "-o", "x"]) == 0
    said = capsys.readouterr().out
    assert "script: train.py, which uses DistributedDataParallel" in said
    assert "assumed: --batch-size is the batch of one rank" in said
    assert "run it: pytest --gpus=2 --simulate tests/test_scaling.py" in said
    path = Path("tests/test_scaling.py")
    compile(path.read_text(), "test_scaling.py", "exec")
    for line in ('"train.py",', '"samples",', '"-o",', '"--batch-size={8/W}",', "steps=2,"):
        assert f"        {line}\n" in path.read_text()
    assert "    # assumed: --batch-size is the batch of one rank" in path.read_text()
    assert main(["--no-run", "--", "python3", "train.py", "other", "here", "--out=é"]) == 0  # it is as init wrote it
    assert '        "other",\n        "here",\n        "--out=é",\n' in path.read_text()
    with pytest.raises(SystemExit, match="4"):
        main(["--no-run", "--output=new.py", "--", "train.py", "a", "b", "--out=\udcff"])
    assert "bytes that are no UTF-8 text: '\\udcff'" in capsys.readouterr().err and not Path("new.py").exists()
    Path("link.py").symlink_to("elsewhere.py")
    with pytest.raises(SystemExit, match="4"):
        main(["--no-run", "--output=link.py", "--", "train.py", "a", "b", "--out=x"])
    written = path.read_text()
    assert re.search(r"Written by `mgpu-check init`, [0-9a-f]{8}\.", written.splitlines()[0])
    an_argument_was_changed = written.replace('"other"', '"mine"')
    for mine in (written + "\n", an_argument_was_changed, "", "def ("):
        path.write_text(mine)
        with pytest.raises(SystemExit, match="4"):
            main(["--no-run", "--", "train.py", "samples", "here", "--out=x"])
        assert path.read_text() == mine
        assert "tests/test_scaling.py exists; remove it, or name another file" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ("pass", 0, "1 passed"),
        ("raise NotCompared('no data')", 2, "\n    mgpu-check init -- train.py --data=samples\n"),
        ("raise ScalingMismatch('step 1')", 1, "1 failed"),
        ("raise ValueError('8/W is no integer')", 2, "replaces the test if it is unchanged:"),
        ("pytest.skip()", 2, "no verdict"),
        ("pass\nimport missing", 2, "No module named 'missing'"),
        ("pass\npytest.exit('enough', returncode=3)", 2, "no verdict"),
    ],
)
def test_it_says_when_nothing_was_compared(repository, capsys, monkeypatch, body, code, words):
    repository(train_py=LOOP, **{"README.md": "`python train.py --data=samples`"})
    run = pytest.main

    def run_another_test(arguments, plugins):
        assert arguments == ["--gpus=2", "--simulate", "test_stub.py"]
        imports = "import pytest\nfrom mgpu_check import NotCompared, ScalingMismatch\n"
        Path("test_stub.py").write_text(f"{imports}def test_train(): {body}\n")
        try:
            return run(["-p", "no:cacheprovider", "--import-mode=importlib", arguments[-1]], plugins)
        finally:
            sys.modules.pop("test_stub", None)

    monkeypatch.setattr(pytest, "main", run_another_test)
    assert main(["--output=test_stub.py"]) == code
    said = capsys.readouterr().out
    assert words in said and ("no verdict: nothing was compared" in said) == (code == 2)


@pytest.mark.parametrize(("then", "code"), [("pass", 0), ("raise NotCompared('ValueError')", 2)])
def test_missing_data_is_made(repository, capsys, monkeypatch, then, code):
    repository(train_py=LOOP)
    run, texts = pytest.main, []

    def run_another_test(arguments, plugins):
        texts.append(Path("test_new.py").read_text())
        body = then if "fake_data=True" in texts[-1] else "raise NotCompared('no file', untrained=True)"
        stub = f"test_stub_{len(texts)}.py"
        Path(stub).write_text(f"from mgpu_check import NotCompared\ndef test_train(): {body}\n")
        sys.modules.pop(Path(stub).stem, None)
        return run(["-p", "no:cacheprovider", "--import-mode=importlib", stub], plugins)

    monkeypatch.setattr(pytest, "main", run_another_test)
    assert main(["--output=test_new.py"]) == code
    assert ["fake_data=True" in text for text in texts] == [False, True]
    assert Path("test_new.py").read_text() == texts[1 if code == 0 else 0]
    assert "in place of what is missing: fake_data=True" in capsys.readouterr().out


def test_without_a_script_it_says_what_to_do(repository, capsys):
    repository(model_py="class Model: pass\n")
    assert main([]) == 2
    assert "no script that trains was found" in capsys.readouterr().out
    for wrong in (["--", "missing.py"], ["--", "-m", "missing"], ["--gpus=3"]):
        with pytest.raises(SystemExit, match="4"):
            main(wrong)
    assert "give 2, 4 or 8" in capsys.readouterr().err
