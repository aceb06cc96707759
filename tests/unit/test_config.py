"""Settings: what is read, what wins, and that all errors come at once."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from pipeswitch.config import (
    Amount,
    Config,
    SchedulerConfig,
    ServerConfig,
    example,
    format_bytes,
    load,
    parse,
    parse_ms,
    parse_size,
    schema,
)
from pipeswitch.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("512MiB", 512 << 20),
        ("20GiB", 20 << 30),
        ("1.5 GiB", 3 << 29),
        ("1GB", 10**9),
        ("4096", 4096),
        (7, 7),
        ("0B", 0),
    ],
)
def test_sizes_are_read_with_their_unit(text: object, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["many", "-1GiB", "1 PB", "", "GiB", True, None])
def test_what_is_no_size_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="is not of the form"):
        parse_size(text)


@pytest.mark.parametrize(("text", "ms"), [("50ms", 50), ("5s", 5000), ("2m", 120_000), (0, 0)])
def test_times_are_read_with_their_unit(text: object, ms: float) -> None:
    assert parse_ms(text) == ms


@pytest.mark.parametrize("text", ["50", 50, "fast", "-1s"])
def test_a_time_without_a_unit_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="is not of the form"):
        parse_ms(text)


def test_an_amount_is_auto_bytes_or_a_fraction() -> None:
    assert Amount.parse("auto").resolve(100, 10) == 10
    assert Amount.parse("0.9").resolve(100, 10) == 90
    assert Amount.parse("2KiB").resolve(100, 10) == 2048
    assert str(Amount.parse("2GiB")) == format_bytes(2 << 30) == "2.00 GiB"


def test_the_commented_example_is_the_defaults() -> None:
    assert parse(tomllib.loads(example())) == Config()


def test_uncommenting_the_examples_model_works() -> None:
    lines = [line.removeprefix("# ") for line in example().splitlines()]
    start = next(i for i, line in enumerate(lines) if line.startswith("[[model]]"))
    (model,) = parse(tomllib.loads("\n".join(lines[start:]))).models
    assert model.source == "torchvision:resnet152"


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text('[scheduler]\nmax_queue = 1\nmax_wait = "1s"\n[workers]\nstandby = 1\n')
    environ = {"PIPESWITCH_SCHEDULER__MAX_QUEUE": "2", "PIPESWITCH_WORKERS__STANDBY": "3"}
    flags = {"workers": {"standby": 4}, "device": {"name": None}}
    config = load(file, flags=flags, environ=environ)
    assert config.scheduler.max_wait_ms == 1000
    assert config.scheduler.max_queue == 2
    assert config.workers.standby == 4
    assert config.device.name == "auto"


def test_all_errors_come_at_once_with_the_nearest_name(tmp_path: Path) -> None:
    file = tmp_path / "p.toml"
    file.write_text('[server]\nlisen = "x"\n[workers]\nstandby = 0\n[schduler]\n')
    with pytest.raises(ConfigError) as caught:
        load(file, environ={"PIPESWITCH_HOST": "h", "PIPESWITCH_DEVICE__ARENAS": "auto"})
    text = caught.value.message
    assert '[server] lisen: unknown key; did you mean "listen"?' in text
    assert "[workers] standby: 0 is below 1" in text
    assert '[schduler]: unknown section; did you mean "scheduler"?' in text
    assert "$PIPESWITCH_DEVICE__ARENAS: unknown key 'arenas'; did you mean \"arena\"?" in text
    assert len(caught.value.data["errors"]) == 4


def test_a_value_out_of_range_cannot_be_made_in_code_either() -> None:
    with pytest.raises(ConfigError, match="max_queue"):
        SchedulerConfig(max_queue=0)


def test_directories_are_absolute_and_follow_xdg() -> None:
    environ = {"XDG_STATE_HOME": "/s", "XDG_RUNTIME_DIR": "/r"}
    server = load(environ=environ).server
    assert (server.state_dir, server.runtime_dir) == ("/s/pipeswitch", "/r/pipeswitch")


def test_a_list_may_come_from_the_environment() -> None:
    config = load(environ={"HOME": "/h", "PIPESWITCH_SERVER__ALLOW_CODE": "a.*, b.*"})
    assert config.server.allow_code == ("a.*", "b.*")


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*absent.toml"):
        load(tmp_path / "absent.toml", environ={})
    (tmp_path / "bad.toml").write_text("= 1")
    with pytest.raises(ConfigError, match="is not TOML"):
        load(tmp_path / "bad.toml", environ={})


def test_the_schema_names_every_section() -> None:
    text = json.dumps(schema())
    for section in ("server", "device", "host", "workers", "scheduler", "model"):
        assert f'"{section}"' in text


def test_values_are_frozen() -> None:
    with pytest.raises(AttributeError):
        ServerConfig().listen = "x"  # type: ignore[misc]
