"""Every name that torch has for CUDA is simulated or refused: none reaches a real driver, with any build of
torch."""

from __future__ import annotations

import inspect
import types
from typing import Any

import pytest
import torch
import torch.cuda.nccl
import torch.cuda.tunable
from torch.nn.parallel import comm

from mgpu_check.simulated import simulated_node
from mgpu_check.simulated.cuda import runtime
from mgpu_check.simulated.operators import autograd

# Messages of a CUDA build without a driver, and of a CPU build, if a call has gone past the simulation.
BEYOND = ("driver", "not compiled with CUDA", "Torch not compiled", "has no attribute '_", "CUDA backend")


def test_each_name_of_the_c_module_is_known():
    """A name that a new version of torch has must be decided on: simulated, refused, or known to ask no driver."""
    of_runtime = {*runtime._accelerator_functions(), *runtime._native_functions()}
    simulated = set(runtime.simulated_names()) | of_runtime
    known = simulated | runtime.REFUSED | runtime.HARMLESS
    there = {name for name in dir(torch._C) if runtime.concerns_devices(name)}
    assert there - known == set()
    assert simulated.isdisjoint(runtime.REFUSED | runtime.HARMLESS) and runtime.REFUSED.isdisjoint(runtime.HARMLESS)


def test_each_of_them_is_replaced_unless_it_is_harmless():
    before = {name: getattr(torch._C, name) for name in dir(torch._C) if runtime.concerns_devices(name)}
    with simulated_node(2):
        kept = {name for name, value in before.items() if getattr(torch._C, name) is value}
        assert {n for n in kept if callable(before[n])} <= runtime.HARMLESS
        for name in runtime.REFUSED & before.keys():
            with pytest.raises(RuntimeError, match=rf"torch\._C\.{name} is not available on a simulated node"):
                getattr(torch._C, name)()
    assert all(getattr(torch._C, name) is value for name, value in before.items())


def test_a_name_that_nobody_knows_is_refused(monkeypatch):
    monkeypatch.setattr(torch._C, "_cuda_frobnicate", lambda: 1, raising=False)
    of_torch: Any = torch._C
    with simulated_node(1), pytest.raises(RuntimeError, match="_cuda_frobnicate is not available on a simulated node"):
        of_torch._cuda_frobnicate()
    assert of_torch._cuda_frobnicate() == 1


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


def needs_nothing(function: Any) -> bool:
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
        for name in ("MemPool", "CUDAPluggableAllocator", "GreenContext"):
            with pytest.raises(RuntimeError, match=rf"torch\.cuda\.{name} is not available on a simulated node"):
                getattr(torch.cuda, name)()


def test_nccl_of_one_process_has_no_type_for_some_dtypes():
    with simulated_node(2):
        words = [torch.ones(2, dtype=torch.int16, device=f"cuda:{i}") for i in range(2)]
        refused = pytest.raises(RuntimeError, match="Unconvertible NCCL type Short")
        for call in (
            lambda: comm.reduce_add(words),
            lambda: comm.broadcast(words[0], [0, 1]),
            lambda: comm.broadcast(words[0], out=words[1:]),
            lambda: comm.broadcast_coalesced(words[:1], [0, 1]),
        ):
            with refused:
                call()
        with pytest.raises(RuntimeError, match="Unconvertible NCCL type ComplexFloat"):
            comm.reduce_add([word.to(torch.complex64) for word in words])
        # Complex numbers are broadcast as pairs of real ones; and what NCCL cannot take at all is copied.
        assert comm.broadcast(words[0].to(torch.complex64), [0, 1])[1].device == words[1].device
        assert comm.broadcast(words[0], out=words)[1].tolist() == [1, 1]
        assert comm.broadcast(words[0].expand(2, 2).t(), [0, 1])[1].tolist() == [[1, 1], [1, 1]]
        assert comm.reduce_add(words[:1]) is words[0]


def test_each_operator_that_autocast_has_for_cuda_is_known():
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    assert {name.removeprefix("aten::") for name in registered} - autograd.KNOWN == set()


def test_autocast_normalizes_in_float32_and_leaves_alone_what_it_does_not_register():
    with simulated_node(1), torch.autocast("cuda", dtype=torch.bfloat16):
        x = torch.ones(2, 4, dtype=torch.bfloat16, device="cuda")
        registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
        wide = torch.float32 if "aten::rms_norm" in registered else torch.bfloat16  # not yet in torch 2.11
        assert torch.nn.functional.rms_norm(x, (4,)).dtype is wide
        assert (
            torch.nn.functional.conv1d(x[None], torch.ones(2, 2, 3, device="cuda"), padding="same").dtype
            is torch.bfloat16
        )
        assert torch.cat([x, x.float()]).dtype is torch.float32
