"""What the manager tells scheduler and engines of published text: tenants meet in it, and nowhere else."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from graph_builder import prompt_call, read, write
from manager_harness import Manager, running_manager, until
from parrot import api, wire
from parrot.manager.key_file import KeyEntry, KeyFile, TenantLimits, digest_of, new_key

BEGINNING = "Answer as a careful expert who has read every manual and who never guesses anything at all. " * 2
TEMPLATE = BEGINNING + "{{input:question}} {{output:answer}}"


def files(directory: Path) -> dict[str, Path]:
    """Keys of two tenants, and a published template."""
    tenants = {name: TenantLimits() for name in ("one", "other")}
    keys = [KeyEntry(sha256=digest_of(new_key()), tenant=name) for name in tenants]
    (directory / "keys.json").write_text(KeyFile(tenants=tenants, keys=keys).model_dump_json())
    (directory / "keys.json").chmod(0o600)
    (directory / "published.json").write_text(json.dumps([TEMPLATE]))
    return {"api_keys": directory / "keys.json", "published_templates": directory / "published.json"}


async def run(manager: Manager, tenant: str, prompt: str, question: str) -> wire.Dispatch:
    """Runs a call; the frame that an engine got."""
    session = manager.service.create_session(tenant=tenant).session_id
    call = prompt_call("f", prompt, read("question", value=question), write("answer", "a"))
    manager.service.submit(api.SubmitBody(session_id=session, calls=(call,)), tenant=tenant)
    body = api.GetBody(session_id=session, semantic_var_id="a", timeout_ms=120_000)
    assert (await manager.service.get(body, tenant=tenant)).value == "ok"
    sent = [(engine, dispatch) for engine in manager.engines for dispatch in engine.dispatches]
    _, newest = max(sent, key=lambda entry: entry[1].call_id)
    return newest


def fill_of(dispatch: wire.Dispatch) -> wire.Fill:
    fill = dispatch.verbs[0]
    assert isinstance(fill, wire.Fill)
    return fill


def test_a_published_template_is_looked_for_in_other_tenants_contexts(
    tiny_model: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with running_manager(tiny_model, **files(tmp_path)) as manager:
            for name in ("engine-0", "engine-1"):
                await manager.add_engine(name=name)
            first = await run(manager, "one", TEMPLATE, "Which of the valves?")
            second = await run(manager, "other", TEMPLATE, "Which of the valves?")
            own = await run(manager, "other", TEMPLATE, "Which of the valves?")
            fill = fill_of(second)
            ids = wire.unpack_ids(fill.token_ids)
            assert first.domain != second.domain == own.domain
            assert 0 < fill.public_len < len(ids)
            assert BEGINNING.startswith(manager.tokenizer.decode(ids[: fill.public_len]))
            assert fill.public_len == fill_of(first).public_len == fill_of(own).public_len
            assert fill.parent_context_id == fill_of(first).context_id
            assert fill_of(own).parent_context_id == fill.context_id, "its own has more of it"
            homes = {e.name for e in manager.engines for d in e.dispatches if d in (first, second, own)}
            assert len(homes) == 1
            await until(lambda: manager.executor.dispatcher.num_busy == 0)
            manager.check_at_rest()

    asyncio.run(scenario())


def test_text_that_is_not_published_is_looked_for_in_the_tenants_own_contexts(
    tiny_model: Path, tmp_path: Path
) -> None:
    async def scenario() -> None:
        async with running_manager(tiny_model, **files(tmp_path)) as manager:
            await manager.add_engine()
            prompt = TEMPLATE[1:]
            first = await run(manager, "one", prompt, "Which?")
            guess = await run(manager, "other", prompt, "Which?")
            again = await run(manager, "one", prompt, "Which?")
            assert [fill_of(d).public_len for d in (first, guess, again)] == [0, 0, 0]
            assert [fill_of(d).parent_context_id for d in (first, guess)] == [0, 0]
            assert fill_of(again).parent_context_id == fill_of(first).context_id

    asyncio.run(scenario())
