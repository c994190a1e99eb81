"""Sampling parameters and constrained decoding through the whole service: a real manager, a real engine, the
openai client and the front end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel
from service_process import ServiceProcess, service

import parrot as P
from parrot.errors import InvalidRequest, TypedOutputFailed, UpstreamFailed

pytestmark = pytest.mark.system
PROMPT = "The quick brown fox jumps over the lazy dog, and we'll see what they've said, I'm sure you're: "


class Invoice(BaseModel):
    customer: Literal["Ada", "Grace"]
    paid: bool
    total: Literal[1, 20, 300]


@pytest.fixture(scope="module")
def running(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with service(tiny_model, tmp_path_factory.mktemp("service")) as process:
        yield process


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> str:
    return str(tiny_model)


@pytest.fixture
def client(running: ServiceProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture
def connection(running: ServiceProcess) -> Iterator[P.Connection]:
    with P.connect(running.url) as made:
        yield made


def complete(client: openai.OpenAI, model: str, **options: Any) -> Any:
    fields = {"max_tokens": 12, "seed": 5, "extra_body": {"ignore_eos": True}, **options}
    return client.completions.create(model=model, prompt=PROMPT, **fields)


def test_the_same_seed_gives_the_same_text_and_another_seed_another(
    client: openai.OpenAI, model: str
) -> None:
    texts = [complete(client, model, seed=seed).choices[0].text for seed in (5, 5, 6)]
    assert texts[0] == texts[1] != texts[2]


def test_n_answers_compute_their_prompt_once(
    running: ServiceProcess, client: openai.OpenAI, model: str
) -> None:
    before = running.engine()["stats"]
    prompt = "A prompt that nobody has asked before, and long enough that it pays to wait for it. " * 4
    answer = client.completions.create(model=model, prompt=prompt, n=4, seed=5, max_tokens=6, temperature=1.0)
    assert answer.usage is not None
    stats = running.engine()["stats"]
    assert stats["forks"] - before["forks"] == 3
    assert stats["prefill_tokens"] - before["prefill_tokens"] <= answer.usage.prompt_tokens + 3
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    for index, choice in enumerate(answer.choices):
        alone = client.completions.create(
            model=model, prompt=prompt, seed=5 + index, max_tokens=6, temperature=1.0
        )
        assert choice.text == alone.choices[0].text


def test_logprobs_of_both_routes_are_the_same_streaming_and_not(client: openai.OpenAI, model: str) -> None:
    whole = complete(client, model, logprobs=3).choices[0].logprobs
    assert whole is not None
    assert len(whole.tokens) == len(whole.token_logprobs) == len(whole.top_logprobs) == 12
    stream = complete(client, model, logprobs=3, stream=True)
    parts = [chunk.choices[0].logprobs for chunk in stream if chunk.choices[0].logprobs is not None]
    for field in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [item for part in parts for item in getattr(part, field)] == getattr(whole, field)
    chat: dict[str, Any] = {
        "model": model,
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 9,
        "seed": 1,
        "logprobs": True,
        "top_logprobs": 2,
        "extra_body": {"ignore_eos": True},
    }
    answer = client.chat.completions.create(**chat).choices[0]
    content = answer.logprobs.content
    assert len(content) == 9
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    pieces = [chunk.choices[0].logprobs for chunk in client.chat.completions.create(**chat, stream=True)]
    assert [entry for piece in pieces if piece is not None for entry in piece.content] == content


def test_an_echoed_prompt_has_its_logprobs_also_when_it_is_cached(client: openai.OpenAI, model: str) -> None:
    plain = complete(client, model, max_tokens=3, temperature=0, logprobs=2).choices[0]
    for _ in range(2):
        answer = complete(client, model, max_tokens=3, temperature=0, logprobs=2, echo=True).choices[0]
        logprobs = answer.logprobs
        assert answer.text == PROMPT + plain.text
        assert "".join(logprobs.tokens[:-3]) == PROMPT
        assert logprobs.tokens[-3:] == plain.logprobs.tokens
        assert logprobs.token_logprobs[0] is None
        assert all(value < 0 for value in logprobs.token_logprobs[1:])
    alone = complete(client, model, max_tokens=0, temperature=0, logprobs=2, echo=True).choices[0]
    assert alone.text == PROMPT
    assert alone.logprobs.token_logprobs == logprobs.token_logprobs[:-3]


def test_a_bias_forces_and_forbids_ids(client: openai.OpenAI, model: str) -> None:
    def letters(**options: Any) -> set[str]:
        return set(complete(client, model, temperature=0, **options).choices[0].text)

    assert len(letters(logit_bias={"70": 100})) == 1
    assert len(letters(logit_bias={"70": 60, "71": 40})) == 1
    assert len(letters(logit_bias={"70": 60, "71": 40}, frequency_penalty=2, max_tokens=40)) == 2


def test_a_json_schema_is_obeyed_and_forced_ids_count(client: openai.OpenAI, model: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "i", "schema": Invoice.model_json_schema()}}
    for temperature in (0.0, 2.0):
        answer: Any = client.chat.completions.create(
            model=model,
            messages=[{"role": "user", "content": "An invoice, please."}],
            response_format=schema,  # type: ignore[arg-type]
            temperature=temperature,
            seed=3,
            max_tokens=200,
        )
        assert answer.choices[0].finish_reason == "stop"
        text = answer.choices[0].message.content
        Invoice.model_validate_json(text)
        assert text == json.dumps(json.loads(text)), "white space beside that of json.dumps"
        assert answer.usage.completion_tokens >= len(text) / 8


def test_the_openai_clients_parse_gives_the_object(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.parse(
        model=model, messages=[{"role": "user", "content": "An invoice."}], response_format=Invoice, seed=1
    )
    assert isinstance(answer.choices[0].message.parsed, Invoice)


def test_a_json_object_cut_by_max_tokens_says_length(client: openai.OpenAI, model: str) -> None:
    answer = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": "Anything."}],
        response_format={"type": "json_object"},
        max_tokens=3,
        temperature=0,  # drawn, it may be {} by chance
    )
    assert answer.choices[0].finish_reason == "length"


def test_a_typed_function_gives_an_object_and_its_text(connection: P.Connection) -> None:
    @P.function
    def bill(who) -> Invoice:
        """The invoice of {{input:who}}: {{output}}"""

    @P.function(outputs=P.Output(max_tokens=4, ignore_eos=True))
    def note(invoice):
        """About {{input:invoice}}: {{output:text}}"""

    invoice = bill("Ada")
    text = note(invoice)
    assert isinstance(invoice.get(), Invoice)
    assert Invoice.model_validate_json(invoice.get(raw=True)) == invoice.get()
    assert text.get()


def test_regex_and_choices_constrain_outputs_of_one_template(connection: P.Connection) -> None:
    @P.function(
        outputs={
            "date": P.Output(regex=r"20[0-9]{2}-(0[1-9]|1[0-2])", temperature=1.5, seed=2),
            "word": P.Output(choices=["c++", "naïve café", "new\nline"], temperature=1.5, seed=2),
            "only": P.Output(choices=["there is but one"]),
            "free": P.Output(max_tokens=5, ignore_eos=True),
        }
    )
    def fill(x):
        """{{input:x}} {{output:date}} {{output:word}} {{output:only}} {{output:free}}"""

    result = fill("When?")
    year, month = result.date.get().split("-")
    assert (year[:2], 1 <= int(month) <= 12) == ("20", True)
    assert result.word.get() in ("c++", "naïve café", "new\nline")
    assert result.only.get() == "there is but one"
    assert result.free.get()


def test_a_typed_output_cut_by_max_tokens_fails_and_is_not_passed_on(connection: P.Connection) -> None:
    @P.function(outputs=P.Output(schema=Invoice, max_tokens=6))
    def bill(who):
        """The invoice of {{input:who}}: {{output:invoice}}"""

    @P.function
    def note(invoice):
        """About {{input:invoice}}: {{output:text}}"""

    invoice = bill("Ada")
    text = note(invoice)
    with pytest.raises(TypedOutputFailed, match="cut by max_tokens = 6"):
        invoice.get()
    with pytest.raises(UpstreamFailed, match="cut by max_tokens = 6"):
        text.get()


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"schema": {"type": "string", "minLength": 5, "maxLength": 2}}, "schema"),
        ({"schema": {"type": "string", "pattern": "(?=a)b"}}, "schema"),
        ({"regex": "("}, "regex"),
        ({"regex": r"[^\d\D]"}, "regex"),
        ({"logit_bias": {10**6: 1.0}}, "logit_bias"),
        ({"stop_token_ids": [10**6]}, "stop_token_ids"),
    ],
)
def test_what_cannot_be_done_fails_alone_and_by_name(
    connection: P.Connection, options: dict[str, Any], name: str
) -> None:
    bad = P.template("{{input:x}} {{output:y}}", outputs=P.Output(**options))
    good = P.template("{{input:x}} {{output:y}}", outputs=P.Output(max_tokens=3, ignore_eos=True))
    assert good("before").get()
    with pytest.raises(InvalidRequest, match=name) as error:
        bad("x").get()
    assert error.value.param == name
    assert good("after").get()


def test_logprobs_of_a_variable(connection: P.Connection) -> None:
    ask = P.template("{{input:x}} {{output:y}}", outputs=P.Output(max_tokens=5, ignore_eos=True, logprobs=2))
    variable = ask("Why?")
    entries = variable.logprobs()
    assert "".join(entry.text for entry in entries) == variable.get()
    for entry in entries:
        assert entry.top[0].logprob == entry.logprob  # greedy
        assert [one.logprob for one in entry.top] == sorted((o.logprob for o in entry.top), reverse=True)
