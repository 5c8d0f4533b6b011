"""Ranks meet in a store; and their groups share one thread for connections."""

from __future__ import annotations

from pathlib import Path

import pytest


def groups_and_threads(variable):
    import os

    import torch
    import torch.distributed as dist

    def threads():
        names = [Path(task, "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
        return names.count("gloo_tcp_loop")

    before = threads()
    if variable:
        os.environ[variable] = "lo"
    groups = [dist.new_group([0, 1]) for _ in range(3)]
    groups.append(dist.new_group([1]))
    sums = []
    for group in groups[: 3 + dist.get_rank()]:
        ones = torch.ones(2)
        dist.all_reduce(ones, group=group)
        sums.append(int(ones[0]))
    return sums, before, threads() - before


@pytest.mark.parametrize("variable", ["", "GLOO_SOCKET_IFNAME"])
def test_groups_share_one_thread_for_connections_unless_the_program_names_an_interface(ranks, variable):
    results = ranks.run(groups_and_threads, variable, size=2)
    assert [sums for sums, _, _ in results] == [[2, 2, 2], [2, 2, 2, 1]]
    if not variable:
        assert [(before, more) for _, before, more in results] == [(1, 0), (1, 0)]
    else:
        assert all(more >= 3 for _, _, more in results)
