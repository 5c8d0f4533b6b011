"""The page: one file, whose curves can be read without colour and on any ground."""

from __future__ import annotations

import math
import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Any

import pytest

from mgpu_check.cli.compare import main
from mgpu_check.compare.page import Curve, draw, heat_pictures
from mgpu_check.compare.traces.files import write_run
from mgpu_check.compare.traces.run_comparison import compare_runs
from tests.compare.test_trace_files import rounded, run
from tests.compare.training import gradients, having, other

NAME = "{http://www.w3.org/2000/svg}"


def picture(*curves: Curve, **options) -> ET.Element:
    return ET.fromstring(draw("A title", "loss", curves, **options))


def texts(svg: ET.Element) -> list[str]:
    return [element.text or "" for element in svg.iter(f"{NAME}text")]


@pytest.mark.parametrize("logarithmic", [False, True])
def test_whatever_the_values_are_it_is_a_picture(logarithmic):
    odd: list[list[Any]] = [[], [None], [1.0], [0.0, 0.0], [math.nan, math.inf], [-5.0, 7.0], [5e-324, 1.7e308]]
    for values in [*odd, [None, 3.0]]:
        svg = picture(Curve("a < b", values, "one"), logarithmic=logarithmic, mark=1)
        assert "nan" not in ET.tostring(svg, encoding="unicode"), values
        assert "a < b" in texts(svg)


@pytest.mark.slow  # beside the page of two runs
def test_the_page_of_a_difference(compare, by_hand, changed):
    mean = "            p.grad /= world\n"
    halved = mean, mean.replace("world", "2 * world if start == 8 else world")
    clip = "    nn.utils.clip_grad_norm_(net.parameters(), 0.5)\n"
    html = compare(changed(by_hand, halved, (clip, "")), code=1, page=True).html
    assert html.startswith("<!doctype html>") and "prefers-color-scheme: dark" in html
    assert not re.findall(r'(?:src|href)="(?!https://github.com/|#)', html)  # nothing is loaded from elsewhere
    assert "differs: step 2: the gradient of" in html and "0.5 times as large on ranks 0-1" in html
    assert 'href="https://github.com/mgpu-check/mgpu-check/blob/main/docs/classes/world-size-factor.md"' in html
    assert "forward: the outputs of 4 modules are right" in html and "<code>output of the model</code>" in html
    pictures = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]
    assert len(pictures) == 2
    assert all("step 2: first difference" in texts(svg) for svg in pictures)
    assert [look for look in ("one", "ranks", "each", "limit", "marked") if f'class="{look}"' not in html] == []


def heat(one, second):
    found = compare_runs(one, replace(second, name="b.trace"))
    return heat_pictures(found.aligned, found.rounding, found.verdict.step)


def test_where_two_runs_differ():
    """By pass, module, step and rank, in tolerances; a click opens the values."""

    def doubled(training) -> None:
        if training.rank == 1:
            training.gradient = lambda number: [g * (1 + number) for g in gradients(number)]

    right, wrong = heat(run(), run(change=doubled))
    assert (right.ranks, wrong.ranks, wrong.steps) == ("rank 0", "rank 1", [1, 2, 3])
    assert wrong.differs and not right.differs
    assert {cell.text for rows in right.rows.values() for cells in rows.values() for cell in cells} == {""}
    assert list(wrong.rows) == ["forward", "backward: gradients", "update: parameters"]
    first, second, third = wrong.rows["backward: gradients"]["net"]
    assert first.text == "" and re.fullmatch(r"1e\d", second.text) and 0 < second.shade <= third.shade
    line = r"the gradient of net\.(weight|bias): .* instead of .* tolerances of .*; norm x 2"
    assert re.fullmatch(line, second.lines[0])


def test_what_has_no_tolerance_or_was_not_compared_is_shown_so():
    def forget(made):
        for step in made.steps:
            step.gradients = dict.fromkeys(step.gradients)

    (both,) = heat(run(change=having(change=forget)), run(change=having(change=forget)))
    assert {cell.text for cell in both.rows["backward: gradients"]["net"]} == {"-"}
    (both,) = heat(run(moved=0), run(change=rounded, moved=0))
    assert {cell.text for cell in both.rows["backward: gradients"]["net"]} == {"?"}
    (both,) = heat(run(), run(change=rounded))
    assert {cell.text for cell in both.rows["backward: gradients"]["net"]} == {"·"}


def test_the_page_of_two_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a.trace", run())
    write_run(tmp_path / "b.trace", run(change=other))
    assert main(["--html=o.html", "a.trace", "b.trace"]) == 1
    html = tmp_path.joinpath("o.html").read_text()
    assert "2 ranks, compared with a.trace." in html and "one device" not in html and "<h2>Runs" not in html
    (table,) = (ET.fromstring(one) for one in re.findall(r'<table class="heat.*?</table>', html, re.DOTALL))
    opened = table.findall(".//details/div")
    assert len(opened) == 6 and "".join(opened[0].itertext()).startswith("net, step 1, ranks 0-1")
