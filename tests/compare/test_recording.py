"""The result of a run: the trace of a script, and its numbers."""

from __future__ import annotations

import json
import os
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from mgpu_check.cli.run_options import launched_by
from mgpu_check.compare.alignment import deviation
from mgpu_check.compare.in_script.models import Names
from mgpu_check.compare.in_script.parameters import Parameters, States
from mgpu_check.compare.in_script.perturbations import Perturbation
from mgpu_check.compare.in_script.summaries import summaries
from mgpu_check.compare.trace import FORMAT, VERSION, TensorSummary, TraceError, Writer, chunk_sizes, positions, read
from mgpu_check.processes.environments import FLOAT32
from mgpu_check.torch_hooks.tensors import as_bits
from tests.compare.conftest import script

RUN = """
import os, pickle, sys
from mgpu_check.compare.processes import run
world, launcher = int(sys.argv[1]), sys.argv[2]
done = run("test", [sys.executable, "train.py"], os.environ, world, timeout=60, launcher=launcher)
sys.stdout.buffer.write(pickle.dumps(done))
"""


@pytest.fixture
def record(tmp_path, python):
    """Run `script` in `world` processes, and give what became of them.

    Not in this process, which would adopt theirs.
    """

    def record(script: str, world: int = 1, launcher: str = "torchrun"):
        tmp_path.joinpath("train.py").write_text(script)
        code, stdout, stderr = python("-c", RUN, str(world), launcher, processes=world)
        assert code == 0, stderr.decode()
        return pickle.loads(stdout)

    return record


@pytest.fixture
def traces(record):
    """Run the script of that name, which must succeed, and give the traces of its processes."""

    def traces(name: str, world: int = 1):
        run = record(script(name), world)
        assert run.failed is None, [ended.stderr for ended in run.ranks]
        return run.traces

    return traces


@pytest.mark.parametrize("forked", [True, pytest.param(False, marks=[pytest.mark.cold, pytest.mark.slow])])
def test_a_script_finds_what_torchrun_would_give_it(record, forked):
    """And one that is forked finds the same, but for what is imported."""
    run = record(
        f"""
import os, sys
assert __name__ == "__main__" and sys.argv == ["train.py"], sys.argv
assert __file__ == os.path.abspath("train.py") and sys.path[0] == os.getcwd() and not sys.stdin.read()
assert "torch" not in sys.modules and any("mgpu_check" in name for name in sys.modules) == {forked}
assert sorted(map(int, os.listdir("/proc/self/fd")))[:3] == [0, 1, 2] and os.getpgrp() == os.getpid()
import torch, torch.distributed as dist
import torch._dynamo
assert sys.modules["torch"] is torch and torch.__spec__.origin == torch.__file__
assert torch.get_num_threads() == 1 and torch._dynamo.config.disable
assert torch.compile(lambda x: x + 1, fullgraph=True)(torch.ones(1)) == 2
assert torch.randint(10**9, (1,), generator=torch.Generator().manual_seed(5)).item() and torch.initial_seed()
assert dist.is_torchelastic_launched()
dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
assert (dist.get_rank(), dist.get_world_size()) == (rank, int(os.environ["WORLD_SIZE"])) == (rank, 2)
assert int(os.environ["LOCAL_RANK"]) == rank and os.environ["LOCAL_WORLD_SIZE"] == "2"
# float32 is float32, in convolutions too, whatever the script sets.
assert os.environ["NVIDIA_TF32_OVERRIDE"] == "0"
assert not torch.backends.cudnn.allow_tf32 and not torch.backends.cuda.matmul.allow_tf32
assert torch.backends.cudnn.deterministic
dist.barrier()
dist.destroy_process_group()
""",
        2,
    )
    assert [ended.how for ended in run.ranks] == ["finished"] * 2, [ended.stderr for ended in run.ranks]


OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "PMI_RANK"), ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


@pytest.mark.parametrize(
    ("launcher", "ranks", "worlds", "variable", "value", "led"),
    [
        ("mpiexec", *OPEN_MPI, "MASTER_PORT", "29511", ["MASTER_PORT"]),
        pytest.param(
            *(
                "srun",
                ("SLURM_PROCID",),
                ("SLURM_NTASKS",),
                "MASTER_ADDR",
                "localhost",
                [],
            ),  # another name for the same
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_script_finds_the_rank_of_another_launcher(record, launcher, ranks, worlds, variable, value, led):
    """And its address elsewhere, as scripts of jobs export it."""
    run = record(
        f"""
import os
assert not {{"RANK", "LOCAL_RANK", "TORCHELASTIC_RUN_ID"}} & os.environ.keys()
import torch.distributed as dist
os.environ["{variable}"] = "{value}"
(rank,), (world,) = (set(map(os.environ.get, names)) for names in ({ranks}, {worlds}))
dist.init_process_group("gloo", rank=int(rank), world_size=int(world))
assert dist.get_world_size() == 2
dist.barrier()
dist.destroy_process_group()
""",
        2,
        launcher,
    )
    assert [ended.how for ended in run.ranks] == ["finished"] * 2, [ended.stderr for ended in run.ranks]
    assert [trace.of("group")[0]["rank"] for trace in run.traces] == [0, 1]
    assert [[event["variable"] for event in trace.of("led")] for trace in run.traces] == [led] * 2


def test_float32_turns_autocast_and_scalers_off(record, monkeypatch):
    monkeypatch.setenv(FLOAT32, "1")
    run = record(
        """
import torch
net, scaler = torch.nn.Linear(2, 1), torch.amp.GradScaler("cpu", init_scale=8.0)
with torch.autocast("cpu", dtype=torch.bfloat16):
    loss = net(torch.ones(1, 2)).sum()
assert loss.dtype is torch.float32 and scaler.scale(loss) is loss
loss.backward()
scaler.step(torch.optim.SGD(net.parameters(), lr=0.1))
scaler.update()
"""
    )
    assert run.failed is None, run.ranks[0].stderr
    assert len(run.traces[0].steps) == 1 and not run.has("autocast")


@pytest.mark.parametrize(
    ("words", "launcher", "variables"),
    [
        ("train.py srun", "", "torchrun"),
        ("python -m pkg.train", "", "torchrun"),
        ("torchrun --nproc-per-node 2 train.py", "torchrun --nproc-per-node 2", "torchrun"),
        ("python -m torch.distributed.run -m pkg.train", "python -m torch.distributed.run", "torchrun"),
        ("accelerate launch --num_processes 2 -m train", "accelerate launch --num_processes 2", "torchrun"),
        ("/usr/bin/mpirun -np 2 python3 train.py", "/usr/bin/mpirun -np 2", "mpiexec"),
        ("srun -n 2 train.py", "srun -n 2", "srun"),
        ("srun -m block python train.py", "srun -m block", "srun"),
        ("torchrun --nproc-per-node=2 --module pkg.train", "torchrun --nproc-per-node=2", "torchrun"),
        ("torchrun --standalone train.py config.py --config=a.py --to python", "torchrun --standalone", "torchrun"),
        ("mpirun -x PY=/a.py -x b.py python train.py", "mpirun -x PY=/a.py -x b.py", "mpiexec"),
    ],
)
def test_a_launcher_is_replaced(words, launcher, variables):
    found, row = launched_by(words.split())
    assert (" ".join(found), row) == (launcher, variables)


def test_the_rank_that_raised_first_is_told_from_those_that_lost_their_connection_to_it(record):
    """It ends after rank 0, which it has left alone."""
    raises = """
import atexit, contextlib, os, time
def leave():
    if pids and dist.get_rank() == 2:
        dist.destroy_process_group()
        with contextlib.suppress(ProcessLookupError):
            while not os.kill(pids[0], 0): time.sleep(0.01)
atexit.register(leave)
import torch, torch.distributed as dist
dist.init_process_group("gloo")
pids = [None] * 3; dist.all_gather_object(pids, os.getpid())
if dist.get_rank() == 2: raise RuntimeError("out of paper")
dist.all_reduce(torch.ones(3))
"""
    run = record(raises, world=3)
    assert [ended.how for ended in run.ranks] == ["failed"] * 3
    assert run.failed_rank == 2, run.ranks


def test_models_micro_batches_and_optimizers(traces):
    (trace,) = traces("two_models")
    ordered = sorted(trace.parameters.values(), key=lambda p: p.order)
    names = "scale", "body.weight", "body.bias", "Net.scale", "Net.body.weight", "Net.body.bias"
    assert [p.name for p in ordered] == [*names, "optimizer0.group0.parameter3"]
    assert [step.optimizer for step in trace.steps] == [0, 1, 0]
    first, second, third = trace.steps
    assert [len(part) for part in first.samples] == [4, 4] and len(first.losses) == 2
    assert sorted(first.seen) == sorted(second.seen) == sorted(third.seen)
    assert set(first.before) == set(first.parameters) and not third.before
    assert first.gradients["optimizer0.group0.parameter3"] is None
    assert first.parameters["body.weight"] != first.before["body.weight"]
    kept = [state for state in trace.states.values() if state.key]
    assert {state.of for state in kept} == {"Net.scale", "Net.body.weight", "Net.body.bias"}
    assert all(state.order == trace.parameters[state.of].order for state in kept)
    (clip,) = trace.of("clip")
    assert clip["after"] == 2 and clip["most"] == 0.25
    assert clip["norm"] > 0
    (other,) = traces("wrapper_in_evaluation")
    assert [len(part) for part in other.steps[0].samples] == [4]


def test_gradients_that_are_computed_within_the_step(traces):
    """By a closure; and what is noted of the model, and of what the script does, beside its steps."""
    (trace,) = traces("closures")
    steps = trace.steps
    assert [step.optimizer for step in steps] == [0, 0, 1, 1, 2]
    for step in steps[:4]:
        assert step.gradients["out.weight"].norm > 0
    change = [a - b for a, b in zip(*(steps[i].parameters["out.bias"].samples for i in (1, 0)), strict=True)]
    assert change == pytest.approx([-0.1 * g for g in steps[1].gradients["out.bias"].samples], rel=1e-3)
    assert len(steps[0].losses) == 1 and len(steps[2].losses) > 1
    assert [len(part) for part in steps[0].samples] == [2] and [len(part) for part in steps[0].columns] == [3]
    assert [event["after"] for event in trace.of("random")] == [5]  # dropout_p=0.0 draws nothing
    assert trace.of("random")[0]["what"] == "Attention.forward" and ":" in trace.of("random")[0]["line"]
    (narrow,) = trace.of("narrow")
    assert (narrow["dtype"], narrow["module"], narrow["after"]) == ("bfloat16", "Linear", 5)
    assert len(trace.of("seed")) == 1 and [event["missed"] for event in trace.of("save")] == [True]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "group"), [("fork", True), ("spawn", False), ("fork", False), ("forkserver", True)])
def test_a_process_of_the_script_that_trains_instead_of_it(record, method, group):
    """It is the rank if it makes a process group, or calls a model to train it."""
    run = record(
        f"""
import multiprocessing, torch
from torch.distributed import init_process_group
def rank(i):
    if {group}:
        init_process_group("gloo", rank=i, world_size=1)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    raise SystemExit(3)
if __name__ == "__main__":
    process = multiprocessing.get_context("{method}").Process(target=rank, args=(0,))
    process.start()
    process.join()
"""
    )
    (rank,) = run.ranks
    assert run.has("started") and rank.steps == 1 and run.has("group") == group, (rank.stderr, rank.trace.events)
    assert run.failed is rank and rank.exit_code == 1, "although the script itself has ended with 0"


def test_another_number_of_ranks_than_there_are_devices(record):
    run = record(
        """
import torch
def rank(i):
    raise AssertionError
if __name__ == "__main__":
    torch.multiprocessing.start_processes(rank, nprocs=3)
"""
    )
    assert run.has("starts") and run.ranks[0].how == "stopped", run.ranks[0].stderr


@pytest.mark.slow
def test_optimizers_within_others_and_steps_that_are_skipped(traces):
    for trace in traces("scaled_steps", 2):
        assert [len(step.seen) for step in trace.steps] == [3, 3]
        assert [event["after"] for event in trace.of("skipped")] == [1]


def test_a_step_that_raises_is_none_and_hides_no_other(traces):
    (trace,) = traces("moody")
    steps = [(step.optimizer, len(step.parameters), len(step.losses), len(step.seen)) for step in trace.steps]
    assert steps == [(0, 2, 1, 3), (1, 2, 1, 3), (0, 2, 1, 3), (0, 2, 1, 3), (1, 2, 1, 3), (0, 2, 1, 3)]
    assert [bool(step.before) for step in trace.steps] == [True, True, False, False, False, False]
    for step in trace.steps[:2]:
        assert set(step.before) == set(step.parameters)


def test_complex_parameters_are_real_ones_with_one_more_dimension(traces):
    """Also where autograd keeps a gradient as its conjugate."""
    (trace,) = traces("complex_parameters")
    shape, step = trace.parameters["weight"].shape, trace.steps[0]
    assert shape == (3, 2)
    assert step.gradients["weight"].samples == (0, -1, 2, 0, 1, 0)
    assert step.parameters["weight"].samples == (1, 2.5, 2, -1, -0.5, 0.5)
    found = deviation(step.parameters["weight"], step.before["weight"], shape)
    assert found.number == "element [2, 0]" and (found.got, found.expected) == (-0.5, 0)


def test_sharded_parameters_are_gathered(traces):
    name = "weight"  # of a module that was never called
    for trace in traces("sharded", 2):
        assert trace.parameters[name].sharded and trace.parameters[name].shape == (6, 2)
        step = trace.steps[0]
        assert step.parameters[name].samples[-1] == 11 and step.gradients[name].samples[-1] == 22


@pytest.mark.slow
def test_processes_of_the_script_are_not_recorded(traces):
    """If it trains itself, too."""
    (trace,) = traces("own_processes")
    assert len(trace.steps) == 1 and trace.of("reclaimed") and not trace.of("started")


def test_processes_of_the_script_end_with_it(record):
    """Also those that have left its process group: `surroundings` looks for them."""
    sleeper = "[sys.executable, '-c', 'import signal; signal.pause()'], start_new_session=True"
    run = record(f"import subprocess, sys\nprint(subprocess.Popen({sleeper}).pid)")
    assert run.ranks[0].how == "finished"


def test_a_trace_that_was_cut_off_can_be_read_and_others_are_refused(tmp_path):
    with open(tmp_path / "trace", "w+b", buffering=0) as file:
        writer = Writer(file.fileno())
        writer.write("start", format="mgpu-check trace", version=1, rank=1, world=2)
        writer.write("sampler", after=0)
        os.write(file.fileno(), b'{"event":"st')
        file.seek(0)
        data = file.read()
    trace = read(data)
    assert (trace.rank, trace.world, [e["event"] for e in trace.events]) == (1, 2, ["sampler"])
    with pytest.raises(TraceError, match="version 2, but only version 1 can be read"):
        read(data.replace(b'"version":1', b'"version":2'))
    with pytest.raises(TraceError, match="not an mgpu-check trace"):
        read(b"hello\n")


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 7, 8, 9, 100, 2**17 + 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_summary_is_what_it_says(count, dtype):
    tensor = torch.arange(1, count + 1).to(dtype)
    (numbers,) = summaries([tensor])
    summary = TensorSummary.of(json.loads(json.dumps(numbers)))
    wide = tensor.double()
    assert summary.bits == int(as_bits(wide).sum())
    assert summary.norm == pytest.approx(float(wide.norm()))
    assert summary.samples == tuple(wide[positions(count)].tolist())
    assert sum(chunk_sizes(count)) == count
    assert summary.sums == pytest.approx([float(part.sum()) for part in wide.split(chunk_sizes(count))])
    assert len(summary.entries(count)) == 1 + len(summary.sums) + len(summary.samples)


def names_of(called, *parameters):
    names = Names()
    for module in called:
        names.called(module)
    return [names.name(parameter, "?")[0] for parameter in parameters]


def test_names_are_those_of_the_users_own_model():
    net = nn.Sequential(nn.Linear(2, 2), nn.DataParallel(nn.Linear(2, 2)))
    called = [nn.DataParallel(net), nn.DataParallel(net), net]
    assert names_of(called, *net.parameters()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    of_nothing: Any = lambda call: call  # noqa: E731
    compiled = nn.parallel.DataParallel(torch._dynamo.OptimizedModule(nn.Conv1d(1, 1, 1), of_nothing))
    # It has a length, and raises where the module has none.
    assert names_of([*called, compiled], *compiled.parameters()) == ["weight", "bias"]
    names, loose = Names(), [torch.zeros(1), torch.zeros(1)]
    assert [names.name(p, "optimizer0.group0.parameter0")[0] for p in loose] == [
        "optimizer0.group0.parameter0",
        "parameter#2.optimizer0.group0.parameter0",
    ]


def test_what_is_moved_is_moved_by_roundoffs():
    moved = Perturbation(1)
    x = torch.rand(1000) + 0.5
    y, (z, n) = moved.output([x, (x.double(), torch.arange(3))])
    ratio = (y.double() / x.double() - 1).abs()
    assert 0 < ratio.max() < 6 * 2.0**-24
    assert 0 < ((z / x.double()) - 1).abs().max() < 6 * 2.0**-53
    assert n.tolist() == [0, 1, 2]
    assert moved.output({"a": None, "b": "text"}) == {"a": None, "b": "text"}


@pytest.mark.parametrize("kept_as_its_conjugate", [False, True])
def test_complex_numbers_are_moved_by_roundoffs(kept_as_its_conjugate):
    moved = Perturbation(1)
    x = torch.complex(torch.rand(1000) + 0.5, torch.rand(1000) + 0.5)
    if kept_as_its_conjugate:
        x = x.conj()
    y, before = moved.output(x), x.resolve_conj().clone()
    moved.gradients([x])
    for after in (y, x):
        ratio = (torch.view_as_real(after.resolve_conj()).double() / torch.view_as_real(before).double() - 1).abs()
        assert 0 < ratio.max() < 6 * 2.0**-24
        assert 400 < ((after.real > before.real) != (after.imag > before.imag)).sum() < 600  # each part on its own


def test_what_is_never_called_is_named_by_what_is_around_it():
    experts = nn.ModuleDict({str(number): nn.Linear(2, 2) for number in range(3)})
    every = [expert.weight for expert in experts.values()]
    assert names_of([experts["1"]], *every) == ["0.weight", "1.weight", "2.weight"]
    model = nn.Module()
    model.experts, model.head = experts, nn.Linear(2, 2)
    assert names_of([experts["1"], model.head], *every, model.head.weight) == [
        *(f"experts.{number}.weight" for number in range(3)),
        "head.weight",
    ]
    stages: Any = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(2)])
    assert names_of([], stages[1][0].weight) == ["1.0.weight"]
    assert names_of([stages[0]], nn.Parameter(torch.ones(1))) == ["?"]


def test_a_model_is_named_from_itself_whatever_holds_it():
    trainer = nn.Module()
    trainer.model = nn.Sequential(nn.Linear(2, 2))
    assert names_of([trainer.model], trainer.model[0].weight) == ["0.weight"]
    assert names_of([trainer.model, trainer], trainer.model[0].weight) == ["0.weight"]


def test_buffers_are_those_that_are_saved_and_change(tmp_path):
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.int64))
            self.register_buffer("mask", torch.ones(2, 2))
            self.register_buffer("cache", torch.zeros(3), persistent=False)

    model: Any = nn.Sequential(Counts())
    with open(tmp_path / "trace", "wb", buffering=0) as file:
        writer, names = Writer(file.fileno()), Names()
        writer.write("start", format=FORMAT, version=VERSION, rank=0, world=1)
        names.called(model)
        states = States(writer, names, Parameters(writer, names), lambda: None)
        states.begin(model)
        for step in range(2):
            model[0].count += step
            model[0].cache += 1
            after = states.after([], [], set(model.modules()))
            empty: dict[str, Any] = {key: [] for key in ("losses", "inputs")} | {
                key: {} for key in ("before", "gradients", "parameters")
            }
            writer.write("step", optimizer=0, states=after, **empty)
    trace = read((tmp_path / "trace").read_bytes())
    assert {name: state.constant for name, state in trace.states.items()} == {
        "buffer 0.count": False,
        "buffer 0.mask": True,
    }
    assert [step.states["buffer 0.count"].samples for step in trace.steps] == [(0,), (1,)]
    assert all("buffer 0.mask" in step.states for step in trace.steps)  # which is written once
