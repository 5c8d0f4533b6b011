"""The gate for steps: what each relation, each kind of input and each argument is there for, proven by a mistake that needs it."""

from __future__ import annotations

import torch

GPUS = ("--gpus=4", "--simulate", "--rank-timeout=60")

COMMON = """
import os
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import strategies as st
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel as DDP

from mgpu_check import RankDied, RankFailure, RankHang, ScalingMismatch, assert_metric_scales, assert_step_scales

def build():
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

def batch(n):
    return torch.randn(n, 6), torch.randint(0, 3, (n,))

def mine(batch, rank):
    x, y = batch
    return x[rank.index :: rank.size].to(rank.device), y[rank.index :: rank.size].to(rank.device)

def summed(model, batch, rank):
    # Right for every number of samples.
    x, y = mine(batch, rank)
    return F.cross_entropy(model(x), y, reduction="sum") * rank.size / len(batch[0])

def right(model, batch, rank):
    net = DDP(model.to(rank.device))  # kept: without it, nothing synchronizes
    summed(net, batch, rank).backward()

def tutorial(model, batch, rank):
    # Right where the world size divides the number of samples.
    x, y = mine(batch, rank)
    net = DDP(model.to(rank.device))
    F.cross_entropy(net(x), y).backward()

class Training:
    def __init__(self, model, rank):
        self.net = DDP(model.to(rank.device))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)

    def __call__(self, model, batch, rank):
        self.optimizer.zero_grad()
        loss = summed(self.net, batch, rank)
        loss.backward()
        nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        self.optimizer.step()
        self.scheduler.step()
        total = loss.detach() / rank.size
        dist.all_reduce(total)
        return {"loss": total}

# One case of each kind, and not the default of 24 in all: more of them take longer, and show no more here.
FEW = {"build": build, "batch": batch, "max_examples": 8}

def passes(ranks, step, gate=assert_step_scales, **options):
    gate(ranks, step, **{**FEW, **options})

def refuted(ranks, step, *mistakes, match="", gate=assert_step_scales, **options):
    with pytest.raises(ScalingMismatch, match=match or None) as caught:
        gate(ranks, step, **{**FEW, **options})
    assert caught.value.mistakes[: len(mistakes)] == mistakes, str(caught.value)
    return str(caught.value)
"""


def passed(run, pytester, body: str, count: int, *options: str) -> None:
    pytester.makepyfile(test_it=COMMON + body)
    run(*GPUS, *options).assert_outcomes(passed=count)


def test_right_steps_pass(run, pytester):
    passed(
        run,
        pytester,
        """
def test_ddp(ranks):
    assert_step_scales(ranks, right, build=build, batch=batch)

def test_what_outlives_a_step(ranks):
    assert_step_scales(ranks, Training, build=build, batch=batch, max_examples=12)

def test_drawn_batches(ranks):
    @st.composite
    def drawn(draw):
        n, seed = draw(st.integers(1, 9)), draw(st.integers(0, 9))
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(n, 6, generator=generator), torch.randint(0, 3, (n,), generator=generator)
    assert_step_scales(ranks, right, build=build, batch=drawn(), max_examples=10)

def test_one_process_for_all_devices(ranks):
    def step(model, batch, rank):
        x, y = batch
        net = DataParallel(model.to(rank.device), device_ids=list(range(rank.size)))
        F.cross_entropy(net(x.to(rank.device)), y.to(rank.device)).backward()
    assert_step_scales(ranks, step, build=build, batch=batch, single_process=True, max_examples=10)

def test_a_reference_that_goes_shard_by_shard(ranks):
    def normalized():
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    def reference(model, batch, world_size):
        for rank in range(world_size):
            x, y = batch[0][rank::world_size], batch[1][rank::world_size]
            (F.cross_entropy(model(x), y) / world_size).backward()
    options = dict(batch=batch, sizes=[8, 16], observe=("grads",), max_examples=6)
    assert_step_scales(ranks, tutorial, build=normalized, reference=reference, **options)
    refuted(ranks, tutorial, "batch-statistics-per-rank", build=normalized, **options)

def test_code_that_cannot_be_alone_has_a_reference(ranks):
    def step(model, batch, rank):
        if rank.size == 1:
            os._exit(1)
        right(model, batch, rank)
    def reference(model, batch):
        F.cross_entropy(model(batch[0]), batch[1]).backward()
    assert_step_scales(ranks, step, build=build, batch=batch, reference=reference, max_examples=8)
    with pytest.raises(ValueError, match="fails on one device"):
        assert_step_scales(ranks, step, build=build, batch=batch, max_examples=4)

def test_shards_of_parameters_are_judged_by_what_is_returned(ranks):
    def step(model, batch, rank):
        width = model[0].weight.shape[0] // rank.size
        model[0].weight = nn.Parameter(model[0].weight[rank.index * width :][:width].detach().to(rank.device))
        part = batch[0].to(rank.device) @ model[0].weight.t()
        parts = [torch.empty_like(part) for _ in range(rank.size)]
        dist.all_gather(parts, part.detach())
        return {"hidden": torch.cat(parts, dim=1)}
    assert_step_scales(ranks, step, build=build, batch=batch, max_examples=8)
""",
        7,
    )


def test_each_relation_is_a_column_of_the_report(run, pytester):
    passed(
        run,
        pytester,
        """
def test_one_device(ranks):
    def step(model, batch, rank):
        net = DDP(model.to(rank.device))
        (summed(net, batch, rank) / rank.size).backward()
    text = refuted(ranks, step, "world-size-factor", match="first gradient of 0.weight")
    assert "same at 2 and 4" in text and "1/2 of what one device gives" in text, text
    line = next(line for line in text.splitlines() if line.strip().startswith("gradient of 0.weight"))
    assert line.split()[3:8] == ["NO", "yes", "yes", "yes", "NO"], line  # one device, agree, finite, repeats, same

def test_ranks_agree(ranks):
    def step(model, batch, rank):
        right(model, batch, rank)
        return {"value": float(rank.index)}
    text = refuted(ranks, step, match="first returned value")
    line = next(line for line in text.splitlines() if line.strip().startswith("returned value"))
    assert line.split()[2:4] == ["NO", "NO"] and "rank 1" in line, line

def test_finite(ranks):
    def step(model, batch, rank):
        return {"mean": batch[0][rank.size - 1 : 1].mean()}
    text = refuted(ranks, step)
    line = next(line for line in text.splitlines() if line.strip().startswith("returned mean"))
    assert line.split()[2:5] == ["NO", "yes", "NO"], line

def test_repeats(ranks):
    def step(model, batch, rank):
        noise = torch.tensor(int.from_bytes(os.urandom(4), "little"))
        dist.broadcast(noise, 0)
        return {"noise": noise if rank.size > 1 else 0}
    line = next(line for line in refuted(ranks, step).splitlines() if line.strip().startswith("returned noise"))
    assert line.split()[2:6] == ["NO", "yes", "-", "NO"], line

def test_terminates_raised(ranks):
    def step(model, batch, rank):
        right(model, batch, rank)
        if rank.size > 1 and len(batch[0]) > 3:
            raise IndexError("no such shard")
    text = refuted(ranks, step, match="raised IndexError: no such shard")
    assert "terminates: NO" in text and "samples 4" in text, text

def test_terminates_died(ranks):
    def step(model, batch, rank):
        right(model, batch, rank)
        if rank.index == 1:
            os._exit(3)
    refuted(ranks, step, match="rank 1 of 2 died")

def test_terminates_refused(ranks):
    def step(model, batch, rank):
        torch.cuda.set_device(0)  # as by a script that sets no device
        F.cross_entropy(DDP(model.cuda())(batch[0].cuda()), batch[1].cuda()).backward()
    text = refuted(ranks, step, match="ranks 0-1 of 2 raised DistBackendError: NCCL error: invalid usage")
    assert "smallest case: world size 2" in text and "verify_param_shape_across_processes #1" in text, text

def test_any_order(ranks):
    line = next(line for line in refuted(ranks, tutorial).splitlines() if line.strip().startswith("gradient of 0.bias"))
    assert line.split()[8] == "NO", line  # one device, agree, finite, repeats, same at 2 and 4, any order
""",
        8,
    )


def test_hangs_are_reported_with_their_case_and_not_shrunk(run, pytester):
    pytester.makepyfile(
        test_it=COMMON
        + """
def test_early_stop(ranks):
    def step(model, batch, rank):
        net = DDP(model.to(rank.device))
        for attempt in range(3):
            loss = summed(net, batch, rank)
            if attempt and rank.index:
                break
            loss.backward()
    with pytest.raises(RankHang) as caught:
        assert_step_scales(ranks, step, build=build, batch=batch)
    assert caught.value.mistakes == ("decision-per-rank",)
    text = str(caught.value)
    assert text.startswith("step does not scale: rank 0 of 2 did not finish step"), text
    assert "smallest case: world size 2, samples 2," in text and "terminates: NO" in text, text
"""
    )
    run("--gpus=4", "--simulate", "--rank-timeout=4").assert_outcomes(passed=1)


def test_inputs_that_provoke(run, pytester):
    passed(
        run,
        pytester,
        """
def test_sizes_that_do_not_divide(ranks):
    text = refuted(ranks, tutorial, "mean-of-means", match="world size 2, samples 3, steps 1")
    assert "every 2nd sample: 2, 1" in text, text
    passes(ranks, tutorial, sizes="divisible")

def test_sizes_below_the_world_size(ranks):
    def step(model, batch, rank):
        x, y = mine(batch, rank)
        net = DDP(model.to(rank.device))
        loss = F.cross_entropy(net(x), y, reduction="sum") if len(x) else net(batch[0][:1].to(rank.device)).sum()
        (loss * rank.size / len(batch[0])).backward()
    refuted(ranks, step, match="world size 2, samples 1,")
    assert_step_scales(ranks, step, build=build, batch=batch, sizes=st.integers(4, 9), world_sizes=[2], max_examples=10)

def test_scaled_batches_reach_a_limit_on_the_norm(ranks):
    def step(model, batch, rank, late=False):
        model.to(rank.device)
        loss = (model(batch[0][rank.index :: rank.size].to(rank.device)) ** 2).sum() * rank.size / len(batch[0])
        loss.backward()
        for late_ in (False, True):
            if late_ == late:
                nn.utils.clip_grad_norm_(model.parameters(), 50.0)
            if not late_:
                for parameter in model.parameters():
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= rank.size
    linear = lambda: nn.Linear(6, 1)
    refuted(ranks, step, "clipped-before-synchronization", match="scaled by 1024", build=linear)
    passes(ranks, lambda *args: step(*args, late=True), build=linear)

def test_scaled_batches_near_the_limit_of_float16(ranks):
    def step(model, batch, rank, late=False):
        model.to(rank.device)
        loss = model(batch[0][rank.index :: rank.size].to(rank.device)).sum() * rank.size / len(batch[0])
        loss.backward()
        for parameter in model.parameters():
            half = (parameter.grad / (1 if late else rank.size)).half()
            dist.all_reduce(half)
            parameter.grad = half.float() / (rank.size if late else 1)
    linear = lambda: nn.Linear(6, 1)
    positive = lambda n: (torch.rand(n, 6) + 0.5,)
    refuted(ranks, lambda *args: step(*args, late=True), "low-precision-overflow", build=linear, batch=positive, match="scaled")
    passes(ranks, step, build=linear, batch=positive)

def test_several_steps(ranks):
    class Forgetful(Training):
        def __call__(self, model, batch, rank):
            if rank.size == 1:
                self.optimizer.zero_grad()
            summed(self.net, batch, rank).backward()
            self.optimizer.step()
    text = refuted(ranks, Forgetful, "stale-gradients", match="in optimizer step 2 on rank 0")
    assert "steps 2" in text, text

def tokens(n):
    x = torch.randint(0, 11, (n, 6))
    y = torch.randint(0, 11, (n, 6))
    y[:, 4:] = -100
    return x, y

def embedding():
    return nn.Sequential(nn.Embedding(11, 8), nn.Linear(8, 11))

def of_tokens(model, batch, rank, counted):
    x, y = mine(batch, rank)
    net = DDP(model.to(rank.device))
    loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten(), ignore_index=-100, reduction="sum")
    count = (y != -100).sum()
    if counted:
        dist.all_reduce(count)
        loss = loss * rank.size
    (loss / count).backward()

def test_uneven_padding(ranks):
    options = dict(build=embedding, batch=tokens, sizes="divisible")
    refuted(ranks, lambda *args: of_tokens(*args, False), "mean-of-means", match="batch ragged", **options)
    passes(ranks, lambda *args: of_tokens(*args, True), **options)

def test_sorted_batches(ranks):
    def step(model, batch, rank, split=True):
        # The largest value of the first rank's shard stands for that of all.
        x = batch[0][rank.index :: rank.size].to(rank.device)
        top = (batch[0] if not split else x)[:, 0].max() if len(x) else batch[0][0, 0]
        top = top.to(rank.device).clone()
        dist.broadcast(top, 0)
        return {"top": top}
    refuted(ranks, step, match="returned top")
    passes(ranks, lambda *args: step(*args, split=False))
""",
        7,
    )


def test_metrics(run, pytester):
    passed(
        run,
        pytester,
        """
def hits(model, batch, rank):
    x, y = mine(batch, rank)
    return (model.to(rank.device)(x).argmax(1) == y).float()

def accuracy(model, batch, rank):
    found = hits(model, batch, rank).sum()
    dist.all_reduce(found)
    return {"accuracy": found / len(batch[0])}

def test_right(ranks):
    passes(ranks, accuracy, gate=assert_metric_scales)

def test_mean_of_means(ranks):
    def metric(model, batch, rank):
        found = hits(model, batch, rank).mean()
        dist.all_reduce(found)
        return {"accuracy": found / rank.size}
    refuted(ranks, metric, "mean-of-means", gate=assert_metric_scales)

def test_each_rank_its_own(ranks):
    def metric(model, batch, rank):
        return {"accuracy": hits(model, batch, rank).mean()}
    refuted(ranks, metric, "value-of-one-rank", gate=assert_metric_scales)

def test_nothing_returned(ranks):
    with pytest.raises(ValueError, match="leaves nothing of returned to be compared"):
        assert_metric_scales(ranks, lambda model, batch, rank: None, build=build, batch=batch)
""",
        4,
    )


def test_what_has_another_reason_is_not_named(run, pytester):
    passed(
        run,
        pytester,
        """
def test_a_loss_that_is_combined_after_backward_cuts_nothing(ranks):
    def step(model, batch, rank):
        x, y = mine(batch, rank)
        net = DDP(model.to(rank.device))
        loss = F.cross_entropy(net(x), y)
        loss.backward()
        dist.all_reduce(loss)
        return loss / rank.size
    with pytest.raises(ScalingMismatch) as caught:
        assert_step_scales(ranks, step, build=build, batch=batch)
    assert caught.value.mistakes == ("mean-of-means",), str(caught.value)

def test_four_micro_batches_are_no_square_of_two_ranks(ranks):
    def step(model, batch, rank):
        net = DDP(model.to(rank.device))
        for x, y in zip(*(whole.split(1) for whole in mine(batch, rank))):
            F.cross_entropy(net(x), y).backward()
    def reference(model, batch):
        F.cross_entropy(model(batch[0]), batch[1]).backward()
    refuted(ranks, step, "accumulation-factor", reference=reference, sizes=[8], world_sizes=[2], max_examples=2)

def test_ranks_that_agree_by_chance_are_no_group(ranks):
    def metric(model, batch, rank):
        return {"positive": (mine(batch, rank)[0][:, 2].max() > 0).float()}
    with pytest.raises(ScalingMismatch) as caught:
        assert_metric_scales(ranks, metric, build=build, batch=batch, sizes=[4], world_sizes=[4])
    assert "seed 0" in str(caught.value)  # for which ranks 0 and 2 are alike, and ranks 1 and 3; see the other seeds
    assert "wrong-process-group" not in caught.value.mistakes, str(caught.value)
""",
        3,
    )


def test_arguments(run, pytester):
    passed(
        run,
        pytester,
        """
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"observe": ("gradients",)}, r"observe=\\('gradients',\\); choose some of grads, params"),
        ({"observe": "grads"}, "choose some of"),
        ({"tolerance": 2}, "tolerance=2; give a fraction"),
        ({"tolerance": {"0.weight": -1}}, "give a fraction"),
        ({"max_examples": 0}, "max_examples=0; give an integer"),
        ({"sizes": "even"}, 'sizes=.even. is no batch size; .*"divisible"'),
        ({"sizes": [0]}, "not all positive integers"),
        ({"sizes": 2.5}, "sizes=2.5 is no batch size"),
        ({"world_sizes": [5]}, "world_sizes has 5; give ints from 1 to 4"),
        ({"batch": st.just(batch(4)), "sizes": 4}, "sizes and a strategy of batches are both given"),
        ({"build": lambda: 3}, r"build\\(\\) returned int; return an nn.Module"),
        ({"batch": lambda n: torch.tensor(list(os.urandom(n * 6)), dtype=torch.float32).view(n, 6)}, "gives other batches"),
        ({"sizes": [3], "world_sizes": [2], "max_examples": 1}, "no case could be drawn|fails on one device|mismatch"),
    ],
)
def test_wrong(ranks, options, message):
    def step(model, batch, rank):
        return {"sum": batch[0].sum()}
    if "max_examples" in options and options.get("sizes") == [3]:
        assert_step_scales(ranks, step, build=build, batch=batch, **options)
        return
    with pytest.raises(ValueError, match=message):
        assert_step_scales(ranks, step, **{"build": build, "batch": batch, **options})

def test_a_step_that_fails_on_one_device(ranks):
    def step(model, batch, rank):
        raise KeyError("labels")
    with pytest.raises(ValueError, match="step fails on one device: .*KeyError: 'labels'; and so for every"):
        assert_step_scales(ranks, step, build=build, batch=batch)

def test_a_granted_tolerance(ranks):
    def step(model, batch, rank):
        right(model, batch, rank)
        for parameter in model.parameters():
            parameter.grad *= 1 + 1e-3 * (rank.size - 1)
    refuted(ranks, step)
    assert_step_scales(ranks, step, build=build, batch=batch, tolerance=1e-2, max_examples=6)
    refuted(ranks, step, tolerance={"gradient of 0.weight": 1e-2}, match="first gradient of 0.bias")

def test_what_is_observed(ranks):
    def step(model, batch, rank):
        right(model, batch, rank)
        return {"rank": rank.index}
    refuted(ranks, step, match="returned rank")
    assert_step_scales(ranks, step, build=build, batch=batch, observe=("grads", "params"), max_examples=6)

@pytest.mark.parametrize("sizes", [6, [4, 8], st.sampled_from([4, 12]), lambda world: st.just(3 * world), range(2, 12, 2)])
def test_sizes(ranks, sizes):
    assert_step_scales(ranks, tutorial, build=build, batch=batch, sizes=sizes, world_sizes=[2], max_examples=6)
""",
        21,
    )


def test_what_is_no_reference(run, pytester):
    passed(
        run,
        pytester,
        """
def test_not_a_number_on_one_device(ranks):
    def step(model, batch, rank):
        return {"mean": batch[0][:0].mean()}
    with pytest.raises(ValueError, match="not a number on one device .returned mean, .*and so for every batch"):
        assert_step_scales(ranks, step, build=build, batch=batch)

def test_random_numbers_that_do_not_repeat(ranks):
    def step(model, batch, rank):
        torch.rand(int.from_bytes(os.urandom(1), "little") if rank.size > 1 else 1)
        return {"sum": batch[0].sum()}
    text = refuted(ranks, step)
    line = next(line for line in text.splitlines() if line.strip().startswith("state of the random numbers"))
    assert line.split()[5:] == ["-", "-", "-", "NO"] or "NO" in line.split(), line

def rounded_at_random(by):
    # As sums by atomic additions on a GPU are: never the same bits twice.
    def step(model, batch, rank):
        right(model, batch, rank)
        with torch.no_grad():
            for p in model.parameters():
                noise = torch.tensor(list(os.urandom(p.numel()))).view_as(p) / 128 - 1
                dist.broadcast(noise, 0)
                p.grad *= 1 + by * noise.to(p.device)
    return step

def test_sums_in_no_fixed_order_are_right(ranks):
    assert_step_scales(ranks, rounded_at_random(2 * 2.0**-24), build=build, batch=batch, max_examples=8)

def test_more_than_rounding_is_not(ranks):
    step = rounded_at_random(0.01)
    text = refuted(ranks, lambda m, b, r: (step if r.size > 1 else right)(m, b, r))
    assert any(x.strip().startswith("gradient of") and "NO" in x for x in text.splitlines()), text
""",
        4,
    )


def test_what_rounding_decides_need_not_repeat():
    from mgpu_check.gates.relations import REPEATS, repeats
    from mgpu_check.mistakes.observed import Expected, Observation, Relations

    one, other = (Observation(values={"n": n, "m": n}, digests={"n": str(n), "m": str(n)}) for n in torch.arange(2))
    relations = Relations(held={"n": {}, "m": {}})
    repeats(relations, Expected(one, None, undetermined={"n"}), [one], [other], None)
    assert relations.held == {"n": {}, "m": {REPEATS: False}}
