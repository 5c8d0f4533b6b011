"""The verdict as one line of the system log."""

from __future__ import annotations

import json
import syslog
from collections.abc import Iterable, Mapping
from pathlib import Path

from mgpu_check.acceptance.report import view
from mgpu_check.acceptance.run_report import EXIT_CODES, INTERRUPTED, Kind, RunReport

_PRIORITIES: Mapping[Kind, int] = {
    "ACCEPTED": syslog.LOG_NOTICE,
    "INCONCLUSIVE": syslog.LOG_WARNING,
    "REJECTED": syslog.LOG_ERR,
    "SUSPECT": syslog.LOG_WARNING,
}
LOG = Path("/dev/log")
_MOST = 8
"""Most parts and ids in the line: syslog cuts lines at 1024 or 8192 bytes."""


def line(report: RunReport, interrupted: bool) -> str:
    """Return the verdict as ``key=value`` words, in one line; texts are quoted as in JSON."""
    verdict = report.verdict
    code = INTERRUPTED if interrupted else EXIT_CODES[verdict.kind]
    accused = view.accused_gpus(report)
    rejected = dict.fromkeys(one.id for one in report.findings if one.ruling == "reject")
    words: dict[str, object] = {
        "verdict": verdict.kind,
        "code": code,
        "gpus": len(report.gpus),
        "level": report.level,
        "hosts": _some(view.host_name(report, host.number) for host in report.hosts),
        "parts": _some(view.name_of(report, one.part) for one in verdict.accusations),
        "serials": _some(gpu.serial or gpu.uuid for gpu in report.gpus if gpu.number in accused),
        "findings": _some(rejected),
        "warnings": len(view.warnings(report)),
        "simulated": report.simulated or "no",
    }
    return " ".join(f"{name}={_word(value)}" for name, value in words.items())


def _some(texts: Iterable[str]) -> str:
    found = list(texts)
    return ",".join([*found[:_MOST], *([f"+{len(found) - _MOST}"] if len(found) > _MOST else [])])


def _word(value: object) -> str:
    text = str(value)
    return text if text and all(sign.isprintable() and sign not in ' "=' for sign in text) else json.dumps(text)


def send(report: RunReport, interrupted: bool) -> str:
    """Send the line to the system log of this machine, and return it with what became of it.

    The call to the log itself does not fail where no daemon listens, as in most containers.
    """
    text = line(report, interrupted)
    if not LOG.is_socket():
        return f"NOT sent to the system log: --syslog needs {LOG}; mount it, or use --verdict-file: {text}"
    syslog.openlog("mgpu-check", syslog.LOG_PID, syslog.LOG_DAEMON)
    syslog.syslog(_PRIORITIES[report.verdict.kind], text)
    syslog.closelog()
    return f"sent to the system log: {text}"
