"""What engines are told of the future of contexts that calls left on them (docs/kvcache.md, eviction).

The manager knows the graph: which unfinished calls begin with what a context holds, and how many steps away
they are. It says so per context, after the frames that this turn dispatches, and only what has changed. All
sessions together may spend a twentieth of the loop's time on it; what is left waits for a later turn or a
heartbeat.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from .. import wire
from .call import WAITING, Call, InputPart, Part, TextPart
from .clock import now_s
from .prompt_trie import PromptTrie
from .prompts import PromptBuilder
from .runs import Run
from .variable import Variable

UNKNOWN_STEPS = 16  # what a context without hints counts as (csrc/kvcache/prefix_tree.h)
_WHOLE = 2**31 - 1  # more tokens than any context has
_MAX_CONTEXTS = 512  # of one session that are looked at, the newest
_MAX_TURN_S = 0.0005  # after which no further session is looked at
_REST = 19  # times as long as that took, until the next time

Use = tuple[int, int, int]  # prefix length, remaining uses, steps to the next one
_NO_USE: Use = (0, 0, 0)
_UNKNOWN: Use = (_WHOLE, 1, UNKNOWN_STEPS)


@dataclass(eq=False, slots=True)
class _Context:
    """What a run left on an engine; ``told`` is what its engine knows. ``lengths``: of the first parts."""

    run: Run
    engine_id: int
    keys: tuple[Hashable, ...]
    lengths: dict[int, int] = field(default_factory=dict)
    told: Use = _UNKNOWN


@dataclass(slots=True)
class _SessionUses:
    """The unfinished calls of a session as a trie, and the contexts of the others."""

    trie: PromptTrie[Call] = field(default_factory=PromptTrie)
    keys: dict[Call, tuple[Hashable, ...]] = field(default_factory=dict)  # of unfinished calls
    contexts: dict[wire.ContextId, _Context] = field(default_factory=dict)


class ContextUses:
    """Follows the calls and contexts of all sessions. Used on the loop only."""

    def __init__(self, prompts: PromptBuilder) -> None:
        self._prompts = prompts
        self._sessions: dict[str, _SessionUses] = {}
        self._stale: dict[str, _SessionUses] = {}  # those that have waited longest first
        self._rests_until = 0.0

    # --- events ---

    def submitted(self, call: Call) -> None:
        """A call of a session that may have more calls."""
        session = self._sessions.get(call.session_id)
        if session is None:
            session = self._sessions[call.session_id] = _SessionUses()
        keys = session.keys[call] = part_keys(call)
        session.trie.add(call, keys)

    def ended(self, call: Call) -> None:
        """The call needs nothing any more; unknown ones are ignored."""
        session = self._sessions.get(call.session_id)
        keys = session.keys.pop(call, None) if session is not None else None
        if session is not None and keys is not None:
            session.trie.remove(call, keys)
            self._touch(call.session_id, session)

    def left(self, run: Run, engine_id: int) -> None:
        """The run's context is cached on its engine."""
        session = self._sessions.setdefault(run.call.session_id, _SessionUses())
        keys = session.keys.get(run.call) or part_keys(run.call)
        session.contexts[run.context_id] = _Context(run, engine_id, keys)
        if len(session.contexts) > _MAX_CONTEXTS:
            del session.contexts[next(iter(session.contexts))]
        self._touch(run.call.session_id, session)

    def evicted(self, session_id: str, context_id: wire.ContextId) -> None:
        """Nothing is left of a context."""
        session = self._sessions.get(session_id)
        if session is not None:
            session.contexts.pop(context_id, None)

    def engine_lost(self, engine_id: int) -> None:
        """All contexts of this engine are gone."""
        for session in self._sessions.values():
            lost = [key for key, context in session.contexts.items() if context.engine_id == engine_id]
            for context_id in lost:
                del session.contexts[context_id]

    def closed(self, session_id: str) -> None:
        """The session has no calls any more, and its contexts have no names."""
        self._sessions.pop(session_id, None)
        self._stale.pop(session_id, None)

    def _touch(self, session_id: str, session: _SessionUses) -> None:
        if session.contexts:
            self._stale[session_id] = session

    # --- news ---

    def take_news(self) -> dict[int, wire.ContextUses]:
        """By engine, what has changed since it was told."""
        news: dict[int, list[tuple[wire.ContextId, Use]]] = {}
        started = now = now_s()
        if started < self._rests_until:
            return {}
        while self._stale and now - started <= _MAX_TURN_S:
            session_id = next(iter(self._stale))
            for context_id, context, use in self._changed(self._stale.pop(session_id)):
                news.setdefault(context.engine_id, []).append((context_id, use))
            now = now_s()
        self._rests_until = now + _REST * (now - started)
        return {engine_id: _message(rows) for engine_id, rows in news.items()}

    def _changed(self, session: _SessionUses) -> Iterator[tuple[wire.ContextId, _Context, Use]]:
        steps, nearest = GraphSteps(), dict[object, int]()
        for context_id, context in session.contexts.items():
            use = self._use_of(context, session, steps, nearest)
            if not _is_same(use, context.told):
                context.told = use
                yield context_id, context, use

    def _use_of(
        self, context: _Context, session: _SessionUses, steps: GraphSteps, nearest: dict[object, int]
    ) -> Use:
        """The longest prefix that unfinished calls share. Without one, a constant beginning may serve another
        application of the kind; and once a session has no calls, nobody knows what it will do next."""
        if not session.keys:
            return _UNKNOWN
        found = session.trie.next_use(context.keys, steps, nearest)
        if found.num_parts:
            length = self._length(context, found.num_parts)
            return (length, found.remaining_uses, found.steps) if length else _NO_USE
        if isinstance(context.run.call.parts[0], TextPart):
            length = self._length(context, 1)
            return (length, 1, UNKNOWN_STEPS) if length else _NO_USE
        return _NO_USE

    def _length(self, context: _Context, num_parts: int) -> int:
        """Tokens of the first parts; from the first output on, all that the context has."""
        length = context.lengths.get(num_parts)
        if length is None:
            num_pieces = self._prompts.num_pieces(context.run.call, num_parts)
            ends = context.run.prompt.piece_ends
            length = _WHOLE if num_pieces > len(ends) else int(ends[num_pieces - 1])
            context.lengths[num_parts] = length
        return length


class GraphSteps:
    """Steps until a call runs: 0 for one that runs or could, else one more than the last it waits for."""

    def __init__(self) -> None:
        self._known: dict[Call, int] = {}

    def __call__(self, call: Call) -> int:
        """The call's distance; each call is visited once."""
        stack = [call]
        while stack:
            here = stack[-1]
            if here in self._known:
                stack.pop()
                continue
            waits = tuple(_waits_for(here))
            unknown = [other for other in waits if other is not None and other not in self._known]
            if unknown:
                stack += unknown
                continue
            # An input that the client will set comes nobody knows when.
            steps = [UNKNOWN_STEPS if other is None else 1 + self._known[other] for other in waits]
            self._known[here] = max(steps, default=0)
            stack.pop()
        return self._known[call]


def _waits_for(call: Call) -> Iterator[Call | None]:
    """The calls that a call's next step waits for; None for a value that comes from outside."""
    if call.state is not WAITING or call.next_step >= len(call.steps):
        return
    step = call.steps[call.next_step]
    pending = [binding.variable for binding in step.first_inputs if binding.variable is not None]
    seen: set[Variable] = set()
    while pending:
        variable = pending.pop()
        if variable in seen or not variable.pending:
            continue
        seen.add(variable)
        if variable.producer is not None:
            yield variable.producer
        elif variable.derivation is not None:
            pending += variable.sources
        else:
            yield None


def part_keys(call: Call) -> tuple[Hashable, ...]:
    """The prompt as a path for a :class:`PromptTrie`: calls with equal keys have equal text there.

    Unlike a hash of the text (:mod:`parrot.manager.prefix`), a key does not change when a value comes: one
    variable has one value, whether or not it is there.
    """
    keys: list[Hashable] = []
    message = -1
    for part in call.parts:
        key = _content_key(part)
        if call.roles is not None and part.message > message:
            key = (call.roles[message + 1 : part.message + 1], key)
            message = part.message
        keys.append(key if keys else (call.model, call.domain, key))
    return tuple(keys)


def _content_key(part: Part) -> Hashable:
    if isinstance(part, TextPart):
        return part.text
    if isinstance(part, InputPart):
        binding = part.binding
        source = binding.constant if binding.variable is None else ("variable", binding.variable.id)
        return (source, binding.chain.key)
    # What an output without transforms generated is what its variable says.
    return (("variable", part.binding.variable.id), "" if not part.binding.chain.key else "raw")


def _is_same(one: Use, other: Use) -> bool:
    """Whether an engine would do the same: that there are uses counts, not how many."""
    return (one[0], one[1] > 0, one[2]) == (other[0], other[1] > 0, other[2])


def _message(rows: list[tuple[wire.ContextId, Use]]) -> wire.ContextUses:
    return wire.ContextUses(
        context_ids=tuple(context_id for context_id, _ in rows),
        prefix_lengths=tuple(use[0] for _, use in rows),
        remaining_uses=tuple(use[1] for _, use in rows),
        steps_to_next_use=tuple(use[2] for _, use in rows),
    )
