"""Applications of real calls whose greedy text is always the same: chains, map-reduces, and calls that share
a long prefix."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

_WORDS = ("quick", "brown", "fox", "jumps", "over", "lazy", "dog", "while", "python", "prints", "köln")
_PREFIX = " ".join(_WORDS * 4)


@dataclass(frozen=True)
class Program:
    """``calls`` as the API takes them; ``wanted`` is the variable that its client waits for."""

    name: str
    calls: tuple[dict[str, Any], ...]
    wanted: str


def make_programs(seed: int, count: int = 18) -> list[Program]:
    """Programs of three kinds in turn."""
    draw = random.Random(seed)
    makers = (_chain, _map_reduce, _shared)
    return [makers[number % 3](f"p{number}", draw) for number in range(count)]


def _chain(name: str, draw: random.Random) -> Program:
    length = draw.randint(3, 6)
    calls = [_call(f"{name}-0", f"{_sentence(draw)} {{{{output:out}}}}", {}, draw)]
    for step in range(1, length):
        prompt = f"{_sentence(draw)} {{{{input:x}}}} {_sentence(draw)} {{{{output:out}}}}"
        calls.append(_call(f"{name}-{step}", prompt, {"x": f"v-{name}-{step - 1}"}, draw))
    return Program(name, tuple(calls), f"v-{name}-{length - 1}")


def _map_reduce(name: str, draw: random.Random) -> Program:
    width = draw.randint(3, 6)
    calls = [
        _call(f"{name}-{part}", f"{_PREFIX} part {part} {_sentence(draw)} {{{{output:out}}}}", {}, draw)
        for part in range(width)
    ]
    holes = " ".join(f"{{{{input:x{part}}}}}" for part in range(width))
    inputs = {f"x{part}": f"v-{name}-{part}" for part in range(width)}
    calls.append(_call(f"{name}-all", f"Together: {holes} {{{{output:out}}}}", inputs, draw))
    return Program(name, tuple(calls), f"v-{name}-all")


def _shared(name: str, draw: random.Random) -> Program:
    calls = [
        _call(f"{name}-0", f"{_PREFIX} {_sentence(draw)} {{{{output:out}}}}", {}, draw),
        _call(f"{name}-1", f"{_PREFIX} {{{{input:x}}}} {{{{output:out}}}}", {"x": f"v-{name}-0"}, draw),
    ]
    return Program(name, tuple(calls), f"v-{name}-1")


def _sentence(draw: random.Random) -> str:
    return " ".join(draw.choices(_WORDS, k=draw.randint(3, 9)))


def _call(request_id: str, prompt: str, inputs: dict[str, str], draw: random.Random) -> dict[str, Any]:
    sampling = {"max_tokens": draw.randint(6, 40), "ignore_eos": True}
    output = {
        "name": "out",
        "kind": "output",
        "semantic_var_id": f"v-{request_id}",
        "sampling": sampling,
    }
    holes = [{"name": name, "kind": "input", "semantic_var_id": var} for name, var in inputs.items()]
    return {"function": "f", "request_id": request_id, "prompt": prompt, "placeholders": [output, *holes]}
