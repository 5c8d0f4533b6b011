"""Cases of several groups take turns."""

from mgpu_check.suite.common.turns import in_turns


def test_groups_take_turns():
    assert [*in_turns(["adf", "", "be", "c"])] == [*"abcdef"]
