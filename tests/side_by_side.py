"""Run command lines side by side: ``python tests/side_by_side.py "one && another" "a third"``.

Each argument is a sequence of commands; each runs if those before it have succeeded. Their output is shown in
the order of the arguments: that of the first while it runs, that of the next when the first has ended. The exit code is
1 if any has failed.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from typing import IO

_INTERVAL = 0.2


class Sequence(threading.Thread):
    """Commands that run one after the other, and write to one file."""

    def __init__(self, line: str) -> None:
        super().__init__(daemon=True)
        self.commands = [shlex.split(command) for command in line.split(" && ")]
        self.output: IO[bytes] = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # as long as the process
        self.process: subprocess.Popen[bytes] | None = None
        self.stopped = False
        self.failed: str | None = None

    def run(self) -> None:
        for command in self.commands:
            began = time.monotonic()
            os.write(self.output.fileno(), f"$ {shlex.join(command)}\n".encode())
            try:
                self.process = subprocess.Popen(command, stdout=self.output, stderr=subprocess.STDOUT)
                code = self.process.wait()
            except OSError as error:
                os.write(self.output.fileno(), f"{error}\n".encode())
                code = 127
            seconds = time.monotonic() - began
            if code or self.stopped:
                self.failed = f"{shlex.join(command)}: exit code {code} after {seconds:.0f} s"
                return
            os.write(self.output.fileno(), f"# {command[0]}: {seconds:.0f} s\n".encode())

    def stop(self) -> None:
        self.stopped = True
        if self.process is not None:
            self.process.terminate()

    def show(self) -> None:
        """Show what it writes, until it ends."""
        shown = 0
        while True:
            ended = not self.is_alive()
            while data := os.pread(self.output.fileno(), 65536, shown):
                shown += len(data)
                sys.stdout.buffer.write(data)
                sys.stdout.flush()
            if ended:
                return
            self.join(_INTERVAL)


def main(lines: list[str]) -> int:
    sequences = [Sequence(line) for line in lines]
    for sequence in sequences:
        sequence.start()
    try:
        for sequence in sequences:
            sequence.show()
    except BaseException:
        for sequence in sequences:
            sequence.stop()
        raise
    failed = [sequence.failed for sequence in sequences if sequence.failed]
    for line in failed:
        print(f"FAILED: {line}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
