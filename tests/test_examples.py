"""The examples against a real manager whose engine answers from a script: their prompts, and what the service
deduces for each of their calls beside what one would write down by hand."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from openai import AsyncOpenAI

import agents
import batch
import chain_summary
import copilot
import map_reduce_summary
import parrot as P
import search
from both_ways import RTT_MS, Asker, make_parser, rtt_ms
from manager_harness import Manager, ScriptedEngine, running_manager, serving
from parrot.api import CallView

TOPIC, TASK, PARTS = "rain", "a game", ["part one", "part two", "part three"]
QUESTIONS = ["Why is the sea salty?", "What makes bread rise?"]
OUTPUTS = P.Output(max_tokens=12)
L, T = "LATENCY", "THROUGHPUT"
Label = tuple[str, str, int | None]  # objective, task group (a name of its kind), depth


@dataclass(frozen=True)
class Example:
    """An example both ways, the variables that are waited for, and the labels written by hand."""

    parrot: Callable[[], list[P.SemanticVariable]]
    twin: Callable[[AsyncOpenAI], Awaitable[object]]
    num_waited: int
    perf: P.Perf
    labels: list[tuple[str, Label]]


def asking(twin: Callable[[Asker], Awaitable[object]]) -> Callable[[AsyncOpenAI], Awaitable[object]]:
    return lambda client: twin(Asker(client, OUTPUTS))


def agents_by_hand(num_files: int, num_rounds: int) -> list[tuple[str, Label]]:
    """An architect on the critical path; then every stage is one group, since all of the next one read it."""
    last = 2 * num_rounds
    labels = [("design", (L, "", last + 1)), *[("code", (T, "coders", last))] * num_files]
    for number in range(num_rounds):
        depth = last - 2 * number - 1
        labels += [("review", (T, f"reviewers {number}", depth))] * num_files
        labels += [("revise", (T, f"revisers {number}", depth - 1))] * num_files
    return labels


# One call after another: all on the critical path.
COPILOT = ["outline", *["draft", "critique", "rewrite"] * 2, "summarise", "name_it"]
EXAMPLES = {
    "chain_summary": Example(
        lambda: chain_summary.with_parrot(TOPIC, PARTS, OUTPUTS),
        lambda client: chain_summary.with_openai(client, TOPIC, PARTS, OUTPUTS),
        1,
        P.LATENCY,
        [("extend_summary", (L, "", depth)) for depth in (2, 1, 0)],
    ),
    "map_reduce_summary": Example(
        lambda: map_reduce_summary.with_parrot(TOPIC, PARTS, OUTPUTS),
        lambda client: map_reduce_summary.with_openai(client, TOPIC, PARTS, OUTPUTS),
        1,
        P.LATENCY,
        [*[("summarise_part", (T, "maps", 1))] * 3, ("combine", (L, "", 0))],
    ),
    "copilot": Example(
        lambda: copilot.with_parrot("1", TOPIC, ["a", "b"], OUTPUTS),
        asking(lambda ask: copilot.with_openai(ask, "1", TOPIC, ["a", "b"])),
        2,
        P.LATENCY,
        [(name, (L, "", len(COPILOT) - 1 - number)) for number, name in enumerate(COPILOT)],
    ),
    "agents": Example(
        lambda: agents.with_parrot("1", TASK, agents.file_names(2), 1, OUTPUTS),
        asking(lambda ask: agents.with_openai(ask, "1", TASK, agents.file_names(2), 1)),
        1,
        P.LATENCY,
        agents_by_hand(2, 2),
    ),
    "search": Example(
        lambda: search.with_parrot("1", QUESTIONS, search.Index(), OUTPUTS),
        asking(lambda ask: search.with_openai(ask, "1", QUESTIONS, search.Index())),
        2,
        P.LATENCY,
        [*[("enrich", (L, "", 0))] * 2, *[("answer", (L, "", 0))] * 2],
    ),
    "batch": Example(
        lambda: batch.with_parrot("1", PARTS, OUTPUTS),
        asking(lambda ask: batch.with_openai(ask, "1", PARTS)),
        3,
        P.THROUGHPUT,
        [*[("note", (T, "", 1))] * 3, *[("sort", (T, "", 0))] * 3],
    ),
}  # fmt: skip


def reply(text: str) -> str:
    """An answer that tells one prompt from another."""
    return f"answer {zlib.crc32(text.encode()) % 1000}"


class Served:
    """A manager with one engine behind HTTP, on a loop of its own thread."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, manager: Manager, engine: ScriptedEngine, url: str
    ) -> None:
        self.loop, self.manager, self.engine, self.url = loop, manager, engine, url

    def prompts(self) -> list[str]:
        """What has been asked so far, in any order; then forgotten."""
        prompts = sorted(self.engine.prompts)
        self.engine.dispatches.clear()
        return prompts


@pytest.fixture(scope="module")
def served(tiny_model: Path) -> Iterator[Served]:
    """One for all examples."""
    import threading

    ready, done = threading.Event(), threading.Event()
    found: list[Served] = []

    async def main() -> None:
        async with running_manager(tiny_model, model="smollm2", lost_after_s=30.0) as manager:
            limits = {"num_tokens": 65_536, "max_model_len": 16_384}
            engine = await manager.add_engine(reply, **limits)
            async with serving(manager) as url:
                found.append(Served(asyncio.get_running_loop(), manager, engine, url))
                ready.set()
                await asyncio.to_thread(done.wait)

    thread = threading.Thread(target=partial(asyncio.run, main()))
    thread.start()
    assert ready.wait(120)
    yield found[0]
    done.set()
    thread.join()


def label_of(call: CallView, names: dict[int, str]) -> Label:
    group = "" if call.task_group is None else names.get(call.task_group, f"group {call.task_group}")
    return (call.objective, group, call.depth)


@pytest.mark.parametrize("name", EXAMPLES)
def test_deduced_labels_equal_hand_labels_and_the_twin_asks_the_same(served: Served, name: str) -> None:
    example = EXAMPLES[name]
    served.prompts()
    with P.connect(served.url), P.session(), P.batch():  # so that the labels travel with the calls
        variables = example.parrot()
        results = P.gather(*variables[-example.num_waited :], perf=example.perf, timeout=120)
        session = next(variable.session for variable in variables if variable.session is not None)

        async def graph() -> tuple[CallView, ...]:
            return served.manager.service.graph(session.id).calls

        calls = asyncio.run_coroutine_threadsafe(graph(), served.loop).result(120)
    assert all(str(result).startswith("answer ") for result in results)
    assert [call.function for call in calls] == [function for function, _ in example.labels]
    assert {call.state for call in calls} == {"done"}
    # A group is known by its members: the first call's name of the hand table stands for its number.
    names = {}
    for call, (_, (_, group, _)) in zip(calls, example.labels, strict=True):
        if call.task_group is not None:
            names.setdefault(call.task_group, group)
    assert len(set(names.values())) == len(names)
    assert [label_of(call, names) for call in calls] == [label for _, label in example.labels]
    asked = served.prompts()
    asyncio.run(_twin(served.url, example))
    assert served.prompts() == asked


async def _twin(url: str, example: Example) -> None:
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=120) as client:
        await example.twin(client)


def test_the_passages_that_answer_the_default_questions_are_found() -> None:
    index = search.Index()
    for question, word in zip(search.DEFAULT_QUESTIONS, ("minerals", "dances", "yeast"), strict=True):
        assert word in " ".join(index.find(question))
    assert len(index.find("nothing of this kind", 3)) == 3


def test_a_function_with_two_outputs_and_one_that_writes_to_a_variable_made_beforehand(
    served: Served,
) -> None:
    @P.function
    def think(question):  # type: ignore[no-untyped-def]
        """{{input:question}} Thought: {{output:thought}} so {{output:answer}}"""

    @P.function
    def write(text):  # type: ignore[no-untyped-def]
        """Write of {{input:text}}: {{output:code}}"""

    served.prompts()
    with P.connect(served.url), P.session():
        code = P.variable()
        reader = write(code)  # reads what nobody writes yet
        thought, answer = think("Why?")
        write(answer, code=code)
        texts = P.gather(thought, answer, code, reader, timeout=120)
    asked = served.prompts()
    assert len(asked) == 3
    assert any(prompt.startswith(f"Write of {texts[1]}:") for prompt in asked)
    assert any(prompt.startswith(f"Write of {texts[2]}:") for prompt in asked)
    assert texts[0] != texts[1]


def test_a_value_goes_round_a_loop_of_calls(served: Served) -> None:
    @P.function
    def improve(text):  # type: ignore[no-untyped-def]
        """Improve {{input:text}}: {{output:text_again}}"""

    with P.connect(served.url), P.session():
        text = P.variable("a start")
        for _ in range(30):
            text = improve(text)
        final = text.get(timeout=120)
        assert final == str(text.get())
    asked = served.prompts()
    assert len(asked) == 30
    expected = "a start"
    for _ in range(30):
        prompt = f"Improve {expected}: "
        assert prompt in asked
        expected = reply(prompt)
    assert final == expected


def test_a_distance_is_emulated_to_a_service_that_is_not_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARROT_URL", raising=False)
    parse = make_parser("").parse_args
    assert rtt_ms(parse([])) == RTT_MS
    assert rtt_ms(parse(["--url", "http://10.0.0.5:8642"])) == 0
    assert rtt_ms(parse(["--url", "http://10.0.0.5:8642", "--rtt-ms", "30"])) == 30
    monkeypatch.setenv("PARROT_URL", "http://10.0.0.5:8642")
    assert rtt_ms(parse([])) == 0
    assert rtt_ms(parse(["--rtt-ms", "0"])) == 0
