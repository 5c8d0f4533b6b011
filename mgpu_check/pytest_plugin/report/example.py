"""``--gpu-replay``: one property with one example, the one that has failed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from mgpu_check.pytest_plugin.report.replay import FLAG
from mgpu_check.torch_hooks.patches import replaced

__all__ = ["apply", "blob_of_this", "check", "draws_on", "is_final", "keeping_steps"]


def check(text: str) -> None:
    """See that `text` is an example of this version of Hypothesis.

    Raises:
        pytest.UsageError: it is not; says why.
    """
    version, colon, blob = text.partition(":")
    here = importlib.metadata.version("hypothesis")
    if not colon or not blob:
        raise pytest.UsageError(
            f"mgpu-check: {FLAG}: {text!r} is not valid; copy the whole line at the end of a failure's report, which has "
            "the version of Hypothesis, a colon, and the example"
        )
    if version != here:
        raise pytest.UsageError(
            f"mgpu-check: {FLAG}: this example was drawn by Hypothesis {version}, and here is {here}, which may draw "
            f"another by it; install hypothesis=={version}, or run the test without {FLAG}"
        )
    from hypothesis.core import decode_failure

    try:
        decode_failure(blob.encode())
    except Exception:
        raise pytest.UsageError(
            f"mgpu-check: {FLAG}: what stands after the colon is no example of Hypothesis; copy the whole line at the end "
            "of a failure's report"
        ) from None


def draws_on(argument: object) -> bool:
    """Return whether an argument of a test is what `st.data()` gives, of which it draws while it runs."""
    return type(argument).__name__ == "DataObject" and type(argument).__module__.startswith("hypothesis.")


def apply(text: str, items: Sequence[pytest.Item]) -> str | None:
    """Have the one item run this example only; why that cannot be, if it cannot."""
    if len(items) != 1:
        return f"mgpu-check: {FLAG}: it is the example of one test, but {len(items)} are selected; give one node id"
    function: Any = getattr(items[0], "function", None)
    if not getattr(function, "is_hypothesis_test", False):
        return f"mgpu-check: {FLAG}: {items[0].nodeid} draws no examples; run it without"
    from hypothesis import reproduce_failure

    version, _, blob = text.partition(":")
    reproduce_failure(version, blob.encode())(function)
    return None


def blob_of_this() -> str | None:
    """Return the example that Hypothesis runs now; None where it is not known.

    By inner parts of Hypothesis: it tells of an example only if that raises an `Exception`.
    """
    with contextlib.suppress(Exception):
        from hypothesis import __version__
        from hypothesis.control import current_build_context
        from hypothesis.core import encode_failure

        return f"{__version__}:{encode_failure(current_build_context().data.choices).decode()}"
    return None


# What it asks whether there is one: in recent releases, and in those before.
_OBSERVED = {"observability_enabled": lambda: True, "TESTCASE_CALLBACKS": (None,)}


@contextlib.contextmanager
def keeping_steps() -> Iterator[None]:
    """Have state machines keep the text of each step that they take, for `forwarding.steps_to`, for the time of the
    context.

    By inner parts of Hypothesis: it writes the steps of an example for an observer, or when it runs the example for the
    last time, and one that hangs is run once.
    """
    stateful: Any = sys.modules.get("hypothesis.stateful")
    with contextlib.ExitStack() as stack:
        for name, value in _OBSERVED.items():
            if hasattr(stateful, name):
                stack.enter_context(replaced(stateful, name, value))
        yield


def is_final() -> bool:
    """Return whether Hypothesis runs an example for the last time, to report it."""
    with contextlib.suppress(Exception):
        from hypothesis.control import current_build_context

        return bool(current_build_context().is_final)
    return False
