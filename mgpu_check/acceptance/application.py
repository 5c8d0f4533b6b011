"""The acceptance, as the core knows it: its command, and its options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mgpu_check import option_values
from mgpu_check.applications import Application
from mgpu_check.settings import Settings, option_field, switch_field

DEFAULT_MEMORY_SHARE = 0.9

SUFFIXES = (".html", ".json", ".prom")  # suffixes of the reports: a page, JSON, a textfile for Prometheus


def _reports(text: str) -> tuple[str, ...]:
    files = option_values.lines(text)
    if files and all(file.lower().endswith(SUFFIXES) for file in files):
        return files
    raise ValueError(f"choose a file whose name ends in {', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}")


def _file(help: str, metavar: str = "FILE", repeats: bool = True) -> Any:
    return option_field(None, option_values.file, f"acceptance: {help}", "none", {"metavar": metavar}, repeats)


@dataclass(frozen=True)
class AcceptanceSettings:
    """The options of an acceptance."""

    # seconds of load after the checks; None if nothing was said
    accept_for: float | None = option_field(
        None,
        option_values.duration,
        "acceptance: keep the GPUs under load for so long after the checks, such as 90s, 30m or 2h",
        "no soak; at --gpu-level=long: 10m",
        {"metavar": "TIME"},
    )
    # share of the free memory of each GPU that is written and read back
    accept_memory: float = option_field(
        DEFAULT_MEMORY_SHARE,
        option_values.share,
        "acceptance: the share of the free memory of each GPU that is written and read back",
        f"{DEFAULT_MEMORY_SHARE}",
        {"metavar": "SHARE"},
    )
    accept_baseline: str | None = _file(
        "hold facts and speed of the GPUs against this file, which --accept-record-baseline has written"
    )
    accept_record_baseline: str | None = _file(
        "write facts and speed of the GPUs to this file, unless something was wrong", repeats=False
    )
    accept_report: tuple[str, ...] = option_field(
        (),
        _reports,
        "acceptance: write a report to this file, which ends in .html, .json or .prom (Prometheus); can be given "
        "several times, in the ini file one file per line",
        "none",
        {"metavar": "FILE", "action": "append"},
        repeats=False,
    )
    accept_evidence: bool = switch_field(
        "acceptance: keep every observation and sample in JSON reports, which are ten times as large then",
        "like observations are joined",
        repeats=False,
    )
    accept_policy: str | None = _file(
        "what each kind of finding means for the verdict, accept, warn or reject, from this TOML file"
    )
    accept_verdict_file: str | None = _file(
        "write the verdict to this file: its word, the exit code, and the verdict of each host", repeats=False
    )
    accept_plant: tuple[str, ...] = option_field(
        (),
        option_values.lines,
        "acceptance of a simulated node: plant a defect, such as copy-zeros:device=0,peer=2; can be given several "
        "times",
        "none",
        {"metavar": "FAULT", "action": "append"},
    )

    def misuse(self, settings: Settings) -> str | None:
        """Return what does not fit together, and what to do; None if all does."""
        if not self.accept_plant or not settings.asked or settings.simulate:
            return None
        return (
            f"{settings.origins['accept_plant']}: {', '.join(self.accept_plant)}: a defect is planted in a simulated "
            "node only; add --simulate"
        )


APPLICATION = Application(package="mgpu_check.acceptance", command=("accept",), options=AcceptanceSettings)
