"""Strategies of evidence of ranks that do not return, of resumed runs and of loaders: mostly such as no right program
leaves."""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st

from mgpu_check.diagnosis.evidence import Accepted, EpochSamples, Loader, Restored, UnfinishedCall
from mgpu_check.processes.collective_records import Entered
from mgpu_check.torch_hooks.collective_table import COLLECTIVES

few = st.integers(0, 3)
entered = st.builds(
    Entered,
    name=st.sampled_from(sorted(COLLECTIVES)),
    number=few,
    group_name=st.sampled_from(("", "group")),
    group=st.just(""),
    operand=st.sampled_from(("", "float32[3]", "float32[0]", "2x int64[]")),
    options=st.sampled_from(("", "sum")),
    compared=st.sampled_from(("", "a", "b")),
    file=st.sampled_from(("", "train.py")),
    line=few,
    state=st.sampled_from(("inside", "done", "pending", "waiting", "failed")),
)
texts = st.sampled_from(("", "must be contiguous", "Sizes of tensors must match\nbut do not", "stack in all_gather"))
calls = st.builds(
    UnfinishedCall,
    size=st.integers(1, 4),
    samples=st.integers(0, 9),
    told=texts,
    hung=texts,
    parted=st.dictionaries(st.integers(0, 3), entered, max_size=3),
    parting=texts,
    last=st.dictionaries(st.integers(0, 3), entered, max_size=4),
    some_finished=st.booleans(),
    raised=st.lists(st.tuples(texts, texts), max_size=2),
    aborted=st.lists(texts, max_size=2),
)

_ranks = st.dictionaries(st.sampled_from("abc"), st.lists(st.integers(0, 3), max_size=3), max_size=3)
_entries = st.lists(st.sampled_from("abc"), unique=True)
restored = st.builds(
    Restored,
    seen=st.booleans(),
    on_some=_ranks,
    nowhere=_entries,
    of_rank_0=_ranks,
    numbers_of_rank_0=_ranks,
    parted=_ranks,
    right_on_rank_0=_ranks,
    at_the_end=_entries,
)

_counts = st.text("abcxy", max_size=6).map(Counter)
_epochs = st.integers(1, 4).flatmap(
    lambda size: st.builds(
        EpochSamples,
        expected=st.text("abc", max_size=6).map(Counter),
        counts=st.lists(_counts, min_size=size, max_size=size),
        largest=few,
        batches=st.lists(few, min_size=size, max_size=size),
        labels=st.just({"a": "row 0"}),
        workers=few,
        accepted=st.builds(Accepted, st.booleans(), st.booleans(), st.booleans()),
    )
)
loaders = st.builds(Loader, st.lists(_epochs, max_size=2), st.lists(st.integers(0, 3), unique=True), texts)
