"""What is made of ranks that hang: by data of what they have entered, whatever the messages say."""

from __future__ import annotations

import pytest

from mgpu_check.engine.failures import Account, Finished, Interrupted, Who
from mgpu_check.gates.investigation import report_of_hang
from mgpu_check.gates.scenario import Scenario
from mgpu_check.processes.record import Entered, Record


def entered(name: str, operand: str, line: int, state: str = "inside") -> Record:
    return Record((Entered(name, 1, "", "", operand, "", operand, "train.py", line, state),), 1)  # type: ignore[arg-type]


FAR = entered("all_reduce", "float32[4]", 31)


@pytest.mark.parametrize(
    ("other", "ended", "mistake", "words"),
    [
        (
            entered("broadcast", "float32[4]", 40),
            Interrupted(5.0, ""),
            "decision-per-rank",
            "not take part in the same",
        ),
        (entered("all_reduce", "float32[9]", 31), Interrupted(5.0, ""), "uneven-gather", "tensors of different sizes"),
        (entered("all_reduce", "2x float32[9]", 31), Interrupted(5.0, ""), "uneven-gather", "of different sizes"),
        (Record((), 0), Interrupted(5.0, ""), "decision-per-rank", "the others wait for it"),
        (Record((), 0), Finished(), "decision-per-rank", "not take part in the same"),
    ],
)
def test_what_ranks_have_entered_tells_why_they_hang(other, ended, mistake, words):
    account = Account({0: Interrupted(5.0, ""), 1: ended}, Who(2), "run_step", 5.0, {0: FAR, 1: other})
    hang = account.error()
    report, stacks = report_of_hang("train_step", Scenario(2, 4), hang)  # type: ignore[arg-type]
    assert report.mistakes == (mistake,)
    assert words in report.findings[0].evidence
    assert "did not finish train_step within 5 s" in report.headline and "run_step" in str(hang)
    assert stacks == account.blocks() != []


def test_a_hang_of_which_nothing_is_known_is_told_as_it_is():
    from mgpu_check.errors import RankHang

    report, stacks = report_of_hang("train_step", Scenario(2, 3), RankHang("rank 1 is lost\nmore"))
    assert report.headline == "train_step does not scale: rank 1 is lost" and stacks == []
    assert report.mistakes == ("uneven-steps", "decision-per-rank")
