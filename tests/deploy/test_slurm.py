"""Scripts for Slurm drain a node if its GPUs are REJECTED, and for no other reason."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "deploy" / "slurm"

COMMAND = """#!/bin/bash
echo "$@ CUDA_VISIBLE_DEVICES=${CUDA_VISIBLE_DEVICES:-}" > "$SEEN/command"
for word in "$@"; do case $word in --verdict-file=*) file=${word#*=} ;; esac; done
write() { [ -z "$1" ] || printf '%s\\nexit code: 9\\n%s: GPU 1\\n' "$1" "$1" > "$file"; }
trap 'write "$ON_TERM"; exit 130' TERM
if [ -n "${ON_TERM:-}" ]; then read -r _ < "$SEEN/never" & wait; fi
write "$VERDICT"
exit "$CODE"
"""
RECORD = '#!/bin/bash\necho "$@" >> "$SEEN/$(basename "$0")"\n'


class Node:
    """A node with the commands that scripts call.

    Attributes:
        seen: directory in which they note their arguments.
        scripts: directory of the scripts and their settings.
    """

    def __init__(self, directory: Path) -> None:
        self.seen = directory / "seen"
        self.reports = directory / "reports"
        self.bin = directory / "bin"
        self.scripts = SCRIPTS
        self.seen.mkdir()
        self.bin.mkdir()
        os.mkfifo(self.seen / "never")
        for name, text in {"mgpu-check": COMMAND, "logger": RECORD, "scontrol": RECORD}.items():
            (self.bin / name).write_text(text)
            (self.bin / name).chmod(0o755)

    def run(self, script: str, verdict: str, code: int, **variables: str) -> int:
        environment = {
            "PATH": f"{self.bin}:/usr/bin:/bin",
            "SEEN": str(self.seen),
            "VERDICT": verdict,
            "CODE": str(code),
            "REPORTS": str(self.reports),
            "SLURM_JOB_GPUS": "1,3",
            "SLURM_JOB_ID": "77",
        }
        done = subprocess.run([self.scripts / script], env={**environment, **variables}, check=False, timeout=60)
        return done.returncode

    def text(self, name: str) -> str:
        path = self.seen / name
        return path.read_text() if path.exists() else ""


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


@pytest.mark.parametrize("script", ["epilog.sh", "prolog.sh"])
@pytest.mark.parametrize(
    ("verdict", "code", "ends", "logged"),
    [
        ("ACCEPTED", 0, 0, ""),
        ("REJECTED", 1, 1, "job 77: GPUs 1,3: REJECTED: GPU 1"),
        ("INCONCLUSIVE", 2, 0, "no verdict (exit code 2): INCONCLUSIVE: GPU 1"),
        ("", 4, 0, "no verdict (exit code 4): mgpu-check accept --gpus=all"),
        ("", 1, 0, "no verdict (exit code 1)"),  # Python itself ends so
    ],
)
def test_only_a_rejected_gpu_drains(node: Node, script: str, verdict: str, code: int, ends: int, logged: str) -> None:
    assert node.run(script, verdict, code) == ends
    assert logged in node.text("logger") and bool(logged) == bool(node.text("logger"))
    assert node.text("scontrol") == "", "slurmd drains by the exit code"
    assert "CUDA_VISIBLE_DEVICES=1,3" in node.text("command"), "the GPUs of other jobs are busy"


def test_a_prolog_is_short(node: Node) -> None:
    node.run("prolog.sh", "ACCEPTED", 0)
    assert "--gpu-level=glance" in node.text("command") and "-k" not in node.text("command")
    node.run("prolog.sh", "ACCEPTED", 0, PROLOG_SELECTION="inventory or health")
    assert "-k inventory or health" in node.text("command")


def test_settings_of_the_epilog_do_not_change_the_level_of_other_scripts(node: Node, tmp_path: Path) -> None:
    node.scripts = Path(shutil.copytree(SCRIPTS, tmp_path / "scripts"))
    lines = ("LEVEL=standard", "SELECTION=links", "HEALTH_SELECTION=inventory", f"REPORTS={tmp_path}")
    (node.scripts / "settings").write_text("\n".join(lines))
    node.run("epilog.sh", "ACCEPTED", 0)
    assert "--gpu-level=standard" in node.text("command") and "-k links" in node.text("command")
    node.run("prolog.sh", "ACCEPTED", 0)
    assert "--gpu-level=glance" in node.text("command") and "-k" not in node.text("command")
    node.run("health_check.sh", "ACCEPTED", 0)
    assert "--gpu-level=glance" in node.text("command") and "-k inventory" in node.text("command")
    assert f"--report={tmp_path}/" in node.text("command"), "what no script sets comes from the settings"


def test_a_report_is_written_only_where_there_is_a_directory(node: Node) -> None:
    assert node.run("epilog.sh", "ACCEPTED", 0) == 0 and "--report" not in node.text("command")
    node.reports.mkdir()
    assert node.run("epilog.sh", "ACCEPTED", 0) == 0 and f"--report={node.reports}/" in node.text("command")


@pytest.mark.parametrize(("on_term", "ends"), [("REJECTED", 1), ("INCONCLUSIVE", 0)])
def test_a_run_that_takes_too_long_ends_with_its_verdict(node: Node, on_term: str, ends: int) -> None:
    assert node.run("epilog.sh", "ACCEPTED", 0, ON_TERM=on_term, SECONDS_MOST="0.2") == ends
    assert on_term in node.text("logger")


@pytest.mark.parametrize(("undecided", "ends"), [("keep", 0), ("drain", 1)])
def test_a_node_without_a_verdict_is_drained_on_request(node: Node, undecided: str, ends: int) -> None:
    assert node.run("epilog.sh", "INCONCLUSIVE", 2, UNDECIDED=undecided) == ends
    assert node.run("epilog.sh", "ACCEPTED", 0, UNDECIDED=undecided, MGPU_CHECK="not-installed") == ends
    assert "not-installed is not installed" in node.text("logger")


def test_a_job_without_gpus_is_not_looked_at(node: Node) -> None:
    assert node.run("epilog.sh", "REJECTED", 1, SLURM_JOB_GPUS="") == 0
    assert node.text("command") == ""


@pytest.mark.parametrize(("verdict", "drained"), [("ACCEPTED", False), ("REJECTED", True), ("INCONCLUSIVE", False)])
def test_a_health_check_drains_a_rejected_node(node: Node, verdict: str, drained: bool) -> None:
    node.run("health_check.sh", verdict, 1, SLURMD_NODENAME="gpu-17", SLURM_JOB_GPUS="")
    expected = "update nodename=gpu-17 state=drain reason=mgpu-check: GPUs rejected\n" if drained else ""
    assert node.text("scontrol") == expected
    assert "CUDA_VISIBLE_DEVICES=\n" in node.text("command"), "all GPUs of an idle node"
