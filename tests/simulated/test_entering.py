"""Entering and leaving: what may be asked for, and that leaving puts all of torch back."""

from __future__ import annotations

import io
import sys
import types

import pytest
import torch
import torch.cuda.comm
import torch.distributed.tensor
import torch.nn.parallel

from mgpu_check.simulated import prepare, simulated_device_count, simulated_node, to_real


@pytest.mark.parametrize("n", [0, -1, 1.5, "2", True])
def test_the_number_of_devices_is_checked(n):
    with pytest.raises(ValueError, match="it must be an int of at least 1"), simulated_node(n):
        pass


@pytest.mark.parametrize("backing", ["cuda:99", "gpu", "", "meta"])
def test_the_backing_is_checked(backing):
    with pytest.raises(ValueError, match="it must be one of: cpu"), simulated_node(2, backing=backing):
        pass


def namespaces() -> dict[tuple[str, ...], object]:
    """Every attribute of every module of torch, and of every class that one of them holds."""
    found: dict[tuple[str, ...], object] = {}
    for name, module in list(sys.modules.items()):
        if not isinstance(module, types.ModuleType) or name.partition(".")[0] != "torch":
            continue
        for key, value in list(vars(module).items()):
            found[name, key] = value
            if issubclass(type(value), type):  # isinstance() would wake the deprecated names of torch.distributed
                for attribute, held in list(vars(value).items()):
                    found[name, key, attribute] = held
    return found


# Caches of Python itself: copyreg's of what a class pickles, and the registry of warnings that were shown.
CACHES = {"__slotnames__", "__warningregistry__"}


def use_it() -> None:
    x = torch.randn(2, 2, device="cuda:1", requires_grad=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        torch.nn.Linear(2, 2).to(1)(x).sum().backward()
    torch.nn.DataParallel(torch.nn.Linear(2, 2).cuda())(torch.ones(3, 2))
    torch.cuda.manual_seed_all(1)


def test_leaving_puts_everything_back():
    """After an error, too."""
    with simulated_node(2):
        use_it()  # what torch imports late is there before the comparison
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    seed = torch.initial_seed()
    before = namespaces()
    with pytest.raises(ZeroDivisionError), simulated_node(3):
        use_it()
        inside = namespaces()
        _ = 1 / 0
    after = namespaces()
    assert sum(inside.get(key) is not value for key, value in before.items()) > 100
    changed = [key for key, value in before.items() if after.get(key, namespaces) is not value]
    added = [key for key in after if key not in before and key[-1] not in CACHES]
    assert (changed, added) == ([], [])
    assert torch.__future__.get_swap_module_params_on_conversion() is swaps
    assert torch.initial_seed() == seed
    assert not torch.is_autocast_enabled("cpu")
    assert simulated_device_count() is None


def test_names_bound_before_and_inside_follow():
    module = types.ModuleType("a_users_module")
    exec("from torch import randn, device", module.__dict__)
    sys.modules[module.__name__] = module
    try:
        with simulated_node(2):
            assert module.randn(2, device="cuda:1").device == torch.device("cuda:1")
            exec("from torch import zeros", module.__dict__)
            assert module.device(1) == torch.device("cuda:1")
        assert module.randn is torch.randn and module.zeros is torch.zeros and module.device is torch.device
    finally:
        del sys.modules[module.__name__]


def test_what_is_left_over_keeps_its_values():
    with simulated_node(2):
        left = torch.arange(3.0, device="cuda:1")
    assert to_real(left).tolist() == [0, 1, 2]
    assert not torch.cuda.is_available() or torch.cuda.device_count() > 0


def test_the_device_type_stays_itself_for_others():
    real = torch.device
    with simulated_node(2):
        assert isinstance(real("cpu"), torch.device)
        assert torch.device == real and hash(torch.device) == hash(real)
        assert torch.device("cuda", 1) == real("cuda", 1)


def test_a_checkpoint_names_its_device_to_who_reads_it_without_a_node():
    file = io.BytesIO()
    with simulated_node(4):
        torch.save(torch.arange(3.0, device="cuda:3"), file)
    file.seek(0)
    assert torch.load(file, map_location="cpu").tolist() == [0, 1, 2]
    file.seek(0)
    with pytest.raises(RuntimeError, match="Attempting to deserialize object on a CUDA device"):
        torch.load(file)


@pytest.mark.parametrize("size", [1, 3])
def test_a_node_that_was_prepared_is_taken_over_by_the_first_that_enters(size):
    """As ranks do, of the process that they are forked from: all that is done once is done there."""
    before = vars(torch.cuda).copy(), vars(torch.Tensor).copy(), vars(torch).copy()
    prepare()
    patched = torch.empty
    with simulated_node(size):
        assert torch.empty is patched and torch.cuda.device_count() == simulated_device_count() == size
        assert not torch.cuda.is_initialized() and torch.cuda.memory_allocated(size - 1) == 0
        assert torch.ones(2, device=f"cuda:{size - 1}").sum().item() == 2
        assert torch.cuda.is_initialized() and len(torch.cuda.default_generators) == size
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            torch.ones(2, device=f"cuda:{size}")
        with pytest.raises(RuntimeError, match="active in this process already"), simulated_node(1):
            pass
    assert before == (vars(torch.cuda).copy(), vars(torch.Tensor).copy(), vars(torch).copy())
    with simulated_node(2):
        assert torch.cuda.device_count() == 2
