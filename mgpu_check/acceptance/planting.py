"""Give the simulated node of a process simulated hardware, with the faults that a text names."""

from __future__ import annotations

import contextlib
import functools

from mgpu_check.acceptance.faults import MEMORY, planted_from
from mgpu_check.simulated.hardware import Hardware, planted


def hardware_planted(text: str) -> contextlib.AbstractContextManager[None]:
    """Return a context that gives the simulated node of this process the hardware of a text of
    `faults.hardware_text`.

    Counters and time of the hardware continue from one context to the next.
    """
    return planted(_hardware(text))


@functools.lru_cache(maxsize=1)
def _hardware(text: str) -> Hardware:
    started, _, fault_texts = text.partition(";")
    defects = []
    for name in filter(None, fault_texts.split(";")):
        fault = planted_from(name)
        if fault.fault.defect is not None:
            defect = fault.fault.defect(fault.parameters)
            defect.since = float(started) + float(fault.parameters.get("after", 0))
            defects.append(defect)
    return Hardware(defects, MEMORY)
