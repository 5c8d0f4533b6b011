"""Import the library of the model once, in the process that ranks are forked from, by the import of this module."""

from __future__ import annotations

import contextlib
import os

from mgpu_check.models.targets import UnusableModel, library_of, module_of
from mgpu_check.settings import PREFIX

_TARGET = os.environ.get(f"{PREFIX}MODEL_TARGET", "")

if library_of(_TARGET):  # code of the user may start threads, which a process that is forked must not have
    with contextlib.suppress(UnusableModel, ImportError, AttributeError):  # the examination reports them
        getattr(module_of(_TARGET), _TARGET.partition(":")[2])
