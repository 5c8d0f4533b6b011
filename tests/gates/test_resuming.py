"""The gate for checkpoints: each thing that is forgotten is named, and code that forgets nothing passes."""

from __future__ import annotations

GPUS = ("--gpus=2", "--simulate", "--rank-timeout=60")

CODE = """
import random
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from mgpu_check import assert_resume_continues
from mgpu_check.errors import RankFailure, RankHang, ScalingMismatch

def rng(rank):
    return {"cpu": torch.get_rng_state(), "device": torch.cuda.get_rng_state(rank.device), "python": random.getstate()}

def set_rng(state, rank):
    torch.set_rng_state(state["cpu"])
    torch.cuda.set_rng_state(state["device"], rank.device)
    random.setstate(state["python"])

def training(*forgotten, dropout=0.0, momentum=0.9, per_rank_rng=True, loads=lambda rank: True, returned=(), wrap_first=False,
             wait=False):
    def train(rank, directory, start, stop):
        torch.manual_seed(7) if "init" in forgotten else None
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(dropout), nn.BatchNorm1d(4), nn.Linear(4, 1)).to(rank.device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        parallel = DistributedDataParallel(model) if wrap_first else None
        if start and loads(rank):
            saved = torch.load(directory / f"{rank.index if per_rank_rng else 0}.pt", map_location="cpu", weights_only=False)
            for name, part in (("model", model), ("optimizer", optimizer), ("scheduler", scheduler)):
                if name not in forgotten:
                    part.load_state_dict(saved[name])
            if "rng" not in forgotten:
                set_rng(saved["rng"], rank)
        if not start:
            torch.manual_seed(100 + rank.index)  # dropout differs between ranks
            torch.cuda.manual_seed(100 + rank.index)
        parallel = parallel or DistributedDataParallel(model)
        data = torch.randn(64, 3, generator=torch.Generator().manual_seed(1))
        for step in range(start, stop):
            position = step if "position" not in forgotten else step - start
            batch = data[position * 8:(position + 1) * 8][rank.index::rank.size].to(rank.device)
            optimizer.zero_grad()
            parallel(batch).square().mean().backward()
            optimizer.step()
            scheduler.step()
        parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "rng": rng(rank)}
        saved = {name: part if name == "rng" else part.state_dict() for name, part in parts.items()}
        torch.save(saved, directory / f"{rank.index}.pt")
        return {name: part for name, part in parts.items() if name in (returned or ("model", "optimizer", "scheduler"))}
    return train

def refuted(ranks, train, *mistakes, match, **options):
    with pytest.raises(ScalingMismatch, match=match) as caught:
        assert_resume_continues(ranks, train, **options)
    assert caught.value.mistakes == mistakes, str(caught.value)
    return str(caught.value)

def test_all_restored(ranks):
    assert_resume_continues(ranks, training(dropout=0.5))
    assert_resume_continues(ranks, training(), world_sizes=[1], steps=2)

def test_nothing_else_draws(ranks):
    assert_resume_continues(ranks, training("rng"))  # no random number matters

def test_momentum(ranks):
    text = refuted(ranks, training("optimizer"), "state-not-restored", match=r"resumed at step 3 .* after step 6, model.0.weight")
    assert "right after loading, on no rank as saved: optimizer.state.0.momentum_buffer" in text
    assert "smallest case: world size 2, steps 3 + 3" in text

def test_schedule(ranks):
    text = refuted(ranks, training("scheduler"), "state-not-restored", match="does not continue")
    assert "scheduler.last_epoch" in text and "got 3, expected 6" in text

def test_model(ranks):
    text = refuted(ranks, training("model"), "state-not-restored", match="model.0.weight on ranks 0-1: element")
    assert "on no rank as saved: model.0.weight" in text

def test_random_numbers(ranks):
    text = refuted(ranks, training("rng", dropout=0.5), "state-not-restored", match="does not continue")
    assert "right after loading, on no rank as saved: random numbers of torch" in text

def test_random_numbers_that_are_returned_are_held(ranks):
    assert_resume_continues(ranks, training(dropout=0.5, returned=["model", "rng"]))

def test_random_numbers_of_rank_0_on_all(ranks):
    text = refuted(ranks, training(dropout=0.5, per_rank_rng=False), "state-not-restored", match="does not continue")
    assert "on rank 1: what rank 0 had; each rank must save and load its own" in text

def drawn_anew(generator):
    def train(rank, directory, start, stop):
        data = torch.randn(8, generator=generator())  # as a data set that is made, or split, when a run starts
        total = torch.load(directory / f"{rank.index}.pt") if start else torch.zeros(())
        for step in range(start, stop):
            total = total + data[step]
        torch.save(total, directory / f"{rank.index}.pt")
        return {"total": total}
    return train

def test_what_is_drawn_anew(ranks):
    assert_resume_continues(ranks, drawn_anew(lambda: torch.Generator().manual_seed(5)))
    refuted(ranks, drawn_anew(lambda: None), "state-not-restored", match="total on ranks 0-1")

def test_what_is_not_returned(ranks):
    text = refuted(ranks, training("optimizer", returned=["model"]), "state-not-restored", match="model.0.weight")
    assert "what train does not return (the optimizer" in text

def test_position_in_the_data(ranks):
    text = refuted(ranks, training("position"), "state-not-restored", match="model.0.weight")
    assert "the position in the data" in text

def test_loaded_on_rank_0(ranks):
    # DistributedDataParallel hands the parameters of rank 0 to the others, but not its optimizer.
    text = refuted(ranks, training(loads=lambda rank: rank.index == 0), "restored-on-one-rank", match="does not continue")
    assert "optimizer.state.0.momentum_buffer" in text and "on rank 1" in text
    text = refuted(
        ranks, training(loads=lambda rank: rank.index == 0, wrap_first=True), "restored-on-one-rank", match="model.0.weight"
    )
    assert "model.0.weight" in text.partition("seen: ")[2]

def test_where_a_call_of_no_steps_fails(ranks):
    inner = training("optimizer")
    def train(rank, directory, start, stop):
        assert stop > start, "no steps"
        return inner(rank, directory, start, stop)
    text = refuted(ranks, train, "state-not-restored", match="does not continue")
    assert "could not be seen: train(rank, directory, 3, 3): " in text and "no steps" in text
    assert "at the end differ model.0.weight" in text
    inner = training(loads=lambda rank: rank.index == 0, wrap_first=True)
    text = refuted(ranks, train, "restored-on-one-rank", "state-not-restored", match="does not continue")

def noisy(size, clock=False):
    def train(rank, directory, start, stop):
        state = torch.load(directory / "it.pt") if start else {"x": torch.ones(8, dtype=torch.float64), "steps": 0}
        dist.barrier()  # nobody saves before all have loaded
        for step in range(start, stop):
            # As kernels that add atomically: another order, another rounding. The generator is none that could be seeded.
            state["x"] += 1 + 1e-9 * (torch.rand(8, dtype=torch.float64, generator=torch.Generator().manual_seed(time.time_ns())) - 0.5)
            state["steps"] += 1
        if start and size:
            state["x"] += size
        if rank.index == 0:
            torch.save(state, directory / "it.pt")
        return {**state, "time": time.time_ns()} if clock else state
    return train

def test_what_cannot_be_repeated_to_the_bit(ranks):
    assert_resume_continues(ranks, noisy(0.0))
    text = refuted(ranks, noisy(1e-6), "state-not-restored", match=r"x on ranks 0-1: element .* ±")
    assert_resume_continues(ranks, noisy(1e-6), tolerance=1e-6)
    text = refuted(ranks, noisy(1e-4), "state-not-restored", match="x on", tolerance=1e-6)
    with pytest.raises(ValueError, match="differ by more than rounding in time on ranks 0-1: time: got .*as a time of day"):
        assert_resume_continues(ranks, noisy(0.0, clock=True))

COUNTER = []

def test_globals_of_the_test_carry_nothing(ranks):
    def train(rank, directory, start, stop):
        COUNTER.extend(range(start, stop))
        return {"count": len(COUNTER)}
    refuted(ranks, train, "state-not-restored", match="count on ranks 0-1: got 3, expected 6")

def test_errors_of_ranks_say_where(ranks):
    def train(rank, directory, start, stop):
        if start:
            raise KeyError("optimizer")
        return {"stop": stop}
    with pytest.raises(RankFailure, match="KeyError") as caught:
        assert_resume_continues(ranks, train)
    assert caught.value.__notes__ == ["while checking steps 3 to 6 at world size 2"]

def test_misuse(ranks):
    wrong = [-1.0, 1.0, 5, float("inf"), float("nan"), "a", True, [0.1], {"x": 0.1}]
    for options, match in [
        ({"steps": 0}, "steps=0"),
        ({"steps": True}, "steps=True"),
        ({"world_sizes": [0]}, "has 0"),
        *(({"tolerance": value}, "tolerance=.*; give a fraction of the largest magnitude, from 0 to below 1") for value in wrong),
    ]:
        with pytest.raises(ValueError, match=match):
            assert_resume_continues(ranks, training(), **options)
    for train, match in [
        (lambda rank, directory, start, stop: None, "returned a NoneType; return a mapping"),
        (lambda rank, directory, start, stop: {}, "empty mapping"),
        (lambda rank, directory, start, stop: {"same": 1}, "the same state after steps 0 to 6 as after steps 0 to 3"),
    ]:
        with pytest.raises(ValueError, match=match):
            assert_resume_continues(ranks, train)
"""


def test_resuming(run, pytester):
    pytester.makepyfile(test_it=CODE)
    run(*GPUS).assert_outcomes(passed=17)


def test_rounding(run, pytester):
    pytester.makepyfile(
        test_it=CODE.partition("def test_all_restored")[0]
        + """
def adam(*forgotten):
    def train(rank, directory, start, stop):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20)
        # In its second step it reduces in other buckets, and so adds up in another order, than in its first.
        parallel = DistributedDataParallel(model)
        parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
        torch.manual_seed(rank.index)
        if start:
            saved = torch.load(directory / "it.pt")
            for name, part in parts.items():
                if name not in forgotten:
                    part.load_state_dict(saved[name])
            torch.set_rng_state(torch.load(directory / f"{rank.index}.pt"))
        for step in range(start, stop):
            x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step * 10 + rank.index))
            optimizer.zero_grad()
            parallel(x).square().mean().backward()
            optimizer.step()
            schedule.step()
        if rank.index == 0:
            torch.save({name: part.state_dict() for name, part in parts.items()}, directory / "it.pt")
        torch.save(torch.get_rng_state(), directory / f"{rank.index}.pt")
        return parts
    return train

def test_another_order_of_sums(ranks):
    assert_resume_continues(ranks, adam(), steps=7, world_sizes=[4])
    with pytest.raises(ScalingMismatch, match="does not continue"):
        assert_resume_continues(ranks, adam(), steps=7, world_sizes=[4], tolerance=0.0)
    for forgotten in ("model", "optimizer", "schedule"):
        text = refuted(ranks, adam(forgotten), "state-not-restored", match="does not continue", steps=7, world_sizes=[4])
        assert f"on no rank as saved: {forgotten}." in text

def off(error):
    def train(rank, directory, start, stop):
        x = torch.load(directory / f"{rank.index}.pt") if start else torch.linspace(1, 2, 9)
        x = x * (1 + error) if start else x
        for step in range(start, stop):
            x = x * 1.3
        torch.save(x, directory / f"{rank.index}.pt")
        return {"x": x}
    return train

def test_what_rounding_does_not_explain(ranks):
    assert_resume_continues(ranks, off(1e-7))
    refuted(ranks, off(1e-4), "state-not-restored", match=r"x on ranks 0-1: element .* ±")

def test_what_differs_between_two_runs(ranks):
    def runs(again, resumed):
        def train(rank, directory, start, stop):
            off = {"of again": again, "checkpoint": resumed if start else 0}.get(directory.name, 0)
            return {"x": torch.full((3,), stop + off, dtype=torch.float64)}
        return train
    assert_resume_continues(ranks, runs(1e-6, 3e-6))
    refuted(ranks, runs(1e-6, 3e-5), "state-not-restored", match="± 8e-06")
    refuted(ranks, runs(0, 3e-6), "state-not-restored", match="x on")

def test_where_rounding_cannot_be_measured(ranks):
    inner = off(1e-7)
    def train(rank, directory, start, stop):
        assert not directory.name.startswith("of perturbed"), "no more disk"
        return inner(rank, directory, start, stop)
    text = refuted(ranks, train, "state-not-restored", match="x on")
    assert "compared to the bit, for how far rounding errors lead could not be measured" in text and "no more disk" in text
"""
    )
    run("--gpus=4", "--simulate", "--rank-timeout=60").assert_outcomes(passed=4)


def test_what_cannot_be_repeated_or_compared(run, pytester):
    pytester.makepyfile(
        test_it=CODE.partition("def test_all_restored")[0]
        + """
import collections
import dataclasses
import enum
import threading
import types

def unseeded():
    generator = torch.Generator()
    generator.seed()
    return generator

def drawing(draw):
    def train(rank, directory, start, stop):
        return {"steps": stop, "w": draw()}  # nothing is saved
    return train

DRAWN = {
    "floats": lambda: torch.randn(400, generator=unseeded()),
    "complex": lambda: torch.randn(4, dtype=torch.complex64, generator=unseeded()),
    "half": lambda: torch.randn(4, generator=unseeded()).half(),
    "ints": lambda: torch.randint(2**40, (4,), generator=unseeded()),
    "text": lambda: torch.randint(2**40, (1,), generator=unseeded()).numpy().tobytes().hex(),
    "infinite": lambda: torch.tensor([1.0, float("inf")]) * torch.randn(2, generator=unseeded()),
}

@pytest.mark.parametrize("kind", DRAWN)
def test_training_that_cannot_be_repeated(ranks, kind):
    with pytest.raises(ValueError, match="two uninterrupted runs of steps 0 to 6 differ by more than rounding in w on ranks 0-1: w: "):
        assert_resume_continues(ranks, drawing(DRAWN[kind]))

def test_a_tolerance_covers_what_it_covers(ranks):
    def train(rank, directory, start, stop):
        return {"x": stop + torch.rand(100, generator=unseeded()) * 0.3}
    assert_resume_continues(ranks, train, tolerance=0.1)
    with pytest.raises(ValueError, match="two uninterrupted runs"):
        assert_resume_continues(ranks, train, tolerance=0.01)

def test_narrow_dtypes_round_more(ranks):
    def train(rank, directory, start, stop):
        return {"x": (stop * (1 + 2**-8 * torch.randint(2, (99,), generator=unseeded()))).bfloat16()}
    assert_resume_continues(ranks, train)

@dataclasses.dataclass
class State:
    w: torch.Tensor

class Meter:
    def __init__(self, w):
        self.w = w
    def __repr__(self):
        return "Meter"

class Slots:
    __slots__ = ("w",)
    def __init__(self, w):
        self.w = w
    def __repr__(self):
        return f"Slots({self.w})"

HOLDERS = [State, Meter, Slots, lambda w: types.SimpleNamespace(w=w), lambda w: collections.deque([w]), lambda w: {"a": (1, [w])}]

def counting(hold, lost):
    def train(rank, directory, start, stop):
        w = torch.load(directory / f"{rank.index}.pt") if start and not lost else torch.zeros(3000)
        for step in range(start, stop):
            w[1500] += 1  # which repr does not show
        torch.save(w, directory / f"{rank.index}.pt")
        return {"steps": stop, "state": hold(w)}
    return train

@pytest.mark.parametrize("hold", HOLDERS)
def test_tensors_in_objects(ranks, hold):
    assert_resume_continues(ranks, counting(hold, False), world_sizes=[2])
    refuted(ranks, counting(hold, True), "state-not-restored", match=r"element \\[1500\\]: got 3, expected 6", world_sizes=[2])

def test_what_cannot_be_taken_apart(ranks):
    for hold, match in [
        (lambda w: {"w": w}.values(), "of what train returns, state is a dict_values, which cannot be taken apart; give it a state_dict"),
        (lambda w: {"a": [threading.Lock()]}, "state.a.0 is a lock, which cannot"),
        (lambda w: {"a.b": w, "a": {"b": w}}, "there are two entries 'state.a.b'"),
        (lambda w: {1: w, "1": w}, "there are two entries 'state.1'"),
        (lambda w: [holds_itself()], "state.0.me is a Meter, which holds itself"),
    ]:
        with pytest.raises(ValueError, match=match):
            assert_resume_continues(ranks, counting(hold, False))

def holds_itself():
    meter = Meter(1)
    meter.me = meter
    return meter

class Color(enum.Enum):
    RED = 1

def test_what_needs_no_taking_apart(ranks):
    def train(rank, directory, start, stop):
        numpy = __import__("numpy")
        return {
            "stop": stop, "none": None, "dtype": torch.float16, "device": rank.device, "shape": torch.Size([2]), "path": directory.parent,
            "color": Color.RED, "kind": Color, "function": torch.relu, "lambda": lambda x: x, "set": {"b", "a"}, "empty": {},
            "range": range(10**12), "bytes": bytearray(b"a"), "generator": torch.Generator().manual_seed(1),
            "python": random.Random(3), "numpy": numpy.random.default_rng(2), "legacy": numpy.random.RandomState(2),
            "texts": numpy.array(["a", "b"]), "objects": numpy.array([None, "b"]), "long": numpy.longdouble(1) / 3,
            "sparse": torch.eye(3).to_sparse(),
        }
    assert_resume_continues(ranks, train)

@pytest.mark.parametrize("kind", ["numpy", "python", "torch"])
def test_generators_by_their_state(ranks, kind):
    def train(rank, directory, start, stop):
        if kind == "numpy":
            generator = __import__("numpy").random.default_rng(2)
            draw = generator.random
        elif kind == "python":
            generator = random.Random(2)
            draw = generator.random
        else:
            generator = torch.Generator().manual_seed(2)
            draw = lambda: torch.rand(3, generator=generator)
        for step in range(start, stop):  # and is not restored
            draw()
        return {"steps": stop, "drawn from": generator}
    refuted(ranks, train, "state-not-restored", match="drawn from.* on ranks 0-1", world_sizes=[2])
"""
    )
    run(*GPUS).assert_outcomes(passed=19)
