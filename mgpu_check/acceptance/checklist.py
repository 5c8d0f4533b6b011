"""The checks of an acceptance: their order, the least work of each, and the properties that the verdict depends on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Check:
    """Static properties of a check.

    Attributes:
        least: least number of operations for each subject at the levels quick, standard and long; None if its floor
            does not count operations.
        glance: the same at the level glance; 0 if this level does not have the check.
        alone: its ranks neither wait for each other nor exchange data.
        over_the_host: its data cross the link between host and GPU, so a bad link to the host makes it fail, too.
        of_driver: it reports what the driver says; an observation of a GPU accuses that GPU, however many have one.
        of_facts: it compares facts; an observation of the host accuses the host, and explains no failure of another
            check.
        counts: what an operation of a subject is, if each is an independent chance to see a fault that is rare.
    """

    least: tuple[int, int, int] | None = None
    glance: int = 0
    alone: bool = False
    over_the_host: bool = False
    of_driver: bool = False
    of_facts: bool = False
    counts: str = ""


CHECKLIST: Mapping[str, Check] = {
    "inventory": Check((1, 1, 1), 1, alone=True, of_driver=True, of_facts=True),
    "memory": Check(alone=True),
    "compute": Check((40, 400, 4000), 20, alone=True, over_the_host=True, counts="results of a GPU"),
    "links": Check((4, 20, 200), 4, counts="copies on a link"),
    "collectives": Check((20, 200, 2000), over_the_host=True, counts="collectives"),
    "training": Check((12, 150, 4000), over_the_host=True, counts="steps of training"),
    "soak": Check(over_the_host=True),
    "performance": Check(alone=True),
    "dcgm": Check(alone=True, of_driver=True, of_facts=True),
    "machine": Check(of_facts=True),
    "health": Check((2, 2, 2), 2, alone=True, of_driver=True),
}
"""All checks in the order they run. The soak and the results of DCGM run only on request."""

CHECKS = tuple(CHECKLIST)
