"""The page of a report: its matrices, charts and words."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from dataclasses import replace
from html import unescape

import pytest

from mgpu_check.acceptance.report import page
from mgpu_check.acceptance.report.page import Grid
from mgpu_check.acceptance.report.summary import lines
from mgpu_check.acceptance.run_report import CheckRun, Verdict
from mgpu_check.devices.observations import Measurement, Observation, Subject
from tests.acceptance import run_reports
from tests.acceptance.report_pages import HOSTILE, html_of, report, svgs, tables, texts, titled


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


def test_the_matrices_have_a_number_in_each_cell():
    found = titled(html_of("bad"))
    bandwidth = found["Copy bandwidth, 256 MiB, in GB/s"]
    assert bandwidth.count("-") == 8 and "161" in bandwidth  # of a GPU to itself nothing is known; 0.42 of the others
    assert len(bandwidth) == 2 + 16 + 64
    assert "3.09" in found["Copy latency, 4 B, in us"]
    failures = found["Failures by pair"]
    assert len(failures) == 2 + 16 + 64
    # Two cases of the accused link; the other 2 is the name of a row and of a column.
    assert failures.count("2") == 3 and failures.count("-") == 8
    assert {"compute", "3", "links", "collectives"} <= set(found["Failures by check and GPU"])
    assert "matrix product float16, size 8192, TFLOP/s" in found["Speed of each GPU"]
    cells = [[cell for row in table for cell in row] for table in tables(html_of("bad"))]
    marked = [[cell.get("title") for cell in table if cell.get("class") == "marked"] for table in cells]
    assert [len(some) for some in marked] == [1, 1, 1, 1, 3]
    assert marked[0] == ["from GPU 0, to GPU 5: 161 GB/s, accused"]
    assert marked[3] == ["matrix product float16, size 8192, TFLOP/s, GPU 3: 290, too slow"]
    assert "<td>361 GB/s</td>" in html_of("bad")


def shades(grid: Grid) -> list[list[float]]:
    return [[cell.shade for cell in cells] for _, cells in grid.cells()]


def test_the_shade_of_a_cell_is_its_share_of_the_scale_which_is_stated():
    rows, columns, values = ["a", "b"], ["0", "1"], [[100.0, 50.0], [None, float("inf")]]
    texts = [["100", "50.0"], ["-", "inf"]]
    much = Grid(rows, columns, [[100.0, 75.0], [None, float("inf")]], texts, unit="GB/s")
    assert shades(much) == [[0.0, 22.5], [0.0, 0.0]]
    assert shades(Grid(rows, columns, values, texts)) == [[0.0, 45.0], [0.0, 0.0]]
    assert much.legend() == "Shade: no colour at the best value, 100 GB/s; most at half of it."
    little = Grid(rows, columns, values, texts, scale="little", unit="us")
    assert shades(little) == [[45.0, 0.0], [0.0, 0.0]]
    assert little.legend() == "Shade: no colour at the best value, 50.0 us; most at twice of it."
    equal = Grid(rows, columns, [[7.0, 7.0]] * 2, texts, scale="much")
    assert shades(equal) == [[0.0, 0.0]] * 2
    failures = Grid(rows, columns, [[0.0, 0.0], [1.0, 100.0]], texts, scale="failures", unit="failed")
    assert shades(failures)[0] == [0.0, 0.0] and shades(failures)[1][0] > 15 and shades(failures)[1][1] == 45
    assert Grid(rows, columns, [[0.0, None]] * 2, texts, scale="failures").legend() == ""
    each = Grid(rows, columns, [[2.0, 4.0], [8.0, 16.0]], texts, scale=["much", "little"])
    assert shades(each) == [[45.0, 0.0], [0.0, 45.0]] and "a scale of its own" in each.legend()


def luminance(colour: list[float]) -> float:
    parts = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in colour]
    return 0.2126 * parts[0] + 0.7152 * parts[1] + 0.0722 * parts[2]


def test_numbers_are_readable_on_each_shade_on_light_and_on_dark_ground():
    """4.5 is what WCAG 2 wants of the contrast of text."""
    for ground in re.findall(r":root \{(.*?)\}", html_of("one GPU"), re.DOTALL):
        colours = {
            name: [int(number[place : place + 2], 16) / 255 for place in (0, 2, 4)]
            for name, number in re.findall(r"--(\w+): #(\w{6})", ground)
        }
        for name in ("unsure", "wrong"):
            for share in (0.0, 0.2, 0.45):
                mixed = [share * a + (1 - share) * b for a, b in zip(colours[name], colours["panel"], strict=True)]
                bright, dark = sorted((luminance(mixed), luminance(colours["text"])), reverse=True)
                assert (bright + 0.05) / (dark + 0.05) >= 4.5, (name, share)


def test_telemetry_is_drawn_over_time_with_the_checks():
    chart = titled(html_of("bad"))["Temperature, power and clocks of the GPUs of node-a over time"]
    for text in (*run_reports.CHECKS, "Temperature in °C", "Power in W", "SM clock in MHz", "GPU 3 (accused)", "GPU 4"):
        assert text in chart
    assert "min since the start of the run" in chart and "Triangles: clocks are held down" in chart
    (svg,) = [svg for svg in svgs(html_of("bad")) if "over time" in svg[0].text]
    groups = [element.get("class") for element in svg.iter("{http://www.w3.org/2000/svg}g")]
    bars = [element.get("class") for element in svg.iter("{http://www.w3.org/2000/svg}rect")]
    assert sum(look.startswith("series") for look in groups) == 3 * 7 and groups.count("accused dash0") == 3
    assert len(bars) == 8 and bars.count("bar bad") == 5 and groups.count("held") == 1
    told = [element.text for element in svg.iter("{http://www.w3.org/2000/svg}title")]
    assert "GPU 3 (accused): 41 to 88, at the end 88" in told
    assert "memory: unknown, 90 s from 3 s on" in told
    assert "Triangles" not in str(titled(html_of("good")))
    assert "No telemetry was kept" in html_of("inconclusive")


def test_a_page_of_two_hosts_names_them_and_says_that_it_is_simulated():
    html = html_of("two hosts")
    assert "SIMULATED: this shows what the checks do" in html and "memory-stuck-bit:device=6" in html
    assert re.search(r'node-a</td>\s*<td class="yes">ACCEPTED.*?node-b</td>\s*<td class="no">REJECTED', html, re.DOTALL)
    assert [title for title in titled(html) if "over time" in title] == [
        f"Temperature, power and clocks of the GPUs of node-{name} over time" for name in "ab"
    ]
    assert titled(html)["Copy bandwidth, 256 MiB, in GB/s"].count("21.0") == 32


def test_more_gpus_than_one_matrix_holds():
    first, seen, speeds = report("two hosts"), [], []
    hosts = tuple(replace(first.hosts[0], number=n, name=f"n{n}") for n in range(5))
    gpus = tuple(gpu for n in range(5) for gpu in run_reports.gpus(8, host=n, first=8 * n))
    for one, other in ((0, 1), (0, 8), (1, 9), (9, 0), (32, 33)):
        pair = Subject("copy", (one, other))
        seen.append(Observation("links", pair, "passed"))
        speeds.append(Measurement("links", pair, "copy bandwidth", "B/s", 1e9 * (one + 2), 5, 64))
    of_five = replace(
        first, hosts=hosts, gpus=gpus, observations=tuple(seen), measurements=tuple(speeds), samples=(),
        verdict=Verdict("ACCEPTED"), verdicts={},
    )  # fmt: skip
    html = page.render(of_five)
    found = titled(html)
    assert "34.0" in found["Copy bandwidth on n4, 64 B, in GB/s"]
    between = found["Copy bandwidth between hosts, the worst of all pairs, 64 B, in GB/s"]
    assert "2.00" in between and "11.0" in between and "3.00" not in between
    assert "no verdict" in html
    html = page.render(replace(of_five, verdicts={n: Verdict("ACCEPTED") for n in range(4)}))
    # Of five hosts the one that was not accepted is shown with its GPUs.
    assert re.findall(r"<h3>GPU (\d+)", html) == [str(number) for number in range(32, 40)]
    assert "Of 4 hosts GPUs, matrices and telemetry are not shown here" in html and "on n0" not in str(titled(html))


def test_nothing_that_is_quoted_is_markup():
    wrong = Observation("memory", Subject("gpu", (0,)), "failed", HOSTILE, HOSTILE, evidence={HOSTILE: HOSTILE})
    whole, verdict = report("one GPU"), Verdict("REJECTED", unknown=(HOSTILE,), unexplained=(0,))
    hosts, gpus = (replace(whole.hosts[0], name="n<i>"),), (replace(whole.gpus[0], name=HOSTILE, uuid=HOSTILE),)
    odd = replace(whole, hosts=hosts, gpus=gpus, observations=(wrong,), verdict=verdict, command=HOSTILE)
    html = page.render(odd)
    assert "<script" not in html and "<i>" not in html and "&lt;script&gt;" in html
    lines(odd)


def test_checks_that_have_not_begun_stand_last():
    runs = (
        CheckRun("health", 0.0, 0.0, "unknown"),
        CheckRun("memory", 3.0, 2.0, "passed"),
        CheckRun("inventory", 0.0, 3.0, "passed"),
    )
    stopped = replace(report("one GPU"), checks=runs)
    table = [line.split()[0] for line in lines(stopped) if re.match(r"(health|memory|inventory) ", line)]
    assert table == ["inventory", "memory", "health"]
    (chart,) = [svg for svg in svgs(page.render(stopped)) if "over time" in svg[0].text]
    assert "health" in texts(chart) and ET.tostring(chart, encoding="unicode").count('class="bar ') == 2


def test_of_what_was_measured_several_times_the_slowest_is_shown_and_of_several_sizes_the_most_telling():
    gpu, pair = Subject("gpu", (0,)), Subject("copy", (0, 1))
    speeds = (
        Measurement("compute", gpu, "product", "FLOP/s", 5e12, 3, 64),
        Measurement("compute", gpu, "product", "FLOP/s", 4e12, 3, 64),
        Measurement("compute", gpu, "product", "FLOP/s", 7e11, 3, 32),
        Measurement("compute", gpu, "launch", "s", 5e-6, 3, 4),
        Measurement("compute", gpu, "launch", "s", 6e-6, 3, 4),
        Measurement("links", pair, "copy", "s", 9e-6, 3, 4),
        Measurement("links", pair, "copy", "s", 8e-6, 3, 4),
        Measurement("links", pair, "copy", "s", 3e-3, 3, 1 << 20),
    )
    html = page.render(replace(run_reports.good(2, 5.0), measurements=speeds, samples=()))
    found = titled(html)
    assert found["Speed of each GPU"][-6:] == [
        *("product, size 64, TFLOP/s", "4.00", "-"),
        *("launch, 4 B, us", "6.00", "-"),
    ]
    assert "9.00" in found["Copy, 4 B, in us"] and "8.00" not in found["Copy, 4 B, in us"]
    rows = re.findall(r"<tr><td>(product|copy)</td><td>(.*?)</td><td class=\"number\">(.*?)</td><td>(.*?)</td>", html)
    assert rows == [("copy", "1 pair", "1 MiB", "3 ms"), ("product", "1 GPU", "size 32", "700 GFLOP/s")]
