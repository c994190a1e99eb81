"""The benchmark of the service on several GPUs: the tokens of its prompts and the engines of its arms."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from bench import gpus

from parrot.dummy_model import write_dummy_model
from parrot.tokenizer.tokenizer import Tokenizer


def test_a_prompt_has_the_tokens_of_its_application(tmp_path: Path) -> None:
    tokenizer = Tokenizer.load(write_dummy_model(tmp_path / "tiny", "tiny"))
    first, second = (gpus._call(gpus.App(60, 7, 12), index, (1, 0)) for index in (0, 1))
    assert first["prompt"] == second["prompt"]
    shared = first["prompt"].partition(" {{")[0]
    own = [call["placeholders"][0]["value"] for call in (first, second)]
    assert len(tokenizer.encode(shared)) == 60
    assert len(tokenizer.encode(own[0])) == 7
    assert own[0] != own[1]
    assert gpus._call(gpus.App(60, 7, 12), 0, (2, 0))["prompt"] != first["prompt"], "nothing is cached"


def test_the_arms_are_one_gpu_all_and_all_without_placement_by_prefix() -> None:
    one, several, blind = gpus.arms(4)
    assert (one.engines, one.num_engines) == (("--gpus", "0"), 1)
    assert (several.engines, several.num_engines, several.off) == (("--gpus", "all"), 4, ())
    assert blind.engines == several.engines
    assert blind.off
    assert [arm.num_engines for arm in gpus.arms(0)] == [1, 2, 2]


def test_the_totals_wait_for_an_engine_that_has_not_said_anything_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("prefill_tokens", "cached_tokens", "decode_tokens", "shared_decodes", "preemptions")
    told: dict[str, Any] = {"stats": dict.fromkeys(names, 3)}
    answers = iter([[told, {"stats": {}}], [told, told]])
    monkeypatch.setattr(gpus, "_engines", lambda _: next(answers))
    assert gpus._totals("http://127.0.0.1:1") == dict.fromkeys(names, 6)
