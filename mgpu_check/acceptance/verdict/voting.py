"""Vote among the GPUs of one model: healthy GPUs get the same bits from the same work on the same data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

from mgpu_check.processes.rank_lists import grouped


@dataclass(frozen=True)
class Vote:
    """The result of a vote without agreement among the GPUs of one model.

    Attributes:
        voters: numbers of the GPUs that voted.
        odd: GPUs that differ from the majority; all voters if there is no majority.
        usual: the value of more than half of the voters; None if there is no majority.
    """

    voters: tuple[int, ...]
    odd: tuple[int, ...]
    usual: Hashable | None

    @property
    def decided(self) -> bool:
        """True if there is a majority, so that `odd` holds suspects."""
        return self.usual is not None


def vote(ballots: Mapping[int, Hashable], models: Mapping[int, Hashable]) -> list[Vote]:
    """Return the votes that were not unanimous, at most one for each model.

    A majority is more than half of the GPUs of the model that voted. Two GPUs that differ have no majority.

    Args:
        ballots: value of each GPU by number, not None.
        models: model of each GPU by number; healthy GPUs of one model must have equal values.
    """
    found = []
    for _, voters in grouped((models[gpu], gpu) for gpu in sorted(ballots)):
        counts = Counter(ballots[gpu] for gpu in voters)
        if len(counts) == 1:
            continue
        usual, times = counts.most_common(1)[0]
        majority = usual if 2 * times > len(voters) else None
        odd = tuple(gpu for gpu in voters if majority is None or ballots[gpu] != majority)
        found.append(Vote(tuple(voters), odd, majority))
    return found
