"""Collect telemetry beside a run (snapshots on request, samples at intervals, and troubles with their GPU and field),
and keep a bounded number of samples, however long the run is; on a remote machine in one call.

A separate process queries the driver (`process`). It lives as long as its `TelemetrySampler`. If this process
dies, even by a signal, the other one ends as well, because its input closes.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from mgpu_check.devices.observations import Number
from mgpu_check.devices.telemetry.fields import Kind, Value, field_of, number_of
from mgpu_check.devices.telemetry.process import NOTE
from mgpu_check.devices.telemetry.sources import PATIENCE, SimulatedTelemetry

Values = Mapping[str, Value | None]  # by field name; None where the GPU or its driver does not support the field

TroubleKind = Literal["hang", "blocked", "error", "lost", "xid", "sampler"]
"""Hang: a query does not return. Blocked: a query does not return, but an earlier one hung and may hold the driver.
Error: a query failed. Lost: the GPU is gone. Xid: the driver reported an error of the GPU. Sampler: the process that
queries the driver has failed or ended.
"""


@dataclass(frozen=True)
class Snapshot:
    """The telemetry of all GPUs at one time. Maps are keyed by a GPU's number in the run."""

    at: float = 0.0  # seconds since the start of the run
    # identities, facts, pairs, limits and states; empty for each GPU in a snapshot that is not full
    facts: Mapping[int, Values] = field(default_factory=dict)
    counters: Mapping[int, Mapping[str, int | None]] = field(default_factory=dict)
    gauges: Mapping[int, Values] = field(default_factory=dict)
    # why a field is None, by name: "not supported", "not permitted", an error; for "xid", why no events are reported
    unknown: Mapping[int, Mapping[str, str]] = field(default_factory=dict)
    missing: Mapping[int, str] = field(default_factory=dict)  # GPUs without an answer, and the reason
    absent: str = ""  # why there is no telemetry at all; "" if there is telemetry
    # UUID, serial number and PCI bus id as first read, also of GPUs that do not answer any more
    identity: Mapping[int, Values] = field(default_factory=dict)

    def by_model(self) -> list[list[int]]:
        """Return the GPUs with facts, those of each model together, in ascending order."""
        models: dict[Value | None, list[int]] = {}
        for gpu, facts in sorted(self.facts.items()):
            models.setdefault(facts.get("name"), []).append(gpu)
        return list(models.values())

    def only(self, gpus: Collection[int]) -> Snapshot:
        """Return the same snapshot, restricted to these GPUs."""

        def of(values: Mapping[int, Any]) -> dict[int, Any]:
            return {gpu: value for gpu, value in values.items() if gpu in gpus}

        maps = (of(self.facts), of(self.counters), of(self.gauges), of(self.unknown), of(self.missing))
        return Snapshot(self.at, *maps, self.absent, of(self.identity))


@dataclass(frozen=True)
class TelemetrySample:
    """Gauges and counters of one GPU at one time.

    Attributes:
        at: seconds since the start of the run.
    """

    at: Number
    gpu: int
    values: Values


def values_of(samples: Sequence[TelemetrySample], name: str) -> list[float]:
    """Return the values of a field that are numbers."""
    return [number for sample in samples if (number := number_of(sample.values.get(name))) is not None]


@dataclass(frozen=True)
class Trouble:
    """A failure of a GPU, or of a query to it."""

    kind: TroubleKind  # see `TroubleKind`
    gpu: int | None  # its number in the run; None if it is unknown
    field: str  # the queried field; "" for an Xid
    text: str  # what happened, in one line that does not repeat GPU and field
    at: float  # seconds since the start of the run
    code: int | None = None  # number of an Xid, or of an error of the driver's library


MOST = 4096  # samples kept per GPU


class History:
    """Samples by GPU. A GPU with too many loses every second sample; samples with throttling are dropped last."""

    def __init__(self) -> None:
        self._of: dict[int, list[TelemetrySample]] = {}

    def add(self, sample: TelemetrySample) -> None:
        kept = self._of.setdefault(sample.gpu, [])
        kept.append(sample)
        if len(kept) > MOST:
            thinned = [s for index, s in enumerate(kept) if index % 2 == 0 or s.values.get("throttle")]
            self._of[sample.gpu] = thinned if len(thinned) <= 3 * MOST // 4 else kept[::2]

    def samples(self) -> list[TelemetrySample]:
        return sorted((s for kept in self._of.values() for s in kept), key=lambda sample: (sample.at, sample.gpu))


_DEADLINES = (20.0, 2.0)  # seconds for a query to a real driver, which may have to wake a GPU, and to a simulated one
_END = 1.0  # seconds to wait for the process to end, before and after SIGKILL
_FACTS: tuple[Kind, ...] = ("identity", "fact", "pair", "limit", "state")


class TelemetrySampler:
    """Watches the GPUs of this machine from its creation on. Safe to use from several threads.

    Its owner makes it where the GPUs are, `visit` for a call on a remote machine. It starts the process that queries
    the driver, and a thread that reads the answers; `close` ends both, and keeps the samples.

    Args:
        gpus: number in the run, and UUID, of each GPU of this machine.
        simulated: configuration of simulated telemetry; None for real GPUs.
        interval: seconds between two samples of a GPU.
        epoch: start of the run, by `time.monotonic`; default now.
        deadline: seconds until a query counts as hanging; default 20, simulated 2.
    """

    def __init__(
        self,
        gpus: Sequence[tuple[int, str]],
        simulated: SimulatedTelemetry | None,
        interval: float,
        *,
        epoch: float | None = None,
        deadline: float | None = None,
    ) -> None:
        if not interval > 0:
            raise ValueError(f"Sampler: interval={interval!r} must be more than 0 seconds")
        self.gpus = tuple(number for number, _ in gpus)
        self.interval = interval
        self._epoch = time.monotonic() if epoch is None else epoch
        self._deadline = deadline or _DEADLINES[simulated is not None]
        self._changed = threading.Condition()
        self._history = History()
        self._troubles: list[Trouble] = []
        self._answers: dict[int, dict[int, dict[str, Any]]] = {}
        self._unmatched: dict[int, str] = {}
        self._identity: dict[int, dict[str, Any]] = {}
        self._ready = False
        self._ended = False
        self._closed = False
        self._absent = ""
        self._asked = 0
        self._no_events: str | None = None
        # The child may run from any directory. It must import the same copy of this package as this process.
        root = str(Path(__file__).parents[3])
        code = (
            f"import sys; sys.path.insert(0, {root!r}); import mgpu_check; sys.path.append(sys.path.pop(0)); "
            "from mgpu_check.devices.telemetry import process; process.main()"
        )
        with tempfile.TemporaryFile() as notes:
            size = NOTE * (1 + len(gpus))
            notes.truncate(size)
            self._notes = mmap.mmap(notes.fileno(), size)
            # In a session of its own, so that Ctrl-C reaches only the run, which then closes this process.
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=(notes.fileno(),),
                start_new_session=True,
                text=True,
            )
            self._send(
                {
                    "gpus": [list(gpu) for gpu in gpus],
                    "interval": interval,
                    "epoch": self._epoch,
                    "deadline": self._deadline,
                    "simulated": None if simulated is None else asdict(simulated),
                    "notes": notes.fileno(),
                }
            )
        self._listener = threading.Thread(target=self._listen, name="telemetry", daemon=True)
        self._listener.start()

    def snapshot(self, timeout: float = 60.0, *, full: bool = True) -> Snapshot:
        """Query all GPUs now, and wait up to `timeout` seconds for all answers together.

        `Snapshot.missing` has each GPU without an answer, and the reason. There is no wait for a GPU that was not
        found, is lost, or was already reported as hanging or blocked; it is in `missing`, too. If there is no telemetry
        at all, `Snapshot.absent` says why. `full`: query all fields; otherwise only gauges and counters, which is
        faster.
        """
        with self._changed:
            self._asked += 1
            number = self._asked
            self._answers[number] = {}
            self._send([number, full])
            self._changed.wait_for(lambda: self._is_complete(number), timeout)
            return self._snapshot(self._answers.pop(number), timeout)

    def now(self) -> float:
        """Return the seconds since the start of the run."""
        return time.monotonic() - self._epoch

    def samples(self) -> list[TelemetrySample]:
        """Return the samples so far, by time. A long run drops some, those with throttled clocks last."""
        with self._changed:
            return self._history.samples()

    def troubles(self) -> list[Trouble]:
        """Return the troubles so far, in the order of their detection."""
        with self._changed:
            return list(self._troubles)

    @property
    def pid(self) -> int:
        return self._process.pid

    def asked_now(self) -> list[tuple[int | None, str]]:
        """Return the queries in progress: GPU (None for a call without a GPU) and field."""
        slots = [None, *self.gpus]
        notes = (self._notes[slot * NOTE : (slot + 1) * NOTE].rstrip(b"\0") for slot in range(len(slots)))
        return [(gpu, note.decode(errors="replace")) for gpu, note in zip(slots, notes, strict=True) if note]

    def close(self) -> None:
        """End the process. Samples and troubles remain available."""
        with self._changed:
            self._closed = True
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.close()
        try:
            self._process.wait(_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):  # in the driver, where no signal reaches it
                self._process.wait(_END)
        self._listener.join(_END)

    def __enter__(self) -> TelemetrySampler:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _send(self, message: object) -> None:
        with contextlib.suppress(OSError, ValueError):  # it has ended: `_listen` says so
            print(json.dumps(message), file=self._process.stdin, flush=True)

    def _is_complete(self, number: int) -> bool:
        if self._ended or self._absent or any(t.kind == "hang" and t.gpu is None for t in self._troubles):
            return True
        return self._ready and all(gpu in self._answers[number] or self._why(gpu) for gpu in self.gpus)

    def _why(self, gpu: int) -> str | None:
        """Return why a GPU will not answer; None if it may."""
        if gpu in self._unmatched:
            return self._unmatched[gpu]
        for trouble in self._troubles:
            if trouble.gpu == gpu and trouble.kind in ("hang", "blocked"):
                return f"{trouble.field}: {trouble.text}"
        return None

    def _snapshot(self, answers: Mapping[int, Mapping[str, Any]], timeout: float) -> Snapshot:
        gone = "the process that queries the driver has ended" if self._ended and not answers else ""
        absent = self._absent or gone
        if not absent and not self._ready:
            absent = f"the driver's library has not answered within {min(timeout, PATIENCE * self._deadline):g} s"
        fields: dict[int, dict[Kind, dict[str, Any]]] = {}
        no_events = {"xid": self._no_events} if self._no_events else {}
        missing: dict[int, str] = {}
        for gpu in self.gpus:
            answer = answers.get(gpu)
            if answer is None or answer["missing"]:
                no_answer = f"no answer within {timeout:g} s"
                missing[gpu] = (answer or {}).get("missing") or self._why(gpu) or absent or no_answer
                continue
            by_kind: dict[Kind, dict[str, Any]] = fields.setdefault(gpu, {})
            for name, value in answer["values"].items():
                by_kind.setdefault(field_of(name).kind, {})[name] = value
        return Snapshot(
            at=self.now(),
            facts={
                gpu: {name: v for fact_kind in _FACTS for name, v in by_kind.get(fact_kind, {}).items()}
                for gpu, by_kind in fields.items()
            },
            counters={gpu: by_kind["counter"] for gpu, by_kind in fields.items()},
            gauges={gpu: by_kind["gauge"] for gpu, by_kind in fields.items()},
            unknown={gpu: {**answers[gpu]["unknown"], **no_events} for gpu in fields},
            missing=missing,
            absent=absent,
            identity={gpu: dict(values) for gpu, values in self._identity.items()},
        )

    def _listen(self) -> None:
        stdout = self._process.stdout
        assert stdout is not None
        with stdout:
            for line in stdout:
                message = json.loads(line)
                with self._changed:
                    if "sample" in message:
                        self._history.add(TelemetrySample(*message["sample"]))
                    elif "answer" in message:
                        if message["answer"] in self._answers:
                            self._answers[message["answer"]][message["gpu"]] = message
                    elif "identity" in message:
                        gpu, name, value = message["identity"]
                        self._identity.setdefault(gpu, {})[name] = value
                    elif "trouble" in message:
                        self._troubles.append(Trouble(*message["trouble"]))
                    elif "ready" in message:
                        self._unmatched = dict(message["unmatched"])
                        self._ready = True
                    elif "absent" in message:
                        self._absent = message["absent"]
                    elif "no_events" in message:
                        self._no_events = message["no_events"]
                    self._changed.notify_all()
        code = self._process.wait()
        with self._changed:
            self._ended = True
            if not self._closed:
                self._troubles.append(self._death(code))
            self._changed.notify_all()

    def _death(self, code: int) -> Trouble:
        """Report the death of the process; name the GPU and the field if exactly one query was in progress."""
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        pending = self.asked_now()
        gpu, name = pending[0] if len(pending) == 1 else (None, "")
        text = f"the process that queries the driver has ended with {how}"
        return Trouble("sampler", gpu, name, text, self.now())


_PATIENCE = 60.0


@dataclass(frozen=True)
class Visit:
    """The telemetry of one call. Times are seconds since the call began."""

    snapshot: Snapshot
    samples: tuple[TelemetrySample, ...]
    troubles: tuple[Trouble, ...]


def visit(
    gpus: Sequence[tuple[int, str]],
    simulated: SimulatedTelemetry | None,
    interval: float,
    full: bool = True,
    meanwhile: Callable[[], object] | None = None,
) -> Visit:
    """Sample the GPUs of this machine while `meanwhile` runs, then take a snapshot.

    `gpus`, `simulated`, `interval`: see `TelemetrySampler`. `full`: see `TelemetrySampler.snapshot`. `meanwhile`: the
    work to run; None takes the snapshot at once.
    """
    with TelemetrySampler(gpus, simulated, interval) as sampler:
        if meanwhile is not None:
            meanwhile()
        snapshot = sampler.snapshot(_PATIENCE, full=full)
    return Visit(snapshot, tuple(sampler.samples()), tuple(sampler.troubles()))
