"""Faults of hardware, each planted in an acceptance of its own: rejected, and the right part accused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "acceptance.py"

FAULTS = ["ecc-uncorrected-grows"]
"""A weekly run plants all faults."""


def test_faults_are_found_and_their_parts_accused():
    command = [sys.executable, str(BENCHMARK), "matrix", *FAULTS, "--own", "--gpus=3"]  # the fewest where two can agree
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=600)
    assert ran.returncode == 0, ran.stdout
    assert f"{len(FAULTS)} of {len(FAULTS)} planted faults" in ran.stdout
