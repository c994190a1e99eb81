"""Map-reduce summary of a document: every part on its own, all at once, then their summaries into one.

    python examples/map_reduce_summary.py [--file FILE] [--chunks N] [--url URL]

`with_parrot` hands the service the whole graph in one request and asks for the last variable. `with_openai`
is its client-orchestrated twin: the same prompts through the openai client, which has to wait for all parts
before it can send the last request.
"""

from __future__ import annotations

import asyncio

from openai import AsyncOpenAI

import parrot as P
from document import compare, parse_arguments

SYSTEM = "You summarise the document {{input:title}} in plain words."
PART = "Summarise this part of the document in one or two sentences.\n\n{{input:part}}"
COMBINE = "Here are summaries of its parts. Combine them into one short summary.\n\n{{input:summaries}}"


@P.function
def summarise_part(title, part):
    return [P.system(SYSTEM), P.user(PART), P.assistant("{{output:summary}}")]


@P.function
def combine(title, summaries):
    return [P.system(SYSTEM), P.user(COMBINE), P.assistant("{{output:summary}}")]


def with_parrot(title: str, parts: list[str], outputs: P.Output) -> list[P.SemanticVariable]:
    """Returns at once with a variable for each part's summary, and the whole summary's as the last."""
    summarise = summarise_part.with_options(outputs=outputs)
    with P.batch():
        summaries = [summarise(title, part) for part in parts]
        return [*summaries, combine.with_options(outputs=outputs)(title, P.join(summaries))]


async def with_openai(client: AsyncOpenAI, title: str, parts: list[str], outputs: P.Output) -> list[str]:
    """The same calls, orchestrated here: a request for each, the last one after all others."""

    async def ask(prompt: str) -> str:
        system = SYSTEM.replace("{{input:title}}", title)
        reply = await client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "system", "content": system}, {"role": "user", "content": prompt}],
            temperature=0.0,
            max_tokens=outputs.sampling.max_tokens,
            extra_body={"ignore_eos": outputs.sampling.ignore_eos},
        )
        return reply.choices[0].message.content or ""

    summaries = await asyncio.gather(*(ask(PART.replace("{{input:part}}", part)) for part in parts))
    return [*summaries, await ask(COMBINE.replace("{{input:summaries}}", "\n".join(summaries)))]


if __name__ == "__main__":
    compare(with_parrot, with_openai, parse_arguments(__doc__))
