"""Record which parameters a gate compared, and report the others."""

from __future__ import annotations

import fnmatch
from collections import defaultdict
from collections.abc import Mapping

from mgpu_check.diagnosis.observed import PARITY, Expected, Relations
from mgpu_check.errors import NotCompared
from mgpu_check.gates.meshes import Mesh, where_is
from mgpu_check.gates.program import Program
from mgpu_check.gates.scenario import Scenario

_SHOWN = 12


class ParameterCoverage:
    """The trained parameters that were compared in some case, by world size or mesh.

    Args:
        against: what they are compared with.
    """

    def __init__(self, program: Program, name: str, against: str = PARITY) -> None:
        self._program, self._name, self._against = program, name, against
        self._trained: dict[tuple[int, Mesh], set[str]] = defaultdict(set)
        self._missed: dict[tuple[int, Mesh], dict[str, str]] = defaultdict(dict)
        self._judged: dict[tuple[int, Mesh], set[str]] = defaultdict(set)
        self._local: set[str] = set()
        self._too_wide: set[str] = set()

    def add(self, scenario: Scenario, expected: Expected, relations: Relations) -> None:
        where = scenario.place
        trained = expected.single.trained | relations.unjudged.keys()
        self._trained[where] |= trained
        self._judged[where] |= trained - relations.unjudged.keys()
        self._missed[where].update(relations.unjudged)
        self._local |= {result.of for result in relations.local}
        self._too_wide |= relations.too_wide

    def finish(self, unjudged: Mapping[str, str]) -> None:
        """Check that every trained parameter was compared at every world size.

        Args:
            unjudged: patterns of parameters that need not be compared, with the reasons.
        """
        left: dict[tuple[int, Mesh], dict[str, str]] = {}
        used = {pattern for pattern in unjudged if any(fnmatch.fnmatchcase(name, pattern) for name in self._local)}
        for where, missed in self._missed.items():
            for name in sorted(missed.keys() - self._judged[where]):
                patterns = [pattern for pattern in unjudged if fnmatch.fnmatchcase(name, pattern)]
                used.update(patterns)
                if not patterns:
                    left.setdefault(where, {})[name] = missed[name]
        if left:
            raise NotCompared(self._told(left), names=sorted({name for names in left.values() for name in names}))
        if idle := [pattern for pattern in unjudged if pattern not in used]:
            raise ValueError(
                f"{self._program.gate}: unjudged has {', '.join(map(repr, idle))}, which matches no parameter that was "
                "not compared; take it out, so that it hides nothing later"
            )

    def _told(self, left: Mapping[tuple[int, Mesh], Mapping[str, str]]) -> str:
        count = len({name for names in left.values() for name in names})
        total = len(set().union(*self._trained.values()))
        lines = [
            f"{self._name} is undecided: {count} of {total} trained parameters were not compared with {self._against}"
        ]
        for where, names in left.items():
            by_reason: dict[str, list[str]] = defaultdict(list)
            for name, reason in names.items():
                by_reason[reason].append(name)
            for reason, several in by_reason.items():
                more = f" and {len(several) - _SHOWN} more" if len(several) > _SHOWN else ""
                lines.append(f"  at {where_is(*where)}: {', '.join(several[:_SHOWN])}{more}: {reason}")
        missed = {name for names in left.values() for name in names}
        ways = []
        if missed & self._too_wide:
            ways.append("give a tolerance with tolerance=, or a reference= that computes in float32")
        if missed - self._too_wide:
            ways.append(
                "declare which slice each rank holds with placement=, build the model from one seed on all ranks"
            )
        lines.append(f'  do: {", ".join(ways)}, or accept it with unjudged={{"pattern": "reason"}}')
        return "\n".join(lines)


def check_unjudged(gate: str, unjudged: Mapping[str, str] | None) -> Mapping[str, str]:
    """Return `unjudged`, or an empty mapping for None."""
    if unjudged is None:
        return {}
    if not isinstance(unjudged, Mapping) or not all(
        isinstance(text, str) and text.strip() for entry in unjudged.items() for text in entry
    ):
        raise ValueError(
            f"{gate}: unjudged={unjudged!r}; give a mapping from patterns of parameters to the reasons why they need "
            'not be compared, such as {"head.*": "frozen after the first epoch"}'
        )
    return unjudged
