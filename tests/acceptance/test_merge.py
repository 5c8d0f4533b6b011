"""Reports of many nodes, joined."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from mgpu_check.acceptance.report.files import write
from mgpu_check.acceptance.report.merge import merge
from mgpu_check.acceptance.report.values import read
from mgpu_check.acceptance.run_report import RunReport
from mgpu_check.cli.accept import main
from mgpu_check.devices.observations import Part, Subject
from tests.acceptance import run_reports


def node(name: str, report: RunReport, factor: float = 1.0) -> RunReport:
    """The report of another node: its name, other GPUs, other speeds."""
    return replace(
        report,
        hosts=(replace(report.hosts[0], name=name),),
        gpus=tuple(replace(gpu, uuid=f"{gpu.uuid}-{name}") for gpu in report.gpus),
        measurements=tuple(
            replace(one, value=one.value / factor if one.unit == "s" else one.value * factor)
            for one in report.measurements
        ),
    )


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    """Reports of four nodes: good, bad, good but slow, inconclusive."""
    some = {
        "a": node("n0", run_reports.good(4, 5.0)),
        "b": node("n1", run_reports.bad()),
        "c": node("n2", run_reports.good(4, 5.0), factor=0.7),
        "d": node("n3", run_reports.good(4, 5.0)),
        "e": node("n4", run_reports.inconclusive()),
    }
    for name, report in some.items():
        write(tmp_path / f"{name}.json", report)
    return [str(tmp_path / f"{name}.json") for name in some]


def test_the_worst_verdict_counts_and_outliers_are_named(files, tmp_path, capsys):
    assert main(["merge", *files, f"--report={tmp_path}/all.json", f"--report={tmp_path}/all.md"]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[0] == ("REJECTED: GPU 7 (cuda:3 of n1), link GPU 4 -> GPU 9; 1 failure that no part explains")
    assert said[1:6] == ["  n0: ACCEPTED", "  n1: REJECTED", "  n2: ACCEPTED", "  n3: ACCEPTED", "  n4: INCONCLUSIVE"]
    slow = [line for line in said if re.match(r"  n\d: .* slower than", line)]
    assert slow and all(line.startswith("  n2: ") for line in slow)
    assert "  seen: by the numbers of n1: compute: GPU 3: 96 of 1048576 elements are wrong" in "\n".join(said)
    assert "  n4: compute: GPU 1: 3 operations of 40" in said and "  n4: only compute, memory ran" in said
    back = read(tmp_path / "all.json")
    assert len(back.hosts) == 5 and [gpu.number for gpu in back.gpus] == list(range(22))
    assert [gpu.host for gpu in back.gpus] == [host for host, count in enumerate((4, 8, 4, 4, 2)) for _ in range(count)]
    assert "n2: copy bandwidth" in (tmp_path / "all.md").read_text()


def test_parts_subjects_and_evidence_keep_their_gpu():
    first, second = node("n0", run_reports.good(4, 5.0)), node("n1", run_reports.bad())
    joined = merge({"a": first, "b": second}, "mgpu-check accept merge a b")
    gpu, link = joined.verdict.accusations
    assert gpu.part == Part("gpu", (7,)) and link.part == Part("link", (4, 9))
    assert [joined.observations[number].subject for number in gpu.observations] == [Subject("gpu", (7,))] * 5
    assert [joined.observations[number].subject for number in link.observations] == [Subject("copy", (4, 9))] * 2
    assert {joined.observations[number].check for number in joined.verdict.unexplained} == {"collectives"}
    assert joined.verdicts[0].kind == "ACCEPTED" and joined.verdicts[1].accusations == joined.verdict.accusations
    assert {sample.gpu for sample in joined.samples} == set(range(12))


def test_rivals_and_shared_evidence_keep_their_gpu():
    bad = run_reports.bad()
    rivals = tuple(tuple(Part("gpu", (number,)) for number in pair) for pair in ((0, 2), (1, 3)))
    accused = replace(bad.verdict.accusations[0], shared=(bad.verdict.accusations[0].observations[0],))
    second = node("n1", replace(bad, verdict=replace(bad.verdict, accusations=(accused,), rivals=(rivals,))))
    joined = merge({"a": node("n0", run_reports.good(4, 5.0)), "b": second}, "mgpu-check accept merge a b")
    assert joined.verdict.rivals == (
        tuple(tuple(Part("gpu", (number,)) for number in pair) for pair in ((4, 6), (5, 7))),
    )
    (one,) = joined.verdict.accusations
    assert one.shared == one.observations[:1]


def test_every_check_has_its_host():
    first, second = node("n0", run_reports.good(4, 5.0)), node("n1", run_reports.bad())
    joined = merge({"a": first, "b": second}, "mgpu-check accept merge a b")
    assert {run.host for run in joined.checks} == {0, 1} and len(joined.checks) == 16


def test_hosts_of_one_name_are_told_apart(capsys, tmp_path):
    paths = []
    for boot in ("1f0c9a3e-6c1d", "77aa0b1c-0000"):
        one = node("same", run_reports.bad())
        gpus = tuple(replace(gpu, uuid=f"{gpu.uuid}{boot}") for gpu in one.gpus)
        paths.append(tmp_path / f"{boot}.json")
        write(paths[-1], replace(one, gpus=gpus, hosts=(replace(one.hosts[0], boot=boot),)))
    assert main(["merge", *map(str, paths)]) == 1
    said = capsys.readouterr().out.splitlines()
    assert said[1:3] == ["  same (boot 1f0c9a3e): REJECTED", "  same (boot 77aa0b1c): REJECTED"]
    assert "GPU 3 (cuda:3 of same (boot 1f0c9a3e))" in said[0] and "GPU 11 (cuda:3 of same (boot 77aa0b1c))" in said[0]
    assert "  seen: by the numbers of same (boot 77aa0b1c): compute: GPU 3: 96 of" in "\n".join(said)
    assert said[-1] == said[0]  # the last line is the verdict


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
        ([files[0], "--report=all.txt"], "does not end in .html, .json, .md, .xml or .prom"),
        ([files[0], "--no-such-option"], "unrecognized arguments: --no-such-option"),
    ):
        assert main(["merge", *arguments]) == 4, arguments
        assert words in capsys.readouterr().err


def test_exit_codes_and_help(files, capsys):
    assert main(["merge", files[0], files[3]]) == 0
    assert capsys.readouterr().out.startswith("ACCEPTED: 8 GPUs passed 8 checks\n")
    assert main(["merge", files[0], files[4]]) == 2
    assert main(["merge", "--help"]) == 0
    assert "the worst verdict counts" in capsys.readouterr().out
