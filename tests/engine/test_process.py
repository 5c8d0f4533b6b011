"""Facts about a process, read from outside; its heap; and what it may use of the host, also in a container."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time

import pytest

from mgpu_check.engine.process import Process
from mgpu_check.processes import machine
from mgpu_check.processes.channel import Channel, Clock
from mgpu_check.processes.child_processes import STACKS_SIGNAL

# Writes as faulthandler does, with its signal blocked, and is held up in between.
WRITER = """
import os, signal, sys

number, stacks = map(int, sys.argv[1:])

def write(*_):
    signal.pthread_sigmask(signal.SIG_BLOCK, {number})
    os.write(stacks, b"Current thread 0x")
    sys.stdin.readline()
    os.write(stacks, b'1 (most recent call first):\\n  File "/home/train.py", line 3 in load\\n')
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})

signal.signal(number, write)
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_stacks_are_waited_for_to_their_end_however_long_the_process_is_held_up(monkeypatch):
    here, there = socket.socketpair()
    with there, tempfile.TemporaryFile() as stacks, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        command = [sys.executable, "-c", WRITER, str(int(STACKS_SIGNAL)), str(stacks.fileno())]
        writer = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, pass_fds=[stacks.fileno()]
        )
        assert writer.stdin is not None and writer.stdout is not None
        process = Process(writer.pid, Channel(here), out, err, out, stacks, stacks)
        looks = 0

        def sleep(seconds: float) -> None:
            nonlocal looks
            time.sleep(seconds)
            looks += stacks.seek(0, 2) > 0
            if looks == 5:
                print(file=writer.stdin, flush=True)

        monkeypatch.setattr(Clock, "_sleep", staticmethod(sleep))
        try:
            assert writer.stdout.readline() == "ready\n"
            process.ask_for_stacks(STACKS_SIGNAL)
            assert process.stacks(60).endswith('File "/home/train.py", line 3 in load')
        finally:
            writer.kill()
            writer.communicate()
            process.close()


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 4000 * 1024),
        ({"memory.max": "max", "memory.current": "7"}, 4000 * 1024),
        ({"memory.max": "1048576", "memory.current": "1000000"}, 48576),
        ({"memory.max": "99999999999", "memory.current": "0"}, 4000 * 1024),
    ],
    ids=["no group", "no limit", "limit", "limit above the host"],
)
def test_available_memory_is_that_of_the_host_or_of_the_group(tmp_path, monkeypatch, files, available):
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemAvailable:  4000 kB\n")
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path)
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "meminfo")
    assert machine.available_memory() == available
    monkeypatch.setattr(machine, "_MEMINFO", tmp_path / "absent")
    assert machine.available_memory() is None


# Prints the page faults of six rounds. Each round writes and frees 12 blocks of 16 MiB.
BLOCKS = """
import itertools, resource, sys

from mgpu_check.processes.heap import keep_freed_memory

if sys.argv[1:]:
    keep_freed_memory()
counts = [resource.getrusage(resource.RUSAGE_SELF).ru_minflt]
for _ in range(6):
    blocks = [b"x" * (16 << 20) for _ in range(12)]
    del blocks
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
print(*[after - before for before, after in itertools.pairwise(counts)])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc is told")
def test_freed_memory_is_used_again():
    """In processes of their own: memory that tests left to a rank would be used again by any setting."""
    returned, kept = (
        [int(count) for count in subprocess.check_output([sys.executable, "-c", BLOCKS, *arguments]).split()]
        for arguments in ([], ["keep"])
    )
    assert sum(kept[-3:]) * 10 < sum(returned[-3:]), (returned, kept)
