"""Reading what faulthandler wrote."""

from __future__ import annotations

import inspect

import pytest

from mgpu_check.processes.tracebacks import calling_line, clean, is_returning, location_of

TEXT = """Thread 0x00007f0000000001 (most recent call first):
  File "/lib/python3.11/threading.py", line 1 in wait

Current thread 0x00007f0000000002 (most recent call first):
  File "/env/site-packages/torch/distributed/distributed_c10d.py", line 5356 in barrier
  File "/env/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/train.py", line 38 in step
  File "/src/mgpu_check/engine/rank_side/worker.py", line 104 in call
  File "<string>", line 1 in <module>
"""


def test_the_engines_frames_are_left_out():
    assert "worker.py" not in clean(TEXT)
    assert "<string>" not in clean(TEXT)
    assert 'File "/home/train.py", line 38 in step' in clean(TEXT)


def test_the_collective_and_where_it_was_called():
    location = location_of(TEXT)
    assert location is not None
    assert (location.collective, location.function, location.line) == ("barrier", "barrier", 38)
    assert str(location) == "barrier (/home/train.py:38)"


TORCH = "/env/site-packages/torch"
IN_TRAIN = ("/home/train.py", 3, "step")


@pytest.mark.parametrize(
    ("frames", "collective", "told"),
    [
        ([IN_TRAIN], None, "step (/home/train.py:3)"),
        # The line is that of the code under test, and the function is the innermost.
        (
            [("/lib/python3.11/re.py", 1, "match"), ("/env/site-packages/a.py", 7, "parse"), IN_TRAIN],
            None,
            "match (/home/train.py:3)",
        ),
        ([("/lib/python3.11/re.py", 1, "match")], None, "match (/lib/python3.11/re.py:1)"),
        # The reducer of DDP waits for the others.
        (
            [(f"{TORCH}/nn/parallel/distributed.py", 9, "_pre_forward"), IN_TRAIN],
            "_pre_forward",
            "_pre_forward (/home/train.py:3)",
        ),
        # Generated code is in no file.
        ([(f"{TORCH}/a.py", 5, "all_gather"), ("<string>", 1, "__eq__")], None, "all_gather (<string>:1)"),
        (
            [(f"{TORCH}/a.py", 5, "all_gather"), ("<string>", 1, "__eq__"), IN_TRAIN],
            None,
            "all_gather (/home/train.py:3)",
        ),
    ],
)
def test_where_a_rank_is(frames, collective, told):
    lines = [f'  File "{file}", line {line} in {name}\n' for file, line, name in frames]
    location = location_of("".join(["Current thread 0x1 (most recent call first):\n", *lines]))
    assert location is not None
    assert (location.collective, str(location)) == (collective, told)


def test_a_rank_that_sends_its_result():
    line = '  File "/p/mgpu_check/engine/rank_side/worker.py", line 7 in send_result'
    current = "Current thread 0x1 (most recent call first):"
    stacks = clean(f'{current}\n  File "/p/mgpu_check/processes/channel.py", line 1 in send\n{line}')
    assert line in stacks and "channel" not in stacks and is_returning(stacks)
    assert is_returning(f'Thread 0x2 (most recent call first):\n  File "/home/me/train.py", line 1 in log\n{stacks}')
    assert not is_returning(f'{current}\n  File "/home/me/train.py", line 7 in send_result')
    assert not is_returning(f'{current}\n  File "/home/me/train.py", line 3 in on_signal\n{line}')


def test_nothing_to_read():
    assert location_of("") is None


def test_a_call_from_generated_code_is_at_the_nearest_line_of_a_file():
    space = {"calling_line": calling_line}
    exec("def generated(): return calling_line()", space)
    line = inspect.currentframe().f_lineno + 1
    assert space["generated"]() == (__file__, line)
