"""The process that runs a test, and the state that travels with it."""

from __future__ import annotations

import pytest

from mgpu_check.plugin import requirements

GPUS = ("--gpus=4", "--simulate", "--rank-timeout=30")

PASSING = """
    import os
    import pytest, torch, torch.distributed as dist
    from hypothesis import assume, given, settings, strategies as st
    from helpers import double

    FACTOR = 10

    def scaled(x):
        return x * FACTOR

    @pytest.mark.ranks(4)
    def test_body_runs_on_every_rank(rank):
        x = torch.ones(3, device=rank.device) * (rank.index + 1)
        dist.all_reduce(x)
        assert x.tolist() == [scaled(1.0)] * 3
        assert rank.device == torch.device("cuda", rank.index) and torch.cuda.current_device() == rank.index
        assert (rank.size, rank.local_index, rank.node_index) == (4, rank.index, 0)
        assert dist.get_world_size(rank.group) == 4
        assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == str(rank.index)
        assert os.environ["WORLD_SIZE"] == os.environ["LOCAL_WORLD_SIZE"] == "4"

    @pytest.mark.ranks(1, 2, 3)
    def test_once_per_size(rank):
        assert dist.get_world_size() == rank.size <= 3

    @pytest.mark.ranks
    def test_without_sizes_on_all():
        assert dist.get_world_size() == torch.cuda.device_count() == 4

    @pytest.mark.ranks
    @settings(max_examples=20)
    @given(n=st.integers(0, 64), v=st.integers(-5, 5))
    def test_examples_are_the_same_on_all_ranks(rank, n, v):
        assume(n != 3)
        seen = [None] * rank.size
        dist.all_gather_object(seen, (n, v))
        assert seen == [(n, v)] * rank.size

    @pytest.mark.ranks
    @settings(max_examples=5)
    @given(st.integers())
    def test_positional_given(value):
        assert isinstance(value, int)

    class Base:
        offset = 0

        def shifted(self, k):
            return k + self.offset

    class TestMethods(Base):
        offset = 5

        @pytest.fixture
        def own(self):
            return 3

        def shifted(self, k):
            return super().shifted(k)

        @pytest.mark.ranks(2)
        @pytest.mark.parametrize("k", [1, 2])
        def test_method(self, rank, k, tmp_path, own):
            assert tmp_path.is_dir() and own == 3
            assert double(k) + self.offset == self.shifted(2 * k)

        @pytest.mark.ranks(2)
        @settings(max_examples=5)
        @given(k=st.integers(0, 9))
        def test_given_method(self, rank, k):
            assert self.offset == 5

        def test_node_method(self, gpus):
            assert len(gpus) == 4

    def test_node_process_sees_all(gpus):
        assert gpus == tuple(torch.device("cuda", i) for i in range(4))
        assert torch.cuda.device_count() == 4 and not dist.is_initialized()
        assert torch.ones(2, device=gpus[3]).device == gpus[3]

    @pytest.mark.gpus(2)
    def test_exactly_two(gpus):
        assert len(gpus) == 2

    @settings(max_examples=5)
    @given(i=st.integers(0, 3))
    def test_node_examples(gpus, i):
        assert torch.zeros(1, device=gpus[i]).get_device() == i

    @settings(max_examples=10)
    @given(size=st.integers(1, 4), k=st.integers(-9, 9))
    def test_world_size_per_example(ranks, size, k):
        def body(k, rank, factor=1):
            x = torch.tensor(k, device=rank.device)
            dist.all_reduce(x)
            return int(x) * factor, rank.index, x
        results = ranks.run(body, k, size=size, factor=2)
        assert [r[:2] for r in results] == [(2 * k * size, i) for i in range(size)]
        assert all(type(r[2]) is torch.Tensor and r[2].device.type == "cpu" for r in results)

    def test_rank_as_first_parameter_and_no_parameter(ranks):
        assert ranks.run(lambda rank, a, b=0: (rank.index, a, b), 7, b=8, size=2) == [(0, 7, 8), (1, 7, 8)]
        assert ranks.run(dist.get_rank) == [0, 1, 2, 3]

    def test_the_parent_touches_no_device(ranks):
        assert not torch.cuda.is_available()

    def test_capsys(ranks, capsys):
        print("here")
        ranks.run(lambda rank: print("in a rank"))
        assert capsys.readouterr().out == "here\\n"

    def test_capfd(ranks, capfd):
        os.write(1, b"here")
        ranks.run(lambda rank: os.write(1, b"in a rank"))
        assert capfd.readouterr().out == "here"

    @pytest.mark.ranks(4)
    @pytest.mark.parametrize("number", [1, 2])  # DTensor keeps what it has found out for meshes that are equal
    def test_equal_meshes(rank, number):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard, distribute_tensor

        x = distribute_tensor(torch.ones(2, 3).cuda(), init_device_mesh("cuda", (2, 2)), [Replicate(), Shard(0)])
        assert (x + x).full_tensor().sum() == 12

    @pytest.mark.ranks
    def test_all_skip(rank):
        pytest.skip("no reason")

    @pytest.mark.ranks
    def test_all_xfail(rank):
        pytest.xfail("known")
"""


@pytest.fixture
def repo(pytester: pytest.Pytester) -> pytest.Pytester:
    pytester.makepyfile(helpers="def double(x): return 2 * x")
    return pytester


@pytest.mark.parametrize("parallel", [(), pytest.param(("-n2",), marks=pytest.mark.slow)], ids=["one process", "xdist"])
def test_passing_tests_of_every_kind(run, repo, parallel):
    repo.makepyfile(PASSING)
    run(*GPUS, *parallel).assert_outcomes(passed=21, skipped=1, xfailed=1)


@pytest.mark.parametrize(
    "mode", [*(pytest.param(mode, marks=pytest.mark.slow) for mode in ("prepend", "append")), "importlib"]
)
def test_every_import_mode(run, repo, mode):
    repo.makeini(f"[pytest]\npythonpath = .\naddopts = --import-mode={mode}\n")
    repo.mkpydir("pkg")
    repo.path.joinpath("conftest.py").write_text(
        "import pytest\nclass Config:\n    lr = 0.5\n@pytest.fixture\ndef config(): return Config()\n"
    )
    repo.path.joinpath("pkg", "test_it.py").write_text(
        "import pytest\nfrom helpers import double\n"
        "@pytest.mark.ranks(2)\ndef test_it(rank, config): assert double(config.lr) == 1.0\n"
    )
    # Another conftest makes pytest remove the first one from `sys.modules`; with append it cannot have it.
    beside = repo.mkdir("beside")
    if mode != "append":
        beside.joinpath("conftest.py").touch()
    beside.joinpath("test_beside.py").write_text(
        "import pytest\n@pytest.mark.ranks(2)\ndef test_it(rank, config): assert config.lr == 0.5\n"
    )
    run(*GPUS).assert_outcomes(passed=2)


def test_misuse_is_refused_by_name(run, pytester):
    pytester.makepyfile(
        """
        import threading, unittest
        import pytest
        from hypothesis import given, strategies as st

        LOCK = threading.Lock()

        @pytest.fixture
        def lock():
            return LOCK

        @pytest.fixture
        def model(gpus):
            return [gpus[0]]

        def test_rank_without_mark(rank): pass
        @pytest.mark.ranks(0)
        def test_size_zero(rank): pass
        @pytest.mark.ranks(2, sizes=3)
        def test_unknown_argument(rank): pass
        @pytest.mark.ranks(2)
        def test_two_places(rank, gpus): pass
        @pytest.mark.gpus
        def test_no_number(gpus): pass
        @pytest.mark.ranks(2)
        async def test_coroutine(rank): pass
        @pytest.mark.ranks(2, timeout=-1)
        def test_timeout(rank): pass

        @pytest.mark.ranks(2)
        def test_capsys(rank, capsys): pass
        @pytest.mark.ranks(2)
        def test_fixture_that_cannot_travel(rank, lock): pass
        @pytest.mark.ranks(2)
        def test_global_that_cannot_travel(rank):
            with LOCK: pass
        def test_fixture_on_devices(gpus, model): pass
        @pytest.mark.ranks(2)
        @given(data=st.data())
        def test_interactive_draws(rank, data): pass
        def test_size_too_large(ranks): ranks.run(print, size=5)
        """
    )
    result = run(*GPUS, "-W", "ignore")
    result.assert_outcomes(errors=8, failed=5)
    result.stdout.fnmatch_lines_random(
        [
            "fixture 'rank' exists in tests that run on ranks; mark the test @pytest.mark.ranks(2)",
            "mark ranks: 0 is not a number of devices*",
            "mark ranks: unknown argument 'sizes'; it takes sizes, backend= and timeout=",
            "*cannot use the fixtures 'gpus' or 'ranks', or the mark 'gpus'",
            "mark gpus: it takes one argument*",
            "*not for coroutines, generators or unittest.TestCase",
            "mark ranks: timeout=-1 is not valid*",
            "fixture 'capsys' acts on the pytest process*",
            "*argument 'lock', of type lock, cannot be pickled*",
            "*it refers to 'LOCK', of type lock, cannot be pickled*",
            "*fixture 'gpus' has a value only in the test's body*",
            "argument 'data': st.data() draws in the pytest process*",
            "*ranks.run: size=5 is not a world size of this run; choose 1 to 4",
        ]
    )


def test_names_that_the_user_gives_to_something_else_are_theirs(run, pytester):
    pytester.makeconftest(
        """
        import pytest

        @pytest.fixture
        def gpus():
            return "mine"
        """
    )
    pytester.makepyfile(
        """
        import pytest

        @pytest.mark.parametrize("rank", [0, 1])
        def test_parameter(rank):
            assert rank in (0, 1)

        def test_fixture(gpus):
            assert gpus == "mine"
        """
    )
    run().assert_outcomes(passed=3)
    run(*GPUS).assert_outcomes(passed=3)


def test_what_pytest_sets_for_a_test_holds_in_the_ranks(run, pytester):
    """Warning filters, xfail(raises=), variables set by fixtures, and ranks through other fixtures."""
    pytester.makepyfile(
        """
        import os, warnings
        import pytest

        @pytest.mark.ranks(2)
        @pytest.mark.filterwarnings("error")
        @pytest.mark.xfail(raises=DeprecationWarning, strict=True)
        def test_warning_as_error(rank):
            warnings.warn("old", DeprecationWarning)

        @pytest.mark.ranks(2)
        def test_warning():
            warnings.warn("old", DeprecationWarning)

        @pytest.mark.ranks(2)
        @pytest.mark.xfail(raises=AssertionError)
        def test_another_error_than_expected(rank):
            raise TypeError("a new bug" if rank.index else "another new bug")

        @pytest.mark.ranks(2)
        @pytest.mark.xfail(False, reason="elsewhere only", raises=TypeError)
        def test_a_mark_whose_condition_does_not_hold(rank):
            raise TypeError("here too")

        @pytest.fixture
        def mode(monkeypatch, request):
            monkeypatch.setenv("MODE", request.node.name)

        @pytest.mark.ranks(2)
        def test_mode_1(rank, mode):
            assert os.environ["MODE"] == "test_mode_1"

        @pytest.mark.ranks(2)
        def test_no_mode(rank):
            assert "MODE" not in os.environ

        @pytest.mark.ranks(2)
        def test_mode_2(rank, mode):
            assert os.environ["MODE"] == "test_mode_2"

        @pytest.fixture
        def result(ranks):
            return ranks.run(os.getpid, size=2)

        def test_through_a_fixture(result):
            assert len(set(result)) == 2

        @pytest.mark.usefixtures("gpus")
        def test_usefixtures():
            import torch
            assert torch.cuda.device_count() == 4
        """
    )
    result = run(*GPUS)
    result.assert_outcomes(passed=6, failed=2, xfailed=1)
    result.stdout.fnmatch_lines(
        [
            "rank 0 of 2 raised TypeError: another new bug",
            "rank 1 of 2 raised TypeError: a new bug",
            "ranks 0-1 of 2 raised TypeError: here too",
        ]
    )


def test_the_mark_gpus_takes_a_timeout():
    mark = pytest.mark.gpus(least=2, timeout=9).mark
    assert (requirements._counts(mark), requirements._timeout(mark)) == ((0, 2), 9)
    with pytest.raises(pytest.UsageError, match="mark gpus: timeout=0 is not valid"):
        requirements._timeout(pytest.mark.gpus(2, timeout=0).mark)
