"""Random numbers of simulated devices: each has a generator of its own, for every function and computing device."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from mgpu_check import simulated_node

BACKING = os.environ.get("TEST_SIMULATED_BACKING", "cpu")
"""Another run of these tests gives a real device here."""

DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: functional.dropout(x, 0.5),
    "alpha_dropout": lambda x: functional.alpha_dropout(x, 0.5, training=True),
    "native_dropout": lambda x: torch.native_dropout(x, 0.5, True)[0],
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "randint_like": lambda x: torch.randint_like(x, 5),
    "randn": lambda x: torch.randn(8, device=x.device),
    "randperm": lambda x: torch.randperm(8, device=x.device),
    "normal_": lambda x: x.normal_(),
    "exponential_": lambda x: x.exponential_(),
    "bernoulli": lambda x: torch.bernoulli(x / 2),
    "poisson": torch.poisson,
    "gumbel_softmax": functional.gumbel_softmax,
    "attention": lambda x: functional.scaled_dot_product_attention(
        *(x[None, None], x[None, None], x[None, None]), dropout_p=0.5
    ),
    "backward of attention": lambda x: attention_backward(x),
    **(
        {"multinomial": lambda x: torch.multinomial(x, 2)} if BACKING == "cpu" else {}
    ),  # it asserts on what it computed
    "a module": lambda x: torch.nn.TransformerEncoderLayer(8, 2, 16, device=x.device)(x[None]),
}


def attention_backward(x):
    q = x[None, None].clone().requires_grad_()
    functional.scaled_dot_product_attention(q, q, q, dropout_p=0.5).sum().backward()
    return q.grad


@pytest.fixture
def node():
    if BACKING != "cpu":
        torch.cuda.init()
        torch.backends.cuda.enable_cudnn_sdp(False)  # there is nothing behind it
    with simulated_node(4, BACKING):
        yield


def states():
    return [torch.get_rng_state(), *torch.cuda.get_rng_state_all()]


@pytest.mark.filterwarnings("ignore:Attempting to run cu", "ignore:gemm")
@pytest.mark.parametrize("what", DRAWS)
def test_draws_advance_the_generator_of_their_device(node, what):
    x = torch.ones(8, 8, device="cuda:2")
    before = states()
    assert DRAWS[what](x).device == x.device
    changed = [index - 1 for index, (a, b) in enumerate(zip(before, states(), strict=True)) if not torch.equal(a, b)]
    assert changed == [2], "generators that went on (-1: the CPU's)"


def test_what_is_seeded_alike_draws_alike_on_every_device(node):
    def draw(index):
        x = functional.dropout(torch.ones(64, device=f"cuda:{index}"), 0.5)
        return x.tolist(), torch.cuda.get_rng_state(index).tolist()

    torch.cuda.manual_seed_all(5)
    one = draw(1)
    assert draw(3) == one
    torch.cuda.set_rng_state_all([torch.cuda.get_rng_state(1)] * 4)
    assert draw(1)[1] == draw(2)[1] != one[1]


def test_checkpointed_modules_draw_again_what_they_drew(node):
    torch.cuda.manual_seed_all(7)
    for reentrant in (True, False):
        x = torch.ones(64, device="cuda:1", requires_grad=True)
        with torch.cuda.device(1):
            out = checkpoint(lambda t: functional.dropout(t, 0.5), x, use_reentrant=reentrant)
        torch.rand(3, device="cuda:1")
        out.sum().backward()
        assert torch.equal(x.grad, out.detach()) or BACKING != "cpu"


def test_generators_of_ones_own_draw_on_their_device(node):
    generator = torch.Generator(device="cuda:1").manual_seed(1)
    x = torch.ones(4, 4, device="cuda:1")
    before = states()
    for draw in (
        lambda: torch.empty_like(x).normal_(generator=generator),
        lambda: torch.bernoulli(x / 2, generator=generator),
        lambda: torch.rand_like(x, generator=generator),
        lambda: torch.nn.init.kaiming_uniform_(x.clone(), generator=generator),
        lambda: torch.randn(3, device="cuda:1", generator=generator),
    ):
        kept = generator.get_state()
        one = draw()
        assert not torch.equal(kept, generator.get_state())
        copy = generator.clone_state()
        assert copy.device == generator.device and torch.equal(copy.get_state(), generator.get_state())
        generator.set_state(kept)
        again = draw()
        assert torch.equal(copy.get_state(), generator.get_state())
        assert torch.equal(one, again) or BACKING != "cpu"  # where a stand-in computes, nothing is
    assert all(torch.equal(a, b) for a, b in zip(before, states(), strict=True))
    with pytest.raises(RuntimeError, match="Expected a 'cuda' device type for generator but found 'cpu'"):
        x.normal_(generator=torch.Generator())


def test_leaving_gives_the_backing_device_its_generator_back():
    if BACKING != "cpu":
        torch.cuda.init()
    real = torch.get_rng_state if BACKING == "cpu" else torch.cuda.get_rng_state
    before = real()
    with simulated_node(2, BACKING):
        functional.dropout(torch.ones(8, device="cuda:1"), 0.5)
        torch.randn(3, device="cuda")
    assert torch.equal(before, real())


def test_generators_have_a_seed_and_an_offset_as_philox_has(node):
    generator = torch.Generator("cuda:1").manual_seed(2**63 + 5)
    assert generator.get_state().tolist() == [5, *[0] * 6, 128, *[0] * 8]
    for offset in (0, 4, 8):
        assert generator.get_offset() == offset
        torch.rand(5, device="cuda:1", generator=generator)
    generator.set_state(torch.tensor([5, *[0] * 6, 128], dtype=torch.uint8))  # a state without an offset
    assert generator.initial_seed() == 2**63 + 5 and generator.get_offset() == 0
    torch.empty(0, device="cuda:1").normal_(generator=generator)
    functional.dropout(torch.ones(8, device="cuda:1"), 0.0)
    assert generator.get_offset() == torch.cuda.default_generators[1].get_offset() == 0  # type: ignore[misc]  # its type says one
    torch.empty(100_000, device="cuda:1").normal_(generator=generator)
    assert generator.get_offset() == 52, "each thread draws several times"
    with pytest.raises(RuntimeError, match="offset must be a multiple of 4"):
        generator.set_offset(3)
    with pytest.raises(RuntimeError, match="RNG state is wrong size"):
        generator.set_state(torch.get_rng_state())
    with pytest.raises(TypeError, match=r"RNG state must be a torch\.ByteTensor"):
        generator.set_state(torch.zeros(16))


def test_random_numbers_depend_on_the_offset(node):
    generator = torch.Generator("cuda:1").manual_seed(2**63 + 5)
    draws = [torch.rand(5, device="cuda:1", generator=generator).tolist() for _ in range(3)]
    assert len({tuple(draw) for draw in draws}) == 3
    generator.set_offset(4)
    assert torch.rand(5, device="cuda:1", generator=generator).tolist() == draws[1]


def test_generators_share_a_state_by_the_safe_getter_and_not_by_a_clone(node):
    one = torch.Generator("cuda").manual_seed(1)
    shared, apart, other = one.graphsafe_get_state(), one.clone_state(), torch.Generator("cuda")
    torch.rand(3, device="cuda", generator=one)
    assert (shared.get_offset(), apart.get_offset()) == (4, 0)
    other.graphsafe_set_state(apart)
    assert (
        torch.rand(3, device="cuda", generator=other).tolist()
        == torch.rand(3, device="cuda", generator=torch.Generator("cuda").manual_seed(1)).tolist()
    )
    assert apart.get_offset() == 4
    with pytest.raises(RuntimeError, match="Expected a CUDA Generator"):
        one.graphsafe_set_state(torch.Generator())
