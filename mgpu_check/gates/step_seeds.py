"""Try a case that passed once more, with different hash seeds on the ranks."""

from __future__ import annotations

from mgpu_check.errors import ScalingMismatch
from mgpu_check.gates.hash_seeds import with_seeds_apart
from mgpu_check.gates.trial import Trial, Trials
from mgpu_check.gates.worlds import RanksFixture


def try_seeds(trials: Trials) -> None:
    """Try the first case that passed on several ranks; see `with_seeds_apart`."""
    program, passed = trials.program, trials.passed
    if passed is None or program.single_process:
        return

    def judge(ranks: RanksFixture) -> None:
        again = Trials(ranks, program, trials.kinds, trials.tolerance, trials.name)
        if (failed := again.run(passed)) is not None:
            raise ScalingMismatch(_described(failed), ranks=failed.ranks) from failed.error

    with_seeds_apart(trials.ranks, program.gate, (program.step, program.build, program.batch), passed.described, judge)


def _described(failed: Trial) -> str:
    if failed.relations is None:
        return str(failed.error)
    relations = failed.relations
    wrong = [*relations.wrong, *relations.split] or [
        name for name, held in relations.held.items() if False in held.values()
    ]
    details = relations.details.get(wrong[0], "") if wrong else ""
    return f"{wrong[0] if wrong else 'a result'} differs{': ' if details else ''}{details}"
