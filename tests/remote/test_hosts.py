"""Two network namespaces, which are to each other as two hosts are."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import uuid
from collections.abc import Iterator

import pytest

from tests.remote.conftest import Node, Torchrun
from tests.remote.test_torchrun import ORDER

TESTS = (
    ORDER
    + """
def interface(rank):
    with open("/proc/net/dev") as file:
        seen = [line.split(":")[0].strip() for line in file if ":" in line]
    return rank.node_index, os.environ["GLOO_SOCKET_IFNAME"] in seen, total(rank)


def test_ranks_are_on_both(ranks):
    assert ranks.run(interface) == [(0, True, 10.0), (0, True, 10.0), (1, True, 10.0), (1, True, 10.0)]


@pytest.mark.ranks(2)
def test_worlds(rank):
    total(rank)


@pytest.mark.ranks
def test_dies(rank):
    if rank.index == 2:
        os._exit(7)
    total(rank)


@pytest.mark.ranks
def test_after(rank):
    total(rank)
"""
)


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[tuple[Node, Node]]:
    """Two namespaces with a cable between them."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("network namespaces are made by root, with iproute2")
    name = f"mgpu{uuid.uuid4().hex[:6]}"
    spaces, ends = [f"{name}a", f"{name}b"], [f"{name}a0", f"{name}b0"]
    addresses = ["10.213.77.1", "10.213.77.2"]
    made = []
    try:
        try:
            for space in spaces:
                ip("netns", "add", space)
                made.append(space)
            ip("link", "add", ends[0], "netns", spaces[0], "type", "veth", "peer", "name", ends[1], "netns", spaces[1])
            for space, end, address in zip(spaces, ends, addresses, strict=True):
                ip("-n", space, "address", "add", f"{address}/24", "dev", end)
                for device in ("lo", end):
                    ip("-n", space, "link", "set", device, "up")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"this machine allows no network namespaces: {error.stderr.decode().strip()}")
        nodes = [
            # Torchrun finds the host of the rendezvous by the machine's name, and both have the same name.
            Node(address, space, (f"--rdzv-conf=is_host={has}",), {"GLOO_SOCKET_IFNAME": end})
            for space, end, address, has in zip(spaces, ends, addresses, ("true", "false"), strict=True)
        ]
        yield nodes[0], nodes[1]
    finally:
        for space in made:
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)


@pytest.mark.slow
def test_two_hosts(torchrun: Torchrun, hosts: tuple[Node, Node]):
    run = torchrun(TESTS, nodes=hosts).wait()
    assert run.verdicts == {
        "test_ranks_are_on_both": "passed",
        "test_worlds[ranks=2-within]": "passed",
        "test_worlds[ranks=2-across]": "passed",
        "test_dies": "failed",
        "test_after": "passed",
    }, run.output
    assert re.search(r"rank 2 of 4 on \S+ \(node 1\) died: exit code 7", run.texts["test_dies"])
    assert run.codes == [1, 1]
