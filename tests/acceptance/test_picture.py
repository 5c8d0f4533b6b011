"""The picture of a node: which parts it marks, and how."""

from __future__ import annotations

import re
from dataclasses import replace

from mgpu_check.acceptance.report import page
from mgpu_check.acceptance.report.page import Picture, pictures
from mgpu_check.acceptance.run_report import Accusation, RunReport, Verdict
from mgpu_check.devices.observations import Observation, Part, Subject
from tests.acceptance import run_reports
from tests.acceptance.report_pages import html_of, report, svgs, texts


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


def test_links_to_the_host_and_the_host_are_marked():
    given = accusing(run_reports.good(4), Part("host-link", (2,)), Part("link", (3, 1)), Part("link", (1, 3)))
    assert drawn(given) == {"link host - GPU 2: accused": "bad", "link GPU 1 ↔ 3: accused": "bad"}
    (host,) = pictures(accusing(run_reports.good(4), Part("host", (0,))))
    assert host.state == "bad" and of(host) == {}


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


def test_each_host_has_a_picture_and_a_link_between_hosts_marks_its_ends():
    given = accusing(report("two hosts"), Part("link", (1, 6)))
    first, second = pictures(given)
    assert (first.host, second.host) == ("node-a", "node-b")
    assert of(first) == {"GPU 1": "open"} and of(second) == {"GPU 6": "open"}
    assert [box.lines[2] for box in first.boxes] == ["", "link 1 → 6", "", ""]


def test_nodes_of_any_size_fit_their_frame():
    for count in (1, 2, 3, 4, 8, 9, 16):
        given = accusing(run_reports.good(count), *([Part("link", (0, count - 1))] if count > 1 else []))
        (picture,) = pictures(given)
        places = {(box.x, box.y) for box in picture.boxes}
        assert len(places) == count
        assert all(38 <= x <= 360 - 38 and 34 < y < picture.height - 52 for x, y in places)
        assert sum(wire.state == "bad" for wire in picture.wires) == (count > 1)
        numbers = [float(text) for wire in picture.wires for text in re.findall(r"-?\d+\.?\d*", wire.path)]
        assert max(numbers) <= max(360, picture.height)
