"""Reports of many nodes, joined."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from mgpu_check.__main__ import main
from mgpu_check.acceptance.report import summary
from mgpu_check.acceptance.report.files import read, write
from mgpu_check.acceptance.report.merge import merge
from mgpu_check.acceptance.run_report import EXIT_CODES, RunReport
from mgpu_check.devices.observations import Part, Subject
from mgpu_check.option_values import Level
from tests.acceptance import run_reports


def node(name: str, report: RunReport, factor: float = 1.0) -> RunReport:
    """The report of another node: its name, other GPUs, other speeds."""
    return replace(
        report,
        hosts=(replace(report.hosts[0], name=name),),
        gpus=tuple(replace(gpu, uuid=f"{gpu.uuid}-{name}", serial=f"{gpu.serial}-{name}") for gpu in report.gpus),
        measurements=tuple(
            replace(one, value=one.value / factor if one.unit == "s" else one.value * factor)
            for one in report.measurements
        ),
    )


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Reports of four nodes: good, bad, good but slow, inconclusive."""
    good, bad, open_ = run_reports.good(4, 5.0), run_reports.bad(), run_reports.inconclusive()
    for number, report in enumerate((good, bad, good, good, open_)):
        write(tmp_path / f"{number}.json", node(f"n{number}", report, factor=0.7 if number == 2 else 1.0))
    return [str(tmp_path / f"{number}.json") for number in range(5)]


def test_the_worst_verdict_counts_and_outliers_are_named(files, tmp_path, capsys):
    assert main(["accept", "merge", *files, f"--report={tmp_path}/all.json", f"--report={tmp_path}/all.html"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == (
        "REJECTED: GPU 7 (cuda:3 of n1), link GPU 4 -> GPU 9 (cuda:0 -> cuda:5 of n1); 1 failure that no part explains; "
        "SUSPECT: host n2"
    )
    assert said[1:6] == ["  n0: ACCEPTED", "  n1: REJECTED", "  n2: SUSPECT", "  n3: ACCEPTED", "  n4: INCONCLUSIVE"]
    assert not any(re.match(r"  n\d: .* slower than", line) for line in said)
    about = said[said.index("host n2") :]
    assert re.match("  seen: performance: copy bandwidth .* 30% slower than .* median of 4 other nodes", about[2])
    assert "  finding: MGPU-NODE-SLOW; severity isolate, action inspect-node" in about
    assert next(line for line in about if line.startswith("  do: ")).startswith("  do: compare power limits")
    assert "  seen: by the numbers of n1: compute: GPU 3: 96 of 1048576 elements are wrong" in "\n".join(said)
    assert "  n4: compute: GPU 1: 3 operations of 40" in said and "  n4: only compute, memory ran" in said
    back = read(tmp_path / "all.json")
    assert len(back.hosts) == 5 and [gpu.number for gpu in back.gpus] == list(range(22))
    assert [gpu.host for gpu in back.gpus] == [host for host, count in enumerate((4, 8, 4, 4, 2)) for _ in range(count)]
    assert (back.verdicts[2].kind, back.verdicts[2].accusations[0].part) == ("SUSPECT", Part("host", (2,)))
    assert "host n2" in (tmp_path / "all.html").read_text()


def joined(*reports: RunReport) -> RunReport:
    return merge({f"{number}.json": report for number, report in enumerate(reports)}, "mgpu-check accept merge")


def four(*factors: float) -> list[RunReport]:
    return [node(f"n{number}", run_reports.good(2, 5.0), factor) for number, factor in enumerate(factors)]


def test_a_node_is_suspect_only_beside_others_that_agree():
    suspect = joined(*four(1.0, 1.0, 0.7))
    assert summary.headline(suspect) == "SUSPECT: host n2" and EXIT_CODES[suspect.verdict.kind] == 5
    assert [one.kind for one in suspect.verdicts.values()] == ["ACCEPTED", "ACCEPTED", "SUSPECT"]
    assert {run.outcome for run in suspect.checks if run.name == "performance" and run.host == 2} == {"failed"}
    (found,) = suspect.findings
    assert (found.id, found.subject, found.times) == ("MGPU-NODE-SLOW", Subject("host", (2,)), 7)
    assert 'subject="host n2"' in summary.to_prometheus(suspect) and 'verdict="SUSPECT"} 1' in summary.to_prometheus(
        suspect
    )
    again = joined(suspect, node("n3", run_reports.good(2, 5.0)))
    assert summary.headline(again) == "SUSPECT: host n2" and len(again.verdict.accusations) == 1
    for factors, why in (
        ((1.0, 0.7), "from 3 hosts on"),
        ((1.0, 1.0, 0.7, 0.7), "half of the nodes are slow, none is named: n2, n3"),
        ((1.0, 0.4, 0.7), "scatter"),
    ):
        undecided = joined(*four(*factors))
        assert undecided.verdict.kind == "ACCEPTED" and not undecided.findings
        assert why in "\n".join(summary.among_hosts(undecided))


def test_a_policy_rules_on_slow_nodes():
    ruled = [replace(one, policy={"MGPU-NODE-SLOW": "warn"}) for one in four(1.0, 1.0, 0.7)]
    assert summary.headline(joined(*ruled)) == "ACCEPTED: 6 GPUs passed 8 checks; 1 warning"


def test_a_gpu_that_moved_to_another_host_is_named():
    old, new = node("n0", run_reports.good(2, 5.0)), node("n1", run_reports.good(2, 5.0))
    new = replace(new, gpus=(replace(new.gpus[0], serial=old.gpus[1].serial), new.gpus[1]))
    later = replace(new, started="2026-11-23T15:00:00+00:00")
    for order in ((old, later), (later, old)):
        moved = joined(*order)
        kinds = {moved.hosts[n].name: one.kind for n, one in moved.verdicts.items()}
        assert kinds == {"n0": "INCONCLUSIVE", "n1": "ACCEPTED"}
        (line,) = moved.verdict.unknown
        assert line == (
            "GPU 165302400001-n0 was in n0 (cuda:1, PCI 0000:2e:00.0), and is in n1 (cuda:0, PCI 0000:1b:00.0) since "
            "2026-11-23T15:00:00+00:00: accept n0 again"
        )
    both = joined(old, new)
    assert {one.kind for one in both.verdicts.values()} == {"INCONCLUSIVE"}
    assert "at the same time: compare the labels" in both.verdict.unknown[0]


def test_rivals_and_shared_evidence_keep_their_gpu():
    bad = run_reports.bad()
    rivals = tuple(tuple(Part("gpu", (number,)) for number in pair) for pair in ((0, 2), (1, 3)))
    accused = replace(bad.verdict.accusations[0], shared=(bad.verdict.accusations[0].observations[0],))
    second = node("n1", replace(bad, verdict=replace(bad.verdict, accusations=(accused,), rivals=(rivals,))))
    whole = joined(node("n0", run_reports.good(4, 5.0)), second)
    assert whole.verdict.rivals == (
        tuple(tuple(Part("gpu", (number,)) for number in pair) for pair in ((4, 6), (5, 7))),
    )
    (one,) = whole.verdict.accusations
    assert one.shared == one.observations[:1]


def test_hosts_of_one_name_are_told_apart(capsys, tmp_path):
    paths = []
    for boot in ("1f0c9a3e-6c1d", "77aa0b1c-0000"):
        one = node("same", run_reports.bad())
        gpus = tuple(replace(gpu, uuid=f"{gpu.uuid}{boot}", serial=f"{gpu.serial}{boot}") for gpu in one.gpus)
        paths.append(tmp_path / f"{boot}.json")
        write(paths[-1], replace(one, gpus=gpus, hosts=(replace(one.hosts[0], boot=boot),)))
    assert main(["accept", "merge", *map(str, paths)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[1:3] == ["  same (boot 1f0c9a3e): REJECTED", "  same (boot 77aa0b1c): REJECTED"]
    assert "GPU 3 (cuda:3 of same (boot 1f0c9a3e))" in said[0] and "GPU 11 (cuda:3 of same (boot 77aa0b1c))" in said[0]
    assert "  seen: by the numbers of same (boot 77aa0b1c): compute: GPU 3: 96 of" in "\n".join(said)
    assert said[-1] == said[0]  # the last line is the verdict


def test_levels_that_differ_are_said() -> None:
    levels: tuple[Level, ...] = ("quick", "long", "quick")
    nodes = [node(f"n{number}", run_reports.good(2)) for number in range(3)]
    mixed = [replace(report, level=level) for report, level in zip(nodes, levels, strict=True)]
    lines = [line for line in joined(*mixed).verdict.unknown if "level" in line]
    assert lines == [
        f"{name}: its level is quick, which does less than the level long of other nodes" for name in ("n0", "n2")
    ]
    assert not [line for line in joined(*nodes).verdict.unknown if "level" in line]


def test_simulated_reports_of_the_same_serial_numbers_are_said() -> None:
    report = replace(run_reports.good(2), simulated="cpu")
    whole = merge({"a.json": report, "b.json": report, "c.json": node("n1", report)}, "merge")
    (line,) = [line for line in whole.verdict.unknown if "serial" in line]
    assert re.match(r"a\.json, b\.json have 2 serial numbers in common, such as .+: a node may count twice", line)


def test_reports_that_do_not_fit_are_refused(files, tmp_path, capsys):
    write(tmp_path / "again.json", run_reports.good(2))
    write(tmp_path / "again2.json", run_reports.good(2))
    write(tmp_path / "simulated.json", run_reports.two_hosts())
    for arguments, words in (
        ([], "the following arguments are required: FILE.json"),
        ([files[0], files[0]], "is given twice"),
        ([str(tmp_path / "again.json"), str(tmp_path / "again2.json")], "again.json and in "),
        ([files[0], str(tmp_path / "simulated.json")], "simulated.json is of a SIMULATED node"),
        ([files[0], str(tmp_path / "none.json")], "none.json cannot be read: No such file or directory"),
        ([files[0], "--report=all.txt"], "does not end in .html, .json or .prom"),
        ([files[0], "--no-such-option"], "unrecognized arguments: --no-such-option"),
    ):
        assert main(["accept", "merge", *arguments]) == 4, arguments
        assert words in capsys.readouterr().err


def test_exit_codes_and_help(files, capsys):
    assert main(["accept", "merge", files[0], files[3]]) == 0
    assert capsys.readouterr().out.startswith("ACCEPTED: 8 GPUs passed 8 checks\n")
    assert main(["accept", "merge", files[0], files[4]]) == 2
    assert main(["accept", "merge", "--help"]) == 0
    assert "the worst verdict counts" in capsys.readouterr().out
