"""Record facts about a test as properties of its report, for JUnit files and the closing table."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from mgpu_check.errors import StartupFailure
from mgpu_check.plugin.packaged import is_packaged
from mgpu_check.plugin.report.replay import parts_of
from mgpu_check.plugin.session import GpuSession
from mgpu_check.processes.protocol import SEED

_ADVICE = {
    True: "the machine below the simulated GPUs; to test real GPUs and links, run mgpu-check accept",
    False: "a GPU or link; to find a faulty part, run mgpu-check accept",
}
"""Other causes of a failed check than the code and torch, and what to do, by whether the devices are simulated."""

_LACK, _SHOWED, _UNSEEN = "lack", "known_defects", "known_defects_unseen"


def add_identity(item: pytest.Item, host: int | None) -> None:
    """Record the property and the title of a check of the packaged suite. Clears the record of an earlier try.

    Args:
        host: host of the test, if the check runs on each of several hosts; otherwise None.
    """
    ours = (
        "mgpu_check.failed_ranks",
        "mgpu_check.mistakes",
        "mgpu_check.replay",
        "mgpu_check.site",
        "mgpu_check.advice",
    )  # from an earlier try, if failures are rerun
    item.user_properties[:] = [entry for entry in item.user_properties if entry[0] not in ours]
    if is_packaged(item):
        name = item.path.stem.removeprefix("test_")
        title = (getattr(item, "function", item).__doc__ or item.name).strip().splitlines()[0].rstrip(".")
        _set(item, "property", name)
        _set(item, "check", title if host is None else f"{title} (node {host})")


def add_usage(item: pytest.Item, session: GpuSession) -> None:
    """Record examples, world sizes, devices, seeds, left out cases, known defects and limits of passes of the test."""
    _set(item, "examples", session.test.examples)
    _set(item, "world_sizes", " ".join(map(str, session.sizes())))
    if session.test.left_out:
        reasons: dict[str, dict[str, None]] = {}
        for case, why in session.test.left_out:
            reasons.setdefault(why, {})[case] = None
        _set(item, "left_out", "; ".join(f"{', '.join(cases)}: {why}" for why, cases in reasons.items()))
    if session.test.not_seen:
        _set(item, "not_seen", "\n".join(session.test.not_seen))
    showed = dict.fromkeys(met.name for met in session.test.met if met.failed)
    _set(item, _SHOWED, " ".join(showed))
    _set(item, _UNSEEN, " ".join(dict.fromkeys(met.name for met in session.test.met if met.name not in showed)))
    _set(item, "simulated", session.settings.simulate or "")
    _set(item, "devices", session.describe_devices())
    _set(item, "seed", SEED)
    function = getattr(item, "function", None)
    for name in ("use_seed", "use_generated_seed"):
        seed = getattr(function, f"_hypothesis_internal_{name}", None)
        if seed is not None:
            _set(item, "hypothesis_seed", seed)
            return
    seed = item.config.getoption("--hypothesis-seed", None)
    if seed is not None and getattr(function, "is_hypothesis_test", False):
        _set(item, "hypothesis_seed", seed)


def add_lack(item: pytest.Item, lack: str) -> None:
    """Record why there are too few devices for the test, which is skipped."""
    _set(item, _LACK, lack)


def lacks_devices(report: object) -> bool:
    """Return whether a test was skipped because there are too few devices."""
    return any(name == f"mgpu_check.{_LACK}" for name, _ in getattr(report, "user_properties", ()))


def defects_met(report: object) -> tuple[list[str], list[str]]:
    """Return the names of the known defects that a test has met: those that occurred, and those that did not."""
    found = {str(name): str(value) for name, value in getattr(report, "user_properties", ())}
    showed, unseen = (found.get(f"mgpu_check.{name}", "").split() for name in (_SHOWED, _UNSEEN))
    return showed, unseen


def add_failure(item: pytest.Item, error: BaseException | None, replay: Sequence[str], simulated: bool) -> None:
    """Record the failed ranks, the likely mistakes and their line, the replay lines, and an advice for the suite."""
    parts = parts_of(error)
    proven = all(isinstance(part, AssertionError) and not isinstance(part, StartupFailure) for part in parts)
    if is_packaged(item) and parts and proven:  # a busy machine also makes ranks late, or refuses to start them
        _set(item, "advice", f"a failed check shows that the code or torch is wrong, or {_ADVICE[simulated]}")
    mistakes = dict.fromkeys(name for part in parts for name in getattr(part, "mistakes", ()))
    if mistakes:
        _set(item, "mistakes", " ".join(mistakes))
    if site := next(filter(None, (getattr(part, "site", "") for part in parts)), ""):
        _set(item, "site", site)
    ranks = {rank for part in parts for rank in getattr(part, "ranks", ()) if isinstance(rank, int)}
    _set(item, "failed_ranks", " ".join(map(str, sorted(rank for rank in ranks if rank >= 0))))
    _set(item, "replay", "\n".join(replay))


def _set(item: pytest.Item, name: str, value: object) -> None:
    """Set a property, and replace its value from an earlier try."""
    key = f"mgpu_check.{name}"
    item.user_properties[:] = [entry for entry in item.user_properties if entry[0] != key]
    item.user_properties.append((key, value))
