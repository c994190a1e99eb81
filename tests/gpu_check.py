"""All that needs a GPU, in one call: ``python tests/gpu_check.py FOLDER [PART ...] [--within SECONDS]``.

Each part runs in a process of its own with a limit of its own, so that one that fails, hangs or crashes costs
no other its result. FOLDER gets, as it goes, PART.log, PART.json of a benchmark, PART.xml of tests, and after
every part summary.json. A part whose program or GPUs are not there is skipped, and the output says so. Exit
code 1 if one failed or none ran. `make gpu-check` builds first.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as xml
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[1]
KILL_AFTER_S = 10  # from a polite request to end
TAIL = 15  # lines of a failed part's log that are shown


@dataclass(frozen=True)
class Part:
    """``command`` follows the interpreter; {folder} and {name} are filled in. ``under`` is a program with its
    options that the interpreter runs under; a machine without it, or where torch has fewer GPUs, skips the
    part."""

    name: str
    command: str
    limit_s: float
    under: str = ""
    least_gpus: int = 1

    def missing(self) -> str | None:
        """What the part needs and this machine has not."""
        program, gpus = self.under.partition(" ")[0], torch.cuda.device_count()
        if program and shutil.which(program) is None:
            return f"needs {program}, which is not on PATH"
        if gpus < self.least_gpus:
            return f"needs {self.least_gpus} GPU{'s' * (self.least_gpus > 1)}, torch finds {gpus}"
        return None


def tests(name: str, selection: str, limit_s: float) -> Part:
    """Tests of pytest; at least one of them has to run."""
    options = "-q -p no:cacheprovider --junitxml {folder}/{name}.xml"
    return Part(name, f"-m pytest {selection} {options}", limit_s)


def benchmark(name: str, limit_s: float) -> Part:
    """The quick form of a benchmark."""
    return Part(name, f"-m bench {name} --quick --json {{folder}}/{{name}}.json", limit_s)


def sanitizer(name: str, file: str, selection: str, limit_s: float) -> Part:
    """Small tests of a CUDA kernel under the tool of compute-sanitizer that the part's name begins with; what
    it finds fails the part."""
    tool = name.partition("-")[0]
    part = tests(name, f"{file} -k '{selection}'", limit_s)
    return replace(part, under=f"compute-sanitizer --tool {tool} --kernel-name kns=parrot --error-exitcode 1")


ATTENTION, PREFILL = "tests/test_shared_prefix.py", "tests/test_paged_prefill_cuda.py"
# Tiles that end around 64 and 128 rows, in float16, several heads on one of the cache.
BORDERS = "[cuda-dtype0 and -8-2- and (around or over)"
PARTS = (  # the quickest, and those that the others rest on, first
    Part("machine", "-m parrot.cli.main doctor", 60),
    tests("tests-attention", ATTENTION, 300),
    tests("tests-attention-triton", "tests/test_shared_prefix_triton.py -m gpu", 360),
    tests("tests-prefill", f"{PREFILL} -m gpu", 240),
    tests("tests-step", "tests/test_gpu_step.py tests/test_triton_ids.py -m gpu", 240),
    tests("tests-products", "tests/test_triton_linear.py -m gpu", 180),
    tests("tests-model", "tests/test_model.py tests/test_sampling.py tests/test_triton_draw.py -m gpu", 180),
    tests("tests-families", "tests/test_engine_families.py -m gpu", 300),
    replace(tests("tests-gpus", "tests/system/test_several_gpus.py", 300), least_gpus=2),
    sanitizer("memcheck", ATTENTION, "suffix_may_end or no_token or 256_requests or many_items", 180),
    sanitizer("racecheck", ATTENTION, "no_token or many_items", 240),
    sanitizer("synccheck", ATTENTION, "no_token or many_items", 180),
    sanitizer("memcheck-prefill", PREFILL, f"({BORDERS}) or ([cuda- and anywhere)", 180),
    sanitizer("racecheck-prefill", PREFILL, BORDERS, 240),
    sanitizer("synccheck-prefill", PREFILL, BORDERS, 180),
    benchmark("kernel", 180),
    benchmark("engine", 300),
    benchmark("decode-shared", 240),
    benchmark("curve", 240),
    replace(benchmark("gpus", 420), least_gpus=2),
)


@dataclass
class Outcome:
    """What became of a part. ``ran`` and ``skipped`` count tests."""

    name: str
    result: str  # ok, failed, timeout, skipped, or left out
    code: int | None = None
    seconds: float = 0.0
    ran: int | None = None
    skipped: int | None = None


def run_part(part: Part, folder: Path, limit_s: float) -> Outcome:
    """Run it for at most so long, its whole process group then killed."""
    arguments = shlex.split(part.command.format(folder=folder, name=part.name))
    command = [*shlex.split(part.under), sys.executable, *arguments]
    report = folder / f"{part.name}.xml"
    report.unlink(missing_ok=True)  # of an earlier run
    started = time.monotonic()
    with (folder / f"{part.name}.log").open("wb") as log:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            end_group(process)
    outcome = Outcome(part.name, "timeout" if code is None else "failed" if code else "ok", code)
    outcome.seconds = round(time.monotonic() - started, 1)
    if report.exists():
        outcome.ran, outcome.skipped = counts_of(report)
        if outcome.ran == 0 and outcome.result == "ok":
            outcome.result = "failed"  # a check of nothing
    return outcome


def end_group(process: subprocess.Popen[bytes]) -> None:
    """Nothing that the part started goes on and holds the GPU's memory."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        if process.poll() is None:
            try:
                process.wait(KILL_AFTER_S)
            except subprocess.TimeoutExpired:
                continue
    process.wait()


def counts_of(report: Path) -> tuple[int, int]:
    """Tests of a JUnit file that ran, and those that were skipped."""
    suites = list(xml.parse(report).getroot().iter("testsuite"))
    skipped = sum(int(suite.get("skipped", 0)) for suite in suites)
    return sum(int(suite.get("tests", 0)) for suite in suites) - skipped, skipped


def run_all(parts: list[Part], folder: Path, within_s: float) -> list[Outcome]:
    """Every part, as long as there is time; ``folder`` always has what is known so far."""
    deadline = time.monotonic() + within_s
    outcomes: list[Outcome] = []
    for part in parts:
        left_s = deadline - time.monotonic()
        missing = part.missing()
        if missing:
            outcome = Outcome(part.name, "skipped")
        elif left_s > 0:
            outcome = run_part(part, folder, min(part.limit_s, left_s))
        else:
            outcome = Outcome(part.name, "left out")
        outcomes.append(outcome)
        (folder / "summary.json").write_text(json.dumps([asdict(one) for one in outcomes], indent=2) + "\n")
        counts = "" if outcome.ran is None else f", {outcome.ran} tests, {outcome.skipped} skipped"
        why = f", {missing}" if missing else ""
        print(f"{part.name:<22} {outcome.result:<9} {outcome.seconds:7.1f} s{counts}{why}", flush=True)
        if outcome.result in ("failed", "timeout"):
            lines = (folder / f"{part.name}.log").read_text(errors="replace").splitlines()
            print("\n".join(f"    {line}" for line in lines[-TAIL:]), flush=True)
    return outcomes


def exit_code(outcomes: list[Outcome]) -> int:
    """0 where parts ran and none failed."""
    if all(outcome.result == "skipped" for outcome in outcomes):
        print("nothing was checked", flush=True)
        return 1
    return int(any(outcome.result not in ("ok", "skipped") for outcome in outcomes))


def main() -> None:
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("part", nargs="*", help=f"all unless named: {', '.join(names)}")
    parser.add_argument("--within", type=float, default=3600, metavar="SECONDS", help="for all together")
    options = parser.parse_args()
    unknown = set(options.part) - set(names)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    folder: Path = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    parts = [part for part in PARTS if not options.part or part.name in options.part]
    outcomes = run_all(parts, folder, options.within)
    sys.exit(exit_code(outcomes))


if __name__ == "__main__":
    main()
