"""A check of the packaged suite that fails looks again: which device it is, how many it needs, and how often it
fails."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from mgpu_check.plugin.report.suspects import Rerun, Reruns
from mgpu_check.plugin.second_look import Failed, look_again

ALWAYS = [Rerun((0, 1, 2, 3), True)] * 5
ALONE = [(device,) for device in range(4)]


def seen(*elsewhere: Rerun, repeats=ALWAYS) -> Reruns:
    return Reruns(list(repeats), list(elsewhere))


@pytest.mark.parametrize(
    ("found", "headline"),
    [
        (seen(*(Rerun(one, one == (2,)) for one in ALONE)), "looks like cuda:2: fails where it takes part"),
        (seen(*(Rerun(one, True) for one in ALONE)), "fails on each device alone: looks like the code"),
        (
            seen(
                *(Rerun(one, False) for one in ALONE),
                Rerun((0, 1), False),
                Rerun((0, 1, 2), True),
                Rerun((1, 2, 3), True),
            ),
            "fails on any 3 or more devices",
        ),
        (
            seen(Rerun((0, 3), True), Rerun((1, 2), False), Rerun((0, 1, 2), False), Rerun((1, 2, 3), False)),
            "fails if cuda:0 and cuda:3 take part together: looks like the link between them",
        ),
        (
            seen(Rerun((1, 2, 3, 0), True, (1,)), repeats=[Rerun((0, 1, 2, 3), True, (2,))]),
            "looks like cuda:2: the error follows the device from rank to rank",
        ),
        (
            seen(Rerun((1, 2, 3, 0), True, (3,)), repeats=[Rerun((0, 1, 2, 3), True, (3,))]),
            "the error stays with rank 3 on different devices",
        ),
        (
            seen(
                *(Rerun((device,), device < 2, (0,)) for device in range(3)),
                repeats=[Rerun((0, 1, 2), True, (0,))],
            ),
            "",  # a rank that is alone is always rank 0
        ),
        (seen(Rerun((0,), True)), ""),
        (seen(Rerun((0,), True), Rerun((1,), False), Rerun((2,), False)), ""),
        (seen(Rerun((0, 3), True), Rerun((1,), False)), ""),
        (seen(*(Rerun(one, False) for one in ALONE), Rerun((0, 3), True)), ""),
        (seen(), ""),
        (Reruns(), ""),
    ],
)
def test_the_headline_names_the_part(found, headline):
    assert found.headline.startswith(headline)
    assert bool(found.headline) is bool(headline)


def test_what_fails_now_and_then_is_told_with_its_rate():
    """A device that is right once may be at fault all the same."""
    repeats = [Rerun((0, 1, 2, 3), number % 4 == 0) for number in range(20)]
    found = seen(*(Rerun(one, one == (1,)) for one in ALONE), repeats=repeats)
    assert found.headline == (
        "looks like unreliable hardware, or a race: failed 5 of 20 times; looks like cuda:1: fails where it takes "
        "part, and nowhere else"
    )
    assert "on one device alone: fails on cuda:1; passes on cuda:0, cuda:2, cuda:3" in found.lines()


def test_planted_hardware_is_named(run, pytester):
    """In ranks and in one process; a device that always fails, and one that fails now and then."""
    pytester.makepyfile(
        planter="""
        from mgpu_check.acceptance.faults import PLANTER, hardware_text, planted_from
        from mgpu_check.plugin.planting import Planting
        from mgpu_check.plugin.stash import SESSION

        FAULTS = {
            "test_all_reduce": "collective-wrong:device=2",
            "test_every_gpu_computes": "elementwise:device=1,every=13",
        }

        def pytest_runtest_setup(item):
            item.config.stash[SESSION].fault = Planting(PLANTER, hardware_text([planted_from(FAULTS[item.name])]))
        """
    )
    result = run(
        *("--gpus=3", "--simulate", "--gpu-level=quick", "-p", "planter", "--hypothesis-seed=0"),
        *(
            "--junitxml=out.xml",
            "--pyargs",
            "mgpu_check.suite",
            "-k",
            "(test_all_reduce and not test_all_reduce_) or test_every_gpu_computes",
        ),
    )
    text = result.stdout.str()
    assert "looks like cuda:2: the error follows the device from rank to rank" in text
    assert "unreliable results" not in text
    assert "looks like unreliable hardware, or a race: failed" in text
    assert "cuda:1 alone is wrong in " in text, "the check itself names it"
    xml = (pytester.path / "out.xml").read_text()
    assert 'name="mgpu_check.second_look" value="looks like cuda:2: the error follows the device' in xml


def test_an_example_that_draws_while_it_runs_is_not_looked_at_again():
    def body(data):
        raise AssertionError

    data = st.DataObject(None)
    assert look_again(body, Failed((), {"data": data}), None, None, AssertionError()) == Reruns()
