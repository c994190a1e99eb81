"""Hard case 2 in the whole service: what a tenant's text is worth to another one, and what published text is.

Each test uses texts of its own, so that one service serves them all.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_process import ServiceProcess, call_body, service

from parrot.manager.key_file import KeyEntry, KeyFile, TenantLimits, digest_of, new_key

pytestmark = pytest.mark.system

SENTENCE = "Answer as a careful expert who has read every manual, number {}, and never guess. "
PUBLISHED = "".join(SENTENCE.format(n) for n in range(6))
SYSTEM = "You are the help desk of the harbour. " + "".join(SENTENCE.format(100 + n) for n in range(6))
TEMPLATE = PUBLISHED + "{{input:question}} {{output:out}}"
TEMPLATES = [TEMPLATE, [{"role": "system", "content": SYSTEM}]]


class Tenant:
    """A tenant of the service, by its key."""

    def __init__(self, running: ServiceProcess, key: str) -> None:
        self.http = httpx.Client(
            base_url=running.url, timeout=120, headers={"Authorization": f"Bearer {key}"}
        )
        self._num_calls = 0

    def cached(self, prompt: str, **values: str) -> int:
        """Runs a call; the tokens of its prompt that were in the cache."""
        self._num_calls += 1
        request_id = f"c{self._num_calls}"
        session = self.http.post("/v1/session").json()["session_id"]
        body = {"session_id": session, "calls": [call_body(request_id, prompt, values=values)]}
        assert self.http.post("/v1/submit", json=body).status_code == 200
        get = {"session_id": session, "semantic_var_id": f"v-{request_id}"}
        assert self.http.post("/v1/get", json=get).json()["status"] == "ready"
        (call,) = self.http.get(f"/v1/session/{session}/graph").json()["calls"]
        return int(call["cached_tokens"])

    def openai_cached(self, route: str, **body: Any) -> int:
        """The same by an OpenAI route."""
        reply = self.http.post(route, json={"model": body.pop("model"), "max_tokens": 4, **body})
        assert reply.status_code == 200, reply.text
        return int(reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    def chat_cached(self, model: str, *messages: tuple[str, str]) -> int:
        contents = [{"role": role, "content": content} for role, content in messages]
        return self.openai_cached("/v1/chat/completions", model=model, messages=contents)


@pytest.fixture(scope="module")
def tenants(
    tiny_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Tenant, Tenant, Tenant]]:
    """Two tenants, and the operator, of one service with published templates."""
    directory = tmp_path_factory.mktemp("isolation")
    keys = {"one": new_key(), "other": new_key(), "": new_key()}
    file = KeyFile(
        tenants={"one": TenantLimits(), "other": TenantLimits()},
        keys=[
            KeyEntry(sha256=digest_of(key), tenant=name or None, operator=not name)
            for name, key in keys.items()
        ],
    )
    (directory / "keys.json").write_text(file.model_dump_json())
    (directory / "keys.json").chmod(0o600)
    (directory / "published.json").write_text(json.dumps(TEMPLATES))
    options = ["--api-keys", str(directory / "keys.json")]
    options += ["--published-templates", str(directory / "published.json")]
    with service(tiny_model, directory, *options) as running:
        one, other, operator = (Tenant(running, key) for key in keys.values())
        yield one, other, operator


Tenants = tuple[Tenant, Tenant, Tenant]


def stats(tenants: Tenants) -> dict[str, int]:
    engine: dict[str, Any] = tenants[2].http.get("/v1/engines").json()["engines"][0]
    return dict(engine["stats"])


@pytest.mark.parametrize("first", [0, 1])
def test_a_guess_of_another_tenants_prompt_is_no_hit(tenants: Tenants, first: int) -> None:
    owner, guesser = tenants[first], tenants[1 - first]
    template = ("Nobody", "Everybody")[first] + " may know that the merger will be announced in May. " * 4
    prompt = template + "{{input:x}} {{output:out}}"
    assert owner.cached(prompt, x="not before noon") == 0
    assert guesser.cached(prompt, x="not before noon") == 0
    assert guesser.cached(template + "not before noon {{output:out}}") > 0, "its own"
    assert owner.cached(prompt, x="not before noon") > 50


@pytest.mark.parametrize("first", [0, 1])
def test_a_guess_of_a_system_prompt_is_no_hit(tenants: Tenants, tiny_model: Path, first: int) -> None:
    owner, guesser = tenants[first], tenants[1 - first]
    secret = f"{first} is the number of the oracle, and its password is swordfish. " * 5
    messages = ("system", secret), ("user", "Hello?")
    assert [owner.chat_cached(str(tiny_model), *messages) > 50 for _ in range(2)] == [False, True]
    unlike = [guesser.chat_cached(str(tiny_model), ("system", f"{n}"), ("user", "x")) for n in (7, 8)]
    assert guesser.chat_cached(str(tiny_model), *messages) == unlike[1] < 10, "no more than the chat's format"
    raw = ("Plans", "Drawings")[first] + " are kept in the third drawer. " * 6
    assert owner.openai_cached("/v1/completions", model=str(tiny_model), prompt=raw) == 0
    assert guesser.openai_cached("/v1/completions", model=str(tiny_model), prompt=raw) == 0
    assert owner.openai_cached("/v1/completions", model=str(tiny_model), prompt=raw) > 50


def test_a_published_template_is_a_hit_for_every_tenant_and_what_follows_for_one(tenants: Tenants) -> None:
    one, other, _ = tenants
    value = "Which of the two valves is it that has to be closed first, and by whom? " * 3
    one.cached(TEMPLATE, question=value)
    before = stats(tenants)
    shared = other.cached(TEMPLATE, question=value)
    again = other.cached(TEMPLATE, question=value)
    assert 100 < shared < again - 30
    after = stats(tenants)
    assert after["cached_tokens"] - before["cached_tokens"] == shared + again
    assert after["cow_copies"] > before["cow_copies"], "the seam lies within a block"
    # The same text, not as that template: it is what was published all the same.
    assert shared <= other.cached(PUBLISHED + "Why so? {{output:out}}") < shared + 10
    how = other.openai_cached("/v1/completions", model=model_of(other), prompt=PUBLISHED + "How?")
    assert shared <= how < shared + 10


def test_a_published_system_prompt_is_a_hit_in_every_chat(tenants: Tenants) -> None:
    one, other, _ = tenants
    model = model_of(one)
    first = one.chat_cached(model, ("system", SYSTEM), ("user", "When does the ferry leave on Sundays?" * 5))
    second = other.chat_cached(
        model, ("system", SYSTEM), ("user", "When does the ferry leave on Sundays?" * 5)
    )
    third = other.chat_cached(model, ("system", SYSTEM), ("user", "Something else."))
    assert first < 10, "no more than the chat's format"
    assert 100 < second <= third < second + 10
    assert other.chat_cached(model, ("system", SYSTEM[:-2]), ("user", "?")) == 0, "only a part of it"


def model_of(tenant: Tenant) -> str:
    return str(tenant.http.get("/v1/models").json()["data"][0]["id"])
