"""The fixture `ranks`, and how a test is abandoned that all ranks have abandoned."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest

from mgpu_check.errors import RankHang, RankHangInFixture
from mgpu_check.pytest_plugin.session import GpuSession

__all__ = ["Ranks", "abandoning"]


class Ranks:
    """The fixture `ranks`: all ranks of a test, seen from the pytest process."""

    def __init__(self, session: GpuSession) -> None:
        self._session = session

    @property
    def size(self) -> int:
        """Number of devices that the test has, and the largest world size."""
        return self._session.pool.devices

    def run(
        self,
        fn: Callable[..., Any],
        /,
        *args: Any,
        size: int | None = None,
        timeout: float | None = None,
        devices: Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank; the results in rank order.

        A parameter of `fn` called ``rank`` is given the `mgpu_check.Rank`. `fn` travels by value, with all that it
        refers to. Tensors that live on devices come back as CPU tensors.

        Args:
            size: world size, 1 to `self.size`; default all. May differ from call to call.
            timeout: seconds for all ranks to return; default ``--rank-timeout``.
            devices: in place of `size`, some of the devices that the test has, 0 to ``self.size - 1``, in any order:
                rank ``i`` runs on ``devices[i]``, and its `Rank.device` says so. Default the first ones, in order.
            environment: variables that the ranks have from their start, as those that NCCL or cuBLAS reads once. What torch
                reads when it is imported is read before. Ranks with other variables are other processes. With
                ``{"PYTHONHASHSEED": "random"}`` ranks have different hash seeds, as under torchrun; otherwise all have one.

        Raises:
            RankFailure: a rank raised.
            RankDied: the process of a rank ended.
            RankHang: not all ranks returned in time.
            ValueError: `size`, `timeout`, `devices` or `environment` is not valid.
            TypeError: `fn`, or an argument, cannot be pickled.
        """
        __tracebackhide__ = True
        from mgpu_check.engine.sending import NotPicklable

        self._session.on_ranks()
        self._session.hear_covered({"": [*args, *kwargs.values()]})
        try:
            with abandoning(self._session), self._session.some_devices(size if devices is None else None):
                return self._session.pool.run(
                    fn, *args, size=size, timeout=timeout, devices=devices, environment=environment, **kwargs
                )
        except (NotPicklable, ValueError) as misuse:
            raise misuse.with_traceback(None) from None  # of the caller: the engine's lines help nobody

    @property
    def _at_once(self) -> int:
        """How many calls `_run_apart` can make at the same time: on real devices one, so that no other device decides."""
        return self.size if self._session.settings.simulate == "cpu" else 1

    def _run_apart(self, fn: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call ``fn(*args)`` for each of `arguments` at the same time, on ranks that are alone: see `RankPool.run_apart`."""
        self._session.on_ranks()
        with abandoning(self._session), self._session.some_devices(len(arguments)):
            return self._session.pool.run_apart(fn, arguments)

    @property
    def _seeds_apart(self) -> bool:
        """Whether ranks have different hash seeds anyway: those that a launcher has launched."""
        return self._session.has_agents

    def _remark(self, line: str) -> None:
        """Have a line in the summary of the run, once."""
        if line not in self._session.remarks:
            self._session.remarks.append(line)

    def __repr__(self) -> str:
        return f"<{self.size} ranks>"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("ranks.run is for the pytest process; inside a rank, call the function itself")


@contextlib.contextmanager
def abandoning(session: GpuSession) -> Iterator[None]:
    """Let a test, or an example, that all ranks have abandoned be abandoned in this process too.

    Raises:
        RankHang: something has failed the test from outside while the ranks ran, as pytest-timeout does.
    """
    from mgpu_check.engine.world import Abandoned
    from mgpu_check.pytest_plugin.forwarding import keep_steps

    try:
        yield
    except RankHang as late:
        keep_steps(late)
        if session.in_body:
            raise
        raise _in_fixture(late) from None
    except Abandoned as abandoned:
        kind, reason = abandoned.failure.kind, abandoned.failure.message
    except pytest.fail.Exception as failed:
        hang = session.pool.stopped()
        if hang is None:
            raise
        keep_steps(hang)
        hang.args = (f"{hang}\n\n{failed}",)
        raise (hang if session.in_body else _in_fixture(hang)) from None
    else:
        return
    if kind == "reject":
        from hypothesis import reject  # imported already, where an example can be rejected

        reject()
    elif kind == "xfail":
        pytest.xfail(reason)
    else:
        # At the test's own line, not here.
        raise pytest.skip.Exception(reason, _use_item_location=True)


def _in_fixture(hang: BaseException) -> RankHangInFixture:
    return RankHangInFixture(str(hang), ranks=getattr(hang, "ranks", ()))
