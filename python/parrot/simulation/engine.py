"""One engine of a simulation: its step loop as events on simulated time, and its end of the wire."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from .. import wire
from ..engine.made_up import MadeUpText
from ..engine.simulated import SimulatedEngine, SimulatedRunner, Stretch
from ..tokenizer import Tokenizer
from .loop import SimulatedLoop

Send = Callable[[wire.FromEngine], None]


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """What a simulated engine is. ``capacity_tokens`` caps what the scheduler may place on it at once."""

    cost: wire.CostModel
    max_model_len: int = 65_536
    max_batch_size: int = 256
    max_batch_tokens: int = 2048
    share_prefixes: bool = True
    cache_prefixes: bool = True

    def capped(self, capacity_tokens: int) -> EngineSpec:
        """The same with another cap."""
        cost = msgspec.structs.replace(self.cost, capacity_tokens=capacity_tokens)
        return EngineSpec(
            cost,
            self.max_model_len,
            self.max_batch_size,
            self.max_batch_tokens,
            self.share_prefixes,
            self.cache_prefixes,
        )


class _Clock:
    """The engine's own time, which runs ahead of the loop's within a step."""

    def __init__(self) -> None:
        self.now_us = 0

    def read(self) -> int:
        return self.now_us

    def wait_until(self, end_us: int) -> None:
        self.now_us = end_us


class EngineActor:
    """Between steps it takes in what has arrived; a step's replies go out at its end. Steps that are alike
    are one event: what arrives within them is taken in after the step it falls into."""

    def __init__(
        self,
        name: str,
        spec: EngineSpec,
        tokenizer: Tokenizer,
        text: MadeUpText,
        loop: SimulatedLoop,
        send: Send,
    ) -> None:
        self.name = name
        self._loop = loop
        self._send = send
        self._clock = _Clock()
        self.engine = SimulatedEngine(
            SimulatedRunner(spec.cost, tokenizer, max_positions=spec.max_model_len),
            tokenizer,
            text,
            max_batch_size=spec.max_batch_size,
            max_batch_tokens=spec.max_batch_tokens,
            clock=self._clock.read,
            wait_until=self._clock.wait_until,
            share_prefixes=spec.share_prefixes,
            cache_prefixes=spec.cache_prefixes,
        )
        self.num_events = 0
        self._inbox: list[wire.ToEngine] = []
        self._is_awake = False  # a step runs, or is about to
        self._stretch: Stretch | None = None  # it began at _began_us
        self._began_us = 0
        self._num_steps = 0  # of the stretch, that will have been when the timer is due
        self._timer: asyncio.TimerHandle | None = None
        self._epoch = f"life-of-{name}"
        self._sequence = 0  # of the last StepReplies
        self._register = wire.Register(
            protocol_version=wire.PROTOCOL_VERSION,
            name=name,
            epoch=self._epoch,
            pid=0,
            model=wire.ModelInfo(
                "simulated",
                tokenizer.fingerprint,
                tokenizer.vocab_size,
                spec.max_model_len,
                "none",
                "simulated",
            ),
            cost_model=spec.cost,
            max_batch_size=spec.max_batch_size,
            max_batch_tokens=spec.max_batch_tokens,
        )

    def join(self) -> None:
        """Register with the manager."""
        self._send(self._register)

    def deliver(self, message: wire.ToEngine) -> None:
        """A message of the manager arrives now."""
        if isinstance(message, wire.Ping):
            self._send(wire.Heartbeat(self._epoch, self._stats_now(), self._sequence))
            return
        self._inbox.append(message)
        if not self._is_awake:
            self._is_awake = True
            self._loop.call_soon(self._begin)
        elif self._stretch is not None and isinstance(message, wire.Dispatch | wire.Abort):
            self._interrupt(self._stretch)

    def _stats_now(self) -> wire.EngineStats:
        """The engine's, with the steps of a stretch that are over."""
        stats, now_us = self.engine.stats(), self._loop.now_us()
        if self._stretch is None:
            return msgspec.structs.replace(stats, clock_us=now_us)
        num_steps = self._stretch.steps_within(now_us - self._began_us + 1) - 1
        took_us = self._stretch.duration_us(num_steps)
        return msgspec.structs.replace(
            stats,
            clock_us=now_us,
            num_steps=stats.num_steps + num_steps,
            decode_tokens=stats.decode_tokens + num_steps * stats.num_running,
            busy_us=stats.busy_us + took_us,
            expected_us=stats.expected_us + took_us,
        )

    # --- the step loop ---

    def _begin(self) -> None:
        """Between two steps."""
        self.num_events += 1
        self._clock.now_us = self._loop.now_us()
        self._take_messages()
        if not self.engine.has_work:
            self._is_awake = False
            return
        self._stretch = self.engine.stretch()
        if self._stretch is not None:
            self._began_us = self._clock.now_us
            self._run_until(self._stretch, self._stretch.num_steps)
            return
        replies = self.engine.step()
        self._loop.call_at_us(self._clock.now_us, self._end, replies)

    def _run_until(self, stretch: Stretch, num_steps: int) -> None:
        self._num_steps = num_steps
        end_us = self._began_us + stretch.duration_us(num_steps)
        self._timer = self._loop.call_at_us(end_us, self._end_stretch, stretch)

    def _interrupt(self, stretch: Stretch) -> None:
        """The step that runs now is the last one of the stretch."""
        num_steps = stretch.steps_within(self._loop.now_us() - self._began_us)
        if num_steps < self._num_steps and self._timer is not None:
            self._timer.cancel()
            self._run_until(stretch, num_steps)

    def _end_stretch(self, stretch: Stretch) -> None:
        self._stretch = self._timer = None
        self._clock.now_us = self._began_us
        self._end(self.engine.step_stretch(stretch, self._num_steps))

    def _end(self, replies: list[wire.Reply]) -> None:
        if replies:
            self._sequence += 1
            stats = self.engine.stats()
            self._send(wire.StepReplies(self._epoch, tuple(replies), stats, sequence=self._sequence))
        self._begin()

    def _take_messages(self) -> None:
        messages, self._inbox = self._inbox, []
        for message in messages:
            match message:
                case wire.Dispatch():
                    self.engine.submit(message)
                case wire.Abort():
                    self.engine.abort(message.call_ids)
                case wire.FreeContexts():
                    self.engine.free_contexts(message.context_ids)
                case wire.ContextUses():
                    self.engine.uses.add(message)
                case wire.ReportContexts():
                    self.engine.report_contexts()
