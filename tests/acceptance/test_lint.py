"""Thresholds that can find nothing are found: those of well-known tables, and what people mistype."""

from __future__ import annotations

import copy
import json
import math
from importlib.resources import files
from typing import Any

import pytest

from mgpu_check.acceptance import baseline as baselines
from mgpu_check.acceptance import skus
from mgpu_check.acceptance.documents import read_document
from mgpu_check.acceptance.lint import Remark, lint, lint_baseline, lint_floors
from mgpu_check.acceptance.skus import TABLE, packaged_floors
from mgpu_check.cli.accept_lint import main
from mgpu_check.devices.pcie import bytes_per_second

OWN: dict[str, Any] = json.loads(files("mgpu_check.acceptance").joinpath(TABLE).read_text())
PACKAGED = {sku["names"][0]: sku for sku in OWN["skus"]}


def table(
    name: str = "NVIDIA H200", quantity: str = "", pcie: Any = None, nominal: Any = None, **floor: Any
) -> list[Remark]:
    """Return the findings in our table for one model, with changes to one floor."""
    sku = copy.deepcopy(PACKAGED[name])
    sku["pcie"] = pcie or sku["pcie"]
    sku["nominal"] = nominal or sku["nominal"]
    for entry in sku["floors"]:
        if entry["quantity"] == quantity:
            entry.update(floor)
    return lint_floors(skus.FORM.decoded({**OWN, "skus": [sku]}, "t.json"))


def test_our_own_table_is_clean_and_each_source_and_reason_is_used():
    own = packaged_floors()
    assert lint_floors(own) == []
    floors = [floor for sku in own.skus for floor in sku.floors]
    others = [part for sku in own.skus for part in (sku.pcie, sku.nominal) if part is not None]
    assert {part.source for part in (*floors, *others)} == set(own.sources)
    assert {floor.reason for floor in floors} == set(own.reasons)
    assert len(own.skus) >= 20


@pytest.mark.parametrize("sku", [sku for sku in PACKAGED.values() if sku["pcie"]], ids=lambda sku: sku["names"][0])
def test_a_link_one_generation_below_misses_each_floor_and_a_healthy_one_does_not(sku):
    generation, width = sku["pcie"]["generation"], sku["pcie"]["width"]
    for floor in sku["floors"]:
        if floor["subject"] in ("upload", "download"):
            assert (
                bytes_per_second(generation - 1, width)
                < floor["fraction"] * floor["data_sheet"]
                < 0.75 * bytes_per_second(generation, width)
            )


def rules(remarks: list[Remark]) -> set[str]:
    return {remark.rule for remark in remarks}


HOPPER = {"ecc": "on", "nvlinks": 18, "nvlink_speed": 25000}


# The content of the table of a tool that everybody runs, in its words: H200 `memory_bandwidth` 2333 where H100 has
# 1905000 (MB/s); 137500 beside a comment that says 1372500; `min_pci_generation` 3.0 of a Gen5 card; tolerances of 0
# that switch a comparison off; and no floor for the link to the host of any model.
@pytest.mark.parametrize(
    ("change", "rule", "text"),
    [
        ({"quantity": "memory bandwidth", "data_sheet": 2333e6}, "scale", "is it in kB/s? Give B/s"),
        ({"quantity": "memory bandwidth", "data_sheet": 4800000}, "scale", "is it in MB/s? Give B/s"),
        ({"quantity": "memory bandwidth", "data_sheet": 4.8e5 * 1e6}, "data sheet", "a digit is missing or too many, "
                                                                                    "10^-1"),
        ({"quantity": "memory bandwidth", "data_sheet": 4.8e15}, "scale", "1000 times too large"),
        ({"pcie": {"generation": 3, "width": 16, "source": "pcie"}}, "generation", "PCIe Gen3 x16, but the data sheet "
                                                                                   "says Gen5 x16"),
        ({"pcie": {"generation": 5, "width": 8, "source": "pcie"}}, "generation", "but the data sheet says Gen5 x16"),
        ({"pcie": {"generation": 9, "width": 16, "source": "pcie"}}, "generation", "give one of 1, 2, 3"),
        ({"pcie": {"generation": 5, "width": 7, "source": "pcie"}}, "width", "give one of 1, 2, 4"),
        ({"pcie": {"generation": 5, "width": 16, "source": "x"}}, "source", "of its PCIe link"),
        ({"quantity": "upload bandwidth", "fraction": 0.3}, "generation", "a link that was trained at less passes"),
        ({"quantity": "upload bandwidth", "data_sheet": 128e9}, "scale", "vendors give both directions together"),
        ({"quantity": "matrix product, bfloat16", "fraction": 0.0}, "number", "is 0: everything passes"),
        ({"quantity": "matrix product, bfloat16", "fraction": 0.05}, "vacuous", "every GPU that works at all passes"),
        ({"quantity": "matrix product, bfloat16", "data_sheet": 9.9e12}, "data sheet", "10^-2"),
        ({"quantity": "matrix product, bfloat16", "fraction": 1.2}, "fraction", "every GPU fails"),
        ({"quantity": "matrix product, bfloat16", "data_sheet": 989.4}, "scale", "is it in TFLOP/s"),
        ({"quantity": "memory bandwidth", "data_sheet": 3e12, "fraction": 0.6}, "vacuous", "and 4.8 TB/s is published"),
        ({"quantity": "memory bandwidth", "data_sheet": math.nan}, "number", "no comparison with it ever fails"),
        ({"quantity": "memory bandwidth", "data_sheet": math.inf}, "number", "no comparison with it ever fails"),
        ({"quantity": "memory bandwidth", "fraction": -0.7}, "number", "below zero"),
        ({"quantity": "memory bandwidth", "overhead": -1.0}, "number", "overhead"),
        ({"quantity": "memory bandwidth", "source": "my memory"}, "source", "say where the figure was read"),
        ({"quantity": "memory bandwidth", "reason": "so"}, "reason", "say why the fraction is 0.7"),
        ({"nominal": {"source": "x", "facts": HOPPER}}, "source", "of its facts"),
        ({"nominal": {"source": "nvlink", "facts": {**HOPPER, "links": 18}}}, "fact", "links is no fact of a GPU; give"),
        ({"nominal": {"source": "nvlink", "facts": {**HOPPER, "nvlinks": 12}}}, "data sheet", "12, and the data sheet "
                                                                                            "says 18"),
        ({"nominal": {"source": "nvlink", "facts": {**HOPPER, "ecc": "off"}}}, "data sheet", "ecc is off, and the"),
        ({"nominal": {"source": "nvlink", "facts": {"ecc": "on"}}}, "missing", "nvlinks has no value"),
    ],
)  # fmt: skip
def test_mistakes_in_a_table_are_found(change, rule, text):
    found = table(**change)
    assert [remark for remark in found if remark.rule == rule and text in remark.text], [*map(str, found)]


def test_floors_that_are_missing_or_stand_twice_are_found():
    sku = copy.deepcopy(PACKAGED["NVIDIA H200"])
    sku["floors"] = [floor for floor in sku["floors"] if floor["subject"] != "upload"]
    (found,) = lint_floors(skus.FORM.decoded({**OWN, "skus": [sku]}, "t.json"))
    assert found.rule == "missing" and "no floor for upload bandwidth" in found.text
    sku["absent"] = {"upload bandwidth": "nothing is uploaded"}
    assert lint_floors(skus.FORM.decoded({**OWN, "skus": [sku]}, "t.json")) == []
    twice = {**sku, "floors": [*sku["floors"], sku["floors"][0]]}
    assert rules(lint_floors(skus.FORM.decoded({**OWN, "skus": [twice, sku]}, "t.json"))) == {"twice"}
    assert "missing" in rules(lint_floors(skus.FORM.decoded({**OWN, "skus": [{**sku, "floors": []}]}, "t.json")))


def test_an_own_table_of_another_model_needs_its_sources_only():
    own = {
        "format": "mgpu-check floors", "version": 1, "sources": {"s": "a sheet"}, "reasons": {"r": "because"},
        "skus": [{"names": ["Mine"], "memory": None, "pcie": None, "floors": [{
            "subject": "gpu", "quantity": "memory bandwidth", "unit": "B/s", "data_sheet": 5e11, "fraction": 0.7, "source": "s", "reason": "r",
        }]}],
    }  # fmt: skip
    assert lint_floors(skus.FORM.decoded(own, "t.json")) == []


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"skus": None}, r"t\.json: skus is null; give a list\. floors_of_skus\.json in the package is such a file"),
        ({"skus": [{}]}, r"t\.json: skus\[0\]\.names is missing; give a list of at least one text"),
        ({"skus": [{"names": ["M"]}]}, r"skus\[0\]\.pcie is missing; give an object with generation, width, source or null"),
        ({"skus": [{"names": []}]}, r"skus\[0\]\.names is \[\]; give a list of at least one text"),
        ({"skus": [{"names": ["M"], "pcie": {}}]}, r"skus\[0\]\.pcie\.generation is missing; give an integer of at least 1"),
        ({"skus": [{"pcie": None, "names": ["M"], "floors": [{}]}]}, r"skus\[0\]\.floors\[0\]\.subject is missing; give one of gpu"),
        ({"measured_by": {"x": []}}, r"measured_by\.x is \[\]; give a list of at least one text"),
    ],
)  # fmt: skip
def test_errors_of_a_table_name_the_key(change, error):
    with pytest.raises(ValueError, match=error):
        skus.FORM.decoded({**OWN, **change}, "t.json")


def test_a_whole_number_may_be_written_in_any_way(tmp_path):
    path = tmp_path / "t.json"
    path.write_text(json.dumps(OWN).replace('"width": 16', '"width": 1.6e1'))
    assert skus.FORM.decoded(read_document(path), "t.json").skus == packaged_floors().skus
    path.write_text(json.dumps(OWN).replace('"width": 16', '"width": 16.5'))
    with pytest.raises(ValueError, match=r"pcie\.width is 16\.5; give an integer of at least 1"):
        skus.FORM.decoded(read_document(path), "t.json")


# --- baselines ---


def measured(**more: Any) -> dict[str, Any]:
    made: dict[str, Any] = {
        "subject": "gpu", "quantity": "memory bandwidth", "unit": "B/s", "size": 1 << 30, "value": 3e12, "spread": 1e10,
        "subjects": 4, "repeats": 5, "places": {str(n): 3e12 for n in range(4)},
    }  # fmt: skip
    return {**made, **more}


def baseline(*measurements: dict[str, Any], times: int = 1, **more: Any) -> list[Remark]:
    entry = {
        "name": "M", "memory": 80 << 30, "software": dict.fromkeys(("driver", "cuda", "nccl", "torch"), "1"),
        "recorded": "2026-11-22", "gpus": 4, "facts": {"ecc": "on"}, "measurements": [*measurements], **more,
    }  # fmt: skip
    return lint_baseline(
        baselines.FORM.decoded({"format": "mgpu-check baseline", "version": 1, "entries": [entry] * times}, "b.json")
    )


def test_a_good_baseline_is_clean():
    larger = measured(size=1 << 31, value=3.1e12, places={str(n): 3.1e12 for n in range(4)})
    assert baseline(measured(), larger) == []


@pytest.mark.parametrize(
    ("change", "rule", "text"),
    [
        ({"value": 3000.0, "places": {}}, "scale", "is it in GB/s? Give B/s"),
        ({"value": 3e6, "places": {}}, "scale", "is it in MB/s? Give B/s"),
        ({"value": 0.0}, "number", "value is 0: everything passes"),
        ({"value": math.nan}, "number", "value is nan"),
        ({"places": {"0": math.inf}}, "number", "value at 0 is inf"),
        ({"spread": -1.0}, "number", "spread is -1"),
        ({"repeats": 2}, "repeats", "record with at least 3"),
        ({"places": {}, "spread": 1e12}, "spread", "a part at half its speed would still pass"),
        ({"places": {"0": 1e12, "1": 3e12, "2": 3e12, "3": 3e12}}, "broken node", "the recorded node is itself broken"),
    ],
)  # fmt: skip
def test_mistakes_in_a_baseline_are_found(change, rule, text):
    found = baseline(measured(**change))
    assert [remark for remark in found if remark.rule == rule and text in remark.text], [*map(str, found)]


def test_more_mistakes_in_a_baseline_are_found():
    falling = measured(size=1 << 31, value=1e12, places={str(n): 1e12 for n in range(4)})
    assert rules(baseline(measured(), falling)) == {"sizes"}
    assert rules(baseline(measured(), times=2)) == {"twice"}
    assert rules(baseline(measured(), software={"torch": "1"})) == {"software"}
    assert rules(baseline(facts={})) == {"missing"}
    assert rules(
        lint_baseline(baselines.FORM.decoded({"format": "mgpu-check baseline", "version": 1, "entries": []}, "b"))
    ) == {"missing"}
    slow = [measured(value=1e12, places={str(n): 1e12 for n in range(4)})]
    assert rules(baseline(*slow, name="NVIDIA H100 80GB HBM3")) == {"broken node"}


# --- the command ---


def test_the_command(tmp_path, capsys):
    good, bad, no = tmp_path / "good.json", tmp_path / "bad.json", tmp_path / "no.json"
    good.write_text(json.dumps(OWN))
    sku = copy.deepcopy(PACKAGED["NVIDIA H200"])
    sku["floors"][0]["fraction"] = 0.0
    bad.write_text(json.dumps({**OWN, "skus": [sku]}))
    no.write_text("{}")
    assert main([]) == 0 and capsys.readouterr().out == "floors_of_skus.json: nothing found\n"
    assert main([str(good)]) == 0 and "good.json: nothing found" in capsys.readouterr().out
    assert main([str(good), str(bad)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{bad}: NVIDIA H200, memory bandwidth: fraction is 0: everything passes [number]"
    assert lines[1:] == ["2 files: 1 found"]
    assert main([str(no), str(bad)]) == 4
    told = capsys.readouterr()
    assert "format is None; give a file whose format is" in told.err and "[number]" in told.out
    with pytest.raises(SystemExit) as ended:
        main(["--no-such"])
    assert ended.value.code == 4
    assert lint(good) == []
    with pytest.raises(ValueError, match="cannot be read"):
        lint(tmp_path / "absent")
