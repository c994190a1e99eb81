"""`parrot serve --gpus all`: an engine on each GPU, one of which is killed; and one that joins by itself."""

from __future__ import annotations

import subprocess
import sys
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from service_process import ServiceProcess, call_body, kill, service, wait_for

from prefix_batches import Batch, relative_error

NUM_GPUS = torch.cuda.device_count()
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(NUM_GPUS < 2, reason="needs two CUDA GPUs")]
PROMPT = "You read notes and say what matters. {{input:note}}{{output:out}}"


def engines(running: ServiceProcess) -> dict[str, dict[str, Any]]:
    found = running.http.get("/v1/engines").json()["engines"]
    return {engine["name"]: engine for engine in found if engine["alive"]}


def values(running: ServiceProcess, count: int, max_tokens: int) -> list[str]:
    """Outputs of ``count`` calls, each an application of its own."""
    asked = []
    for index in range(count):
        session = running.session()
        body = call_body("r", PROMPT, values={"note": f"note {index}"}, max_tokens=max_tokens)
        running.submit(session, body)
        asked.append(session)
    return [running.value(session, "v-r") for session in asked]


def test_every_gpu_has_an_engine_and_all_give_the_same_values(slow_model: Path, tmp_path: Path) -> None:
    with service(slow_model, tmp_path, "--gpus", "0", "--dtype", "float32") as one:
        expected = values(one, 8, 24)
    with service(slow_model, tmp_path, "--gpus", "all", "--dtype", "float32") as running:
        wait_for(lambda: len(engines(running)) == NUM_GPUS)
        assert {e["device"] for e in engines(running).values()} == {f"cuda:{i}" for i in range(NUM_GPUS)}
        assert values(running, 8, 24) == expected
        used = wait_for(lambda: _used(running, 2))
        killed = used[0]
        kill(killed["pid"])
        assert values(running, 8, 24) == expected, "calls of the dead engine run again elsewhere"
        again = wait_for(lambda: _restarted(running, killed))
        assert again["device"] == killed["device"]
        assert values(running, 8, 24) == expected


@pytest.mark.parametrize("implementation", ["cuda", "triton"])
def test_attention_runs_on_a_gpu_that_is_not_the_current_one(implementation: str) -> None:
    another = torch.device("cuda", 1)
    assert torch.cuda.current_device() == 0
    batch = Batch(3, 8, 2, 128, torch.float16, [(40, 5), (0, 2)], [1, 17, 40], device=another)
    kernel = batch.make_kernel(implementation)
    output = torch.full_like(batch.query, nan)
    for _ in range(2):
        kernel.plan(batch.block_tables, batch.seq_lens)
        kernel(batch.query, batch.key_cache, batch.value_cache, output, 0.1)
    assert relative_error(output, batch.reference(0.1)) <= 1e-3
    assert torch.cuda.current_device() == 0


def _used(running: ServiceProcess, least: int) -> list[dict[str, Any]] | None:
    used = [engine for engine in engines(running).values() if engine["stats"]["decode_tokens"] > 0]
    return used if len(used) >= least else None


def _restarted(running: ServiceProcess, killed: dict[str, Any]) -> dict[str, Any] | None:
    engine = engines(running).get(killed["name"])
    return engine if engine and engine["pid"] != killed["pid"] and engine["state"] == "ready" else None


def test_an_engine_on_another_gpu_joins_over_curve(slow_model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    command = [sys.executable, "-m", "parrot.cli.main"]
    subprocess.run([*command, "key", "curve", str(keys)], check=True, timeout=60)
    options = ("--gpus", "0", "--curve-keys", str(keys))
    with service(slow_model, tmp_path, *options) as running:
        joining = [*command, "engine", "--manager", running.engine_address, "--curve-keys", str(keys)]
        joining += ["--name", "another", "--device", "cuda:1"]
        joining += ["--model", str(slow_model), "--num-blocks", "128"]
        with subprocess.Popen(joining) as process:
            another = wait_for(lambda: engines(running).get("another"))
            assert another["device"] == "cuda:1"
            assert len(set(values(running, 16, 8))) > 1
            process.terminate()
            assert process.wait(60) == 0
