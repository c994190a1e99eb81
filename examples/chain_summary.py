"""Chain summary of a document: each step reads the summary so far and the next part.

    python examples/chain_summary.py [--file FILE] [--chunks N] [--url URL]

`with_parrot` hands the service the whole chain in one request; every step starts the moment the summary
before it is there. `with_openai` is its client-orchestrated twin: the same prompts through the openai client,
with a trip from the service to the client and back between any two steps.
"""

from __future__ import annotations

from openai import AsyncOpenAI

import parrot as P
from document import compare, parse_arguments

SYSTEM = "You summarise the document {{input:title}} step by step, in plain words."
STEP = (
    "The summary so far: {{input:so_far}}\n\nThe next part of the document:\n{{input:part}}\n\n"
    "Write the summary again, short, with what this part adds."
)


@P.function
def extend_summary(title, so_far, part):
    return [P.system(SYSTEM), P.user(STEP), P.assistant("{{output:summary}}")]


def with_parrot(title: str, parts: list[str], outputs: P.Output) -> list[P.SemanticVariable]:
    """Returns at once with a variable for the summary after each step; the last is the whole summary's."""
    extend = extend_summary.with_options(outputs=outputs)
    summaries: list[P.SemanticVariable] = []
    with P.batch():
        for part in parts:
            summaries.append(extend(title, summaries[-1] if summaries else "nothing yet", part))
    return summaries


async def with_openai(client: AsyncOpenAI, title: str, parts: list[str], outputs: P.Output) -> list[str]:
    """The same calls, orchestrated here: each request waits for the answer before it."""
    summaries = ["nothing yet"]
    system = SYSTEM.replace("{{input:title}}", title)
    for part in parts:
        prompt = STEP.replace("{{input:so_far}}", summaries[-1]).replace("{{input:part}}", part)
        reply = await client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "system", "content": system}, {"role": "user", "content": prompt}],
            temperature=0.0,
            max_tokens=outputs.sampling.max_tokens,
            extra_body={"ignore_eos": outputs.sampling.ignore_eos},
        )
        summaries.append(reply.choices[0].message.content or "")
    return summaries[1:]


if __name__ == "__main__":
    compare(with_parrot, with_openai, parse_arguments(__doc__))
