"""The arithmetic of a GPU on a simulated node: each kind acts, alone, and stays within what its source allows."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from mgpu_check.option_values import ARITHMETIC_KINDS, ARITHMETIC_VARIABLE, parse_arithmetic
from mgpu_check.settings import resolve
from mgpu_check.simulated import simulated_node
from tests.docs.pages import DOCS

ULP = 2.0**-23


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))


X, W, IMAGE, KERNEL, PLACES = drawn(8, 640), drawn(640, 9), drawn(4, 3, 9, 9), drawn(5, 3, 3, 3), torch.arange(640) % 7


def gradients(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> torch.Tensor:
    operands = [t.detach().clone().requires_grad_() for t in tensors]
    result = function(*operands)
    made = torch.autograd.grad(result, operands, drawn(*result.shape).to(result.device))
    return torch.cat([gradient.flatten() for gradient in made])


def stepped(t: torch.Tensor) -> torch.Tensor:
    weight = torch.nn.Parameter(t.clone())
    weight.grad = t / 7
    torch.optim.AdamW([weight], lr=0.1, fused=True).step()
    return weight.detach()


@dataclass(frozen=True)
class Case:
    kind: str
    compute: Callable[[torch.device], torch.Tensor]
    # the largest difference from the processor's result, as a multiple of that result's largest value
    within: float = 64 * ULP

    def __str__(self) -> str:
        return self.kind


CASES = [
    Case("order", lambda d: X.to(d) @ W.to(d)),
    Case("order", lambda d: torch.addmm(drawn(9).to(d), X.to(d), W.to(d), beta=0.5, alpha=2)),
    Case("order", lambda d: torch.baddbmm(drawn(2, 8, 9).to(d), X.expand(2, 8, 640).to(d), W.expand(2, 640, 9).to(d))),
    Case("order", lambda d: torch.stack([X[0].to(d) @ X[1].to(d), (X.to(d) @ X[1].to(d))[2]])),
    Case("order", lambda d: X.to(d).sum(0)),
    Case("order", lambda d: X.to(d).mean(1)),
    Case("order", lambda d: X.to(d).cumsum(1)),
    Case("order", lambda d: X.to(d).softmax(1)),
    Case("order", lambda d: F.layer_norm(X.to(d), (640,))),
    Case("order", lambda d: F.conv2d(IMAGE.to(d), KERNEL.to(d), drawn(5).to(d))),
    Case("order", lambda d: F.conv_transpose2d(IMAGE.to(d), drawn(3, 5, 2, 2).to(d))),
    Case("order", lambda d: gradients(F.conv2d, IMAGE.to(d), KERNEL.to(d), drawn(5).to(d)), within=512 * ULP),
    Case("order", lambda d: gradients(lambda w: F.embedding(PLACES.to(d), w), drawn(7, 3).to(d))),
    Case("order", lambda d: torch.zeros(7, device=d).index_put((PLACES.to(d),), X[0].to(d), accumulate=True)),
    Case("order", lambda d: F.scaled_dot_product_attention(*(drawn(1, 2, 16, 8).to(d),) * 3)),
    Case("ulp", lambda d: X.to(d).exp(), within=2 * ULP),
    Case("ulp", lambda d: X.to(d).tanh(), within=3 * ULP),
    Case("ulp", lambda d: X.to(d).abs().pow(1.7), within=5 * ULP),
    Case("fma", lambda d: stepped(X.to(d)), within=2 * ULP),
    Case("fma", lambda d: torch.addcdiv(X.to(d), X.to(d) / 3, 2 + X.abs().to(d), value=0.3), within=2 * ULP),
    Case("tf32", lambda d: F.conv2d(IMAGE.to(d), KERNEL.to(d)), within=2.0**-9),
    Case("atomics", lambda d: torch.zeros(7, device=d).index_add(0, PLACES.to(d), X[0].to(d))),
    Case("atomics", lambda d: torch.zeros(7, device=d).scatter_add(0, PLACES.to(d), X[0].to(d))),
    Case("atomics", lambda d: gradients(lambda x: F.interpolate(x, 31, mode="bilinear"), IMAGE.to(d))),
    Case("split-k", lambda d: X.bfloat16().to(d) @ W.bfloat16().to(d), within=2.0**-6),
    Case("split-k", lambda d: F.scaled_dot_product_attention(*(drawn(1, 2, 16, 8).bfloat16().to(d),) * 3), 2.0**-6),
    Case("ties", lambda d: torch.topk(torch.ones(9, device=d), 3).indices, within=math.inf),
    Case("ties", lambda d: torch.sort(torch.ones(9, device=d)).indices, within=math.inf),
    Case("casts", lambda d: torch.tensor([math.nan, 1e30, -1e30, 3.7], device=d).int(), within=math.inf),
    Case("zeros", lambda d: torch.maximum(torch.tensor([-0.0], device=d), torch.zeros(1, device=d)).reciprocal()),
    Case("nan", lambda d: (torch.zeros(3, device=d) / torch.zeros(3, device=d)).view(torch.int32), within=math.inf),
    Case("reciprocal", lambda d: X.to(d) / 3, within=ULP),
]  # fmt: skip


def bits(t: torch.Tensor) -> bytes:
    return t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("case", CASES, ids=[f"{case}-{i}" for i, case in enumerate(CASES)])
def test_each_kind_acts_alone_and_within_its_bound(case):
    with simulated_node(1, arithmetic="cpu"):
        expected = case.compute(torch.device("cuda", 0)).cpu()
    with simulated_node(1, arithmetic=case.kind):
        result = case.compute(torch.device("cuda", 0)).cpu()
        of_processor = case.compute(torch.device("cpu"))
    assert result.dtype == expected.dtype and result.shape == expected.shape
    assert bits(result) != bits(expected)
    if math.isfinite(case.within) and case.kind != "zeros":
        assert (result - expected).abs().max() <= case.within * expected.abs().max()
    # A CPU tensor keeps the processor's arithmetic: checks compute there what they expect.
    with simulated_node(1, arithmetic="cpu"):
        assert bits(of_processor) == bits(case.compute(torch.device("cpu")))


def test_every_kind_has_a_case():
    elsewhere = {"layout", "nondeterministic", "nccl", "philox"}
    assert {case.kind for case in CASES} | elsewhere == ARITHMETIC_KINDS.keys()


def test_whole_numbers_and_exact_values_stay_exact():
    whole = torch.randint(-9, 9, (40, 50)).float()
    with simulated_node(1, arithmetic="gpu,-tf32"):
        device = torch.device("cuda", 0)
        assert torch.equal((whole.to(device) @ whole.T.to(device)).cpu(), whole @ whole.T)
        assert torch.equal(whole.to(device).sum(0).cpu(), whole.sum(0))
        assert torch.equal(torch.zeros(3, device=device).exp().cpu(), torch.ones(3))
        assert torch.equal(
            (whole.to(device) * whole.to(device) - 3).sqrt().isnan().cpu(), (whole * whole - 3).sqrt().isnan()
        )


def test_equal_shapes_add_in_equal_orders_and_atomics_do_not():
    def summed(device: torch.device) -> torch.Tensor:
        return torch.zeros(7, device=device).index_add(0, PLACES.to(device), X[0].to(device))

    with simulated_node(1, arithmetic="gpu"):
        device = torch.device("cuda", 0)
        assert len({bits(X.to(device) @ W.to(device)) for _ in range(4)}) == 1
        assert bits((X.to(device) @ W.to(device))[:2]) != bits(X[:2].to(device) @ W.to(device))  # not batch-invariant
        assert len({bits(summed(device)) for _ in range(8)}) > 1
        torch.use_deterministic_algorithms(True)
        try:
            assert len({bits(summed(device)) for _ in range(8)}) == 1
        finally:
            torch.use_deterministic_algorithms(False)


def test_a_seed_repeats_the_orders_and_another_changes_them():
    def results(arithmetic: str) -> list[bytes]:
        with simulated_node(1, arithmetic=arithmetic):
            x, places = X[0].to("cuda"), PLACES.to("cuda")
            added = [bits(torch.zeros(7, device="cuda").index_add(0, places, x)) for _ in range(3)]
            return [*added, bits(X.to("cuda") @ W.to("cuda"))]

    assert results("gpu,seed=1") == results("gpu,seed=1")
    assert results("gpu,seed=1")[3] != results("gpu,seed=2")[3]


def test_random_numbers_depend_on_how_many_are_drawn():
    def first(count: int) -> list[float]:
        torch.cuda.manual_seed(5)
        return torch.rand(count, device="cuda")[:4].tolist()

    with simulated_node(1, arithmetic="philox"):
        assert first(4) == first(4) != first(8)
        dropped = F.dropout(torch.ones(100, device="cuda"), 0.5)
        assert set(dropped.tolist()) == {0.0, 2.0} and torch.equal(F.dropout(dropped, 0.0), dropped)


def test_layouts_are_those_of_cudnn():
    with simulated_node(1, arithmetic="layout"):
        image = IMAGE.to("cuda", memory_format=torch.channels_last)
        assert F.conv2d(image, KERNEL.to("cuda")).is_contiguous(memory_format=torch.channels_last)
        assert F.conv2d(IMAGE.to("cuda"), KERNEL.to("cuda")).is_contiguous()
        assert (X.to("cuda") > 0).nonzero().is_contiguous()


def test_deterministic_algorithms_refuse_what_cuda_refuses(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.use_deterministic_algorithms(True)
    try:
        with simulated_node(1, arithmetic="gpu"):
            with pytest.raises(RuntimeError, match="histc_cuda does not have a deterministic implementation"):
                X.to("cuda").histc(5)
            with pytest.raises(RuntimeError, match="uses CuBLAS"):
                X.to("cuda") @ W.to("cuda")
            monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            assert (X.to("cuda") @ W.to("cuda")).shape == (8, 9)
    finally:
        torch.use_deterministic_algorithms(False)


def test_errors_of_operands_stay_those_of_torch(capfd):
    with simulated_node(1, arithmetic="gpu"):
        with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
            X.to("cuda") @ X.to("cuda")
        with pytest.raises(IndexError, match="Dimension out of range"):
            X.to("cuda").sum(5)
    assert "mgpu-check:" not in capfd.readouterr().err


def ring(rank: int, size: int) -> dict[str, object]:
    mine = drawn(rank + 1, 997)[rank].cuda()
    rows = [torch.empty_like(mine) for _ in range(size)]
    dist.all_gather(rows, mine)
    total = mine.clone()
    dist.all_reduce(total)
    mean = mine.bfloat16()
    dist.all_reduce(mean, op=dist.ReduceOp.AVG)
    part = torch.empty(3, device="cuda")
    dist.reduce_scatter(part, [mine[3 * i : 3 * i + 3].clone() for i in range(size)])
    at_root = mine.clone()
    dist.reduce(at_root, 1)
    largest = torch.tensor([math.nan if rank else -1.0, float(rank)], device="cuda")
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    count = torch.ones(4, dtype=torch.int64, device="cuda")
    dist.all_reduce(count)
    exact = torch.stack(rows).double().sum(0)
    return {
        "bits": total.tolist(),
        "error": float((total - exact).abs().max()),
        "of mean": float((mean - exact / size).abs().max()),
        "of part": float((part - exact[3 * rank : 3 * rank + 3]).abs().max()),
        "of root": float((at_root - (exact if rank == 1 else mine)).abs().max()),
        "largest": largest.tolist(),
        "count": count.tolist(),
    }


def test_collectives_add_along_a_ring(on_ranks, monkeypatch):
    plain = on_ranks(ring, 4)
    monkeypatch.setenv(ARITHMETIC_VARIABLE, "gpu")
    ringed = on_ranks(ring, 4)
    assert plain[0]["bits"] != ringed[0]["bits"]
    for results in ringed:
        assert results["bits"] == ringed[0]["bits"]
        assert results["error"] < 1e-5 and results["of mean"] < 0.05
        assert results["of part"] < 1e-5 and results["of root"] < 1e-5
        assert results["largest"] == [-1.0, 3.0]  # NCCL ignores NaN
        assert results["count"] == [4] * 4


def joined(rank: int, size: int) -> float:
    """The weight after steps of 1 for each of the ranks that still train: rank 0 takes one step, rank 1 two, and so on."""
    layer = torch.nn.Linear(1, 1, bias=False).cuda()
    torch.nn.init.zeros_(layer.weight)
    model = torch.nn.parallel.DistributedDataParallel(layer)
    with model.join(divide_by_initial_world_size=False):
        for _ in range(rank + 1):
            layer.weight.grad = None
            model(torch.ones(1, 1, device="cuda")).sum().backward()
            with torch.no_grad():
                layer.weight += layer.weight.grad
    return float(layer.weight)


def test_ranks_that_join_are_counted_along_a_ring_too(on_ranks, monkeypatch):
    monkeypatch.setenv(ARITHMETIC_VARIABLE, "gpu")
    assert on_ranks(joined, 3) == [3.0] * 3


@pytest.mark.parametrize(
    ("text", "kinds"),
    [
        ("", set()),
        ("cpu", set()),
        ("gpu", set(ARITHMETIC_KINDS)),
        ("order,ulp", {"order", "ulp"}),
        ("gpu,-zeros,-nan", set(ARITHMETIC_KINDS) - {"zeros", "nan"}),
    ],
)
def test_values_of_the_option(text, kinds):
    settings = parse_arithmetic(text)
    assert settings.kinds == kinds
    assert parse_arithmetic(str(settings)) == settings


def test_real_devices_keep_their_own():
    with pytest.raises(ValueError, match="--simulate-arithmetic: real devices have an arithmetic of their own; add"):
        resolve({"gpus": "1", "simulate_arithmetic": "gpu"}, {}, {})
    for environment in ({"MGPU_CHECK_SIMULATE_ARITHMETIC": "gpu"}, {}):
        assert bool(resolve({"gpus": "1"}, environment, {}).simulate_arithmetic.kinds) == bool(environment)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("orders", "no kind of arithmetic is called 'orders'; choose cpu, gpu"),
        ("order,-ulp", "-ulp takes away what is not there; begin with gpu"),
        ("seed=3", "a seed alone has no meaning; begin with gpu"),
        ("gpu,seed=x", "no kind of arithmetic is called 'seed=x'"),
    ],
)
def test_wrong_values_name_the_valid_set(text, message):
    with pytest.raises(ValueError, match=message):
        parse_arithmetic(text)


FLAKY = """
import torch

def test_sums(gpus):
    x, places = torch.randn(900, device=gpus[0]), torch.zeros(900, dtype=torch.long, device=gpus[0])
    sums = {float(torch.zeros(1, device=gpus[0]).index_add(0, places, x)) for _ in range(9)}
    assert len(sums) == 1
"""


def test_a_test_that_is_flaky_on_a_gpu_fails_in_pytest(pytester, warm):
    pytester.makepyfile(test_it=FLAKY)
    options = ("--gpus=1", "--simulate", "-p", "no:cacheprovider")
    result = pytester.runpytest_subprocess(*options, "--simulate-arithmetic=gpu,-ulp")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*arithmetic gpu,-ulp*", "*--simulate-arithmetic=gpu,-ulp*::test_sums"])


def test_a_script_computes_as_the_command_says(command, tmp_path):
    (tmp_path / "script.py").write_text(
        "import torch\nprint(torch.full((1,), float('nan'), device='cuda').int().item())"
    )
    assert command("simulate", "--simulate-arithmetic", "casts", "script.py").startswith("0\n")


def test_the_page_names_every_kind():
    page = (DOCS / "reference" / "simulated-node.md").read_text()
    assert [kind for kind in ARITHMETIC_KINDS if f"| `{kind}` |" not in page] == []
