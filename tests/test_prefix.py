"""PrefixHash: equal beginnings have equal hashes, before and after values exist."""

from __future__ import annotations

from graph_builder import SESSION_ID, finish, flow_call, make_graph, prompt_call, read, submit, value
from parrot import api
from parrot.manager.call import Call
from parrot.manager.graph import Graph


def hashes(graph: Graph, call: Call) -> list[bytes]:
    return [graph.prefix_hash(call, boundary) for boundary in range(len(call.parts) + 1)]


def pair(graph: Graph, first: str, second: str, **values: str) -> tuple[list[bytes], list[bytes]]:
    bound = [read(name, value=text) for name, text in values.items()]

    def call(name: str, prompt: str) -> api.CallBody:
        used = [placeholder for placeholder in bound if f"{{{{input:{placeholder.name}}}}}" in prompt]
        return prompt_call(name, prompt + f"{{{{output:{name}_out}}}}", *used)

    one, other = submit(graph, call("F", first), call("G", second)).calls
    return hashes(graph, one), hashes(graph, other)


def test_calls_share_hashes_up_to_where_they_differ() -> None:
    one, other = pair(make_graph(), "Same {{input:a}} one", "Same {{input:a}} two", a="x")
    assert one[:3] == other[:3]
    assert one[3] != other[3]
    assert len(set(one)) == len(one)


def test_only_the_text_counts_and_not_how_it_is_cut() -> None:
    one, other = pair(make_graph(), "ab{{input:c}}", "a{{input:b}}{{input:c}}", b="b", c="c")
    assert one[1] == other[2]
    assert one[2] == other[3]


def test_a_pending_variable_stands_for_its_text() -> None:
    graph = make_graph()
    submit(graph, variables=[value("p"), value("q")])
    one, other, third = submit(
        graph,
        prompt_call("F", "S {{input:a}} one {{output:x}}", read("a", "p")),
        prompt_call("G", "S {{input:b}} two {{output:y}}", read("b", "p")),
        prompt_call("H", "S {{input:b}} two {{output:z}}", read("b", "q")),
    ).calls
    assert graph.prefix_hash(one, 2) == graph.prefix_hash(other, 2)
    assert graph.prefix_hash(one, 2) != graph.prefix_hash(third, 2)
    before = graph.prefix_hash(one, 2)
    graph.set_value("p", "text")
    graph.set_value("q", "text")
    assert graph.prefix_hash(one, 2) == graph.prefix_hash(third, 2) != before


def test_a_pending_variable_with_other_transforms_is_another_text() -> None:
    graph = make_graph()
    submit(graph, variables=[value("p")])
    one, other = submit(
        graph,
        prompt_call("F", "{{input:a}}{{output:x}}", read("a", "p")),
        prompt_call("G", "{{input:a}}{{output:y}}", read("a", "p", transforms=[{"op": "strip"}])),
    ).calls
    assert graph.prefix_hash(one, 1) != graph.prefix_hash(other, 1)


def test_generated_text_takes_the_place_of_an_output() -> None:
    graph = make_graph()
    call = submit(graph, flow_call("F", [], ["x", "y"])).calls[0]
    before = hashes(graph, call)
    finish(graph, "F", "raw")
    after = hashes(graph, call)
    assert before[1] == after[1]
    assert before[2] != after[2]


def test_model_domain_key_and_roles_are_part_of_it() -> None:
    def of(graph: Graph, **fields: object) -> bytes:
        call = prompt_call("F", "text {{output:x}}", **fields)
        return graph.prefix_hash(submit(graph, call).calls[0], 1)

    key = b"k" * 16
    plain = of(Graph(SESSION_ID, hash_key=key))
    assert of(Graph(SESSION_ID, hash_key=key)) == plain
    assert of(Graph(SESSION_ID, hash_key=key), model="smollm2") == plain  # the default model, named
    assert of(Graph(SESSION_ID, hash_key=key), model="other") != plain
    assert of(Graph(SESSION_ID, hash_key=key, domain=2)) != plain
    assert of(Graph(SESSION_ID, hash_key=b"j" * 16)) != plain
    chat = [{"role": "user", "content": "text "}, {"role": "assistant", "content": "{{output:x}}"}]
    chat_hash = of(Graph(SESSION_ID, hash_key=key), prompt=None, messages=chat)
    chat[0]["role"] = "system"
    assert len({plain, chat_hash, of(Graph(SESSION_ID, hash_key=key), prompt=None, messages=chat)}) == 3
