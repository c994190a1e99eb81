"""A ContextTree with the slots of a KV tensor behind it, for the tests of the KV cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from parrot._core import ContextTree

I64 = npt.NDArray[np.int64]
Tokens = tuple[int, ...]
Owned = tuple[tuple[int, int], ...]  # tokens, each with the domain that it belongs to
PUBLIC = 0


def i32(values: Sequence[int]) -> npt.NDArray[np.int32]:
    return np.array(values, np.int32)


def i64(*values: int) -> I64:
    return np.array(values, np.int64)


def kv_of(prefix: Owned) -> int:
    """Stands for the KV of a prefix's last token: like the real one it depends on everything before it, and
    unlike the real one on whose that is, so that a block of a stranger is told from one's own."""
    return hash(prefix)


def owned(tokens: Sequence[int], domain: int, public_len: int) -> Owned:
    """Tokens with their domains: the public one up to ``public_len``."""
    return tuple((PUBLIC if i < public_len else domain, token) for i, token in enumerate(tokens))


class Cache:
    """A ContextTree with the slots of a KV tensor behind it, and what every context must contain."""

    def __init__(self, num_blocks: int, block_size: int = 16) -> None:
        self.tree = ContextTree(num_blocks, block_size)
        self.block_size = block_size
        self.kv = np.zeros((num_blocks, block_size), np.int64)
        self.domains: dict[int, tuple[int, int]] = {}  # (domain, length of the published beginning)
        self.contents: dict[int, Tokens] = {}  # committed tokens
        self.reserved: dict[int, Tokens] = {}
        self.computed: set[Owned] = set()  # every sequence that was ever committed

    def open(
        self,
        context_id: int,
        tokens: Sequence[int],
        max_prefix: int | None = None,
        domain: int = 0,
        public_len: int = 0,
    ) -> int:
        limit = len(tokens) if max_prefix is None else max_prefix
        length = self.tree.open(context_id, domain, i32(tokens), limit, public_len)
        self.domains[context_id], self.contents[context_id] = (domain, public_len), tuple(tokens[:length])
        return length

    def fork(self, context_id: int, parent: int, length: int) -> None:
        self.tree.fork(context_id, parent, length)
        domain, public_len = self.domains[parent]
        self.domains[context_id] = domain, min(public_len, length)
        self.contents[context_id] = self.contents[parent][:length]

    def truncate(self, context_id: int, length: int) -> None:
        self.tree.truncate(context_id, length)
        domain, public_len = self.domains[context_id]
        self.domains[context_id] = domain, min(public_len, length)
        self.contents[context_id] = self.contents[context_id][:length]

    def pending_prefix(self, context_id: int) -> int:
        """How much of what a context has is found by another one like it."""
        tokens = self.contents[context_id] + self.reserved.get(context_id, ())
        domain, public_len = self.domains[context_id]
        return self.tree.pending_prefix(domain, i32(tokens), min(public_len, len(tokens)))

    def room(self, context_id: int) -> int:
        """Tokens that may be reserved at once: those of one domain."""
        (domain, public_len), length = self.domains[context_id], len(self.contents[context_id])
        return public_len - length if domain != PUBLIC and length < public_len else 2**31 - 1 - length

    def owned(self, context_id: int) -> Owned:
        """The committed tokens of a context, each with the domain that it belongs to."""
        return owned(self.contents[context_id], *self.domains[context_id])

    def reserve(self, batch: Mapping[int, Sequence[int]]) -> npt.NDArray[np.int32]:
        """Reserve, copy as told, and write garbage where the step is going to write."""
        tokens = [token for new in batch.values() for token in new]
        slots = np.full(len(tokens), np.iinfo(np.int32).max, np.int32)
        counts = i32([len(new) for new in batch.values()])
        copies = self.tree.reserve(i64(*batch), counts, i32(tokens), slots)
        for source, destination, num_slots in copies:
            self.kv[destination, :num_slots] = self.kv[source, :num_slots]
        assert len(set(slots.tolist())) == len(slots)
        self.kv.reshape(-1)[slots] = -1
        self.slots = slots
        self.reserved |= {context_id: tuple(new) for context_id, new in batch.items()}
        return copies

    def set_last_tokens(self, last: Mapping[int, int]) -> None:
        """The last reserved tokens of these contexts are others than was said."""
        self.tree.set_last_tokens(i64(*last), i32(list(last.values())))
        for context_id, token in last.items():
            self.reserved[context_id] = (*self.reserved[context_id][:-1], token)

    def commit(self, batch: Mapping[int, Sequence[int]]) -> None:
        """Write the reserved slots of the last reserve, and commit."""
        values = []
        for context_id in batch:
            num_old = len(self.contents[context_id])
            self.contents[context_id] += self.reserved.pop(context_id)
            new = self.owned(context_id)
            values += [kv_of(new[: end + 1]) for end in range(num_old, len(new))]
            self.computed.add(new)
        self.kv.reshape(-1)[self.slots] = values
        self.tree.commit(i64(*batch))

    def append(self, context_id: int, tokens: Sequence[int]) -> npt.NDArray[np.int32]:
        copies = self.reserve({context_id: tokens})
        self.commit({context_id: tokens})
        return copies

    def prefill(
        self,
        context_id: int,
        tokens: Sequence[int],
        max_prefix: int | None = None,
        domain: int = 0,
        public_len: int = 0,
    ) -> int:
        matched = done = self.open(context_id, tokens, max_prefix, domain, public_len)
        while done < len(tokens):
            end = min(len(tokens), done + self.room(context_id))
            self.append(context_id, tokens[done:end])
            done = end
        return matched

    def free(self, context_id: int) -> None:
        self.tree.free(context_id)
        for table in (self.contents, self.reserved, self.domains):
            table.pop(context_id, None)

    def table(self, context_id: int) -> list[int]:
        out = np.full((1, 1 + self.tree.num_blocks), np.iinfo(np.int32).max, np.int32)
        self.tree.block_tables(i64(context_id), out)
        length = len(self.contents[context_id]) + len(self.reserved.get(context_id, ()))
        num_blocks = -(-length // self.block_size)
        assert (out[0, num_blocks:] == -1).all()
        return [int(block) for block in out[0, :num_blocks]]

    def check(self) -> None:
        self.tree.check_invariants()
        for context_id, remaining in self.tree.take_evicted():
            assert remaining < len(self.contents[context_id])
            self.contents[context_id] = self.contents[context_id][:remaining]
        lengths = np.full(len(self.contents), -1, np.int32)
        self.tree.lengths(i64(*self.contents), lengths)
        for (context_id, tokens), length in zip(self.contents.items(), lengths, strict=True):
            assert length == len(tokens) + len(self.reserved.get(context_id, ()))
            assert tuple(self.tree.tokens(context_id)) == tokens
            slots = self.kv[self.table(context_id)].reshape(-1)[: len(tokens)]
            owned = self.owned(context_id)
            expected = [kv_of(owned[: end + 1]) for end in range(len(owned))]
            assert slots.tolist() == expected
