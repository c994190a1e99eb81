"""The whole service as real processes: manager, engine, HTTP and the openai client."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from service_process import ServiceProcess, call_body, is_alive, kill, service, wait_for

pytestmark = pytest.mark.system
LONG = {"max_tokens": 1900}


@pytest.fixture(scope="module")
def shared(slow_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """One service for the tests that leave it as they found it."""
    with service(slow_model, tmp_path_factory.mktemp("service")) as running:
        yield running


def check_at_rest(running: ServiceProcess) -> None:
    """No call runs or waits on the engine, no block is held."""

    def at_rest() -> bool:
        engine = running.engine()
        stats = engine["stats"]
        busy = stats["num_running"] + stats["num_waiting"] + stats["num_held_blocks"]
        return bool(engine["num_dispatched"] == 0 and busy == 0)

    wait_for(at_rest)


def test_a_value_flows_from_producer_to_consumer(shared: ServiceProcess) -> None:
    session = shared.session()
    shared.submit(
        session,
        call_body("a", "The quick brown fox {{output:out}}"),
        call_body("b", "Then {{input:x}} and {{output:out}}", {"x": "v-a"}),
    )
    first, second = shared.value(session, "v-a"), shared.value(session, "v-b")
    alone = shared.session()
    shared.submit(alone, call_body("c", "Then {{input:x}} and {{output:out}}", values={"x": first}))
    assert shared.value(alone, "v-c") == second
    timing = shared.call(session, "b")["timing"]
    order = ["submitted_us", "ready_us", "dispatched_us", "admitted_us", "first_token_us", "finished_us"]
    times = [timing[name] for name in order]
    assert times == sorted(times)
    assert shared.call(alone, "c")["cached_tokens"] > shared.call(session, "b")["cached_tokens"]
    check_at_rest(shared)


def test_the_native_core_placed_and_reused(shared: ServiceProcess) -> None:
    session = shared.session()
    prompt = "A constant prefix that many calls share, word by word. " * 4 + "{{input:x}} {{output:out}}"
    for name in ("first", "second"):
        shared.submit(session, call_body(name, prompt, values={"x": name}))
        shared.value(session, f"v-{name}")
    reply = shared.http.get("/v1/engines").json()
    assert reply["scheduler"]["placed"] >= 2
    assert reply["scheduler"]["placed_prefix"] >= 1
    assert reply["engines"][0]["stats"]["forks"] >= 1
    assert shared.call(session, "second")["cached_tokens"] > 32


def test_a_call_with_two_outputs_sees_its_own_first(shared: ServiceProcess) -> None:
    session = shared.session()
    sampling = {"max_tokens": 6, "ignore_eos": True}
    holes = [
        {"name": name, "kind": "output", "semantic_var_id": name, "sampling": sampling} for name in ("p", "q")
    ]
    prompt = "One {{output:p}} two {{output:q}}"
    shared.submit(session, {"function": "two", "prompt": prompt, "placeholders": holes})
    first, second = shared.value(session, "p"), shared.value(session, "q")
    shared.submit(session, call_body("again", "One {{input:p}} two {{output:out}}", {"p": "p"}, max_tokens=6))
    assert first
    assert second
    check_at_rest(shared)


def test_a_session_is_found_only_by_its_id(shared: ServiceProcess) -> None:
    session = shared.session()
    shared.submit(session, call_body("a", "Hi {{output:out}}"))
    foreign = shared.get("s-" + "0" * 32, "v-a")
    assert (foreign.status_code, foreign.json()["error"]["code"]) == (404, "session_not_found")
    other = shared.get(shared.session(), "v-a")
    assert (other.status_code, other.json()["error"]["code"]) == (404, "variable_not_found")


def test_a_prompt_longer_than_model_or_cache_is_refused_with_the_numbers(shared: ServiceProcess) -> None:
    session = shared.session()
    shared.submit(session, call_body("a", "{{input:x}} {{output:out}}", values={"x": "word " * 4000}))
    reply = shared.get(session, "v-a")
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "prompt_too_long")
    assert "2048" in reply.json()["error"]["message"]
    shared.submit(session, call_body("b", "Hi {{output:out}}"))
    assert shared.get(session, "v-b").status_code == 200


def test_cancelling_frees_the_engine(shared: ServiceProcess) -> None:
    session = shared.session()
    shared.submit(session, call_body("a", "Hi {{output:out}}", **LONG))
    wait_for(lambda: shared.call(session, "a")["state"] == "running")
    body = {"session_id": session, "semantic_var_id": "v-a"}
    assert shared.http.post("/v1/cancel", json=body).status_code == 204
    assert shared.get(session, "v-a").json()["error"]["code"] == "cancelled"
    check_at_rest(shared)
    shared.submit(session, call_body("b", "Hi {{output:out}}"))  # the session can be used
    assert shared.value(session, "v-b")
    check_at_rest(shared)


def test_deleting_a_session_stops_its_calls(shared: ServiceProcess) -> None:
    session = shared.session()
    shared.submit(session, *(call_body(f"c{i}", "Hi {{output:out}}", **LONG) for i in range(4)))
    getter = threading.Thread(target=shared.get, args=(session, "v-c0"))
    getter.start()
    assert shared.http.delete(f"/v1/session/{session}").status_code == 204
    getter.join(60)
    assert not getter.is_alive()
    check_at_rest(shared)


def test_the_openai_client_works_unchanged(shared: ServiceProcess, slow_model: Path) -> None:
    client = openai.OpenAI(base_url=f"{shared.url}/v1", api_key="none", max_retries=0)
    question: Any = [{"role": "user", "content": "What does the fox do?"}]
    fields: dict[str, Any] = {
        "model": str(slow_model),
        "messages": question,
        "temperature": 0,
        "max_tokens": 12,
    }
    answer = client.chat.completions.create(**fields)
    stream = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert answer.usage is not None
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == answer.usage.completion_tokens
    assert chunks[-1].usage.prompt_tokens_details.cached_tokens > 0  # type: ignore[union-attr]
    seeded = [
        client.completions.create(
            model=str(slow_model), prompt="The", temperature=1, seed=7, extra_body={"ignore_eos": True}
        )
        for _ in range(2)
    ]
    assert seeded[0].choices[0].text == seeded[1].choices[0].text
    with pytest.raises(openai.BadRequestError, match="2048"):
        client.completions.create(model=str(slow_model), prompt="word " * 4000)
    client.close()
    check_at_rest(shared)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_stops_its_generation(
    shared: ServiceProcess, slow_model: Path, stream: bool
) -> None:
    body = {
        "model": str(slow_model),
        "prompt": "Hi",
        "max_tokens": 1900,
        "ignore_eos": True,
        "stream": stream,
    }
    before = shared.engine()["stats"].get("decode_tokens", 0)
    limits = httpx.Timeout(120, read=120 if stream else 0.15)
    with httpx.Client(base_url=shared.url, timeout=limits) as client:
        if stream:
            with client.stream("POST", "/v1/completions", json=body) as reply:
                next(reply.iter_lines())
        else:
            with pytest.raises(httpx.ReadTimeout):
                client.post("/v1/completions", json=body)
    check_at_rest(shared)
    assert shared.engine()["stats"].get("decode_tokens", 0) - before < 1800


def test_an_engine_killed_in_the_middle_of_a_call_is_replaced_and_the_call_runs_again(
    slow_model: Path, tmp_path: Path
) -> None:
    with service(slow_model, tmp_path) as running:
        session = running.session()
        running.submit(
            session,
            call_body("a", "Hi {{output:out}}", max_tokens=700),
            call_body("b", "After {{input:x}} {{output:out}}", {"x": "v-short"}),
            call_body("short", "Short {{output:out}}"),
        )
        wait_for(lambda: running.call(session, "a")["state"] == "running")
        engine = running.engine()
        kill(engine["pid"])
        wait_for(
            lambda: running.http.get("/ready").status_code == 503 or running.engine()["pid"] != engine["pid"]
        )
        assert len(running.value(session, "v-a")) > 0
        assert running.value(session, "v-b")
        call = running.call(session, "a")
        assert (call["state"], call["attempts"]) == ("done", 2)
        assert running.engine()["pid"] != engine["pid"]
        assert running.http.get("/ready").status_code == 200
        check_at_rest(running)


def test_sigterm_lets_running_calls_finish_and_ends(tiny_model: Path, tmp_path: Path) -> None:
    with service(tiny_model, tmp_path, stdin=subprocess.PIPE) as running:
        engine_pid = running.engine()["pid"]
        body = {
            "model": str(tiny_model),
            "prompt": "Hi",
            "max_tokens": 300,
            "ignore_eos": True,
            "stream": True,
        }
        with running.http.stream("POST", "/v1/completions", json=body) as reply:
            lines = reply.iter_lines()
            next(lines)
            running.process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert json.loads(rest[-2].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
        assert running.process.wait(60) == 0
        assert not is_alive(engine_pid)


def test_the_embedded_service_ends_with_the_pipe_it_was_given(tiny_model: Path, tmp_path: Path) -> None:
    with service(tiny_model, tmp_path, "--parent-pipe", stdin=subprocess.PIPE, wait=False) as running:
        assert running.process.stdin is not None
        running.process.stdin.close()
        assert running.process.wait(60) == 0


def test_an_idle_session_expires(tiny_model: Path, tmp_path: Path) -> None:
    with service(tiny_model, tmp_path, "--session-idle-s", "0.5", wait=False) as running:
        session = running.session()
        wait_for(
            lambda: time.sleep(0.8) or running.http.get(f"/v1/session/{session}/graph").status_code == 404
        )


def test_readiness_says_why_an_engine_does_not_come_up(tiny_model: Path, tmp_path: Path) -> None:
    with service(tiny_model, tmp_path, "--num-blocks", "2000000000", wait=False) as running:

        def reason() -> str:
            return str(running.http.get("/ready").json()["error"]["message"])

        wait_for(lambda: "does not come up" in reason())
        assert "num_blocks = 2000000000" in reason()


def test_a_port_in_use_is_one_line_with_the_fix(tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [
            sys.executable,
            "-m",
            "parrot.cli.main",
            "serve",
            "--model",
            str(tiny_model),
            "--port",
            port,
        ]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 2
    assert port in ended.stderr
    assert "choose another port" in ended.stderr
