"""What the summary examples share: the document, and a main program that runs both ways and compares them."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import time
from collections.abc import Awaitable, Callable
from importlib import import_module
from itertools import pairwise
from pathlib import Path

from openai import AsyncOpenAI

import parrot as P
from parrot.models import resolve_model
from parrot.tokenizer import Tokenizer

DEFAULT_CHAPTER = "compound"  # "Compound statements" of the Python language reference, 50,000 characters
DEFAULT_TITLE = "Compound statements"
_UNDERLINE = re.compile(r"^[*=\-~^\"']{3,}$", re.MULTILINE)
_WRAPPED = re.compile(r"(?<=\S)\n(?=\S)")

ParrotApplication = Callable[[str, list[str], P.Output], list[P.SemanticVariable]]
OpenAIApplication = Callable[[AsyncOpenAI, str, list[str], P.Output], Awaitable[list[str]]]


def load_text(file: Path | None = None) -> str:
    """The text of ``file``, or of the default chapter without its heading underlines and line wrapping."""
    if file is not None:
        return file.read_text()
    chapter: str = import_module("pydoc_data.topics").topics[DEFAULT_CHAPTER]
    paragraphs = re.sub(r"\n{3,}", "\n\n", _UNDERLINE.sub("", chapter))
    return _WRAPPED.sub(" ", paragraphs).strip()


def split_text(text: str, model: str, num_chunks: int, chunk_tokens: int) -> list[str]:
    """At most ``num_chunks`` consecutive pieces of ``text``, of ``chunk_tokens`` tokens of ``model`` each."""
    offsets = Tokenizer.load(resolve_model(model)).backend.encode(text, add_special_tokens=False).offsets
    ends = (min(begin + chunk_tokens, len(offsets)) for begin in range(0, len(offsets), chunk_tokens))
    cuts = [0, *(offsets[end][0] if end < len(offsets) else len(text) for end in ends)]
    return [text[begin:end] for begin, end in pairwise(cuts[: num_chunks + 1])]


def parse_arguments(description: str | None) -> argparse.Namespace:
    """The command line that both examples take."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--file", type=Path, help="a text file; by default a chapter that Python carries")
    parser.add_argument("--chunks", type=int, default=8, help="how many parts to read (default 8)")
    parser.add_argument("--chunk-tokens", type=int, default=237, help="tokens of a part (default 237)")
    parser.add_argument("--max-tokens", type=int, default=40, help="tokens of a summary (default 40)")
    parser.add_argument("--url", help="a running service; by default an embedded one is started")
    parser.add_argument(
        "--api-key", default=os.environ.get("PARROT_API_KEY"), help="its key, if it wants one"
    )
    return parser.parse_args()


def compare(
    with_parrot: ParrotApplication, with_openai: OpenAIApplication, options: argparse.Namespace
) -> None:
    """Run both ways on one service and print Parrot's summary and both times."""
    title = options.file.name if options.file else DEFAULT_TITLE
    parts = split_text(load_text(options.file), "smollm2", options.chunks, options.chunk_tokens)
    outputs = P.Output(max_tokens=options.max_tokens)
    url = P.connect(options.url, options.api_key).url

    try:  # once the engine has loaded its model
        with_parrot("Warm-up", ["text"], P.Output(max_tokens=1))[-1].get()
    except P.ParrotError as error:
        raise SystemExit(error.message) from None

    # A title of its own for each run, so that neither finds the other's prompts in the cache.
    begin = time.perf_counter()
    summary = with_parrot(f"{title} (1)", parts, outputs)[-1].get(perf=P.LATENCY)
    parrot_s = time.perf_counter() - begin

    async def run_twin() -> None:
        async with AsyncOpenAI(
            base_url=f"{url}/v1", api_key=options.api_key or "none", timeout=600
        ) as client:
            await with_openai(client, f"{title} (2)", parts, outputs)

    begin = time.perf_counter()
    asyncio.run(run_twin())
    twin_s = time.perf_counter() - begin
    print(f"{summary}\n\nParrot {parrot_s:.2f} s, client-orchestrated twin {twin_s:.2f} s")
    print("one run of each, Parrot's first: a look, no measurement (python -m bench)")
    print(
        "No network delay is emulated here; `parrot demo` and `python -m bench apps-cpu` emulate a client "
        "that is 250 ms away."
    )
