"""From calls to ids: what is control text, what is literal, and how a call goes on behind its own output."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from graph_builder import make_graph, prompt_call, read
from parrot import api, wire
from parrot.errors import InvalidRequest, PromptTooLong
from parrot.manager.call import Call
from parrot.manager.prompts import CallPrompt, Limits, PromptBuilder, RunPrompt, assemble
from parrot.tokenizer import Piece, Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> Tokenizer:
    return Tokenizer.load(tiny_model)


def add(*calls: api.CallBody) -> list[Call]:
    graph = make_graph()
    return graph.add(api.SubmitBody(session_id=graph.session_id, calls=calls), now_us=0).calls


def encode(tokenizer: Tokenizer, call: Call) -> RunPrompt:
    """The prompt of every step that is ready now."""
    builder, prompt, steps = PromptBuilder(tokenizer), CallPrompt(), call.ready_steps()
    prompt.fills += builder.encode(
        builder.step_pieces(call, call.steps[: steps[-1].index + 1]), first_step=0, domain=1
    )
    return assemble(prompt, call, steps)


def text(tokenizer: Tokenizer, ids: wire.Ids) -> str:
    return tokenizer.backend.decode(ids.tolist(), skip_special_tokens=False)


def whole(tokenizer: Tokenizer, prompt: str) -> list[int]:
    """Ids of a prompt tokenised at once, control strings as control tokens."""
    return list(tokenizer.backend.encode(prompt, add_special_tokens=False).ids)


def test_constants_of_a_raw_prompt_are_control_text_and_values_are_not(tokenizer: Tokenizer) -> None:
    value = "<|im_end|>"
    (call,) = add(prompt_call("f", "<|im_start|>user {{input:x}} {{output:y}}", read("x", value=value)))
    ids = encode(tokenizer, call).first.tolist()
    assert ids[0] == tokenizer.backend.token_to_id("<|im_start|>")
    assert tokenizer.backend.token_to_id("<|im_end|>") not in ids
    assert text(tokenizer, np.array(ids)) == "<|im_start|>user <|im_end|> "


def test_values_and_constants_are_encoded_as_one_text(tokenizer: Tokenizer) -> None:
    (call,) = add(prompt_call("f", "The qui{{input:x}}n fox {{output:y}}", read("x", value="ck brow")))
    assert encode(tokenizer, call).first.tolist() == whole(tokenizer, "The quick brown fox ")


def chat(*messages: tuple[str, str], outputs: str = "a", **values: str) -> Call:
    body = {
        "messages": [{"role": role, "content": content} for role, content in messages],
        "placeholders": [
            *({"name": name, "kind": "input", "value": value} for name, value in values.items()),
            *({"name": name, "kind": "output"} for name in outputs),
        ],
    }
    return add(api.CallBody.model_validate(body))[0]


def test_a_chat_gets_its_glue_and_its_contents_stay_literal(tokenizer: Tokenizer) -> None:
    call = chat(
        ("system", "Be <|im_end|> brief"), ("user", "{{input:q}}?"), ("assistant", "{{output:a}}"), q="Why"
    )
    run = encode(tokenizer, call)
    system, user = "system\nBe <|im_end|> brief<|im_end|>\n", "user\nWhy?<|im_end|>\n"
    assert text(tokenizer, run.first) == f"<|im_start|>{system}<|im_start|>{user}<|im_start|>assistant\n"
    assert run.first.tolist().count(tokenizer.backend.token_to_id("<|im_end|>")) == 2


def test_the_turn_behind_an_output_begins_with_the_end_of_its_message(tokenizer: Tokenizer) -> None:
    call = chat(
        ("user", "one"),
        ("assistant", "{{output:a}}"),
        ("user", "two"),
        ("assistant", "So {{output:b}} tail"),
        outputs="ab",
    )
    run = encode(tokenizer, call)
    assert text(tokenizer, run.first).endswith("<|im_start|>assistant\n")
    assert [text(tokenizer, ids) for ids in run.later] == [
        "<|im_end|>\n<|im_start|>user\ntwo<|im_end|>\n<|im_start|>assistant\nSo "
    ]
    assert run.num_tokens == len(run.first) + len(run.later[0])


def test_a_later_run_starts_from_all_ids_so_far_as_they_were_generated(tokenizer: Tokenizer) -> None:
    (call,) = add(prompt_call("f", "Q {{output:a}} then {{output:b}}"))
    generated = np.array([7, 8, 9], dtype=np.int32)
    first = encode(tokenizer, call).first
    call.steps[0].output.binding.token_ids = wire.pack_ids(generated)
    call.next_step = 1
    run = encode(tokenizer, call)
    behind = whole(tokenizer, " then ")
    assert run.first.tolist() == [*first.tolist(), 7, 8, 9, *behind]
    assert run.first.dtype == run.boundaries.dtype == np.int32
    boundaries = run.boundaries.tolist()
    assert boundaries == sorted(set(boundaries))
    assert all(0 < boundary <= len(run.first) for boundary in boundaries)


def test_two_outputs_with_nothing_between_have_an_empty_fill(tokenizer: Tokenizer) -> None:
    (call,) = add(prompt_call("f", "Q {{output:a}}{{output:b}}"))
    assert [len(ids) for ids in encode(tokenizer, call).later] == [0]


def test_an_empty_prompt_is_refused(tokenizer: Tokenizer) -> None:
    (call,) = add(prompt_call("f", "{{input:x}}{{output:y}}", read("x", value="")))
    with pytest.raises(InvalidRequest, match="empty"):
        encode(tokenizer, call)


def test_a_chat_from_outside_is_literal(tokenizer: Tokenizer) -> None:
    pieces = PromptBuilder(tokenizer).chat_pieces([("user", "<|im_end|>{{input:x}}")])
    assert Piece("<|im_end|>{{input:x}}") in pieces
    assert "".join(piece.text for piece in pieces).endswith("<|im_start|>assistant\n")


def test_ids_from_outside_are_checked(tokenizer: Tokenizer) -> None:
    builder = PromptBuilder(tokenizer)
    assert builder.from_ids([1, 2, 3]).token_ids.tolist() == [1, 2, 3]
    assert builder.from_ids([1] * 300).boundaries.tolist() == [128, 256, 300]
    for wrong in (-1, tokenizer.vocab_size, 2**40):
        with pytest.raises(InvalidRequest, match=str(wrong)):
            builder.from_ids([1, wrong])


@pytest.mark.parametrize(
    ("prompt", "new", "says"), [(60, 4, None), (60, 5, "context of 64"), (40, 9, "KV cache of 48")]
)
def test_prompt_and_output_must_fit_model_and_cache(prompt: int, new: int, says: str | None) -> None:
    limits = Limits(max_model_len=64, num_blocks=100 if says is None or "context" in says else 3)
    if says is None:
        limits.check(prompt, new)
        return
    with pytest.raises(PromptTooLong, match=rf"^story: .*{says}"):
        limits.check(prompt, new, "story")
    with pytest.raises(PromptTooLong, match=rf"^{prompt} prompt tokens.*{says}"):
        limits.check(prompt, new)


def test_a_text_is_hopeless_only_when_no_tokenisation_could_fit(tokenizer: Tokenizer) -> None:
    builder, limits = PromptBuilder(tokenizer), Limits(max_model_len=10, num_blocks=10)
    longest = max(len(token.encode()) for token in tokenizer.backend.get_vocab())
    builder.refuse_hopeless(10 * longest, limits)
    with pytest.raises(PromptTooLong, match="at least 11 tokens"):
        builder.refuse_hopeless(11 * longest, limits)
