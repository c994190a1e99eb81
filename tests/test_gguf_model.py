"""GGUF to a Hugging Face directory: the tensors, the configuration and the tokenizer survive."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from parrot.engine.model_config import ModelConfig
from parrot.errors import ModelFileError
from parrot.gguf_model import convert_gguf
from parrot.tokenizer import Tokenizer
from tiny_gguf import write_gguf
from tiny_models import write_family, write_tiny_model


def convert(path: Path, target: Path) -> Path:
    target.mkdir()
    convert_gguf(path, target, lambda _what, _fraction: None)
    return target


@pytest.mark.parametrize("model", ["tiny_model", "tiny_mha_model"])
def test_tensors_come_back_as_they_were(request: pytest.FixtureRequest, model: str, tmp_path: Path) -> None:
    source = request.getfixturevalue(model)
    target = convert(write_gguf(tmp_path / "m.gguf", source), tmp_path / "out")
    expected, tensors = load_file(source / "model.safetensors"), load_file(target / "model.safetensors")
    assert tensors.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(tensors[name], values), name


@pytest.mark.parametrize("family", ["qwen2", "qwen2-tied", "qwen3"])
def test_other_architectures_come_back_too(family: str, tmp_path: Path) -> None:
    source = write_family(tmp_path / "source", family)
    path = write_gguf(tmp_path / "m.gguf", source, architecture=family.partition("-")[0])
    target = convert(path, tmp_path / "out")
    expected, tensors = load_file(source / "model.safetensors"), load_file(target / "model.safetensors")
    assert tensors.keys() == expected.keys()
    for name, values in expected.items():
        assert np.array_equal(tensors[name], values), name
    theirs, ours = ModelConfig.load(source), ModelConfig.load(target)
    assert replace(ours, norm_eps=theirs.norm_eps) == theirs
    assert ours.norm_eps == pytest.approx(theirs.norm_eps)


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@pytest.mark.parametrize("scaling", [{"rope_type": "linear", "factor": 4.0}, LLAMA3_ROPE])
def test_positions_are_scaled_as_in_the_original(scaling: dict[str, object], tmp_path: Path) -> None:
    source = write_tiny_model(tmp_path / "source", rope_scaling=scaling)
    target = convert(write_gguf(tmp_path / "m.gguf", source), tmp_path / "out")
    theirs, ours = ModelConfig.load(source), ModelConfig.load(target)
    assert theirs.rope_scaling.kind == scaling["rope_type"]
    assert replace(ours, norm_eps=theirs.norm_eps) == theirs
    assert load_file(target / "model.safetensors").keys() == load_file(source / "model.safetensors").keys()


@pytest.mark.parametrize("field", ["rope.scaling.factor", "rope.scale_linear"])
def test_a_factor_without_a_type_is_a_linear_one(field: str, tmp_path: Path) -> None:
    """As llama.cpp reads it; the second is the field's name in files of before November 2023."""
    source = write_tiny_model(tmp_path / "source", rope_scaling={"rope_type": "linear", "factor": 4.0})
    target = convert(write_gguf(tmp_path / "m.gguf", source, untyped_factor=field), tmp_path / "out")
    assert ModelConfig.load(target).rope_scaling == ModelConfig.load(source).rope_scaling


def test_positions_scaled_in_another_way_are_refused(tmp_path: Path) -> None:
    scaling = {**LLAMA3_ROPE, "original_max_position_embeddings": 4096}
    source = write_tiny_model(tmp_path / "source", rope_scaling=scaling)
    with pytest.raises(ModelFileError, match=r"rope_freqs\.weight that is not LLaMA 3's"):
        convert(write_gguf(tmp_path / "m.gguf", source), tmp_path / "out")


def test_quantised_tensors_are_dequantised_in_fp32(tiny_model: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model, quantization=gguf.GGMLQuantizationType.Q8_0)
    target = convert(path, tmp_path / "out")
    expected, tensors = load_file(tiny_model / "model.safetensors"), load_file(target / "model.safetensors")
    for name, values in expected.items():
        assert tensors[name].dtype == np.float32
        assert np.linalg.norm(tensors[name] - values) < 0.01 * np.linalg.norm(values), name


def test_configuration_says_the_same(tiny_mha_model: Path, tmp_path: Path) -> None:
    target = convert(write_gguf(tmp_path / "m.gguf", tiny_mha_model), tmp_path / "out")
    expected = json.loads((tiny_mha_model / "config.json").read_text())
    config = json.loads((target / "config.json").read_text())
    assert config.pop("rms_norm_eps") == pytest.approx(expected.pop("rms_norm_eps"))
    assert {key: config[key] for key in expected} == expected


def test_tokenizer_gives_the_same_ids(tiny_model: Path, tmp_path: Path) -> None:
    target = convert(write_gguf(tmp_path / "m.gguf", tiny_model), tmp_path / "out")
    ours, expected = Tokenizer.load(target), Tokenizer.load(tiny_model)
    text = "It's 2024:\n\n  naïve 你好  <|im_end|>"
    assert ours.encode(text).tolist() == expected.encode(text).tolist()
    assert ours.backend.encode(text).ids == expected.backend.encode(text).ids
    assert (ours.eos_ids, ours.add_bos, ours.chat_template) == ({2}, False, expected.chat_template)


def test_transformers_loads_the_directory(tiny_model: Path, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = convert(write_gguf(tmp_path / "m.gguf", tiny_model), tmp_path / "out")
    ids = torch.tensor([AutoTokenizer.from_pretrained(target)("The quick brown fox")["input_ids"]])
    with torch.no_grad():
        logits, expected = (
            AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)(ids).logits
            for path in (target, tiny_model)
        )
    assert torch.allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_truncated_file_is_named_wherever_it_ends(tiny_model: Path, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", tiny_model).read_bytes()
    path = tmp_path / "cut.gguf"
    for i, size in enumerate([0, 3, 4, 7, 20, 100, 5000, len(whole) // 2, len(whole) - 1]):
        path.write_bytes(whole[:size])
        with pytest.raises(ModelFileError, match=r"cut\.gguf"):
            convert(path, tmp_path / f"out-{i}")


def test_something_else_is_not_a_gguf_file(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(range(256)) * 40)
    with pytest.raises(ModelFileError, match=r"model\.gguf"):
        convert(path, tmp_path / "out")


def test_another_architecture_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model, architecture="bert")
    with pytest.raises(ModelFileError, match="'bert'"):
        convert(path, tmp_path / "out")


def test_a_missing_tensor_is_named(tiny_model: Path, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model, leave_out="blk.1.ffn_up.weight")
    with pytest.raises(ModelFileError, match=r"model\.layers\.1\.mlp\.up_proj\.weight"):
        convert(path, tmp_path / "out")


def test_a_number_that_does_not_fit_the_tensors_names_the_file(tiny_model: Path, tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", tiny_model)
    fields = gguf.GGUFReader(whole).fields
    path = tmp_path / "changed.gguf"
    for number, (name, value) in enumerate(
        [
            ("attention.head_count", 0),
            ("attention.head_count", 3),
            ("attention.head_count_kv", 0),
            ("block_count", 2**32 - 1),
        ]
    ):
        content = np.fromfile(whole, np.uint8)
        field = fields[f"llama.{name}"]
        at = field.offset + sum(part.nbytes for part in field.parts[: field.data[0]])
        content[at : at + 4] = np.frombuffer(value.to_bytes(4, "little"), np.uint8)
        path.write_bytes(content.tobytes())
        with pytest.raises(ModelFileError, match=r"changed\.gguf"):
            convert(path, tmp_path / f"out-{number}")


@pytest.mark.parametrize("text", ["smollm", "pieces"])
def test_text_that_is_damaged_names_the_file(tiny_model: Path, tmp_path: Path, text: str) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_model)
    content = path.read_bytes()
    if text == "pieces":  # a merge of pieces that are no tokens
        first = json.loads((tiny_model / "tokenizer.json").read_text())["model"]["merges"][0]
        old, new = " ".join(first).encode(), b"\xc2\xa1" * 1
        assert content.count(old) > 0
        content = content.replace(old, new.ljust(len(old), b"~"), 1)
    else:
        content = content.replace(text.encode(), b"\xff" * len(text), 1)
    path.write_bytes(content)
    with pytest.raises(ModelFileError, match=r"m\.gguf"):
        convert(path, tmp_path / "out")


@pytest.mark.model
def test_smollm2_knows_the_capital_of_france(smollm2_dir: Path) -> None:
    """Rows of q and k in the wrong order would leave shapes right and the text meaningless."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = Tokenizer.load(smollm2_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    ids = torch.tensor([tokenizer.encode("The capital of France is").tolist()])
    with torch.no_grad():
        best = model(ids).logits[0, -1].topk(5).indices
    assert " Paris" in [tokenizer.decode([token]) for token in best.tolist()]
