"""Classes on torch's own harnesses on forked ranks: outcomes as in their harness, reports as of our ranks."""

from __future__ import annotations

import os
import subprocess
import sys
import unittest

import pytest

import mgpu_check
from mgpu_check.processes.environments import simulating

EXPECTTEST = """
import unittest

TestCase = unittest.TestCase  # torch's harnesses import it
"""

BASE = """
import contextlib, os, signal, sys, unittest
import torch, torch.distributed as dist
from torch.testing._internal import common_distributed
from torch.testing._internal.common_distributed import (
    MultiProcContinuousTest, MultiProcessTestCase, skip_if_lt_x_gpu
)

class Base(MultiProcessTestCase):
    world_size = 2

    def setUp(self):
        super().setUp()
        os.environ["PREPARED"] = "yes"
        self._spawn_processes()

    def tearDown(self):
        super().tearDown()
        with contextlib.suppress(OSError):
            os.remove(self.file_name)

    def join(self):
        store = dist.FileStore(self.file_name, self.world_size)
        dist.init_process_group("gloo", rank=self.rank, world_size=self.world_size, store=store)
        # A rank that ends closes its connections, even those that another rank is still making.
        store.set(f"joined {self.rank}", "")
        store.wait([f"joined {rank}" for rank in range(self.world_size)])
"""

SPAWNED = f"""{BASE}
common_distributed.TIMEOUT_OVERRIDE["test_hang"] = 2

class TestSpawned(Base):
    def test_collective(self):
        assert os.environ["PREPARED"] == "yes"
        assert "RANK" not in os.environ and not dist.is_initialized()
        self.join()
        x = torch.ones(3) * (self.rank + 1)
        dist.all_reduce(x)
        self.assertEqual(x.sum().item(), 9.0)
        torch.set_default_dtype(torch.float64)
        os.environ["LEFT"] = "yes"

    def test_collective_next(self):
        assert torch.get_default_dtype() is torch.float32 and "LEFT" not in os.environ
        self.join()
        if self.rank == 0:  # the harness does not mind that ranks enter different collectives
            dist.all_reduce(torch.ones(1), group=dist.new_group([0], use_local_synchronization=True))

    def test_one_fails(self):
        self.join()
        print("printed by", self.rank)
        assert self.rank == 0, "the other one"
        dist.barrier()

    def test_hang(self):
        self.join()
        dist.barrier() if self.rank else signal.pause()

    def test_death(self):
        self.join()
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()

    def test_early_exit(self):
        self.join()
        if self.rank == 0:
            sys.exit(0)
        with self.assertRaises(RuntimeError):  # as from the end of a process
            dist.barrier()

    def test_exit_code(self):
        sys.exit(3)

    @skip_if_lt_x_gpu(2)
    def test_gpus(self):
        pass

    def test_skip(self):
        raise unittest.SkipTest("for a reason")

    @unittest.expectedFailure
    def test_expected(self):
        assert self.rank < 0

class TestDeathOf(Base):
    world_size = property(lambda self: 3)

    def setUp(self):
        super().setUp()
        self.special_return_code_checks = {{self.test_all.__wrapped__: -signal.SIGKILL}}

    def test_all(self):
        assert self.world_size == 3
        os.kill(os.getpid(), signal.SIGKILL)

class TestCodes(Base):
    def setUp(self):
        super().setUp()
        self.special_return_code_checks = {{self.test_other.__wrapped__: 0}}

    def test_other(self):
        self.join()
        if self.rank == 0:
            sys.exit(3)
        with self.assertRaises(RuntimeError):
            dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)

class TestContinuous(MultiProcContinuousTest):
    world_size = 2
    pid = None

    @classmethod
    def backend_str(cls):
        return "gloo"

    def test_1(self):
        x = torch.ones(2)
        dist.all_reduce(x)
        self.assertEqual(x[0].item(), 2.0)
        TestContinuous.pid = os.getpid()

    def test_2_same_processes(self):
        assert TestContinuous.pid == os.getpid() and dist.get_rank() == self.rank

    def test_3_fails(self):
        assert self.rank == 1

    def test_4_new_processes(self):
        assert TestContinuous.pid is None
        dist.barrier()

    @skip_if_lt_x_gpu(2)
    def test_5_gpus(self):
        pass
"""


OURS = """
import sys, types, unittest
from importlib.machinery import ModuleSpec

from test_it import Base

import mgpu_check

only_here = sys.modules["torch.only_here"] = types.ModuleType("torch.only_here")  # which no other process can import
only_here.__spec__, only_here.__file__ = ModuleSpec("torch.only_here", None), "only_here.py"

@mgpu_check.adapt
class TestMarked(Base):
    def test_marked(self):
        self.join()

class TestOther(Base):
    def _start_processes(self, proc):  # of its own, so that this test starts no interpreters
        assert self._join_processes.__func__.__module__ == Base.__mro__[1].__module__

    def test_other(self):
        raise AssertionError("this is for the ranks, and there are none")

class TestPlain(unittest.TestCase):
    def test_plain(self):
        pass
"""


@pytest.mark.slow
def test_outcomes_and_reports(pytester, run):
    pytester.makepyfile(expecttest=EXPECTTEST, test_it=SPAWNED)
    result = run("--adapt-torch-tests", "-rs")
    result.assert_outcomes(passed=7, failed=6, skipped=3, xfailed=1)
    text = result.stdout.str()
    for said in (
        "rank 1 of 2 raised AssertionError: the other one",
        "did not finish test_hang within 2 s",
        "stacks of all threads, when stopped",
        "rank 1 of 2 died: signal SIGKILL",
        "AssertionError: Scalars are not equal!",  # the harness judges exit codes
        "but got 3 for pid",  # also that of a rank that has returned
        "rank 0 of 2 raised AssertionError",
    ):
        assert f"\n{said}" in text or f" {said}" in text, said
    assert "Captured stdout of rank 0 of 2" in text and "printed by 0" in text
    assert "Need at least 2 CUDA devices" in text and ": for a reason\n" in text
    assert "mgpu-check: 17 tests of torch's harnesses ran on forked ranks\n" in text


@pytest.mark.slow
def test_marked_classes_only_and_on_workers(pytester, run):
    pytester.makepyfile(expecttest=EXPECTTEST, test_it=BASE, test_ours=OURS)
    result = run("-n1", "test_ours.py")
    result.assert_outcomes(passed=3)
    assert "mgpu-check: 1 test of torch's harnesses ran on forked ranks\n" in result.stdout.str()


def test_what_cannot_be_adapted_is_counted(pytester, run):
    pytester.makepyfile(expecttest=EXPECTTEST, test_it=BASE, test_ours=OURS)
    pytester.makeini("[pytest]\nadapt_torch_tests = yes")
    result = run("test_ours.py", "-k", "other or plain")
    result.assert_outcomes(passed=2)
    assert (
        "mgpu-check: 0 tests of torch's harnesses ran on forked ranks; "
        "1 in their own harness: it overrides _start_processes of MultiProcessTestCase\n" in result.stdout.str()
    )


@pytest.mark.slow
@pytest.mark.cold
def test_on_a_simulated_node(pytester):
    pytester.makepyfile(expecttest=EXPECTTEST, test_it=SPAWNED)
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--adapt-torch-tests", "-k", "gpus"]
    run = subprocess.run(command, env=simulating(os.environ, 2), stdout=subprocess.PIPE, text=True)
    assert "2 passed" in run.stdout and "mgpu-check: 2 tests of torch's harnesses" in run.stdout, run.stdout


def test_the_decorator_refuses_other_classes():
    for other in (int, unittest.TestCase):
        name = other.__name__
        with pytest.raises(
            TypeError, match=rf"mgpu_check\.adapt: {name} is not based on MultiProcessTestCase or Multi"
        ):
            mgpu_check.adapt(other)
