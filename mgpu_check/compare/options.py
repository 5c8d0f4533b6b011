"""Compare the options of optimizers: learning rates and others, group by group."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from mgpu_check.compare.alignment import Aligned
from mgpu_check.processes.rank_lists import few, named

UPDATE_RULE = (
    "the options of its groups equal those of one device: check its update rule, and whether state such as momentum "
    "was lost or changed"
)
_NEAR = 1e-9
"""Relative: the same learning rate, computed in another order of operations, differs by less."""


def other_options(aligned: Aligned, step: int) -> list[str]:
    """Return a clause for each optimizer option that differs between ranks and one device at a step."""
    expected = aligned.one.steps[step].options
    found: dict[tuple[str, str, str], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for trace in aligned.ranks:
        for name, options in trace.steps[step].options.items():
            own = expected.get(name)
            if own is None or name not in trace.parameters:
                continue
            for key in sorted(own.keys() | options.keys()):
                if not _same(own.get(key), options.get(key)):
                    found[key, _told(own, key), _told(options, key)][name].append(trace.rank)
    clauses = []
    for (key, one, there), names in found.items():
        ranks = sorted({rank for some in names.values() for rank in some})
        clauses.append(
            f"{_WORDS.get(key, key)} of {few(list(names), 3)} is {there} on {named(ranks)}, and {one} on one device"
        )
    groups = _groups(expected)
    for trace in aligned.ranks if clauses else []:
        if (count := _groups(trace.steps[step].options)) != groups:
            clauses.append(
                f"the parameters have {count} different sets of options on rank {trace.rank}, and {groups} on one "
                "device: were groups lost?"
            )
            break
    return clauses


_WORDS = {"lr": "the learning rate", "weight_decay": "the weight decay", "optimizer": "the optimizer"}


def _groups(options: Mapping[str, Mapping[str, Any]]) -> int:
    return len({repr(sorted(one.items(), key=str)) for one in options.values()})


def _told(options: Mapping[str, Any], key: str) -> str:
    value = options.get(key, "none")
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def _same(one: object, other: object) -> bool:
    if isinstance(one, (int, float)) and isinstance(other, (int, float)):
        return abs(one - other) <= _NEAR * max(abs(one), abs(other))
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return one == other
