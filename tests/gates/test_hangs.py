"""The diagnosis of ranks that hang: from the calls that they have entered, not from messages."""

from __future__ import annotations

import pytest

from mgpu_check.diagnosis.report import Report
from mgpu_check.engine.failures import Account, Finished, Interrupted, Who
from mgpu_check.errors import RankFailure, RankHang
from mgpu_check.gates.explanation.failure_report import report_of
from mgpu_check.gates.explanation.investigation import no_return_of
from mgpu_check.gates.search.scenarios import Scenario
from mgpu_check.processes.collective_records import Entered, Record


def entered(name: str, operand: str, line: int, state: str = "inside") -> Record:
    return Record((Entered(name, 1, "", "", operand, "", operand, "train.py", line, state),), 1)  # type: ignore[arg-type]


def account(stacks: str, *records: Record, ended: Finished | None = None) -> Account:
    """Two ranks of which the first hangs, and the second, too, unless it has `ended`."""
    ends = {0: Interrupted(5.0, stacks), 1: ended or Interrupted(5.0, stacks)}
    return Account(ends, Who(2), "run_step", 5.0, dict(enumerate(records)))


def report_on(hang: BaseException) -> tuple[Report, list[str]]:
    assert isinstance(hang, RankFailure | RankHang)
    failure = no_return_of("train_step", Scenario(2, 4), hang)
    return report_of(failure), failure.stacks


FAR = entered("all_reduce", "float32[4]", 31)


@pytest.mark.parametrize(
    ("other", "ended", "mistake", "words"),
    [
        (entered("broadcast", "float32[4]", 40), None, "decision-per-rank", "not take part in the same"),
        (entered("all_reduce", "2x float32[9]", 31), None, "uneven-gather", "tensors of different sizes"),
        (
            *(Record((), 0), None, "decision-per-rank"),
            "within 5 s: rank 0 waits in all_reduce #1 (train.py:31), float32[4]; rank 1 is elsewhere",
        ),
        (Record((), 0), Finished(), "decision-per-rank", "not take part in the same"),
    ],
)
def test_what_ranks_have_entered_tells_why_they_hang(other, ended, mistake, words):
    of_both = account("", FAR, other, ended=ended)
    report, stacks = report_on(of_both.error())
    assert report.mistakes == (mistake,)
    assert words in report.findings[0].evidence
    assert "did not finish train_step within 5 s" in report.headline and "run_step" in str(of_both.error())
    assert stacks == of_both.blocks() != []


def message(name: str, line: int) -> Record:
    return Record((Entered(name, 0, "", "", "float32[4]", "src=1", "", "train.py", line, "inside"),), 1)


def done(number: int) -> Record:
    """The record of a rank that has left its last collective, as it leaves those on real devices at once."""
    return Record((Entered("all_reduce", number, "", "", "float32[4]", "", "", "train.py", 31, "done"),), number)


BACKWARD = """\
Current thread 0x01 (most recent call first):
  File "/lib/python3.11/site-packages/torch/autograd/graph.py", line 9 in _engine_run_backward
  File "train.py", line 50 in step
"""


@pytest.mark.parametrize(
    ("records", "stacks", "words"),
    [
        ([FAR, message("recv", 47)], "", "all of them wait, in different calls; rank 0 waits in all_reduce #1"),
        ([FAR, FAR], "", None),
        ([message("recv", 47), message("recv", 52)], "", None),
        ([Record((), 0), Record((), 0)], "", None),
        ([Record((), 0), Record((), 0)], BACKWARD, None),
        ([done(3), done(3)], "", None),
        ([done(3), done(2)], "", "within 5 s: rank 1 entered fewer collectives than others"),
    ],
    ids=["message", "one call", "messages", "nowhere", "backward", "as many", "fewer"],
)
def test_of_ranks_that_all_hang_none_is_said_to_wait_for_one_that_waits_too(records, stacks, words):
    report, _ = report_on(account(stacks, *records).error())
    assert report.mistakes == (() if words is None else ("decision-per-rank",))
    assert words is None or words in report.findings[0].evidence
    assert "others wait" not in str(report)


def test_who_waits_for_a_rank_that_has_finished_is_named():
    report, _ = report_on(account(BACKWARD, ended=Finished()).error())
    assert report.mistakes == ("decision-per-rank",)
    assert report.findings[0].evidence.endswith("rank 0 waits in backward (train.py:50); rank 1 finished")


def test_a_hang_of_which_nothing_is_known_is_told_as_it_is():
    report, stacks = report_on(RankHang("rank 1 is lost\nmore"))
    assert report.headline == "train_step does not scale: rank 1 is lost" and stacks == []
    assert report.mistakes == ()
