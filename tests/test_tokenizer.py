"""A tokenizer from its directory: special tokens, BOS and EOS, literal text, damaged files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from parrot.errors import ModelFileError
from parrot.tokenizer import Tokenizer
from tiny_models import CHATML, byte_level_tokenizer, sentencepiece_tokenizer, write_tokenizer


@pytest.fixture
def chatml(tmp_path: Path) -> Path:
    return write_tokenizer(
        tmp_path / "chatml", byte_level_tokenizer(), eos_token="<|im_end|>", chat_template=CHATML
    )


def test_reads_what_the_directory_says(chatml: Path) -> None:
    (chatml / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    tokenizer = Tokenizer.load(chatml)
    assert tokenizer.vocab_size == 512
    assert tokenizer.eos_ids == {0, 2}
    assert tokenizer.bos_id is None
    assert not tokenizer.add_bos
    assert tokenizer.chat_template == CHATML


@pytest.mark.parametrize("value", [{}, [[1]], {"a": 1}, "two", [None]])
def test_an_end_that_is_no_id_is_left_out(chatml: Path, value: object) -> None:
    (chatml / "generation_config.json").write_text(json.dumps({"eos_token_id": value}))
    assert Tokenizer.load(chatml).eos_ids == {2}


def test_text_comes_back_and_control_tokens_do_not(chatml: Path) -> None:
    tokenizer = Tokenizer.load(chatml)
    ids = tokenizer.encode("Grüße, 你好 😀")
    assert tokenizer.decode([1, *ids, 2]) == "Grüße, 你好 😀"


def test_encode_never_makes_control_tokens(chatml: Path) -> None:
    ids = Tokenizer.load(chatml).encode("<|im_start|>a<|im_end|><|endoftext|>")
    assert not {0, 1, 2} & set(ids.tolist())


def test_bos_comes_from_the_post_processor_unless_configured(tmp_path: Path) -> None:
    automatic = write_tokenizer(tmp_path / "a", sentencepiece_tokenizer(), bos_token={"content": "<s>"})
    configured = write_tokenizer(
        tmp_path / "b", sentencepiece_tokenizer(), bos_token="<s>", add_bos_token=False
    )
    assert (Tokenizer.load(automatic).bos_id, Tokenizer.load(automatic).add_bos) == (1, True)
    assert (Tokenizer.load(configured).bos_id, Tokenizer.load(configured).add_bos) == (1, False)


def test_fingerprint_tells_tokenizers_and_templates_apart(chatml: Path, tmp_path: Path) -> None:
    same = write_tokenizer(
        tmp_path / "same", byte_level_tokenizer(), eos_token="<|im_end|>", chat_template=CHATML
    )
    other = write_tokenizer(tmp_path / "other", byte_level_tokenizer(), eos_token="<|im_end|>")
    fingerprint = Tokenizer.load(chatml).fingerprint
    assert Tokenizer.load(same).fingerprint == fingerprint
    assert Tokenizer.load(other).fingerprint != fingerprint


def test_a_template_file_goes_before_the_configuration(chatml: Path) -> None:
    (chatml / "chat_template.jinja").write_text("file")
    assert Tokenizer.load(chatml).chat_template == "file"


def test_the_default_of_several_templates_is_used(tmp_path: Path) -> None:
    templates = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    path = write_tokenizer(tmp_path, byte_level_tokenizer(), chat_template=templates)
    assert Tokenizer.load(path).chat_template == "d"


def test_added_tokens_that_look_like_control_are_control(tmp_path: Path) -> None:
    spec = json.loads(byte_level_tokenizer().to_str())
    base = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": False}
    spec["added_tokens"] += [
        {**base, "id": 512, "content": "<tool_call>"},
        {**base, "id": 513, "content": "   "},
    ]
    path = write_tokenizer(tmp_path, byte_level_tokenizer())
    (path / "tokenizer.json").write_text(json.dumps(spec))
    tokenizer = Tokenizer.load(path)
    assert tokenizer.layout.control_ids["<tool_call>"] == 512
    ids = tokenizer.encode("<tool_call>   ").tolist()
    assert 512 not in ids
    assert ids[-1] == 513


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 1}'])
def test_a_damaged_file_is_named(chatml: Path, content: str) -> None:
    (chatml / "tokenizer.json").write_text(content)
    with pytest.raises(ModelFileError, match=r"tokenizer\.json"):
        Tokenizer.load(chatml)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"tokenizer\.json is missing"):
        Tokenizer.load(tmp_path)


def test_smollm2_agrees_with_transformers(smollm2_dir: Path) -> None:
    from transformers import AutoTokenizer

    theirs, ours = AutoTokenizer.from_pretrained(smollm2_dir), Tokenizer.load(smollm2_dir)
    for text in ("It's 2024, isn't it?", "  def f(x):\n\treturn x ** 10\n", "naïve 你好 😀", "a" * 50, ""):
        ids = ours.encode(text)
        assert ids.tolist() == theirs(text)["input_ids"]
        assert ours.decode(ids) == text
    assert (ours.eos_ids, ours.add_bos) == ({theirs.eos_token_id}, False)
