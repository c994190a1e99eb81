"""A three-call application on an embedded service; CI runs it with the installed wheel alone."""

from __future__ import annotations

import parrot as P


@P.function(outputs=P.Output(max_tokens=12))
def describe(thing):
    return [P.user("Describe {{input:thing}} in one sentence."), P.assistant("{{output:sentence}}")]


@P.function(outputs=P.Output(max_tokens=12))
def compare(first, second):
    return [P.user("{{input:first}}\n{{input:second}}\nWhich is larger?"), P.assistant("{{output:answer}}")]


if __name__ == "__main__":
    sun, moon = describe("the sun"), describe("the moon")
    answer = compare(sun, moon).get(perf=P.LATENCY, timeout=300)
    if not answer.strip():
        raise SystemExit("the answer is empty")
    print(f"sun: {sun.get()}\nmoon: {moon.get()}\nanswer: {answer}\nsmoke test passed")
