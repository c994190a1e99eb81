"""Loading a model directory: what it holds, and what is said when something in it is wrong."""

from __future__ import annotations

import json
from math import inf, nan
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from paged_sequences import PagedRunner, PagedSequence
from parrot.engine.model import DecoderModel
from parrot.engine.model_config import ModelConfig
from parrot.engine.weights import load_weights
from parrot.errors import ModelFileError
from parrot.kernels.ops import DecoderShape
from parrot.kernels.torch_ops import TorchOps
from tiny_models import write_family, write_tiny_model

OPS = TorchOps(DecoderShape(4, 2, 16, 1e-5, torch.empty(8)), torch.float32)


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8,
    "low_freq_factor": 1,
    "high_freq_factor": 4,
    "original_max_position_embeddings": 32,
}


def load(directory: Path) -> None:
    load_weights(directory, ModelConfig.load(directory), torch.float32, torch.device("cpu"), OPS)


def change_config(directory: Path, **fields: object) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return write_tiny_model(tmp_path / "model")


def test_fuses_the_projections_that_read_one_input(directory: Path) -> None:
    config = ModelConfig.load(directory)
    weights = load_weights(directory, config, torch.bfloat16, torch.device("cpu"), OPS)
    tensors = load_file(directory / "model.safetensors")
    names = [f"model.layers.1.self_attn.{name}_proj.weight" for name in "qkv"]
    assert torch.equal(weights.layers[1].qkv.weight, torch.cat([tensors[name] for name in names]).bfloat16())
    assert weights.layers[1].qkv.weight.shape == ((4 + 2 * 2) * 16, 64)
    assert weights.head is not weights.embedding


def test_a_tied_head_is_the_embedding_itself(tiny_mha_model: Path) -> None:
    weights = load_weights(
        tiny_mha_model, ModelConfig.load(tiny_mha_model), torch.float32, torch.device("cpu"), OPS
    )
    assert weights.head is weights.embedding


def test_reads_sharded_files_through_their_index(directory: Path) -> None:
    path = directory / "model.safetensors"
    expected = load_weights(directory, ModelConfig.load(directory), torch.float32, torch.device("cpu"), OPS)
    tensors = load_file(path)
    shards = {"a.safetensors": {}, "b.safetensors": {}}
    for i, (name, tensor) in enumerate(tensors.items()):
        shards["ab"[i % 2] + ".safetensors"][name] = tensor
    for name, shard in shards.items():
        save_file(shard, directory / name)
    weight_map = {tensor: name for name, shard in shards.items() for tensor in shard}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    path.unlink()
    weights = load_weights(directory, ModelConfig.load(directory), torch.float32, torch.device("cpu"), OPS)
    assert torch.equal(weights.layers[0].up.weight, expected.layers[0].up.weight)


def test_kv_bytes_per_token(directory: Path) -> None:
    config = ModelConfig.load(directory)
    assert config.kv_bytes_per_token(torch.bfloat16) == 2 * 2 * 2 * 16 * 2
    assert config.kv_bytes_per_token(torch.float32) == 2 * config.kv_bytes_per_token(torch.bfloat16)


def test_a_wrong_shape_names_tensor_and_both_shapes(directory: Path) -> None:
    change_config(directory, intermediate_size=161)
    with pytest.raises(ModelFileError) as caught:
        load(directory)
    for part in ("mlp.gate_proj.weight", "(160, 64)", "(161, 64)", "model.safetensors"):
        assert part in str(caught.value)


def test_a_missing_tensor_is_named(directory: Path) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.self_attn.o_proj.weight"]
    save_file(tensors, path)
    with pytest.raises(ModelFileError, match=r"model\.layers\.1\.self_attn\.o_proj\.weight"):
        load(directory)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_weights_that_mean_nothing_without_scales_are_refused(directory: Path, dtype: torch.dtype) -> None:
    path = directory / "model.safetensors"
    tensors = load_file(path)
    name = "model.layers.1.self_attn.o_proj.weight"
    save_file({**tensors, name: tensors[name].to(dtype)}, path)
    with pytest.raises(ModelFileError, match=rf"{name}' is {dtype}; quantised"):
        load(directory)


def test_a_truncated_file_is_named(directory: Path) -> None:
    path = directory / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelFileError, match=r"model\.safetensors"):
        load(directory)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architectures", ["GPT2LMHeadModel"]),
        ("architectures", ["LlamaForCausalLM", "OPTForCausalLM"]),
        ("hidden_act", "gelu"),
        ("rope_scaling", {"rope_type": "yarn", "factor": 2.0}),
        ("num_key_value_heads", 3),
        ("hidden_size", "wide"),
        ("quantization_config", {"quant_method": "fp8"}),
        *((name, value) for name in SIZES for value in (0, -1, 2**31, inf)),
        ("max_position_embeddings", 0),
        ("head_dim", -2),
        ("num_key_value_heads", -2),
        *(("rms_norm_eps", value) for value in (-1.0, inf, nan)),
        *(("rope_theta", value) for value in (-1.0, inf, nan)),
        *(("rope_scaling", {"type": "linear", "factor": value}) for value in (0, -1, inf, nan)),
        *(("rope_scaling", {**LLAMA3_ROPE, name: 0}) for name in LLAMA3_ROPE if name != "rope_type"),
        ("rope_scaling", {**LLAMA3_ROPE, "low_freq_factor": 4}),
    ],
)
def test_what_the_decoder_cannot_run_is_refused(directory: Path, field: str, value: object) -> None:
    change_config(directory, **{field: value})
    with pytest.raises(ModelFileError, match=r"config\.json"):
        ModelConfig.load(directory)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"vocab_size": 1e999}', "5", "\udcff"])
def test_a_configuration_that_cannot_be_read_is_named(directory: Path, text: str) -> None:
    (directory / "config.json").write_text(text, errors="surrogateescape")
    with pytest.raises(ModelFileError, match=r"config\.json"):
        ModelConfig.load(directory)


def test_tensors_may_begin_anywhere_in_their_file(tiny_model: Path, directory: Path) -> None:
    """The format pads no header; the writer that everybody uses does."""
    path = directory / "model.safetensors"
    content = path.read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = content[8:end].rstrip() + b" "
    header += b" " * (len(header) % 2 == 0)
    path.write_bytes(len(header).to_bytes(8, "little") + header + content[end:])
    assert (8 + len(header)) % 4, "tensors of float32 are not aligned"
    ids = torch.arange(20).tolist()
    logits = []
    for source in (tiny_model, directory):
        runner = PagedRunner(DecoderModel.load(source, torch.float32, "cpu", "native"), num_blocks=4)
        runner.step((sequence := PagedSequence(), ids))
        logits.append(sequence.logits[-1])
    assert torch.equal(*logits)


def test_a_missing_field_is_named(directory: Path) -> None:
    path = directory / "config.json"
    fields = json.loads(path.read_text())
    del fields["rms_norm_eps"]
    path.write_text(json.dumps(fields))
    with pytest.raises(ModelFileError, match="rms_norm_eps"):
        ModelConfig.load(directory)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("do_layer_norm_before", False),
        ("activation_function", "gelu"),
        ("word_embed_proj_dim", 32),
        ("layer_norm_elementwise_affine", False),
    ],
)
def test_what_some_opt_models_do_is_refused(tmp_path: Path, field: str, value: object) -> None:
    directory = write_family(tmp_path / "opt", "opt")
    ModelConfig.load(directory)
    change_config(directory, **{field: value})
    with pytest.raises(ModelFileError, match=field):
        ModelConfig.load(directory)


def test_a_missing_bias_is_named(tmp_path: Path) -> None:
    directory = write_family(tmp_path / "qwen2", "qwen2")
    path = directory / "model.safetensors"
    tensors = load_file(path)
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    save_file(tensors, path)
    with pytest.raises(ModelFileError, match=r"model\.layers\.1\.self_attn\.k_proj\.bias"):
        load(directory)


def test_contexts_end_where_a_sliding_window_would_begin_to_slide(tmp_path: Path) -> None:
    mistral = write_family(tmp_path / "mistral", "mistral")
    change_config(mistral, sliding_window=100)
    assert ModelConfig.load(mistral).max_positions == 100
    qwen = write_family(tmp_path / "qwen", "qwen2")
    change_config(qwen, sliding_window=100, use_sliding_window=False)
    assert ModelConfig.load(qwen).max_positions == 512
    change_config(qwen, use_sliding_window=True)
    assert ModelConfig.load(qwen).max_positions == 100


def test_dummy_weights_need_no_file_and_give_finite_logits(directory: Path) -> None:
    (directory / "model.safetensors").unlink()
    models = [
        DecoderModel.load(directory, torch.float32, "cpu", "torch", dummy_weights=True) for _ in range(2)
    ]
    sequences = [PagedSequence() for _ in models]
    for model, sequence in zip(models, sequences, strict=True):
        PagedRunner(model).step((sequence, list(range(40))))
    logits = torch.stack(sequences[0].logits)
    assert torch.isfinite(logits).all()
    assert logits.std() > 0.1
    assert torch.equal(logits, torch.stack(sequences[1].logits))
