"""Faults of hardware that travel with each call of a run to its ranks, and those that only ranks show."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mgpu_check import RankFailure, RankHang
from mgpu_check.acceptance.faults import PLANTER, hardware_text, planted_from
from mgpu_check.plugin.serialization import Planting
from mgpu_check.plugin.stash import SESSION

MIB = 1 << 20


@pytest.fixture
def plant(request):
    """Plant faults of hardware in all that is called from now on."""
    session = request.config.stash[SESSION]
    yield lambda *names: setattr(
        session, "fault", Planting(PLANTER, hardware_text([planted_from(name) for name in names]))
    )
    session.fault = None


def wrong_results(rank, repeats=1, numel=64):
    """The collectives whose results are wrong on this rank, and the free memory of its device."""
    size, device = rank.size, rank.device
    single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    scattered = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    wrong = set()

    def compare(name, found, wanted):
        if not torch.equal(found.cpu(), wanted.cpu()):
            wrong.add(name)

    for _ in range(repeats):
        for dtype in (torch.float32, torch.bfloat16):
            mine = torch.arange(numel, dtype=dtype, device=device) % 8 + rank.index
            everywhere = [torch.arange(numel, dtype=dtype) % 8 + other for other in range(size)]
            total = mine.clone()
            dist.all_reduce(total)
            compare(f"all_reduce {dtype}", total, sum(everywhere[1:], everywhere[0]))
        if repeats > 1:
            continue
        gathered = torch.empty(size * numel, dtype=dtype, device=device)
        single(gathered, mine)
        compare("all_gather", gathered, torch.cat(everywhere))
        part = torch.empty(numel, dtype=dtype, device=device)
        scattered(part, mine.repeat(size))
        compare("reduce_scatter", part, sum(everywhere[1:], everywhere[0]))
        sent = mine.clone()
        dist.broadcast(sent, 0)
        compare("broadcast", sent, everywhere[0])
        received = torch.empty(size, dtype=dtype, device=device)
        dist.all_to_all_single(received, mine[:size].clone())
        compare("all_to_all", received, torch.stack([other[rank.index] for other in everywhere]))
        pair = dist.new_group([0, 2])
        if rank.index in (0, 2):
            two = mine.clone()
            dist.all_reduce(two, group=pair)
            compare("pair", two, everywhere[0] + everywhere[2])
    return sorted(wrong), torch.cuda.mem_get_info()[1]


EVERY = ["all_gather", "all_reduce torch.bfloat16", "all_reduce torch.float32", "all_to_all", "broadcast", "pair"]
WRONG = {
    "collective-wrong": {2: [*EVERY, "reduce_scatter"]},
    "all-reduce-dtype": {2: ["all_reduce torch.bfloat16", "pair"]},
    "all-gather-swapped": {2: ["all_gather"]},
    "reduce-scatter-lanes": {2: ["reduce_scatter"]},
    "broadcast-nan:device=1": {1: ["broadcast"]},
    "all-to-all-wrong": {2: ["all_to_all"]},
    "collective-of-three": {2: [*EVERY[:-1], "reduce_scatter"]},
    "collective-of-two:operation=all_reduce": {2: ["pair"]},
    # From 0 to 2 a ring of three has no link, one of two has; what is sent to each rank goes there.
    "copy-zeros": {2: ["all_to_all", "pair"]},
    "copy-by-engine": {},
}


@pytest.mark.gpus(3)
def test_a_fault_of_hardware_shows_in_the_collectives_that_it_is_about(ranks, plant):
    found = {}
    for text in WRONG:
        plant(text)
        results = ranks.run(wrong_results, size=3)
        assert {memory for _, memory in results} == {16 * MIB}
        found[text] = {index: wrong for index, (wrong, _) in enumerate(results) if wrong}
    assert found == WRONG
    plant("all-reduce-rare:every=2")
    assert [wrong for wrong, _ in ranks.run(wrong_results, 2, MIB // 4, size=3)] == [
        [], [], ["all_reduce torch.float32"]
    ]  # fmt: skip
    plant()
    assert all(wrong == [] for wrong, _ in ranks.run(wrong_results, size=3))


@pytest.mark.gpus(3)
def test_counters_and_time_of_hardware_go_on_from_call_to_call(ranks, plant):
    def products(rank):
        a = torch.ones(2, 2, device=rank.device)
        return [bool((a @ a == 2).all()) for _ in range(3)]

    plant("product-rare:every=4,device=0")
    assert ranks.run(products, size=1) == [[True] * 3]
    assert ranks.run(products, size=1) == [[False, True, True]]


@pytest.mark.gpus(3)
def test_a_gpu_that_is_lost_refuses_and_one_that_hangs_never_returns(ranks, plant):
    def use(rank):
        return torch.ones(2, device=rank.device).sum().item()

    plant("lost")
    with pytest.raises(RankFailure, match="CUDA error: unknown error") as failed:
        ranks.run(use, size=2)
    assert failed.value.ranks == (1,)
    plant("hangs")
    with pytest.raises(RankHang):
        ranks.run(use, size=2, timeout=1)
    plant("lost:after=3600")
    assert ranks.run(use, size=2) == [2.0, 2.0]


def seconds_of_pairs(rank):
    """The seconds of broadcasts from the first rank of each pair, small and large."""
    from mgpu_check.acceptance.collectives.checks import time_collectives
    from mgpu_check.oracles.collectives.repeated_calls import RepeatedCollective

    pairs = ((0, 1), (0, 2), (1, 2))
    cases = [RepeatedCollective("broadcast", "int8", size, pair) for size in (64, MIB) for pair in pairs]
    return [times[0] if times else 0 for times in time_collectives(rank, cases, 1)]


@pytest.mark.gpus(3)
def test_a_slow_part_makes_the_collectives_slow_that_use_it(ranks, plant):
    def found(name):
        plant(name)
        return [max(times) for times in zip(*ranks.run(seconds_of_pairs, size=3), strict=True)]

    healthy = found("lost:after=3600")
    for name, ratios in (
        ("slow-collective:operation=any", [2, 1, 2] * 2),  # those with GPU 1
        ("slow-small-collectives", [2, 1, 2, 1, 1, 1]),
        ("slow-link:device=0,peer=2,factor=3", [1, 1, 1, 1, 1.7, 1]),  # some time is that of the launch
        ("slow-link:device=2,peer=0", [1] * 6),  # the other direction
    ):
        assert found(name) == pytest.approx([a * b for a, b in zip(healthy, ratios, strict=True)], rel=0.1), name


def gradients_of_ddp(rank, hook=False):
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 2).to(rank.device)
    with torch.no_grad():
        model.weight += rank.index  # the parameters of rank 0 are sent to the others
    wrapped = torch.nn.parallel.DistributedDataParallel(model, device_ids=[rank.device])
    if hook:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

        wrapped.register_comm_hook(None, allreduce_hook)
    wrapped(torch.arange(12.0, device=rank.device).reshape(2, 6) + rank.index).sum().backward()
    return [*model.parameters(), *(p.grad for p in model.parameters())]


@pytest.mark.gpus(3)
def test_data_parallel_training_goes_over_links_too(ranks, plant, request):
    request.config.stash[SESSION].fault = None
    without = ranks.run(gradients_of_ddp, size=3)
    plant()
    for hook in (False, True):
        for mine, wanted in zip(ranks.run(gradients_of_ddp, hook, size=3), without, strict=True):
            for one, other in zip(mine, wanted, strict=True):
                torch.testing.assert_close(one, other)
    plant("copy-zeros:device=0,peer=1")
    wrong = ranks.run(gradients_of_ddp, size=3)
    assert torch.equal(wrong[0][0], without[0][0])
    assert not wrong[1][0].any(), "the first parameters come from rank 0"
    assert not torch.equal(wrong[1][2], wrong[0][2])
