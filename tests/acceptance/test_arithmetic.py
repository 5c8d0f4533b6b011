"""Results that differ between GPUs of one model are put to the vote, and the wrong GPU is located."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import mgpu_check
from mgpu_check.acceptance.compute import arithmetic
from mgpu_check.acceptance.verdict import explain
from mgpu_check.devices.observations import Part, Subject
from mgpu_check.oracles.devices.arithmetic import OPERATIONS
from mgpu_check.oracles.devices.cases import ComputeCase
from mgpu_check.oracles.devices.operations import bits
from tests.acceptance.nodes import Node

CASES = [ComputeCase(name, "float32", 32, 5, 3) for name in ("softmax of random numbers", "sum of two")]


@pytest.fixture(scope="module", autouse=True)
def _node():
    with mgpu_check.simulated_node(4):
        yield


def spoil(monkeypatch, name, *gpus):
    """The lowest bit of element 77 is wrong in each result of some GPUs."""
    prepare = OPERATIONS[name]

    def spoiled(case, device):
        made = prepare(case, device)

        def call():
            result = made.call()
            if device.index in gpus:
                bits(result)[77] ^= 1 + device.index
            return result

        return dataclasses.replace(made, call=call)

    monkeypatch.setitem(OPERATIONS, name, spoiled)


def test_who_agrees_passes():
    node: Any = Node("AAAA")
    arithmetic.compute(node, CASES)
    assert node.failed == [] and len(node.results) == 8


def test_the_odd_one_is_named_and_its_elements_are_found(monkeypatch):
    spoil(monkeypatch, "softmax of random numbers", 2)
    node: Any = Node("AAAA")
    arithmetic.compute(node, CASES)
    (entry,) = node.failed
    assert entry.subject == Subject("gpu", (2,))
    assert entry.seen == "other bits than 3 of 4 GPUs of its model, which agree"
    assert (entry.evidence["indices"], entry.evidence["pieces"]) == ([77], [4])
    one, other = (int(value, 16) for value in entry.evidence["values"][0])
    assert one ^ other == 3


def test_of_two_that_differ_none_is_accused(monkeypatch):
    spoil(monkeypatch, "softmax of random numbers", 1)
    node: Any = Node("AABB")
    arithmetic.compute(node, CASES)
    (entry,) = node.failed
    assert entry.subject == Subject("group", (0, 1))
    assert entry.seen == "no majority among 2 GPUs of one model, which give different bits"
    assert set(entry.evidence["digests"]) == {"0", "1"}
    found = explain(node.results, (0, 0, 0, 0))
    assert not found.parts and set(found.rivals) == {(Part("gpu", (0,)),), (Part("gpu", (1,)),)}


def test_where_there_is_no_majority_an_oracle_decides(monkeypatch):
    spoil(monkeypatch, "sum of two", 1)
    node: Any = Node("AABB")
    arithmetic.compute(node, CASES)
    assert [entry.subject.members for entry in node.failed] == [(1,)]
    assert "wrong in the first result" in node.failed[0].seen


def test_what_an_oracle_has_seen_is_not_said_again_by_the_vote(monkeypatch):
    spoil(monkeypatch, "sum of two", 1)
    node: Any = Node("AAAA")
    arithmetic.compute(node, CASES)
    assert [entry.subject.members for entry in node.failed] == [(1,)]
