"""`mgpu-check compare` on whole scripts: right ones, and copies with one mistake each."""

from __future__ import annotations

import re

import pytest

from tests.compare.conftest import script
from tests.docs.pages import DOCS, blocks

SIMULATED = ("--gpus=2", "--simulate")
AVERAGE = """\
    if world > 1:
        for p in net.parameters():
            dist.all_reduce(p.grad)
            p.grad /= world
"""
CLIP = "    nn.utils.clip_grad_norm_(net.parameters(), 0.5)\n"


def test_the_tutorial_is_equal(compare, tutorial):
    outcome = compare(tutorial, *SIMULATED, code=0)
    assert outcome.json["verdict"] == "equal"
    assert outcome.json["steps_equal"] == 6
    assert "equal: 6 steps on 2 ranks train the same 4 parameters" in outcome.text
    assert "SIMULATED cpu" in outcome.text.splitlines()[0] and "SIMULATED" in outcome.text.splitlines()[-1]
    curves = outcome.json["curves"]
    assert max(curves["excess"]) < 1 and len(curves["one"]) == 6
    for one, ranks in zip(curves["one"], curves["ranks"], strict=True):
        assert abs(one - ranks) < 1e-5 * one


@pytest.mark.slow
def test_a_long_script_without_gpus_and_without_a_group_on_one_device(compare, by_hand, changed):
    outcome = compare(changed(by_hand, ("(0, 8, 16)", "(0, 8, 16) * 4")), code=0)
    assert outcome.json["headline"].startswith("equal: 10 steps on 2 ranks")
    assert "compared 10 steps, where the runs were ended; --steps=all compares all" in outcome.text
    assert [rank["end"] for rank in outcome.json["runs"][1]["ranks"]] == ["stopped"] * 2
    assert "SIMULATED" not in outcome.text


def test_a_sum_in_place_of_a_mean(compare, by_hand, changed):
    own = "import os, sys\nassert sys.argv[1] == '--local_rank=' + os.environ['LOCAL_RANK']\n"
    script = own + changed(by_hand, ("            p.grad /= world\n", ""), (CLIP, ""))
    outcome = compare(script, code=1, arguments=["--local_rank={r}"])
    assert outcome.json["mistakes"] == ["world-size-factor"]
    assert (outcome.json["step"], outcome.json["tensor"], outcome.json["ranks"]) == (1, "gradient", [0, 1])
    assert outcome.json["parameter"] in ("0.weight", "0.bias", "2.weight", "2.bias")
    assert abs(outcome.json["ratio"] - 2) < 1e-4
    named = outcome.json["parameter"]
    assert f"differs: step 1: the gradient of {named} is 2 times as large on ranks 0-1" in outcome.text
    assert "docs/classes/world-size-factor.md" in outcome.text
    assert re.search(r": the world size; all_reduce \(sum, 2 ranks\) at train.py:26 leaves it so$", outcome.text, re.M)


@pytest.mark.slow
def test_a_factor_that_clipping_hides(compare, by_hand, changed):
    outcome = compare(changed(by_hand, ("            p.grad /= world\n", "")), code=1)
    assert outcome.json["mistakes"] == ["world-size-factor"] and abs(outcome.json["ratio"] - 2) < 1e-3
    assert "before clipping, the gradients of the ranks have 2 times the norm of one device" in outcome.text


@pytest.mark.slow
def test_a_sampler_without_set_epoch(compare, tutorial, changed):
    """And what its page shows of it."""
    script = changed(tutorial, ("    sampler.set_epoch(epoch)\n", ""))
    outcome = compare(script, "--gpus=4", "--simulate", code=1)
    assert outcome.json["mistakes"] == ["epochs-not-reshuffled"]
    assert (outcome.json["step"], outcome.json["tensor"]) == (4, "gradient")  # three steps to an epoch
    assert outcome.json["parameter"] in ("0.weight", "0.bias", "2.weight", "2.bias")
    shown, _ = blocks(DOCS / "how-to" / "compare.md", "")
    assert _without_digits(shown.text.strip()) in _without_digits(outcome.text)


def _without_digits(text: str) -> str:
    """Elements that are further off than others by a little, and their digits, depend on torch's kernels."""
    return re.sub(r"gradient of \S+ is|\[[\d, ]+\]|-?\d+\.\d+", "#", text)


@pytest.mark.slow
def test_clipping_before_the_average(compare, by_hand, changed):
    outcome = compare(changed(by_hand, (AVERAGE + CLIP, CLIP + AVERAGE)), code=1)
    assert outcome.json["mistakes"] == ["clipped-before-synchronization"]
    assert (outcome.json["step"], outcome.json["tensor"]) == (1, "gradient")
    assert re.search(r"returned the norms [\d.]+ on rank 0, [\d.]+ on rank 1", outcome.text)


@pytest.mark.slow
def test_a_checkpoint_that_rank_0_alone_loads(compare, tutorial, changed):
    load = 'net.load_state_dict(torch.load("start.pt", map_location=device))\n'
    script = changed(
        tutorial, (load, ""), ("loss_fn = nn.MSELoss()\n", f"loss_fn = nn.MSELoss()\nif rank == 0:\n    {load}")
    )
    outcome = compare(script, *SIMULATED, code=1)
    assert outcome.json["mistakes"] == ["restored-on-one-rank"]
    assert (outcome.json["step"], outcome.json["tensor"], outcome.json["ranks"]) == (1, "before", [1])
    assert outcome.json["parameter"] in ("0.weight", "0.bias", "2.weight", "2.bias")
    assert "load_state_dict was called 1 time on rank 0, 0 times on rank 1" in outcome.text


@pytest.mark.slow
def test_a_script_that_goes_on_where_an_earlier_run_has_stopped(compare, by_hand, changed, tmp_path):
    load = 'if os.path.getsize("last.pt"): net.load_state_dict(torch.load("last.pt"))\n'
    script = changed(by_hand, ("optimizer = ", f"{load}optimizer = "))
    tmp_path.joinpath("last.pt").touch()  # that the directory has the same files before and after
    outcome = compare(script + 'if rank == 0: torch.save(net.state_dict(), "last.pt")\n', code=2)
    assert "which an earlier run of this comparison wrote" in outcome.text


def test_a_module_that_trains_nothing(python, tmp_path):
    tmp_path.joinpath("job.py").write_text(
        "import sys\nassert __name__ == '__main__' and sys.argv[1:] == ['--lr=1', '--gpus=9']\n"
    )
    command = ("-m", "mgpu_check", "compare", "--gpus", "3", "-m", "job", "--lr=1", "--gpus=9")
    code, stdout, _ = python(*command, processes=1)
    assert code == 2
    assert "-m job --lr=1 --gpus=9: one device, and 3 ranks" in stdout.decode()
    assert "no optimizer step was seen on one device" in stdout.decode()


INIT = '    dist.init_process_group("gloo")\n'
PORT, HOST = "    os.environ.update(MASTER_PORT=str(port))\n", "    os.environ['MASTER_ADDR'] = '192.0.2.1'\n"
FREE_PORT = "    import socket\n    with socket.create_server(('', 0)) as server: port = server.getsockname()[1]\n"


@pytest.mark.slow  # beside the launchers of `test_recording.py`, whose scripts name an address, too
@pytest.mark.parametrize(
    ("own", "said"),
    [
        (f"{PORT}{INIT}", "sets MASTER_PORT"),
        (f"{HOST}{INIT}", "sets MASTER_ADDR"),
    ],
    ids=["port", "host"],
)
def test_ranks_meet_where_the_script_has_an_address_of_its_own(compare, by_hand, changed, own, said):
    """Without a store there, the ranks would wait until they time out: each finds another port."""
    script = changed(by_hand, (INIT, FREE_PORT + own))
    outcome = compare(script, "--timeout=60", code=0)
    line = 1 + script[: script.index(own)].count("\n")
    assert f"train.py:{line} {said}: the ranks met at the store of compare instead of " in outcome.text
    assert "do: leave the address to the launcher" in outcome.text
    assert outcome.text.count("the ranks met") == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "code", "mistakes", "said"),
    [
        # The untrained losses differ by less than one percent, so that only the counts of labels explain them.
        ("labels", 1, ["mean-of-means"], "weighted by the labels it is"),
        ("gather", 0, [], "no gradient flows through all_gather at train.py:31, on ranks and on one device"),
    ],
)
def test_losses_of_parts(compare, kind, code, mistakes, said):
    outcome = compare(script("parts_of_a_loss"), *SIMULATED, "--steps=1", code=code, arguments=[kind])
    assert outcome.json["mistakes"] == mistakes and said in outcome.text


@pytest.mark.parametrize(
    ("kind", "code", "mistakes", "said"),
    [
        ("thread", 0, [], "the inputs of Linear at train.py:"),
        ("whole", 1, ["dataset-not-split"], "each rank sees the whole batch"),
        ("slices", 2, [], "the ranks hold parts of the model, and start from other parameters"),
        pytest.param("update", 2, [], r"Sketched.step (train.py:21) draws random numbers", marks=pytest.mark.slow),
        pytest.param("narrow", 1, ["world-size-factor"], "times as large", marks=pytest.mark.slow),
    ],
)
def test_scripts_of_strangers(compare, kind, code, mistakes, said):
    """Loops in threads, whole batches for shards, slices and optimizers that draw, twice the gradient in bfloat16."""
    outcome = compare(script("as_strangers_write"), *SIMULATED, "--steps=2", code=code, arguments=[kind])
    assert outcome.json["mistakes"] == mistakes and said in outcome.text
