"""A writing copilot: one application of 18 calls, one after another, that share a long system prompt.

    python examples/copilot.py [--topic TOPIC] [--sections N] [--url URL]

An outline; then, section by section, a draft, a critique and a rewrite; then a summary and a title. Every
call reads what came before it. `with_parrot` hands the service all of them in one request; `with_openai` is
the client-orchestrated twin, which makes a trip to the service and back for each.
"""

from __future__ import annotations

import parrot as P
from both_ways import Asker, Ways, compare, fill, make_parser

DEFAULT_TOPIC = "why ships float"
SECTIONS = ("the question", "an experiment", "the explanation", "everyday examples", "what to remember")

SYSTEM = """Job {{input:job}}. You are the copilot of a small publishing house that makes science books for
young readers. You write together with an editor, who reads every word. Keep to the rules of the house in
everything you write:
1. Write for a curious reader of twelve years who has no lexicon at hand.
2. One idea in a sentence, one topic in a paragraph, never more than four sentences in a paragraph.
3. Prefer short common words; explain a technical word in the sentence in which it first appears.
4. Use the active voice. Say who does what, and to what end.
5. Give a number only with its unit and with something familiar of the same size beside it.
6. Units are metric. Temperatures are in degrees Celsius. Years are written in full.
7. Never invent a study, a quotation, a date or a person. If you are not sure, leave it out.
8. Do not tell a story about yourself, and do not speak of being a program.
9. Address the reader as "you", and do not use "we" for the writer.
10. An experiment needs only things that a kitchen has, and no fire, no glass and no electricity.
11. An experiment names its steps in the order in which they are done, and what is to be seen at the end.
12. If something can hurt, say so before the step in which it can, not after it.
13. Compare with animals, food, weather, sports and the way to school; do not compare with wars or money.
14. Humour is welcome where it explains something. Irony is not.
15. No headings inside a section, no lists, no tables, no bold or italic text, no links and no emoji.
16. Do not begin a section with a question, and do not end one with an exclamation mark.
17. Do not repeat the topic's name in every sentence; "it" and "this" are fine where they are clear.
18. A draft may be rough. A critique names exactly one weakness and says how to mend it. A rewrite mends that
one weakness and changes nothing else.
19. A summary has one sentence for each section, in their order, and brings in nothing new.
20. A title has at most six words and no colon, and promises nothing that the text does not keep.
21. Answer with the text that was asked for and with nothing else: no greeting, no comment, no apology."""
OUTLINE = "Topic: {{input:topic}}. Write an outline of a short article about it, one line for each section."
DRAFT = (
    "Topic: {{input:topic}}. Outline: {{input:outline}}\n\nThe section before this one: {{input:before}}\n\n"
    "Draft the section on {{input:name}}."
)
CRITIQUE = "A draft of the section on {{input:name}}: {{input:draft}}\n\nWrite your critique of it."
REWRITE = "A draft: {{input:draft}}\n\nA critique of it: {{input:critique}}\n\nRewrite the draft."
SUMMARY = "The sections of an article: {{input:sections}}\n\nWrite its summary."
TITLE = "The summary of an article: {{input:summary}}\n\nWrite its title."


@P.function
def outline(job, topic):
    return [P.system(SYSTEM), P.user(OUTLINE), P.assistant("{{output:outline}}")]


@P.function
def draft(job, topic, outline, before, name):
    return [P.system(SYSTEM), P.user(DRAFT), P.assistant("{{output:draft}}")]


@P.function
def critique(job, name, draft):
    return [P.system(SYSTEM), P.user(CRITIQUE), P.assistant("{{output:critique}}")]


@P.function
def rewrite(job, draft, critique):
    return [P.system(SYSTEM), P.user(REWRITE), P.assistant("{{output:section}}")]


@P.function
def summarise(job, sections):
    return [P.system(SYSTEM), P.user(SUMMARY), P.assistant("{{output:summary}}")]


@P.function
def name_it(job, summary):
    return [P.system(SYSTEM), P.user(TITLE), P.assistant("{{output:title}}")]


def with_parrot(job: str, topic: str, names: list[str], outputs: P.Output) -> list[P.SemanticVariable]:
    """Returns at once with what each call will write; the last is the title."""
    with P.batch():
        plan = outline.with_options(outputs=outputs)(job, topic)
        written, sections = [plan], [P.variable("nothing yet")]
        for name in names:
            rough = draft.with_options(outputs=outputs)(job, topic, plan, sections[-1], name)
            weakness = critique.with_options(outputs=outputs)(job, name, rough)
            sections.append(rewrite.with_options(outputs=outputs)(job, rough, weakness))
            written += [rough, weakness, sections[-1]]
        summary = summarise.with_options(outputs=outputs)(job, P.join(sections[1:], "\n\n"))
        return [*written, summary, name_it.with_options(outputs=outputs)(job, summary)]


async def with_openai(ask: Asker, job: str, topic: str, names: list[str]) -> str:
    """The same calls, orchestrated here."""
    system = fill(SYSTEM, job=job)
    plan = await ask(system, fill(OUTLINE, topic=topic))
    sections = ["nothing yet"]
    for name in names:
        rough = await ask(system, fill(DRAFT, topic=topic, outline=plan, before=sections[-1], name=name))
        weakness = await ask(system, fill(CRITIQUE, name=name, draft=rough))
        sections.append(await ask(system, fill(REWRITE, draft=rough, critique=weakness)))
    summary = await ask(system, fill(SUMMARY, sections="\n\n".join(sections[1:])))
    return await ask(system, fill(TITLE, summary=summary))


def main() -> None:
    """Run both ways and compare them."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--topic", default=DEFAULT_TOPIC, help=f"what to write about (default {DEFAULT_TOPIC!r})"
    )
    parser.add_argument("--sections", type=int, choices=range(1, len(SECTIONS) + 1), default=len(SECTIONS))
    options = parser.parse_args()
    names = list(SECTIONS[: options.sections])
    ways = Ways(
        parrot=lambda outputs: with_parrot("1", options.topic, names, outputs),
        twin=lambda ask: with_openai(ask, "2", options.topic, names),
        num_calls=3 + 3 * len(names),
        wait_for=2,
    )
    compare(["summary", "title"], ways, options)


if __name__ == "__main__":
    main()
