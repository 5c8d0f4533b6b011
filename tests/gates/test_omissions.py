"""What the gate must not pass in silence: nothing to compare, too little of it, or what only looks like it."""

from __future__ import annotations

from tests.gates.test_scaling import passed


def test_nothing_is_green_by_omission(run, pytester):
    passed(
        run,
        pytester,
        """
import copy
import dataclasses
import functools

def test_a_step_that_does_nothing(ranks):
    with pytest.raises(ValueError, match="leaves no gradient, changes no parameter or buffer, and returns nothing"):
        assert_step_scales(ranks, lambda model, batch, rank: None, build=build, batch=batch)

def test_a_step_on_a_copy(ranks):
    def step(model, batch, rank):
        summed(copy.deepcopy(model).to(rank.device), batch, rank).backward()
    with pytest.raises(ValueError, match="leaves no gradient"):
        assert_step_scales(ranks, step, build=build, batch=batch)

def unsynchronized(model, batch, rank):
    summed(model.to(rank.device), batch, rank).backward()

def test_large_results_do_not_stand_for_gradients(ranks):
    def step(model, batch, rank):
        unsynchronized(model, batch, rank)
        return {"inputs": batch[0].repeat(20, 1)}
    refuted(ranks, step, "gradients-not-synchronized")

def test_an_account_under_the_names_of_parameters_does(ranks):
    def step(model, batch, rank):
        unsynchronized(model, batch, rank)
        account = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        for value in account.values():
            dist.all_reduce(value)
            value /= rank.size
        return account
    assert_step_scales(ranks, step, build=build, batch=batch, max_examples=8)

def test_parts_of_parameters_need_something_to_be_judged_by(ranks):
    def step(model, batch, rank):
        model[0].weight = nn.Parameter(torch.randn(8 // rank.size, 6))
    refuted(ranks, step, match="has shape", build=lambda: nn.Sequential(nn.Linear(6, 8)))

def test_complex_numbers(ranks):
    class Turn(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, dtype=torch.complex64))
    def step(model, batch, rank, factor=1.0):
        loss = (mine(batch, rank)[0].cpu() * model.weight).abs().square().sum() / len(batch[0])
        loss.backward()
        dist.all_reduce(model.weight.grad)
        model.weight.grad *= factor ** (rank.size - 1)
    assert_step_scales(ranks, step, build=Turn, batch=batch, max_examples=8)
    refuted(ranks, functools.partial(step, factor=2.0), build=Turn)

def test_names_that_only_one_side_returns(ranks):
    def step(model, batch, rank):
        return {"loss": batch[0].sum()}
    for reference in (lambda model, batch: None, lambda model, batch: {"los": 0.0}):
        with pytest.raises(ValueError, match="step returns 'loss', and the reference (nothing|'los')"):
            assert_step_scales(ranks, step, build=build, batch=batch, reference=reference)

def test_texts(ranks):
    def step(model, batch, rank, odd=lambda rank: False):
        return {"sum": batch[0].sum(), "name": "b" if odd(rank) else "a"}
    assert_step_scales(ranks, step, build=build, batch=batch, max_examples=6)
    refuted(ranks, functools.partial(step, odd=lambda rank: rank.index == 1), match="got 'b', expected 'a', rank 1")
    def none(model, batch, rank):
        return {"sum": batch[0].sum(), **({"name": "a"} if rank.size == 1 else {})}
    refuted(ranks, none, match="got None, expected 'a'")

def test_each_world_size_is_tried(ranks):
    def step(model, batch, rank):
        return {"sum": batch[0].sum() + (rank.size == 4)}
    for examples in (1, 6):
        refuted(ranks, step, match="world size 4", max_examples=examples)

def test_a_reference_that_cannot_do_one_world_size(ranks):
    def reference(model, batch, world_size):
        if world_size == 4:
            raise RuntimeError("not yet")
        return {"sum": batch[0].sum()}
    def step(model, batch, rank):
        return {"sum": batch[0].sum()}
    with pytest.raises(ValueError, match="nothing was compared at world size 4.*not yet"):
        assert_step_scales(ranks, step, build=build, batch=batch, reference=reference)

def test_numbers_of_other_kinds(ranks):
    @dataclasses.dataclass
    class Result:
        half: complex
        large: int
        pair: tuple
    def step(model, batch, rank, off=0):
        total = float(batch[0].sum())
        return Result(complex(total, 1.0), 2**70 + off * (rank.size - 1), (total, [torch.ones(2), off * rank.size]))
    assert_step_scales(ranks, step, build=build, batch=batch, max_examples=6)
    text = refuted(ranks, functools.partial(step, off=1))
    assert "returned large" in text and "returned pair.1.1" in text, text
    with pytest.raises(ValueError, match="returned thing of type object; return tensors, numbers or texts"):
        assert_step_scales(ranks, lambda model, batch, rank: {"thing": object()}, build=build, batch=batch)

def test_batches_of_other_kinds(ranks):
    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor
        names: list
    def step(model, batch, rank, split=True):
        x = batch.x[rank.index :: rank.size] if split else batch.x
        return {"norm": x.norm()}
    made = lambda n: Batch(torch.randn(n, 3), ["a"] * n)
    assert_step_scales(ranks, functools.partial(step, split=False), build=build, batch=made, max_examples=6)
    refuted(ranks, step, build=build, batch=made)

def test_functions_that_are_none(ranks):
    for name, value in (("build", nn.Linear(2, 2)), ("batch", (torch.ones(2),)), ("reference", 3)):
        with pytest.raises(ValueError, match=f"{name}=.* is no function"):
            assert_step_scales(ranks, right, **{"build": build, "batch": batch, name: value})
    with pytest.raises(ValueError, match="0.weight on meta"):
        assert_step_scales(ranks, right, build=lambda: build().to("meta"), batch=batch)
    with pytest.raises(ValueError, match="compares one device with itself"):
        assert_step_scales(ranks, right, build=build, batch=batch, world_sizes=[1])
    with pytest.raises(ValueError, match="assert_metric_scales: max_examples=True"):
        assert_metric_scales(ranks, right, build=build, batch=batch, max_examples=True)
    with pytest.raises(ValueError, match="tolerance has 'wieght', which is not observed"):
        assert_step_scales(ranks, right, build=build, batch=batch, tolerance={"wieght": 0.1})

def test_a_step_that_fails_now_and_then(ranks):
    def step(model, batch, rank):
        if rank.size > 1 and batch[0].sum() > 0 and int.from_bytes(os.urandom(1), "little") < 128:
            raise IndexError("now and then")
        return {"sum": batch[0].sum()}
    with pytest.raises(ScalingMismatch, match="now and then|first returned|does not scale"):
        assert_step_scales(ranks, step, build=build, batch=st.builds(lambda n: batch(n), st.integers(1, 9)), max_examples=40)
""",
        14,
    )


def test_rounding_that_decides_the_sign_of_a_step(run, pytester):
    """Adam takes a whole step in the direction of a gradient that is nothing but rounding errors."""
    passed(
        run,
        pytester,
        """
class Narrow:
    def __init__(self, model, rank):
        self.net = DDP(model.to(rank.device))
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=0.01)

    def __call__(self, model, batch, rank):
        x, y = mine(batch, rank)
        self.optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = F.cross_entropy(self.net(x), y, reduction="sum") * rank.size / len(batch[0])
        loss.backward()
        self.optimizer.step()

def test_adam_in_bfloat16(ranks):
    wide = lambda: nn.Sequential(nn.Linear(6, 48), nn.Tanh(), nn.Linear(48, 3))
    assert_step_scales(ranks, Narrow, build=wide, batch=batch, sizes="divisible", max_examples=12)

class Summed(Narrow):
    def __call__(self, model, batch, rank):
        super().__call__(model, (batch[0], batch[1].flip(0) if rank.size > 1 else batch[1]), rank)

def test_wrong_labels_in_bfloat16(ranks):
    refuted(ranks, Summed, sizes="divisible")
""",
        2,
    )
