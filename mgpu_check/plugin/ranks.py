"""The fixture `ranks`; and skip, reject or xfail a test in this process if all ranks have done so."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pytest

from mgpu_check.engine.rank_side.rank import NamedFunction
from mgpu_check.errors import RankHang, RankHangInFixture
from mgpu_check.plugin.session import GpuSession
from mgpu_check.processes.environments import simulating

if TYPE_CHECKING:
    import torch

Gpus = tuple["torch.device", ...]  # the fixture `gpus`


class Ranks:
    """The fixture `ranks`: runs functions on the ranks of a test from the pytest process."""

    def __init__(self, session: GpuSession) -> None:
        self._session = session

    @property
    def size(self) -> int:
        """Number of devices that the test has, and the largest world size."""
        return self._session.pool.devices

    def run(
        self,
        fn: Callable[..., Any] | str,
        /,
        *args: Any,
        size: int | None = None,
        timeout: float | None = None,
        devices: Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> list[Any]:
        """Call ``fn(*args, **kwargs)`` on every rank, and return the results in rank order.

        If `fn` has a parameter ``rank``, it receives the `mgpu_check.Rank`. `fn` is pickled by value, with everything
        that it refers to. A text such as ``"package.module:function"`` names a function that the ranks import. Device
        tensors come back as CPU tensors.

        Args:
            size: world size, 1 to `self.size`; default all. May differ from call to call.
            timeout: seconds for all ranks to return; default ``--rank-timeout``.
            devices: alternative to `size`: distinct devices of the test, 0 to ``self.size - 1``, in any order. Rank
                ``i`` runs on ``devices[i]``, and its `Rank.device` says so. Default: the first devices, in order.
            environment: variables set before the ranks start, such as those that NCCL or cuBLAS reads once. They come
                too late for variables that torch reads at import. Ranks with different variables are different
                processes. With ``{"PYTHONHASHSEED": "random"}`` each rank has its own hash seed, as under torchrun;
                otherwise all ranks share one.

        Raises:
            RankFailure: a rank raised.
            RankDied: the process of a rank ended.
            RankHang: not all ranks returned in time.
            ValueError: `size`, `timeout`, `devices` or `environment` is not valid, or the text names no function.
            TypeError: `fn`, or an argument, cannot be pickled.
        """
        from mgpu_check.engine.world import NotPicklable

        if isinstance(fn, str):
            fn = NamedFunction(fn)
        self._session.on_ranks()
        try:
            with abandoning(self._session), self._session.some_devices(size if devices is None else None):
                return self._session.pool.run(
                    fn, *args, size=size, timeout=timeout, devices=devices, environment=environment, **kwargs
                )
        except (NotPicklable, ValueError) as misuse:  # its traceback starts at the caller, without the engine's frames
            raise misuse.with_traceback(None) from None

    @property
    def _at_once(self) -> int:
        """Number of calls that `_run_apart` may make at once: 1 on real devices, so that all run on the same device."""
        return self.size if self._session.settings.simulate == "cpu" else 1

    def _run_apart(self, fn: Callable[..., Any], arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Call ``fn(*args)`` for each of `arguments` at once, each on a rank of its own: see `RankPool.run_apart`."""
        self._session.on_ranks()
        with abandoning(self._session), self._session.some_devices(len(arguments)):
            return self._session.pool.run_apart(fn, arguments)

    @property
    def _seeds_apart(self) -> bool:
        """Whether ranks have different hash seeds by default, as launched ranks have."""
        return self._session.has_agents

    @property
    def _simulated(self) -> str:
        """The kind of simulated devices, as in "SIMULATED cpu"; "" for real devices."""
        backing = self._session.settings.simulate
        return f"SIMULATED {backing}" if backing else ""

    def _script_environment(self, size: int) -> dict[str, str]:
        """Return the environment of a script that sees the first `size` devices of the test, and no others."""
        if self._session.has_agents:
            raise pytest.UsageError(
                "a script is compared on one machine only: run this test without torchrun or srun, with pytest --gpus=N"
            )
        backing = self._session.settings.simulate
        if backing:
            return simulating(os.environ, size, backing)
        return {**os.environ, **self._session.leasing.mask(self._session.pool.available[:size]).environment}

    def _remark(self, line: str) -> None:
        if line not in self._session.notes.remarks:
            self._session.notes.remarks.append(line)

    def _not_seen(self, step: str, line: str) -> None:
        """Add what a pass does not show to the summary of the run, and to the report of the test."""
        self._session.test.not_seen.append(f"{step}: {line}")
        self._session.notes.not_seen.setdefault(line, []).append(step)

    def __repr__(self) -> str:
        return f"<{self.size} ranks>"

    def __reduce__(self) -> tuple[object, ...]:
        raise TypeError("ranks.run is for the pytest process; inside a rank, call the function itself")


@contextlib.contextmanager
def abandoning(session: GpuSession) -> Iterator[None]:
    """Skip, reject or xfail the test or example in this process if all ranks have done so. Raises `RankHang`: the ranks
    hang, or something failed the test from outside while they ran, as pytest-timeout does."""
    from mgpu_check.engine.world import Abandoned
    from mgpu_check.plugin.rank_messages import keep_steps

    try:
        yield
    except RankHang as late:
        keep_steps(late)
        if session.test.in_body:
            raise
        raise _in_fixture(late) from None
    except Abandoned as abandoned:
        ending, reason = abandoned.failure.kind, abandoned.failure.message
    except pytest.fail.Exception as failed:
        hang = session.pool.stopped()
        if hang is None:
            raise
        keep_steps(hang)
        hang.args = (f"{hang}\n\n{failed}",)
        raise (hang if session.test.in_body else _in_fixture(hang)) from None
    else:
        return
    if ending == "reject":
        from hypothesis import reject  # already imported if an example can be rejected

        reject()
    elif ending == "xfail":
        pytest.xfail(reason)
    else:
        # Report the skip at the line of the test, not here.
        raise pytest.skip.Exception(reason, _use_item_location=True)


def _in_fixture(hang: BaseException) -> RankHangInFixture:
    return RankHangInFixture(str(hang), ranks=getattr(hang, "ranks", ()))
