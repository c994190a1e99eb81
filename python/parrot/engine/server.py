"""The engine process: loads a model, measures it, and steps for as long as its manager lives."""

from __future__ import annotations

import logging
import os
import queue
import secrets
import signal
import sys
import threading
import time
from typing import TYPE_CHECKING

from .. import huge_pages, wire
from ..config import EngineConfig
from ..curve import load_engine_keys
from ..errors import DuplicateRequest, SetupError
from ..garbage import keep_out_of_the_way
from .link import EXIT_MANAGER_SILENT, Drain, Link, LinkConfig, ManagerChanged, Stop
from .process import num_physical_cores, set_passive_waits, signal_on_parent_death
from .watchdog import StepWatchdog

if TYPE_CHECKING:  # torch takes a second to import, and reads the environment when it does
    import torch

    from ..tokenizer.tokenizer import Tokenizer
    from .engine import Engine
    from .model import DecoderModel

log = logging.getLogger(__name__)
_SWITCH_S = 0.001  # how long the step loop may keep the thread waiting that receives


def run_engine(config: EngineConfig, *, link_type: type[Link] = Link) -> None:
    """Run one engine until it is told to end, its manager is silent, or its parent is gone. ``link_type`` may
    watch what passes.

    Must be called in the main thread of a process of its own. Raises :class:`SetupError` when the model
    cannot be loaded and ``SystemExit(3)`` when the manager was silent for ``manager_timeout_s``.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    parent_pid = config.parent_pid
    if parent_pid is not None:
        signal_on_parent_death(parent_pid, lambda: sys.exit(EXIT_MANAGER_SILENT))
    set_passive_waits()
    sys.setswitchinterval(_SWITCH_S)
    curve = None if config.curve_keys is None else load_engine_keys(config.curve_keys)
    engine, register = load_engine(config)
    link = link_type(
        LinkConfig(
            config.manager_address,
            config.heartbeat_s,
            config.manager_timeout_s,
            parent_pid,
            config.drain_grace_s,
            config.stall_after_s,
            curve,
        ),
        register,
        engine.stats(),
    )
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _frame: link.drain(f"signal {signal.Signals(received).name}"))
    if parent_pid is not None:
        # Ctrl-C reaches every process of a terminal; the manager, which drains, still needs its engines.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal_on_parent_death(
            parent_pid, lambda: link.stop("the parent process is gone", EXIT_MANAGER_SILENT)
        )
    log.info("engine %s asks the manager at %s to join", config.name, config.manager_address)
    keep_out_of_the_way()
    link.start()
    threading.Thread(target=huge_pages.gather, name="huge-pages", daemon=True).start()
    stop = _serve(engine, link, register.epoch, config.stall_after_s)
    level = logging.WARNING if stop.exit_code else logging.INFO
    log.log(level, "engine %s ends: %s", config.name, stop.reason)
    link.close(stop.reason)
    if stop.exit_code:
        raise SystemExit(stop.exit_code)


def load_engine(config: EngineConfig) -> tuple[Engine, wire.Register]:
    """An engine that can take calls, and what it says of itself: its model loaded and measured, or simulated.
    Raises :class:`SetupError` and :class:`ConfigError`."""
    engine, model, cost_model = _load_model(config) if config.simulate is None else _simulate(config)
    if config.write_cost is not None:
        from .cost_file import write_cost

        write_cost(config.write_cost, cost_model, f"{config.model} in {model.dtype} on {model.device}")
    return engine, wire.Register(
        protocol_version=wire.PROTOCOL_VERSION,
        name=config.name,
        epoch=secrets.token_hex(8),
        pid=os.getpid(),
        model=model,
        cost_model=cost_model,
        max_batch_size=engine.max_batch_size,
        max_batch_tokens=engine.max_batch_tokens,
    )


def _simulate(config: EngineConfig) -> tuple[Engine, wire.ModelInfo, wire.CostModel]:
    assert config.simulate is not None
    import torch

    from ..models import resolve_model
    from ..tokenizer.tokenizer import Tokenizer
    from .cost_file import read_cost
    from .made_up import MadeUpText
    from .memory import choose_batch
    from .simulated import SimulatedEngine, SimulatedRunner, model_info
    from .stats import now_us

    cost = read_cost(config.simulate)
    directory = resolve_model(config.model, weights=False)
    tokenizer = Tokenizer.load(directory)
    info = model_info(config.model, directory, tokenizer)
    batch_size, batch_tokens = choose_batch(
        torch.device("cpu"), config.max_batch_size, config.max_batch_tokens
    )
    engine = SimulatedEngine(
        SimulatedRunner(cost, tokenizer, max_positions=info.max_model_len),
        tokenizer,
        MadeUpText(tokenizer),
        max_batch_size=batch_size,
        max_batch_tokens=batch_tokens,
        clock=now_us,
        wait_until=lambda end_us: time.sleep(max(0, end_us - now_us()) / 1e6),
        share_prefixes=config.shared_prefix_attention,
    )
    return engine, info, cost


def _load_model(config: EngineConfig) -> tuple[Engine, wire.ModelInfo, wire.CostModel]:
    """Load and measure the model."""
    import torch

    from .._core import set_cpu_threads
    from ..models import resolve_model
    from ..tokenizer.tokenizer import Tokenizer
    from .backends import choose_dtype
    from .cost_model import calibrate
    from .engine import Engine
    from .live_cost import LiveCost
    from .memory import choose_batch, choose_num_blocks
    from .model import DecoderModel
    from .overlap import OverlappingEngine
    from .runner import ModelRunner

    started = time.monotonic()
    num_threads = config.num_threads or num_physical_cores()
    torch.set_num_threads(num_threads)
    set_cpu_threads(num_threads)
    device = _take_device(config.device)
    directory = resolve_model(config.model, weights=not config.dummy_weights)
    dtype = choose_dtype(config.dtype, device, directory)
    tokenizer = Tokenizer.load(directory)
    model = DecoderModel.load(
        directory,
        dtype,
        device,
        config.backend,
        share_prefixes=config.shared_prefix_attention,
        dummy_weights=config.dummy_weights,
    )
    num_blocks = choose_num_blocks(model.config, dtype, device, config.num_blocks)
    batch_size, batch_tokens = choose_batch(device, config.max_batch_size, config.max_batch_tokens)
    runner = ModelRunner.for_engine(
        model,
        num_blocks,
        max_batch_size=batch_size,
        max_batch_tokens=batch_tokens,
        cuda_graphs=config.cuda_graphs,
    )
    cost_model = calibrate(runner, max_batch_size=batch_size, max_batch_tokens=batch_tokens)
    engine_type = OverlappingEngine if device.type == "cuda" and config.overlap else Engine
    engine = engine_type(
        runner,
        tokenizer,
        max_batch_size=batch_size,
        max_batch_tokens=batch_tokens,
        cost_model=cost_model,
        live_cost=LiveCost(cost_model),
    )
    log.info(
        "engine %s: %s in %s on %s, %d threads, %d blocks of %d tokens, a step takes %s, ready in %.1f s",
        *(config.name, config.model, dtype, device, torch.get_num_threads()),
        *(num_blocks, config.block_size, cost_model, time.monotonic() - started),
    )
    return engine, _model_info(config.model, tokenizer, model, dtype, device), cost_model


def _model_info(
    name: str, tokenizer: Tokenizer, model: DecoderModel, dtype: torch.dtype, device: torch.device
) -> wire.ModelInfo:
    return wire.ModelInfo(
        name=name,
        fingerprint=tokenizer.fingerprint,
        vocab_size=model.config.vocab_size,
        max_model_len=model.config.max_positions,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
    )


def _take_device(name: str) -> torch.device:
    """The device by its name, and the current one of this thread from now on: kernels are launched there,
    wherever their tensors are."""
    import torch

    device = torch.device(name)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise SetupError(
            f"device {name} is not here: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA "
            "devices; choose another device, or install a CUDA build of torch",
            param="device",
        )
    if device.index is not None and device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def _serve(engine: Engine, link: Link, epoch: str, stall_after_s: float) -> Stop:
    """The step loop; between steps it takes in everything that has arrived, and sleeps when idle."""
    sequence = 0
    watchdog = StepWatchdog(stall_after_s)
    draining: Drain | None = None
    while True:
        if draining is not None and not engine.has_work:
            return Stop(draining.reason)
        event = _take_events(engine, link)
        if isinstance(event, Stop):
            return event
        if event is not None:
            draining = event
            log.info("draining: no more calls are taken")
            link.send(wire.Draining(epoch, draining.reason))
            continue
        replies = engine.step() if engine.has_work else []
        engine.counters.dropped_messages = link.num_dropped
        stats = engine.stats()
        link.publish(stats, engine.changed_cost)
        watchdog.stepped(engine, stats)
        if replies:
            sequence += 1
            link.send(wire.StepReplies(epoch, tuple(replies), stats, link.served_manager_id, sequence))


def _take_events(engine: Engine, link: Link) -> Stop | Drain | None:
    """Handle all events that are here, or wait for one if there is nothing to compute."""
    wait = not engine.has_work
    link.begin_turn(waits=wait)
    while True:
        try:
            event = link.events.get(block=wait)
        except queue.Empty:
            return None
        if wait:
            wait = False
            link.begin_turn()
        match event:
            case Stop() | Drain():
                return event
            case ManagerChanged():
                engine.reset()
                link.served_manager_id = event.manager_id
            case wire.Abort():
                engine.abort(event.call_ids)
            case wire.FreeContexts():
                engine.free_contexts(event.context_ids)
            case wire.ContextUses():
                engine.uses.add(event)
            case wire.ReportContexts():
                engine.report_contexts()
            case wire.Dispatch():
                try:
                    engine.submit(event)
                except DuplicateRequest as error:
                    log.warning("dropped a dispatch: %s", error.message)
