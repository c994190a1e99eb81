"""The command line: options become configurations, errors become one line."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

import parrot.engine.server
import parrot.manager.server
from parrot.cli import main as cli
from parrot.cli.checks import Check
from parrot.cli.topics import Topic
from parrot.config import EngineConfig, ManagerConfig, SchedulerConfig
from parrot.manager.supervisor import engine_argv


def call_main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Exit code of the command as a process would have it."""
    monkeypatch.setattr("sys.argv", ["parrot", *arguments])
    with pytest.raises(SystemExit) as end:
        cli.main()
    assert isinstance(end.value.code, int)
    return end.value.code


@pytest.fixture
def managers(monkeypatch: pytest.MonkeyPatch) -> list[tuple[ManagerConfig, dict[str, Any]]]:
    """What `parrot serve` and `parrot manager` would run."""
    started: list[tuple[ManagerConfig, dict[str, Any]]] = []
    monkeypatch.setattr(
        parrot.manager.server, "run_manager", lambda config, **rest: started.append((config, rest))
    )
    return started


@pytest.fixture
def engines(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """What `parrot engine` would run."""
    started: list[EngineConfig] = []
    monkeypatch.setattr(parrot.engine.server, "run_engine", started.append)
    return started


def test_serve_starts_a_manager_with_as_many_engines_as_asked(
    managers: list[tuple[ManagerConfig, dict[str, Any]]], tmp_path: Path
) -> None:
    ready = str(tmp_path / "ready.json")
    command = ["serve", "--port", "0", "--engines", "2", "--dtype", "bfloat16", "--num-blocks", "100"]
    result = CliRunner().invoke(cli.app, [*command, "--ready-file", ready, "--parent-pipe"])
    assert result.exit_code == 0, result.output
    [(config, rest)] = managers
    assert (config.port, config.ready_file) == (0, Path(ready))
    assert rest["parent_pipe"] is True
    assert [engine.name for engine in rest["engines"]] == ["engine-0", "engine-1"]
    assert {(engine.dtype, engine.num_blocks) for engine in rest["engines"]} == {("bfloat16", 100)}


def test_engines_on_the_cpu_divide_its_cores_unless_they_are_told(
    managers: list[tuple[ManagerConfig, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parrot.engine.process.num_physical_cores", lambda: 5)
    for options in (["1"], ["2"], ["7"], ["2", "--num-threads", "4"]):
        assert CliRunner().invoke(cli.app, ["serve", "--engines", *options]).exit_code == 0
    threads = [[engine.num_threads for engine in rest["engines"]] for _, rest in managers]
    assert threads == [[5], [3, 2], [1] * 7, [4, 4]]


def test_each_gpu_has_an_engine(
    managers: list[tuple[ManagerConfig, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parrot.cli.gpus.num_gpus", lambda: 3)
    assert CliRunner().invoke(cli.app, ["serve", "--gpus", "all"]).exit_code == 0
    assert CliRunner().invoke(cli.app, ["serve", "--gpus", "2,1"]).exit_code == 0
    devices = [[(engine.name, engine.device) for engine in rest["engines"]] for _, rest in managers]
    assert devices[0] == [("engine-0", "cuda:0"), ("engine-1", "cuda:1"), ("engine-2", "cuda:2")]
    assert devices[1] == [("engine-0", "cuda:2"), ("engine-1", "cuda:1")]


def test_a_gpu_that_is_not_here_is_refused_before_anything_starts(
    managers: list[tuple[ManagerConfig, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("parrot.cli.gpus.num_gpus", lambda: 1)
    monkeypatch.setattr("parrot.cli.gpus._DRIVER", Path("/nonexistent"))
    assert call_main(monkeypatch, "serve", "--device", "cuda:5") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: device cuda:5 is not here: this machine shows only cuda:0")
    assert managers == []


@pytest.mark.parametrize("other", [["--engines", "2"], ["--device", "cuda:0"]])
def test_gpus_stand_in_place_of_engines_and_device(
    other: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call_main(monkeypatch, "serve", "--gpus", "all", *other) == 2
    assert "leave out --engines and --device" in capsys.readouterr().err


def test_a_manager_alone_starts_no_engine(managers: list[tuple[ManagerConfig, dict[str, Any]]]) -> None:
    assert CliRunner().invoke(cli.app, ["manager", "--engine-port", "9000"]).exit_code == 0
    [(config, rest)] = managers
    assert config.engine_port == 9000
    assert rest["engines"] == []


def test_the_supervisor_and_the_engine_command_agree(engines: list[EngineConfig]) -> None:
    config = EngineConfig(
        manager_address="tcp://127.0.0.1:1234",
        model="some.gguf",
        name="engine-7",
        device="cuda:1",
        dtype="float16",
        dummy_weights=True,
        backend="torch",
        shared_prefix_attention=False,
        num_blocks=77,
        max_batch_size=5,
        max_batch_tokens=99,
        overlap=False,
        cuda_graphs=False,
        num_threads=3,
        parent_pid=4321,
    )
    argv = engine_argv(config)
    result = CliRunner().invoke(cli.app, argv[argv.index("parrot.cli.main") + 1 :])
    assert result.exit_code == 0, result.output
    assert engines == [config]


def test_an_error_is_one_line_with_the_fix_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call_main(monkeypatch, "serve", "--host", "0.0.0.0") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: host = '0.0.0.0' is reachable from other machines")
    assert "parrot key new TENANT --file FILE" in line
    assert "bind to 127.0.0.1" in line


@pytest.mark.parametrize("command", [["serve"], ["engine", "--manager", "tcp://127.0.0.1:1"]])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device", "tpu"], "device = 'tpu' is not cpu, cuda or cuda:N"),
        (["--device", "cuda:128"], "device = 'cuda:128' is not cpu, cuda or cuda:N"),
        (["--simulate", "/nonexistent"], "/nonexistent cannot be read (No such file or directory)"),
        (["--simulate", "/dev/null"], "/dev/null is not a cost model"),
    ],
)
def test_what_no_engine_could_start_with_is_refused_before_anything_starts(
    managers: list[tuple[ManagerConfig, dict[str, Any]]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    options: list[str],
    message: str,
) -> None:
    monkeypatch.setattr(parrot.engine.server, "run_engine", parrot.engine.server.load_engine)
    assert call_main(monkeypatch, *command, *options) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {message}")
    assert managers == []


def test_engines_without_a_name_do_not_take_each_others_place(engines: list[EngineConfig]) -> None:
    command = ["engine", "--manager", "tcp://127.0.0.1:1"]
    for options in ([], [], ["--name", "gpu-7"], ["--name", "gpu-7"]):
        assert CliRunner().invoke(cli.app, [*command, *options]).exit_code == 0
    first, second, *named = (engine.name for engine in engines)
    assert first != second
    assert {first.rpartition("-")[0], second.rpartition("-")[0]} == {socket.gethostname()}
    assert named == ["gpu-7", "gpu-7"]  # the later is a new life of the earlier


@pytest.mark.parametrize("pid", ["-4", "0"])
def test_a_parent_that_cannot_be_is_refused(
    engines: list[EngineConfig], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], pid: str
) -> None:
    assert call_main(monkeypatch, "engine", "--manager", "tcp://127.0.0.1:1", "--parent-pid", pid) == 2
    assert f"parent_pid = {pid} is outside" in capsys.readouterr().err
    assert engines == []


def test_an_unknown_model_is_one_line_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call_main(monkeypatch, "model", "path", "no-such-model") == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("error: there is no model 'no-such-model'")


def test_models_are_listed_with_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PARROT_CACHE", str(tmp_path))
    monkeypatch.setattr("parrot.models.packaged_models", lambda: {"here": True, "there": False})
    monkeypatch.setattr("parrot.models._converter_version", lambda: "now")
    whole, old, partial = (tmp_path / "models" / f"a-{name}" for name in ("1-now", "1-before", "2-now"))
    for directory in (whole, old, partial):
        directory.mkdir(parents=True)
        (directory / "config.json").write_text("{}")
        (directory / "tokenizer.json").write_text("{}")
    for directory in (whole, old):
        (directory / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    result = CliRunner().invoke(cli.app, ["model", "list"])
    assert result.output.splitlines() == [
        "here: installed",
        "there: not installed; parrot model install there",
        f"converted by another version, not used by this one, 0 MiB: {old}",
        f"converted, 0 MiB: {whole}",
    ]


def test_no_command_is_cut_off_in_the_list_on_a_narrow_terminal() -> None:
    shown = CliRunner().invoke(cli.app, ["--help"], env={"COLUMNS": "80"}).output
    assert "model    " in shown
    assert "..." not in shown.split("Commands:")[1]


def test_the_help_of_an_engine_begins_with_what_it_must_be_given() -> None:
    shown = CliRunner().invoke(cli.app, ["engine", "--help"], env={"COLUMNS": "80"}).output
    assert re.findall(r"^  (?:-\w, )?(--[a-z-]+)", shown, re.MULTILINE)[:2] == ["--manager", "--model"]


def test_the_version_is_printed() -> None:
    result = CliRunner().invoke(cli.app, ["--version"])
    assert (result.exit_code, result.output) == (0, f"parrot {parrot.__version__}\n")


def test_python_m_parrot_is_parrot() -> None:
    """Its errors too, which are made one line outside of the typer application."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "parrot", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert run("--version").stdout == f"parrot {parrot.__version__}\n"
    assert "Usage: python -m parrot serve" in run("serve", "--help").stdout
    failed = run("model", "path", "no-such-model")
    assert failed.returncode == 2
    assert failed.stderr.startswith("error: there is no model 'no-such-model'")


@pytest.mark.parametrize("command", [[], ["serve"], ["manager"], ["engine"], ["model"], ["model", "path"]])
def test_h_is_help_everywhere(command: list[str]) -> None:
    short, long = (CliRunner().invoke(cli.app, [*command, option]) for option in ("-h", "--help"))
    assert short.exit_code == 0
    assert "Usage:" in short.output
    assert short.output == long.output


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("optional", 0), ("broken", 1)])
def test_doctor_fails_only_if_something_needed_is_broken(
    monkeypatch: pytest.MonkeyPatch, status: str, code: int
) -> None:
    check = Check("thing", status, "as it is", "do this")  # type: ignore[arg-type]
    monkeypatch.setattr("parrot.cli.checks.run_checks", lambda _model, _port: [check])
    result = CliRunner().invoke(cli.app, ["doctor"])
    assert result.exit_code == code
    assert "do this" in result.output
    result = CliRunner().invoke(cli.app, ["doctor", "--json"])
    assert result.exit_code == code
    assert json.loads(result.output) == [
        {"name": "thing", "status": status, "detail": "as it is", "fix": "do this"}
    ]


def test_optimisations_are_switched_off_by_name(
    monkeypatch: pytest.MonkeyPatch, managers: list[tuple[ManagerConfig, dict[str, Any]]]
) -> None:
    names = ("--off", "graph_eviction", "--off", "prefix_affinity", "--max-queued-calls", "7")
    assert call_main(monkeypatch, "manager", *names) == 0
    config = managers[0][0]
    assert config.max_queued_calls == 7
    assert not config.graph_eviction
    assert config.scheduler == SchedulerConfig(prefix_affinity=False)
    assert call_main(monkeypatch, "serve") == 0
    assert managers[1][0] == ManagerConfig()


def test_an_unknown_switch_is_answered_with_those_there_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call_main(monkeypatch, "serve", "--off", "magic") != 0
    assert "--off magic is none of group_placement, prefix_affinity" in capsys.readouterr().err


def test_an_instruction_set_with_which_no_engine_could_start_is_refused_before_anything_listens(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    managers: list[tuple[ManagerConfig, dict[str, Any]]],
) -> None:
    def refuse() -> str:
        raise ValueError('PARROT_CPU_ISA = "foo" is none of scalar, avx2')

    monkeypatch.setattr("parrot.cpu_isa.cpu_isa", refuse)
    assert call_main(monkeypatch, "serve") == 2
    assert 'PARROT_CPU_ISA = "foo" is none of scalar, avx2; correct or unset it' in capsys.readouterr().err
    assert managers == []
    assert call_main(monkeypatch, "manager") == 0, "a manager computes nothing"


@pytest.mark.parametrize("command", ["serve", "manager", "engine"])
def test_help_on_a_narrow_terminal_has_every_option_in_full(command: str) -> None:
    shown = CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": "80"}).output
    assert "…" not in shown
    expected = {"serve": ("--no-shared-prefix-attention", "--published-templates", "--gpus")}
    for option in ("--stall-after-s", "--curve-keys", *expected.get(command, ())):
        assert option in shown


@pytest.mark.parametrize("command", ["serve", "manager", "engine"])
def test_help_has_every_option_under_the_heading_of_its_topic(command: str) -> None:
    shown = CliRunner().invoke(cli.app, [command, "--help"], env={"COLUMNS": "80"}).output
    sections = dict(re.findall(r"^(\S[^\n]*):\n((?: +[^\n]*\n)+)", shown, re.MULTILINE))
    assert list(sections) == [topic for topic in Topic if topic in sections]
    for option in typer.main.get_command(cli.app).commands[command].params:  # type: ignore
        assert option.rich_help_panel in list(Topic), option.name
        [section] = [name for name, text in sections.items() if re.search(rf"{option.opts[0]}\b(?!-)", text)]
        assert section == option.rich_help_panel
    assert "--help" in sections[Topic.PROCESS]


def test_an_option_of_several_commands_has_one_default_but_for_the_port_of_engines() -> None:
    def defaults(command: str) -> dict[str, object]:
        names = typer.main.get_command(cli.app).commands[command].params  # type: ignore
        return {one.name: one.default for one in names}

    serve, manager, engine = map(defaults, ("serve", "manager", "engine"))
    assert {name for name in serve.keys() & manager.keys() if serve[name] != manager[name]} == {"engine_port"}
    assert {name for name in serve.keys() & engine.keys() if serve[name] != engine[name]} == set()
    of_one_engine = {"manager", "name", "manager_timeout_s", "parent_pid", "write_cost"}
    assert serve.keys() == (manager.keys() | engine.keys() | {"engines", "gpus"}) - of_one_engine
