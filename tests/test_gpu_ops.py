"""The operations of the GPU backend against transformers, in Triton's interpreter on the CPU; and that every
kernel compiles for the GPU that it is tuned for."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("the interpreter is for machines without a GPU", allow_module_level=True)

from paged_sequences import PagedRunner, PagedSequence
from parrot.engine.model import DecoderModel
from test_model import assert_right, random_ids
from tiny_models import FAMILIES, write_family


@pytest.mark.usefixtures("tall_tiles")
@pytest.mark.parametrize("family", ["llama", *FAMILIES])
def test_chunks_forks_and_decodes_have_the_logits_of_transformers(
    family: str, tiny_model: Path, tmp_path: Path
) -> None:
    directory = tiny_model if family == "llama" else write_family(tmp_path / family, family)
    model = DecoderModel.load(directory, torch.float32, "cpu", "triton")
    runner, ids = PagedRunner(model, num_blocks=32), random_ids(model, 60)
    first, second = PagedSequence(), PagedSequence()
    runner.step((first, ids[:17]), (second, ids[20:21]))
    fork = runner.fork(first, 16)
    runner.step((fork, ids[40:41]), (second, ids[21:24]), (first, ids[17:18]))
    runner.step((fork, ids[41:42]), (first, ids[18:19]), (second, ids[24:25]))
    for sequence in (first, second, fork):
        assert_right(directory, sequence)


def test_every_kernel_compiles_for_hopper() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    script = Path(__file__).with_name("triton_compile.py")
    done = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    kernels = {line.split()[0] for line in done.stdout.splitlines()}
    assert kernels == {
        *("_rms_norm", "_silu_mul", "_rope_append", "_prefill", "_attend", "_merge"),
        *("row_product", "rows_product"),
        *("_best_of_parts", "_best_of_row", "_put_known_ids", "_bounds", "_sum_parts", "_find"),
    }
