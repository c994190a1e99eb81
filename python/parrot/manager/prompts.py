"""From a call's parts and values to the token ids of its Fills.

The ids of a call are those of its whole prompt tokenised at once, apart from outputs: these stay as they were
generated, and the text after one is encoded as following it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from .. import wire
from ..errors import InvalidRequest, PromptTooLong
from ..tokenizer import EncodedPrompt, Piece, PromptEncoder, Tokenizer, render_chat
from .call import Call, InputPart, OutputPart, Part, Role, Step
from .published import PublicText, PublishedTemplates, split_at

BLOCK_SIZE = 16
BOUNDARY_GRID = 128


@dataclass(frozen=True, slots=True)
class Limits:
    """What every engine can hold: ``max_model_len`` of the model, ``num_blocks`` of KV cache."""

    max_model_len: int
    num_blocks: int

    @classmethod
    def of(cls, registrations: Sequence[wire.Register]) -> Limits:
        """The tightest of several engines, so that a call accepted fits whichever it is placed on."""
        return cls(
            min(engine.model.max_model_len for engine in registrations),
            min(engine.cost_model.num_blocks for engine in registrations),
        )

    def check(self, num_prompt: int, num_new: int, function: str = "") -> None:
        """Raise :class:`PromptTooLong` if prompt and output do not fit together, with the numbers and the
        name of the call's ``function``."""
        total = num_prompt + num_new
        held = f"{_of(function)}{num_prompt} prompt tokens and up to {num_new} new ones"
        if total > self.max_model_len:
            raise PromptTooLong(
                f"{held} exceed the model's context of {self.max_model_len} tokens; "
                "shorten the prompt, or lower max_tokens",
                param="prompt",
            )
        if -(-total // BLOCK_SIZE) > self.num_blocks:
            raise PromptTooLong(
                f"{held} exceed the KV cache of {self.num_blocks * BLOCK_SIZE} tokens; "
                "shorten the prompt, lower max_tokens, or start the engine with more --num-blocks",
                param="prompt",
            )


def _of(function: str) -> str:
    """How a message about a call's prompt begins."""
    return f"{function}: " if function else ""


@dataclass(slots=True)
class CallPrompt:
    """Encoded Fills of one call, one per step from step 0 on, as far as they are known."""

    fills: list[EncodedPrompt] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class RunPrompt:
    """What one dispatch needs. ``first`` int32 [n]: all ids before the first output that it generates;
    ``boundaries`` int32: prefix lengths of ``first``, ascending; ``later``: the Fills between its outputs;
    ``piece_ends`` int32: prefix lengths, one for each piece of the call's first Fill; ``public_len``: ids of
    ``first`` that are published text."""

    first: wire.Ids
    boundaries: wire.Ids
    later: tuple[wire.Ids, ...]
    piece_ends: wire.Ids
    public_len: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens of all Fills."""
        return len(self.first) + sum(map(len, self.later))


class PromptBuilder:
    """Encodes calls. Methods may run in any thread."""

    def __init__(self, tokenizer: Tokenizer, published: PublishedTemplates | None = None) -> None:
        """Raises :class:`ConfigError` for a published template that this model cannot render."""
        self.tokenizer = tokenizer
        self._encoder = PromptEncoder(tokenizer)
        beginnings = () if published is None else published.beginnings(tokenizer)
        self._public = PublicText(beginnings, self._encoder.settled_length)
        self._longest_token_bytes = max(
            (len(token.encode("utf-8", "replace")) for token in tokenizer.backend.get_vocab()), default=1
        )

    def step_pieces(self, call: Call, steps: Sequence[Step]) -> list[list[Piece]]:
        """The text of each of the steps, which must have their inputs."""
        if call.roles is None:  # no template is around the parts, whose steps they have already
            return [[_piece(part, is_chat=False) for part in step.parts] for step in steps]
        wanted = {step.index for step in steps}
        pieces: dict[int, list[Piece]] = {index: [] for index in wanted}
        index = 0
        for item in self._flatten(call):
            if isinstance(item, OutputPart):
                index += 1
                if index > max(wanted):
                    break
            elif index in wanted:
                pieces[index].append(_piece(item, is_chat=call.roles is not None))
        return [pieces[step.index] for step in steps]

    def prefix_pieces(self, call: Call, num_parts: int) -> list[Piece]:
        """The text of the first parts of a call, which must have their values, with the chat template's."""
        pieces: list[Piece] = []
        for item in self._flatten(call):
            if not isinstance(item, str):
                if num_parts == 0:
                    break
                num_parts -= 1
            pieces.append(_piece(item, is_chat=call.roles is not None))
        return pieces

    def num_pieces(self, call: Call, num_parts: int) -> int:
        """How many pieces the first parts of a call make, the chat template's among them."""
        num_pieces = 0
        for item in self._flatten(call):
            num_pieces += 1
            num_parts -= 0 if isinstance(item, str) else 1
            if num_parts == 0:
                break
        return num_pieces

    def encode(
        self, pieces: Sequence[Sequence[Piece]], *, first_step: int, domain: int
    ) -> list[EncodedPrompt]:
        """The Fill of each step of a call of this domain; those after step 0 continue generated ids."""
        return [
            self._encoder.encode(step, continues=True, domain=domain)
            if first_step + offset > 0
            else self._encode_first(step, domain)
            for offset, step in enumerate(pieces)
        ]

    def num_new_chars(self, pieces: Sequence[Sequence[Piece]], *, first_step: int, domain: int) -> int:
        """At most so many characters of these steps are not remembered from other prompts."""
        total = 0
        for offset, step in enumerate(pieces):
            is_first = first_step + offset == 0
            owned, num_public = self._by_owner(step) if is_first else (step, 0)
            total += self._encoder.num_new_chars(
                owned, continues=not is_first, domain=domain, num_public=num_public
            )
        return total

    def _encode_first(self, pieces: Sequence[Piece], domain: int) -> EncodedPrompt:
        owned, num_public = self._by_owner(pieces)
        fill = self._encoder.encode(owned, domain=domain, num_public=num_public)
        if len(owned) == len(pieces):
            return fill
        # One end for each piece as it was.
        return replace(fill, piece_ends=np.delete(fill.piece_ends, num_public - 1))

    def _by_owner(self, pieces: Sequence[Piece]) -> tuple[Sequence[Piece], int]:
        """The pieces, the one that is published text in part as two, and how many of them are public."""
        public = self._public.find(pieces)
        if public.num_chars == 0:
            return pieces, public.num_pieces
        return split_at(pieces, public), public.num_pieces + 1

    def from_ids(self, token_ids: Sequence[int]) -> EncodedPrompt:
        """A prompt that is ids already. Raises :class:`InvalidRequest` for one outside the vocabulary."""
        vocab_size = self.tokenizer.vocab_size
        wrong = next((token for token in token_ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise InvalidRequest(f"token {wrong} is outside [0, {vocab_size})", param="prompt")
        ids = np.array(token_ids, dtype=np.int32)
        grid = np.arange(BOUNDARY_GRID, len(ids) + 1, BOUNDARY_GRID, dtype=np.int32)
        return EncodedPrompt(ids, np.union1d(grid, np.array([len(ids)], dtype=np.int32)))

    def chat_pieces(self, messages: Iterable[tuple[Role, str]]) -> list[Piece]:
        """A chat that the assistant is to continue; the contents are literal text."""
        contents = list(messages)
        roles = [role for role, _ in contents]
        return [
            Piece(part, control=True) if isinstance(part, str) else Piece(contents[part][1])
            for part in render_chat(self.tokenizer, roles, add_generation_prompt=True)
        ]

    def is_hopeless(self, num_chars: int, limits: Limits) -> bool:
        """Whether no tokenisation could make a text of so many characters short enough."""
        return num_chars // self._longest_token_bytes > limits.max_model_len

    def refuse_hopeless(self, num_chars: int, limits: Limits, function: str = "") -> None:
        """Raise :class:`PromptTooLong` for a text that no tokenisation could make short enough."""
        if self.is_hopeless(num_chars, limits):
            least = num_chars // self._longest_token_bytes
            raise PromptTooLong(
                f"{_of(function)}a prompt of {num_chars} characters is at least {least} tokens and exceeds "
                f"the model's context of {limits.max_model_len}",
                param="prompt",
            )

    def _flatten(self, call: Call) -> Iterator[str | Part]:
        """The call's parts in prompt order, with the chat template's text between them."""
        if call.roles is None:
            yield from call.parts
            return
        by_message: dict[int, list[Part]] = {}
        for part in call.parts:
            by_message.setdefault(part.message, []).append(part)
        for glue in render_chat(self.tokenizer, call.roles, add_generation_prompt=False):
            if isinstance(glue, str):
                yield glue
            else:
                yield from by_message.get(glue, ())


def _piece(part: str | Part, *, is_chat: bool) -> Piece:
    if isinstance(part, str):
        return Piece(part, control=True)
    if isinstance(part, InputPart):
        return Piece(part.binding.text or "")
    assert not isinstance(part, OutputPart)
    return Piece(part.text, control=not is_chat)


def num_chars(pieces: Iterable[Iterable[Piece]]) -> int:
    """Characters of several runs of pieces."""
    total = 0
    for run in pieces:
        for piece in run:
            total += len(piece.text)
    return total


def assemble(prompt: CallPrompt, call: Call, steps: Sequence[Step]) -> RunPrompt:
    """The ids of a dispatch of ``steps``, all of whose Fills are encoded; generated ids as generated.

    Raises :class:`InvalidRequest` for a prompt without any token.
    """
    first, last = steps[0].index, steps[-1].index
    if first == 0 and len(prompt.fills[0].token_ids):
        fill = prompt.fills[0]
        later = tuple(prompt.fills[index].token_ids for index in range(1, last + 1))
        return RunPrompt(fill.token_ids, fill.boundaries, later, fill.piece_ends, fill.public_len)
    ids: list[wire.Ids] = []
    boundaries: list[wire.Ids] = []
    offset = 0
    for index in range(first + 1):
        fill = prompt.fills[index]
        ids.append(fill.token_ids)
        boundaries.append(np.asarray(fill.boundaries, dtype=np.int32) + offset)
        offset += len(fill.token_ids)
        if index < first:
            generated = wire.unpack_ids(call.steps[index].output.binding.token_ids)
            ids.append(generated)
            offset += len(generated)
    if offset == 0:
        raise InvalidRequest(f"call {call.name}: the prompt is empty", param="prompt")
    return RunPrompt(
        np.ascontiguousarray(np.concatenate(ids), dtype=np.int32),
        np.unique(np.concatenate(boundaries)).astype(np.int32),
        tuple(prompt.fills[index].token_ids for index in range(first + 1, last + 1)),
        prompt.fills[0].piece_ends,
        prompt.fills[0].public_len,
    )
