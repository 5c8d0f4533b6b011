"""Check which devices a fresh process sees under `CUDA_VISIBLE_DEVICES`, which a process reads once only.

Run as a program, this module reads a `Question` from stdin and writes the answer to stdout. It forks for each value of the
variable before anything touches a device, because importing torch again for each would take seconds.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from mgpu_check.errors import DeviceEnumerationError

__all__ = ["Sight", "assert_visible_devices_honoured", "devices_seen", "visible_subsets"]

VARIABLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Question:
    """A question to a child process.

    Attributes:
        values: values of `CUDA_VISIBLE_DEVICES`; each gets its own process.
        simulate: the number of simulated devices, or None for real ones.
    """

    values: list[str]
    simulate: int | None


@dataclass(frozen=True)
class Sight:
    """The devices that a process sees: their UUIDs in order, and the results of the tutorials' helpers."""

    uuids: list[str]
    try_gpu: str
    try_all_gpus: list[str]


def visible_subsets(entries: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Return values of `CUDA_VISIBLE_DEVICES`, each with the positions in `entries` of the devices that it makes visible.

    The values list all devices backwards, the last device only, no device, and devices with an invalid entry between them, where
    the driver stops. Source: CUDA C++ programming guide, environment variables.

    Args:
        entries: the names of all devices for that variable, such as ("0", "1", "2", "3").
    """
    last = len(entries) - 1
    backwards = list(range(last, -1, -1))
    return [
        (",".join(entries[one] for one in backwards), backwards),
        (entries[last], [last]),
        ("", []),
        (f"{entries[last]},-1,{entries[0]}", [last]),
    ]


def assert_visible_devices_honoured(uuids: Sequence[str]) -> None:
    """Assert that processes under `CUDA_VISIBLE_DEVICES` see exactly the devices that it lists, in its order.

    Args:
        uuids: the UUIDs of the devices of this process, in order.

    Raises:
        DeviceEnumerationError: naming the value, the devices that it should make visible, and the visible ones.
    """
    __tracebackhide__ = True
    listed = os.environ.get(VARIABLE)
    entries = [str(index) for index in range(len(uuids))] if listed is None else listed.split(",")[: len(uuids)]
    subsets = visible_subsets(entries)
    for (value, subset), sight in zip(subsets, devices_seen([value for value, _ in subsets]), strict=True):
        names = {uuid: f"device {entry}" for uuid, entry in zip(uuids, entries, strict=True)}
        if sight.uuids != [uuids[index] for index in subset]:
            raise DeviceEnumerationError(
                f"under {VARIABLE}={value!r} a process must see {_listed([names[uuids[index]] for index in subset])}, "
                f"but sees {_listed([names.get(uuid, f'an unknown device ({uuid})') for uuid in sight.uuids])}",
                ranks=subset,
            )
        expected = [f"cuda:{index}" for index in range(len(subset))] or ["cpu"]
        if (sight.try_gpu, sight.try_all_gpus) != (expected[0], expected):
            raise DeviceEnumerationError(
                f"under {VARIABLE}={value!r} try_gpu() must be {expected[0]} and try_all_gpus() {_listed(expected)}, "
                f"but they are {sight.try_gpu} and {_listed(sight.try_all_gpus)}",
                ranks=subset,
            )


def devices_seen(values: Sequence[str]) -> list[Sight]:
    """Return the devices that a fresh process sees under each value of `CUDA_VISIBLE_DEVICES`.

    The devices are simulated if this process has simulated ones.

    Raises:
        DeviceEnumerationError: a process failed; with its output.
    """
    from mgpu_check.simulated import simulated_device_count

    # A simulated node runs on the CPU there, even if a real device backs it here, because that would obey the variable too.
    question = Question(list(values), simulated_device_count())
    answer = subprocess.run(
        [sys.executable, "-m", __name__],
        input=json.dumps(asdict(question)),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(_package_path())},
        capture_output=True,
        text=True,
        check=False,
    )
    if answer.returncode != 0:
        raise DeviceEnumerationError(
            f"a process that lists its devices ended with exit code {answer.returncode}:\n{answer.stderr[-4000:]}"
        )
    return [Sight(**sight) for sight in json.loads(answer.stdout)]


def _package_path() -> list[str]:
    """Return PYTHONPATH with the folder of this package in front, because the package need not be installed."""
    root = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    return [root, *filter(None, [os.environ.get("PYTHONPATH")])]


def _look(simulate: int | None) -> Sight:
    import contextlib

    from mgpu_check.devices.inventory import visible_devices
    from mgpu_check.recipes.devices import try_all_gpus, try_gpu
    from mgpu_check.simulated import simulated_node

    with simulated_node(simulate) if simulate else contextlib.nullcontext():
        return Sight(
            uuids=[device.uuid for device in visible_devices()],
            try_gpu=str(try_gpu()),
            try_all_gpus=[str(device) for device in try_all_gpus()],
        )


def _look_in_child(value: str, simulate: int | None) -> dict[str, object] | None:
    """Run `_look` in a fork of this process, under `value`; return None if it failed, with its traceback on stderr."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.environ[VARIABLE] = value
            os.write(writing, json.dumps(asdict(_look(simulate))).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as answer:
        text = answer.read()
    os.waitpid(child, 0)
    return json.loads(text) if text else None


def _import_once(simulate: int | None) -> None:
    """Import before the forks the modules that each fork needs: torch, and those of a simulated node."""
    import torch  # noqa: F401

    if simulate:
        from mgpu_check.simulated import simulated_node

        with simulated_node(simulate):
            pass


def main() -> int:
    """Answer the question on stdin; exit code 1 if a process failed."""
    question = Question(**json.load(sys.stdin))
    _import_once(question.simulate)
    sights = [_look_in_child(value, question.simulate) for value in question.values]
    if None in sights:
        return 1
    json.dump(sights, sys.stdout)
    return 0


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # skips torch's slow shutdown, because the check waits for the end of this process
