"""Reports of the accounts in `run_reports`, and what their pages draw."""

from __future__ import annotations

import functools
import re
import xml.etree.ElementTree as ET

from mgpu_check.acceptance.report import page
from mgpu_check.acceptance.run_report import RunReport
from tests.acceptance import run_reports

# XML and Markdown escape what they quote; HTML, too.
HOSTILE = '<script>alert("1")</script> & | `x` *y* \x1b[31mred\x00\ud800'


@functools.cache
def report(name: str) -> RunReport:
    return run_reports.ALL[name]()


@functools.cache
def html_of(name: str) -> str:
    return page.render(report(name))


def svgs(html: str) -> list[ET.Element]:
    return [ET.fromstring(svg) for svg in re.findall(r"<svg.*?</svg>", html, re.DOTALL)]


def texts(svg: ET.Element) -> list[str]:
    return [element.text or "" for element in svg.iter("{http://www.w3.org/2000/svg}text")]


def tables(html: str) -> list[ET.Element]:
    return [ET.fromstring(table) for table in re.findall(r'<table class="heat.*?</table>', html, re.DOTALL)]


def titled(html: str) -> dict[str, list[str]]:
    cells = {
        table.get("aria-label"): [cell.text for row in table for cell in row if cell.text] for table in tables(html)
    }
    return cells | {svg[0].text: texts(svg) for svg in svgs(html)}
