"""Ranks meet in a store; and their groups share one thread for connections."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def groups_and_threads(variable):
    import os

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


@pytest.mark.skipif(torch.__version__ < "2.13", reason="gloo names its threads from torch 2.13 on")
@pytest.mark.parametrize("variable", ["", "GLOO_SOCKET_IFNAME"])
def test_groups_share_one_thread_for_connections_unless_the_program_names_an_interface(ranks, variable):
    results = ranks.run(groups_and_threads, variable, size=2)
    assert [sums for sums, _, _ in results] == [[2, 2, 2], [2, 2, 2, 1]]
    if not variable:
        assert [(before, more) for _, before, more in results] == [(1, 0), (1, 0)]
    else:
        assert all(more >= 3 for _, _, more in results)


def sums_of_forked():
    """Make a group in each of two processes that this rank has forked."""
    import os
    import tempfile

    import torch.distributed as dist

    def in_child(name, index, sent):
        dist.destroy_process_group()
        dist.init_process_group("gloo", init_method=f"file://{name}", rank=index, world_size=2)
        ones = torch.ones(2)
        dist.all_reduce(ones)
        os.write(sent, b"%d" % int(ones[0]))

    read, sent = os.pipe()
    with tempfile.TemporaryDirectory() as directory:
        children = []
        for index in range(2):
            if not (pid := os.fork()):
                try:
                    in_child(f"{directory}/store", index, sent)
                finally:
                    os._exit(0)
            children.append(pid)
        for pid in children:
            os.waitpid(pid, 0)
    os.close(sent)
    with open(read, "rb") as file:
        return file.read()


def test_processes_that_a_rank_forks_have_a_thread_of_their_own(ranks):
    assert ranks.run(sums_of_forked, size=1) == [b"22"]
