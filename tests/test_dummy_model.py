"""Model directories without weights: their tokenizer is a bijection of words, and engines serve them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Literal

import pytest

from graph_builder import prompt_call
from manager_harness import Manager, run
from parrot.api import SamplingBody
from parrot.dummy_model import num_control_tokens, word, write_dummy_model
from parrot.engine.grammar import Grammars
from parrot.engine.model_config import ModelConfig
from parrot.errors import ConfigError, InvalidRequest, ModelFileError, SetupError
from parrot.models import resolve_model
from parrot.tokenizer.segments import Piece, PromptEncoder
from parrot.tokenizer.tokenizer import Tokenizer
from parrot.wire import Grammar


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_dummy_model(tmp_path_factory.mktemp("dummy") / "tiny", "tiny")


def random_ids(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(num_control_tokens(), 1024), k=count)


def test_every_id_is_one_word_and_comes_back(directory: Path) -> None:
    tokenizer, ids = Tokenizer.load(directory), random_ids(500)
    assert tokenizer.vocab_size == 1024
    assert tokenizer.decode(ids) == " ".join(map(word, ids))
    assert tokenizer.encode(tokenizer.decode(ids)).tolist() == ids
    assert (tokenizer.bos_id, tokenizer.add_bos, tokenizer.eos_ids) == (1, True, {2})


@pytest.mark.parametrize("kind", ["schema", "regex", "choices"])
def test_its_tokenizer_cannot_be_constrained_and_that_is_said(
    directory: Path, kind: Literal["schema", "regex", "choices"], caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = Tokenizer.load(directory)
    grammars = Grammars(tokenizer, tokenizer.vocab_size)
    source = {"schema": "{}", "regex": "a+", "choices": '["a"]'}[kind]
    for _ in range(2):
        with pytest.raises(InvalidRequest, match="tokenizer of this model cannot do constrained decoding"):
            grammars.compile(Grammar(kind, source)).result()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.records[0].exc_info is None


@pytest.mark.parametrize(
    "field", [{"json_schema": {"type": "string"}}, {"regex": "a+"}, {"choices": ["a", "b"]}]
)
def test_a_service_of_it_refuses_constraints_when_asked(directory: Path, field: dict[str, object]) -> None:
    async def scenario(manager: Manager) -> None:
        call = prompt_call("only", "Say {{output:a}}")
        output = call.placeholders[0].model_copy(update={"sampling": SamplingBody.model_validate(field)})
        with pytest.raises(InvalidRequest, match="tokenizer of this model cannot do constrained decoding"):
            manager.submit(call.model_copy(update={"placeholders": (output,)}))
        manager.check_at_rest()

    run(directory, scenario)


def test_transformers_reads_the_same_ids(directory: Path) -> None:
    from transformers import AutoTokenizer

    ids = random_ids(50)
    theirs = AutoTokenizer.from_pretrained(directory)
    assert theirs(" ".join(map(word, ids)))["input_ids"] == [1, *ids]
    assert theirs.decode(ids) == " ".join(map(word, ids))


def test_a_prompt_in_pieces_has_the_ids_of_its_words_and_a_boundary_after_each_piece(directory: Path) -> None:
    constant, value, rest = random_ids(300), random_ids(40, 1), random_ids(20, 2)
    pieces = [" ".join(map(word, part)) for part in (constant, value, rest)]
    encoder = PromptEncoder(Tokenizer.load(directory))
    prompt = encoder.encode([Piece(pieces[0] + " "), Piece(pieces[1]), Piece(" " + pieces[2])])
    assert prompt.token_ids.tolist() == [1, *constant, *value, *rest]
    assert any(len(constant) <= boundary <= len(constant) + 1 for boundary in prompt.boundaries.tolist())


@pytest.mark.parametrize(
    ("shape", "billions"), [("llama-7b", 6.7), ("llama-13b", 13.0), ("llama3-8b", 8.0), ("qwen3-0.6b", 0.6)]
)
def test_shapes_have_the_size_of_their_models(shape: str, billions: float, tmp_path: Path) -> None:
    config = ModelConfig.load(write_dummy_model(tmp_path / "model", shape))
    attention = 2 * config.head_dim * (config.num_heads + config.num_kv_heads) * config.hidden_size
    layer = attention + 3 * config.hidden_size * config.intermediate_size
    embeddings = config.vocab_size * config.hidden_size * (1 if config.tie_embeddings else 2)
    assert (config.num_layers * layer + embeddings) / 1e9 == pytest.approx(billions, rel=0.04)


def test_only_dummy_weights_run_it(directory: Path) -> None:
    assert resolve_model(str(directory), weights=False) == directory
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        resolve_model(str(directory))


def test_an_unknown_shape_and_a_full_directory_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"llama-70b.*llama-7b"):
        write_dummy_model(tmp_path / "model", "llama-70b")
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(SetupError, match="not empty"):
        write_dummy_model(tmp_path, "tiny")
    (tmp_path / "file").write_text("")
    with pytest.raises(SetupError, match="cannot be written"):
        write_dummy_model(tmp_path / "file", "tiny")
