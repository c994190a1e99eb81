"""From generated ids to text as it becomes final: UTF-8-safe, and cut at stop strings."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]  # special tokens skipped

_UNFINISHED = "\ufffd"  # what a decoder gives for bytes that are no whole character (yet)
_CONTEXT_TOKENS = 4  # enough that a decoder knows it is not at the start of a text


class TextStream:
    """Decodes ids as they come; text comes out once no later id can change it.

    Each step decodes a short window: the ids whose text went out last (so that a decoder that treats the
    first id of a text specially sees the same neighbours), and those whose text is still open. That window is
    why this is not ``tokenizers.decoders.DecodeStream``, which can neither flush an unfinished character nor
    say which ids a text came from.
    """

    def __init__(self, decode: Decode, context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(context[-_CONTEXT_TOKENS:])
        self._window = 0  # _ids[_window:_open] gave the text that went out last
        self._open = len(self._ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that became final with these ids; empty inside a character."""
        self._ids += token_ids
        known, text = self._known(), self._decode(self._ids[self._window :])
        if text.endswith(_UNFINISHED) or len(text) <= len(known):
            return ""
        self._window, self._open = self._open, len(self._ids)
        return text[len(known) :]

    def flush(self) -> str:
        """The text of ids that never became whole characters; nothing may be pushed afterwards."""
        text = self._decode(self._ids[self._window :])[len(self._known()) :]
        self._window = self._open = len(self._ids)
        return text

    def _known(self) -> str:
        return self._decode(self._ids[self._window : self._open])


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces.

    The first is the one that is complete earliest; of several that end there, the longest. Only the longest
    suffix that could still become a stop is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """The text that can go out now. Sets ``matched`` once a stop is found; the stop does not go out."""
        if not self._stops:
            return text
        self._held += text
        found = [(at + len(stop), at) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.matched = True
            return self._take(min(found)[1])
        return self._take(len(self._held) - self._open_suffix())

    def flush(self) -> str:
        """What was held back, once it is known that no stop follows."""
        return self._take(len(self._held))

    def _open_suffix(self) -> int:
        """Length of the longest suffix that begins a stop."""
        for length in range(min(self._longest - 1, len(self._held)), 0, -1):
            suffix = self._held[-length:]
            if any(len(stop) > length and stop.startswith(suffix) for stop in self._stops):
                return length
        return 0

    def _take(self, length: int) -> str:
        taken, self._held = self._held[:length], self._held[length:]
        return taken


class OutputText:
    """The text of one Generate, with the end that each of its ids has in it."""

    def __init__(
        self,
        decode: Decode,
        stops: Sequence[str],
        context: Sequence[int] = (),
        *,
        num_unstoppable: int = 0,
        together: int = 1,
    ) -> None:
        """Text of the first ``num_unstoppable`` ids is no part of a stop string. ``together``: so many ids
        are decoded at a time, of a text without stop strings that nobody reads as it grows."""
        self._stream = TextStream(decode, context)
        self._matcher = StopMatcher(stops)
        self._num_unstoppable = num_unstoppable
        self._together = together
        self._waiting: list[int] = []  # ids that are not decoded yet
        self._num_ids = 0
        self._raw: list[str] = []  # decoded text, stops not cut
        self._raw_len = 0
        self._ends: list[int] = []  # per id, the length of the raw text that needs it; ascending
        self._num_open = 0  # ids pushed since text last became final
        self._final: list[str] = []
        self._final_len = 0
        self._num_taken = 0  # pieces of _final that take() has given

    @property
    def stopped(self) -> bool:
        """A stop string was found."""
        return self._matcher.matched

    @property
    def text(self) -> str:
        """All text that became final so far."""
        return "".join(self._final)

    @property
    def num_final(self) -> int:
        """Number of ids that are whole in the final text."""
        return bisect_right(self._ends, self._final_len)

    def take(self) -> str:
        """Final text that was not taken before."""
        taken = "".join(self._final[self._num_taken :])
        self._num_taken = len(self._final)
        return taken

    def push(self, token_id: int) -> str:
        """Add a generated id; return the text that became final."""
        self._waiting.append(token_id)
        return self._decode_waiting() if len(self._waiting) >= self._together else ""

    def push_all(self, token_ids: Sequence[int]) -> str:
        """Add several ids at once to a text without stop strings; each is whole when the last one is."""
        self._waiting += token_ids
        return self._decode_waiting()

    def _decode_waiting(self) -> str:
        token_ids, self._waiting = self._waiting, []
        self._num_ids += len(token_ids)
        self._num_open += len(token_ids)
        return self._add(self._stream.push(token_ids))

    def finish(self) -> str:
        """No more ids: return the rest of the text, an unfinished last character included."""
        rest = self._decode_waiting() if self._waiting else ""
        rest += self._add(self._stream.flush())
        if not self.stopped:
            rest += self._keep(self._matcher.flush())
            self._ends.extend([self._raw_len] * self._num_open)  # ids that have no text
            self._num_open = 0
        return rest

    def cut(self) -> tuple[int, str]:
        """(number of ids wholly before the stop, kept text that begins inside the next id)."""
        num_whole = self.num_final
        whole_len = self._ends[num_whole - 1] if num_whole else 0
        return num_whole, "".join(self._raw)[whole_len : self._final_len]

    def _add(self, text: str) -> str:
        if not text or self.stopped:
            return ""
        self._raw.append(text)
        self._raw_len += len(text)
        # An id inside a character is whole only when the character is.
        self._ends.extend([self._raw_len] * self._num_open)
        self._num_open = 0
        return self._keep(self._matcher.push(text) if self._num_ids > self._num_unstoppable else text)

    def _keep(self, text: str) -> str:
        if text:
            self._final.append(text)
            self._final_len += len(text)
        return text
