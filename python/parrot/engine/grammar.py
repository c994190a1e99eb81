"""Constrained decoding: grammars compiled off the engine's loop, and which ids each lets follow.

Masks are computed in a thread while the model runs. Where a grammar leaves no choice, its ids are filled in
without being decoded one by one; they count as generated.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
import torch
from llguidance import LLExecutor, LLMatcher, LLTokenizer
from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask_par
from torch import Tensor

from ..errors import ParrotError
from ..grammars import UNCONSTRAINABLE, native_grammar, refused, unconstrainable
from ..tokenizer.tokenizer import Tokenizer
from ..wire import PUBLIC_DOMAIN, Grammar

log = logging.getLogger(__name__)
_MAX_CACHED = 256
_NUM_COMPILERS = 2
Bitmask = npt.NDArray[
    np.int32
]  # [n, ceil(vocab / 32)], bit i % 32 of word i // 32 says whether id i may follow


class Matcher:
    """Follows one output through its grammar."""

    def __init__(self, native: LLMatcher, grammar: Grammar, *, fast_forward: bool) -> None:
        """``native`` is a fresh copy. Without ``fast_forward`` ids without a choice are sampled too, one by
        one, under a mask that allows nothing else."""
        self.finished = False  # nothing can follow
        self._native = native
        self._grammar = grammar
        self._fast_forward = fast_forward
        self._forced: deque[int] = deque()  # consumed already, still to be sampled

    @property
    def native(self) -> LLMatcher:
        """For computing masks."""
        return self._native

    @property
    def forced_id(self) -> int | None:
        """The only id that may follow, if it was found ahead of sampling it."""
        return self._forced[0] if self._forced else None

    def begin(self, max_tokens: int) -> list[int]:
        """The ids with which the text must begin, unless they are all of it: to be appended."""
        forced = self._native.compute_ff_tokens()
        if not forced or len(forced) >= max_tokens:
            return []
        self._native.consume_tokens(forced)
        if self._native.is_stopped():
            self._native.rollback(len(forced))
            return []
        return self._give(forced)

    def accept(self, token_id: int) -> list[int]:
        """Go on by a sampled id; returns the ids that must follow it, to be appended.

        Raises :class:`InvalidRequest` if the grammar does not take the id or is too complex."""
        forced: list[int] = []
        if self._forced:
            self._forced.popleft()
        else:
            self._native.consume_token(token_id)
            self.check()
            forced = self._native.compute_ff_tokens()
            self._native.consume_tokens(forced)
            self.check()
            forced = self._give(forced)
        self.finished = not self._forced and self._native.is_stopped()
        return forced

    def check(self) -> None:
        """Raise :class:`InvalidRequest` if the grammar could not be followed."""
        if self._native.is_error():
            raise refused(self._grammar, self._native.get_error())

    def _give(self, forced: list[int]) -> list[int]:
        if self._fast_forward:
            return forced
        self._forced.extend(forced)
        return []


class Grammars:
    """Compiles and caches grammars for one tokenizer, and computes masks. One per engine; its methods are
    called in the engine's thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        """``vocab_size`` is the model's, which may have more ids than the tokenizer."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._is_possible = tokenizer.can_constrain
        if not self._is_possible:
            log.warning("schemas, regexes and choices are refused: %s", UNCONSTRAINABLE)
        self._native: LLTokenizer | None = None
        self._native_lock = threading.Lock()
        self._compiled: OrderedDict[tuple[int, Grammar], Future[LLMatcher]] = OrderedDict()
        self._compilers = ThreadPoolExecutor(_NUM_COMPILERS, "grammar-compiler")
        self._masker = ThreadPoolExecutor(1, "grammar-masks")
        self._executor: LLExecutor | None = None

    def compile(self, grammar: Grammar, domain: int = PUBLIC_DOMAIN) -> Future[LLMatcher]:
        """Compile in a thread, or find in the cache of the domain: how soon a first token comes tells nobody
        what schemas other tenants use. The result fails with :class:`InvalidRequest`."""
        key = (domain, grammar)
        known = self._compiled.get(key)
        if known is None:
            known = self._compiled[key] = self._compilers.submit(self._compile_safely, grammar)
            while len(self._compiled) > _MAX_CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(key)
        return known

    def _compile_safely(self, grammar: Grammar) -> LLMatcher:
        try:
            return self._compile(grammar)
        except ParrotError:
            raise
        except BaseException as error:  # a panic in Rust is no Exception; it must not end the engine
            log.error("a %s could not be compiled", grammar.kind, exc_info=error)
            reason = f"{type(error).__name__} while it was compiled; the engine's log has the trace"
            raise refused(grammar, reason) from None

    def _compile(self, grammar: Grammar) -> LLMatcher:
        tokenizer = self._native_tokenizer()
        if tokenizer is None:
            raise unconstrainable(grammar)
        matcher = LLMatcher(tokenizer, native_grammar(grammar), log_level=0)
        if matcher.is_error():
            raise refused(grammar, matcher.get_error())
        # The first mask fills the tables that copies share, and finds grammars that no text satisfies.
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            raise refused(grammar, first.get_error() or first.stop_reason())
        return matcher

    def _native_tokenizer(self) -> LLTokenizer | None:
        """None where the tokenizer cannot do it; one that fails unforeseen says so in the log, once."""
        with self._native_lock:
            if self._native is None and self._is_possible:
                eos_ids = sorted(self._tokenizer.ends_below(self._vocab_size))
                try:
                    self._native = LLTokenizer(
                        self._tokenizer.backend.to_str(), n_vocab=self._vocab_size, eos_token=eos_ids or None
                    )
                except ValueError as error:
                    self._is_possible = False
                    log.warning("schemas, regexes and choices are refused: %s", error)
            return self._native

    def start_masks(self, matchers: Sequence[Matcher]) -> Future[Bitmask]:
        """Begin to compute which ids may follow in each; the matchers must rest until it is done."""
        return self._masker.submit(self._masks, matchers)

    def _masks(self, matchers: Sequence[Matcher]) -> Bitmask:
        masks: Bitmask = allocate_token_bitmask(len(matchers), self._vocab_size)
        if self._executor is None:
            self._executor = LLExecutor()
        open_ones = [(m.native, i) for i, m in enumerate(matchers) if m.forced_id is None]
        if open_ones:
            fill_next_token_bitmask_par(self._executor, open_ones, masks)
        for i, matcher in enumerate(matchers):
            if (forced := matcher.forced_id) is not None:
                masks[i] = 0
                masks[i].view(np.uint32)[forced // 32] = np.uint32(1) << np.uint32(forced % 32)
        return masks


def unpack_masks(masks: Bitmask, vocab_size: int, device: torch.device) -> Tensor:
    """bool [n, vocab]: the masks on the device of the logits, expanded there."""
    if device.type == "cpu":
        bits_of_bytes = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little")
        return torch.from_numpy(bits_of_bytes[:, :vocab_size].view(np.bool_))
    words = torch.from_numpy(masks).to(device, non_blocking=True)
    bits = (words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=device)) & 1
    return bits.bool().flatten(1)[:, :vocab_size]
