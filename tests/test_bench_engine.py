"""The benchmarks of whole engines run on a model without weights, and their arithmetic is right."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from bench import curve, decode_shared, engine, gpus, local_engine
from bench.curve import capacity_tokens, step_ms
from bench.local_engine import LocalEngine, Setting

from parrot.wire import CostModel

TINY = Setting("tiny", "float32", "cpu", num_blocks=256, max_batch_tokens=64)
COST = CostModel(
    base_us=4000,
    per_sequence_us=100,
    per_prefill_token_us=10,
    per_kv_token_us=1,
    capacity_tokens=50_000,
    num_blocks=3125,
)


def test_every_workload_has_a_figure() -> None:
    figures = engine.measure(LocalEngine(TINY), "tiny", engine.QUICK, repeats=2)
    assert set(figures) == set(engine.FIGURES)
    assert all(figure["least"] > 0 for figure in figures.values())


def test_prefill_is_measured_with_the_weights_of_the_peer() -> None:
    ours = LocalEngine(replace(TINY, backend="torch"))
    assert engine.measure_as_vllm(ours, engine.QUICK, repeats=2)["least"] > 0
    weights = ours.runner.model.decoder.weights
    drawn = (weights.embedding, weights.head, weights.layers[-1].down.weight, weights.final_norm.weight)
    assert all(tensor.abs().max() <= 1e-3 and len(tensor.unique()) > 1 for tensor in drawn)


VLLM_STUB = """
import json, sys
options = json.loads(sys.stdin.readline())
if options["arm"] == "flashinfer":
    sys.exit("no such backend")
print(json.dumps({"ready": True, "version": "0." + options["arm"]}), flush=True)
for line in sys.stdin:
    workload = json.loads(line)
    assert len(workload["prompts"]) == len(workload["max_tokens"])
    print(json.dumps({"seconds": 0.5 * sum(workload["max_tokens"])}), flush=True)
"""


@pytest.fixture
def vllm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An interpreter that answers in the place of vLLM's script."""
    (tmp_path / "stub.py").write_text(VLLM_STUB)
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\nexec {sys.executable} {tmp_path}/stub.py\n")
    python.chmod(0o755)
    monkeypatch.setenv("PARROT_PEER_VLLM_PYTHON", str(python))
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("vllm")
def test_the_peer_runs_the_same_workloads() -> None:
    figures = engine._vllm_figures(TINY, engine.QUICK, 2, ["single", "prefill"])
    assert figures["single"] == {"median": 4.0, "least": 4.0, "most": 4.0}
    assert figures["prefill"]["median"] == 128.0


@pytest.mark.usefixtures("vllm")
def test_every_arm_of_the_peer_that_runs_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    figures = decode_shared._measure_peers(TINY, [("2", [2])], decode_shared.QUICK)
    assert {arm: spread["median"] for arm, spread in figures["2"].items()} == {
        "vLLM": 1000.0,
        "vLLM, cascade": 1000.0,
    }
    assert "vLLM, FlashInfer: not measured" in capsys.readouterr().out


def test_without_the_peer_there_is_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARROT_PEER_VLLM_PYTHON", raising=False)
    assert engine._vllm_figures(TINY, engine.QUICK, 1, engine.PARTS) == {}
    assert decode_shared._measure_peers(TINY, [("2", [2])], decode_shared.QUICK) == {"2": {}}


def test_a_batch_is_measured_in_every_arm() -> None:
    arms = {"a": LocalEngine(TINY), "b": LocalEngine(TINY)}
    figures = decode_shared._measure(arms, [2, 2], decode_shared.QUICK)
    assert set(figures) == {"a", "b"}


@pytest.mark.parametrize("module", [engine, decode_shared, curve, gpus])
def test_without_a_gpu_standard_error_says_what_runs_on_the_cpu(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Begun(Exception):
        """The benchmark has begun."""

    def begin(*_: object, **__: object) -> None:
        raise Begun

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpus, "num_gpus", lambda: 0)
    monkeypatch.setattr(gpus, "write_dummy_model", begin)
    monkeypatch.setattr(local_engine.LocalEngine, "__init__", begin)
    with pytest.raises(Begun):
        module.run(True)
    message = capsys.readouterr().err
    assert message.startswith("no GPU was found: this measures ")
    assert "CPU" in message


def test_a_curve_has_a_point_for_each_batch_beside_the_cost_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(curve, "setting", lambda *_: TINY)
    monkeypatch.setenv("PARROT_BENCH_MODELS", "llama-7b,llama-13b")
    monkeypatch.chdir(tmp_path)
    models = curve.run(True)["models"]
    assert list(models) == ["llama-7b", "llama-13b"]
    for measured in models.values():
        assert [point["batch"] for point in measured["points"]] == [1, 4]
        for point in measured["points"]:
            assert point["tok_per_s"] == pytest.approx(
                1e3 * point["batch"] / point["ms_per_token"]["median"], rel=1e-3
            )
            assert point["predicted_ms"] > 0
        assert list(measured["capacity_tokens"]) == ["20", "40", "80"]
    printed = capsys.readouterr().out
    assert printed.count("the cost model says") == 2
    assert printed.count("KV tokens that keep a target per token") == 2


def test_a_call_that_fails_is_no_figure() -> None:
    with pytest.raises(RuntimeError, match="blocks"):
        LocalEngine(TINY).generate([list(range(6, 600)) * 8], [4])


def test_the_capacity_is_what_keeps_the_target() -> None:
    assert step_ms(COST, 10, 5000) == pytest.approx(4 + 1 + 5)
    tokens = capacity_tokens(COST, 10, 500)
    assert tokens == 10 * 500
    assert step_ms(COST, tokens / 500, tokens) <= 10 < step_ms(COST, tokens / 500 + 1, tokens + 500)
    assert capacity_tokens(COST, 4, 500) == 0
    assert capacity_tokens(COST, 1e6, 500) == 50_000
