"""Scripts that give one device other samples and random numbers than the ranks: it is given those of the ranks."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, Sampler, Subset

from mgpu_check.compare.in_script.joining import NotJoinedError, SampleRows, join, sample_dimension
from mgpu_check.compare.in_script.replay import epoch_of, fingerprint, tensors_of, with_other_seeds
from mgpu_check.compare.in_script.tape import Tape, Tapes, Unstored, place, write_joint
from mgpu_check.compare.trace import Step, Trace
from mgpu_check.compare.verdict import mistakes_of, remarks_of
from tests.compare.conftest import script

RANDOM = script("random_inputs")
MEAN = "                p.grad /= world\n"
ALL = "            for p in net.parameters():\n                dist.all_reduce"


SEEDED = """\
import sys, torch
import torch.distributed as dist
from torch import nn
dist.init_process_group("nccl")
rank, world = dist.get_rank(), dist.get_world_size()
torch.cuda.set_device(rank)
torch.manual_seed(rank)
net = nn.parallel.DistributedDataParallel(nn.Linear(6, 6).to("cuda"), device_ids=[rank])
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    (net(torch.randn(8 // world, 6).cuda()).pow(2).mean() * float(sys.argv[1])).backward()
    optimizer.step()
"""


@pytest.mark.parametrize(("factor", "mistakes"), [("1", []), ("{1.0*W}", ["world-size-factor"])])
def test_parameters_that_a_wrapper_broadcasts_are_the_start(compare, factor, mistakes):
    options = ("--gpus=2", "--simulate", "--steps=2")
    outcome = compare(SEEDED, *options, code=len(mistakes), arguments=[factor], more=1)
    assert outcome.json["replayed"] and outcome.json["mistakes"] == mistakes


@pytest.mark.parametrize(
    ("old", "new", "mistake"),
    [
        pytest.param(MEAN, "", "world-size-factor", marks=pytest.mark.slow),
        (ALL, ALL.replace("net.", "net.first."), "gradients-not-synchronized"),
    ],
)
def test_a_mistake_is_refuted_in_a_replay(compare, changed, old, new, mistake):
    outcome = compare(changed(RANDOM, (old, new)), code=1, more=1)
    assert outcome.json["replayed"] and outcome.json["mistakes"] == [mistake]
    assert (outcome.json["step"], outcome.json["tensor"]) == (1, "gradient")


@pytest.mark.slow
def test_ranks_that_each_get_the_whole_dataset_differ(compare, changed):
    outcome = compare(changed(RANDOM, ("DistributedSampler(data) if world > 1 else None", "None")), code=1)
    assert outcome.json["replayed"] and outcome.json["mistakes"] == ["dataset-not-split"]
    assert "differs: in an epoch each of the 2 ranks gets 16 of 16 samples of the dataset" in outcome.text
    assert "the steps agree, if one device gets the same batches" in outcome.json["headline"]


@pytest.mark.slow
def test_what_cannot_be_replayed_is_named(compare, changed):
    """A weight that each rank draws has no joint value for one device, however the script has drawn it."""
    drawn = ("        loss.backward()\n", "        (loss * own.uniform(0.5, 2) * torch.rand(1)).backward()\n")
    own = ("data = Signals", "own = random.Random(rank)\ndata = Signals")
    outcome = compare(changed(RANDOM, drawn, own), code=2)
    assert not outcome.json["replayed"]
    assert outcome.json["headline"].startswith("not comparable: step 1: the ranks together saw 8 samples")
    assert "one device cannot be given what the ranks were given: not all could be replayed: " in outcome.text
    assert re.search(r"a tensor of shape \[1\] at train.py:\d+: ranks have tensors of shape \[1\]", outcome.text)
    assert re.search(r"mul at train.py:\d+: its number is [\d.]+ on one device, and [\d.]+, [\d.]+", outcome.text)


@pytest.mark.slow
def test_other_seeds_are_those_of_numpy_too(tmp_path):
    pytest.importorskip("numpy")
    lines = """
        import types
        from mgpu_check.compare.in_script import replay
        from mgpu_check.compare.in_script.tape import write_joint
        hooks = dict.fromkeys(("note", "enter", "leave", "before_step", "after_step"), print)
        recorder = types.SimpleNamespace(
            done=0, passes=0, backwards=0, in_training_thread=lambda: True, **hooks
        )
        with open("joint", "w+b") as file, open("tape", "w+b") as tape:
            write_joint(file.fileno(), [tape.fileno()], False, other_seeds=True)
            replay.install(recorder, 1, 0, None, file.fileno())
            import numpy
            numpy.random.seed(1)
            assert numpy.random.get_state()[1][0] == 1 + replay._OTHER_SEED
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(lines)], check=True, cwd=tmp_path)


@pytest.mark.parametrize("shape", [(2, 3), (1, 3), (3, 2, 5), (2, 3, 5)])
def test_the_dimension_of_samples_is_where_ranks_add_up(shape):
    at = shape.index(3)
    parts = [torch.randn(shape), torch.randn(shape)]
    assert sample_dimension(parts, torch.cat(parts, at)) == at
    assert sample_dimension(parts, torch.cat([*parts, parts[0]], at)) is None
    assert sample_dimension(parts, torch.cat(parts, at)[..., :1]) is None


@pytest.mark.parametrize("kind", [int, str, float, "int64", "uint32", lambda value: (value, value)])
def test_other_seeds_of_any_kind(kind):
    np = pytest.importorskip("numpy")
    own = getattr(np, kind)(7) if isinstance(kind, str) else kind(7)
    seeds = []
    seed = with_other_seeds(lambda a=None, version=2: seeds.append((a, version)))
    seed(own), seed(a=own), seed(own, version=1), seed(), seed(None)
    first = seeds[0][0]
    assert seeds == [(first, 2), (first, 2), (first, 1), (None, 2), (None, 2)]
    assert isinstance(first, int) and 0 <= first < 2**32 and first not in (7, own)


@pytest.mark.slow
def test_micro_batches_of_one_device_are_those_of_the_ranks_in_turn(compare, by_hand, changed):
    halves = (
        "    loss = nn.functional.mse_loss(net(x[part]), y[part])\n    loss.backward()\n",
        "    for rows in (x[part],) if world > 1 else x[start : start + 8].split(4):\n"
        "        rows = rows[torch.randint(4, (4,))]\n"
        "        nn.functional.mse_loss(net(rows), rows.sum(1, True)).div(2 // world).backward()\n",
    )
    script = changed(by_hand, halves, ("nn.Tanh(),", "nn.Tanh(), nn.Dropout(0.5),"))
    outcome = compare(script, code=0, more=2)
    assert outcome.json["replayed"] and outcome.json["steps_equal"] == 2


def test_what_the_loaders_of_ranks_give_in_an_epoch():
    def ranks(*indices, workers=0, data=("same", "same"), endless=False, length=8, seen=(1, 1), **sampler):
        told = {"event": "sampler", "shuffle": True, "set_epoch": True, "iteration": 1, "after": 0, **sampler}
        common = {"event": "epoch", "length": length, "workers": workers, "seed": 5, "endless": endless}
        epochs = [{**common, "indices": own, "data": of} for own, of in zip(indices, data, strict=True)]
        steps = [[Step(0, [0.0], [[own]], [], {}, {}, {})] * 8 for own in seen]
        return [Trace(rank, 2, steps=steps[rank], events=[told, epoch]) for rank, epoch in enumerate(epochs)]

    halves = [0, 2, 4, 6], [1, 3, 5, 7]
    overlap = list(remarks_of(ranks([0, 1, 2, 3], [2, 3, 4, 5], workers=2, set_epoch=False)))
    assert "loader 1 each rank gets samples of its own, 8 in all" in next(remarks_of(ranks(*halves, seen=(1, 2))))
    assert "loader 1 ranks share 2 of 6 samples" in overlap[0] and "step 1 1 of 1 samples came to sev" in overlap[-1]
    assert "the same seeds on each rank" in overlap[1] and "set_epoch was not called before the first ep" in overlap[2]
    once = mistakes_of(ranks(*halves, set_epoch=False))  # one epoch needs none
    assert mistakes_of(ranks(*halves)) == mistakes_of(ranks(*halves, endless=True)) == once == []
    assert mistakes_of(ranks([0, 1], [1, 0], endless=True)) == []
    many = list(range(100, 110))
    (finding,) = mistakes_of(ranks(many, many, endless=True, length=20))
    assert finding.mistake == "dataset-not-split" and "give each of the 2 ranks the same 10 samples" in finding.evidence
    assert mistakes_of(ranks(many, many, endless=True, length=20, seen=(1, 2))) == []  # slices of one order
    whole = [*range(8)]
    assert [finding.mistake for finding in mistakes_of(ranks(whole, whole))] == ["dataset-not-split"]
    assert mistakes_of(ranks(whole, whole, data=("first half", "second half"))) == []
    told = next(remarks_of(ranks(whole, whole, data=("first half", "second half"))))
    assert told.startswith("in an epoch of loader 1 the ranks get 8, 8 samples of datasets of their own")
    (finding,) = mistakes_of(ranks(*halves, set_epoch=False, iteration=2, after=4))
    assert (finding.mistake, finding.evidence) == (
        "epochs-not-reshuffled",
        "epoch 2 begins at step 5, and set_epoch was never called",
    )
    assert mistakes_of(ranks(*halves, set_epoch=False, iteration=2, after=8)) == []  # the epoch that is listed


class Endless(Sampler[int]):
    def __iter__(self):
        return itertools.cycle(range(1, 8, 2))


def test_an_endless_sampler_has_no_epoch(monkeypatch):
    data: Any = range(8)
    epochs = [epoch_of(DataLoader(data, 2, sampler=sampler), 2) for sampler in ([1, 3, 5, 7], Endless())]
    assert [epoch and epoch["indices"] for epoch in epochs] == [[1, 3, 5, 7]] * 2
    assert [epoch and epoch["endless"] for epoch in epochs] == [False, True]
    monkeypatch.setattr("mgpu_check.compare.in_script.replay._LONGEST", 6)  # as of large data
    large = epoch_of(DataLoader(data, 2, sampler=Endless()), 2)
    assert large and large["endless"] and large["indices"] == [1, 3, 5, 7]


def test_data_of_ranks_have_equal_fingerprints_if_they_are_equal():
    class Data:
        def __init__(self, values):
            self.values, self.change = values, lambda value: value

    equal = [fingerprint(Data(["a", torch.arange(300.0)])) for _ in range(2)]
    assert equal[0] == equal[1] != fingerprint(Data(["b", torch.arange(300.0)]))
    assert fingerprint(torch.arange(4)) != fingerprint(torch.arange(5)) and fingerprint([1]) != fingerprint([2])


def data(**attributes):
    made: Dataset[Any] = Dataset()
    made.__dict__ |= attributes
    return made


def test_what_differs_between_ranks_beside_the_data_is_no_data():
    numpy = pytest.importorskip("numpy")
    x, drawn = torch.arange(9), [random.Random(3), torch.Generator().manual_seed(3), numpy.random.default_rng(3)]
    others = [random.Random(4), torch.Generator().manual_seed(4), numpy.random.default_rng(4)]
    for one, other in [
        *zip(drawn, others, strict=True),
        (0, 1),
        ("cuda:0", "cuda:1"),
        (torch.device("cuda", 0), torch.device("cuda", 1)),
    ]:
        assert len({fingerprint(Subset(data(x=x, own=own), [0, 1])) for own in (one, other)}) == 1, one
        assert len({fingerprint(data(x=x, own=own)) for own in (one, other)}) == 1, one
    for one, other in zip([0, *drawn], [1, *others], strict=True):  # the samples depend on it
        assert fingerprint(data(own=one)) != fingerprint(data(own=other)), one
    assert fingerprint(data(seed=1, x=x)) != fingerprint(data(seed=2, x=x))
    assert fingerprint(data(root="/a/0", x=x)) != fingerprint(data(root="/a/1", x=x))


def test_shards_that_differ_anywhere_have_other_fingerprints(monkeypatch):
    def middle(value):
        whole = torch.zeros(20, 28, 28)
        whole[:, 4:24] = value
        return whole

    assert fingerprint(data(x=middle(1))) != fingerprint(data(x=middle(2)))
    assert fingerprint(data(x=middle(1).numpy())) != fingerprint(data(x=middle(2).numpy()))
    functions = [[data(x=torch.full((3,), value), change=lambda x: x)] for value in (0, 1)]
    assert fingerprint(data(of=functions[0])) != fingerprint(data(of=functions[1]))
    monkeypatch.setattr("mgpu_check.compare.in_script.replay._LIMIT", 2**10)
    lines = [b"%d" % number * 10 for number in range(2000)]
    equal = [fingerprint(data(lines=list(lines))) for _ in range(2)]
    assert equal[0] == equal[1] != fingerprint(data(lines=[*lines[:1000], *reversed(lines[1000:])]))
    assert fingerprint(bytes(9000)) != fingerprint(bytes(4000) + b"1" * 5000)


class Pattern:
    """An expression as the package regex compiles it: its pickle depends on the process."""

    __module__ = "regex"
    pattern = "a|b"

    def __reduce__(self):
        return str, (str(id(self)),)


def test_a_compiled_expression_is_its_text():
    one, other = Pattern(), Pattern()
    assert fingerprint(data(x=[1], split=one)) == fingerprint(data(x=[1], split=other))


def test_sets_have_the_fingerprint_of_their_elements():
    one, other = {0, 8}, {8, 0}
    assert list(one) != list(other) and fingerprint(data(own=one)) == fingerprint(data(own=other))


def parts(*values):
    return [torch.tensor(value) for value in values]


def test_batches_are_joined():
    def joined(*values, guesses=None):
        return join(values, [] if guesses is None else guesses)

    first, second = parts([[1, 2], [3, 4]], [[5, 6]])
    made = joined({"x": first, "n": 3, "names": ["a", "b"]}, {"x": second, "n": 3, "names": ["c"]})
    assert made["x"].tolist() == [[1, 2], [3, 4], [5, 6]] and (made["n"], made["names"]) == (3, ["a", "b", "c"])
    assert [len(part) for part in joined([first, first], [second, second])] == [3, 3]  # two tensors of a batch
    images = (first[0], first[1]), ({"box": 1}, {"box": 2})  # lists of samples, as in detection
    assert [len(part) for part in joined(images, images)] == [4, 4]
    numpy = pytest.importorskip("numpy")
    assert joined(numpy.ones((2, 3)), numpy.ones((1, 3))).shape == (3, 3)
    guesses: list[str] = []
    padded = joined(first, torch.tensor([[-100, 5, 6]]), guesses=guesses)
    assert padded.tolist() == [[1, 2, -100], [3, 4, -100], [-100, 5, 6]]
    assert guesses == ["batches of different lengths were padded with -100"]
    for one, other in ((1, 2), ({"a": 1}, {"b": 1}), (first, 1), ([first], []), parts(1, 2)):
        with pytest.raises(NotJoinedError):
            joined(one, other)


def test_rows_of_several_views_are_joined_view_by_view():
    views = [[torch.zeros(2, 3), torch.zeros(2, 3)], [torch.zeros(1, 3), torch.zeros(1, 3)]]
    drawn = parts([1, 2, 10, 20], [3, 30])

    def order(batches, turned=False):
        rows = SampleRows(turned)
        rows.saw(batches)
        return rows.join(drawn, []).tolist()

    assert order(views) == [1, 2, 3, 10, 20, 30]
    assert order(views, turned=True) == order([torch.zeros(2, 3), torch.zeros(1, 3)]) == [1, 2, 10, 20, 3, 30]


def test_a_place_does_not_depend_on_the_trainer_that_calls_the_users_code():
    def found(trainer, layer, of_a_loop=False):
        installed = "/env/lib/python3.11/site-packages"
        names: dict[str, Any] = {"place": place}
        for file, line, source in (
            (f"{installed}/layers.py", layer, f"def forward(): return place({of_a_loop})"),
            ("/users/model.py", 1, "def step(): return forward()"),
            (f"{installed}/trainer.py", trainer, "def fit(): return step()"),
            ("/users/train.py", 3, "found = fit()"),
        ):
            exec(compile("\n" * (line - 1) + source, file, "exec"), names)
        return names["found"].replace("../", "")

    assert found(10, 5) == found(20, 5) != found(10, 6)
    assert found(10, 5).startswith("env/lib/python3.11/site-packages/layers.py:5 users/model.py:1 users/train.py:3 ")
    assert found(10, 5, of_a_loop=True) == found(20, 6, of_a_loop=True)
    assert found(10, 5, of_a_loop=True).startswith("users/model.py:1 users/train.py:3 ")


def test_two_loops_have_two_places(monkeypatch):
    """Also in an installed program, where only the line that starts it is no part of a package."""

    def loops(start, file):
        for line in (10, 20):
            loop: dict[str, Any] = {"place": place, "__name__": "project"}
            exec(compile("\n" * line + "def loop(): return place(of_a_loop=True)", file, "exec"), loop)
            main = {**loop, "__name__": "__main__"}
            exec(compile("found = loop()", start, "exec"), main)
            yield main["found"]

    program, installed = f"{os.path.dirname(sys.executable)}/project-train", "/env/lib/python3.11/site-packages/project"
    for start, file in (
        (program, f"{installed}/train.py"),
        (f"{installed}/__main__.py", f"{installed}/train.py"),
        ("/users/torch/train.py", "/users/torch/loops.py"),
    ):
        one, other = loops(start, file)
        assert one != other and "train" in one
    assert next(loops("<string>", f"{installed}/trainer.py")) == "<string>:1"  # no file of the current directory
    monkeypatch.setattr("mgpu_check.compare.in_script.tape._DIRECTORY", "/home/torch")
    assert next(loops("/home/torch/train.py", f"{installed}/loop.py")) == "train.py:1"


def test_tapes_of_ranks(tmp_path):
    files = [tmp_path.joinpath(name).open("w+b") for name in ("0", "1", "joint")]
    for rank, file in enumerate(files[:2]):
        tape = Tape(file.fileno())
        for micro in range(2):
            tape.put("draw", f"here {micro}", torch.tensor([10 * micro + rank]))
        tape.put("batch", "loop 1", lambda: None)
        if not rank:
            tape.put("rate", "0", [0.5])
    joint, tapes = files[2].fileno(), [file.fileno() for file in files[:2]]
    write_joint(joint, tapes, False)
    made = Tapes(joint)
    assert [made.turn("draw", "here", micro) for micro in (0, 1, 1)] == [[0, 1], [10, 11], []]
    assert made.turn("draw", "there", 0) == [] and made.first("rate", "0") == [0.5] and made.first("rate", "1") is None
    assert all(isinstance(part, Unstored) for part in made.turn("batch", "loop 1"))
    write_joint(joint, tapes, True)
    made = Tapes(joint)
    assert [made.turn("draw", "here", micro) for micro in range(4)] == [[0], [1], [10], [11]]
    for file in files:
        file.close()


def test_a_tape_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr("mgpu_check.compare.in_script.tape._LIMIT", 100)
    with tmp_path.joinpath("0").open("w+b") as file, tmp_path.joinpath("joint").open("w+b") as joint:
        tape = Tape(file.fileno())
        for place, numbers in (("start", 40), ("call", 20), ("call", 20), ("call", 1)):
            tape.put(place, "here", torch.zeros(numbers))
        assert tape.full
        write_joint(joint.fileno(), [file.fileno()], False)
        made = Tapes(joint.fileno())
        assert isinstance(made.first("start", "here"), Unstored)  # a large model leaves room for batches
        assert [len(part) for part in made.turn("call", "here")] == [20] and made.turn("call", "here") == []


def test_tensors_have_the_same_names_inside_of_a_wrapper():
    plain, wrapped = (torch.nn.ModuleDict({"net": torch.nn.Linear(2, 1)}) for _ in range(2))
    wrapped["net"] = torch.nn.DataParallel(wrapped["net"])
    assert tensors_of(wrapped).keys() == tensors_of(plain).keys() == {"net.weight", "net.bias"}
