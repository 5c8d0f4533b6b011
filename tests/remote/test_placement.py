"""Worlds on several hosts: where their ranks are, and which of them are tried."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_check.devices.inventory import Slot, WorldSize, slots_for, spread
from mgpu_check.oracles.strategies import placed
from mgpu_check.plugin.requirements import placements
from mgpu_check.processes.channel import CallContext
from mgpu_check.settings import activate, resolve
from mgpu_check.strategies import device_counts, places, world_sizes

HOSTS = st.lists(st.integers(1, 8), min_size=2, max_size=5)


def test_a_mark_on_several_hosts_is_tried_within_one_and_across():
    assert {name: getattr(size, "per_host", None) for name, size in placements([1, 2, 3, 4], [2, 2]).items()} == {
        "ranks=1": None,
        "ranks=2-within": (2, 0),
        "ranks=2-across": (1, 1),
        "ranks=3": None,
        "ranks=4": None,
    }


@given(hosts=HOSTS, data=st.data())
def test_spread_ranks_are_all_there_and_even(hosts: list[int], data: st.DataObject):
    size = data.draw(st.integers(1, sum(hosts)))
    world = spread(size, hosts)
    assert world == size == sum(world.per_host)
    assert all(count <= most for count, most in zip(world.per_host, hosts, strict=True))
    not_full = [count for count, most in zip(world.per_host, hosts, strict=True) if count < most]
    assert max(world.per_host) - min(not_full, default=max(world.per_host)) <= 1


@given(hosts=HOSTS, data=st.data())
def test_what_is_tried_fits_and_crosses_hosts_where_it_can(hosts: list[int], data: st.DataObject):
    size = data.draw(st.integers(1, sum(hosts)))
    slots = [Slot(host, slot) for host, most in enumerate(hosts) for slot in range(most)]
    worlds = placed(size, hosts)
    for world in worlds:
        taken = slots_for(world, slots)
        assert len(set(taken)) == size
        assert [sum(slot.host == host for slot in taken) for host in range(len(hosts))] == list(world.per_host)
    used = [sum(count > 0 for count in world.per_host) for world in worlds]
    assert used.count(1) == sum(most >= size for most in hosts)
    assert size == 1 or max(used) > 1
    assert len({world.per_host for world in worlds}) == len(worlds)


@pytest.fixture
def two_hosts():
    from dataclasses import replace

    found = resolve({"gpus": "5", "simulate": "cpu"}, {}, {})
    activate(replace(found, per_host=(2, 3), host=1))
    yield
    activate(None)


@pytest.mark.usefixtures("two_hosts")
def test_worlds_are_drawn_over_all_hosts_and_devices_from_one():
    worlds = set()
    counts = set()
    seen = set()

    @settings(max_examples=300, database=None)
    @given(size=world_sizes(least=2), count=device_counts(), place=places())
    def draw(size: WorldSize, count: int, place: str) -> None:
        worlds.add(size.per_host)
        counts.add(count)
        seen.add(place)

    draw()
    assert {(2, 0), (0, 2), (1, 1), (0, 3), (2, 1), (2, 2), (2, 3)} <= worlds
    assert counts == {1, 2, 3}
    assert seen == {"cpu", "cuda:0", "cuda:1", "cuda:2"}


def test_a_rank_beyond_keeps_what_its_own_host_set(tmp_path):
    own = CallContext(("/own",), str(tmp_path), {"INTERFACE": "eth1", "GONE": "x", "BOTH": "agent"})
    told = CallContext(("/driver",), "/no/such/directory", {"BOTH": "test", "NEW": "1"}, frozenset({"GONE"}))
    assert told.over(own) == CallContext(
        ("/driver", "/own"), str(tmp_path), {"INTERFACE": "eth1", "BOTH": "test", "NEW": "1"}
    )
