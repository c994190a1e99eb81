"""Sampling, log-probabilities and grammars inside the step loop: alone, in a batch, preempted, refused."""

from __future__ import annotations

import dataclasses
import json
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from engine_harness import Harness, load
from parrot.engine.grammar import Grammars
from parrot.engine.model import DecoderModel
from parrot.tokenizer.tokenizer import Tokenizer
from parrot.wire import CallId, Grammar, Logprobs, Sampling

MakeHarness = Callable[..., Harness]
CHOICES = Grammar("choices", json.dumps(["alpha", "alphabet", "beta", "naïve café"]))
SCHEMA = Grammar(
    "schema",
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"enum": ["Ada", "Grace"]},
                "tags": {"type": "array", "items": {"enum": [1, 22]}, "maxItems": 2},
                "paid": {"type": "boolean"},
            },
            "required": ["name", "tags", "paid"],
            "additionalProperties": False,
        }
    ),
)
IMPOSSIBLE = Grammar("schema", json.dumps({"type": "integer", "minimum": 5, "maximum": 4}))
KINDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.9},
    {"temperature": 1.2, "top_p": 0.9, "top_k": 50},
    {"temperature": 1.0, "min_p": 0.05, "presence_penalty": 1.0},
    {"frequency_penalty": 0.7, "repetition_penalty": 1.3},
    {"temperature": 1.5, "logit_bias": ((70, 4.0), (71, -9.0)), "logprobs": 3},
    {"temperature": 1.0, "grammar": SCHEMA, "ignore_eos": False},
    {"temperature": 1.3, "grammar": Grammar("regex", r"[a-f]{5,60}!"), "ignore_eos": False},
    {"temperature": 1.4, "grammar": CHOICES, "ignore_eos": False},
    {"temperature": 1.1, "stop": ("e", "a b", "\n"), "min_tokens": 9},
    {"temperature": 1.2, "stop_token_ids": tuple(range(60, 130)), "min_tokens": 4, "ignore_eos": False},
    {"temperature": 0.7, "prompt_logprobs": 1, "logprobs": 0, "top_k": 5},
]
REPEATING = Grammar("regex", "zzzzzz[xz]{6}zzzz[xz]{6}")


@pytest.fixture(scope="module")
def loaded(tiny_model: Path) -> tuple[DecoderModel, Tokenizer]:
    return load(tiny_model)


@pytest.fixture
def make(loaded: tuple[DecoderModel, Tokenizer]) -> MakeHarness:
    def build(**options: int) -> Harness:
        return Harness(*loaded, **options)

    return build


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(3, 256, length).tolist()


def constrained(grammar: Grammar, **fields: Any) -> dict[str, Any]:
    return {"grammar": grammar, "ignore_eos": False, "max_tokens": 80, **fields}


# --- the same ids, whatever else runs ----------------------------------------------------------------------


def test_every_kind_of_output_is_the_same_alone_in_a_batch_and_preempted(make: MakeHarness) -> None:
    kinds = [*KINDS, *KINDS[:4]]
    calls = [
        (prompt_of(14 + i, seed=i), {"max_tokens": 40, "seed": i, **kind}) for i, kind in enumerate(kinds)
    ]
    alone = [make().generate(prompt, **options) for prompt, options in calls]
    batched = make(max_batch_size=16, max_batch_tokens=512)
    together = batched.run(*[batched.submit(prompt, **options) for prompt, options in calls])
    crowded = make(num_blocks=14)
    squeezed = crowded.run(*[crowded.submit(prompt, **options) for prompt, options in calls])
    assert batched.engine.stats().preemptions == 0
    assert crowded.engine.stats().preemptions > 0
    for results in (together, squeezed):
        assert [result.ids for result in results] == [result.ids for result in alone]
        assert [result.outputs[0].text for result in results] == [r.outputs[0].text for r in alone]
        assert [r.outputs[0].finish_reason for r in results] == [r.outputs[0].finish_reason for r in alone]
        for mine, other in zip(results, alone, strict=True):
            compare_logprobs(mine.outputs[0].logprobs, other.outputs[0].logprobs)
            compare_logprobs(mine.outputs[0].prompt_logprobs, other.outputs[0].prompt_logprobs)


def compare_logprobs(mine: Logprobs | None, other: Logprobs | None) -> None:
    if mine is None or other is None:
        assert mine is other
        return
    assert mine.token_ids == other.token_ids
    assert floats(mine.values) == pytest.approx(floats(other.values), abs=1e-4)
    assert floats(mine.top_values) == pytest.approx(floats(other.top_values), abs=1e-4)


def floats(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype="<f4")


# --- log-probabilities -------------------------------------------------------------------------------------


def test_logprobs_are_those_of_transformers_also_on_a_cached_prefix(
    make: MakeHarness, tiny_model: Path
) -> None:
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    harness, prompt = make(), prompt_of(50, seed=4)
    for num_cached in (0, 49):
        result = harness.generate(prompt, max_tokens=12, temperature=1.0, seed=3, logprobs=5)
        assert result.fills[0].cached_tokens == num_cached
        logprobs = result.outputs[0].logprobs
        assert logprobs is not None
        assert np.frombuffer(logprobs.token_ids, "<i4").tolist() == result.ids
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + result.ids])).logits[0, len(prompt) - 1 : -1]
        expected = torch.log_softmax(logits.double(), dim=1)
        chosen = expected[torch.arange(12), torch.tensor(result.ids)].numpy()
        assert floats(logprobs.values) == pytest.approx(chosen, abs=1e-4)
        best = torch.topk(expected, 5, dim=1)
        assert floats(logprobs.top_values) == pytest.approx(best.values.numpy().ravel(), abs=1e-4)
        assert np.frombuffer(logprobs.top_ids, "<i4").tolist() == best.indices.ravel().tolist()


@pytest.mark.parametrize("options", [{"max_batch_tokens": 16}, {"num_blocks": 12}, {}])
def test_prompt_logprobs_are_those_of_transformers_whatever_is_cached(
    make: MakeHarness, tiny_model: Path, options: dict[str, int]
) -> None:
    from transformers import LlamaForCausalLM

    reference = LlamaForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    harness, prompt = make(**options), prompt_of(50, seed=4)
    scored = {"max_tokens": 30, "prompt_logprobs": 3}
    harness.generate(prompt, max_tokens=4)  # now it is cached
    calls = [harness.submit(prompt, **scored) for _ in range(2)]
    calls += [harness.submit(prompt_of(20 + i, seed=i), max_tokens=30) for i in range(4)]
    calls.append(harness.submit(prompt[:1], **scored))
    results = harness.run(*calls)
    with torch.inference_mode():
        expected = torch.log_softmax(reference(torch.tensor([prompt])).logits[0].double(), dim=1)
    best = torch.topk(expected[:-1], 3, dim=1)
    for result in results[:2]:
        assert result.error is None
        logprobs = result.outputs[0].prompt_logprobs
        assert logprobs is not None
        assert np.frombuffer(logprobs.token_ids, "<i4").tolist() == prompt[1:]
        chosen = expected[torch.arange(49), torch.tensor(prompt[1:])].numpy()
        assert floats(logprobs.values) == pytest.approx(chosen, abs=1e-4)
        assert floats(logprobs.top_values) == pytest.approx(best.values.numpy().ravel(), abs=1e-4)
    assert results[0].ids == harness.generate(prompt, max_tokens=30).ids
    assert all(result.outputs[0].prompt_logprobs is None for result in results[2:6])
    one = results[6].outputs[0].prompt_logprobs
    assert one is not None
    assert one.token_ids == b""
    if options.get("num_blocks"):
        assert harness.engine.stats().preemptions > 0


def test_prompt_logprobs_belong_to_the_first_output(make: MakeHarness) -> None:
    harness = make()
    plain, scored = Sampling(max_tokens=2), Sampling(max_tokens=2, prompt_logprobs=0)
    (result,) = harness.run(harness.submit_verbs([prompt_of(5), plain, prompt_of(3), scored]))
    assert result.error is not None
    assert result.error.param == "prompt_logprobs"


def test_logprobs_go_with_the_ids_that_are_whole_before_a_stop(make: MakeHarness) -> None:
    harness, prompt = make(), prompt_of(20, seed=1)
    text = harness.generate(prompt, max_tokens=20).outputs[0].text
    stop = text[8:11]
    result = harness.generate(prompt, max_tokens=20, stop=(stop,), logprobs=0, stream=True)
    done = result.outputs[0]
    assert done.text == text[: text.index(stop)]
    assert done.logprobs is not None
    ids = np.frombuffer(done.logprobs.token_ids, "<i4").tolist()
    assert harness.generate(prompt, max_tokens=20).ids[: len(ids)] == ids
    assert done.text.startswith(harness.tokenizer.decode(ids))
    streamed = [reply.logprobs for reply in harness.log if getattr(reply, "logprobs", None) is not None]
    assert b"".join(part.token_ids for part in streamed[:-1]) == done.logprobs.token_ids  # type: ignore[union-attr]


def test_asking_for_logprobs_changes_no_id(make: MakeHarness) -> None:
    for kind in KINDS:
        options = {"max_tokens": 40, "seed": 4, **kind}
        results = [make().generate(prompt_of(20), **{**options, "logprobs": n}) for n in (None, 0, 4)]
        assert results[0].ids == results[1].ids == results[2].ids
        done = results[2].outputs[0]
        assert done.logprobs is not None
        said = np.frombuffer(done.logprobs.token_ids, "<i4").tolist()
        assert said == results[2].ids[: len(said)]
        assert len(said) == len(results[2].ids) or "stop" in kind  # which may cut an id in two


# --- where an output ends ----------------------------------------------------------------------------------


def test_a_stop_id_ends_the_output_and_is_cut(make: MakeHarness) -> None:
    prompt = prompt_of(20, seed=6)
    plain = make().generate(prompt, max_tokens=20)
    stop_id = next(token for i, token in enumerate(plain.ids) if i >= 4 and token not in plain.ids[:i])
    result = make().generate(prompt, max_tokens=20, stop_token_ids=(stop_id,))
    assert result.ids == plain.ids[: plain.ids.index(stop_id)]
    assert result.outputs[0].finish_reason == "stop"


def test_the_first_min_tokens_ids_do_not_end_the_output(loaded: tuple[DecoderModel, Tokenizer]) -> None:
    model, tokenizer = loaded
    prompt = prompt_of(20, seed=6)
    plain = Harness(model, tokenizer).generate(prompt, max_tokens=24)
    eos = plain.ids[3]
    harness = Harness(model, dataclasses.replace(tokenizer, eos_ids=frozenset({eos})))
    early, late = (harness.generate(prompt, max_tokens=24, min_tokens=n, ignore_eos=False) for n in (0, 10))
    assert len(early.ids) == plain.ids.index(eos)
    assert len(late.ids) >= 10
    assert eos not in late.ids
    text = plain.outputs[0].text
    stopped = Harness(model, tokenizer).generate(
        prompt, max_tokens=24, min_tokens=8, stop=(text[0], text[-1])
    )
    assert len(stopped.ids) >= 8
    assert stopped.ids[:8] == plain.ids[:8]


# --- grammars ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 3.0])
def test_outputs_are_what_their_grammars_say(make: MakeHarness, temperature: float) -> None:
    harness = make()
    numbers = range(6)
    common = {"temperature": temperature}
    chosen = [harness.submit(prompt_of(9, seed=i), **constrained(CHOICES, seed=i, **common)) for i in numbers]
    objects = [harness.submit(prompt_of(9, seed=i), **constrained(SCHEMA, seed=i, **common)) for i in numbers]
    for result in harness.run(*chosen):
        assert result.outputs[0].text in json.loads(CHOICES.source)
        assert result.outputs[0].finish_reason == "stop"
    for result in (harness.results[call] for call in objects):
        value = json.loads(result.outputs[0].text)
        assert list(value) == ["name", "tags", "paid"]
        assert result.outputs[0].text == json.dumps(value)


def test_ids_without_a_choice_are_filled_in_and_count_as_generated(make: MakeHarness) -> None:
    properties = {"a_long_name": {"const": "value"}, "x": {"enum": [1, 2]}}
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    only = Grammar("schema", json.dumps({**schema, "additionalProperties": False}))
    harness = make()
    before = harness.engine.stats()
    result = harness.generate(prompt_of(20), **constrained(only))
    done, stats = result.outputs[0], harness.engine.stats()
    assert done.text in ('{"a_long_name": "value", "x": 1}', '{"a_long_name": "value", "x": 2}')
    assert done.num_generated == len(result.ids) > 12
    assert stats.num_steps - before.num_steps <= 6
    several = make().generate(prompt_of(20), **constrained(SCHEMA))
    assert harness.tokenizer.decode(several.ids) == several.outputs[0].text


def test_forced_ids_are_penalised_as_others_are(make: MakeHarness) -> None:
    letters = {letter: make().tokenizer.backend.token_to_id(letter) for letter in "xz"}
    bias = ((letters["x"], 40.0), (letters["z"], 46.0))  # z, unless there have been many
    options = constrained(REPEATING, logit_bias=bias, frequency_penalty=2.0)
    results = [make().generate(prompt_of(20), **options, logprobs=logprobs) for logprobs in (None, 0)]
    assert results[0].outputs[0].text == results[1].outputs[0].text
    assert results[0].outputs[0].text[6] == "x"


def test_forced_ids_are_streamed_and_stay_within_max_tokens(make: MakeHarness) -> None:
    whole = make().generate(prompt_of(20), **constrained(SCHEMA), stream=True)
    assert whole.chunks[1] == whole.outputs[0].text
    for max_tokens in range(1, whole.outputs[0].num_generated + 1):
        result = make().generate(prompt_of(20), **constrained(SCHEMA, max_tokens=max_tokens))
        done = result.outputs[0]
        assert len(result.ids) <= max_tokens
        is_whole = max_tokens >= whole.outputs[0].num_generated
        assert done.finish_reason == ("stop" if is_whole else "length")
        assert whole.outputs[0].text.startswith(done.text.rstrip("\ufffd"))


def test_several_constrained_outputs_of_one_context(make: MakeHarness) -> None:
    harness = make()
    first = Sampling(max_tokens=40, grammar=CHOICES)
    second = Sampling(max_tokens=80, grammar=SCHEMA, temperature=1.0, seed=2)
    free = Sampling(max_tokens=5, ignore_eos=True)
    (result,) = harness.run(harness.submit_verbs([prompt_of(20), first, prompt_of(3), second, free]))
    assert result.outputs[0].text in json.loads(CHOICES.source)
    json.loads(result.outputs[1].text)
    assert len(result.ids_of(2)) == 5


def test_white_space_between_values_is_bounded(make: MakeHarness) -> None:
    spaces = [
        token
        for token in range(make().tokenizer.vocab_size)
        if re.fullmatch(r"\s+", make().tokenizer.decode([token]))
    ]
    result = make().generate(
        prompt_of(20), **constrained(SCHEMA, logit_bias=tuple((token, 100.0) for token in spaces))
    )
    assert result.outputs[0].text == json.dumps(json.loads(result.outputs[0].text))


def test_an_impossible_grammar_fails_its_own_call_and_the_engine_goes_on(make: MakeHarness) -> None:
    harness = make()
    for _ in range(2):  # compiled, then found in the cache
        bad, good = (
            harness.submit(prompt_of(20), **constrained(IMPOSSIBLE)),
            harness.submit(prompt_of(20), **constrained(CHOICES)),
        )
        harness.run()
        error = harness.results[bad].error
        assert error is not None
        assert (error.code, error.param) == ("invalid_request", "schema")
        assert "minimum" in error.message
        assert harness.results[good].outputs[0].text in json.loads(CHOICES.source)


@pytest.mark.parametrize(
    "grammar",
    [
        Grammar("regex", "("),
        Grammar("regex", r"[^\d\D]"),
        Grammar("regex", "a" * 300_000),
        Grammar("regex", "((((a{1,900}){1,900}){1,900}){1,900}b){1,900}c"),
        Grammar("schema", "not json"),
        Grammar("schema", "[]"),
        Grammar("schema", json.dumps({"type": "string", "pattern": "(?=a)b"})),
        Grammar("schema", json.dumps({"$ref": "#/$defs/none"})),
        Grammar("schema", '{"type":' * 5000),
        Grammar("choices", "[]"),
    ],
)
def test_bad_and_huge_grammars_never_harm_the_engine(make: MakeHarness, grammar: Grammar) -> None:
    harness = make()
    bad = harness.submit(prompt_of(20), **constrained(grammar, max_tokens=12))
    good = harness.submit(prompt_of(20), max_tokens=5)
    harness.run()
    result = harness.results[bad]
    assert result.ended
    if result.error is not None:
        assert (result.error.code, result.error.param) == ("invalid_request", grammar.kind)
        assert len(result.error.message) < 700
    assert len(harness.results[good].ids) == 5


def test_a_grammar_that_compiles_holds_up_nobody_and_its_call_can_be_aborted(
    make: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, compile_now = threading.Event(), Grammars._compile

    def slow(self: Grammars, grammar: Grammar) -> object:
        assert gate.wait(20)
        return compile_now(self, grammar)

    monkeypatch.setattr(Grammars, "_compile", slow)
    harness = make()
    waiting = harness.submit(prompt_of(20), **constrained(CHOICES))
    aborted = harness.submit(prompt_of(21), **constrained(SCHEMA))
    quick = harness.submit(prompt_of(30), max_tokens=6)
    while not harness.results[quick].ended:
        harness.step()
    assert not harness.results[waiting].ended
    assert harness.engine.has_work
    harness.engine.abort([CallId(aborted)])
    gate.set()
    (result,) = harness.run(waiting)
    assert result.outputs[0].text in json.loads(CHOICES.source)
    assert not harness.results[aborted].ended
