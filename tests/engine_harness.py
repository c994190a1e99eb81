"""An engine in this process, and calls run to their end through it."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch

from parrot.engine.engine import Engine
from parrot.engine.model import DecoderModel
from parrot.engine.runner import ModelRunner
from parrot.errors import ErrorInfo
from parrot.tokenizer.tokenizer import Tokenizer
from parrot.wire import (
    CallDone,
    CallFailed,
    CallId,
    Chunk,
    ContextId,
    ContextsEvicted,
    CostModel,
    Dispatch,
    Fill,
    FillDone,
    Generate,
    GenerateDone,
    Sampling,
    Verb,
    pack_ids,
    unpack_ids,
)

MAX_STEPS = 5000
_engines: deque[Engine] = deque()  # of the test that runs: they must not be gone before they are checked
_MOST_ENGINES = 32


@dataclass
class Result:
    """Everything an engine replied for one call."""

    fills: list[FillDone] = field(default_factory=list)
    outputs: list[GenerateDone] = field(default_factory=list)
    chunks: dict[int, str] = field(default_factory=lambda: defaultdict(str))
    done: CallDone | None = None
    error: ErrorInfo | None = None

    @property
    def ids(self) -> list[int]:
        """Ids that the first output keeps in the context."""
        return self.ids_of(0)

    def ids_of(self, output: int) -> list[int]:
        return unpack_ids(self.outputs[output].token_ids).tolist()

    @property
    def ended(self) -> bool:
        return self.done is not None or self.error is not None


class Harness:
    """Submits calls with fresh ids; a call's context has the call's number."""

    def __init__(
        self,
        model: DecoderModel | ModelRunner,
        tokenizer: Tokenizer,
        *,
        num_blocks: int = 256,
        max_batch_size: int = 16,
        max_batch_tokens: int = 64,
        cost_model: CostModel | None = None,
        engine_type: type[Engine] = Engine,
    ) -> None:
        self.tokenizer = tokenizer
        if isinstance(model, DecoderModel):
            model = ModelRunner(model, num_blocks, torch.float32, torch.device("cpu"))
        self.runner = model
        self.engine = engine_type(
            self.runner,
            tokenizer,
            max_batch_size=max_batch_size,
            max_batch_tokens=max_batch_tokens,
            cost_model=cost_model,
        )
        watch(self.engine)
        self.results: dict[int, Result] = defaultdict(Result)
        self.evicted: list[tuple[int, int]] = []
        self.log: list[object] = []
        self.next_id = 1

    def submit(
        self,
        prompt: Sequence[int],
        *,
        max_tokens: int = 8,
        domain: int = 1,
        public_len: int = 0,
        arrival: int = 0,
        stream: bool = False,
        **sampling: object,
    ) -> int:
        """A call of one Fill and one Generate, end-of-sequence ignored."""
        sampling = {"ignore_eos": True, **sampling}
        return self.submit_verbs(
            [list(prompt), Sampling(max_tokens=max_tokens, **sampling)],  # type: ignore[arg-type]
            domain=domain,
            arrival=arrival,
            stream=stream,
            public_len=public_len,
        )

    def submit_verbs(
        self,
        verbs: Sequence[list[int] | Sampling | Verb],
        *,
        domain: int = 1,
        arrival: int = 0,
        stream: bool = False,
        early_fill: bool = False,
        public_len: int = 0,
    ) -> int:
        """A call of any verbs: a list of ids fills, a Sampling generates; ``public_len`` of its first ids are
        published."""
        call_id = self.next_id
        self.next_id += 1
        program = tuple(self._verb(verb, ContextId(call_id)) for verb in verbs)
        if public_len:
            program = (msgspec.structs.replace(program[0], public_len=public_len), *program[1:])
        flags = {"stream": stream, "early_fill": early_fill}
        self.engine.submit(Dispatch(CallId(call_id), domain, arrival, "THROUGHPUT", program, **flags))
        return call_id

    @staticmethod
    def _verb(verb: list[int] | Sampling | Verb, context_id: ContextId) -> Verb:
        if isinstance(verb, list):
            return Fill(pack_ids(verb), context_id)
        return Generate(verb, context_id) if isinstance(verb, Sampling) else verb

    def step(self) -> None:
        """One step; sorts its replies by call and checks the tree."""
        for reply in self.engine.step():
            self.log.append(reply)
            if isinstance(reply, ContextsEvicted):
                self.evicted += zip(reply.context_ids, reply.remaining, strict=True)
                assert all(self.results[c].done for c in reply.context_ids), "not cached by a finished call"
                continue
            result = self.results[reply.call_id]
            assert not result.ended, f"{reply} after the end of its call"
            match reply:
                case FillDone():
                    result.fills.append(reply)
                case Chunk():
                    result.chunks[reply.verb] += reply.text
                case GenerateDone():
                    result.outputs.append(reply)
                case CallDone():
                    result.done = reply
                case CallFailed():
                    result.error = reply.error
        self.engine.tree.check_invariants()

    def run(self, *call_ids: int) -> list[Result]:
        """Step until there is no work; results of these calls."""
        for _ in range(MAX_STEPS):
            if not self.engine.has_work:
                break
            self.step()
        assert not self.engine.has_work, f"work is left after {MAX_STEPS} steps"
        assert self.engine.tree.num_held_blocks == 0
        return [self.results[call_id] for call_id in call_ids]

    def generate(self, prompt: Sequence[int], **options: object) -> Result:
        """One call, run to its end."""
        return self.run(self.submit(prompt, **options))[0]  # type: ignore[arg-type]


def watch(engine: Engine) -> None:
    """Look at its pool when the test ends, or before, when the test makes a great many engines."""
    if len(_engines) == _MOST_ENGINES:
        _check_pool(_engines.popleft())
    _engines.append(engine)


def check_pools() -> None:
    """Of every engine that a test has made."""
    while _engines:
        _check_pool(_engines.popleft())


def _check_pool(engine: Engine) -> None:
    """All blocks are free, evictable or held, and none is held for a call that is not there."""
    tree = engine.tree
    tree.check_invariants()
    assert tree.num_free_blocks + tree.num_evictable_blocks + tree.num_held_blocks == tree.num_blocks
    assert engine.has_work or tree.num_held_blocks == 0


def load(directory: Path, *, share_prefixes: bool = True) -> tuple[DecoderModel, Tokenizer]:
    """The model in fp32, with its tokenizer."""
    device = torch.device("cpu")
    model = DecoderModel.load(directory, torch.float32, device, share_prefixes=share_prefixes)
    return model, Tokenizer.load(directory)


MakeHarness = Callable[..., Harness]
Oracle = Callable[[Sequence[int], int], list[int]]


def greedy_oracle(directory: Path) -> Oracle:
    """Greedy ids by transformers, one prompt at a time, end-of-sequence ignored."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def generate(prompt: Sequence[int], num_tokens: int) -> list[int]:
        ids = torch.tensor([list(prompt)])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return out[0, len(prompt) :].tolist()

    return generate


def prompt_of(length: int, seed: int = 0, vocab: int = 256) -> list[int]:
    return np.random.default_rng(seed).integers(3, vocab, length).tolist()
