"""Questions about a few documents: enrich the query, find passages, answer from them.

    python examples/search.py [--question QUESTION ...] [--url URL]

The model writes further words for the query; this program finds the passages (BM25 over the texts in
`search_documents/`) and sets the variable that the answer waits for. `with_parrot` submits both calls at
once and asks for both outputs, so that the answer's prompt and whoever waits for it are there when the
passages come; `with_openai` is the client-orchestrated twin.
"""

from __future__ import annotations

import asyncio
import math
import re
from collections import Counter
from pathlib import Path

import parrot as P
from both_ways import Asker, Ways, compare, fill, make_parser

DEFAULT_QUESTIONS = ["Why is the sea salty?", "How do bees find flowers again?", "What makes bread rise?"]
DOCUMENTS = Path(__file__).parent / "search_documents"

SYSTEM = (
    "Job {{input:job}}. You help people to find things out. You are brief, and say what the passages say."
)
ENRICH = "Question: {{input:question}}\nWrite five words that a text with the answer would contain."
ANSWER = "Passages:\n{{input:passages}}\n\nQuestion: {{input:question}}\nAnswer in one sentence."


@P.function(objective=P.LATENCY)  # known at submit, before anybody gets it
def enrich(job, question):
    return [P.system(SYSTEM), P.user(ENRICH), P.assistant("{{output:words}}")]


@P.function(objective=P.LATENCY)
def answer(job, passages, question):
    return [P.system(SYSTEM), P.user(ANSWER), P.assistant("{{output:answer}}")]


class Index:
    """BM25 over paragraphs: how often a word of the query is in one, weighed by how rare it is."""

    def __init__(self, folder: Path = DOCUMENTS, *, k: float = 1.2, b: float = 0.75) -> None:
        texts = [path.read_text() for path in sorted(folder.glob("*.txt"))]
        self._passages = [
            passage.strip() for text in texts for passage in text.split("\n\n") if passage.strip()
        ]
        self._counts = [Counter(words_of(passage)) for passage in self._passages]
        self._num_with = Counter(word for counts in self._counts for word in counts)
        mean = sum(counts.total() for counts in self._counts) / len(self._counts)
        self._k = k
        self._norms = [k * (1 - b + b * counts.total() / mean) for counts in self._counts]

    def find(self, query: str, count: int = 2) -> list[str]:
        """The best passages for a query, best first."""
        words = set(words_of(query))
        scores = [self._score(words, number) for number in range(len(self._passages))]
        best = sorted(range(len(scores)), key=lambda number: (-scores[number], number))
        return [self._passages[number] for number in best[:count]]

    def _score(self, words: set[str], number: int) -> float:
        counts, norm = self._counts[number], self._norms[number]
        return sum(
            self._rarity(word) * counts[word] * (self._k + 1) / (counts[word] + norm) for word in words
        )

    def _rarity(self, word: str) -> float:
        num_with = self._num_with[word]
        return math.log(1 + (len(self._passages) - num_with + 0.5) / (num_with + 0.5))


def words_of(text: str) -> list[str]:
    """Words in lower case, without the commonest endings."""
    return [re.sub(r"(ies|es|s|ing|ed|y)$", "", word) for word in re.findall(r"[a-z]+", text.lower())]


def with_parrot(job: str, questions: list[str], index: Index, outputs: P.Output) -> list[P.SemanticVariable]:
    """Sets the passages as soon as the words are there; returns words and answers, the answers last."""

    async def retrieve(question: str, its_words: P.SemanticVariable, passages: P.SemanticVariable) -> None:
        query = f"{question} {await its_words}"
        await asyncio.to_thread(passages.set, "\n".join(index.find(query)))

    async def wait() -> None:
        await asyncio.gather(*map(retrieve, questions, words, found), *answers)

    with P.batch():
        words = [enrich.with_options(outputs=outputs)(job, question) for question in questions]
        found = [P.variable(name="passages") for _ in questions]
        answers = [
            answer.with_options(outputs=outputs)(job, passages, question)
            for passages, question in zip(found, questions, strict=True)
        ]
        asyncio.run(wait())
    return [*words, *answers]


async def with_openai(ask: Asker, job: str, questions: list[str], index: Index) -> list[str]:
    """The same calls, orchestrated here."""
    system = fill(SYSTEM, job=job)

    async def one(question: str) -> str:
        words = await ask(system, fill(ENRICH, question=question))
        passages = "\n".join(index.find(f"{question} {words}"))
        return await ask(system, fill(ANSWER, passages=passages, question=question))

    return await asyncio.gather(*map(one, questions))


def main() -> None:
    """Run both ways and compare them."""
    parser = make_parser(__doc__)
    parser.add_argument("--question", action="append", help="may be given several times")
    options = parser.parse_args()
    questions, index = options.question or DEFAULT_QUESTIONS, Index()
    ways = Ways(
        parrot=lambda outputs: with_parrot("1", questions, index, outputs),
        twin=lambda ask: with_openai(ask, "2", questions, index),
        num_calls=2 * len(questions),
        wait_for=len(questions),
    )
    compare(questions, ways, options)


if __name__ == "__main__":
    main()
