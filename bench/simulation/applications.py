"""Applications as both kinds of client run them: steps, and the text that each hands to the next ones."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

from parrot.dummy_model import num_control_tokens, word
from parrot.wire import Objective

VOCAB_SIZE = 32_000


@cache
def _words() -> list[str]:
    return [word(token_id) for token_id in range(num_control_tokens(), VOCAB_SIZE)]


def text(rng: random.Random, num_tokens: int) -> str:
    """Random words, one token each."""
    return " ".join(rng.choices(_words(), k=num_tokens))


@dataclass(frozen=True, slots=True)
class Value:
    """The output of an earlier step as part of a prompt."""

    variable: str


@dataclass(frozen=True, slots=True)
class Argument:
    """What the user gives; the text around it is the template's."""

    text: str


Part = str | Value | Argument


@dataclass(frozen=True, slots=True)
class Step:
    """One call: its prompt, and how many tokens it generates. The last ``num_read`` of them are an output of
    their own, if they are fewer than all: what later steps read, which is there when the call is done."""

    name: str
    prompt: tuple[Part, ...]
    num_output: int
    num_read: int = 0

    @property
    def outputs(self) -> list[tuple[str, int]]:
        """Variable and tokens of each; the last one has the step's name."""
        if 0 < self.num_read < self.num_output:
            return [(f"{self.name}.rest", self.num_output - self.num_read), (self.name, self.num_read)]
        return [(self.name, self.num_output)]


@dataclass(frozen=True, slots=True)
class Application:
    """Its steps, in an order in which they can run; the last one's output is the answer."""

    kind: str
    steps: tuple[Step, ...]
    objective: Objective = "LATENCY"
    tenant: str = "default"

    @property
    def num_output(self) -> int:
        """Tokens it generates."""
        return sum(step.num_output for step in self.steps)


def request(kind: str, prompt: tuple[Part, ...], num_output: int) -> Application:
    """One call by itself."""
    return Application(kind, (Step("answer", prompt, num_output),))


def chain_summary(rng: random.Random, num_chunks: int, chunk: int, num_output: int) -> Application:
    """Each step reads the summary so far and the next chunk."""
    steps = [Step("s0", (text(rng, chunk),), num_output)]
    for i in range(1, num_chunks):
        steps.append(Step(f"s{i}", (text(rng, chunk), Value(f"s{i - 1}")), num_output))
    return Application("chain", tuple(steps))


def map_reduce(rng: random.Random, num_chunks: int, chunk: int, num_output: int) -> Application:
    """Every chunk is summarised by itself, and the summaries together."""
    maps = [Step(f"m{i}", (text(rng, chunk),), num_output) for i in range(num_chunks)]
    reduce = Step("answer", (text(rng, 20), *(Value(step.name) for step in maps)), num_output)
    return Application("map-reduce", (*maps, reduce))


def document_chunks(rng: random.Random, chunk: int) -> int:
    """Chunks of a long document: 32.1k tokens in the mean, 20.6k to 53.8k."""
    return max(1, round(rng.triangular(20_600, 53_800, 24_000) / chunk))


# --- multi-agent programming (figure 18) --------------------------------------------------------------------

# evaluation.md, section 1: prompt tokens, those shared with the other branches, and outputs.
PROMPT = {"architect": 251, "coder": 3658, "reviewer": 4867, "reviser": 5383}
SHARED = {"architect": 250, "coder": 3555, "reviewer": 4794, "reviser": 5268}
OUTPUT = {
    "architect": (880,),
    "coder": (684, 1077, 317, 632, 540, 247, 341, 597),
    "reviewer": (329, 364, 349, 318, 288, 262, 434, 423),
    "reviser": (692, 838, 346, 567, 554, 238, 232, 609),
}
ROUNDS = 4  # reviewers and revisers, then both again three times


def multi_agent(rng: random.Random, num_files: int) -> Application:
    """An architect designs, N coders write a file each; reviewers read all files, revisers the reviews too.

    The shared counts nest (250 < 3555 < 4794 < 5268): the task, the project with its design, the code of the
    round, the reviews of the round. Of each file and review a prompt has as many tokens as make that count.
    """
    task = text(rng, SHARED["architect"] - 1)
    architect = Step("architect", (f"{task} {text(rng, 1)}",), OUTPUT["architect"][0])
    design = SHARED["coder"] - SHARED["architect"] - architect.num_output
    of_code = SHARED["reviewer"] - SHARED["coder"]
    of_reviews = SHARED["reviser"] - SHARED["reviewer"]
    history: tuple[Part, ...] = (f"{task} {text(rng, design)}", Value(architect.name))
    files = _branches(rng, "coder", "coder", history, num_files, of_code)
    steps = [architect, *files]
    for number in range(ROUNDS):
        code = (*history, *_excerpts(rng, files, of_code))
        reviewers = _branches(rng, "reviewer", f"reviewer{number}.", code, num_files, of_reviews)
        reviews = (*code, *_excerpts(rng, reviewers, of_reviews))
        files = _branches(rng, "reviser", f"reviser{number}.", reviews, num_files, of_code)
        steps += [*reviewers, *files]
    package = Step("package", (text(rng, 20), *(Value(step.name) for step in files)), 1)
    return Application("multi-agent", (*steps, package))


def _branches(
    rng: random.Random, role: str, name: str, history: Sequence[Part], num_files: int, num_read: int
) -> list[Step]:
    """A call for each file; later prompts hold ``num_read`` tokens of all their outputs together."""
    made = []
    for file in range(num_files):
        own = " " + text(rng, PROMPT[role] - SHARED[role])
        num_output = OUTPUT[role][file % len(OUTPUT[role])]
        made.append(Step(f"{name}{file}", (*history, own), num_output, num_read // num_files))
    return made


def _excerpts(rng: random.Random, steps: Sequence[Step], num_tokens: int) -> list[Part]:
    """The ends of these outputs, and words that make up for what they are too short by."""
    missing = num_tokens - sum(step.outputs[-1][1] for step in steps)
    padding: list[Part] = [" " + text(rng, missing)] if missing else []
    return [*padding, *(Value(step.name) for step in steps)]
