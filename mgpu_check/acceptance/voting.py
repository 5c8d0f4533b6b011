"""A vote among GPUs of one model: the same work on the same data gives the same bits on all that are right."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import dataclass

__all__ = ["Vote", "vote"]


@dataclass(frozen=True)
class Vote:
    """The end of a vote among the GPUs of one model that did not agree.

    Attributes:
        voters: numbers of the GPUs that voted.
        odd: those that differ from the majority; all voters where there is none.
        usual: what more than half of them say; None where no value has a majority.
    """

    voters: tuple[int, ...]
    odd: tuple[int, ...]
    usual: Hashable | None

    @property
    def decided(self) -> bool:
        """There is a majority, and so a suspect."""
        return self.usual is not None


def vote(ballots: Mapping[int, Hashable], models: Mapping[int, Hashable]) -> list[Vote]:
    """Return the votes that were not unanimous, one for each model at most.

    A majority is more than half of all GPUs of the model that voted. Of two that differ, neither has one.

    Args:
        ballots: number of GPU -> what it says, not None.
        models: number of GPU -> its model; what is compared must be equal on all GPUs of one.
    """
    groups: dict[Hashable, list[int]] = {}
    for gpu in sorted(ballots):
        groups.setdefault(models[gpu], []).append(gpu)
    found = []
    for voters in groups.values():
        counts = Counter(ballots[gpu] for gpu in voters)
        if len(counts) == 1:
            continue
        usual, times = counts.most_common(1)[0]
        majority = usual if 2 * times > len(voters) else None
        odd = tuple(gpu for gpu in voters if majority is None or ballots[gpu] != majority)
        found.append(Vote(tuple(voters), odd, majority))
    return found
