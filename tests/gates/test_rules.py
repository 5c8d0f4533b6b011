"""Rules judge evidence from any source, in the order of their places."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Hashable
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from mgpu_check.diagnosis import rules
from mgpu_check.diagnosis.evidence import (
    Accepted,
    ByRank,
    EpochSamples,
    Evidence,
    Factor,
    Loader,
    Restored,
    Sampler,
    Start,
    UnfinishedCall,
)
from mgpu_check.diagnosis.observations import Expected, Hypotheses, ObservedRun, Relations, Result
from mgpu_check.diagnosis.report import Attempts, Finding
from mgpu_check.diagnosis.rules import order
from mgpu_check.diagnosis.rules.collectives import waits_for_its_own_group
from mgpu_check.diagnosis.rules.data import counted_by_every_rank, samples_several_times
from mgpu_check.diagnosis.rules.order import (
    RULES,
    findings_of,
    findings_of_calls,
    findings_of_checkpoint,
    findings_of_loader,
)
from mgpu_check.diagnosis.tensors import Tensors
from mgpu_check.processes.collective_records import Entered

START = Start("weight differs", "weight differs")
LOADS = ByRank([1, 0], "load_state_dict ran on rank 0")


@pytest.mark.parametrize(
    ("evidence", "mistakes"),
    [
        (Evidence(2), []),
        (Evidence(2, start=START), ["different-initialization"]),
        (Evidence(2, start=START, loads=ByRank([1, 1], "both")), ["different-initialization"]),
        (Evidence(2, start=START, loads=LOADS), ["restored-on-one-rank"]),
        (Evidence(2, loads=LOADS), []),
        (Evidence(2, loads=LOADS, parted="ranks part ways"), ["restored-on-one-rank"]),
        (Evidence(2, decisions=[ByRank([3, 3], "same"), ByRank([1, 2], "rates")]), ["decision-per-rank"]),
        (Evidence(2, factor=Factor(2.0, 1e-2, "all is")), ["world-size-factor"]),
        (Evidence(2, factor=Factor(0.25, 1e-2, "all is", (1, -1, 2, -2))), ["world-size-factor"]),
        (Evidence(2, factor=Factor(0.25, 1e-2, "all is", (1, -1, 2, -2)), micro_batches=4), ["accumulation-factor"]),
        (Evidence(2, factor=Factor(2.0, 1e-2, "all is", ())), []),
        (Evidence(2, factor=Factor(3.0, 1e-2, "all is"), normalizes="bn"), ["batch-statistics-per-rank"]),
        (Evidence(2, surplus="2 samples came again"), []),
        (Evidence(2, surplus="2 samples came again", samplers=[Sampler(7, 2, True)]), []),
        (Evidence(2, surplus="2 samples came again", samplers=[Sampler(7, 2, False)]), ["padding-counted"]),
        (Evidence(2, gradients_apart="own", normalizes="bn"), ["gradients-not-synchronized", "batch-statistics-per-rank"]),
        (Evidence(2, start=START, answers_change="otherwise"), ["different-initialization", "evaluation-differs"]),
        (Evidence(2, gradients_apart="own", buffers_apart="mean"), ["gradients-not-synchronized", "buffers-drift"]),
        (Evidence(2, answers_change="otherwise", answers_apart="other"), ["evaluation-differs"]),
    ],
)  # fmt: skip
def test_evidence_is_judged_by_its_data(evidence, mistakes):
    assert [finding.mistake for finding in findings_of(evidence, 3, Attempts())] == mistakes


DOUBLED, DRIFTING = Evidence(2, factor=Factor(2.0, 1e-2, "all is")), Evidence(2, buffers_apart="mean")


@pytest.mark.parametrize(
    ("controls", "mistakes"),
    [
        (None, ["world-size-factor"]),  # a comparison that has no further cases
        ([], []),
        ([DOUBLED], ["world-size-factor"]),
        ([DOUBLED, DRIFTING], []),  # the second case shows another mistake
        ([Evidence(2, factor=Factor(1.7, 1e-2, "all is"))], []),
        ([Evidence(2), DOUBLED], ["world-size-factor"]),  # a case that shows nothing is no evidence
    ],
)
def test_a_mistake_is_named_only_if_further_cases_show_it(controls, mistakes):
    assert [finding.mistake for finding in findings_of(DOUBLED, 3, Attempts(), controls)] == mistakes


def test_a_mistake_that_an_experiment_confirms_needs_no_further_case(monkeypatch):
    monkeypatch.setattr(order, "RULES", [lambda evidence: Finding("buffers-drift", "it is", confirmed=True)])
    assert [finding.mistake for finding in findings_of(DRIFTING, 3, Attempts(), [])] == ["buffers-drift"]


def entered(number: int, operand: str) -> Entered:
    return Entered("all_reduce", number, "", "", operand, "sum", operand, "train.py", 44, "inside")


@pytest.mark.parametrize(
    ("last", "mistake"),
    [
        ((entered(5, "float32[10, 5]"), entered(4, "float32[3]")), "decision-per-rank"),
        ((entered(5, "float32[10, 5]"), entered(5, "float32[3]")), "uneven-gather"),
    ],
)
def test_sizes_are_compared_in_one_and_the_same_collective(last, mistake):
    calls = UnfinishedCall(2, 4, "rank 0 did not finish", last=dict(enumerate(last)), some_finished=True)
    assert [finding.mistake for finding in findings_of_calls(calls, 2, Attempts())] == [mistake]


def epoch(*ranks: str, batches=(), **more) -> EpochSamples:
    """The samples a to f that ranks got, a letter each; by default each rank has the same number of batches."""
    counts: list[Counter[Hashable]] = [Counter(rank) for rank in ranks]
    return EpochSamples(Counter("abcdef"), counts, largest=2, batches=batches or [2] * len(ranks), **more)


@pytest.mark.parametrize(
    ("samples", "mistake", "ranks"),
    [
        (epoch("abc", "def"), None, ()),
        (epoch("abcdef", "abcdef"), "dataset-not-split", ()),
        (epoch("aabbcc", "ddeeff", workers=2), "dataset-not-split", ()),
        (epoch("abcd", "efab"), "padding-counted", ()),
        (epoch("abcd", "efab", accepted=Accepted(padding=True)), None, ()),
        (epoch("abc", "abc"), "samples-missed", (1,)),
        (epoch("abc", "cde"), "split-differs-between-ranks", ()),
        (epoch("abc", "dex"), "split-differs-between-ranks", (1,)),
        (epoch("abc", "de"), "samples-missed", ()),
        (epoch("abc", "de", accepted=Accepted(dropped=True)), None, ()),
        (epoch("abcd", "ef", batches=(2, 1)), "uneven-steps", ()),
        (epoch("abcd", "e", batches=(2, 1)), "samples-missed", ()),
        (epoch("xyz", "uvw"), None, ()),
    ],
)
def test_of_an_epoch_one_mistake_is_named(samples, mistake, ranks):
    found = findings_of_loader(Loader([samples]), Attempts())
    assert [(one.mistake, one.ranks) for one in found] == ([(mistake, ranks)] if mistake else [])


def test_an_order_that_some_ranks_repeat_goes_first_and_one_of_all_last():
    epochs = [epoch("abc", "cde"), epoch("abc", "de")]
    named = ["split-differs-between-ranks", "samples-missed"]
    some, of_all = Loader(epochs, [1], "rank 1 only"), Loader(epochs, [0, 1], "all ranks")
    assert [one.mistake for one in findings_of_loader(some, Attempts())] == ["epochs-not-reshuffled", *named]
    assert [one.mistake for one in findings_of_loader(of_all, Attempts())] == [*named, "epochs-not-reshuffled"]


@pytest.mark.parametrize(
    ("restored", "mistakes"),
    [
        (Restored(seen=True, on_some={"a": [1]}, of_rank_0={"b": [1]}), ["restored-on-one-rank"]),
        (Restored(seen=True, on_some={"a": [1]}, nowhere=["b"]), ["restored-on-one-rank", "state-not-restored"]),
        (Restored(seen=True, of_rank_0={"a": [1]}), ["state-not-restored"]),
        (Restored(seen=True, parted={"a": [1]}, at_the_end=["a"]), ["restored-on-one-rank", "state-not-restored"]),
        (Restored(seen=True, at_the_end=["a"]), ["state-not-restored"]),
        (Restored(seen=False, at_the_end=["a"]), ["state-not-restored"]),
    ],
)
def test_a_resumed_run_is_judged_by_what_was_lost_and_then_by_its_end(restored, mistakes):
    found = findings_of_checkpoint(restored, Attempts())
    assert [one.mistake for one in found] == mistakes
    assert "right after loading" not in found[0].evidence or restored.lost


def test_rules_about_tensors_say_nothing_where_there_are_none():
    attempts = Attempts()
    assert [rule(Evidence(2)) for rule in RULES] == [None] * len(RULES)
    assert findings_of(Evidence(2), len(RULES), attempts) == [] and not attempts.remarks


def test_each_rule_is_registered():
    lists = [value for name, value in vars(order).items() if name.startswith("RULES")]
    registered = {(rule.__module__, rule.__name__) for rules_of_kind in lists for rule in rules_of_kind}
    written = {
        (f"{rules.__name__}.{path.stem}", node.name)
        for path in Path(rules.__file__).parent.glob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and not node.name.startswith("_")
        and path.stem not in ("order", "__init__")
    }
    clauses = {name for module, name in registered - written if module == rules.__name__}
    assert written < registered and clauses <= {field.name for field in fields(Evidence)}
    assert len(registered - written) == len(clauses)


@pytest.mark.parametrize(
    ("group", "state", "source", "found"),
    [
        ("", "inside", 0, True),
        ("0,1", "waiting", 0, True),
        ("0,1", "done", 0, False),  # it has left the collective
        ("0,1", "pending", 0, False),
        ("0,2", "inside", 0, False),  # the rank that waits for a message is no member
        ("0,1", "inside", 2, False),  # the message is from another rank
        (",".join(map(str, range(400)))[:999], "inside", 0, False),  # the list of members was cut
    ],
)
def test_a_group_is_too_wide_if_a_member_waits_for_one_that_waits_in_it(group, state, source, found):
    collective = Entered("all_reduce", 3, "", group, "float32[4]", "sum", "", "train.py", 40, state)
    message = Entered("recv", 0, "", "", "float32[4]", f"src={source}", "", "train.py", 50, "inside")
    calls = UnfinishedCall(3, 4, "", last={0: collective}, messages={1: message})
    finding = waits_for_its_own_group(calls)
    assert (finding is not None) is found
    if finding is not None:
        assert finding.mistake == "wrong-process-group"
        assert f"rank 0 waits in {collective} for rank 1, and rank 1 waits in {message}" in finding.evidence


SEEN = Result("returned", "seen")


def returned(right, *got):
    runs = [ObservedRun(values={SEEN: torch.tensor(value)}) for value in (right, *got)]
    relations = Relations(held={SEEN: {}}, wrong={SEEN: list(range(len(got)))})
    return Tensors(len(got), 4, 1, Expected(runs[0], None), relations, runs[1:], [], Hypotheses([], []))


@pytest.mark.parametrize(
    ("right", "got", "found"),
    [
        ([1, 1, 1], [2, 0, 1], True),
        ([1, 1, 1], [2, 1, 1], False),  # on several, and none is missed
        ([1, 1, 1], [0, 1, 1], False),  # missed, and none is on several
        ([1, 2, 1], [2, 1, 1], False),  # these are no counts of samples
        ([1, 1], [2, 0, 1], False),
        ([[1, 1]], [[2, 0]], False),
    ],
)
def test_counts_of_samples_tell_of_a_split_that_differs(right, got, found):
    finding = samples_several_times(returned(right, got, got))
    assert (finding is not None) is found
    assert finding is None or finding.mistake == "split-differs-between-ranks"


@pytest.mark.parametrize(
    ("right", "got", "found"),
    [
        (4, (8, 8), True),
        ([4, 2], ([8, 4], [8, 4]), True),
        (4, (8, 8, 8), False),
        (4, (8, 4), True),  # as on rank 0
        (4, (4, 8), False),
        (0, (0, 0), False),
        ([4], ([8, 8], [8, 8]), False),
        (4.0, (8.0, 8.0), False),  # a sum may be off by the world size for other reasons
    ],
)
def test_a_count_that_is_too_large_by_the_world_size_is_that_of_all_samples_on_each_rank(right, got, found):
    finding = counted_by_every_rank(returned(right, *got))
    assert (finding is not None) is found
    assert finding is None or finding.mistake == "dataset-not-split"
