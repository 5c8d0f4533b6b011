"""CUDA graphs: a capture runs nothing, a replay runs what was captured, and what cannot be captured is refused."""

from __future__ import annotations

import pytest
import torch
import torch._dynamo  # each dispatch mode needs it: ranks share what is imported before they are forked
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from mgpu_check import simulated_node

UNSUPPORTED = "operation not permitted when stream is capturing"


@pytest.fixture
def side(node):
    return torch.cuda.Stream()


@pytest.fixture
def capture(side):
    """``capture(body)``: the graph of what body does, and what it returns."""

    def run(body, graph=None, **given):
        graph = graph or torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side, **given):
            result = body()
        return graph, result

    yield run
    torch.cuda.set_stream(torch.cuda.default_stream())  # it stays chosen where a capture fails


def refused(error):
    """Return the error that ended a capture, and the one that came before it."""
    return str(error.value), str(error.value.__context__)


def test_a_capture_runs_nothing_and_a_replay_all(capture):
    there, made = torch.ones(3, device="cuda"), torch.ones(3, device="cuda")

    def body():
        made.mul_(2).add_(there)
        return made + 1, torch.zeros(2, dtype=torch.int64, device="cuda")

    graph, (result, zeros) = capture(body)
    assert made.tolist() == [1, 1, 1] and result.isnan().all() and zeros.ne(0).all()
    graph.replay()
    assert made.tolist() == [3, 3, 3] and result.tolist() == [4, 4, 4] and zeros.tolist() == [0, 0]
    there.fill_(10)
    place = result.data_ptr()
    graph.replay()
    assert result.tolist() == [17, 17, 17] and result.data_ptr() == place


@torch.inference_mode()
def double(t):
    return F.relu(t * 2)


def test_a_model_captured_in_inference_mode_is_replayed_outside(capture):
    static = torch.ones(2, device="cuda")
    graph, out = capture(lambda: double(static))
    assert out.isnan().all() and out.is_inference()
    graph.replay()
    static.fill_(3)
    graph.replay()
    assert out.tolist() == [6, 6]


def test_a_training_step_is_replayed_as_it_would_run(capture):
    def model_of():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2)).cuda()
        return model, torch.optim.Adam(model.parameters(), capturable=True)

    def step(model, optimizer, x, y):
        optimizer.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    batches = [(torch.randn(6, 4), torch.randint(2, (6,))) for _ in range(4)]
    eager, optimizer = model_of()
    torch.cuda.manual_seed(7)
    losses = [step(eager, optimizer, x.cuda(), y.cuda()).item() for x, y in batches]

    captured, optimizer = model_of()
    static = [t.cuda() for t in batches[0]]
    torch.cuda.manual_seed(7)
    found = [step(captured, optimizer, *static).item()]
    graph, loss = capture(lambda: step(captured, optimizer, *static))
    for batch in batches[1:]:
        for into, t in zip(static, batch, strict=True):
            into.copy_(t)
        graph.replay()
        found.append(loss.item())
    assert found == losses
    for name, value in captured.state_dict().items():
        assert torch.equal(value, eager.state_dict()[name]), name


def test_replays_are_no_changes_that_autograd_sees(capture):
    weight = torch.ones(2, device="cuda", requires_grad=True)
    static = torch.ones(2, device="cuda")
    graph, _ = capture(lambda: static.mul_(2))
    out = (weight * static).sum()
    graph.replay()
    out.backward()
    assert weight.grad.tolist() == [2, 2]  # CUDA does not notice either


@pytest.mark.parametrize(
    "wait",
    [
        lambda t: t.sum().item(),
        lambda t: t.cpu(),
        lambda t: t.nonzero(),
        lambda t: t[t > 0],
        lambda t: t.unique(),
        lambda t: torch.tensor([1.0], device="cuda"),
        lambda t: t.copy_(torch.ones(3)),
        lambda t: torch.cuda.synchronize(),
        lambda t: torch.cuda.current_stream().synchronize(),
        lambda t: torch.cuda.current_stream().query(),
        lambda t: torch.cuda.Event().query(),
    ],
    ids=["item", "cpu", "nonzero", "mask", "unique", "tensor", "copy_", "synchronize", "stream", "query", "event"],
)
def test_what_waits_for_the_device_is_refused_and_spoils_the_capture(capture, wait):
    t = torch.ones(3, device="cuda")
    with pytest.raises(RuntimeError, match="failed due to a previous error during capture") as error:
        capture(lambda: wait(t + 1))
    assert UNSUPPORTED in refused(error)[1]
    assert t.tolist() == [1, 1, 1]


def test_other_threads_and_modes_decide_about_waits_for_whole_devices(capture):
    t = torch.ones(3, device="cuda")
    graph, out = capture(lambda: [t + 1, torch.cuda.Event().query()][0], capture_error_mode="relaxed")
    graph.replay()
    assert out.tolist() == [2, 2, 2]
    with pytest.raises(RuntimeError, match="Unknown capture error mode"):
        capture(lambda: None, capture_error_mode="strict")


def test_streams_join_a_capture_and_must_be_joined(capture, side):
    other, t = torch.cuda.Stream(), torch.ones(2, device="cuda")

    def body(*, join):
        a = t + 1
        assert not other.is_capturing()
        other.wait_stream(side)
        assert other.is_capturing() and side.is_capturing()
        with torch.cuda.stream(other):
            b = a * 2
            event = other.record_event()
        if join:
            side.wait_event(event)
        return b

    graph, b = capture(lambda: body(join=True))
    assert not other.is_capturing() and not torch.cuda.is_current_stream_capturing()
    graph.replay()
    assert b.tolist() == [4, 4]
    with pytest.raises(RuntimeError, match="capturing stream has unjoined work"):
        capture(lambda: body(join=False))


def test_captured_work_depends_on_no_other_and_no_other_on_it(capture, side):
    other, t, captured = torch.cuda.Stream(), torch.ones(2, device="cuda"), torch.cuda.Event()
    other.record_event()
    with pytest.raises(RuntimeError) as error:
        capture(lambda: [t + 1, side.wait_stream(other)])
    assert "dependency created on uncaptured work in another stream" in refused(error)[1]
    torch.cuda.set_stream(torch.cuda.default_stream())
    capture(lambda: [t + 1, captured.record()])
    with pytest.raises(RuntimeError, match="an event last recorded in a capturing stream"):
        captured.synchronize()


def test_work_on_streams_that_do_not_capture_runs_at_once(capture, side):
    t, other = torch.ones(2, device="cuda"), torch.cuda.Stream()

    def body():
        t.add_(1)
        with torch.cuda.stream(other):
            return torch.ones(2, device="cuda") * 3

    graph, eager = capture(body)
    assert eager.tolist() == [3, 3] and t.tolist() == [1, 1]
    graph.replay()
    assert t.tolist() == [2, 2]


def test_copies_to_and_from_pinned_memory_are_done_at_each_replay(capture):
    given, static = torch.ones(3).pin_memory(), torch.zeros(3, device="cuda")
    back = torch.zeros(3).pin_memory()

    def body():
        static.copy_(given, non_blocking=True)
        back.copy_(static * 2, non_blocking=True)
        return static.to("cpu", non_blocking=True)

    graph, made = capture(body)
    assert back.tolist() == [0, 0, 0] and made.isnan().all() and static.tolist() == [0, 0, 0]
    given.fill_(4)
    graph.replay()
    assert back.isnan().all(), "nobody has waited"
    torch.cuda.synchronize()
    assert back.tolist() == [8, 8, 8] and made.tolist() == [4, 4, 4]


def test_a_replay_draws_what_the_generators_draw_next(capture):
    own = torch.Generator("cuda").manual_seed(3)
    x = torch.ones(100, device="cuda")

    def body():
        return F.dropout(x, 0.5), torch.rand(3, device="cuda"), torch.rand(3, device="cuda", generator=own)

    torch.cuda.manual_seed(5)
    eager = [t.tolist() for _ in range(2) for t in body()]
    own.manual_seed(3)
    torch.cuda.manual_seed(5)
    graph, results = capture(body)
    assert torch.cuda.default_generators[0].get_offset() == own.get_offset() == 0
    found = []
    for _ in range(2):
        graph.replay()
        found += [t.tolist() for t in results]
    assert found == eager
    assert (torch.cuda.default_generators[0].get_offset(), own.get_offset()) == (16, 8)
    with pytest.raises(RuntimeError, match="Cannot call CUDAGeneratorImpl::set_current_seed during CUDA graph capture"):
        capture(lambda: [x + 1, torch.cuda.manual_seed(1)])  # type: ignore[func-returns-value]


@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_optimizers_that_cannot_be_captured_say_so(capture):
    parameter = nn.Parameter(torch.ones(2, device="cuda"))
    parameter.grad = torch.ones_like(parameter)
    optimizer = torch.optim.Adam([parameter])
    with pytest.raises(RuntimeError, match="Attempting CUDA graph capture of step"):
        capture(optimizer.step)


def test_collectives_are_sent_at_each_replay(on_ranks):
    def body(rank, size):
        static = torch.full((2,), rank + 1.0, device="cuda")
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.graph(graph, stream=side):
            work = dist.all_reduce(static, async_op=True)
            work.wait()
            halves = [torch.empty(2, device="cuda") for _ in range(size)]
            dist.all_gather(halves, static * (rank + 1))
            functional = dist._functional_collectives.all_reduce(static, "sum", dist.group.WORLD) + 0
        before = static.tolist()
        results = []
        for _ in range(2):
            static.fill_(rank + 2.0)
            graph.replay()
            results.append((static.tolist(), [half.tolist() for half in halves], functional.tolist()))
        return before, results

    for rank, (before, results) in enumerate(on_ranks(body)):
        assert before == [rank + 1.0] * 2
        assert results == [([5, 5], [[5, 5], [10, 10]], [10, 10])] * 2


def test_a_capture_that_nobody_ends_ends_with_the_node():
    with simulated_node(1):
        torch.cuda.set_stream(torch.cuda.Stream())
        torch.cuda.CUDAGraph().capture_begin()
        with pytest.raises(RuntimeError, match=UNSUPPORTED):
            torch.cuda.synchronize()
    with simulated_node(1):
        torch.cuda.synchronize()
        assert not torch.cuda.is_current_stream_capturing()
        assert not torch._C._len_torch_dispatch_stack()
