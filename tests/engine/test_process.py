"""Facts about a process, read from outside."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import time

from mgpu_check.engine.process import Process
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
