"""Tenants of a real service: clients with right, wrong and revoked keys, rotation under a stream, limits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from service_process import ServiceProcess, call_body, service, wait_for

import parrot as P
from parrot.errors import AuthenticationError, PermissionDenied, RateLimited, SessionNotFound

pytestmark = pytest.mark.system
SHORT = P.Output(max_tokens=4, ignore_eos=True)


@P.function(outputs=SHORT)
def ask(question):
    """Answer {{input:question}}: {{output:text}}"""


def parrot_key(*arguments: str | Path) -> str:
    """What `parrot key` prints on standard output."""
    command = [sys.executable, "-m", "parrot.cli.main", "key", *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


class Keyed:
    """A service with the keys of its operator and of the tenants a, b (weight 3) and c (few calls). Its
    engine joins with keys too, at a port that other machines reach."""

    def __init__(self, running: ServiceProcess, file: Path, keys: dict[str, str]) -> None:
        self.running, self.file, self.keys, self.url = running, file, keys, running.url

    def client(self, who: str) -> httpx.Client:
        headers = {"Authorization": f"Bearer {self.keys[who]}"}
        return httpx.Client(base_url=self.url, timeout=120, headers=headers)

    def openai(self, who: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=self.keys[who], max_retries=0)

    def status(self, key: str) -> int:
        return httpx.get(
            f"{self.url}/v1/models", headers={"Authorization": f"Bearer {key}"}, timeout=120
        ).status_code

    def metrics(self) -> str:
        return self.client("operator").get("/metrics").text


@pytest.fixture(scope="module")
def keyed(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    directory = tmp_path_factory.mktemp("tenants")
    file = directory / "keys.json"
    keys = {
        "a": parrot_key("new", "a", "--file", file),
        "b": parrot_key("new", "b", "--file", file, "--weight", "3"),
        "c": parrot_key("new", "c", "--file", file, "--max-concurrent-calls", "2"),
        "operator": parrot_key("operator", "--file", file),
    }
    parrot_key("curve", directory / "curve")
    options = ["--engine-host", "0.0.0.0", "--curve-keys", str(directory / "curve")]
    with service(tiny_model, directory, "--api-keys", str(file), *options) as running:
        assert running.engine_address.startswith("tcp://0.0.0.0:")
        yield Keyed(running, file, keys)
        log = running.log_file.read_text()
        assert not any(key in log for key in keys.values())


def test_the_front_end_works_with_its_key_and_gets_typed_errors_without(
    keyed: Keyed, monkeypatch: pytest.MonkeyPatch
) -> None:
    with P.connect(keyed.url, keyed.keys["a"]):
        first = ask("x")
        assert isinstance(first.get(timeout=120), str)
        with P.session() as session:
            mine = session.id
            ask("y").get(timeout=120)
            foreign = keyed.client("b").get(f"/v1/session/{mine}/graph")
            assert foreign.json()["error"]["code"] == SessionNotFound.code
            assert keyed.client("a").get(f"/v1/session/{mine}/graph").status_code == 200
    for key, error in ((None, AuthenticationError), ("pk-parrot-no", AuthenticationError)):
        with P.connect(keyed.url, key), pytest.raises(error, match="API key"):
            ask("x").get(timeout=120)
    with P.connect(keyed.url, keyed.keys["operator"]), pytest.raises(PermissionDenied):
        ask("x").get(timeout=120)
    monkeypatch.setenv("PARROT_API_KEY", keyed.keys["b"] + "\n")
    with P.connect(keyed.url):
        assert isinstance(ask("z").get(timeout=120), str)
    with P.connect(keyed.url, keyed.keys["c"]):
        waiting = [ask(P.variable()) for _ in range(2)]
        assert not waiting[0].done()
        with pytest.raises(RateLimited, match="max_concurrent_calls = 2 is used up"):
            ask("one too many").get(timeout=120)


def test_the_openai_client_works_unchanged_with_its_key(keyed: Keyed) -> None:
    model = keyed.client("a").get("/v1/models").json()["data"][0]["id"]
    asked: dict[str, Any] = {"model": model, "prompt": "The sea is", "max_tokens": 4}
    with keyed.openai("a") as client:
        assert client.completions.create(**asked).usage.completion_tokens > 0  # type: ignore[union-attr]
    with openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="none", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError) as unknown:
            stranger.completions.create(**asked)
        assert unknown.value.code == "invalid_api_key"
    assert keyed.client("a").get("/health").status_code == 200
    assert keyed.client("a").get("/ready").status_code == 200
    assert httpx.get(f"{keyed.url}/metrics", timeout=120).status_code == 401
    assert 'parrot_tenant_calls_total{tenant="a"}' in keyed.metrics()


def test_keys_rotate_while_a_stream_runs(keyed: Keyed) -> None:
    model = keyed.client("a").get("/v1/models").json()["data"][0]["id"]
    old = keyed.keys["a"]
    with keyed.openai("a") as client:
        stream = client.completions.create(
            model=model, prompt="On and on", max_tokens=300, stream=True, extra_body={"ignore_eos": True}
        )
        chunks = iter(stream)
        next(chunks)
        keyed.keys["a"] = parrot_key("new", "a", "--file", keyed.file)
        os.kill(keyed.running.pid, signal.SIGHUP)
        wait_for(lambda: keyed.status(keyed.keys["a"]) == 200)
        assert keyed.status(old) == 200
        listed = parrot_key("list", "--file", keyed.file).splitlines()
        old_id = next(line for line in listed if "tenant a, made" in line).split()[1].rstrip(":")
        parrot_key("revoke", old_id, "--file", keyed.file)
        wait_for(lambda: keyed.status(old) == 401)
        reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    assert reasons[-1] == "length", "the stream went on to its end"
    assert keyed.status(keyed.keys["a"]) == 200


def test_a_broken_key_file_keeps_the_keys_in_use(keyed: Keyed) -> None:
    before = keyed.file.read_text()
    keyed.file.write_text('{"tenants": {"a": {"weight": "heavy"}}}')
    wait_for(lambda: "tenants.a.weight: " in keyed.running.log_file.read_text())
    assert keyed.status(keyed.keys["a"]) == 200
    assert "parrot_key_file_failures_total 1.0\n" in keyed.metrics()
    keyed.file.write_text(before)


def test_weights_hold_between_tenants_that_both_have_work_waiting(keyed: Keyed) -> None:
    while len(contended := place_many_of_two(keyed)) < 80:
        pass  # a busy machine let the first one's calls run before the other one's were there
    share = contended.count("b") / len(contended)
    assert 0.65 < share < 0.85, share


def place_many_of_two(keyed: Keyed) -> list[str]:
    """Whose calls were placed, in their order, while both had calls waiting: they go out one to three."""
    clients = {who: keyed.client(who) for who in ("a", "b")}
    sessions = {who: client.post("/v1/session").json()["session_id"] for who, client in clients.items()}
    for who, client in clients.items():
        calls = [
            call_body(f"{who}{i}", f"{who} number {i} {{{{output:out}}}}", max_tokens=8) for i in range(160)
        ]
        reply = client.post("/v1/submit", json={"session_id": sessions[who], "calls": calls})
        assert reply.status_code == 200
    order = []
    for who, client in clients.items():
        for i in range(160):
            client.post("/v1/get", json={"session_id": sessions[who], "semantic_var_id": f"v-{who}{i}"})
        graph = client.get(f"/v1/session/{sessions[who]}/graph").json()
        order += [(call["timing"]["dispatched_us"], who) for call in graph["calls"]]
    placed = [who for _, who in sorted(order)]
    last = {who: max(place for place, other in enumerate(placed) if other == who) for who in clients}
    return placed[placed.index("b") : min(last.values())]


def test_a_service_that_others_can_reach_does_not_start_without_keys(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "parrot.cli.main", "serve", "--port", "0", "--host", "0.0.0.0"]
    for options, words in (
        ([], "nothing asks them for a key; make keys with `parrot key new TENANT --file FILE`"),
        (["--api-keys", str(tmp_path / "none.json")], "it cannot be read (No such file or directory)"),
    ):
        ended = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120, check=False)
        assert (ended.returncode, len(ended.stderr.splitlines())) == (2, 1)
        assert words in ended.stderr
