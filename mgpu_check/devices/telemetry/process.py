"""The process that queries the driver. `sampler.TelemetrySampler` starts it, so that a hang or crash in the driver ends
no run.

It reads lines of JSON: its configuration, then numbers of snapshots. It writes lines of JSON: samples, answers,
troubles. It ends when its input closes. One thread queries each GPU. The current query of each thread is noted in a
file that the parent reads if this process dies.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from mgpu_check.devices.telemetry.fields import Kind, asked
from mgpu_check.devices.telemetry.sources import (
    PATIENCE,
    GpuLost,
    NoTelemetry,
    Override,
    Query,
    QueryError,
    SimulatedSource,
    SimulatedTelemetry,
    Source,
    Turnstile,
    Unsupported,
    watch,
)

NOTE = 64  # bytes per thread to note its current query; the first slot is for calls without a GPU

_EVENTS = 0.5  # seconds per wait for events


class _Output:
    """Lines of JSON for the parent, from any thread."""

    def __init__(self, epoch: float) -> None:
        self._lock = threading.Lock()
        self._epoch = epoch
        self._told: set[tuple[object, ...]] = set()

    def now(self) -> float:
        return time.monotonic() - self._epoch

    def write(self, line: Mapping[str, Any]) -> None:
        text = json.dumps(line) + "\n"
        with self._lock:
            try:
                sys.stdout.write(text)
                sys.stdout.flush()
            except (OSError, ValueError):  # the parent has closed the pipe
                os._exit(0)

    def trouble(self, trouble_kind: str, gpu: int | None, field: str, text: str, code: int | None = None) -> None:
        """Report a trouble; a repeated one only the first time. Xids are always reported."""
        if trouble_kind != "xid":
            same = (trouble_kind, gpu, field, code)
            if same in self._told:
                return
            self._told.add(same)
        self.write({"trouble": [trouble_kind, gpu, field, text, self.now(), code]})


class _Asking:
    """Serializes queries, and notes the current ones where the parent can read them."""

    def __init__(self, output: _Output, notes: mmap.mmap | None) -> None:
        self.turnstile = Turnstile()
        self._output = output
        self._notes = notes

    @contextlib.contextmanager
    def query(self, gpu: int | None, field: str, slot: int = 0) -> Iterator[None]:
        query = Query(gpu, field)
        self.turnstile.enter(query)
        self._note(slot, field)
        try:
            yield
        finally:
            self._note(slot, "")
            self.turnstile.leave(query)

    def _note(self, slot: int, text: str) -> None:
        if self._notes is not None:
            start = slot * NOTE
            self._notes[start : start + NOTE] = text.encode()[:NOTE].ljust(NOTE, b"\0")


class _GpuThread(threading.Thread):
    """Samples one GPU, and answers requests for snapshots of it."""

    def __init__(
        self, source: Source, asking: _Asking, output: _Output, gpu: int, gpus: list[int], slot: int, interval: float
    ) -> None:
        super().__init__(name=f"GPU {gpu}", daemon=True)
        self.wanted: queue.Queue[tuple[int, bool]] = queue.Queue()
        self._source = source
        self._asking = asking
        self._output = output
        self._gpu = gpu
        self._gpus = gpus
        self._slot = slot
        self._interval = interval
        self._unknown: dict[str, str] = {}
        self._lost: str | None = None

    def run(self) -> None:
        # Before a query that may hang: an accused GPU must be found in its slot.
        for field in asked(("identity",), self._gpu, self._gpus):
            value = self._ask(field) if self._lost is None else None
            if value is not None:
                self._output.write({"identity": [self._gpu, field, value]})
        due = time.monotonic()
        while True:
            try:
                number, full = self.wanted.get(timeout=max(0.0, due - time.monotonic()))
            except queue.Empty:
                due = max(due + self._interval, time.monotonic())
                self._sample()
            else:
                self._answer(number, full)

    def _sample(self) -> None:
        if self._lost is None:
            at = self._output.now()
            values = self._read("gauge", "counter", retry=False)
            if self._lost is None:
                self._output.write({"sample": [at, self._gpu, values]})

    def _answer(self, number: int, full: bool) -> None:
        kinds: tuple[Kind, ...] = get_args(Kind) if full else ("gauge", "counter")
        values = self._read(*kinds, retry=full) if self._lost is None else {}
        answer = {"answer": number, "gpu": self._gpu, "values": values}
        self._output.write({**answer, "unknown": self._unknown, "missing": self._lost})

    def _read(self, *kinds: Kind, retry: bool) -> dict[str, Any]:
        """Read all fields of these kinds. Skip fields that were unavailable before, unless `retry`."""
        values: dict[str, Any] = {}
        for field in asked(kinds, self._gpu, self._gpus):
            if self._lost is not None:
                break
            values[field] = None if field in self._unknown and not retry else self._ask(field)
        return values

    def _ask(self, field: str) -> Any:
        try:
            with self._asking.query(self._gpu, field, self._slot):
                value = self._source.query(self._gpu, field)
            self._unknown.pop(field, None)
            return value
        except Unsupported as error:
            self._unknown[field] = str(error)
        except GpuLost as error:
            self._lost = str(error)
            self._output.trouble("lost", self._gpu, field, str(error), error.code)
        except QueryError as error:
            self._unknown[field] = f"error: {error}"
            self._output.trouble("error", self._gpu, field, str(error), error.code)
        except Exception as error:  # from the binding: it must not end the thread silently
            self._unknown[field] = f"error: {type(error).__name__}: {error}"
            self._output.trouble("sampler", self._gpu, field, f"{type(error).__name__}: {error}")
        return None


def _tell_events(source: Source, output: _Output) -> None:
    while True:
        try:
            events = source.events(_EVENTS)
        except Unsupported as error:
            output.write({"no_events": str(error)})
            return
        except Exception as error:
            output.trouble("sampler", None, "events", f"{type(error).__name__}: {error}")
            return
        for event in events:
            output.trouble("xid", event.gpu, "", f"Xid {event.xid}", event.xid)


def open_source(gpus: Mapping[int, str], simulated: SimulatedTelemetry | None) -> Source:
    """Open the telemetry source of this machine: `simulated`, or NVML if it is None.
    Raises `NoTelemetry`: no telemetry on this machine."""
    if simulated is None:
        from mgpu_check.devices.telemetry.nvml import NvmlSource

        return NvmlSource(gpus)
    if simulated.absent:
        raise NoTelemetry(simulated.absent)
    return SimulatedSource(gpus, simulated)


def main() -> None:
    """Serve the parent until it closes the input."""
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        # A signal to a whole job is for the parent, which still wants the last snapshot.
        signal.signal(number, signal.SIG_IGN)
    lines = iter(sys.stdin.readline, "")
    wanted = json.loads(next(lines))
    notes = mmap.mmap(wanted["notes"], NOTE * (1 + len(wanted["gpus"]))) if wanted["notes"] is not None else None
    output = _Output(wanted["epoch"])
    asking = _Asking(output, notes)
    deadline = float(wanted["deadline"])

    def hangs(query: Query, state: Literal["hang", "blocked"]) -> None:
        limit = deadline if query.gpu is not None else PATIENCE * deadline
        output.trouble(state, query.gpu, query.field, f"the driver has not answered within {limit:g} s")

    watch(asking.turnstile, deadline, hangs)
    threads: dict[int, _GpuThread] = {}
    opening = threading.Thread(target=_open, args=(wanted, asking, output, threads), daemon=True)
    opening.start()
    for line in lines:
        opening.join()
        number, full = json.loads(line)
        for thread in threads.values():
            thread.wanted.put((number, full))
    os._exit(0)  # because threads that hang in the driver would block a regular exit


def _open(wanted: dict[str, Any], asking: _Asking, output: _Output, threads: dict[int, _GpuThread]) -> None:
    gpus = {int(number): str(uuid) for number, uuid in wanted["gpus"]}
    simulated = None
    if wanted["simulated"] is not None:
        made_of = wanted["simulated"]
        overrides = tuple(Override(**override) for override in made_of.pop("overrides"))
        simulated = SimulatedTelemetry(**made_of, overrides=overrides)
    try:
        with asking.query(None, "initialization"):
            source = open_source(gpus, simulated)
    except Exception as error:
        output.write({"absent": str(error) if isinstance(error, NoTelemetry) else f"{type(error).__name__}: {error}"})
        return
    numbers = [number for number in gpus if number not in source.unmatched]
    output.write({"ready": numbers, "unmatched": list(source.unmatched.items())})
    new_threads = {
        gpu: _GpuThread(source, asking, output, gpu, numbers, slot, wanted["interval"])
        for slot, gpu in enumerate(gpus, start=1)
        if gpu in numbers
    }
    threads.update(new_threads)
    threading.Thread(target=_tell_events, args=(source, output), name="events", daemon=True).start()
    for thread in new_threads.values():
        thread.start()


if __name__ == "__main__":
    main()
