"""The process for heavy transforms gives what the loop itself would, whatever happens to it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from parent_harness import child_environment, has_ended
from parrot import api
from parrot.manager import transform_worker
from parrot.manager.operators import Budget
from parrot.manager.transform_worker import TransformWorker, serve
from parrot.manager.transforms import Chain, Failure, Work, compile_chain

_transforms: TypeAdapter[tuple[api.Transform, ...]] = TypeAdapter(tuple[api.Transform, ...])
CASES: list[tuple[list[dict[str, object]], str]] = [
    ([{"op": "json", "path": "$.a[1]"}], '{"a": [1, "größer\U0001f600"]}'),
    ([{"op": "json", "path": "$.a"}], '{"a": "\\ud83d"}'),
    ([{"op": "regex", "pattern": "(?P<word>b+)", "group": "word", "every": True}], "abbab"),
    ([{"op": "regex", "pattern": "z"}], "abbab"),
    ([{"op": "split", "separator": ",", "quoted": True}, {"op": "item", "index": -1}], 'a,"b, c"'),
    ([{"op": "to-number"}, {"op": "default", "value": "none"}], "not one"),
    ([{"op": "template", "text": "<{{value}}>" * 40}], "x" * 1000),
    ([{"op": "lines", "bullets": True}, {"op": "join", "separator": "\n"}], "- a\n\n2) b"),
]


def chain(transforms: list[dict[str, object]]) -> Chain:
    return compile_chain(_transforms.validate_python(transforms), where="here")


def work(transforms: list[dict[str, object]], value: str, max_bytes: int = 2000) -> Work:
    return Work(chain(transforms), value, max_bytes, 0.5)


def here(one: Work) -> str | Failure:
    return one.chain.run(one.value, Budget(one.max_bytes, one.left_s))


@pytest.fixture(scope="module")
def worker() -> Iterator[TransformWorker]:
    started = TransformWorker()
    yield started
    started.close()


def ask(worker: TransformWorker, one: Work) -> str | Failure:
    result, spent_s = asyncio.run(worker.run(one))
    assert 0 <= spent_s < 0.5
    return result


def test_results_and_failures_are_those_of_this_process(worker: TransformWorker) -> None:
    for transforms, value in CASES:
        one = work(transforms, value)
        assert ask(worker, one) == here(one), transforms
    assert isinstance(ask(worker, work(*CASES[1])), Failure)  # half a pair is no Unicode text
    assert isinstance(ask(worker, work(*CASES[6])), Failure)  # 40,000 bytes are above the limit of 2,000


def test_half_pairs_in_a_value_arrive_as_they_are(worker: TransformWorker) -> None:
    one = work([{"op": "split", "separator": ","}, {"op": "item", "index": 1}], "\ud83d,b")
    assert ask(worker, one) == "b"


def test_without_any_time_left_a_chain_fails_there_too(worker: TransformWorker) -> None:
    one = Work(chain([{"op": "strip"}]), "a", 100, -1.0)
    result, _ = asyncio.run(worker.run(one))
    assert isinstance(result, Failure)
    assert "took too long" in result.reason


def test_a_process_that_is_killed_or_hangs_costs_time_and_nothing_else(
    worker: TransformWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = work(*CASES[0])
    assert ask(worker, one) == here(one)
    first = worker._process
    assert first is not None
    first.kill()
    first.wait()
    assert ask(worker, one) == here(one)
    second = worker._process
    assert second is not None
    assert second.pid != first.pid
    second.send_signal(signal.SIGSTOP)
    monkeypatch.setattr(transform_worker, "_TIMEOUT_S", 0.1)
    assert ask(worker, one) == here(one)
    assert second.poll() is not None


def test_work_is_done_here_when_no_thread_can_be_started(
    worker: TransformWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(timer: threading.Timer) -> None:
        raise RuntimeError("can't start new thread")

    one = work(*CASES[0])
    assert ask(worker, one) == here(one)
    monkeypatch.setattr(threading.Timer, "start", refuse)
    assert ask(worker, one) == here(one)


def test_work_is_finished_here_when_the_worker_was_closed() -> None:
    closed = TransformWorker()
    closed._is_closed = True
    one = work(*CASES[0])
    assert ask(closed, one) == here(one)
    assert closed._process is None
    closed.close()


def test_the_process_ends_with_its_input() -> None:
    sink = io.BytesIO()
    serve(io.BytesIO(b""), sink)
    assert sink.getvalue() == b""


# It prints the process's id when that has answered, and is there until it is killed.
MANAGER = """
import asyncio, time
from parrot.manager.transform_worker import TransformWorker
from parrot.api import Strip
from parrot.manager.transforms import Work, compile_chain
worker = TransformWorker()
chain = compile_chain((Strip(op="strip"),), where="here")
asyncio.run(worker.run(Work(chain, "a", 100, 0.5)))
print(worker._process.pid, flush=True)
time.sleep(600)
"""


@pytest.mark.system
def test_a_stopped_process_ends_with_a_manager_that_is_killed() -> None:
    command = [sys.executable, "-c", MANAGER]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=child_environment()) as manager:
        assert manager.stdout is not None
        pid = int(manager.stdout.readline())
        os.kill(pid, signal.SIGSTOP)
        manager.kill()
    try:
        assert has_ended(pid)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.system
def test_a_process_whose_parent_has_ended_already_ends_at_once() -> None:
    command = [sys.executable, "-m", "parrot.manager.transform_worker", str(os.getpid() + 1)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=child_environment()) as orphan:
        assert orphan.wait(120) == -signal.SIGKILL


@given(st.text(st.characters(exclude_categories=())), st.integers(1, 5))
def test_text_that_goes_in_pieces_is_the_same_text(text: str, piece: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transform_worker, "_PIECE", piece)
        assert transform_worker._decoded(b"".join(transform_worker._encoded(text))) == text
