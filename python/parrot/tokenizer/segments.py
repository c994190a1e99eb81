"""Segmented prompts to token ids, equal to those of the whole prompt tokenised at once (section 5.3).

A prompt is cut at its control tokens; each run between two of them, constants and values together, is encoded
as one text. A run is encoded piece by piece all the same: what lies before the last safe cut of a piece is
final, the few characters behind it are carried into the next piece. So the work for a piece depends only on
the carried text and the piece, and is remembered by content: a long constant prefix is encoded once.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import zip_longest
from typing import NamedTuple

import numpy as np

from ..errors import InvalidRequest
from ..wire import PUBLIC_DOMAIN, Ids
from .cuts import NO_IDS, encode_run, make_splitter
from .layout import PrefixSpace
from .tokenizer import Tokenizer

BOUNDARY_GRID = 128
CACHE_BYTES = 64 * 2**20
_ENTRY_OVERHEAD_BYTES = 512
_WHITE_SPACE = "\t\n\v\f\r \x85\xa0\u1680\u2028\u2029\u202f\u205f\u3000" + "".join(
    map(chr, range(0x2000, 0x200B))
)


class Piece(NamedTuple):
    """A run of prompt text. With ``control``, control strings in it (``<|im_start|>``) become control tokens:
    chat template glue, constants of a raw prompt. Without, they stay text: values, message contents."""

    text: str
    control: bool = False


@dataclass(frozen=True, slots=True)
class EncodedPrompt:
    """``token_ids`` int32 [n]; ``boundaries`` int32, ascending prefix lengths b, 0 < b <= n, of which no
    later text can change the ids: one for each end of a piece, and one every 128 tokens. ``piece_ends``
    int32: that of each piece, in order, 0 where no id is final yet; empty for ids that were no text.
    ``public_len``: ids that published text made, 0 or one of the boundaries; a token that straddles its end
    is not among them."""

    token_ids: Ids
    boundaries: Ids
    piece_ends: Ids = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    public_len: int = 0


class _Place(Enum):
    """Where in the prompt the carried text begins."""

    __hash__ = object.__hash__  # there is one of each; Enum hashes the name, and in Python

    PROMPT_START = auto()
    AFTER_CONTROL = auto()
    AFTER_STRIPPING = auto()  # behind a control token that swallows white space
    IN_RUN = auto()


# Not looked up in the Enum, which takes Python 3.11 longer than the rest of most lines.
_PROMPT_START, _AFTER_CONTROL, _AFTER_STRIPPING, _IN_RUN = _Place


class _State(NamedTuple):
    """Between two pieces: the text that is not final yet, and what came before it."""

    place: _Place
    carry: str = ""


@dataclass(frozen=True, slots=True)
class _Step:
    """The work for one piece: the ids that became final, the state behind the piece and, where they are
    known, the ids of the text that is carried, should the prompt end there."""

    token_ids: Ids
    state: _State
    carry_ids: Ids | None = None


_Key = tuple[int, _State, str, bool | None]
"""Domain, state before a piece, and the piece's text and control; None: the prompt ends there."""


class PromptEncoder:
    """Encodes prompts piece by piece and remembers what it encoded (a bounded LRU, by domain and content: how
    long it takes to encode a text tells nobody whether another tenant has it).

    May be used by several threads at once."""

    def __init__(self, tokenizer: Tokenizer, *, cache_bytes: int = CACHE_BYTES) -> None:
        self._tokenizer = tokenizer
        self._layout = tokenizer.layout
        self._split = make_splitter(tokenizer)
        self._control = self._layout.control_pattern()
        self._control_starts = frozenset(
            text[:n] for text in self._layout.control_ids for n in range(1, len(text))
        )
        self._longest_start = max(map(len, self._control_starts), default=0)
        self._steps = _StepCache(cache_bytes)

    def encode(
        self,
        pieces: Sequence[Piece],
        *,
        continues: bool = False,
        domain: int = PUBLIC_DOMAIN,
        num_public: int = 0,
    ) -> EncodedPrompt:
        """Ids of the concatenated pieces, with exactly one BOS if the model wants one. The first
        ``num_public`` pieces are published text, the others belong to ``domain``; control text that is
        public ends where it is settled (:meth:`settled_length`).

        With ``continues`` the text follows ids that were generated: no BOS, no space put before it. Raises
        :class:`InvalidRequest` for text that is not Unicode (half of a surrogate pair)."""
        state = _State(_IN_RUN if continues else _PROMPT_START)
        parts: list[Ids] = []
        ends: list[int] = []
        num_final = 0
        merged: list[int] = []
        carry_ids: Ids | None = None
        for owner, owned in _by_owner(pieces, domain, num_public):
            if _has_neighbours(owned):
                merged += _merged_index(owned, len(ends) - 1)
                owned = list(_merge_control(owned))
            else:  # most prompts
                merged += range(len(ends), len(ends) + len(owned))
            for piece in owned:
                step = self._step(owner, state, piece)
                parts.append(step.token_ids)
                state, carry_ids = step.state, step.carry_ids
                num_final += len(step.token_ids)
                ends.append(num_final)
        parts.append(self._last_ids(domain, state) if carry_ids is None else carry_ids)
        return self._finish(np.concatenate(parts), ends, continues, merged, num_public)

    def num_new_chars(
        self,
        pieces: Sequence[Piece],
        *,
        continues: bool = False,
        domain: int = PUBLIC_DOMAIN,
        num_public: int = 0,
    ) -> int:
        """At most so many characters of a prompt (see :meth:`encode`) are not remembered."""
        state = _State(_IN_RUN if continues else _PROMPT_START)
        num_left = sum(len(piece.text) for piece in pieces)
        for owner, owned in _by_owner(pieces, domain, num_public):
            for piece in _merge_control(owned):
                step = self._steps.get((owner, state, piece.text, piece.control))
                if step is None:
                    return num_left
                state = step.state
                num_left -= len(piece.text)
        return 0

    def settled_length(self, text: str) -> int:
        """How much of a control text, from its beginning, no text behind it can turn into control tokens."""
        while held_back := self._possible_control(text):
            text = text[:-held_back]
        return len(text)

    @property
    def cached_bytes(self) -> int:
        """Bytes that the remembered pieces take, about."""
        return self._steps.used_bytes

    def _finish(
        self, ids: Ids, ends: list[int], continues: bool, merged: list[int], num_public: int
    ) -> EncodedPrompt:
        """Put exactly one BOS in front and turn ends of final ids into boundaries. ``merged``: the end that
        counts for each piece."""
        bos = self._tokenizer.bos_id
        shift = 0
        if self._tokenizer.add_bos and not continues:
            has_bos = len(ids) > 0 and ids[0] == bos
            num_bos = int(np.argmax(np.append(ids != bos, True))) if has_bos else 0
            ids = np.concatenate([np.array([bos], dtype=np.int32), ids[num_bos:]])
            shift = 1 - num_bos
        # A handful of numbers: lists are several times as fast as arrays of them.
        final = [max(end + shift, 0) for end in ends] if shift else ends
        limit = final[-1] if final else max(shift, 0)
        marks = sorted({*range(BOUNDARY_GRID, limit + 1, BOUNDARY_GRID), *final} - {0})
        piece_ends = [final[index] if index >= 0 else max(shift, 0) for index in merged]
        return EncodedPrompt(
            ids,
            np.array(marks, dtype=np.int32),
            np.array(piece_ends, dtype=np.int32),
            piece_ends[num_public - 1] if num_public else 0,
        )

    def _takes_space(self, state: _State) -> bool:
        if state.place is _IN_RUN:
            return False
        prefix = self._layout.prefix_space
        return prefix is PrefixSpace.ALWAYS or (prefix is PrefixSpace.FIRST and state.place is _PROMPT_START)

    def _step(self, domain: int, state: _State, piece: Piece) -> _Step:
        key = (domain, state, piece.text, piece.control)
        step = self._steps.get(key)
        if step is None:
            step = self._compute(state, piece)
            self._steps.put(key, step)
        return step

    def _last_ids(self, domain: int, state: _State) -> Ids:
        """Ids of the text that is carried to the end of the prompt."""
        if not state.carry:
            return NO_IDS
        key = (domain, state, "", None)
        step = self._steps.get(key)
        if step is None:
            step = _Step(encode_run(self._tokenizer, state.carry, self._takes_space(state)), state)
            self._steps.put(key, step)
        return step.token_ids

    def _compute(self, state: _State, piece: Piece) -> _Step:
        _check_unicode(piece.text)
        parts: list[Ids] = []
        carry_ids: Ids | None = None
        for run, control in self._runs(piece):
            state = self._carry_on(state, run)
            if control is None:
                held_back = self._possible_control(run) if piece.control else 0
                final, carry_ids, state = self._split_off(state, held_back)
                parts.append(final)
            else:
                parts.append(encode_run(self._tokenizer, state.carry, self._takes_space(state)))
                parts.append(np.array([self._layout.control_ids[control]], dtype=np.int32))
                strips = control in self._layout.stripping
                state = _State(_AFTER_STRIPPING if strips else _AFTER_CONTROL)
        return _Step(np.concatenate(parts), state, carry_ids)

    def _runs(self, piece: Piece) -> Iterator[tuple[str, str | None]]:
        """(text, the control string behind it); None behind the last."""
        if not piece.control:
            yield piece.text, None
            return
        parts = self._control.split(piece.text)
        yield from zip(parts[::2], parts[1::2], strict=False)
        yield parts[-1], None

    @staticmethod
    def _carry_on(state: _State, text: str) -> _State:
        if state.place is _AFTER_STRIPPING and not state.carry:
            text = text.lstrip(_WHITE_SPACE)
        return _State(state.place, state.carry + text)

    def _possible_control(self, run: str) -> int:
        """Length of the longest end of a run that more control text could turn into a control token."""
        for length in range(min(self._longest_start, len(run)), 0, -1):
            if run[-length:] in self._control_starts:
                return length
        return 0

    def _split_off(self, state: _State, held_back: int) -> tuple[Ids, Ids | None, _State]:
        """The final ids of the carried text without its last ``held_back`` characters, those of what is
        carried on if nothing follows, and the new state."""
        end = len(state.carry) - held_back
        cut = self._split(state.carry[:end], self._takes_space(state))
        place = state.place if len(cut.rest) == end else _IN_RUN
        carry_ids = None if held_back else cut.rest_ids
        return cut.token_ids, carry_ids, _State(place, cut.rest + state.carry[end:])


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"text with half of a surrogate pair at character {error.start}") from None


def _has_neighbours(pieces: Sequence[Piece]) -> bool:
    """Whether two control pieces lie side by side."""
    was_control = False
    for piece in pieces:
        if piece.control and was_control:
            return True
        was_control = piece.control
    return False


def _merge_control(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Neighbouring control pieces as one, since a control string may lie across their border."""
    pending: list[Piece] = []
    for piece in pieces:
        if piece.control:
            pending.append(piece)
            continue
        if pending:
            yield _joined(pending)
            pending.clear()
        yield piece
    if pending:
        yield _joined(pending)


def _joined(pieces: Sequence[Piece]) -> Piece:
    return pieces[0] if len(pieces) == 1 else Piece("".join(piece.text for piece in pieces), control=True)


def _by_owner(pieces: Sequence[Piece], domain: int, num_public: int) -> list[tuple[int, Sequence[Piece]]]:
    if num_public == 0:
        return [(domain, pieces)]
    return [(PUBLIC_DOMAIN, pieces[:num_public]), (domain, pieces[num_public:])]


def _merged_index(pieces: Sequence[Piece], index: int) -> list[int]:
    """For each piece, the last of the merged ones (:func:`_merge_control`) that it ends; ``index``: the last
    one before them, -1 for none."""
    merged = []
    for piece, following in zip_longest(pieces, pieces[1:]):
        if not (piece.control and following is not None and following.control):
            index += 1
        merged.append(index)
    return merged


class _StepCache:
    """Least recently used steps, bounded by the bytes of their texts and ids."""

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self._lock = threading.Lock()
        self._steps: OrderedDict[_Key, _Step] = OrderedDict()

    def get(self, key: _Key) -> _Step | None:
        with self._lock:
            step = self._steps.get(key)
            if step is not None:
                self._steps.move_to_end(key)
            return step

    def put(self, key: _Key, step: _Step) -> None:
        with self._lock:
            if key in self._steps:
                return
            self._steps[key] = step
            self.used_bytes += _size(key, step)
            while self.used_bytes > self._capacity_bytes:
                old_key, old_step = self._steps.popitem(last=False)
                self.used_bytes -= _size(old_key, old_step)


def _size(key: _Key, step: _Step) -> int:
    _, state, text, _ = key
    characters = len(state.carry) + len(text) + len(step.state.carry)
    num_carried = 0 if step.carry_ids is None else step.carry_ids.nbytes
    return _ENTRY_OVERHEAD_BYTES + 2 * characters + step.token_ids.nbytes + num_carried
