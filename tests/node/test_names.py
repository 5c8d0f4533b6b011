"""Every name that torch has for CUDA is simulated or refused: none reaches a real driver, whatever the build of torch."""

from __future__ import annotations

import inspect
import types

import pytest
import torch
import torch.cuda.nccl
import torch.cuda.tunable

from mgpu_check.node.simulated import autocast, native, runtime, simulated_node

# What a build with CUDA says without a driver, and one without CUDA, where a call has gone past the simulation.
BEYOND = ("driver", "not compiled with CUDA", "Torch not compiled", "has no attribute '_", "CUDA backend")


def test_each_name_of_the_c_module_is_known():
    """A name that a new version of torch has must be decided on: simulated, refused, or known to ask no driver."""
    simulated = set(native.simulated_names()) | runtime.native_names()
    known = simulated | native.REFUSED | native.HARMLESS
    there = {name for name in dir(torch._C) if native.concerns_devices(name)}
    assert there - known == set()
    assert simulated.isdisjoint(native.REFUSED | native.HARMLESS) and native.REFUSED.isdisjoint(native.HARMLESS)


def test_each_of_them_is_replaced_unless_it_is_harmless():
    before = {name: getattr(torch._C, name) for name in dir(torch._C) if native.concerns_devices(name)}
    with simulated_node(2):
        kept = {name for name, value in before.items() if getattr(torch._C, name) is value}
        assert {n for n in kept if callable(before[n])} <= native.HARMLESS
        for name in native.REFUSED & before.keys():
            with pytest.raises(RuntimeError, match=rf"torch\._C\.{name} is not available on a simulated node"):
                getattr(torch._C, name)()
    assert all(getattr(torch._C, name) is value for name, value in before.items())


def test_a_name_that_nobody_knows_is_refused(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_frobnicate", lambda: 1, raising=False)
    with simulated_node(1), pytest.raises(RuntimeError, match="_cuda_frobnicate is not available on a simulated node"):
        torch._C._cuda_frobnicate()
    assert torch._C._cuda_frobnicate() == 1


ARGUMENTS = {
    "Event": (),
    "ExternalStream": (17,),
    "FloatTensor": (2,),
    "caching_allocator_delete": None,  # of an address that was allocated: below
    "can_device_access_peer": (0, 1),
    "cast": None,  # of typing
    "check_error": (0,),
    "device": (0,),
    "device_of": (torch.ones(1),),
    "from_ipc_handle": None,
    "get_stream_from_external": (17, 0),
    "manual_seed": (1,),
    "manual_seed_all": (1,),
    "mark": ("a",),
    "range": ("a",),
    "range_end": (1,),
    "range_push": ("a",),
    "range_start": ("a",),
    "set_device": (0,),
    "set_per_process_memory_fraction": (0.5,),
    "set_rng_state": None,  # takes what get_rng_state gives
    "set_rng_state_all": None,
    "set_stream": (None,),
    "set_sync_debug_mode": (0,),
    "stream": (None,),
    "StreamContext": (None,),
    "caching_allocator_alloc": (256,),
    "caching_allocator_enable": (True,),
}
MODULES = (
    "cuda",
    "cuda.memory",
    "cuda.random",
    "cuda.streams",
    "cuda.nvtx",
    "cuda.nccl",
    "cuda.profiler",
    "cuda.tunable",
)
UNHARMED = {"cuda.tunable": {"read_file", "write_file", "tune_gemm_in_file", "mgpu_tune_gemm_in_file"}}


def public(name: str) -> dict[str, object]:
    module = torch
    for part in name.split("."):
        module = getattr(module, part)
    names = [n for n in getattr(module, "__all__", dir(module)) if not n.startswith("_")]
    return {n: getattr(module, n) for n in names if n not in UNHARMED.get(name, ())}


def needs_nothing(function: object) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    return all(p.default is not p.empty or p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters)


@pytest.mark.filterwarnings("ignore")  # many of them are deprecated
def test_each_public_function_answers_or_is_refused_by_name(capsys):
    called, beyond = [], []
    with simulated_node(2):
        for module in MODULES:
            for name, value in public(module).items():
                given = ARGUMENTS.get(name, () if needs_nothing(value) else None)
                if given is None or isinstance(value, types.ModuleType) or not callable(value):
                    continue
                called.append(name)
                try:
                    value(*given)
                except Exception as error:
                    if any(word in str(error) for word in BEYOND):
                        beyond.append(f"torch.{module}.{name}: {type(error).__name__}: {error}")
        torch.cuda.caching_allocator_delete(torch.cuda.caching_allocator_alloc(256))
    assert beyond == []
    assert len(called) > 120


def test_refused_parts_of_cuda_are_named():
    with simulated_node(1):
        assert isinstance(torch.cuda.CUDAGraph, type) and isinstance(torch.cuda.graph, type)
        for name in ("CUDAGraph", "graph", "MemPool", "CUDAPluggableAllocator", "make_graphed_callables"):
            with pytest.raises(RuntimeError, match=rf"torch\.cuda\.{name} is not available on a simulated node"):
                getattr(torch.cuda, name)()


def test_libraries_say_what_they_are():
    with simulated_node(2):
        assert torch.backends.cuda.is_built() and torch.version.cuda
        assert torch.backends.cudnn.is_available() and torch.backends.cudnn.version() > 90000
        assert torch.backends.cudnn.is_acceptable(torch.ones(1, device="cuda:1"))
        assert not torch.backends.cudnn.is_acceptable(torch.ones(1))
        with torch.backends.cudnn.flags(enabled=False):
            assert not torch.backends.cudnn.is_acceptable(torch.ones(1, device="cuda:1"))
        assert torch.cuda.nccl.version() >= (2, 10)
        assert torch.cuda.get_allocator_backend() == "native"
        assert torch.backends.cuda.cufft_plan_cache[1].max_size > 0
        with torch.cuda.nvtx.range("step"):
            assert torch.cuda.nvtx.range_push("inner") == 1
    if not torch.backends.cuda.is_built():
        assert torch.version.cuda is None and torch.backends.cudnn.version() is None


def test_nccl_of_one_process_combines_its_devices():
    with simulated_node(2):
        inputs = [torch.full((2,), i + 1.0, device=f"cuda:{i}") for i in range(2)]
        torch.cuda.nccl.all_reduce(inputs)
        assert [t.tolist() for t in inputs] == [[3, 3], [3, 3]]
        outputs = [torch.zeros(4, device=f"cuda:{i}") for i in range(2)]
        torch.cuda.nccl.all_gather(inputs, outputs)
        assert outputs[1].tolist() == [3, 3, 3, 3]
        torch.cuda.nccl.reduce_scatter(outputs, inputs)
        assert inputs[0].tolist() == [6, 6]
        torch.cuda.nccl.reduce(inputs, output=(first := torch.zeros(2, device="cuda:0")), root=0)
        assert first.tolist() == [12, 12]
        torch.cuda.nccl.broadcast([first, inputs[1]])
        assert inputs[1].tolist() == [12, 12]
        with pytest.raises(RuntimeError, match="inputs must be on unique devices"):
            torch.cuda.nccl.all_reduce([first, first.clone()])


def test_each_operator_that_autocast_has_for_cuda_is_known():
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    assert {name.removeprefix("aten::") for name in registered} - autocast.KNOWN == set()


def test_autocast_normalizes_in_float32_and_leaves_alone_what_it_does_not_register():
    with simulated_node(1), torch.autocast("cuda", dtype=torch.bfloat16):
        x = torch.ones(2, 4, dtype=torch.bfloat16, device="cuda")
        assert torch.nn.functional.rms_norm(x, (4,)).dtype is torch.float32
        assert (
            torch.nn.functional.conv1d(x[None], torch.ones(2, 2, 3, device="cuda"), padding="same").dtype
            is torch.bfloat16
        )
        assert torch.cat([x, x.float()]).dtype is torch.float32
