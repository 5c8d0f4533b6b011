"""Implement ``--gpu-replay``: run one property with the one example that has failed."""

from __future__ import annotations

import contextlib
import importlib.metadata
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from mgpu_check.plugin.report.replay import FLAG
from mgpu_check.torch_hooks.patches import replaced


def check(text: str) -> None:
    """Check that `text` is an example of the installed version of Hypothesis.

    Raises:
        pytest.UsageError: it is not; the message says why.
    """
    version, colon, blob = text.partition(":")
    here = importlib.metadata.version("hypothesis")
    if not colon or not blob:
        raise pytest.UsageError(
            f"mgpu-check: {FLAG}: {text!r} is not valid; copy the whole line at the end of a failure's report: the "
            "value is the version of Hypothesis, a colon, and the example"
        )
    if version != here:
        raise pytest.UsageError(
            f"mgpu-check: {FLAG}: the example was recorded with Hypothesis {version}; version {here} may draw a "
            f"different one; install hypothesis=={version}, or run the test without {FLAG}"
        )
    from hypothesis.core import decode_failure

    try:
        decode_failure(blob.encode())
    except Exception:
        raise pytest.UsageError(
            f"mgpu-check: {FLAG}: the text after the colon is not an example of Hypothesis; copy the whole line at "
            "the end of a failure's report"
        ) from None


def draws_on(argument: object) -> bool:
    """Return whether an argument of a test comes from `st.data()`, which draws while the test runs."""
    return type(argument).__name__ == "DataObject" and type(argument).__module__.startswith("hypothesis.")


def apply(text: str, items: Sequence[pytest.Item]) -> str | None:
    """Make the one selected item run only this example. Return an error message if that is impossible."""
    if len(items) != 1:
        return f"mgpu-check: {FLAG}: it is the example of one test, but {len(items)} are selected; give one node id"
    function: Any = getattr(items[0], "function", None)
    if not getattr(function, "is_hypothesis_test", False):
        return f"mgpu-check: {FLAG}: {items[0].nodeid} draws no examples; run it without this option"
    from hypothesis import reproduce_failure

    version, _, blob = text.partition(":")
    reproduce_failure(version, blob.encode())(function)
    return None


def blob_of_this() -> str | None:
    """Return the current Hypothesis example, encoded for ``--gpu-replay``; None if it is unknown.

    Uses internals of Hypothesis, which reports an example only if it raises an `Exception`.
    """
    with contextlib.suppress(Exception):
        from hypothesis import __version__
        from hypothesis.control import current_build_context
        from hypothesis.core import encode_failure

        return f"{__version__}:{encode_failure(current_build_context().data.choices).decode()}"
    return None


# How Hypothesis decides whether an observer is present: in recent releases, and in older ones.
_OBSERVED = {"observability_enabled": lambda: True, "TESTCASE_CALLBACKS": (None,)}


@contextlib.contextmanager
def keeping_steps() -> Iterator[None]:
    """Within the context, make state machines record the text of each step, for `forwarding.steps_to`.

    Uses internals of Hypothesis, which records steps only for an observer or in the final run of an example. An example
    that hangs has no final run.
    """
    stateful: Any = sys.modules.get("hypothesis.stateful")
    with contextlib.ExitStack() as stack:
        for name, value in _OBSERVED.items():
            if hasattr(stateful, name):
                stack.enter_context(replaced(stateful, name, value))
        yield


def is_final() -> bool:
    """Return whether this is the final run of an example, in which Hypothesis reports it."""
    with contextlib.suppress(Exception):
        from hypothesis.control import current_build_context

        return bool(current_build_context().is_final)
    return False
