"""The samples of a step: the call of a model and the tensors that show them."""

from __future__ import annotations

import pytest
import torch

from mgpu_check.compare.alignment import Aligned, with_common_samples
from mgpu_check.compare.in_script.perturbations import Perturbation
from mgpu_check.compare.in_script.summaries import digests
from mgpu_check.compare.trace import Inputs, Step, Trace, divided_tensors, samples_of
from tests.compare.conftest import script

SIMULATED = ("--gpus=2", "--simulate", "--steps=1")


@pytest.mark.slow
@pytest.mark.parametrize("words", [("fsdp",), (("masked",))])
def test_one_device_calls_an_inner_module_and_the_ranks_a_wrapper(compare, words):
    """And with one sample on each rank, a mask or a table of positions looks like a sample."""
    outcome = compare(script("wrapped_step"), *SIMULATED, code=0, arguments=words)
    assert "equal: 1 steps on 2 ranks train the same 6 parameters" in outcome.text


@pytest.mark.slow  # beside the sum in place of a mean of `test_scripts.py`, and the choice of the common call below
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("masked", "sum"), 1, "looks like world-size-factor"),
        (("other",), 2, "0 of them are among the 2 samples of one device"),
    ],
)
def test_samples_decide_as_before(compare, words, code, said):
    assert said in compare(script("wrapped_step"), *SIMULATED, code=code, arguments=words).text


def test_a_tensor_with_as_many_rows_everywhere_is_not_divided():
    mask, positions = [7], [1, 2, 3, 4, 5, 6]
    one, ranks = [[10, 11], [20, 21]], [[[10], [20]], [[11], [21]]]
    for own in (mask, positions, []):
        assert divided_tensors([[own, *one], *([own, *rank] for rank in ranks)]) == [1, 2]
    assert divided_tensors([[*one, mask], *([*rank, mask] for rank in ranks)]) == [0, 1]
    assert divided_tensors([[mask, *one], [mask, *one]]) == [1, 2]  # the whole batch on each rank
    assert divided_tensors([[mask, [10]], [mask, [10]]]) == [0, 1]
    assert divided_tensors([one, ranks[0][:1]]) is None  # other calls have other tensors
    assert divided_tensors([[[]], [[]]]) is None


def test_a_sample_consists_of_its_rows_in_all_divided_tensors():
    assert samples_of([[10, 11], [20, 21]], [0, 1]) == [10 + 3 * 20, 11 + 3 * 21]
    assert samples_of([[7], [10, 11]]) == [7]
    assert samples_of([[], [10, 11]]) == [10, 11]
    assert samples_of([[2**62, 5], [2**62, 0]]) == [0, 5]  # modulo 2^64


def step(*chains: list[Inputs]) -> Step:
    return Step(0, [], [samples_of(calls[0].rows) for calls in chains], [[]] * len(chains), {}, {}, {}, inputs=chains)


def traced(rank: int, world: int, *chains: list[Inputs]) -> Trace:
    return Trace(rank, world, steps=[step(*chains)])


def test_the_outermost_common_call_decides():
    net = [Inputs("Net", [[1, 2, 3, 4]], [[]]), Inputs("Linear", [[5, 6, 7, 8]], [[]])]
    ranks = []
    for rank, (a, b) in enumerate(((1, 2), (3, 4))):
        wrapper = Inputs("Lit", [[a, b], [10 + a, 10 + b]], [[], []])
        ranks.append(traced(rank, 2, [wrapper, Inputs("Net", [[a, b]], [[]]), Inputs("Linear", [[0, 0]], [[]])]))
    aligned = Aligned(traced(0, 1, net), ranks)
    assert aligned.samples(0).same and aligned.samples(0).reference.total() == 4


def test_without_a_common_call_the_first_ones_count():
    traces = [traced(0, 1, [Inputs("Net", [[1, 2]], [[]])]), traced(0, 1, [Inputs("Other", [[1, 2]], [[]])])]
    assert with_common_samples(traces) == traces


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.int64, torch.bool, torch.bfloat16, torch.complex64, torch.uint8]
)
def test_a_sample_has_the_same_digest_in_every_batch(dtype):
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(0, 2, (12, 3, 40), generator=generator).to(dtype)
    labels = torch.arange(12)

    def samples(*tensors: torch.Tensor) -> list[int]:
        return samples_of([digests(tensor) for tensor in tensors])

    whole = samples(x, labels)
    assert len(set(whole)) == 12
    assert samples(x[3::4], labels[3::4]) == whole[3::4]
    assert samples(x.flip(0), labels) != whole[::-1]  # the label belongs to it
    assert samples(x.transpose(1, 2).contiguous().transpose(1, 2), labels) == whole


def test_digests_draw_no_random_numbers():
    state = torch.get_rng_state()
    digests(torch.ones(3, 5000))
    Perturbation(1).output(torch.ones(4))
    assert torch.equal(state, torch.get_rng_state())
