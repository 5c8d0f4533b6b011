"""Known defects of torch, and of the libraries below it: when each strikes, where it is reported, which check shows it.

To add one, add one `KnownDefect` to `_TABLE`, and say in the check where it may be met, in the process that computes::

    with known_defect("gloo-views-with-gaps", contiguous=tensor.is_contiguous(), size=rank.size):
        assert_allreduce_matches(...)

What fails in there is reported as KNOWN, with the link, and the check goes on; its example counts as passed. It fails as ever
where the facts given do not meet the condition, where the version of torch is not one that has the defect, where what
was raised is of another kind, or where `explained` shows that the defect would have led to something else. If the defect is
met and nothing fails, the run says that it did not show. A check that collects what is wrong, and raises later, asks
`is_known` instead.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mgpu_check.checks.hearing import Channel
from mgpu_check.version import torch_version

__all__ = ["KNOWN_DEFECTS", "KnownDefect", "Met", "is_known", "known_defect", "report", "reported_to"]


@dataclass(frozen=True)
class KnownDefect:
    """A defect of others that a check meets.

    Attributes:
        name: lower case, words joined by hyphens.
        summary: what happens, as part of a sentence.
        link: the report upstream.
        shown_by: the checks that meet it: ``"test_allreduce.py::test_all_reduce_of_views_on_the_cpu"``.
        strikes: takes the facts that a check gives, by name; whether the defect strikes there.
        since: the first version of torch that has it, "" where it has always been there.
        fixed: the first version without it, "" where there is none yet.
        raises: what a check raises that meets it; an error of torch where that refuses what it should do.
    """

    name: str
    summary: str
    link: str
    shown_by: tuple[str, ...]
    strikes: Callable[..., bool]
    since: str = ""
    fixed: str = ""
    raises: tuple[type[Exception], ...] = (AssertionError,)

    def is_in(self, version: str) -> bool:
        """Return whether that version of torch has it."""
        here = _numbers(version)
        return _numbers(self.since) <= here and (not self.fixed or here < _numbers(self.fixed))


_TABLE = (
    KnownDefect(
        "gloo-views-with-gaps",
        "gloo reduces a CPU view with gaps as if it had none, silently",
        "https://github.com/pytorch/pytorch/issues/192920",
        shown_by=("test_allreduce.py::test_all_reduce_of_views_on_the_cpu",),
        strikes=lambda contiguous, size: not contiguous and size > 1,
    ),
    KnownDefect(
        "data-parallel-autocast-dtype",
        "the threads of DataParallel lose the dtype of autocast, which is a thread's own, and compute in float16",
        "https://github.com/pytorch/pytorch/pull/63416",
        shown_by=("test_data_parallel.py::test_autocast_dtype",),
        strikes=lambda dtype, devices: dtype == "bfloat16" and devices > 1,
    ),
    KnownDefect(
        "gloo-adds-booleans-as-bytes",
        "gloo adds booleans as bytes: true + true leaves a 2 in a tensor of booleans",
        "https://github.com/pytorch/pytorch/pull/105354",
        shown_by=(
            "test_collectives.py::test_all_reduce_of_every_dtype",
            "test_collectives.py::test_reductions_of_every_dtype",
        ),
        strikes=lambda function, dtype, op, place, size: (
            (dtype, op, place) == ("bool", "SUM", "cpu") and size > 1 and function != "reduce_scatter_tensor"
        ),
    ),
    KnownDefect(
        "batched-power-sgd-refuses",
        "batched_powerSGD_hook raises AssertionError in its first compressed step: it hands one matrix to what takes a batch of them",
        "https://github.com/pytorch/pytorch/pull/75157",
        shown_by=("test_distributed.py::test_low_rank_hook",),
        strikes=lambda hook: hook == "batched_powerSGD_hook",
    ),
    KnownDefect(
        "dtensor-mean-of-unequal-parts",
        "losses of DTensors average the means of parts, also where the parts are of unequal sizes",
        "https://github.com/pytorch/pytorch/issues/162692",
        shown_by=("test_sharded.py::test_losses_of_dtensors",),
        strikes=lambda loss, even, size: loss in ("mse_loss", "huber_loss", "smooth_l1_loss") and not even and size > 1,
    ),
    KnownDefect(
        "dtensor-weighted-mean-of-parts",
        "nll_loss of DTensors averages the weighted means of parts, whose weights differ",
        "https://github.com/pytorch/pytorch/issues/185167",
        shown_by=("test_sharded.py::test_losses_of_dtensors",),
        strikes=lambda loss, even, size: loss in ("weighted nll_loss", "nll_loss with ignored classes") and size > 1,
        fixed="2.14.1",
    ),
)

KNOWN_DEFECTS = {defect.name: defect for defect in _TABLE}
"""Every known defect by name."""


@dataclass(frozen=True)
class Met:
    """A known defect that was met, and whether it showed."""

    name: str
    failed: bool


_met = Channel[Met]()

reported_to = _met.heard_by
"""Have a function told of each known defect that this process meets, for the time of the context.

Without it none is known: what fails, fails.
"""

report = _met.tell
"""Report what another process has met; nothing where nobody hears it."""


def is_known(name: str, *, failed: bool, **facts: Any) -> bool:
    """Return whether the defect called `name` strikes where `facts` hold; report whether it has shown there.

    Raises:
        ValueError: there is no such defect.
    """
    if name not in KNOWN_DEFECTS:
        raise ValueError(f"known_defect: {name!r} is unknown; choose one of {', '.join(KNOWN_DEFECTS)}")
    defect = KNOWN_DEFECTS[name]
    if not _met.heard or not defect.strikes(**facts) or not defect.is_in(torch_version()):
        return False
    report(Met(name, failed))
    return True


@contextlib.contextmanager
def known_defect(name: str, *, explained: Callable[[], object] | None = None, **facts: Any) -> Iterator[None]:
    """Report what fails in the context as known, where the defect called `name` strikes under `facts`.

    Args:
        explained: called when something has failed: raises an `AssertionError` if the defect would have led to something
            else. A check of a result should have it, so that another defect is not hidden behind this one.
        facts: arguments of the defect's condition.

    Raises:
        ValueError: there is no such defect.
    """
    try:
        yield
    except Exception as error:
        kinds = KNOWN_DEFECTS[name].raises if name in KNOWN_DEFECTS else ()
        if not isinstance(error, kinds) and not isinstance(error.__cause__, kinds):
            raise
        if explained is not None:
            try:
                explained()
            except AssertionError:
                raise error from error.__cause__
        if not is_known(name, failed=True, **facts):
            raise
    else:
        is_known(name, failed=False, **facts)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a release: (2, 13, 0) of "2.13.0+cpu"."""
    release = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, release[0].split("."))) if release else ()
