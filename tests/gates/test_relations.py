"""The relations that a gate judges."""

from __future__ import annotations

import torch

from mgpu_check.diagnosis.observed import Expected, ObservedRun, Relations
from mgpu_check.gates.relations import REPEATS, repeats


def test_what_rounding_decides_need_not_repeat():
    one, other = (ObservedRun(values={"n": n, "m": n}, digests={"n": str(n), "m": str(n)}) for n in torch.arange(2))
    relations = Relations(held={"n": {}, "m": {}})
    repeats(relations, Expected(one, None, undetermined={"n"}), [one], [other], None)
    assert relations.held == {"n": {}, "m": {REPEATS: False}}
