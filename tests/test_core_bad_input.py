"""Every entry that the native core exports refuses what it cannot use, naming the argument and what came.

One table says how each entry is called rightly and of which kind each of its arguments is; what is wrong
for a kind is tried in turn, and afterwards the right call must still work on the same object. An export, or
an argument, that the table does not have fails the test. The suites of each part test what is wrong between
several arguments. (Issue 3, bad input. The sanitizers run this file too.)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from core_entries import INDEX, SCHEDULER, TREE, i32, i64, tree
from core_kernel_entries import KEPT, KERNELS, PLAN, linear, rope, run_entry, view
from parrot import _core

ENTRIES = {**TREE, **SCHEDULER, **INDEX, **KERNELS}


def exports() -> Iterator[tuple[str, Any]]:
    """Everything of the module that can be called, by name."""
    for name, value in vars(_core).items():
        if isinstance(value, type):
            if not issubclass(value, BaseException):
                for verb, method in vars(value).items():
                    is_own = not verb.startswith("_") or verb in ("__init__", "__len__")
                    if is_own and callable(method):
                        yield f"{name}.{verb}", method
        elif callable(value):
            yield name, value


def arguments_of(entry: Any) -> list[str]:
    """By the signature that pybind11 writes; without the object itself."""
    signature = (entry.__doc__ or "").splitlines()[0]
    return [name for name in re.findall(r"(?:\(|, )(\w+): ", signature) if name != "self"]


def test_every_export_and_each_of_its_arguments_is_in_the_table() -> None:
    taken = {name: arguments_of(entry) for name, entry in exports()}
    with_arguments = {name: sorted(arguments) for name, arguments in taken.items() if arguments}
    assert with_arguments == {name: sorted(entry.kinds) for name, entry in ENTRIES.items()}


def test_entries_without_arguments_take_none() -> None:
    for name, entry in exports():
        if not arguments_of(entry) and "." not in name:
            with pytest.raises(TypeError, match=name):
                entry(1)
    for value in (_core.Placement, _core.Candidate):
        with pytest.raises(TypeError, match="No constructor defined"):
            value()


def test_no_object_is_there_without_its_arguments() -> None:
    """Verbs would read memory that is nobody's."""
    classes = [v for v in vars(_core).values() if isinstance(v, type) and not issubclass(v, Exception)]
    assert len(classes) == 9
    for made in classes:
        if made is not _core.AttentionPlanner:  # which takes none
            with pytest.raises(TypeError, match=r"incompatible constructor arguments|No constructor defined"):
                made.__new__(made)
        with pytest.raises(TypeError, match="not an acceptable base type"):
            type("Other", (made,), {})
    planner = _core.AttentionPlanner.__new__(_core.AttentionPlanner)
    assert planner.max_block == -1
    tree = _core.ContextTree.__new__(_core.ContextTree, 8)
    tree.open(1, 0, i32(), 0)
    tree.__init__(4)  # type: ignore[misc]
    assert tree.num_blocks == 8


def refusal(call: Callable[..., Any], arguments: dict[str, Any]) -> str:
    """What the error says; of those that Python has for wrong types, values and ids."""
    try:
        call(**arguments)
    except (TypeError, ValueError, KeyError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ENTRIES)
def test_what_is_wrong_is_named_and_leaves_the_object_as_good_as_before(name: str) -> None:
    entry = ENTRIES[name]
    call, right = entry.make()
    call(**right)
    for argument, kind in entry.kinds.items():
        for value, said in kind(right[argument]):
            error = refusal(call, {**right, argument: value})
            assert argument in error, (argument, value, error)
            assert said in error or repr(value) in error, (argument, value, error)
        call(**right)


@pytest.mark.parametrize("name", [name for name in ENTRIES if not name.endswith("__init__")])
def test_an_argument_too_few_or_too_many_is_refused(name: str) -> None:
    call, right = ENTRIES[name].make()
    with pytest.raises(TypeError, match=name.rpartition(".")[2]):
        call(**right, surplus=1)
    with pytest.raises(TypeError, match=name.rpartition(".")[2]):
        call()


def test_an_output_lies_over_no_other_argument() -> None:
    """Ids are checked and then used: an output over them would change them in between."""
    shared = i32(2, 1)
    with pytest.raises(ValueError, match="slots overlaps counts: addresses"):
        tree().reserve(i64(1), shared[:1], i32(3, 4), shared)
    with pytest.raises(ValueError, match="slots overlaps token_ids: addresses"):
        tree().reserve(i64(1), i32(2), shared, shared)
    ids = i64(1, 2)
    with pytest.raises(ValueError, match="out overlaps context_ids"):
        tree().lengths(ids, ids.view(np.int32)[2:])
    with pytest.raises(ValueError, match="out overlaps context_ids"):
        tree().block_tables(ids[:1], ids.view(np.int32)[1:3].reshape(1, 2))
    with pytest.raises(ValueError, match="entries overlaps members"):
        _core.AttentionPlanner().plan(**{**PLAN, "members": PLAN["entries"][0]})
    arguments = rope()
    arguments["slots"] = arguments["key_cache"].reshape(-1)[4:8].view(np.int64)
    with pytest.raises(ValueError, match="key_cache overlaps slots"):
        _core.rope_append(**arguments)
    arguments = rope()
    arguments["value_cache"] = arguments["key_cache"]
    with pytest.raises(ValueError, match="key_cache overlaps value_cache"):
        _core.rope_append(**arguments)
    rows = np.zeros((2, 4), np.float32)
    with pytest.raises(ValueError, match="out overlaps rows"):
        linear().gather(rows.reshape(-1)[:4].view(np.int64), rows)
    values = np.zeros((2, 6), np.float32)
    with pytest.raises(ValueError, match="out overlaps x"):
        linear().forward(values.reshape(3, 4)[:2], values)
    with pytest.raises(ValueError, match="ids overlaps logits"):
        _core.argmax_rows(values, values.reshape(-1)[:4].view(np.int64))
    run, right = run_entry()
    with pytest.raises(ValueError, match="out overlaps k_cache"):
        run(**{**right, "out": view(KEPT["k_cache"].reshape(-1)[:128].reshape(2, 4, 16))})
    run(**{**right, "out": right["query"]})
