"""CUDA kernels, present where nvcc was found at build time. Addresses are device addresses."""

def device_count() -> int:
    """CUDA devices that can be used now; 0 without a driver."""

def shared_prefix_attention_grid(head_dim: int) -> int:
    """Thread blocks of a full grid on the current device: what a plan balances over."""

def shared_prefix_attention(
    *,
    query: int,
    key_cache: int,
    value_cache: int,
    output: int,
    block_tables: int,
    entries: int,
    num_entries: int,
    members: int,
    part_begin: int,
    part_output: int,
    part_max_sum: int,
    next_work: int,
    num_requests: int,
    num_blocks: int,
    max_blocks: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    is_bfloat16: bool,
    softmax_scale: float,
    stream: int,
) -> None:
    """Launch SharedPrefixAttention (paper section 5.3); shapes in csrc/kernels/shared_prefix_attention.cuh.

    Raises ValueError for a shape or address it cannot run, RuntimeError when CUDA fails."""

def has_paged_prefill() -> bool:
    """Whether the current device runs paged_prefill: compute capability 9.0, in a build for sm_90a."""

def paged_prefill_rows() -> int:
    """Query rows of a tile of paged_prefill, at most."""

def paged_prefill(
    *,
    query: int,
    key_cache: int,
    value_cache: int,
    output: int,
    tiles: int,
    block_tables: int,
    next_work: int,
    num_rows: int,
    num_tiles: int,
    num_tokens: int,
    num_blocks: int,
    max_blocks: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    is_bfloat16: bool,
    softmax_scale: float,
    stream: int,
) -> None:
    """Launch paged prefill where has_paged_prefill(); shapes in csrc/kernels/paged_prefill_work.cuh.

    ``num_tokens``: that the chunks attend to, in sum over the sequences. Raises ValueError for a shape, an
    address or a device it cannot run, RuntimeError when CUDA fails."""
