"""The packaged table of floors has no floor that a broken GPU or link reaches."""

from __future__ import annotations

import copy
import json
from importlib.resources import files
from typing import Any

import pytest

from mgpu_check.acceptance import references
from mgpu_check.acceptance.references import TABLE, packaged_floors
from tests.acceptance.floors_lint import lint_floors

OWN: dict[str, Any] = json.loads(files("mgpu_check.acceptance").joinpath(TABLE).read_text())
PACKAGED = {sku["names"][0]: sku for sku in OWN["skus"]}


def table(
    name: str = "NVIDIA H200", quantity: str = "", pcie: Any = None, nominal: Any = None, **floor: Any
) -> list[str]:
    """Return the findings in our table for one model, with changes to one floor."""
    sku = copy.deepcopy(PACKAGED[name])
    sku["pcie"] = pcie or sku["pcie"]
    sku["nominal"] = nominal or sku["nominal"]
    for entry in sku["floors"]:
        if entry["quantity"] == quantity:
            entry.update(floor)
    return lint_floors(references.FLOORS_FORM.decoded({**OWN, "skus": [sku]}, "t.json"))


def test_our_own_table_is_clean_and_each_source_and_reason_is_used():
    own = packaged_floors()
    assert lint_floors(own) == []
    floors = [floor for sku in own.skus for floor in sku.floors]
    others = [part for sku in own.skus for part in (sku.pcie, sku.nominal) if part is not None]
    assert {part.source for part in (*floors, *others)} == set(own.sources)
    assert {floor.reason for floor in floors} == set(own.reasons)
    assert len(own.skus) >= 20


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"quantity": "memory bandwidth", "data_sheet": 4.8e15}, "which no hardware has"),
        ({"pcie": {"generation": 9, "width": 16, "source": "pcie"}}, "there is no PCIe Gen9 x16"),
        ({"quantity": "upload bandwidth", "fraction": 0.5}, "a link that was trained at less, with 31.5 GB/s, passes"),
        ({"quantity": "upload bandwidth", "fraction": 0.95}, "a healthy link, with 63 GB/s at most, fails"),
        ({"quantity": "upload bandwidth", "data_sheet": 128e9}, "vendors give both directions together"),
        ({"quantity": "matrix product, bfloat16", "fraction": 0.05}, "every GPU that works at all passes"),
        ({"quantity": "matrix product, bfloat16", "fraction": 1.2}, "every GPU fails"),
        ({"quantity": "memory bandwidth", "source": "my memory"}, "source 'my memory' is not among the sources"),
        ({"quantity": "memory bandwidth", "reason": "so"}, "reason 'so' is not among the reasons"),
        ({"nominal": {"source": "nvlink", "facts": {"links": 18}}}, "links is no fact of a GPU"),
    ],
)
def test_mistakes_in_a_table_are_found(change, text):
    found = table(**change)
    assert [line for line in found if text in line], found
