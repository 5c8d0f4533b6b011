"""Module surgery on a simulated node, against the same program in plain torch: what is tied, kept, lost or refused.

The reference computes on the CPU. A mark on each storage names its device, and a move to another device copies. So the
reference uses torch's own `Module._apply`, `load_state_dict` and `deepcopy`.
"""

from __future__ import annotations

import copy
import io
import pickle
import re
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parametrize

from mgpu_check.simulated import simulated_node

DEVICES = ["cpu", "cuda:0", "cuda:1"]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
SUBMODULES = ["", "a", "b", "c", "c.a"]
NAMES = ["a.weight", "a.bias", "b.weight", "b.bias", "c.a.weight", "p"]
MARK = "_test_device"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(2, 2)
        self.register_buffer("seen", torch.tensor(1))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(2, 2), nn.Linear(2, 2, bias=False), Block()
        self.p = nn.Parameter(torch.ones(2, 2))
        self.register_buffer("mean", torch.ones(2), persistent=False)
        self.b.register_parameter("bias", None)


class Scale(nn.Module):
    def forward(self, x):
        return x * 2


def double(grad):
    return grad * 2


def mark(t, device):
    if t is not None and not t.is_meta:
        t.untyped_storage().__dict__[MARK] = device
    return t


def plain_name(name):
    """Return the name of a tensor that is the gradient of another one, or was parametrized since."""
    return name.removesuffix(".grad").replace("parametrizations.", "").removesuffix(".original")


def marked(t):
    return "meta" if t.is_meta else t.untyped_storage().__dict__.get(MARK)


class Bench:
    """Two models and all that holds on to them; `virtual`: devices are marks on storages of the CPU."""

    def __init__(self, virtual, start):
        self.virtual = virtual
        torch.manual_seed(0)
        self.models = [Net(), Net()]
        for t in self.tensors(self.models):
            mark(t, "cpu")
        self.held = [p for net in self.models for p in net.parameters()]
        self.graphs, self.optimizer, self.log = [], None, []
        for net in self.models:
            self.move(net, start)

    def tensors(self, models):
        for net in models:
            yield from dict.fromkeys([*self.named(net).values(), *net.buffers()])

    @staticmethod
    def named(net):
        found = dict(net.named_parameters(remove_duplicate=False))
        found |= {f"{n}.grad": p.grad for n, p in found.items() if p.grad is not None}
        return found | dict(net.named_buffers(remove_duplicate=False))

    def move(self, module, device=None, dtype=None):
        if not self.virtual:
            module.to(device, dtype) if device else module.to(dtype)
        elif device is None:
            module.to(dtype)
        else:
            module._apply(lambda t: self.converted(t, device, dtype))

    @staticmethod
    def converted(t, device, dtype):
        wanted = dtype if dtype is not None and t.is_floating_point() else t.dtype
        if t.is_meta:
            nn.Module.to(nn.ParameterList([t.detach()]), "cpu")  # raises as torch words it
        if marked(t) == device:
            return mark(t.to(wanted), device)
        return mark(t.to(wanted, copy=True), device)

    def empty(self, module, device):
        """`to_empty`, and zeros afterwards: what is there otherwise is nothing to compare."""
        if not self.virtual or device == "meta":
            module.to_empty(device=device)
        else:
            module._apply(lambda t: mark(torch.empty_like(t, device="cpu"), device))
        if device != "meta":
            with torch.no_grad():
                for t in [*module.parameters(), *module.buffers(), *(p.grad for p in module.parameters())]:
                    if t is not None and not t.is_meta:
                        t.zero_()

    def where(self, t):
        return marked(t) if self.virtual else str(t.device)

    def do(self, op):
        before = [{name: marked(t) for name, t in self.named(net).items()} for net in self.models]
        try:
            told = getattr(Program, op[0])(self, *op[1:])
        except Exception as error:
            told = (type(error).__name__, re.sub(r"cuda:\d|cpu|0x\w+|Simulated|Parameter", "_", str(error)))
        if self.virtual:
            for net, old in zip(self.models, before, strict=True):
                for name, t in self.named(net).items():
                    if marked(t) is None:
                        short = {plain_name(n): device for n, device in old.items()}
                        mark(t, old.get(name) or short.get(plain_name(name)))
        self.log.append((op, told, self.seen()))

    def seen(self):
        """Return all facts of the tensors, by name, with numbers in place of identities."""
        objects: dict[Any, int] = {}
        memory: dict[Any, int] = {}

        def number(numbers, key):
            return numbers.setdefault(key, len(numbers))

        def of(t, named=True):
            if t is None:
                return None
            values = None if t.is_meta else t.detach().double().cpu().tolist()
            pointer = None if t.is_meta else number(memory, t.untyped_storage().data_ptr())
            kind = "parameter" if isinstance(t, nn.Parameter) else "tensor"
            attributes = (t.dtype, t.requires_grad, t.is_leaf, kind, getattr(t, "note", None))
            return number(objects, id(t)) if named else None, pointer, self.where(t), attributes, str(values)

        rows: dict[str, Any] = {f"held {i}": (of(p), of(p.grad)) for i, p in enumerate(self.held)}
        for i, net in enumerate(self.models):
            for name, t in [*net.named_parameters(remove_duplicate=False), *net.named_buffers(remove_duplicate=False)]:
                rows[f"{i}.{name}"] = of(t), of(t.grad) if t.is_leaf else None
            rows[f"{i}.keys"] = [(k, of(v, named=False)) for k, v in net.state_dict().items()]
        if self.optimizer is not None:
            rows["optimizer"] = [number(objects, id(p)) for p in self.optimizer.param_groups[0]["params"]]
        return rows


def slot(net, name):
    home, _, leaf = name.rpartition(".")
    return net.get_submodule(home), leaf


def parameter(net, name):
    module, leaf = slot(net, name)
    return module._parameters.get(leaf)


def meets(bench, p, q):
    return p is not None and q is not None and not p.is_meta and not q.is_meta and p.shape == q.shape


class Program:
    """One function for each step; each takes the bench, the number of a model, and what was drawn for it."""

    def tie(bench: Any, i, name, other):
        module, leaf = slot(bench.models[i], name)
        module._parameters[leaf] = parameter(bench.models[i], other)

    def untie(bench: Any, i, name, other):
        module, leaf = slot(bench.models[i], name)
        if (p := parameter(bench.models[i], name)) is not None:
            setattr(module, leaf, nn.Parameter(mark(p.detach().clone(), bench.where(p))))

    def exchange(bench: Any, i, name, other):
        (one, leaf), (two, end) = slot(bench.models[i], name), slot(bench.models[1 - i], other)
        one._parameters[leaf], two._parameters[end] = two._parameters.get(end), one._parameters.get(leaf)

    def exchange_modules(bench: Any, i, name, other):
        net = bench.models[i]
        net.a, net.c.a = net.c.a, net.a

    def to_device(bench: Any, i, sub, device, dtype):
        bench.move(bench.models[i].get_submodule(sub), device)

    def to_both(bench: Any, i, sub, device, dtype):
        bench.move(bench.models[i].get_submodule(sub), device, dtype)

    def to_dtype(bench: Any, i, sub, device, dtype):
        bench.move(bench.models[i].get_submodule(sub), dtype=dtype)

    def to_half(bench: Any, i, sub, device, dtype):
        bench.models[i].get_submodule(sub).half()

    def to_empty(bench: Any, i, sub, device, dtype):
        bench.empty(bench.models[i].get_submodule(sub), device)

    def to_meta(bench: Any, i, sub, device, dtype):
        bench.models[i].get_submodule(sub).to("meta")

    def empty_meta(bench: Any, i, sub, device, dtype):
        bench.empty(bench.models[i].get_submodule(sub), "meta")

    def shared_memory(bench: Any, i, sub, device, dtype):
        there = bench.virtual
        bench.models[i].get_submodule(sub)._apply(
            lambda t: t if there and marked(t).startswith("cuda") else t.share_memory_()
        )

    def frozen(bench: Any, i, sub, device, dtype):
        bench.models[i].get_submodule(sub).requires_grad_(device == "cpu")

    def copied(bench: Any, i, flag, other):
        bench.models[1 - i] = copy.deepcopy(bench.models[i])
        Program.like(bench, i)

    def like(bench: Any, i):
        if bench.virtual:
            old = bench.named(bench.models[i])
            for name, t in bench.named(bench.models[1 - i]).items():
                if marked(t) is None:
                    mark(t, marked(old[name]))

    def pickled(bench: Any, i, flag, other):
        if flag:
            bench.models[1 - i] = pickle.loads(pickle.dumps(bench.models[i]))
        else:
            torch.save(bench.models[i], file := io.BytesIO())
            file.seek(0)
            bench.models[1 - i] = torch.load(file, weights_only=False)
        Program.like(bench, i)

    def loaded(bench: Any, i, assign, strict):
        found = bench.models[i].load_state_dict(bench.models[1 - i].state_dict(), assign=assign, strict=strict)
        return str(found)

    def written_through_state(bench: Any, i, flag, other):
        for t in bench.models[i].state_dict(keep_vars=flag).values():
            with torch.no_grad():
                t.add_(1)

    def future(bench: Any, i, overwrite, swap):
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
        torch.__future__.set_swap_module_params_on_conversion(swap)

    def backward(bench: Any, i, flag, other):
        for p in dict.fromkeys(bench.models[i].parameters()):
            if p.requires_grad and p.is_leaf and not p.is_meta:
                loss = (p * p).sum()
                loss.backward(retain_graph=flag)
                if flag:
                    bench.graphs.append(loss)

    def optimized(bench: Any, i, flag, other):
        bench.optimizer = torch.optim.SGD(bench.models[i].parameters(), 0.5, foreach=flag)

    def step(bench: Any, i, set_to_none, other):
        if bench.optimizer is not None:
            bench.optimizer.step()
            if other:
                bench.optimizer.zero_grad(set_to_none=set_to_none)

    def assigned(bench: Any, i, name, other):
        p, q = parameter(bench.models[i], name), parameter(bench.models[1 - i], other)
        if meets(bench, p, q) and p.grad is None:
            p.data = q.data

    def assigned_kind(bench: Any, i, name, other):
        p, q = parameter(bench.models[i], name), parameter(bench.models[1 - i], other)
        if p is not None and q is not None and p.is_meta != q.is_meta:
            p.data = q.data

    def swapped(bench: Any, i, name, other):
        p, q = parameter(bench.models[i], name), parameter(bench.models[1 - i], other)
        if p is not None and q is not None and p is not q:
            torch.utils.swap_tensors(p, q)

    def written(bench: Any, i, name, other):
        if (p := parameter(bench.models[i], name)) is not None:
            with torch.no_grad():
                p.add_(1)

    def noted(bench: Any, i, name, other):
        if (p := parameter(bench.models[i], name)) is not None:
            p.note = other
            bench.held.append(p)

    def hooked(bench: Any, i, name, other):
        p = parameter(bench.models[i], name)
        if p is not None and p.requires_grad:
            p.register_hook(double)

    def registered(bench: Any, i, name, other):
        module, _ = slot(bench.models[i], name)
        like = parameter(bench.models[i], other)
        data = None if like is None else nn.Parameter(mark(like.detach().clone(), bench.where(like)))
        module.register_parameter("extra", data)

    def deleted(bench: Any, i, name, other):
        module, leaf = slot(bench.models[i], name)
        delattr(module, leaf)

    def parametrized(bench: Any, i, name, other):
        module, leaf = slot(bench.models[i], name)
        if parametrize.is_parametrized(module):
            parametrize.remove_parametrizations(module, leaf, leave_parametrized=other == "p")
        else:
            parametrize.register_parametrization(module, leaf, Scale())


MODEL = st.integers(0, 1)
BY_NAME = ["tie", "untie", "exchange", "exchange_modules", "assigned", "assigned_kind", "swapped", "written", "noted",
           "hooked", "registered", "deleted", "parametrized"]  # fmt: skip
BY_MODULE = [
    "to_device",
    "to_both",
    "to_dtype",
    "to_half",
    "to_empty",
    "to_meta",
    "empty_meta",
    "shared_memory",
    "frozen",
]
BY_FLAGS = ["copied", "pickled", "loaded", "written_through_state", "future", "backward", "optimized", "step"]
STEPS = st.one_of(
    st.tuples(st.sampled_from(BY_NAME), MODEL, st.sampled_from(NAMES), st.sampled_from(NAMES)),
    st.tuples(
        st.sampled_from(BY_MODULE),
        MODEL,
        st.sampled_from(SUBMODULES),
        st.sampled_from(DEVICES),
        st.sampled_from(DTYPES),
    ),
    st.tuples(st.sampled_from(BY_FLAGS), MODEL, st.booleans(), st.booleans()),
)
PROGRAMS = st.lists(STEPS, min_size=1, max_size=12)


def run(program, virtual, start):
    try:
        bench = Bench(virtual, start)
        for step in program:
            bench.do(step)
        return bench.log
    finally:
        Program.future(None, 0, False, False)


def assert_as_in_torch(program):
    plain = {start: run(program, True, start) for start in ("cpu", "cuda:0")}
    with simulated_node(2):
        there, here = run(program, False, "cuda:0"), run(program, True, "cpu")
    for log, wanted in ((there, plain["cuda:0"]), (here, plain["cpu"])):
        for number, ((op, told, seen), (_, other, expected)) in enumerate(zip(log, wanted, strict=True)):
            assert told == other, f"step {number}, {op}"
            assert seen.keys() == expected.keys(), f"step {number}, {op}"
            for name, row in expected.items():
                assert seen[name] == row, f"step {number}, {op}: {name}"


fixed = settings(deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))


@pytest.mark.slow
@settings(fixed, max_examples=1000)
@given(PROGRAMS)
def test_a_thousand_programs_of_module_surgery_are_as_in_torch(program):
    assert_as_in_torch(program)
