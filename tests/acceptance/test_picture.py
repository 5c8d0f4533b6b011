"""The picture of a node: which parts it marks, and how."""

from __future__ import annotations

from dataclasses import replace

from mgpu_check.acceptance.report import page
from mgpu_check.acceptance.report.page import Picture, pictures
from mgpu_check.acceptance.run_report import Accusation, RunReport, Verdict
from mgpu_check.devices.observations import Observation, Part, Subject
from tests.acceptance import run_reports
from tests.acceptance.report_pages import html_of, svgs, texts


def accusing(given: RunReport, *parts: Part) -> RunReport:
    return replace(given, verdict=Verdict("REJECTED", tuple(Accusation(part, (), ()) for part in parts)))


def drawn(given: RunReport) -> dict[str, str]:
    """Return the state of each box, by GPU, and of each wire that is marked, by its tooltip."""
    (picture,) = pictures(given)
    return of(picture)


def of(picture: Picture) -> dict[str, str]:
    found: dict[str, str] = {box.lines[0]: box.state for box in picture.boxes if box.state != "good"}
    return found | {wire.words: wire.state for wire in picture.wires if wire.state != "good"}


def test_the_accused_parts_are_marked_by_form_and_words_too():
    assert drawn(run_reports.bad()) == {"GPU 3": "bad", "link GPU 0 → 5: accused": "bad"}
    picture = next(one for one in svgs(html_of("bad")) if one[0].text == "GPUs and links of node-a")
    assert texts(picture).count("ACCUSED") == 1 and "0 → 5" in texts(picture) and "54:00.0" in texts(picture)
    assert html_of("bad").count('<g class="mark">') == 2
    assert "Cross and thick line: accused. Thin line: checked, not accused." in html_of("bad")
    assert drawn(run_reports.good()) == {} and '<g class="mark">' not in html_of("good")


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
