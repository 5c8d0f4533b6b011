"""Connect an agent to its driver. Rank 0 starts the driver, and the other agents find its announcement in the store."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Sequence

from mgpu_check.engine.remote.addresses import listener_for, rendezvous_of, words_of_parent
from mgpu_check.engine.remote.credentials import Key, Stranger, WrongKey, present
from mgpu_check.engine.remote.driver import start_driver
from mgpu_check.engine.remote.keyfile import REMEDY
from mgpu_check.engine.remote.meeting import Announced, End, Meeting
from mgpu_check.engine.remote.variables import LaunchedProcess
from mgpu_check.errors import StartupFailure

_CONNECT_TIMEOUT = 10.0
_PROOF_TIMEOUT = 60.0
_RETRY = 0.1  # seconds between two reads of the store
_GONE_TIMEOUT = 60.0  # seconds for the next attempt to announce its driver
_KNOCK_TIMEOUT = 5.0  # seconds: this process ends with an error anyway


class Refused(Exception):
    """The announced driver belongs to another user or run. The text says what to do."""


def connect(driver: Announced, attempts: int = 1) -> socket.socket:
    """Connect to `driver`, and authenticate both sides.

    Raises:
        OSError: the driver is gone.
        Stranger: another process has its address.
    """
    connection = socket.create_connection((driver.address, driver.port), _CONNECT_TIMEOUT)
    try:
        present(connection, driver.key, _PROOF_TIMEOUT)
    except ConnectionResetError:
        connection.close()
        if attempts == 1:
            raise
        return connect(driver, attempts - 1)
    except BaseException:
        connection.close()
        raise
    return connection


class JoinedRun:
    """The run from the view of one agent.

    Attributes:
        process: the driver's process, if this agent has started it.
        driver: the driver of the run; valid only after `join` has returned a connection.
    """

    def __init__(self, launched: LaunchedProcess, key: Key | None, arguments: Sequence[str], timeout: float) -> None:
        """Connect to the store. Rank 0 also starts the driver, unless the driver of an earlier attempt still runs."""
        self.process: subprocess.Popen[bytes] | None = None
        self._launched = launched
        self._timeout = timeout
        self._meeting = Meeting(launched, timeout, key)
        self._own = key
        self._driver: Announced | None = None
        if launched.rank == 0:
            self._driver = self._left() or self._start(arguments)

    @property
    def driver(self) -> Announced:
        assert self._driver is not None
        return self._driver

    def _left(self) -> Announced | None:
        """Return the driver of an earlier attempt if it still runs."""
        try:
            announced = self._meeting.driver()
            if announced is not None:
                connect(announced).close()
            return announced
        except (OSError, Stranger):
            return None

    def _start(self, arguments: Sequence[str]) -> Announced:
        rendezvous = ""
        if self._launched.launcher == "torchrun":
            rendezvous = rendezvous_of(words_of_parent(), os.environ.get("PET_RDZV_ENDPOINT", ""))
        listener, address = listener_for(self._launched, rendezvous)
        with listener:
            announced = self._meeting.announce(address, listener.getsockname()[1])
            trusting = "" if self._own else f"{self._launched.address}:{self._launched.port}"
            self.process = start_driver(self._launched, listener, announced.key, trusting, arguments)
        return announced

    def join(self) -> socket.socket | End:
        """Wait for the driver and connect to it; return the connection, or how the run has ended."""
        deadline = time.monotonic() + self._timeout
        reason = "none was announced"
        gone = ""  # name of a driver that has ended without a result
        while time.monotonic() < deadline:
            if self.process is not None and (code := self.process.poll()) is not None:
                return End(code if code >= 0 else None)
            if self._launched.rank != 0:
                self._driver = self._announced()
            if self._driver is not None:
                end = self._meeting.ended(self._driver)
                if end is not None and (end.code is not None or self._launched.final):
                    return end
                if end is not None and gone != self._driver.name:
                    # It may belong to an earlier attempt, and the next driver may be announced soon.
                    gone = self._driver.name
                    deadline = min(deadline, time.monotonic() + _GONE_TIMEOUT)
                connected = self._connect(self._driver)
                if not isinstance(connected, str):
                    return connected
                reason = connected if end is None else "the announced driver ended without a result"
            time.sleep(_RETRY)
        if gone:
            return End(None)
        at = "" if self._driver is None else f" at {self._driver.address} port {self._driver.port}"
        raise StartupFailure(f"no driver was found{at} within {self._timeout:g} s: {reason}")

    def _connect(self, driver: Announced) -> socket.socket | End | str:
        """Connect to the driver; return the connection, or how the run has ended, or why there is no connection yet."""
        try:
            return connect(driver)
        except ConnectionRefusedError as error:
            if self._launched.rank == 0 and self.process is None:
                return End(None)  # it ran a moment ago, and only this agent could start another
            return str(error)
        except (OSError, Stranger) as error:
            return str(error)

    def _announced(self) -> Announced | None:
        try:
            return self._meeting.driver()
        except WrongKey as error:
            self._knock()
            raise Refused(
                f"the driver {error} than the one in {self._own.source if self._own else 'the store'}: the hosts do "
                f"not share that file, or somebody else has written to the launcher's store; {REMEDY}"
            ) from None
        except Stranger as error:
            raise Refused(f"the driver {error}: start all processes of a run with the same options") from None

    def _knock(self) -> None:
        """Make the driver warn about the other key, because its user may see only the terminal of rank 0."""
        claimed = self._meeting.claimed()
        if claimed is not None and self._own is not None:
            try:
                with socket.create_connection(claimed, _KNOCK_TIMEOUT) as connection:
                    present(connection, self._own, _KNOCK_TIMEOUT)
            except (OSError, OverflowError, ValueError, Stranger):
                pass  # there is no driver at the announced address

    def note_end(self, code: int | None) -> None:
        """Note in the store, for late agents, how the run ended; `code` is None if the driver ended without one."""
        if self._launched.rank == 0 and self._driver is not None:
            try:
                self._meeting.end(self._driver, code)
            except RuntimeError:
                pass  # the launcher has closed its store
