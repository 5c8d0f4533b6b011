"""The page of a report: its matrices, charts, picture of a node, and words."""

from __future__ import annotations

import re
from dataclasses import replace
from html import unescape

import pytest

from mgpu_check.acceptance.report import page
from mgpu_check.acceptance.report.page import pictures
from mgpu_check.acceptance.report.summary import lines
from mgpu_check.acceptance.run_report import RunReport, Verdict
from mgpu_check.devices.observations import Observation, Part, Subject
from tests.acceptance import run_reports
from tests.acceptance.report_pages import HOSTILE, html_of, report, titled


@pytest.mark.parametrize("name", run_reports.ALL)
def test_a_page_is_one_file_with_unique_ids(name):
    html = html_of(name)
    assert html.startswith("<!doctype html>") and "prefers-color-scheme: dark" in html
    assert not re.findall(r'(?:src|href)="(?!#)|@import|url\((?!#)|<script', html)  # nothing is loaded
    ids = re.findall(r'\bid="([^"]+)"', html)
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="|url\()#([^")]+)', html)) <= set(ids)
    assert unescape(re.search('<p class="headline"><strong>(.*?)</strong>', html)[1]) == lines(report(name))[0]
    for gpu in report(name).gpus:
        assert f"<h3>GPU {gpu.number}</h3>" in html and gpu.uuid in html and gpu.serial in html and gpu.pci in html


def test_the_page_of_a_bad_node():
    html = html_of("bad")
    text = unescape(html)
    assert '<div class="verdict bad">' in html
    for words in (
        "follows the device: on ranks 0, 4 and 7 too",
        "mgpu-check accept --gpus=8 -k 'compute or training' --hypothesis-seed=7",
        '"bits": "0x7fc0"',
        "element 131072 is 28.0, not 36.0",
        "GPU 2: 12 GiB of 60 GiB were tested",
        "thermal (hardware)",
        "now 8 packets",
    ):
        assert words in text, words
    cards = re.findall(r'<section class="card([^"]*)">\s*<h3>GPU (\d)</h3>', html)
    assert {number: shade.strip() for shade, number in cards} == {
        **dict.fromkeys("12467", ""),
        **dict.fromkeys("05", "touched"),
        "3": "accused",
    }
    assert html.count("<dt>serial</dt><dd>165302400003</dd>") == 2, "of the accused part, and on its card"
    assert html.index("Do: drain the node, reset this GPU") < html.index('class="node"') < html.index("<h2>Checks")
    assert "<tr><td>power limit</td><td>700 W</td></tr>" in html, "a fact that all GPUs have alike is said once"
    card = html.split("<h3>GPU 3</h3>")[-1].split("</section>")[0]
    assert re.search(r"compute.*?failed.*?3 of 4", card, re.DOTALL)


def test_a_page_of_two_hosts_names_them_and_says_that_it_is_simulated():
    html = html_of("two hosts")
    assert "SIMULATED: this shows what the checks do" in html and "memory-stuck-bit:device=6" in html
    assert re.search(r'node-a</td>\s*<td class="yes">ACCEPTED.*?node-b</td>\s*<td class="no">REJECTED', html, re.DOTALL)
    assert [title for title in titled(html) if "over time" in title] == [
        f"Temperature, power and clocks of the GPUs of node-{name} over time" for name in "ab"
    ]
    assert titled(html)["Copy bandwidth, 256 MiB, in GB/s"].count("21.0") == 32


def test_nothing_that_is_quoted_is_markup():
    wrong = Observation("memory", Subject("gpu", (0,)), "failed", HOSTILE, HOSTILE, evidence={HOSTILE: HOSTILE})
    whole, verdict = report("one GPU"), Verdict("REJECTED", unknown=(HOSTILE,), unexplained=(0,))
    hosts, gpus = (replace(whole.hosts[0], name="n<i>"),), (replace(whole.gpus[0], name=HOSTILE, uuid=HOSTILE),)
    odd = replace(whole, hosts=hosts, gpus=gpus, observations=(wrong,), verdict=verdict, command=HOSTILE)
    html = page.render(odd)
    assert "<script" not in html and "<i>" not in html and "&lt;script&gt;" in html
    lines(odd)


def drawn(given: RunReport) -> dict[str, str]:
    """Return the state of each box, by GPU, and of each wire that is marked, by its tooltip."""
    (picture,) = pictures(given)
    found: dict[str, str] = {box.lines[0]: box.state for box in picture.boxes if box.state != "good"}
    return found | {wire.words: wire.state for wire in picture.wires if wire.state != "good"}


def test_suspected_and_unchecked_parts_are_not_drawn_as_right():
    given = run_reports.good(2)
    nothing = replace(given, observations=())
    assert drawn(nothing)["GPU 0"] == "none" and drawn(nothing)["link GPU 0 ↔ 1: not checked"] == "none"
    assert "Dotted: not checked." in page.render(nothing)
    rivals = Verdict("REJECTED", rivals=(((Part("gpu", (0,)),), (Part("gpu", (1,)),)),))
    assert drawn(replace(given, verdict=rivals)) == {"GPU 0": "open", "GPU 1": "open"}
    wrong = Observation("links", Subject("copy", (0, 1)), "failed")
    loose = replace(
        given,
        observations=(*given.observations, wrong),
        verdict=Verdict("REJECTED", unexplained=(len(given.observations),)),
    )
    assert drawn(loose) == {"link GPU 0 → 1: suspected": "open"}
    unknown = replace(given, observations=(replace(wrong, outcome="unknown"),))
    assert drawn(unknown)["link GPU 0 ↔ 1: not checked"] == "none", "an unknown outcome has checked nothing"
