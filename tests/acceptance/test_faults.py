"""Faults of hardware: a healthy node computes what is right, one with the fault does not, and nothing stays behind."""

from __future__ import annotations

import pytest
import torch

from mgpu_check.acceptance.faults import CHOICES, all_hardware_faults, hardware_planted, hardware_text, planted_from
from mgpu_check.devices.observations import Part
from mgpu_check.simulated import simulated_node

MIB = 1 << 20


@pytest.fixture(scope="module", autouse=True)
def _node():
    with simulated_node(4):
        yield


def integers(device, *shape, dtype=torch.float32):
    """Small whole numbers, whose sums and products are exact."""
    values = torch.arange(torch.Size(shape).numel()) * 7 % 5 - 2
    return values.reshape(shape).to(dtype).to(device)


def product(dtype=torch.float32, size=64, repeats=1):
    """Return whether products equal those of the host, which computes them by the same kernels."""

    def look(device):
        a = integers(device, size, size, dtype=dtype)
        wanted = a.cpu().double() @ a.cpu().double()
        return all(torch.equal((a @ a).cpu().double(), wanted) for _ in range(repeats))

    return look


def with_tf32(look):
    def inside(device):
        torch.set_float32_matmul_precision("high")
        try:
            return look(device)
        finally:
            torch.set_float32_matmul_precision("highest")

    return inside


def computed(function, *inputs, repeats=1):
    """Return whether an operator gives the same on the device as on the host."""

    def look(device):
        wanted = function(*inputs)
        return all(torch.equal(function(*(t.to(device) for t in inputs)).cpu(), wanted) for _ in range(repeats))

    return look


def not_repeating(device):
    drawn = torch.randn(64, device=device).cpu()
    return not torch.equal(drawn[:32], drawn[32:])


def memory(*patterns, repeats=1):
    """Return whether memory keeps the written data."""

    def look(device):
        held = torch.empty(14 * MIB, dtype=torch.uint8, device=device)
        for pattern in patterns:
            wanted = pattern(held.numel())
            held.copy_(wanted)
            for _ in range(repeats):
                if not torch.equal(held.cpu(), wanted):
                    return False
        return True

    return look


def constant(value):
    return lambda size: torch.full((size,), value, dtype=torch.uint8)


def address(size):
    return torch.arange(size, dtype=torch.int32).mul_(2654435761 - (1 << 32)).bitwise_right_shift_(24).to(torch.uint8)


def copied(size=4096, repeats=1, kernel=False, loaded=False, sources=("cuda:0",)):
    """Return whether copies to GPU 2 arrive."""

    def look(device):
        for _ in range(repeats):
            for source in ("cuda:1", *sources):
                wanted = torch.randint(1, 120, (size,), dtype=torch.uint8)
                here = wanted.to(source)
                if loaded:
                    torch.zeros(MIB, device="cuda:1").to("cuda:3")
                arrived = here.to("cuda:2", torch.int16).to(torch.uint8) if kernel else here.to("cuda:2")
                if not torch.equal(arrived.cpu(), wanted):
                    return False
                torch.cuda.synchronize(2)
                torch.cuda.synchronize(1)
        return True

    return look


def copied_word(word):
    sent = torch.full((512,), (word ^ 1 << 63) - (1 << 63))
    return lambda device: torch.equal(sent.to("cuda:0").to("cuda:2").cpu(), sent)


def far(device):
    held = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda:2")
    held[-4096:].copy_(torch.ones(4096, dtype=torch.uint8, device="cuda:0"))
    return int(held[-4096:].sum()) == 4096 and not held[:-4096].any()


def through_the_host(pinned, up):
    """Return whether uploads, or downloads, arrive."""

    def look(device):
        wanted = torch.randint(1, 120, (4096,), dtype=torch.uint8)
        if up:
            return torch.equal((wanted.pin_memory() if pinned else wanted).to(device).to("cuda:3").cpu(), wanted)
        target = torch.zeros(4096, dtype=torch.uint8, pin_memory=pinned)
        target.copy_(wanted.to("cuda:3").to(device))
        return torch.equal(target, wanted)

    return look


def seconds(device, body):
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    with torch.cuda.device(device):
        begin.record()
        body()
        end.record()
        end.synchronize()
    return begin.elapsed_time(end) / 1000


def fast(body, limit, dtype=torch.float32, source=None):
    def look(device):
        given = torch.zeros(MIB // 4, device=source or device, dtype=dtype)
        return seconds(given.device, lambda: body(given)) < limit

    return look


def sustained(device):
    a = torch.ones(512, 512, device=device)
    first = seconds(device, lambda: a @ a)
    for _ in range(30):
        a @ a
    return seconds(device, lambda: a @ a) < 1.3 * first


def alive(device):
    try:
        return torch.zeros(3, device=device).add(1).sum().item() == 3
    except torch.AcceleratorError as error:
        return "CUDA error: unknown error" not in str(error)


random = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) + 0.5
image = torch.arange(64.0).reshape(1, 1, 8, 8)
query = random.reshape(1, 4, 16, 64)

BITS = constant(0), constant(0xFF)
PIECES = integers("cpu", 8, 16), integers("cpu", 16, 8)

LOOKS = {
    **dict.fromkeys(("memory-stuck-at-zero", "memory-stuck-at-one", "memory-coupled"), memory(*BITS)),
    "memory-dead-row": memory(constant(0x55)),
    "memory-aliased": memory(*BITS, address),
    "memory-aliased-pages": memory(address),
    "memory-weak": memory(constant(0), repeats=8),
    "memory-leaks:seconds=0": memory(constant(255)),
    "product-dtype": product(torch.float16),
    "product-inner": computed(torch.mm, integers("cpu", 8, 256), integers("cpu", 256, 8)),
    "product-vector": computed(torch.mm, integers("cpu", 8, 16), integers("cpu", 16, 1)),
    "product-row": computed(torch.mm, integers("cpu", 1, 16), integers("cpu", 16, 8)),
    "product-transposed": computed(lambda a, b: a @ b.t().contiguous().t(), *PIECES),
    **dict.fromkeys(("product-lane", "product-tile"), product()),
    "product-nan": product(repeats=5),
    "product-tf32": with_tf32(product()),
    "product-hot:heat=0.0001": product(repeats=30),
    "product-rare:every=30": product(size=4, repeats=30),
    "product-seldom": product(size=4, repeats=50),
    "product-flutters": product(repeats=2),
    "convolution": computed(lambda x: torch.nn.functional.conv2d(x, torch.ones_like(x)), image),
    "attention": computed(torch.nn.functional.scaled_dot_product_attention, query, query, query),
    "reduction": computed(torch.sum, image),
    "functions": computed(torch.exp, random),
    "sorting": computed(lambda x: torch.sort(x).values, random),
    "elementwise": computed(lambda x: x + x, random, repeats=3),
    "random-repeats": not_repeating,
    **dict.fromkeys(
        [
            f"copy-{name}"
            for name in ["zeros", "stale", "of-another-peer", "offset", "tail", "by-engine", "lanes", "out"]
        ],
        copied(),
    ),
    "copy-of-zeros": copied_word(0),
    "copy-of-ones": copied_word((1 << 64) - 1),
    "copy-of-signs": copied_word(0x80000000_80000000),
    "copy-large": copied(3 * MIB),
    "copy-by-kernel": copied(kernel=True),
    "copy-under-load": copied(loaded=True),
    "copy-seldom": copied(repeats=20),
    "copy-stale-seldom": copied(repeats=50),
    "copy-stale-rare:every=60": copied(repeats=60),
    "copy-wraps": far,
    "copies-dropped": copied(),
    "upload-truncated": through_the_host(False, up=True),
    **dict.fromkeys(
        ("upload-seldom:every=1", "upload-pinned", "upload-under-load:load=0"), through_the_host(True, up=True)
    ),
    **dict.fromkeys(("download-seldom:every=1", "download-truncated"), through_the_host(True, up=False)),
    "download-pageable": through_the_host(False, up=False),
    "slow-gpu": fast(torch.exp, 6e-6),
    "slow-when-hot:heat=0.0001": sustained,
    "stalls-gpu:every=2": fast(lambda given: given[:1].add(1).add(1), 6e-5),
    "stalls-link:every=1": fast(lambda given: given.to("cuda:2"), 2e-5, source="cuda:0"),
    "slow-dtype": fast(torch.exp, 1e-5, torch.float16),
    "slow-unit": fast(torch.sort, 1e-5),
    "slow-launches": fast(lambda given: given[:1].add(1), 6e-6),
    "slow-way": fast(lambda given: torch.zeros(MIB // 4).to(given.device), 1e-4),
    "slow-pageable": fast(lambda given: given.cpu(), 1e-4),
    "slow-peer-kernel": fast(lambda given: given.to("cuda:2", torch.float16), 3e-5, source="cuda:0"),
    "slow-small-copies": fast(lambda given: given[:16].to("cuda:2"), 1e-5, source="cuda:0"),
    "slow-port": fast(lambda given: given.to("cuda:2"), 1.5e-5),
    "slow-link": fast(lambda given: given.to("cuda:2"), 2e-5, source="cuda:0"),
    "slow-host-link": fast(lambda given: given.cpu(), 1e-4),
    "lost": alive,
}
"""Fault -> the function that finds whether the hardware of device 1, or copies to device 2, are right."""


@pytest.mark.parametrize("text", LOOKS)
def test_what_is_right_on_a_healthy_node_is_wrong_with_the_fault(text):
    with hardware_planted(hardware_text([])):
        assert LOOKS[text]("cuda:1")
    with hardware_planted(hardware_text([planted_from(text)])):
        assert not LOOKS[text]("cuda:1")
    assert torch.zeros(3, device="cuda:1").add(1).sum() == 3


def test_each_fault_has_been_seen_to_make_something_wrong():
    on_ranks = {"hangs"} | {
        name
        for name, fault in all_hardware_faults().items()
        if fault.caught_by == ("collectives",) or "operation" in fault.defaults or name == "stalls-collective"
    }
    shown = {text.partition(":")[0] for text in LOOKS} | on_ranks
    silent = {
        name
        for name, fault in all_hardware_faults().items()
        if not fault.telemetry(fault.defaults) and not fault.of_host
    }
    assert silent == shown
    assert len(shown) >= 30


def test_faults_say_what_must_be_accused_and_by_which_check():
    for name, fault in all_hardware_faults().items():
        assert name == fault.name == name.lower() and "_" not in name
        assert fault.summary and not fault.summary.endswith(".")
        assert fault.caught_by and fault.level in ("quick", "standard", "long")
        assert fault.parts(fault.defaults)
        assert planted_from(planted_from(name).text) == planted_from(name)


def test_what_a_user_plants_is_read_with_its_parameters():
    found = planted_from("copy-large:device=3,peer=1,above=100")
    assert (found.parameters["above"], found.parts) == (100, (Part("link", (3, 1)),))
    for text, said in (
        ("copy-large:size=3", "'size=3' is not one of its parameters; choose from device, peer, above"),
        ("copy-by-kernel:path=air", "path='air' is unknown; choose from any, engine, kernel"),
        ("copy-large:device=two", "device='two' is not a number; its default is 0"),
        ("rust", r"'rust' is not a hardware fault; .*mgpu-check accept --plant=list lists all \d+"),
        ("copy-zero", "'copy-zero' is not a hardware fault; did you mean copy-zeros"),
    ):
        with pytest.raises(ValueError, match=said):
            planted_from(text)


def test_words_that_parameters_can_be_are_those_that_defects_know():
    assert all(isinstance(getattr(torch, name), torch.dtype) for name in CHOICES["dtype"] if name != "any")
    for name, fault in all_hardware_faults().items():
        for key, value in fault.defaults.items():
            assert not isinstance(value, str) or value in CHOICES[key], (name, key)
