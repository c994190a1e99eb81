"""Clusters of simulated engines for tests: a tokenizer of words, cheap costs, calls in a few words."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from engine_harness import watch
from parrot import api, wire
from parrot.config import ManagerConfig, SchedulerConfig
from parrot.dummy_model import num_control_tokens, word, write_dummy_model
from parrot.engine.made_up import MadeUpText
from parrot.manager.key_file import KeyFile, TenantLimits, render_key_file
from parrot.simulation.cluster import Cluster, running_cluster
from parrot.simulation.engine import EngineSpec
from parrot.simulation.loop import SimulatedLoop, run_simulated
from parrot.tokenizer import Tokenizer

# Whole microseconds, so that steps add up exactly.
COST = wire.CostModel(4000, 10, 20, 1, 64_000, 4000)


@cache
def words_tokenizer() -> Tokenizer:
    with tempfile.TemporaryDirectory() as directory:
        return Tokenizer.load(write_dummy_model(Path(directory), "tiny"))


@cache
def made_up_text() -> MadeUpText:
    return MadeUpText(words_tokenizer())


def text(start: int, num_words: int) -> str:
    """``num_words`` words, each one token."""
    return " ".join(word(num_control_tokens() + (start + i) % 1000) for i in range(num_words))


def call(
    prompt: str, output: str, inputs: Sequence[str] = (), *, max_tokens: int = 20, **sampling: object
) -> dict[str, Any]:
    """A call whose prompt is this text, then its inputs, then its output, after which it is named."""
    holes = "".join(f"{{{{input:i{n}}}}}" for n in range(len(inputs)))
    placeholders: list[dict[str, Any]] = [
        {"name": f"i{n}", "kind": "input", "semantic_var_id": var} for n, var in enumerate(inputs)
    ]
    sampling = {"max_tokens": max_tokens, "ignore_eos": True, **sampling}
    placeholders.append({"name": "o", "kind": "output", "semantic_var_id": output, "sampling": sampling})
    return {"function": output, "prompt": f"{prompt}{holes}{{{{output:o}}}}", "placeholders": placeholders}


def body(
    session_id: str, calls: Sequence[dict[str, Any]], labels: Sequence[tuple[str, str]] = ()
) -> api.SubmitBody:
    """A submit of these calls and labels (variable, criteria)."""
    marks = [{"semantic_var_id": var, "criteria": criteria} for var, criteria in labels]
    return api.SubmitBody.model_validate({"session_id": session_id, "calls": calls, "labels": marks})


@dataclass(frozen=True, slots=True)
class Submit:
    """A session that begins at a time: its calls, and what its variables are wanted for."""

    at_s: float
    calls: Sequence[dict[str, Any]]
    labels: Sequence[tuple[str, str]] = ()
    tenant: str = "default"


Placement = tuple[str, str]  # function, engine


def play(
    submits: Sequence[Submit],
    engines: Sequence[EngineSpec],
    *,
    off: Sequence[str] = (),
    keys: Path | None = None,
    **scheduler: Any,
) -> list[Placement]:
    """Run these sessions on these engines without some switches; the calls in the order in which they were
    dispatched, and where to. The manager's key file is written to ``keys`` when there are several tenants."""
    names = sorted({submit.tenant for submit in submits})
    if keys is not None:
        keys.write_bytes(render_key_file(KeyFile(tenants={name: TenantLimits() for name in names})))
    config = manager_config(off, api_keys=keys, **scheduler)

    async def main(loop: SimulatedLoop) -> list[Placement]:
        async with running_cluster(loop, config, words_tokenizer(), engines, made_up_text()) as cluster:
            views = await asyncio.gather(*(_run(cluster, submit) for submit in submits))
            calls = [view for graph in views for view in graph]
            assert all(view.state == "done" for view in calls)
            cluster.executor.scheduler._scheduler.check_invariants()
            for actor in cluster.engines:
                watch(actor.engine)
            order = sorted(calls, key=lambda view: (view.timing.dispatched_us, view.function))
            return [(view.function, view.engine or "") for view in order]

    return run_simulated(main)


def manager_config(
    off: Sequence[str] = (), *, api_keys: Path | None = None, **scheduler: Any
) -> ManagerConfig:
    """As `parrot serve --off NAME` makes it."""
    fields = {item.name for item in dataclasses.fields(SchedulerConfig)}
    switches = {name: False for name in off if name in fields}
    others: dict[str, Any] = {name: False for name in off if name not in fields}
    config = SchedulerConfig(**switches, **scheduler)
    return ManagerConfig(model="simulated", scheduler=config, api_keys=api_keys, **others)


async def _run(cluster: Cluster, submit: Submit) -> Sequence[api.CallView]:
    await asyncio.sleep(submit.at_s)
    service, tenant = cluster.service, submit.tenant
    session_id = service.create_session(tenant=tenant).session_id
    service.submit(body(session_id, submit.calls, submit.labels), tenant=tenant)
    for made in submit.calls:
        var_id = made["placeholders"][-1]["semantic_var_id"]
        await service.get(api.GetBody(session_id=session_id, semantic_var_id=var_id), tenant=tenant)
    return service.graph(session_id, tenant=tenant).calls
