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


def spoil(monkeypatch, name, gpu):
    """A low bit of element 77 is wrong in each result of a GPU."""
    prepare = OPERATIONS[name]

    def spoiled(case, device):
        made = prepare(case, device)

        def call():
            result = made.call()
            if device.index == gpu:
                bits(result)[77] ^= 1 + device.index
            return result

        return dataclasses.replace(made, call=call)

    monkeypatch.setitem(OPERATIONS, name, spoiled)


def computed(monkeypatch, models, name="", gpu=0):
    if name:
        spoil(monkeypatch, name, gpu)
    node: Any = Node(models)
    arithmetic.compute(node, CASES)
    return node


def test_who_agrees_passes(monkeypatch):
    node = computed(monkeypatch, "AAAA")
    assert node.failed == [] and len(node.results) == 8


def test_the_odd_one_is_named_and_its_elements_are_found(monkeypatch):
    (entry,) = computed(monkeypatch, "AAAA", "softmax of random numbers", 2).failed
    assert entry.subject == Subject("gpu", (2,))
    assert entry.seen == "other bits than 3 of 4 GPUs of its model, which agree"
    assert (entry.evidence["indices"], entry.evidence["pieces"]) == ([77], [4])
    one, other = (int(value, 16) for value in entry.evidence["values"][0])
    assert one ^ other == 3


def test_of_two_that_differ_none_is_accused(monkeypatch):
    node = computed(monkeypatch, "AABB", "softmax of random numbers", 1)
    (entry,) = node.failed
    assert entry.subject == Subject("group", (0, 1))
    assert entry.seen == "no majority among 2 GPUs of one model, which give different bits"
    assert set(entry.evidence["digests"]) == {"0", "1"}
    found = explain(node.results, (0, 0, 0, 0))
    assert not found.parts and set(found.rivals) == {(Part("gpu", (0,)),), (Part("gpu", (1,)),)}


@pytest.mark.parametrize("models", ["AABB", "AAAA"])
def test_an_oracle_decides_where_there_is_no_majority_and_the_vote_does_not_say_it_again(monkeypatch, models):
    (entry,) = computed(monkeypatch, models, "sum of two", 1).failed
    assert entry.subject.members == (1,) and "wrong in the first result" in entry.seen
