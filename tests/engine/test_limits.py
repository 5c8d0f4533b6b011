"""What this process may use of the host, also in a container."""

from __future__ import annotations

import pytest

from mgpu_check.processes import machine


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
