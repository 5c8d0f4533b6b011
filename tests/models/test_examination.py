"""The examination of a model: what it says of right models and of planted mistakes, and its table."""

from __future__ import annotations

import dataclasses
import itertools
import time
from pathlib import Path

import pytest

from mgpu_check.errors import RankHang, ScalingMismatch
from mgpu_check.models import ways
from mgpu_check.models.application import WAYS, ModelSettings
from mgpu_check.models.examination import Examination, OutOfTime
from mgpu_check.models.targets import UnusableModel
from mgpu_check.models.training_options import _REFUSED, OPTIONS, settings_for
from mgpu_check.models.traits import Traits
from mgpu_check.models.verdict import ModelReport, OptionFailure, WayResult, read_golden

pytestmark = [  # warnings of torch about these models
    pytest.mark.filterwarnings(f"ignore:{text}:UserWarning") for text in ("FSDP2-wrapped module", "Was asked to gather")
]

NETS = Path(__file__).with_name("nets.py")


def examination(ranks, net, **settings):
    return Examination(ranks, ModelSettings(model_target=f"{NETS}:{net}", **settings), simulated=True)


OFTEN = ("ddp", "fsdp2", "tp", "pp")
"""Replicas, shards, a plan, and stages. The command has two axes each day, in tests/cli/test_model.py."""


@pytest.mark.parametrize(
    ("net", "ways"),
    [("Net", OFTEN), *(pytest.param(net, WAYS, marks=pytest.mark.slow) for net in ("Net", "WithLoss"))],
    ids=["often", "all", "with its loss"],
)
def test_a_right_model_is_equal_in_each_way_that_applies(ranks, net, ways):
    examined = examination(ranks, net)
    results = {way: examined.try_way(way) for way in ways}
    assert [error for _, error in results.values() if error is not None] == []
    statuses = {way: result.status for way, (result, _) in results.items()}
    planned = ("tp", "ep", "fsdp-tp", "cp")
    assert statuses == {way: "not applicable" if way in planned else "equal" for way in ways}
    assert "tp_plan" in results["tp"][0].reason
    assert "hsdp" not in results or results["hsdp"][0].devices == 4
    columns = {"loss", "evaluation", "gradients", "parameters", "moments"}
    gradients = 4 * examined.traits.parameters
    assert gradients <= results["ddp"][0].sent < results["fsdp2"][0].sent < 4 * gradients
    assert 2 * gradients < examined.alone.memory <= results["ddp"][0].memory
    assert results["fsdp2"][0].columns == dict.fromkeys(columns, "equal")


@pytest.mark.slow
def test_context_parallelism_is_equal_where_the_model_takes_positions(ranks):
    result, error = examination(ranks, "Causal").try_way("cp")
    assert (result.status, result.columns["gradients"], error) == ("equal", "equal", None)


class SlowAlone:
    """Ranks of which one by itself does not finish in time."""

    def __init__(self, ranks):
        self._ranks = ranks

    def __getattr__(self, name):
        return getattr(self._ranks, name)

    def run(self, fn, *args, size=None, **options):
        if size == 1:
            raise RankHang("rank 0 of 1 did not finish step within 60 s", ranks=[0])
        return self._ranks.run(fn, *args, size=size, **options)


def test_one_device_that_does_not_finish_accuses_no_way(ranks):
    examined = examination(ranks, "Net")
    examined.ranks = SlowAlone(ranks)
    result, error = examined.try_way("ddp")
    assert result.status == "not compared" and isinstance(error, RankHang)
    assert result.reason == "on one device, rank 0 of 1 did not finish step within 60 s"


MISTAKES = [  # model, way, a part of the reason
    ("Tied", "tp-layers", "tokens.weight and head.weight are one tensor on one device"),
    ("Contrastive", "ddp", "batch-statistics-per-rank"),
    ("Switched", "ddp", "a rank does not use all parameters in a step"),
    ("Noise", "fsdp2", "random-numbers-per-rank"),
    ("Gathered", "fsdp2", "gradient-cut-by-collective"),
    ("Mean", "fsdp2", "buffers-drift"),
    ("Summed", "own", "world-size-factor"),
    ("Restarting", "cp", "returned loss: got "),
    ("Shifting", "cp", "labels-shifted-after-split"),
]
SLOW = ("Contrastive", "Noise", "Gathered", "Mean", "Summed", "Restarting", "Shifting")


@pytest.mark.parametrize(
    ("net", "way", "reason"),
    [pytest.param(*row, marks=pytest.mark.slow if row[0] in SLOW else (), id=row[0]) for row in MISTAKES],
)
def test_a_mistake_is_refuted_and_its_reason_has_a_control(ranks, net, way, reason):
    result, error = examination(ranks, net).try_way(way)
    assert (result.status, result.columns["gradients"]) == ("differs", "differs")
    assert reason in result.reason
    assert error is not None
    assert "mgpu_check" not in result.site


@pytest.mark.parametrize(
    ("net", "reason"),
    [
        ("Tied", "stages 0 and 1 use tokens.weight, and nothing adds it up"),
        ("Shortcut", "more passes from block to block than the first input"),
    ],
)
def test_a_pipeline_that_needs_more_than_a_cut_is_not_applicable(ranks, net, reason):
    result, error = examination(ranks, net).try_way("pp")
    assert (result.status, reason in result.reason, error) == ("not applicable", True, None)


def test_a_function_of_the_user_needs_a_mesh(ranks, tmp_path):
    text = NETS.read_text().replace('MESH = {"dp": 2}', "MESH = 2")
    (tmp_path / "own.py").write_text(text)
    with pytest.raises(UnusableModel, match=r"own has parallelize, and MESH = 2; give axes and their sizes"):
        Examination(ranks, ModelSettings(model_target=f"{tmp_path}/own.py:Net"), simulated=True)


def test_a_mistake_that_an_option_mends_is_refuted_and_options_are_tried_on_top_of_it(ranks):
    examined = examination(ranks, "Convolutions")
    result, error = examined.try_way("ddp")
    assert (result.status, result.columns["gradients"]) == ("differs", "differs") and error is not None
    assert "batch norm (body.1) uses the samples of its rank alone" in result.reason
    assert "mgpu_check" not in result.site
    assert result.base == "batch norm: SyncBatchNorm"
    assert dict(examined.bases["ddp"]) == {"batch norm": "SyncBatchNorm"}


@pytest.mark.parametrize(
    ("way", "control"), [("dp", "batch norm statistics: fixed"), ("fsdp1", "batch norm: SyncBatchNorm")]
)
def test_batch_norms_are_to_blame_only_if_a_control_without_their_batches_is_equal(ranks, way, control):
    examined = examination(ranks, "Convolutions")
    result, error = examined.try_way(way)
    assert result.status == "differs" and error is not None
    assert result.reason.startswith("batch norm (body.1) uses") and result.reason.endswith(f"equal with {control}")


@pytest.mark.slow
def test_a_failing_setting_is_shrunk_to_the_two_options_that_it_needs(ranks, monkeypatch):
    setting = (("accumulation", "2 micro-batches"), ("autocast", "bfloat16"), ("buckets", "of 1 kB"))
    monkeypatch.setattr("mgpu_check.models.examination.settings_for", lambda *_: [setting])
    examined = examination(ranks, "Interaction")
    examined.try_way("ddp")
    (failure,) = examined.try_options("ddp").failures
    assert failure.options == "accumulation: 2 micro-batches, autocast: bfloat16"
    assert failure.status == "differs"
    hidden = [{*each} for way, each in examined.outcomes if way == "ddp" and len(each) == 2]
    assert {("accumulation", "2 micro-batches"), ("buckets", "of 1 kB")} in hidden, "tried without the failure"


def test_settings_have_the_base_and_no_pair_that_torch_refuses():
    traits = Traits("Net", 1, (), (), (), (), embeds=True, has_linear=True, attends=False, defined="")
    settings = settings_for("ddp", traits, compiles=False, base=(("graph", "find_unused_parameters"),))
    graphs = [dict(setting)["graph"] for setting in settings]
    assert {*graphs} == {"find_unused_parameters"}
    assert not any(
        {("checkpointing", "reentrant"), ("graph", "find_unused_parameters")} <= {*each} for each in settings
    )


def test_what_the_time_does_not_suffice_for_is_not_tried(ranks):
    examined = examination(ranks, "Net", model_time=600.0)
    examined.ends = time.monotonic()
    result, error = examined.try_way("ddp")
    assert (result.status, error) == ("not tried", None)
    examined.bases["ddp"] = ()
    assert examined.try_options("ddp").untried == len(settings_for("ddp", examined.traits, compiles=False))
    examined.limit = time.monotonic()  # it passes within a way
    assert examined._outcome(ways.way_of("fsdp2"), ()).status == "not tried"


def test_the_explanation_of_a_failure_ends_with_the_time(ranks, monkeypatch):
    examined = examination(ranks, "Mean", model_time=600.0)

    def diagnosed(*_):
        examined.limit = 0.0
        raise OutOfTime

    monkeypatch.setattr("mgpu_check.models.examination.mismatch_of", diagnosed)
    result, error = examined.try_way("ddp")
    assert (result.status, type(error)) == ("differs", ScalingMismatch)
    assert result.reason.endswith("the time did not suffice to explain it: give more than --time=600s")
    assert examined.limit == examined.ends, "the next way has its time"


def test_the_options_of_the_command_name_the_ways_that_there_are():
    assert tuple(way.name for way in ways.WAYS) == WAYS


@pytest.mark.parametrize("way", ["ddp", "tp"])
def test_each_pair_of_values_is_in_a_setting(way):
    traits = Traits("Net", 1, ("norm",), (), (), (), embeds=True, has_linear=False, attends=False, defined="")
    settings = settings_for(way, traits, compiles=True)
    options = [option for option in OPTIONS if option.name != "adapters" and (not option.ways or way in option.ways)]
    values = [(option.name, value) for option in options for value in option.values]
    pairs = {pair for pair in itertools.combinations(values, 2) if pair[0][0] != pair[1][0]}
    pairs -= {
        pair for pair in pairs for refusing, refused in _REFUSED if refusing in ("", way) and {*refused} == {*pair}
    }
    assert pairs == {pair for setting in settings for pair in itertools.combinations(setting, 2)}
    assert settings[: len(values)] == [(value,) for value in values]
    assert not any(name == "compile" for setting in settings_for(way, traits, compiles=False) for name, _ in setting)
    bare = dataclasses.replace(traits, batch_norms=(), embeds=False)
    assert not {("frozen", "embeddings"), ("batch norm", "SyncBatchNorm")} & {*sum(settings_for(way, bare, True), ())}


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("train", "names no model; give package.module:NAME"),
        (f"{NETS}:Net2", "it has Block, Net, Tied"),
        (f"{NETS}:nn.Linear", "Linear needs in_features, out_features"),
        (f"{NETS}:F.relu", "relu needs input"),
        ("nothing.here:Net", "there is no module 'nothing'"),
        ("nothing.py:Net", "there is no file nothing.py"),
        (f"{NETS}:nn.Identity", "no inputs for Identity are known"),
    ],
)
def test_a_model_that_cannot_be_used_is_refused_with_what_to_do(ranks, target, message):
    with pytest.raises(UnusableModel) as refused:
        Examination(ranks, ModelSettings(model_target=target), simulated=True)
    assert message in str(refused.value)


EQUAL = {"loss": "equal", "gradients": "equal"}


ALONE = WayResult("one device", "equal", 1, memory=4321)


def report(*results: WayResult) -> ModelReport:
    return ModelReport(
        "train:Net", "Net", 1234, "batch: train:batch(n)\nloss: train:loss", "2 SIMULATED GPUs", ALONE, results
    )


def way(name: str, status="equal", **fields) -> WayResult:
    return WayResult(name, status, 2, columns={} if status in ("raises", "not tried") else EQUAL, **fields)


FAILURE = OptionFailure("clipping: norm 0.1", "differs", "gradient of a")


@pytest.mark.parametrize(
    ("results", "sentence", "code"),
    [
        ([way("ddp")], "trains as on one device under ddp", 0),
        ([way("ddp"), way("tp", "differs")], "trains as on one device under ddp; differs under tp", 1),
        ([way("ddp", failures=[FAILURE])], "trains as on one device under ddp; fails with some options under ddp", 1),
        ([way("ddp"), way("tp", "not tried")], "trains as on one device under ddp; NOT KNOWN under tp", 2),
        ([way("ddp", untried=3)], "trains as on one device under ddp; 3 settings of options NOT TRIED", 0),
        ([way("tp", "not applicable")], "no way to train applies", 2),
        ([way("ddp", "raises")], "raises under ddp", 1),
    ],
)
def test_one_sentence_and_one_code_say_the_verdict(results, sentence, code):
    assert (report(*results).sentence(), report(*results).exit_code) == (f"train:Net: {sentence}", code)


def test_a_row_of_the_table_has_what_was_compared():
    wrong = way("tp", "differs", reason="a mistake", site="train.py:3")
    wrong.columns = EQUAL | {"gradients": "differs"}
    lines = report(way("ddp", memory=12_345_678, sent=456, settings=5, untried=2, failures=[FAILURE]), wrong).lines()
    assert lines[0] == "Net, 1,234 parameters, on 2 SIMULATED GPUs"
    rows = {line.split()[0]: line.split() for line in lines if line}
    assert " ".join(rows["ddp"][1:]) == "2 equal equal - - - - 12.3 MB 456 B 4 equal, 1 FAIL, 2 not tried"
    assert lines[5].split() == ["one", "device", "1", *"------", "4.32", "kB", "-", "-"]
    assert rows["tp"][1:4] == ["2", "equal", "DIFFERS"]
    assert "ddp: differs with clipping: norm 0.1: gradient of a" in lines
    assert "tp: differs: a mistake (train.py:3)" in lines


def test_only_what_a_run_decides_is_a_change_since_a_golden_table(tmp_path):
    file = tmp_path / "golden.json"
    report(way("ddp", settings=5, untried=1), way("tp", "differs")).write(str(file))
    golden = read_golden(str(file))
    assert report(way("ddp", settings=3, untried=3), way("tp", "differs")).changes(golden) == []
    assert report(way("ddp", failures=[FAILURE]), way("tp")).changes(golden) == [
        "ddp: equal, differs with clipping: norm 0.1; before: equal",
        "tp: equal; before: differs",
    ]
    file.write_text("[]")
    with pytest.raises(ValueError, match=r"is no report of mgpu-check model .*; remove it"):
        read_golden(str(file))
