"""The command line: what it parses, prints and exits with. No server is needed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from pipeswitch import cli_infer
from pipeswitch import cli_views as views
from pipeswitch.cli import main
from pipeswitch.client import job_name
from pipeswitch.config import Config
from pipeswitch.controller.admission import parse_input
from pipeswitch.errors import InvalidInput

NOBODY = {"PIPESWITCH_HOST": "ipc:///nonexistent/pipeswitch.sock"}


def run(*args: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, list(args), env=env)
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize(
    "verb",
    ["serve", "register", "unregister", "models", "show", "load", "unload", "infer", "train",
     "jobs", "ps", "top", "trace", "demo", "doctor", "config", "stop", "completion", "stats"],
)  # fmt: skip
def test_every_verb_has_help(verb: str) -> None:
    status, text, _ = run(verb, "--help")
    assert status == 0
    assert text.startswith("Usage:")


@pytest.mark.parametrize("verb", ["ls", "show", "pause", "resume", "cancel", "wait", "logs"])
def test_every_job_verb_has_help(verb: str) -> None:
    assert run("jobs", verb, "--help")[0] == 0


def test_a_usage_error_exits_with_2() -> None:
    assert run("infer")[0] == 2
    assert run("infer", "m", "-n", "0", env=NOBODY)[0] == 2
    assert run("nonsense")[0] == 2
    assert run("infer", "m", "--random", "--input", "x.npy", env=NOBODY)[0] == 2


def test_a_wrong_setting_is_told_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text('[server]\nlisen = "x"\n')
    status, _, text = run("config", "check", str(tmp_path / "p.toml"))
    assert status == 2
    assert text.startswith("Error: ")
    assert 'did you mean "listen"?' in text
    assert "hint:  pipeswitch config init" in text


def test_config_init_writes_what_config_check_accepts(tmp_path: Path) -> None:
    path = tmp_path / "pipeswitch.toml"
    assert run("config", "init", str(path))[0] == 0
    assert run("config", "check", str(path)) == (0, "the configuration is good\n", "")
    assert run("config", "init", str(path))[0] == 1  # never overwritten


def test_config_schema_is_json() -> None:
    status, text, _ = run("config", "schema")
    assert status == 0
    assert json.loads(text)["title"] == "pipeswitch"


def test_doctor_prints_json_of_its_findings() -> None:
    _, text, _ = run("doctor", "--json")
    names = {finding["name"] for finding in json.loads(text)}
    assert {"torch", "memory", "memfd and seals", "memory copy"} <= names


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_the_program(shell: str) -> None:
    status, text, _ = run("completion", shell)
    assert status == 0
    assert "_PIPESWITCH_COMPLETE" in text


def test_version_is_one_line() -> None:
    status, text, _ = run("--version")
    assert status == 0
    assert text.startswith("pipeswitch ")


def test_the_command_line_never_imports_torch() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from pipeswitch.cli import main\n"
        "for verb in (['ps', '--help'], ['doctor'], ['config', 'schema']):\n"
        "    CliRunner().invoke(main, verb)\n"
        "import pipeswitch.client, pipeswitch.cli_infer, pipeswitch.doctor, pipeswitch.aio\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_inputs_are_read_with_and_without_a_name() -> None:
    assert parse_input("8x3x224x224:float32", 0) == ("x", [[8, 3, 224, 224], "float32"])
    assert parse_input("ids=1x128:int64", 1) == ("ids", [[1, 128], "int64"])
    assert parse_input("4", 2) == ("x2", [[4], "float32"])
    for wrong in ("8xx3", "a:float31", "x=-1:int8"):
        with pytest.raises(InvalidInput):
            parse_input(wrong)


def test_a_wrong_input_is_a_usage_error() -> None:
    assert run("register", "m", "torchvision:resnet18", "--input", "8xx3", env=NOBODY)[0] == 2


def test_rates_are_read() -> None:
    assert cli_infer.parse_rate("poisson:50") == ("poisson", 50.0)
    assert cli_infer.parse_rate("10") == ("constant", 10.0)
    for wrong in ("uniform:5", "poisson:", "0", "poisson:0"):
        with pytest.raises(InvalidInput):
            cli_infer.parse_rate(wrong)


def test_constant_arrivals_are_evenly_spaced_and_poisson_ones_keep_the_rate() -> None:
    assert list(cli_infer.instants("constant", 4.0, 3, seed=0)) == [0.0, 0.25, 0.5]
    *_, last_s = cli_infer.instants("poisson", 100.0, 10_000, seed=1)
    assert 95 < last_s < 105


@pytest.mark.parametrize(("fraction", "value"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_percentiles_are_values_that_occurred(fraction: float, value: int) -> None:
    assert views.percentile(range(1, 101), fraction) == value


@pytest.mark.parametrize(
    ("entry", "name"),
    [("/a/My Train.py", "my-train"), ("pkg.jobs:main", "jobs"), ("___.py", "job")],
)
def test_a_job_is_named_after_its_script(entry: str, name: str) -> None:
    assert job_name(entry) == name


def test_flags_reach_the_server_as_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Config] = []

    def serve(config: Config) -> int:
        started.append(config)
        return 0

    monkeypatch.setattr("pipeswitch.cli._part", lambda module, name: serve)
    flags = ["--listen", "tcp://127.0.0.1:6000", "--arena", "0.5", "--host-store", "1GiB",
             "--standby", "1", "--allow-code", "a.*", "--allow-code", "b.*"]  # fmt: skip
    assert run("serve", *flags)[0] == 0
    (config,) = started
    assert config.server.listen == "tcp://127.0.0.1:6000"
    assert config.server.allow_code == ("a.*", "b.*")
    assert config.device.arena.fraction == 0.5
    assert config.host.store.size_bytes == 1 << 30
    assert config.workers.standby == 1
