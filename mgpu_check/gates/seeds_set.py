"""Record the seeds that the code under test sets, with their lines."""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from mgpu_check.diagnosis.observed import CallEvent
from mgpu_check.gates.operands import is_under_test, line_of, site

_SEED = inspect.unwrap(torch.manual_seed).__code__


@contextlib.contextmanager
def noting_seeds(events: list[CallEvent]) -> Iterator[None]:
    """Record the seeds that are set in this thread, with their lines."""

    def note(frame: types.FrameType, what: str, called: Any) -> None:
        if what == "call" and frame.f_code is _SEED:
            events.append(CallEvent("seed", "manual_seed", site(frame), {"seed": int(frame.f_locals["seed"])}))
        elif what == "c_return" and (event := generator_seeded(frame, called)) is not None:
            events.append(event)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)


def generator_seeded(frame: types.FrameType, called: Any) -> CallEvent | None:
    """Return the event of a call of `manual_seed` on the code's own generator."""
    if getattr(called, "__name__", "") != "manual_seed" or not is_under_test(frame):
        return None
    generator = called.__self__
    if not isinstance(generator, torch.Generator):
        return None
    return CallEvent("generator", "Generator.manual_seed", line_of(frame), {"seed": int(generator.initial_seed())})
