"""Many documents and nobody in a hurry: a note and a category for each, for throughput.

    python examples/batch.py [--file FILE] [--documents N] [--url URL]

`with_parrot` hands the service every call in one request and asks for THROUGHPUT, so that it makes batches as
large as its engines take; `with_openai` is the client-orchestrated twin, which sends all it can at once.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import parrot as P
from both_ways import Asker, Ways, compare, fill, make_parser
from document import load_text, split_text

SYSTEM = (
    "Job {{input:job}}. You sort passages of a handbook, and answer with what was asked for, nothing else."
)
NOTE = "Passage:\n{{input:passage}}\n\nSay in one sentence what it is about."
SORT = "A note on a passage: {{input:note}}\n\nGive the passage a category of one or two words."


@P.function
def note(job, passage):
    return [P.system(SYSTEM), P.user(NOTE), P.assistant("{{output:note}}")]


@P.function
def sort(job, note):
    return [P.system(SYSTEM), P.user(SORT), P.assistant("{{output:category}}")]


def with_parrot(job: str, passages: list[str], outputs: P.Output) -> list[P.SemanticVariable]:
    """Returns at once with a note for each passage, then a category for each."""
    with P.batch():
        notes = [note.with_options(outputs=outputs)(job, passage) for passage in passages]
        return [*notes, *(sort.with_options(outputs=outputs)(job, text) for text in notes)]


async def with_openai(ask: Asker, job: str, passages: list[str]) -> list[str]:
    """The same calls, orchestrated here."""
    system = fill(SYSTEM, job=job)

    async def one(passage: str) -> str:
        return await ask(system, fill(SORT, note=await ask(system, fill(NOTE, passage=passage))))

    return await asyncio.gather(*map(one, passages))


def main() -> None:
    """Run both ways and compare them."""
    parser = make_parser(__doc__)
    parser.add_argument("--file", type=Path, help="a text file; by default a chapter that Python carries")
    parser.add_argument("--documents", type=int, default=12, help="how many to cut it into (default 12)")
    parser.add_argument("--document-tokens", type=int, default=120, help="tokens of each (default 120)")
    options = parser.parse_args()
    text = load_text(options.file)
    passages = split_text(text, "smollm2", options.documents, options.document_tokens)
    ways = Ways(
        parrot=lambda outputs: with_parrot("1", passages, outputs),
        twin=lambda ask: with_openai(ask, "2", passages),
        num_calls=2 * len(passages),
        objective=P.THROUGHPUT,
        wait_for=len(passages),
    )
    compare([f"category of document {n}" for n in range(1, len(passages) + 1)], ways, options)


if __name__ == "__main__":
    main()
