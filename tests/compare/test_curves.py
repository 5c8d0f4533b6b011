"""Curves of right runs and of runs with a mistake: how they are judged, read, run and shown."""

from __future__ import annotations

import json
import math
import random
import re

import pytest

from mgpu_check.__main__ import main as command
from mgpu_check.cli.compare import main
from mgpu_check.compare.arguments import repeated
from mgpu_check.compare.curves.judging import ALARM, RunCurve, Side, judge, quantile
from mgpu_check.compare.curves.outcome import table, verdict_of
from mgpu_check.compare.curves.reading import side_of
from mgpu_check.compare.traces.file import write_run
from tests.compare.conftest import script
from tests.compare.test_trace_files import run


def side(name, rows) -> Side:
    return Side(name, [RunCurve(f"{name}{number}", dict(enumerate(row, 1))) for number, row in enumerate(rows)])


def falling(step: int, rate: float = 1.0) -> float:
    return 2.0 * math.exp(-rate * step / 30) + 0.3


def batches(draw: random.Random, steps: int) -> list[float]:
    """Independent noise at each step."""
    return [falling(step) * (1 + 0.1 * draw.gauss(0, 1)) for step in range(steps)]


def drifting(draw: random.Random, steps: int) -> list[float]:
    """Noise that lasts."""
    made, off = [], 0.0
    for step in range(steps):
        off = 0.98 * off + 0.02 * draw.gauss(0, 1)
        made.append(falling(step) + off)
    return made


def rounded(draw: random.Random, steps: int) -> list[float]:
    """One roundoff that grows until it is as large as the noise, in few digits."""
    size = 1e-7 * draw.gauss(0, 1)
    return [round(falling(step) + 0.1 * math.tanh(size * math.exp(0.6 * step)), 4) for step in range(steps)]


def spiked(draw: random.Random, steps: int) -> list[float]:
    """Rare outliers."""
    return [falling(step) + 0.01 * draw.gauss(0, 1) + (draw.random() < 0.03) * draw.random() for step in range(steps)]


@pytest.mark.parametrize("make", [batches, drifting, rounded, spiked])
@pytest.mark.parametrize("runs", [2, 3])
def test_right_runs_part_no_more_often_than_the_rule_says(make, runs):
    draw = random.Random(7)
    several = [[make(draw, 24) for _ in range(2 * runs)] for _ in range(40)]
    pairs = [(side("a", rows[:runs]), side("b", rows[runs:])) for rows in several]
    assert (
        sum(judge(one, other, alarm=0.05).parted is not None for one, other in pairs) <= 7
    )  # 2 are expected: 3 in 1000 have 7
    assert sum(judge(one, other).parted is not None for one, other in pairs) <= 1


def test_quantiles_of_student():
    known = {
        (1, 0.05): 12.706,
        (2, 0.05): 4.3027,
        (3, 0.05): 3.1824,
        (4, 0.05): 2.7764,
        (5, 0.01): 4.0321,
        (8, 1e-3): 5.0413,
    }
    for (freedom, probability), value in known.items():
        assert quantile(freedom, probability) == pytest.approx(value, rel=1e-4)
    assert quantile(1, 1e-7) == pytest.approx(2 / math.pi / 1e-7, rel=1e-6)


@pytest.mark.parametrize("make", [batches, drifting])
def test_a_learning_rate_that_is_not_scaled_parts_beyond_seeds(make):
    draw = random.Random(3)
    one = side("a", [make(draw, 200) for _ in range(5)])
    other = side("b", [[v - falling(s) + falling(s, 1.5) for s, v in enumerate(make(draw, 200))] for _ in range(5)])
    verdict = verdict_of(judge(one, other))
    assert verdict.kind == "differs" and verdict.step <= 65
    assert any("PARTED" in line for line in table(judge(one, other)))


def test_the_first_step_where_roundings_do_not_explain_the_difference():
    draw = random.Random(5)
    one, other = (side(name, [rounded(draw, 24) for _ in range(3)]) for name in "ab")
    changed = side("b", [{**c.values, **{s: c.values[s] + 0.001 for s in range(9, 25)}}.values() for c in other.curves])
    assert verdict_of(judge(one, other)).kind == "equal"
    verdict = verdict_of(judge(one, changed))
    assert (verdict.kind, verdict.step) == ("differs", 9), verdict.report


def kind_of(one, other) -> tuple[str, str]:
    verdict = verdict_of(judge(side("a", one), side("b", other)))
    return verdict.kind, str(verdict.report)


def test_what_cannot_be_judged_is_said():
    draw = random.Random(9)
    rows = [batches(draw, 64) for _ in range(8)]
    kind, text = kind_of(rows[:1], rows[1:2])
    assert kind == "undecided" and "no run was repeated, so nothing says how far two right runs part" in text
    kind, text = kind_of([rows[0]] * 3, rows[1:2])  # the same seed three times is no spread
    assert kind == "undecided" and "not counted: 2 of the runs of a, equal to another in each digit" in text
    kind, text = kind_of(rows[:3], [[v + 5 for v in rows[3]]])
    assert kind == "undecided" and "one run may be an outlier" in text
    noise = [[draw.gauss(0, 1) for _ in range(64)] for _ in range(6)]
    kind, text = kind_of(noise[:3], noise[3:])
    assert kind == "undecided" and "would hide that half of the training has no effect" in text
    noise = [[3 + 1e-7 * row[0], *row[1:]] for row in noise]  # the first step alone is judged
    kind, text = kind_of(noise[:3], noise[3:])
    assert kind == "undecided" and "has no effect on 63 of 64 steps" in text
    kind, text = kind_of(rows[:4], [row[:60] for row in rows[4:]])
    assert kind == "undecided" and "the 60 common steps agree, and 4 were not compared" in text
    kind, text = kind_of([[]], [[]])
    assert kind == "not comparable" and "the curves share no step" in text
    kind, text = kind_of(rows[:4], [[math.nan, *row] for row in rows[4:]])
    assert kind == "not comparable" and "not finite from the first step on" in text


def test_runs_without_numbers_are_weighed_too():
    draw = random.Random(11)
    rows = [batches(draw, 64) for _ in range(16)]
    ended = [[*row[:40], *[math.nan] * 24] for row in rows[8:]]
    kind, text = kind_of(rows[:8], ended)
    assert (
        kind == "differs" and "from step 41 on the loss becomes not finite in 0 of a (8 runs), 8 of b (8 runs)" in text
    )
    at_other_steps = [[*row[: 40 + n], *[math.nan] * (24 - n)] for n, row in enumerate(rows[8:])]
    assert kind_of(rows[:8], at_other_steps)[0] == "differs"
    kind, text = kind_of(rows[:3], ended[:3])
    assert kind == "undecided" and "with a probability of up to 0.1" in text
    assert kind_of(rows[:3], [*ended[:1], *rows[4:6]])[0] == "undecided"


def test_another_scale_of_the_loss_is_said():
    draw = random.Random(13)
    rows = [rounded(draw, 24) for _ in range(6)]
    kind, text = kind_of(rows[:3], [[v / 4 for v in row] for row in rows[3:]])
    assert (
        kind == "differs" and "b is 0.25 times a at every step, and equal otherwise: is the logged loss scaled" in text
    )


def write(path, rows, names=("step", "loss")) -> None:
    path.write_text("\n".join([",".join(names), *(",".join(map(str, row)) for row in rows)]) + "\n")


def test_files_with_curves(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw = random.Random(15)
    for folder, rate in (("old", 1.0), ("new", 1.0), ("wrong", 1.5)):
        tmp_path.joinpath(folder).mkdir()
        for seed in range(4):
            rows = [(10 * s, falling(s, rate) * (1 + 0.02 * draw.gauss(0, 1)), 0.1) for s in range(1, 101)]
            write(tmp_path / folder / f"{seed}.csv", rows, ("step", "train/loss", "lr"))
    assert main(["--curve", "old", "new/*.csv"]) == 0
    text = capsys.readouterr().out
    assert "equal: new/*.csv (4 runs) and old (4 runs) part by no more than right runs" in text
    assert main(["--curve", "old", "wrong", "--html=a.html", "--json=a.json"]) == 1
    assert "differs: the curves part" in capsys.readouterr().out
    page = tmp_path.joinpath("a.html").read_text()
    assert page.count("<svg") == 2 and "1: right runs part no further" in page and ">parted<" in page
    assert not re.findall(r'(?:src|href)="', page)
    found = json.loads(tmp_path.joinpath("a.json").read_text())
    assert (found["verdict"], found["false_alarms"], found["freedom"]) == ("differs", ALARM, 6)
    assert found["step"] % 10 == 0 and len(found["sides"][1]["runs"]) == 4
    assert main(["--curve=200", "old", "wrong", "--tag=lr"]) == 2  # equal in each digit
    assert "no run was repeated" in capsys.readouterr().out


def test_columns_of_tables(tmp_path):
    table = tmp_path / "runs.csv"
    write(table, [(1, 2.0, 2.5, 1.9), (2, 1.5, "", 1.4)], ("Step", "one - loss", "two - loss", "one - loss__MIN"))
    curves = side_of(str(table), None).curves
    assert [(c.name, c.values) for c in curves] == [
        ("runs.csv: one - loss", {1: 2.0, 2: 1.5}), ("runs.csv: two - loss", {1: 2.5})
    ]  # fmt: skip
    write(table, [(0.5, 2.0), (0.25, "nan")], ("loss", "val_loss"))
    (curve,) = side_of(str(table), None).curves
    assert curve.values == {1: 0.5, 2: 0.25}
    assert math.isnan(side_of(str(table), "val_loss").curves[0].values[2])
    write(table, [(1, 0.5, 2.0)], ("step", "a", "b"))
    for word, tag, words in (
        (table, None, "has several curves: a, b; give one of them, as in --tag=a"),
        (table, "c", "--tag=c: .* has no such curve; it has a, b"),
        (tmp_path / "no.csv", None, "there is no such file"),
    ):
        with pytest.raises(ValueError, match=words):
            side_of(str(word), tag)
    names = ("Step", "valiant-1 - loss", "a - loss", "valiant-1 - _step")
    write(table, [(1, 0, 2.5, 1), ("inf", 1, 1, 1), ("nan", 1, 1, 1)], names)
    assert [c.values for c in side_of(str(table), None).curves] == [{1: 0.0}, {1: 2.5}]
    table.write_text("step,loss\n1,2\n", encoding="utf-16")
    with pytest.raises(ValueError, match=r"runs.csv is no table: .*give a CSV file in UTF-8"):
        side_of(str(table), None)
    table.write_text("step,loss\n")
    with pytest.raises(ValueError, match="has no rows below its header"):
        side_of(str(table), None)


def test_traces_have_the_run_and_the_run_that_rounding_moves(tmp_path):
    write_run(tmp_path / "a.trace", run())
    assert [c.name for c in side_of(str(tmp_path / "a.trace"), None).curves] == [
        "a.trace",
        "a.trace, moved by roundoffs",
    ]
    tmp_path.joinpath("b.trace").write_text("nothing")
    with pytest.raises(ValueError, match="is no trace of a run"):
        side_of(str(tmp_path / "b.trace"), None)


def test_event_files(tmp_path):
    writers = pytest.importorskip("torch.utils.tensorboard", exc_type=ImportError)
    for step, value in ((1, 2.0), (2, 1.5), (2, 1.25)):  # a resumed run repeats a step
        with writers.SummaryWriter(str(tmp_path / "run"), filename_suffix=f".{step}{value}") as writer:
            writer.add_scalar("train/loss", value, step)
            writer.add_scalar("lr", 0.1, step)
            writer.add_scalar("val/loss", 9.0, step, new_style=True)
    assert side_of(str(tmp_path), None).curves[0].values == {1: 2.0, 2: 1.25}
    assert side_of(str(tmp_path / "run"), "val/loss").curves[0].values == {1: 9.0, 2: 9.0}


def test_event_files_without_the_extra(tmp_path, monkeypatch):
    monkeypatch.setattr("mgpu_check.compare.curves.reading.find_spec", lambda name: None)
    tmp_path.joinpath("events.out.tfevents.1").touch()
    with pytest.raises(ValueError, match=r"event files need tensorboard.*pip install 'mgpu-check\[curves\]'"):
        side_of(str(tmp_path), None)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--curve", "a.csv"], "curves of 1 sides given: a.csv; give two sides"),
        (["--curve", "a.csv", "b.csv"], "a.csv: there is no such file"),
        (
            ["--curve", "--against=main", "--repeats=9", "--gpus=4", "a.csv", "b.csv"],
            "--gpus, --against, --repeats: curv",
        ),
        (["--curve", "--steps=3", "--unjudged=a=b", "--", __file__], "--steps, --unjudged: "),
        (["--repeats=9", "--tag=a", "--", "a.py"], "--repeats, --tag: only --curve"),
        (["--curve", "--a=--seed={R}", "--b=--seed=2", "--", __file__], "{R} is in the arguments of one side only"),
        (["--curve=0", "a.csv", "b.csv"], "'0' is not a number of steps"),
        (["--curve", "--repeats=1", "--", "a.py"], "'1' is not a number of runs"),
        (["--curve", "--golden=a.trace", "--", "a.py"], "--curve repeats runs, and --golden compares one"),
    ],
)
def test_wrong_usage(argv, words, capsys):
    assert command(["compare", *argv]) == 4
    assert words in capsys.readouterr().err


def test_numbers_of_repeats():
    words = ["--seed={R}", "{100 + R}", "{7+R}", "{RR}"]
    assert repeated(words, 2) == ["--seed=2", "102", "9", "{RR}"]


@pytest.mark.parametrize(
    ("mistake", "step"),
    [
        ("", None),
        pytest.param("sampler", 5, marks=pytest.mark.slow),
        pytest.param("rate", 2, marks=pytest.mark.slow),
        pytest.param("schedule", 6, marks=pytest.mark.slow),
    ],
)
def test_a_script_with_rounding_as_the_control(compare, mistake, step):
    arguments = ["1", *[mistake] * bool(mistake)]
    found = compare(script("long"), "--curve=12", "--repeats=2", code=int(bool(mistake)), arguments=arguments, more=1)
    assert "repeats differ by rounding alone" in found.text
    assert found.json["step"] == step, found.text
    assert ("the runs see other samples from step 5 on" in found.text) == (mistake == "sampler")


def test_a_run_that_resumes_an_earlier_one_is_no_repeat(compare, tmp_path):
    tmp_path.joinpath("out").mkdir()
    words = ("--curve", "--repeats=2", "--gpus=1", "--a=1", "--b=2", f"--html={tmp_path}/out.html")
    text = compare(script("with_a_snapshot"), *words, code=2, arguments=["--batch=8", "0.0"]).text
    assert "not comparable: --a: the run “--a, run 2 of 2" in text and "which an earlier run of this comparison" in text
    assert "which an earlier run of this comparison" in tmp_path.joinpath("out.html").read_text()


def test_a_script_with_seeds_as_the_control(compare):
    """Whose few steps differ more between seeds than training changes them."""
    words = ("--curve=4", "--repeats=2", "--gpus=1", "--a=right", "--b=rate")
    found = compare(script("long"), *words, code=2, arguments=["{5+R}"])
    assert "repeats differ by the seed in their arguments" in found.text and "moved by roundoffs" not in found.text
    assert "would hide that half of the training has no effect" in found.text
    means = [span["means"] for span in found.json["spans"]]
    assert all(one == other for one, other in means)  # the same seeds on both sides
