"""Processes of a script: what each has entered is read, and the one that is waited for is known."""

from __future__ import annotations

import os
import struct
import tempfile

from mgpu_check.compare.process_watch import entered
from mgpu_check.processes import collective_records


def test_what_a_process_has_written_is_read():
    with tempfile.TemporaryFile(buffering=0) as file:
        assert entered(file.fileno()) == (0, 0), "it has not come to torch yet"
        os.ftruncate(file.fileno(), collective_records.SIZE)
        os.pwrite(file.fileno(), collective_records.HEADER.pack(3), 0)
        assert entered(file.fileno()) == (0, 3)
        os.pwrite(file.fileno(), struct.pack("=Q", 7), collective_records.SIZE)
        assert entered(file.fileno()) == (7, 3)


def test_those_with_the_fewest_are_waited_for():
    assert collective_records.fewest({0: 3, 2: 2, 3: 2}) == [2, 3]
    assert collective_records.fewest({0: (8, 3), 1: (8, 2)}) == [1]
    assert collective_records.fewest({0: (7, 9), 1: (8, 2)}) == [0], "of those in C++ first: all are counted, if later"
