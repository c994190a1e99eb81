"""JSON paths: the first match agrees with the library's, within a budget."""

from __future__ import annotations

import jsonpath_ng.parser
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parrot.manager.json_path import (
    MAX_STEPS,
    Json,
    PathBudgetExceeded,
    PathError,
    compile_path,
    first_match,
)

PATHS = [
    "$",
    "$.a",
    "a.b",
    "$.a[0]",
    "$[-1]",
    "$[0,1]",
    "$.a,b",
    "$[1:]",
    "$[::-1]",
    "$.*",
    "$[*].a",
    "$..a",
    "$..[1]",
    "$..a..b",
    "$.a..*",
    "$.a.$.b",
    "`this`.a",
]

documents: st.SearchStrategy[Json] = st.recursive(
    st.none() | st.booleans() | st.integers(0, 3) | st.sampled_from(["x", "y"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=12,
)


@given(documents, st.sampled_from(PATHS))
def test_first_match_is_the_librarys(document: Json, path: str) -> None:
    matches = jsonpath_ng.parser.parse(path).find(document)
    assert first_match(compile_path(path), document) == ((matches[0].value,) if matches else None)


@pytest.mark.parametrize("path", ["$.`parent`", "a where b", "$[?(@.a)]", "$.a.", "$["])
def test_other_selectors_and_bad_paths_are_refused(path: str) -> None:
    with pytest.raises(PathError):
        compile_path(path)


def test_a_deep_document_is_walked_without_recursion() -> None:
    document: Json = {"a": 1}
    for _ in range(40_000):
        document = [document]
    assert first_match(compile_path("$..a"), document) == (1,)


@pytest.mark.parametrize("path", ["$..*..*..x", "$..x", "$[*].$[*].$[*].x"])
def test_a_walk_without_a_match_stops_at_the_budget(path: str) -> None:
    with pytest.raises(PathBudgetExceeded):
        first_match(compile_path(path), [[1] * 1000] * 1000)


@pytest.mark.parametrize("step", [".a", "..a", "[0]", ",1", ".*", "|a"])
def test_a_path_of_many_steps_is_refused_before_it_is_parsed(step: str) -> None:
    path = "$[0" + step * 300 + "]" if step == ",1" else "$" + step * 300
    with pytest.raises(PathError, match=f"steps are above the limit of {MAX_STEPS}"):
        compile_path(path)


def test_a_path_may_have_as_many_steps_as_the_limit_says() -> None:
    document: Json = 7
    for _ in range(MAX_STEPS):
        document = {"a": document}
    assert first_match(compile_path("$" + ".a" * MAX_STEPS), document) == (7,)
