"""Agents that write a program: an architect, N coders, then reviewers and revisers in rounds.

    python examples/agents.py [--task TASK] [--files N] [--rounds N] [--url URL]

The architect designs; one coder writes each file; each reviewer reads all files and reviews one; each reviser
reads all files and all reviews and writes its file again; reviewers and revisers go on for `--rounds` more
rounds. `with_parrot` hands the service the whole graph in one request, in which the files go round and round;
`with_openai` is the client-orchestrated twin, which waits at the end of every stage.
"""

from __future__ import annotations

import asyncio

import parrot as P
from both_ways import Asker, Ways, compare, fill, make_parser

DEFAULT_TASK = "a snake game in Python"

SYSTEM = """Job {{input:job}}. You are an engineer in a team that writes {{input:task}}. The team's rules:
small functions with clear names, no global state, the standard library only, an error for every bad input,
and a docstring that says what a function is for. You answer with what was asked for and nothing else."""
DESIGN = "Write the design: for each file, its name and its functions, with one line for each."
CODE = "The design: {{input:design}}\n\nWrite {{input:file}}."
# What all branches share comes first, so that their prompts share a long prefix.
REVIEW = (
    "The design: {{input:design}}\n\nThe files:\n{{input:files}}\n\n"
    "Review {{input:file}}: name its worst fault."
)
REVISE = (
    "The design: {{input:design}}\n\nThe files:\n{{input:files}}\n\nThe reviews:\n{{input:reviews}}\n\n"
    "Write {{input:file}} again, without the fault that was found in it."
)


@P.function
def design(job, task):
    return [P.system(SYSTEM), P.user(DESIGN), P.assistant("{{output:design}}")]


@P.function
def code(job, task, design, file):
    return [P.system(SYSTEM), P.user(CODE), P.assistant("{{output:code}}")]


@P.function
def review(job, task, design, files, file):
    return [P.system(SYSTEM), P.user(REVIEW), P.assistant("{{output:review}}")]


@P.function
def revise(job, task, design, files, reviews, file):
    return [P.system(SYSTEM), P.user(REVISE), P.assistant("{{output:code}}")]


def file_names(count: int) -> list[str]:
    """What the files are called."""
    return ["main.py", *(f"part{number}.py" for number in range(1, count))]


def with_parrot(
    job: str, task: str, names: list[str], rounds: int, outputs: P.Output
) -> list[P.SemanticVariable]:
    """Returns at once with what each call will write, and all files in one as the last."""
    coder, reviewer, reviser = (fn.with_options(outputs=outputs) for fn in (code, review, revise))
    with P.batch():
        plan = design.with_options(outputs=outputs)(job, task)
        files = [coder(job, task, plan, name) for name in names]
        written = [plan, *files]
        for _ in range(1 + rounds):
            whole = P.join(files, "\n\n")
            reviews = [reviewer(job, task, plan, whole, name) for name in names]
            said = P.join(reviews)
            files = [reviser(job, task, plan, whole, said, name) for name in names]
            written += [*reviews, *files]
        return [*written, P.join(files, "\n\n")]


async def with_openai(ask: Asker, job: str, task: str, names: list[str], rounds: int) -> str:
    """The same calls, orchestrated here stage by stage."""
    system = fill(SYSTEM, job=job, task=task)
    plan = await ask(system, DESIGN)
    files = await asyncio.gather(*(ask(system, fill(CODE, design=plan, file=name)) for name in names))
    for _ in range(1 + rounds):
        shared = {"design": plan, "files": "\n\n".join(files)}
        reviews = await asyncio.gather(*(ask(system, fill(REVIEW, **shared, file=name)) for name in names))
        shared["reviews"] = "\n".join(reviews)
        files = await asyncio.gather(*(ask(system, fill(REVISE, **shared, file=name)) for name in names))
    return "\n\n".join(files)


def main() -> None:
    """Run both ways and compare them."""
    parser = make_parser(__doc__)
    parser.add_argument("--task", default=DEFAULT_TASK, help=f"what to write (default {DEFAULT_TASK!r})")
    parser.add_argument(
        "--files", type=int, default=3, help="how many files, and agents of a kind (default 3)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds after the first (default 3)")
    options = parser.parse_args()
    names = file_names(options.files)
    ways = Ways(
        parrot=lambda outputs: with_parrot("1", options.task, names, options.rounds, outputs),
        twin=lambda ask: with_openai(ask, "2", options.task, names, options.rounds),
        num_calls=1 + len(names) * (1 + 2 * (1 + options.rounds)),
    )
    compare([", ".join(names)], ways, options)


if __name__ == "__main__":
    main()
