"""Reading what faulthandler wrote."""

from __future__ import annotations

import inspect

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


def test_no_collective():
    location = location_of('Current thread 0x1 (most recent call first):\n  File "/home/train.py", line 3 in load\n')
    assert location is not None
    assert location.collective is None
    assert str(location) == "load (/home/train.py:3)"


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


def test_the_line_is_that_of_the_code_under_test_and_the_function_the_innermost():
    location = location_of(
        'Current thread 0x1 (most recent call first):\n  File "/env/lib/python3.11/re/__init__.py", line 166 in match\n'
        '  File "/env/lib/python3.11/site-packages/words/parse.py", line 7 in parse\n'
        '  File "/home/train.py", line 3 in load\n'
    )
    assert str(location) == "match (/home/train.py:3)"


def test_what_is_installed_counts_where_nothing_else_is_on_the_stack():
    location = location_of(
        'Current thread 0x1 (most recent call first):\n  File "/lib/python3.11/re.py", line 1 in match\n'
    )
    assert str(location) == "match (/lib/python3.11/re.py:1)"


def test_the_reducer_of_ddp_waits_for_the_others():
    location = location_of(
        "Current thread 0x1 (most recent call first):\n"
        '  File "/env/site-packages/torch/nn/parallel/distributed.py", line 1550 in _pre_forward\n'
        '  File "/home/train.py", line 3 in step\n'
    )
    assert location is not None and location.collective == "_pre_forward" and location.line == 3


def test_generated_code_is_in_no_file():
    text = (
        'Current thread 0x1 (most recent call first):\n  File "/env/site-packages/torch/a.py", line 5 in all_gather\n'
    )
    text += '  File "<string>", line 1 in __eq__\n'
    assert str(location_of(text)) == "all_gather (<string>:1)"
    assert str(location_of(text + '  File "/home/train.py", line 3 in step\n')) == "all_gather (/home/train.py:3)"


def test_a_call_from_generated_code_is_at_the_nearest_line_of_a_file():
    space = {"calling_line": calling_line}
    exec("def generated(): return calling_line()", space)
    line = inspect.currentframe().f_lineno + 1
    assert space["generated"]() == (__file__, line)
