"""A patch replaces a function under each of its names, and is undone exactly."""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Iterator

import pytest

from mgpu_check.torch_hooks.patches import Patches, replaced


class Owner:
    @staticmethod
    def static() -> int:
        return 1

    @classmethod
    def of_class(cls) -> str:
        return cls.__name__

    def method(self) -> int:
        return 2


class Heir(Owner):
    pass


def doubled(function: Callable[..., int]) -> Callable[..., int]:
    @functools.wraps(function)
    def call(*args: object) -> int:
        return 2 * function(*args)

    return call


@pytest.fixture
def module() -> Iterator[types.ModuleType]:
    made = types.ModuleType("a_users_module")
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


def test_replaced_puts_back_what_was_there():
    before = vars(Owner)["static"]
    with replaced(Owner, "static", staticmethod(lambda: 2)):
        assert Owner.static() == 2
    assert vars(Owner)["static"] is before
    with replaced(Heir, "static", staticmethod(lambda: 3)):
        assert Heir.static() == 3
    assert "static" not in vars(Heir)
    with pytest.raises(AttributeError), replaced(Owner, "absent", 1):
        pass


@pytest.mark.parametrize("owner", [Owner, Heir])
def test_wrapped_methods_are_of_the_same_kind(owner):
    before = dict(vars(owner))
    patches = Patches()
    for name in ("static", "of_class", "method"):
        patches.wrap(owner, name, doubled)
    assert (owner.static(), owner().static(), owner().method()) == (2, 2, 4)
    assert owner.of_class() == owner().of_class() == 2 * owner.__name__
    assert owner.method.__wrapped__ is Owner.method or owner is Owner
    assert patches.changed(owner) == {"static", "of_class", "method"} and not patches.changed(object)
    patches.undo()
    assert dict(vars(owner)) == before


def test_a_wrapped_class_method_of_c_gets_the_class_that_it_is_called_on():
    class Keys(dict[str, None]):
        fromkeys = vars(dict)["fromkeys"]

    class Own(Keys):
        pass

    with Patches() as patches:
        patches.wrap(Keys, "fromkeys", lambda real: lambda cls, *args: (cls, real(cls, *args)))
        assert Own.fromkeys("a") == (Own, {"a": None}) and type(Own.fromkeys("a")[1]) is Own
    assert Own.fromkeys("a") == {"a": None}


def test_nested_patches_are_undone_in_reverse():
    first, second = Patches(), Patches()
    first.wrap(Owner, "method", doubled)
    once = Owner.method
    second.wrap(Owner, "method", doubled)
    second.wrap(Owner, "method", doubled)
    assert Owner().method() == 16
    second.undo()
    assert Owner.method is once
    first.undo()
    assert Owner().method() == 2


def test_an_object_is_replaced_under_all_its_names_but_those_that_are_spared(module):
    module.one = module.another = doubled

    def new(function: object) -> object:
        return function

    for where, expected in (({}, new), ({"among": "torch."}, doubled), ({"sparing": "a_users"}, doubled)):
        patches = Patches(**where)
        patches.replace(doubled, new)
        assert module.one is doubled
        patches.apply()
        assert module.one is module.another is expected
        module.late = expected
        patches.undo()
        assert module.one is module.another is module.late is doubled


def test_everything_is_put_back_though_a_call_at_the_exit_raises(module):
    module.one = doubled
    patches = Patches()
    patches.set(module, "one", None)
    patches.set(module, "new", None)
    patches.at_exit(lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        patches.undo()
    assert module.one is doubled and not hasattr(module, "new")


def test_two_objects_with_one_replacement_are_put_back_each(module):
    first, second, new, other = object(), object(), object(), object()
    vars(module).update(first=first, also=first, second=second, rebound=second)
    patches = Patches()
    for old in (first, second):
        patches.replace(old, new)
    patches.apply()
    assert {vars(module)[name] for name in ("first", "also", "second", "rebound")} == {new}
    vars(module).update(rebound=other, late=new)
    patches.undo()
    assert [vars(module)[name] for name in ("first", "also", "second")] == [first, first, second]
    assert vars(module)["rebound"] is other and vars(module)["late"] is second
