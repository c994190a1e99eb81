"""Random decode batches on trees of prefixes, with poison wherever no kernel should look."""

from __future__ import annotations

import numpy as np
import torch

from parrot.kernels.shared_prefix import SharedPrefixAttention, shared_prefix_attention_reference

BLOCK = 16


def grow(tree, above, rng, suffix_lens):
    """(blocks, length) of each request of a tree: a list of (blocks of a node, what is below it: a number of
    requests or another such list)."""
    for num_blocks, below in tree:
        node = above + [object() for _ in range(num_blocks)]
        if not isinstance(below, int):
            yield from grow(below, node, rng, suffix_lens)
            continue
        for _ in range(below):
            length = int(rng.choice(suffix_lens))
            own = [object() for _ in range(-(-length // BLOCK))]
            yield node + own, len(node) * BLOCK + length


def random_tree(rng, depth=3):
    """Any tree of up to ``depth`` levels: nodes of one to nine blocks, one to four requests below each."""
    nodes = []
    for _ in range(int(rng.integers(1, 4))):
        is_inner = depth > 1 and rng.random() < 0.5
        below = random_tree(rng, depth - 1) if is_inner else int(rng.integers(1, 5))
        nodes.append((int(rng.integers(1, 10)), below))
    return nodes


class Batch:
    """Random requests on a tree of prefixes; unused slots and table entries are poisoned."""

    def __init__(self, seed, heads, kv_heads, head_dim, dtype, tree, suffix_lens, device="cpu"):
        rng = np.random.default_rng(seed)
        paths = list(grow(tree, [], rng, suffix_lens))
        names = list({id(b): b for path, _ in paths for b in path}.values())
        num_blocks = len(names) + 7
        order = rng.permutation(num_blocks)
        block_of = {id(b): int(order[i]) for i, b in enumerate(names)}
        max_blocks = max(len(path) for path, _ in paths) + 1
        self.block_tables = np.full((len(paths), max_blocks), -1, dtype=np.int32)
        self.seq_lens = np.array([length for _, length in paths], dtype=np.int32)
        used = torch.zeros(num_blocks, BLOCK, dtype=torch.bool)
        for row, (path, length) in enumerate(paths):
            self.block_tables[row, : len(path)] = [block_of[id(b)] for b in path]
            for i in range(len(path)):
                used[self.block_tables[row, i], : min(BLOCK, length - i * BLOCK)] = True
        generator = torch.Generator().manual_seed(seed)
        shape = (num_blocks, BLOCK, kv_heads, head_dim)
        caches = [torch.randn(shape, generator=generator) for _ in range(2)]
        for cache in caches:
            cache[~used] = float("nan")
        self.kv_heads, self.device = kv_heads, torch.device(device)
        self.key_cache, self.value_cache = (c.to(dtype).to(self.device) for c in caches)
        query = torch.randn(len(paths), heads, head_dim, generator=generator)
        self.query = query.to(dtype).to(self.device)

    def reference(self, scale):
        tables = torch.from_numpy(self.block_tables).to(self.device)
        return shared_prefix_attention_reference(
            self.query.double(), self.key_cache, self.value_cache, tables, self.seq_lens.tolist(), scale
        )

    def make_kernel(self, implementation, **options):
        n, blocks = self.block_tables.shape
        return SharedPrefixAttention(
            max_requests=n + 3,
            max_blocks=blocks + 5,
            num_heads=self.query.shape[1],
            num_kv_heads=self.kv_heads,
            head_dim=self.query.shape[2],
            device=self.device,
            implementation=implementation,
            **options,
        )

    def run(self, kernel, scale):
        """The kernel's output, into memory that held NaN."""
        output = torch.full_like(self.query, float("nan"))
        kernel(self.query, self.key_cache, self.value_cache, output, scale)
        return output

    def check(self, kernel, scale=0.1):
        """Plans and launches, and holds the result against float64."""
        kernel.plan(self.block_tables, self.seq_lens)
        error = relative_error(self.run(kernel, scale), self.reference(scale))
        limit = {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}[self.query.dtype]
        assert error <= limit, (error, kernel.num_entries, kernel.num_parts)


def relative_error(out, reference):
    return ((out.double() - reference).norm() / reference.norm()).item()
