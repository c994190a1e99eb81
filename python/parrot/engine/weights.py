"""The tensors of a model: read from its directory, or random in their place."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ModelFileError
from ..kernels.ops import Affine, DecoderOps, HeadNorms, Heads, Linear, Norm, Rows
from ..models import weight_files
from .model_config import ModelConfig


@dataclass(slots=True)
class LayerWeights(Generic[Linear, Rows]):
    """One decoder layer; q, k, v and gate, up are fused so that each input is read once. Shapes are those on
    disk; the form is the backend's."""

    attention_norm: Norm[Rows]  # [hidden]
    qkv: Affine[Linear, Rows]  # [(heads + 2 * kv_heads) * head_dim, hidden]
    head_norms: HeadNorms[Rows] | None  # [head_dim] each
    output: Affine[Linear, Rows]  # [hidden, heads * head_dim]
    mlp_norm: Norm[Rows]  # [hidden]
    up: Affine[Linear, Rows]  # [2 * intermediate, hidden], gate first; [intermediate, hidden] without a gate
    down: Affine[Linear, Rows]  # [hidden, intermediate]


@dataclass(slots=True)
class ModelWeights(Generic[Linear, Rows]):
    """All weights of a model, in one dtype on one device."""

    embedding: Linear  # [vocab, hidden]
    positions: Linear | None  # [max_positions, hidden], for a model that does not rotate
    layers: list[LayerWeights[Linear, Rows]]
    final_norm: Norm[Rows]  # [hidden]
    head: Linear  # [vocab, hidden]; the embedding itself if they are tied


@dataclass(frozen=True, slots=True)
class _Names:
    """What a family calls its tensors; those of a layer are below ``layer``, which holds its number."""

    embedding: str = "model.embed_tokens"
    final_norm: str = "model.norm"
    layer: str = "model.layers.{}"
    attention_norm: str = "input_layernorm"
    output: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"


_LLAMA = _Names()
_OPT = _Names(
    embedding="model.decoder.embed_tokens",
    final_norm="model.decoder.final_layer_norm",
    layer="model.decoder.layers.{}",
    attention_norm="self_attn_layer_norm",
    output="self_attn.out_proj",
    mlp_norm="final_layer_norm",
    up=("fc1",),
    down="fc2",
)
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # others need scales beside them
_OPT_POSITIONS = "model.decoder.embed_positions"
_OPT_OFFSET = 2  # rows of the table of positions that stand for none


class TensorSource(Protocol):
    """Where tensors come from, by name and shape."""

    def read(self, name: str, *shape: int) -> Tensor:
        """The tensor ``name``, which has this shape."""


def load_weights(
    directory: Path,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    ops: DecoderOps[Linear, Rows, Heads],
    *,
    dummy: bool = False,
) -> ModelWeights[Linear, Rows]:
    """Read the safetensors of a directory; each tensor is packed as ``ops`` wants it and then let go.

    ``dummy``: random tensors of the right shapes, and no file is read. Raises :class:`ModelFileError` naming
    the file, or the tensor that is missing or has another shape than config.json asks for, with both shapes.
    """
    files: AbstractContextManager[TensorSource]
    files = _DummyTensors(dtype, device) if dummy else _TensorFiles(directory, dtype, device)
    with files as source:
        return _Loader(source, config, ops).load()


class _Loader(Generic[Linear, Rows, Heads]):
    def __init__(
        self, source: TensorSource, config: ModelConfig, ops: DecoderOps[Linear, Rows, Heads]
    ) -> None:
        self._source = source
        self._config = config
        self._ops = ops
        self._names = _OPT if config.architecture == "OPTForCausalLM" else _LLAMA

    def load(self) -> ModelWeights[Linear, Rows]:
        config, names, read = self._config, self._names, self._source.read
        vocab, hidden = config.vocab_size, config.hidden_size
        embedding = self._ops.pack(read(f"{names.embedding}.weight", vocab, hidden))
        positions = None
        if config.rope_theta is None:
            table = read(f"{_OPT_POSITIONS}.weight", config.max_positions + _OPT_OFFSET, hidden)
            positions = self._ops.pack(table[_OPT_OFFSET:].contiguous())
        layers = [self._layer(names.layer.format(i)) for i in range(config.num_layers)]
        final_norm = self._norm(names.final_norm)
        head = embedding
        if not config.tie_embeddings:
            head = self._ops.pack(read("lm_head.weight", vocab, hidden))
        return ModelWeights(embedding, positions, layers, final_norm, head)

    def _layer(self, layer: str) -> LayerWeights[Linear, Rows]:
        config, names, attention = self._config, self._names, f"{layer}.self_attn"
        hidden, intermediate, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
        q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
        rows = {f"{attention}.q_proj": q_rows, f"{attention}.k_proj": kv_rows, f"{attention}.v_proj": kv_rows}
        up = {f"{layer}.{name}": intermediate for name in names.up}
        return LayerWeights(
            attention_norm=self._norm(f"{layer}.{names.attention_norm}"),
            qkv=self._affine(rows, hidden, bias=config.qkv_bias),
            head_norms=self._head_norms(attention) if config.head_norms else None,
            output=self._affine({f"{layer}.{names.output}": hidden}, q_rows, bias=config.output_bias),
            mlp_norm=self._norm(f"{layer}.{names.mlp_norm}"),
            up=self._affine(up, hidden, bias=config.mlp_bias, gated=len(up) == 2),
            down=self._affine({f"{layer}.{names.down}": hidden}, intermediate, bias=config.mlp_bias),
        )

    def _affine(
        self, rows: dict[str, int], inputs: int, *, bias: bool, gated: bool = False
    ) -> Affine[Linear, Rows]:
        """Layers that read one input, by name with their outputs, as one; ``gated``: they may gate inside."""
        read = self._source.read
        weights = [read(f"{name}.weight", count, inputs) for name, count in rows.items()]
        packed = self._ops.pack(
            weights[0] if len(weights) == 1 else torch.cat(weights), gated=gated and not bias
        )
        if not bias:
            return Affine(packed, None)
        biases = [read(f"{name}.bias", count) for name, count in rows.items()]
        return Affine(packed, self._ops.pack_row(torch.cat(biases)))

    def _norm(self, name: str) -> Norm[Rows]:
        weight = self._row(f"{name}.weight", self._config.hidden_size)
        if self._config.norm == "rms":
            return Norm(weight, None)
        return Norm(weight, self._row(f"{name}.bias", self._config.hidden_size))

    def _head_norms(self, attention: str) -> HeadNorms[Rows]:
        query, key = (self._row(f"{attention}.{x}_norm.weight", self._config.head_dim) for x in "qk")
        return HeadNorms(query, key)

    def _row(self, name: str, length: int) -> Rows:
        return self._ops.pack_row(self._source.read(name, length))


class _TensorFiles(AbstractContextManager[TensorSource]):
    """The tensors of all safetensors files of a model, by name; open until the context ends."""

    def __init__(self, directory: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._directory = directory
        self._dtype = dtype
        self._device = device
        self._files: dict[str, tuple[Path, Any]] = {}
        self._stack = ExitStack()

    def __enter__(self) -> _TensorFiles:
        for path in weight_files(self._directory):
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                self._stack.close()
                raise ModelFileError(f"{path} cannot be read ({error}); download it again") from None
            self._files.update(dict.fromkeys(file.keys(), (path, file)))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def read(self, name: str, *shape: int) -> Tensor:
        """The tensor ``name``, which must have this shape."""
        if name not in self._files:
            raise ModelFileError(f"{self._directory} has no tensor {name!r}; download the model again")
        path, file = self._files[name]
        tensor: Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ModelFileError(
                f"{path}: tensor {name!r} has the shape {tuple(tensor.shape)}; config.json asks for {shape}"
            )
        if tensor.dtype not in _DTYPES:
            raise ModelFileError(f"{path}: tensor {name!r} is {tensor.dtype}; quantised weights are not read")
        if tensor.data_ptr() % tensor.itemsize:
            tensor = tensor.clone()  # the header of a file may end anywhere, and tensors lie behind it
        return tensor.to(device=self._device, dtype=self._dtype)


class _DummyTensors(AbstractContextManager[TensorSource]):
    """Random tensors of any name, the same in every process; scaled so that activations stay near one."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device
        self._generator = torch.Generator(device).manual_seed(0)

    def __enter__(self) -> _DummyTensors:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, name: str, *shape: int) -> Tensor:  # noqa: ARG002
        """Norms are near one, matrices normal with the deviation of a unit gain."""
        tensor = torch.empty(shape, dtype=self._dtype, device=self._device)
        if len(shape) == 1:
            return tensor.uniform_(0.9, 1.1, generator=self._generator)
        return tensor.normal_(0.0, shape[-1] ** -0.5, generator=self._generator)
