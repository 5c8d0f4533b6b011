"""The page: one file, whose curves can be read without colour and on any ground."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest

from mgpu_check.compare.picture import Curve, draw

NAME = "{http://www.w3.org/2000/svg}"


def picture(*curves: Curve, **options) -> ET.Element:
    return ET.fromstring(draw("A title", "loss", curves, **options))


def texts(svg: ET.Element) -> list[str]:
    return [element.text or "" for element in svg.iter(f"{NAME}text")]


def points(svg: ET.Element, style: str) -> list[tuple[float, float]]:
    (line,) = [p for p in svg.iter(f"{NAME}path") if p.get("class") == style and p.get("d").count(",") > 1]
    return [(float(x), float(y)) for x, y in re.findall(r"([\d.]+),([\d.]+)", line.get("d"))]


def test_axes_curves_and_the_first_difference():
    svg = picture(Curve("one device", [4.0, 2.0, 1.0], "one"), Curve("ranks", [4.0, 3.0, 3.0], "ranks"), mark=2)
    for text in ("optimizer step", "loss", "one device", "ranks", "1", "2", "3", "step 2: first difference"):
        assert text in texts(svg)
    one, ranks = points(svg, "one"), points(svg, "ranks")
    assert one[0] == ranks[0]
    assert [x for x, _ in one] == sorted({x for x, _ in one})
    assert one[0][1] < one[1][1] < one[2][1] and ranks[1][1] == ranks[2][1] < one[1][1]
    (mark,) = [line for line in svg.iter(f"{NAME}line") if line.get("class") == "mark"]
    assert float(mark.get("x1")) == one[1][0]
    # Told apart by their marks, too.
    assert len(list(svg.iter(f"{NAME}circle"))) == 3 + 1
    assert sum(p.get("class") == "ranks cross" for p in svg.iter(f"{NAME}path")) == 3 + 1


def test_a_logarithmic_scale():
    svg = picture(Curve("deviation", [1e-3, 0.0, 1e3], "ranks"), logarithmic=True)
    assert {"1e-3", "1e0", "1e3"} <= set(texts(svg))
    lines = [p.get("d") for p in svg.iter(f"{NAME}path") if p.get("class") == "ranks"]
    assert lines[0].count("M") == 2 and "L" not in lines[0]  # a gap where there is no logarithm


@pytest.mark.parametrize(
    "values", [[], [None], [1.0], [0.0, 0.0], [float("nan"), float("inf")], [-5.0, 7.0], [1e-30, 2e-30], [None, 3.0]]
)
@pytest.mark.parametrize("logarithmic", [False, True])
def test_whatever_the_values_are_it_is_a_picture(values, logarithmic):
    svg = picture(Curve("a < b", values, "one"), logarithmic=logarithmic, mark=1)
    assert "nan" not in ET.tostring(svg, encoding="unicode")


def test_a_long_run_is_thinned_out():
    svg = picture(Curve("one", [float(i) for i in range(100_000)], "one"))
    assert len(points(svg, "one")) <= 2001
    assert len(texts(svg)) < 40


def test_the_page_of_a_difference(compare, by_hand, changed):
    script = changed(
        by_hand, ("            p.grad /= world\n", "            p.grad /= 2 * world if start == 8 else world\n")
    )
    script = changed(script, ("    nn.utils.clip_grad_norm_(net.parameters(), 0.5)\n", ""))
    html = compare(script, code=1).html
    assert html.startswith("<!doctype html>") and "prefers-color-scheme: dark" in html
    assert not re.findall(r'(?:src|href)="(?!https://github.com/)', html)  # nothing is loaded from elsewhere
    assert "differs: step 2: the gradient of" in html and "0.5 times as large on ranks 0-1" in html
    assert 'href="https://github.com/mgpu-check/mgpu-check/blob/main/docs/classes/world-size-factor.md"' in html
    pictures = [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]
    assert len(pictures) == 2
    assert all("step 2: first difference" in texts(svg) for svg in pictures)
    styles = re.search(r"<style>(.*?)</style>", html, re.DOTALL)[1]
    for style in ("one", "ranks", "each", "limit", "mark", "grid", "axis", "marked", "dot", "cross"):
        assert f".{style} " in styles
