"""`--fake-data`: scripts without their data are compared on data that is made."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mgpu_check.compare.fake_data import FakeData, plan_file
from mgpu_check.compare.fake_data.libraries import _DIFFUSERS
from mgpu_check.processes.environments import with_startup

SIMULATED = ("--gpus=2", "--simulate", "--fake-data")

TRAINS = """\
import os
import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank)
torch.manual_seed(0)
if os.path.exists("data/meta.pkl") or os.path.exists("out/checkpoint.pt"):
    raise SystemExit("nothing is there")
tokens = np.memmap("data/train.bin", dtype=np.uint16, mode="r")
labels = np.load("data/labels.npy")
net = nn.Sequential(nn.Embedding(65, 8), nn.Flatten(), nn.Linear(32, 2)).cuda()
net.load_state_dict(torch.hub.load_state_dict_from_url("https://example.org/net.pth"))
torch.jit.trace(net, torch.zeros(1, 4, dtype=torch.long).cuda())  # as TensorBoard draws a graph
model = DistributedDataParallel(net)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    rows = range(8 * step, 8 * step + 8)[rank::world]
    inputs = torch.stack([torch.from_numpy(tokens[4 * row : 4 * row + 4].astype(np.int64)) for row in rows])
    optimizer.zero_grad()
    cross_entropy(model(inputs.cuda()), torch.from_numpy(labels[list(rows)]).cuda()).backward()
    optimizer.step()
dist.destroy_process_group()
"""


def test_a_script_without_its_data_is_equal(compare):
    outcome = compare(TRAINS, *SIMULATED, code=0)
    assert outcome.json["headline"].startswith("equal: 3 steps on 2 ranks train the same 3 parameters")
    assert "fake data: 3 things that the script lacks were made, with random contents" in outcome.text
    assert "file data/train.bin: token ids, shape [131072], dtype uint16, for memmap at train.py:15" in outcome.text
    assert "file data/labels.npy: an array, shape [64], dtype int64, for open at train.py:16" in outcome.text
    assert "weights https://example.org/net.pth: random weights, for load_state_dict_from_url" in outcome.text
    assert "fake data in place of what is missing" in outcome.text.splitlines()[0]


@pytest.mark.slow
def test_made_data_hides_no_mistake(compare):
    script = TRAINS.replace("= DistributedDataParallel(net)", "= net")
    outcome = compare(script, *SIMULATED, code=1)
    assert outcome.json["verdict"] == "differs" and outcome.json["step"] == 1
    assert "fake data: 3 things" in outcome.text


def test_what_cannot_be_made_is_said(compare):
    outcome = compare("open('data/x.unknown')\n", *SIMULATED, code=2)
    assert "not made: data/x.unknown, for open at train.py:1: its name and its use do not show its form" in outcome.text
    assert "do: give the file, or its form in --fake-data=plan.toml" in outcome.text


@pytest.fixture
def run(tmp_path):
    """Run a script, without torch, in a new directory, with these made data; return what it printed."""

    def run(script: str, fake: FakeData, name: str = "one", **files: str) -> str:
        directory = tmp_path / name
        directory.mkdir(exist_ok=True)
        for file, content in {"train.py": textwrap.dedent(script), **files}.items():
            directory.joinpath(file).write_text(content)
        environment = {**os.environ, **fake.variables, "PYTHONDONTWRITEBYTECODE": "1"}
        environment["PYTHONPATH"] = with_startup(environment)
        done = subprocess.run(
            [sys.executable, "train.py"], cwd=directory, env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert {path.name for path in directory.iterdir()} == {"train.py", *files}
        return done.stdout

    return run


READS = """
import csv, glob, json, os, pickle, wave
from pathlib import Path
import numpy as np

sampling_rate = 8000
def sizes(name, *values): print(name, *values)

rows = [json.loads(line) for line in open("data/train.jsonl", encoding="utf-8")]
sizes("jsonl", len(rows), type(rows[0]["question"]).__name__, sorted({row["label"] for row in rows}), rows[5]["answer"])
table = list(csv.DictReader(open("../tables/houses.csv")))
sizes("csv", len(table), sorted(table[0]), float(table[3]["price"]) != float(table[4]["price"]))
sizes("json", len(json.load(open("data/rows.json"))))
sizes("coco", *map(len, json.load(open("coco/annotations/instances_train.json")).values()))
sizes("text", len(Path("/nowhere/input.txt").read_text()) > 20000)
sizes("npy", np.load("data/x.npy").shape, np.load("data/y.npy").max(), np.load("data/x.npy")[0, 0])
sizes("npz", np.load("data/train.npz")["x_train"].shape, np.load("data/train.npz")["y_train"].dtype)
sizes("tokens", np.fromfile("data/val.bin", dtype=np.uint16).max(), np.fromfile("data/more.bin", np.int32).max())
sizes("meta", pickle.load(open("data/meta.pkl", "rb"))["vocab_size"])
assert os.path.isdir("sounds"), "download the data"
names = sorted(os.listdir("sounds"))
files = sorted(glob.glob("sounds/*/*.wav"))
sizes("listing", names, len(files), all(os.path.isdir(os.path.join("sounds", name)) for name in names))
sizes("wave", wave.open(files[0]).getnframes(), sum(len(found) for _, _, found in os.walk("sounds")))
sizes("glob", len(list(Path("clips").glob("*.wav"))), len(glob.glob("t/b/*.bin")), glob.glob("out/checkpoint_*.pt"))
sizes("exists", os.path.exists("data/train.jsonl"), os.path.exists("data/new.jsonl"), Path("last.pt").exists())
try:
    open("data/cache.json")
except FileNotFoundError:
    sizes("handled")
for missing in ("best_model.pth", "config.json", "data/x.zip"):
    try:
        open(missing, "rb")
    except OSError as error:
        sizes("missing", type(error).__name__)
sizes("own", open("mine.txt").read())
"""


def test_files_of_each_form(run):
    with FakeData(Path()) as fake:
        text = run(READS, fake, **{"mine.txt": "mine"})
        assert text == run(READS, fake, "another", **{"mine.txt": "mine"})  # they are in files of the comparison
        remarks = list(fake.remarks(failed=False))
    with FakeData(Path()) as fresh:
        assert text == run(READS, fresh, "later", **{"mine.txt": "mine"})  # their names alone seed them
    lines = {name: rest for name, _, rest in (line.partition(" ") for line in text.splitlines())}
    assert lines["jsonl"].startswith("64 str [0, 1] ")
    assert lines["csv"].startswith("64 [") and "'price'" in lines["csv"] and lines["csv"].endswith(" True")
    assert (lines["json"], lines["coco"], lines["text"]) == ("64", "64 64 10", "True")
    assert lines["npy"].startswith("(64, 16) 1 ") and lines["npz"] == "(64, 16) int64"
    assert (lines["tokens"], lines["meta"]) == ("64 64", "65")
    assert lines["listing"] == "['class_0', 'class_1', 'class_2', 'class_3'] 64 True"
    assert (lines["wave"], lines["glob"]) == ("8000 64", "64 8 []")
    assert lines["exists"] == "True False False"
    assert "handled" in lines and text.count("missing FileNotFoundError") == 3 and lines["own"] == "mine"
    assert remarks[0].startswith("fake data: 14 things that the script lacks were made")


DIFFUSERS = """
class ModelMixin:
    def __init__(self, **settings): print(*sorted(settings))
    @classmethod
    def from_pretrained(cls, name, **how): raise OSError("offline")
class AutoencoderKL(ModelMixin): pass
class LargeModel(ModelMixin): pass
"""
NETWORK = "def download(url, out): raise AssertionError('network')\n"
STAND_INS = {"wget.py": NETWORK, "diffusers/models/modeling_utils.py": DIFFUSERS}
STAND_INS["evaluate/loading.py"] = "def load(*names): raise FileNotFoundError\n"


def test_functions_of_libraries(run, tmp_path, monkeypatch):
    """Stand-ins take the place of libraries, which may not be installed."""
    libraries = tmp_path / "lib" / "python3.11" / "site-packages"
    for name, source in STAND_INS.items():
        path = libraries / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(source))
    monkeypatch.setenv("PYTHONPATH", str(libraries))
    script = """
        import socket, sys, urllib.request
        import wget
        wget.download("https://example.org/tiny.txt", "tiny.txt")
        urllib.request.urlretrieve("https://example.org/tiny.txt", "tiny.txt")
        print(len(open("tiny.txt").read()) > 20000)
        from diffusers.models.modeling_utils import AutoencoderKL, LargeModel
        AutoencoderKL.from_pretrained("someone/vae")
        from evaluate.loading import load
        assert load("glue", "mrpc").compute()["f1"] == 0
        try:
            LargeModel.from_pretrained("someone/large")
        except OSError as error:
            print(error)
        try:
            socket.create_connection(("example.org", 80))
        except OSError as error:
            print(error.strerror)
        """
    with FakeData(Path()) as fake:
        text = run(script, fake)
        assert (
            text
            == f"True\n{' '.join(_DIFFUSERS['AutoencoderKL'])}\noffline\nexample.org: --fake-data uses no network\n"
        )
        made = [line.split(":")[0].strip() for line in fake.remarks(failed=False)]
    assert made == ["fake data", "file tiny.txt", "model someone/vae", "metric glue"]


def test_a_plan_says_what_to_make(run, tmp_path):
    plan = tmp_path / "plan.toml"
    script = 'import csv\nprint([row["label"] for row in csv.DictReader(open("data/all.csv"))][-3:])\n'
    with FakeData(plan_file(str(plan))) as fake:
        assert run(script, fake) == "['1', '0', '1']\n"
    text = plan.read_text()
    assert '["data/all.csv"]\n' in text and "# file: a table, for open at train.py:2" in text
    assert "samples = 64" in text and '"label" = "class 2"' in text
    plan.write_text(text.replace("samples = 64", "samples = 12").replace('"class 2"', '"class 9"'))
    with FakeData(plan_file(str(plan))) as fake:
        assert run(script, fake) == "['0', '1', '2']\n"
    assert "samples = 12" in plan.read_text()
    for wrong in ("samples = 3\n", "]"):
        plan.write_text(wrong)
        with pytest.raises(argparse.ArgumentTypeError, match=r"is no table|no plan in TOML"):
            plan_file(str(plan))
