"""`parrot demo` and the examples as a user runs them: real processes, the real model."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path

import pytest
from service_process import ServiceProcess, service

from parrot.cli.demo_run import DemoOptions, run_demo
from parrot.errors import SetupError

pytestmark = [pytest.mark.system, pytest.mark.model]

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def run(*argv: str, cwd: Path) -> str:
    """Standard output of a Python program; a failure shows all that it printed."""
    environment = os.environ | {"COLUMNS": "140"}
    done = subprocess.run(
        [sys.executable, *argv], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_demo_prints_summary_times_and_calls_and_draws_every_call(tmp_path: Path) -> None:
    options = ["--chunks", "3", "--max-tokens", "6", "--rtt-ms", "20", "--out", "picture.svg"]
    output = run("-m", "parrot.cli.main", "demo", *options, cwd=tmp_path)
    assert "summary of Compound statements" in output
    ended = re.findall(r"^(.+): 4 calls ended$", output, re.MULTILINE)
    assert ended == ["Parrot", "client-orchestrated twin"], "progress without a terminal"
    for word in ("Parrot", "client-orchestrated twin", "summarise_part 3", "combine", "engine-0", "20 ms"):
        assert word in output
    requests = re.findall(r"^(Parrot|client-orchestrated twin) .* s +(\d+) *$", output, re.MULTILINE)
    assert requests == [("Parrot", "2"), ("client-orchestrated twin", "4")]
    for way, count in requests:
        assert re.search(f"{count} requests, ", (tmp_path / "picture.svg").read_text()), way
    drawing = ET.parse(tmp_path / "picture.svg").getroot()
    decodes = [rect for rect in drawing.iter(f"{SVG}rect") if rect.get("class") == "decode" and len(rect)]
    assert len(decodes) == 2 * 4, "three parts and a combination, twice"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--file", "nowhere.txt"], r"--file nowhere\.txt cannot be read as text in UTF-8: .*No such file"),
        (["--file", "binary"], r"--file binary cannot be read as text in UTF-8"),
        (["--file", "empty"], r"--file empty has no text to summarise"),
        (["--out", "binary/picture.svg"], r"--out binary/picture\.svg: its folder cannot be made"),
    ],
)
def test_what_the_demo_cannot_read_or_write_is_named(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    (tmp_path / "empty").write_text("\n")
    monkeypatch.chdir(tmp_path)
    values = {name: Path(value) for name, value in zip(options[::2], options[1::2], strict=True)}
    with pytest.raises(SetupError, match=message):
        run_demo(DemoOptions(values.get("--file"), 2, 8, 0, values.get("--out", Path("out.svg"))))


@pytest.mark.parametrize("example", ["chain_summary", "map_reduce_summary"])
def test_an_example_prints_both_times_and_that_no_network_is_emulated(example: str, tmp_path: Path) -> None:
    program = str(ROOT / "examples" / f"{example}.py")
    output = run(program, "--chunks", "2", "--chunk-tokens", "60", "--max-tokens", "8", cwd=tmp_path)
    assert re.search(r"^Parrot [\d.]+ s, client-orchestrated twin [\d.]+ s$", output, re.MULTILINE)
    assert "No network delay is emulated here" in output


@pytest.fixture(scope="module")
def running(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    with service(tiny_model, tmp_path_factory.mktemp("service")) as running:
        yield running


@pytest.mark.parametrize(
    ("example", "options", "num_calls"),
    [
        ("copilot", ["--sections", "1"], 6),
        ("agents", ["--files", "2", "--rounds", "0"], 7),
        ("search", ["--question", "Why is the sea salty?", "--rtt-ms", "20"], 2),
        ("batch", ["--documents", "4", "--document-tokens", "30"], 8),
    ],
)
def test_an_example_runs_both_ways_on_a_service_that_is_there(
    running: ServiceProcess, example: str, options: list[str], num_calls: int, tmp_path: Path
) -> None:
    program = str(ROOT / "examples" / f"{example}.py")
    output = run(program, "--url", running.url, "--max-tokens", "4", *options, cwd=tmp_path)
    distance = "round trip of 20 ms" if "--rtt-ms" in options else "No network delay is emulated"
    assert distance in " ".join(output.split())
    for way in ("Parrot", "client's twin"):
        assert re.search(rf"^{way}: {num_calls} calls, [\d.]+ s$", output, re.MULTILINE), "progress"
        assert re.search(
            rf"^ {way} +[\d.]+ +{num_calls} +[\d,]+ +[\d,]+ +{4 * num_calls} $", output, re.MULTILINE
        )
