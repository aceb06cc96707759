"""Command line without a server: parsing, output and exit statuses."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import re
import shlex
import socket
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

from pipeswitch.base.config import Config
from pipeswitch.base.errors import ConfigError, InvalidInput, ServerUnavailable
from pipeswitch.base.extras import SCHEMES
from pipeswitch.base.model_options import parse_input
from pipeswitch.base.quantiles import percentile
from pipeswitch.cli import common, views
from pipeswitch.cli import infer as cli_infer
from pipeswitch.cli.main import GROUPS, main
from pipeswitch.client.client import job_name
from pipeswitch.client.connection import Connection
from pipeswitch.client.tensors import Signature
from pipeswitch.controller import main as controller
from pipeswitch.extras.page.browser import page_url
from pipeswitch.extras.text import chat as cli_chat
from pipeswitch.extras.text.chat import Chat
from pipeswitch.job import FIXED_VARIABLES
from pipeswitch.programs.interface.layout import ValueSpec
from pipeswitch.wire.addresses import default_address, is_refused

NOBODY = {"PIPESWITCH_HOST": "ipc:///nonexistent/pipeswitch.sock"}
COMMAND = [sys.executable, "-P", "-c", "from pipeswitch.cli.main import main; main()"]


def run(*args: str, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    result = CliRunner().invoke(main, list(args), env=env)
    return result.exit_code, result.stdout, result.stderr


VERBS = (
    "serve register unregister models show load unload infer train jobs ps top trace ui demo "
    "doctor config stop completion stats"
)


@pytest.mark.parametrize("verb", VERBS.split())
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
    assert run("register", "m", "x.pt2", "--part", "ema", env=NOBODY)[0] == 2
    assert run("infer", "m", "--random", "--input", "x.npy", env=NOBODY)[0] == 2


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("list",), "pipeswitch models"),
        (("pull", "llama3"), "pipeswitch run hf:"),
        (("rm", "m"), "pipeswitch unregister NAME"),
        (("models", "ls"), "pipeswitch models"),
        (("models", "rm", "m"), "pipeswitch unregister NAME"),
        (("jobs", "list"), "'ls'"),
    ],
)
def test_a_command_of_another_tool_is_refused_with_the_one_that_does_it(
    words: tuple[str, ...], told: str
) -> None:
    status, _, text = run(*words, env=NOBODY)
    assert (status, told in text) == (2, True), text


def test_commands_that_refusals_name_exist() -> None:
    for text in common.OF_OTHERS.values():
        for command in re.findall(r"pipeswitch( (?:jobs )?[a-z-]+)", text):
            assert run(*command.split(), *["--help"] * ("-" not in command))[0] == 0, command


def test_with_json_an_error_is_json_too() -> None:
    status, text, error_text = run("models", "--json", env=NOBODY)
    assert status == ServerUnavailable("").exit_code
    assert json.loads(text)["error"]["type"] == "ServerUnavailable"
    assert not error_text


def test_ctrl_c_keeps_the_bills_of_what_was_answered() -> None:
    class Interrupted:
        def submit(self, model: str, inputs: Any, **options: Any) -> Future[Any]:
            sent.append(model)
            if len(sent) == 3:
                raise KeyboardInterrupt
            future: Future[Any] = Future()
            future.set_result(SimpleNamespace(timing=None))
            return future

    for is_paced in (False, True):
        sent: list[str] = []
        client: Any = Interrupted()
        outcomes = cli_infer.run_requests(
            client, "m", None, [0.0] * 10, {}, lambda outcome: None, is_paced=is_paced
        )
        assert [outcome.number for outcome in outcomes] == [0, 1]


def test_a_wrong_setting_is_told_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text('[server]\nlisen = "x"\n')
    status, _, text = run("config", "check", str(tmp_path / "p.toml"))
    assert status == 2
    assert text.startswith("Error: ")
    assert 'did you mean "listen"?' in text
    assert "hint:  pipeswitch config init" in text
    (tmp_path / "p.toml").write_text("a = " + "[" * 100_000)
    assert run("config", "check", str(tmp_path / "p.toml"))[0] == 2


def test_serve_names_a_folder_of_models_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeswitch.cli.common.part", lambda *_: lambda _: 0)
    status, _, errors = run("serve", "--models", "/nowhere")
    assert (status, "no folder /nowhere yet" in errors) == (0, True)


def test_config_init_writes_what_config_check_accepts(tmp_path: Path) -> None:
    path = tmp_path / "pipeswitch.toml"
    assert run("config", "init", str(path))[0] == 0
    progress = "checking devices and sources …\n"
    assert run("config", "check", str(path)) == (0, "the configuration is valid\n", progress)
    assert run("config", "init", str(path))[0] == 1  # an existing file is never overwritten
    assert run("config", "init", "-") == run("config", "init") == (0, path.read_text(), "")


def test_config_schema_is_json() -> None:
    status, text, _ = run("config", "schema")
    assert status == 0
    assert json.loads(text)["title"] == "pipeswitch"


@pytest.mark.parametrize(("flags", "is_faster"), [("avx512f avx512_bf16", True), ("avx2", False)])
def test_doctor_recommends_bf16_where_the_processor_has_it(
    flags: str, is_faster: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeswitch.cli.doctor.processor_features", lambda: (f"flags\t: {flags}",))
    _, text, _ = run("doctor", "--no-serving", "--json")
    [row] = [row for row in json.loads(text) if row["name"] == "precision"]
    assert ("half of fast" in row["text"]) == is_faster


def test_doctor_prints_json_of_its_findings() -> None:
    _, text, _ = run("doctor", "--no-serving", "--json")
    names = {finding["name"] for finding in json.loads(text)}
    assert {"torch", "memory", "memfd seals", "memory copy"} <= names


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_name_the_program(shell: str) -> None:
    status, text, _ = run("completion", shell)
    assert status == 0
    assert "_PIPESWITCH_COMPLETE" in text


def test_version_is_one_line() -> None:
    status, text, _ = run("--version")
    assert status == 0
    assert text.startswith("pipeswitch ")


def test_the_command_line_never_imports_torch_and_numpy_for_tensors_alone() -> None:
    code = (
        "import sys; from click.testing import CliRunner; from pipeswitch.cli.main import main\n"
        "import pipeswitch.client.client, pipeswitch.client.aio\n"
        "assert 'numpy' not in sys.modules, 'numpy was imported'\n"
        "for verb in (['ps', '--help'], ['doctor', '--no-serving'], ['config', 'schema']):\n"
        "    CliRunner().invoke(main, verb)\n"
        "import pipeswitch.cli.infer, pipeswitch.cli.doctor\n"
        "assert 'torch' not in sys.modules, 'torch was imported'\n"
        "assert not any(name.startswith('pipeswitch.extras.lab.') for name in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_inputs_are_read_with_and_without_a_name() -> None:
    assert parse_input("8x3x224x224:float32", 0) == ("x", ((8, 3, 224, 224), "float32"))
    assert parse_input("ids=1x128:int64", 1) == ("ids", ((1, 128), "int64"))
    assert parse_input("4", 2) == ("x2", ((4,), "float32"))
    for wrong in ("8xx3", "a:float31", "x=-1:int8", "9" * 5000):
        with pytest.raises(ValueError, match="is not of the form"):
            parse_input(wrong)


def test_a_wrong_input_is_a_usage_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answering(monkeypatch)
    np.save(tmp_path / "array.npy", np.ones(3))
    (tmp_path / "empty.npz").touch()
    for path in tmp_path.iterdir():
        assert run("register", "m", "a.b:c", "--example", str(path))[0] == 2, path
    for step in ("²", "9" * 5000):
        assert run("register", "m", "--from-job", f"a@{step}", env=NOBODY)[0] == 2
    assert run("register", "m", "torchvision:resnet18", "--input", "8xx3", env=NOBODY)[0] == 2


def test_rates_are_read() -> None:
    assert cli_infer.parse_rate("poisson:50") == ("poisson", 50.0)
    assert cli_infer.parse_rate("10") == ("constant", 10.0)
    for wrong in ("uniform:5", "poisson:", "0", "poisson:0", "poisson:1.2.3", ".", ".0000000001"):
        with pytest.raises(InvalidInput):
            cli_infer.parse_rate(wrong)


def test_constant_arrivals_are_evenly_spaced_and_poisson_ones_keep_the_rate() -> None:
    assert list(cli_infer.instants("constant", 4.0, 3, seed=0)) == [0.0, 0.25, 0.5]
    *_, last_s = cli_infer.instants("poisson", 100.0, 10_000, seed=1)
    assert 95 < last_s < 105


@pytest.mark.parametrize(("fraction", "value"), [(0.5, 50), (0.99, 99), (1.0, 100), (0.001, 1)])
def test_percentiles_are_values_that_occurred(fraction: float, value: int) -> None:
    assert percentile(range(1, 101), fraction) == value


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

    monkeypatch.setattr("pipeswitch.cli.common.part", lambda module, name: serve)
    flags = (
        "--listen tcp://127.0.0.1:6000 --arena 0.5 --host-store 1GiB --standby 1 "
        "--allow-code a.* --allow-code b.*"
    )
    assert run("serve", *flags.split())[0] == 0
    (config,) = started
    assert config.server.listen == "tcp://127.0.0.1:6000"
    assert config.server.allow_code == ("a.*", "b.*")
    assert config.device.arena.fraction == 0.5
    assert config.host.store.size_bytes == 1 << 30
    assert config.workers.standby == 1


def test_an_address_to_listen_at_needs_no_scheme_and_a_wrong_flag_leads_to_the_help(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[Config] = []
    monkeypatch.setattr("pipeswitch.cli.common.part", lambda module, name: started.append)
    run("serve", "--listen", "0.0.0.0:6000")
    assert started[0].server.listen == "tcp://0.0.0.0:6000"
    status, text, error = run("serve", "--standby", "many")
    assert (status, "serve --help" in text + error) == (2, True)


def test_each_command_is_in_one_group_of_the_help() -> None:
    text = run("--help")[1]
    own = {line.split()[0] for line in text.splitlines() if re.match("  [a-z]", line)}
    grouped = [name for names in GROUPS.values() for name in names.split()]
    assert own >= {*main.list_commands(click.Context(main))} >= {*grouped}
    assert len(grouped) == len({*grouped})


MODEL = '[[model]]\nname = "m"\nsource = "{}"\nweights = "random:0"\n'


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MODEL.format("torchvision:resnet5"), 'did you mean "resnet50"'),
        (MODEL.format("hf:/nope"), "nothing at '/nope'"),
        (MODEL.format("hf:~nouser/x"), "nothing at '~nouser/x'"),
        ('[gateway]\ntokens = "~nouser/x"\n', "no user '~nouser' has a home"),
        (MODEL.format("torchvision:resnet18") + "generate = true\n", "needs a language model"),
        (MODEL.format("own_nowhere.made:model"), "no module 'own_nowhere.made'"),
        ("[device\n", "config init writes"),
        ('[gateway]\ntokens = "nowhere"\n', "nowhere: No such file"),
        ('[device]\nname = "cuda:7"\n', "[device]"),
        ("[device]\narena = 5\n", "write 5GiB or 5MiB"),
        ('[host]\nstore = "4096"\n', "write 4096GiB"),
    ],
)
def test_config_check_finds_what_is_known_without_a_build(
    tmp_path: Path, text: str, words: str
) -> None:
    path = tmp_path / "pipeswitch.toml"
    path.write_text(text)
    status, output, error = run("config", "check", str(path))
    assert (status, words in output + error) == (2, True), output + error
    path.write_text('[device]\nname = "cpu"\narena = "5MiB"\n')
    assert run("config", "check", str(path))[0] == 0


def test_of_two_servers_one_has_to_be_chosen(tmp_path: Path) -> None:
    folder = tmp_path / "pipeswitch"
    folder.mkdir(mode=0o700)
    with contextlib.ExitStack() as stack:
        for name in ("a", "b"):
            sock = stack.enter_context(socket.socket(socket.AF_UNIX))
            sock.bind(str(folder / f"{name}.sock"))
            sock.listen()
        with pytest.raises(ConfigError, match=r"2 servers run here: ipc:.*a\.sock, ipc:.*b\.sock"):
            default_address({"XDG_RUNTIME_DIR": str(tmp_path)})


def test_a_backup_is_that_of_the_server_that_is_addressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, about=lambda: {"state_dir": str(tmp_path / "theirs")})
    text = "".join(run("--host", "gpu1", "backup", str(tmp_path / "copy"))[1:])
    assert f"{tmp_path / 'theirs'} has no state" in text


class NobodysServer:
    """Client without a server, whose verbs give the answers that a test defines."""

    address = "ipc:///nowhere"

    def __init__(self, **answers: Any) -> None:
        self._answers = answers

    def __enter__(self) -> NobodysServer:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __getattr__(self, verb: str) -> Any:
        return self._answers[verb]


def answering(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
    """Connect every command of the test to a client with these answers."""
    monkeypatch.setattr("pipeswitch.client.client.Client", lambda **_: NobodysServer(**answers))
    monkeypatch.setattr("pipeswitch.cli.common.is_refused", lambda _: False)


@pytest.mark.parametrize(
    "args",
    [
        ("--rate", "poisson:1.2.3"),
        ("--rate", ""),
        ("--deadline", "50"),
        ("--deadline", ""),
        ("--output", "/nonexistent/y.npy"),
        ("--output", "y.txt"),
        ("--seed", "-1"),
    ],
)
def test_what_infer_cannot_use_is_a_usage_error_before_anything_is_sent(args: tuple[str]) -> None:
    assert run("infer", "m", *args, env=NOBODY)[0] == 2


def test_a_chat_refuses_what_is_no_url_and_no_token() -> None:
    urls = ("http://127.0.0.1:abc", "http://[::1", "127.0.0.1:9", "http://")
    for url, token in (*((url, "") for url in urls), ("http://127.0.0.1:9", "ключ")):
        with pytest.raises(ServerUnavailable if token else InvalidInput):
            next(Chat(url, token, "m", {}).say("Hi"))


def test_a_time_without_a_unit_is_never_guessed() -> None:
    status, _, text = run("stop", "--drain", "30", env=NOBODY)
    assert status == 2
    assert "30" in text
    assert "50ms or 5s" in text
    assert run("plan", "--deadline", "m=5q", env=NOBODY)[0] == 2


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.jpg", "x.png"])
def test_a_file_that_is_not_what_its_name_says_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(b"garbage")
    image = SimpleNamespace(shape=("batch", 3, 224, 224), dtype="float32")
    signature: Any = SimpleNamespace(inputs=[image], dims=(), batch_min=1)
    with pytest.raises(InvalidInput) as caught:
        cli_infer.load_inputs(str(path), signature, seed=0)
    assert "pickle" not in str(caught.value)


def test_objects_in_an_npz_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, x=np.array([{}], dtype=object))
    with pytest.raises(InvalidInput):
        cli_infer.load_inputs(str(path), SimpleNamespace(), seed=0)  # type: ignore[arg-type]


def test_where_a_model_takes_a_row_of_bytes_a_file_is_sent_as_it_is(tmp_path: Path) -> None:
    signature = Signature((ValueSpec(name="image", dtype="uint8", shape=("image.0",)),))
    photo, array = tmp_path / "photo.jpg", tmp_path / "x.npy"
    photo.write_bytes(b"no pixels")
    np.save(array, np.ones(3, np.uint8))
    assert bytes(cli_infer.load_inputs(str(photo), signature, seed=0)) == b"no pixels"
    assert bytes(cli_infer.load_inputs(str(array), signature, seed=0)) == b"\1\1\1"


def test_an_answer_after_its_deadline_is_told_to_be_late() -> None:
    outcome = cli_infer.RequestOutcome(0, deadline_ms=50.0)
    outcome.result, outcome.total_ms = (
        SimpleNamespace(timing=SimpleNamespace(as_dict=dict), outputs={}),
        60.0,
    )  # type: ignore[assignment]
    assert outcome.row()["late"] is True
    outcome.total_ms = 40.0
    assert outcome.row()["late"] is False
    assert "late" not in cli_infer.RequestOutcome(0).row()


def test_several_outputs_are_saved_under_the_name_that_is_told(tmp_path: Path) -> None:
    from pipeswitch.cli.infer import _save

    two = {"a": np.zeros(1), "b": np.ones(2)}
    written = _save(str(tmp_path / "y.npy"), two)
    assert written == str(tmp_path / "y.npz")
    assert sorted(np.load(written)) == ["a", "b"]


@pytest.mark.parametrize(
    "args", [("trace", "/nonexistent/o.json"), ("config", "init", "/nonexistent/p.toml")]
)
def test_a_file_that_cannot_be_written_is_told_without_a_traceback(
    args: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, trace=lambda seconds: {"traceEvents": []})
    status, _, text = run(*args)
    assert (status, text) == (1, f"Error: {args[-1]}: No such file or directory\n")


@pytest.mark.parametrize(
    ("path", "text_expected"),
    [("p.foo", "the name ends in .avif"), ("/no/p", "/no/p.png: not a writable folder")],
)
def test_a_plot_that_cannot_be_written_is_told_before_the_server_is_asked(
    path: str, text_expected: str
) -> None:
    status, _, text = run("jobs", "show", "x", "--plot", path)
    assert (status, text_expected in text) == (1, True), text


def test_a_full_disk_is_told_and_other_faults_keep_their_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail_with(number: int) -> Any:
        def stats() -> None:
            raise OSError(number, os.strerror(number))

        return stats

    answering(monkeypatch, stats=fail_with(errno.ENOSPC))
    assert run("stats")[::2] == (1, "Error: No space left on device\n")
    answering(monkeypatch, stats=fail_with(errno.EBADF))
    assert isinstance(CliRunner().invoke(main, ["stats"]).exception, OSError)


def test_marks_that_a_terminal_does_not_know_do_not_end_a_command() -> None:
    done = subprocess.run(
        [*COMMAND, "config", "init"],
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": "latin-1"},
    )
    assert done.returncode == 0, done.stderr
    assert b"torchvision:?" in done.stdout  # "?" replaces the ellipsis, which latin-1 lacks


@pytest.mark.parametrize(
    ("named", "address"),
    [
        ("gpu1", "tcp://gpu1:5555"),
        ("127.0.0.1:6000", "tcp://127.0.0.1:6000"),
        ("tcp://gpu1", "tcp://gpu1:5555"),
        ("[::1]:6000", "tcp://[::1]:6000"),
        ("[::1]", "tcp://[::1]:5555"),
        ("::1", "tcp://[::1]:5555"),
        ("ipc:///run/a.sock", "ipc:///run/a.sock"),
    ],
)
def test_host_takes_what_pipeswitch_host_takes(
    named: str, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    addresses = []

    def client(**options: Any) -> NobodysServer:
        addresses.append(options["address"])
        return NobodysServer(stats=dict)

    monkeypatch.setattr("pipeswitch.client.client.Client", client)
    monkeypatch.setattr("pipeswitch.cli.common.is_refused", lambda _: False)
    assert run("--host", named, "stats")[0] == 0
    assert addresses == [address]
    assert default_address({"PIPESWITCH_HOST": named}) == address


@pytest.mark.parametrize("make", ["open", "link"])
def test_a_socket_in_a_folder_that_others_may_write_is_no_server(tmp_path: Path, make: str) -> None:
    """Another user, who created the folder first, could listen there and get models and scripts."""
    folder = tmp_path / "pipeswitch"
    if make == "open":
        folder.mkdir()
        folder.chmod(0o777)
    else:
        (tmp_path / "theirs").mkdir(mode=0o700)
        folder.symlink_to(tmp_path / "theirs")
    environ = {"XDG_RUNTIME_DIR": str(tmp_path)}
    with pytest.raises(ConfigError, match="must be a folder") as caught:
        default_address(environ)
    assert "PIPESWITCH_HOST" in caught.value.hint
    assert default_address({**environ, "PIPESWITCH_HOST": "gpu1"}) == "tcp://gpu1:5555"


def test_show_begins_with_the_models_name(monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"name": "m", "state": "ready", "profile": {"layers": 200 * [1]}}
    answering(monkeypatch, show=lambda name, version: row)
    lines = [line.split()[0] for line in run("show", "m")[1].splitlines() if line[0] != " "]
    assert lines == ["name", "state", "profile"]
    assert list(json.loads(run("show", "m", "--json")[1])) == list(row)


def test_profile_all_measures_what_is_ready_and_goes_on_behind_one_that_cannot_be(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = []

    def profile(name: str, batches: tuple[int, ...], progress: Any) -> dict[str, Any]:
        names.append(name)
        if name == "b":
            raise InvalidInput("b has no layers")
        return {"model": name}

    rows = [{"name": name, "state": "ready"} for name in "abc"] + [{"name": "d", "state": "failed"}]
    answering(monkeypatch, profile=profile, models=lambda: rows)
    status, text, err = run("profile", "--all", "--json")
    assert (status, names) == (InvalidInput("").exit_code, ["a", "b", "c"])
    assert json.loads(text) == [{"model": "a"}, {"model": "c"}]
    assert err == "b: b has no layers\n"
    assert json.loads(run("profile", "c", "--json")[1]) == {"model": "c"}
    assert run("profile", "b", "--json")[0] == InvalidInput("").exit_code
    assert run("profile", "a", "--all")[0] == run("profile")[0] == 2


@pytest.mark.parametrize("count", [1, 2])
def test_a_request_that_fails_is_told_once(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def submit(model: str, inputs: Any, **options: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(InvalidInput("there is no such version"))
        return future

    signature = SimpleNamespace(random=lambda seed: None)
    answering(monkeypatch, signature=lambda name: signature, submit=submit)
    status, text, err = run("infer", "m", "-n", str(count))
    assert status == InvalidInput("").exit_code
    assert (text + err).count("there is no such version") == count


def test_ping_waits_for_a_server_that_is_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: list[Any] = [
        ServerUnavailable("nobody"),
        {"ready": False, "why": "starting its processes", "total_ms": 1.0},
        {"ready": True, "why": "", "total_ms": 1.0},
    ]

    def ping(deep: bool) -> Any:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr("pipeswitch.cli.server.PING_AGAIN_S", 0.0)
    answering(monkeypatch, ping=ping)
    assert run("ping", "--wait", "1m")[:2] == (0, "ready 1.0 ms\n")
    assert not answers


def test_ping_does_not_wait_unless_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = []

    def ping(deep: bool) -> Any:
        waits.append(deep)
        raise ServerUnavailable("nobody")

    answering(monkeypatch, ping=ping)
    assert run("ping")[0] == 3
    assert waits == [False]


def test_stop_is_over_when_the_server_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    server = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert server.stdin is not None
    monkeypatch.setattr("pipeswitch.cli.server.EXIT_WAIT_S", 0.0)
    answering(monkeypatch, about=lambda: {"pid": server.pid}, stop_server=lambda drain_s: None)
    status, _, text = run("stop")
    assert status == 1
    assert "still runs" in text
    monkeypatch.setattr("pipeswitch.cli.server.EXIT_WAIT_S", 30.0)
    answering(
        monkeypatch,
        about=lambda: {"pid": server.pid},
        stop_server=lambda drain_s: [*filter(None, server.communicate(b"\n"))],
    )
    assert run("stop")[:2] == (0, f"server {server.pid} stopped\n")


def test_stop_fails_and_names_the_steps_that_were_not_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loss = 'job "j" loses steps 4 to 9 (commit not on disk: No space left on device)'
    facts = {"pid": os.getpid()}
    monkeypatch.setattr("pipeswitch.cli.server._exit_watcher", lambda pid, stack: None)
    answering(monkeypatch, about=lambda: facts, stop_server=lambda drain_s: [loss])
    status, _, text = run("stop")
    assert status == 1
    assert loss in text


def test_a_pt2_file_that_is_none_is_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse = (
        "import sys; from pipeswitch.base.errors import RegistrationRefused; "
        "raise RegistrationRefused(sys.argv[1], 'torch.export.load: it is not a zip file')"
    )
    monkeypatch.setattr("pipeswitch.cli.models.CONVERT", refuse)  # raises convert's error
    path = tmp_path / "x.pt2"
    path.write_text("garbage")
    status, _, text = run("register", "m", str(path), env=NOBODY)
    assert (status, text) == (1, f"Error: {path}: torch.export.load: it is not a zip file\n")


def test_the_folder_of_a_clients_keys_is_made(tmp_path: Path) -> None:
    out = tmp_path / "for" / "eve"
    assert run("keys", "--keys-dir", str(tmp_path / "k"), "pair", "eve", "--out", str(out))[0] == 0
    assert (out / "eve.key_secret").is_file()
    assert out.stat().st_mode & 0o777 == 0o700
    status, _, text = run("keys", "--keys-dir", "/proc/k", "pair", "eve", "--out", "/proc/eve")
    assert (status, text) == (1, "Error: /proc/eve: No such file or directory\n")


def test_the_line_that_admits_a_client_works_for_a_key_that_begins_with_a_dash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "-h" + 38 * "a"
    monkeypatch.setattr(
        "pipeswitch.extras.curve.command.make_pair",
        lambda name, out: (out / "eve.key_secret", key.encode()),
    )
    _, text, _ = run("keys", "--keys-dir", str(tmp_path), "pair", "eve", "--out", str(tmp_path))
    _, verb, *words = shlex.split(text.splitlines()[1])
    assert run(verb, "--keys-dir", str(tmp_path), *words)[:2] == (0, "eve is admitted with infer\n")
    assert key in run("keys", "--keys-dir", str(tmp_path), "ls")[1]


def test_a_state_directory_on_a_full_disk_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(descriptor: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", pwrite)
    with (
        pytest.raises(ConfigError, match=f"{tmp_path}: No space left"),
        controller._locked(tmp_path),
    ):
        pass


def test_an_address_where_nothing_listens_is_told_at_once_from_one_that_is_busy(
    tmp_path: Path,
) -> None:
    assert is_refused(f"ipc://{tmp_path / 'none.sock'}")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "a.sock"))
        assert is_refused(f"ipc://{tmp_path / 'a.sock'}")  # a dead server's socket has no listener
        listener.listen()
        assert not is_refused(f"ipc://{tmp_path / 'a.sock'}")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
        assert is_refused(address)
        listener.listen()
        assert not is_refused(address)


def test_a_name_that_no_machine_has_and_what_is_no_address_are_refused_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown(*_: Any, **__: Any) -> Any:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "create_connection", unknown)
    monkeypatch.setattr(Connection, "call", lambda *_, **__: pytest.fail("it waited"))
    code, _, err = run("--host", "nonsense", "ps")
    assert (code, err.count("Error")) == (2, 1)
    assert "there is no machine 'nonsense'" in err
    for bad in (":", "tcp://", "http://gpu1", "gpu1:99999", "gpu1:x", "tcp://a b:1", "ipc://"):
        code, _, err = run("--host", bad, "ps")
        assert all(f"{scheme}://HOST:PORT" in err for scheme in ("tcp", *SCHEMES.names()))
        assert (code, f"{bad!r} is not an address" in err, "HOST:PORT" in err) == (2, True, True), (
            err
        )
    monkeypatch.undo()
    assert run("--host", "gpu1..local", "ps")[0] == 2


def test_a_verb_does_not_wait_for_a_server_that_is_not_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Connection, "call", lambda *_, **__: pytest.fail("it waited"))
    for verb in (["ps"], ["models"], ["stop"], ["infer", "x"], ["ping"]):
        code, _, err = run(*verb, env=NOBODY)
        assert code == 3
        assert "pipeswitch serve" in err
    monkeypatch.setattr("pipeswitch.cli.common.is_refused", lambda address: True)
    for port, options in (("", ""), (":6000", " --listen tcp://127.0.0.1:6000")):
        _, _, err = run("--host", f"127.0.0.1{port}", "ps")
        assert err.endswith(f"hint:  start one: pipeswitch serve{options}\n")


def about_page(folder: Path) -> dict[str, Any]:
    token = folder / "owner.token"
    token.write_text("s3cret-of-the-owner\n")
    return {"is_owner": True, "http": "http://127.0.0.1:8000", "token_file": str(token)}


def test_ui_tells_a_browser_of_a_file_that_only_its_owner_can_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    opened: list[str] = []
    monkeypatch.setattr("webbrowser.open", lambda url: opened.append(url) or True)
    answering(monkeypatch, about=lambda: about_page(tmp_path))
    assert run("ui") == (0, "opened http://127.0.0.1:8000/ui\n", "")
    assert run("ui")[0] == 0  # overwrites the earlier file
    path = tmp_path / "ui.html"
    assert opened == [path.as_uri()] * 2
    assert path.stat().st_mode & 0o777 == 0o600
    assert "url=http://127.0.0.1:8000/ui#token=s3cret-of-the-owner" in path.read_text()


def test_ui_prints_the_address_where_there_is_no_browser(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("webbrowser.open", lambda url: False)
    answering(monkeypatch, about=lambda: about_page(tmp_path))
    for args in (("ui",), ("ui", "--no-open")):
        assert run(*args)[:2] == (0, "http://127.0.0.1:8000/ui#token=s3cret-of-the-owner\n")
    for every in ("0.0.0.0", "[::]"):  # addresses that a browser cannot open
        about = about_page(tmp_path) | {"http": f"http://{every}:8000"}
        assert page_url(about).startswith("http://localhost:8000/ui#")


def test_ui_says_what_to_type_to_a_stranger_and_where_there_is_no_page(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    about = about_page(tmp_path)
    for change, words in (
        ({"is_owner": False}, "without --host: pipeswitch ui"),
        ({"token_file": str(tmp_path / "gone")}, "No such file"),
    ):
        answering(monkeypatch, about=lambda change=change: {**about, **change})
        status, _, text = run("ui")
        assert (status != 0, words in text) == (True, True)
    about.pop("http")
    answering(monkeypatch, about=lambda: about)
    assert "serve --http" in run("ui")[2]


def headers_of(listing: views.Listing, width: int = 240) -> list[str]:
    return [str(column.header) for column in listing.fitted(width)[0].columns]


def test_tables_have_a_column_for_the_device_where_there_are_several() -> None:
    row = {"name": "m", "kind": "model", "state": "resident", "worker": None}
    assert "ON" not in headers_of(views.ps_table([row]))
    headers = headers_of(views.ps_table([{**row, "on": "cpu:1"}]))
    assert headers[:6] == ["MODEL/JOB", "KIND", "STATE", "WORKER", "ON", "DEVICE"]
    rows = [{"name": "m", "on": ["cpu:0", "cpu:1"]}, {"name": "n", "on": []}]
    view, _ = views.Listing(rows, views.MODEL_COLUMNS).fitted(240)
    (on,) = (one for one in view.columns if one.header == "ON")
    assert list(map(str, on.cells)) == ["cpu:0, cpu:1", ""]


def test_a_role_that_sees_some_facts_only_gets_no_empty_columns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = {"name": "m", "state": "ready", "version": 1, "inputs": []}
    whole = dict.fromkeys(views.MODEL_COLUMNS, "")

    def titles(*rows: dict[str, Any], words: tuple[str, ...] = ()) -> list[str]:
        answering(monkeypatch, models=lambda versions: list(rows))
        return run("models", *words)[1].splitlines()[0].split()

    assert titles(row) == ["NAME", "STATE"]
    assert titles(row, words=("--versions",)) == ["NAME", "VERSION", "STATE"]
    assert titles(row, whole) == [one.upper() for one in views.MODEL_COLUMNS]
    assert titles()[-1] == "SOURCE"
    assert titles({**whole, "reason": "no such class"})[-1] == "REASON"


def test_a_failed_job_has_its_cause_and_what_to_type() -> None:
    from pipeswitch.cli.jobs import _why

    row = {"name": "net", "state": "failed", "error": "ValueError: no\nmore lines", "why": "x"}
    assert _why(row) == "ValueError: no (pipeswitch jobs logs net)"
    assert _why({**row, "error": "", "state": "paused"}) == "x"


def test_top_shows_what_jobs_hold_and_what_streams() -> None:
    large = {"name": "large", "kind": "model", "device": 0, "streamed_bytes": 120 << 20}
    job = {
        "name": "j",
        "kind": "job",
        "device": 8 << 20,
        "host": 5 << 20,
        "activation_bytes": 4 << 20,
        "offloaded_bytes": 3 << 20,
    }
    stats = {
        "arena_capacity_bytes": 40 << 20,
        "arena_free_bytes": 30 << 20,
        "store_capacity_bytes": 64 << 20,
        "store_offloaded_bytes": 3 << 20,
        "pool_capacity_bytes": 9 << 20,
        "last_error": {"model": "a", "error": "QueueFull: no\nroom"},
    }
    anyone = {"name": "*", "kind": "tenant", "device": 0}
    large |= {"tokens": 70, "sequences": 2, "sequence_bytes": 2 << 20, "spare_bytes": 1 << 20}
    anew = {"name": "anew", "kind": "model", "device": 0, "tokens": 3}
    views.add_rates([large, anew, job], {"large": 20, "anew": 100}, 4.0)
    assert (large["tokens_per_s"], anew["tokens_per_s"]) == (12.5, 0.0)
    console = Console(width=200, file=io.StringIO())
    console.print(views.dashboard({}, [large, job, anyone], stats))
    output = console.file.getvalue()
    assert "10.0 MiB of 40.0 MiB, 8.00 MiB of jobs" in output
    assert "64.0 MiB of 64.0 MiB, 3.00 MiB offloaded" in output
    assert "tokens/s 12.5" in output
    assert "last error  a: QueueFull: no" in output
    assert "callers without a key or token" in output
    assert "9.00 MiB of 9.00 MiB, 3.00 MiB of sequences" in output
    titles = "DEVICE ACTIVATIONS HOST OFFLOADED STREAMED SEQUENCES TOKENS TOKENS/S KEPT PRIO"
    assert [one for one in output.split() if one in titles.split()] == titles.split()
    assert output.split("\nj ")[1].split()[:6] == ["job", "8.00", "MiB", "4.00", "MiB", "5.00"]


def test_streams_that_the_caller_closed_are_no_place_for_the_next_file(tmp_path: Path) -> None:
    """If 0, 1 or 2 stayed closed, the next file would get it, and prints would go there."""
    code = (
        "import os, sys\n"
        "from pipeswitch.cli.main import Cli\n"
        "from pipeswitch.cli.views import console\n"
        "try: Cli().main(['--help'])\n"
        "except SystemExit: pass\n"
        "console().print('a table'); print('said', file=sys.stderr)\n"
        "found = [os.readlink(f'/proc/self/fd/{n}') for n in range(3)]\n"
        "open(sys.argv[1], 'w').write(' '.join(found))"
    )
    report = tmp_path / "found"
    script = 'exec "$0" -P -c "$1" "$2" <&- >&- 2>&-'
    subprocess.run(["sh", "-c", script, sys.executable, code, report], check=True)
    assert report.read_text() == "/dev/null /dev/null /dev/null"


LONG = "a-model-of-" + 40 * "x" + "-v12345"


def narrow(shown: Any, width: int = 80, height: int = 25) -> list[str]:
    """Return the lines that a view has on a screen of this size."""
    console = Console(width=width, height=height, file=io.StringIO())
    console.print(shown)
    return str(console.file.getvalue()).splitlines()


def ps_rows(count: int) -> list[dict[str, Any]]:
    rows = [
        {
            "name": f"{LONG}{n}",
            "kind": "model",
            "state": "host",
            "host": 9,
            "prio": "normal",
            "last_used": 5.0,
        }
        for n in range(count)
    ]
    return [
        *rows,
        {"name": "late", "kind": "model", "state": "resident"},
        {"name": "over", "kind": "job", "state": "done"},
        {"name": "train", "kind": "job", "state": "active", "why": "word " * 9},
        {"name": "worker-0", "kind": "worker", "state": "active"},
    ]


def test_a_narrow_screen_shortens_names_in_the_middle_and_names_the_columns_it_lacks() -> None:
    lines = narrow(views.ps_table(ps_rows(2)))
    assert max(map(len, lines)) <= 80
    shown = [line.split()[0] for line in lines if not line.startswith(" ")]
    names = [name.partition("…") for name in shown if "…" in name]
    assert [(LONG.startswith(head), tail[-7:]) for head, _, tail in names] == [
        (True, "v123450"),
        (True, "v123451"),
    ]
    assert lines[-1].startswith("not shown: ")
    assert not [line for line in narrow(views.ps_table(ps_rows(2)), 240) if "…" in line]


def test_jobs_stand_before_models_and_what_runs_before_what_is_idle() -> None:
    names = [line.split()[0] for line in narrow(views.ps_table(ps_rows(1)), 240)]
    assert names[1:] == ["train", "over", "late", f"{LONG}0", "worker-0"]


@pytest.mark.parametrize("columns", [views.PS_COLUMNS, views.MODEL_COLUMNS, views.JOB_COLUMNS])
@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_table_is_cut_without_a_sign(columns: tuple[str, ...], width: int) -> None:
    row = {
        one: 12345678 if one.endswith(("bytes", "step", "_s", "s")) else "words" for one in columns
    }
    row |= {"name": LONG, "state": "suspended", "device": 0, "last_used": 3.0, "why": "w " * 60}
    table, dropped = views.Listing([row], columns).fitted(width)
    assert len(table.columns) + len(dropped) == len(columns)
    text = narrow(views.Listing([row], columns), width)
    assert max(map(len, text)) <= width
    assert any("suspended" in line for line in text)
    assert bool(dropped) == ("not shown" in " ".join(text))


def test_a_job_says_why_on_eighty_columns() -> None:
    row = dict.fromkeys(views.JOB_COLUMNS, 0) | {"name": LONG, "state": "failed"}
    text = " ".join(narrow(views.Listing([row | {"why": "no space left"}], views.JOB_COLUMNS)))
    assert "no space left" in text


def test_a_record_shows_sizes_shapes_and_ranges_and_leaves_out_what_is_empty() -> None:
    row = {
        "name": "m",
        "notes": [],
        "reason": "",
        "bytes": 1 << 20,
        "intermediate_bytes": 2 << 20,
        "inputs": {"x": [["batch", 3], "float32"], "y": [[], "int64"]},
        "batch": [1, 64],
        "dims": {"batch": [1, 64]},
        "device_s": {"infer": 0.123456},
        "plan": None,
        "memory": {"free_bytes": 3 << 20, "min_bytes": None},
    }
    lines = [line.split(maxsplit=1) for line in narrow(views.details(row))]
    assert [(key, value.strip()) for key, value in lines[:3]] == [
        ("name", "m"),
        ("bytes", "1.00 MiB"),
        ("intermediate", "2.00 MiB"),
    ]
    text = "\n".join(" ".join(line.split()) for line in narrow(views.details(row)))
    for part in (
        "inputs x [batch, 3] float32; y [] int64",
        "batch 1 to 64",
        "dims batch 1 to 64",
        "device s infer 0.12",
        "memory free_bytes 3.00 MiB",
    ):
        assert part in text
    assert len(lines) == 8


def test_top_scrolls_to_its_last_line_and_back() -> None:
    screen = views.Scrolled()
    screen.inner = views.ps_table(ps_rows(40))
    first = narrow(screen)
    assert len(first) == 24
    assert "late" not in first[-2]
    assert first[-1].startswith("lines 1 to 23 of ")
    for keys in (b"\x1b[6~", b"\x1b[6~", b"jjj", b"\x1b[B"):
        screen.press(keys)
        narrow(screen)
    last = narrow(screen)
    assert "not shown" in last[-2]
    for keys in (b"\x1b[5~", b"\x1b[5~", b"k", b"\x1b[A"):
        screen.press(keys)
    assert narrow(screen) == first
    with pytest.raises(KeyboardInterrupt):
        screen.press(b"q")
    screen.inner = views.ps_table(ps_rows(1))
    assert "lines" not in narrow(screen)[-1], "it is whole"


def test_options_behind_the_script_are_refused_unless_they_follow_two_dashes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[Any] = []

    def train(entry: str, **options: Any) -> Job:
        if entry == "absent.py":
            raise InvalidInput("no such script")
        sent.append((entry, options["args"]))
        return Job()

    answering(monkeypatch, train=train)
    for words in (["t.py", "--pririty", "low"], ["t.py", "5", "-x"], ["--lr", "1", "t.py"]):
        status, _, text = run("train", *words)
        assert (status, "follow --" in text) == (2, True), text
    assert run("train", "t.py", "5", "--priority", "low")[0] == 0
    assert run("train", "t.py", "--", "--priority", "low", "-5")[0] == 0
    assert sent == [("t.py", ("5",)), ("t.py", ("--priority", "low", "-5"))]
    status, text, _ = run("train", "--share", "g", "t.py", "absent.py")
    assert (status, text[:15]) == (1, "job t submitted")  # also a group that is not complete


def test_train_passes_the_variables_that_are_named_by_the_command_or_the_script(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    sent: list[dict[str, str]] = []

    def train(entry: str, *, env: dict[str, str], **options: Any) -> Job:
        sent.append(env)
        return Job()

    answering(monkeypatch, train=train)
    texts = ["MY_SCALE", "PATH", "HOME", "LD_LIBRARY_PATH", "PIPESWITCH_HOST", "ABSENT"]
    script = tmp_path / "t.py"
    script.write_text(f"import os\nnames = [os.environ.get(one) for one in {texts!r}]\n3, b'', ...")
    ours = {"MY_SCALE": "secret", "LD_LIBRARY_PATH": "/x", "OTHER": "o"}
    status, _, text = run("train", str(script), "--env", "OTHER", "--env", "NEW=1=2", env=ours)
    not_passed = "not passed, set for pipeswitch serve: LD_LIBRARY_PATH\n"
    assert (status, text) == (0, f"{not_passed}variables: MY_SCALE, NEW, OTHER\n")
    assert sent == [{"MY_SCALE": "secret", "OTHER": "o", "NEW": "1=2"}]
    assert "secret" not in text
    assert run("train", str(script), "--env", "ABSENT", env=ours)[0] == InvalidInput.exit_code
    assert run("train", "package.module:main", env=ours)[::2] == (0, "")
    assert run("train", str(tmp_path / "missing.py"), env=ours)[::2] == (0, "")
    assert sent[1:] == [{}, {}]


@pytest.mark.parametrize(
    ("words", "texts"),
    [
        (["LD_A", "OMP_B=1", "C=1"], ["--env LD_A, OMP_B: ", "pipeswitch serve"]),
        (["=1"], ["NAME=VALUE"]),
        ([""], ["NAME=VALUE"]),
        (["1ABSENT"], ["--env 1ABSENT=VALUE"]),  # the server takes this name
    ],
)
def test_a_refused_variable_is_named_with_the_rule(
    words: list[str], texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, train=lambda *_, **__: Job())
    options = [part for word in words for part in ("--env", word)]
    status, _, text = run("train", "package.module:main", *options)
    assert (status, [one for one in texts if one not in text]) == (InvalidInput.exit_code, [])
    assert "LD_A=VALUE" not in text


def test_the_guide_lists_the_refused_variables() -> None:
    guide = (Path(__file__).parents[2] / "docs/guide/jobs.md").read_text("utf-8")
    assert [one for one in FIXED_VARIABLES if f"`{one}…`" not in guide] == []


class Job:
    """Job that never ends."""

    name = "t"

    def wait(self, timeout_s: float) -> None:
        raise TimeoutError


@pytest.mark.parametrize("group", ["", "models", "jobs", "keys", "config", "cluster"])
def test_help_lists_each_command_with_a_whole_sentence(group: str) -> None:
    context = click.Context(main)
    command = main.get_command(context, group) if group else main
    assert isinstance(command, click.Group)
    listed = " ".join(run(*group.split(), "--help", env={"COLUMNS": "80"})[1].split())
    assert "..." not in listed.partition("Commands:")[2]
    for name in command.list_commands(context):
        subcommand = command.get_command(context, name)
        assert subcommand is not None
        assert subcommand.get_short_help_str(limit=1000) in listed


def test_a_watched_table_in_a_pipe_is_printed_again_and_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(views, "REFRESH_S", 0.0)
    looks = iter(["one", "two"])
    with pytest.raises(StopIteration):
        views.show(lambda: next(looks), watch=True)
    assert capsys.readouterr().out == "one\ntwo\n"


def test_a_misspelt_model_of_torchvision_is_named_without_a_server() -> None:
    status, _, text = run("register", "m", "torchvision:resnet51", env=NOBODY)
    assert (status, 'did you mean "resnet50"' in text) == (1, True), text
    assert "no server answers" in run("register", "m", "torchvision:resnet50", env=NOBODY)[2]


def test_top_in_a_pipe_is_one_look(monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([{"up_s": 1.0, "latency": {"a": {"p50_ms": 1.5, "p99_ms": 72.5}}}])
    row = {"name": "a", "kind": "model", "state": "host", "device": 0}
    answering(monkeypatch, about=dict, ps=lambda: [row], stats=lambda: next(looks))
    status, text, _ = run("top")
    assert (status, text.startswith("pipeswitch pid")) == (0, True)
    assert text.split()[-2:] == ["1.50", "72.5"]


@pytest.mark.parametrize("args", [("trace", "t.png"), ("jobs", "export", "digits", "out.json")])
def test_a_file_keeps_no_name_of_another_format(args: tuple[str, ...]) -> None:
    status, _, text = run(*args, env=NOBODY)
    assert (status, f"Error: {args[-1]}: the name ends in ." in text) == (1, True), text


def test_a_file_without_a_suffix_gets_that_of_its_format(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answering(monkeypatch, trace=lambda seconds: {"traceEvents": []})
    assert f"wrote {tmp_path}/t.json" in run("trace", str(tmp_path / "t"))[1]
    assert json.loads((tmp_path / "t.json").read_text()) == {"traceEvents": []}
    assert common.suffixed("o", ".safetensors") == "o.safetensors"
    for path in ("a.JSON", "/dev/stdout"):
        assert common.suffixed(path, ".json") == path


def test_an_unknown_command_of_a_chat_is_not_sent_to_the_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Talk(Chat):
        def say(self, text: str) -> Any:
            yield f"[{text}]"

    texts = iter(["/set x", "/", "/usr/bin is what?", None])
    monkeypatch.setattr(cli_chat, "_message", lambda: next(texts))
    cli_chat._converse(Talk("http://h", "", "m", {}), "m")
    shown, refused = capsys.readouterr()
    assert "[/usr/bin is what?]" in shown
    assert "[/set" not in shown
    assert refused.count("/clear ") == 2  # the list of commands
    assert refused.startswith("unknown command /set\n")


@pytest.mark.parametrize("args", ["ping --host h", "run m --host=h", "jobs ls --server-key k"])
def test_an_option_of_the_client_that_follows_the_command_is_told_its_place(args: str) -> None:
    status, _, text = run(*args.split(), env=NOBODY)
    verb, _, option = args.partition(" --")
    option = re.split("[ =]", option)[0]
    place = f"pipeswitch --{option} ... {verb.removesuffix(' m')}"
    assert (status, place in text, "Did you mean" in text) == (2, True, False), text
