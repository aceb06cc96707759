"""Settings: sources and their precedence, and the report of all errors at once."""

from __future__ import annotations

import json
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast, get_args

import msgspec
import pytest

from pipeswitch.base import config
from pipeswitch.base.config import (
    POLICIES,
    SECTIONS,
    Config,
    RoleName,
    SchedulerConfig,
    example,
    load,
    misspelt_variables,
    parse,
    schema,
)
from pipeswitch.base.errors import ConfigError
from pipeswitch.base.model_options import PRIORITIES, ModelConfig
from pipeswitch.base.roles import Role
from pipeswitch.base.settings import Section, rules_of, settings
from pipeswitch.base.units import SizeSpec, format_bytes, parse_ms, parse_size, short_bytes
from pipeswitch.base.version import UNKNOWN, own_version
from pipeswitch.devices import registry
from pipeswitch.scheduler.state.core import SchedulerSettings


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


@pytest.mark.parametrize("unit", [".0GiB", "GiB"])
def test_what_no_float_holds_is_refused(unit: str) -> None:
    with pytest.raises(ValueError, match="is too large"):
        parse_size("9" * 400 + unit)


@pytest.mark.parametrize(("text", "ms"), [("50ms", 50), ("5s", 5000), ("2m", 120_000), (0, 0)])
def test_times_are_read_with_their_unit(text: object, ms: float) -> None:
    assert parse_ms(text) == ms


@pytest.mark.parametrize("text", ["50", 50, "fast", "-1s"])
def test_a_time_without_a_unit_is_refused(text: object) -> None:
    with pytest.raises(ValueError, match="is not of the form"):
        parse_ms(text)


def test_an_amount_is_auto_bytes_or_a_fraction() -> None:
    assert SizeSpec.parse("auto").resolve(100, 10) == 10
    assert SizeSpec.parse("0.9").resolve(100, 10) == 90
    assert SizeSpec.parse("2KiB").resolve(100, 10) == 2048
    assert (
        str(SizeSpec.parse("2GiB")) == format_bytes(2 << 30) == short_bytes(2 << 30) == "2.00 GiB"
    )
    assert [short_bytes(one << 20) for one in (654, 90)] == ["654 MiB", "90.0 MiB"]


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
    file.write_text('[server]\nlisen = "x"\narena = "1"\n[workers]\nstandby = 0\n[schduler]\n')
    with pytest.raises(ConfigError) as caught:
        load(file, environ={"PIPESWITCH_HOST": "h", "PIPESWITCH_DEVICE__ARENAS": "auto"})
    text = caught.value.message
    assert '[server] lisen: unknown key; did you mean "listen"?' in text
    assert "[server] arena: unknown key; it belongs to [device]" in text
    assert "[workers] standby: 0 is not a whole number of at least 1 and at most 32" in text
    assert '[schduler]: unknown section; did you mean "scheduler"?' in text
    assert '$PIPESWITCH_DEVICE__ARENAS: [device] arenas: unknown key; did you mean "arena"?' in text
    assert len(caught.value.data["errors"]) == 5


def test_a_value_out_of_range_cannot_be_made_in_code_either() -> None:
    with pytest.raises(ConfigError):
        SchedulerConfig(max_queue=0)


def test_directories_are_absolute_and_follow_xdg() -> None:
    environ = {"XDG_STATE_HOME": "/s", "XDG_RUNTIME_DIR": "/r"}
    server = load(environ=environ).server
    assert (server.state_dir, server.runtime_dir) == ("/s/pipeswitch", "/r/pipeswitch")


def test_a_list_may_come_from_the_environment() -> None:
    config = load(environ={"HOME": "/h", "PIPESWITCH_SERVER__ALLOW_CODE": "a.*, b.*"})
    assert config.server.allow_code == ("a.*", "b.*")


@pytest.mark.parametrize(
    ("key", "text"), [("inputs", "x=1x2, y=3:int8"), ("state", "h=o,c=r+1"), ("aliases", "a,b")]
)
def test_a_models_list_may_be_one_text_with_commas(key: str, text: str) -> None:
    one, other = (
        parse({"model": [{"name": "m", "source": "a:b", key: value}]}).models
        for value in (text, [part.strip() for part in text.split(",")])
    )
    assert one == other


def test_true_and_false_may_come_from_the_environment() -> None:
    environ = {"HOME": "/h", "PIPESWITCH_SCHEDULER__LOOK_AHEAD": "false"}
    config = load(environ=environ | {"PIPESWITCH_GATEWAY__BEHIND_PROXY": "true"})
    assert (config.scheduler.look_ahead, config.gateway.behind_proxy) == (False, True)
    with pytest.raises(ConfigError):
        load(environ={"PIPESWITCH_GATEWAY__BEHIND_PROXY": "yes"})


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        load(tmp_path / "absent.toml", environ={})
    (tmp_path / "bad.toml").write_text("= 1")
    with pytest.raises(ConfigError):
        load(tmp_path / "bad.toml", environ={})


def test_a_weight_is_a_tenants_and_a_number() -> None:
    weights = {"alice": 3.0, "*": "0.5", "": 2}
    assert parse({"tenants": weights}).tenants == {"alice": 3.0, "*": 0.5, "": 2.0}
    wrong = {"Alice": 1, "a": 0, "b": True, "c": {"d": 1}}
    with pytest.raises(ConfigError, match="'Alice' is not the name of a key or token") as caught:
        parse({"tenants": wrong})
    assert len(caught.value.data["errors"]) == len(wrong)
    with pytest.raises(ConfigError):
        parse({"tenants": 3})


def test_the_schema_has_every_section_and_its_rules() -> None:
    tables = json.loads(json.dumps(schema()))["properties"]
    assert {"server", "device", "host", "workers", "scheduler", "model"} <= set(tables)
    standby = tables["workers"]["properties"]["standby"]
    assert (standby["type"], standby["minimum"], standby["maximum"]) == ("integer", 1, 32)
    assert set(tables["server"]["properties"]["auth"]["enum"]) == {"auto", "keys"}
    assert tables["model"]["items"]["required"] == ["name"]
    pool = tables["server"]["properties"]["pool"]
    assert "type" not in pool, "a size is a text or a number"
    assert pool["default"] == "512MiB"


def test_the_scheduler_has_the_defaults_of_its_section() -> None:
    settings, section = vars(SchedulerSettings()), msgspec.structs.asdict(SchedulerConfig())
    both = settings.keys() & section.keys()
    assert [name for name in both if settings[name] != section[name]] == []


def test_every_option_of_a_model_has_help() -> None:
    assert all(item.help for item in settings(ModelConfig).values())


@pytest.mark.parametrize("section", SECTIONS.values())
def test_every_key_has_help_and_only_keys_have(section: type[Section]) -> None:
    rows = settings(section)
    assert all(item.help for item in rows.values())
    assert set(re.findall(r"^    (\w+): ", section.__doc__ or "", re.MULTILINE)) == set(rows)


def test_each_build_has_its_own_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    own_version.cache_clear()
    assert re.fullmatch(metadata.version("pipeswitch") + r"\+[0-9a-f]{8,}", own_version())
    monkeypatch.setattr(metadata, "version", missing)
    monkeypatch.setattr("pipeswitch.base.version.PACKAGE", tmp_path / "pipeswitch")
    own_version.cache_clear()
    assert own_version() == UNKNOWN
    (tmp_path / "pipeswitch").mkdir()
    (tmp_path / "pipeswitch" / "commit.txt").write_text("12345678\n")  # as in a wheel
    own_version.cache_clear()
    assert own_version() == "0+12345678"
    own_version.cache_clear()


@pytest.mark.parametrize(("key", "wrong"), [("priority", "hihg"), ("precision", "fasd")])
def test_an_unknown_choice_is_answered_with_the_choices_that_have_a_name(
    key: str, wrong: str, tmp_path: Path
) -> None:
    path = tmp_path / "pipeswitch.toml"
    path.write_text(f'[[model]]\nname = "a"\nsource = "hf:gpt2"\n{key} = "{wrong}"\n')
    with pytest.raises(ConfigError, match=f"'{wrong}' is none of [a-z0-9]+(, [a-z0-9]+)+; did you"):
        load(path)


def test_choices_are_those_of_the_code_that_takes_them() -> None:
    assert get_args(RoleName) == tuple(Role)
    assert rules_of(settings(ModelConfig)["priority"].kind).choices == ("", *PRIORITIES)
    assert all(policy in settings(SchedulerConfig)["policy"].help for policy in POLICIES)


@pytest.mark.parametrize(
    ("toml", "text"),
    [
        ('[model]\nname = "m"', "write [[model]] above each model"),
        ('[server]\nlisten = "gpu1"', "'gpu1' is not of the form tcp://127.0.0.1:5555"),
        ('[server]\nlisten = "ipc:///x"', "is not of the form"),
        ('[server]\nlisten = "tcp://127.0.0.1:5555\\n"', "is not of the form"),
        ('[server]\nname = "m\\n"', "is not a name of a-z"),
        ('[gateway]\norigins = ["https://a.example\\n"]', "is not of the form https://"),
        ('[gateway]\nroles = ["infer", "regster"]', 'code; did you mean "register"?'),
        ('[server]\npool = "1KiB"', "'1KiB' is not a size of at least 1MiB"),
        ('[log]\nmax = "10h"', "is not of the form 512MiB"),
        ('[server]\nlisten = "tcp://127.0.0.1:65535"', "is not of the form"),
        ("[device]\nlink_gbps = nan", "[device] link_gbps: nan is not a number"),
        ("[device]\nlink_gbps = inf", "[device] link_gbps: inf is not a number"),
        ("[workers]\nstandby = true", "[workers] standby: True is not a whole number"),
        ("[workers]\nstandby = 2.5", "[workers] standby: 2.5 is not a whole number"),
        ("[server]\nname = 5", "[server] name: 5 is not a name of a-z, 0-9"),
        ("[server]\nallow_code = [5]", "[server] allow_code: 5 is not a text"),
        ('[gateway]\norigins = ["https://a.example/"]', "not of the form https://app.example.com"),
        ("workers = 3", "workers: 3 is not a table"),
        ('[scheduler]\npolicy = "my/mine.py"', "of your own; write mine:NAME"),
        ("profiles_dir = 3", "profiles_dir: 3 is not a text"),
        ('[[model]]\nname = "m"', "[[model]] 0 source: is required"),
        ('[gateway]\naliases = ["gpt-4o"]', "of the form gpt-4o=chat"),
        ('[[model]]\nname = "m"\nsource = "a:b"\npin = 1', "pin: 1 is not true or false"),
        (
            '[server]\nwatchdog = "481h"',
            "watchdog: '481h' is not a time of at least 0 and at most 480h",
        ),
        (2 * '[[model]]\nname = "m"\nsource = "a:b"\n', "[[model]] name: 'm' appears twice"),
    ],
)
def test_what_no_server_could_start_with_is_refused(toml: str, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(tomllib.loads(toml), "p.toml")
    assert str(caught.value).startswith("p.toml: ")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    "listen", ["tcp://127.0.0.1:5555", "tcp://[::1]:0", "tcp://*:65534", "tcp://gpu1.local:*"]
)
def test_addresses_to_listen_at(listen: str) -> None:
    assert parse({"server": {"listen": listen}}).server.listen == listen


def test_an_error_names_the_variable_or_the_command_line_it_came_from(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('[scheduler]\npolicy = "no-such"')
    with pytest.raises(ConfigError) as caught:
        load(
            path,
            environ={"PIPESWITCH_WORKERS__STANDBY": "x"},
            flags={"device": {"arena": "many", "name": None}},
        )
    device, workers, scheduler = caught.value.data["errors"]
    assert device.startswith("command line: [device] arena")
    assert workers.startswith("$PIPESWITCH_WORKERS__STANDBY: [workers] standby")
    assert scheduler.startswith(f"{path}: [scheduler] policy")


def test_a_variable_that_nothing_reads_is_named_with_the_nearest_one() -> None:
    read = dict.fromkeys(("PIPESWITCH_HOST", "PIPESWITCH_DEVICE__ARENA", "HOME"), "")
    odd = ("PIPESWITCH_ARENA", "PIPESWITCH_HOSTS", "PIPESWITCH_QUITE_ANOTHER")
    first, second = misspelt_variables({**read, **dict.fromkeys(odd, "")})
    assert first == "unknown variable PIPESWITCH_ARENA; did you mean PIPESWITCH_DEVICE__ARENA?"
    assert second.endswith("did you mean PIPESWITCH_HOST?")


def test_the_folder_of_profiles_comes_from_all_three_places(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text('profiles_dir = "file"')
    variable = {"PIPESWITCH_PROFILES_DIR": "variable"}
    assert load(path, environ={}).profiles_dir == "file"
    assert load(path, environ=variable).profiles_dir == "variable"
    assert load(path, environ=variable, flags={"profiles_dir": "flag"}).profiles_dir == "flag"
    assert tomllib.loads(example())["profiles_dir"] == ""


def test_files_of_models_may_be_named_from_the_servers_folder(tmp_path: Path) -> None:
    path = tmp_path / "p.toml"
    path.write_text(
        '[[model]]\nname = "a"\nsource = "a.bundle"\n'
        '[[model]]\nname = "b"\nsource = "torchvision:resnet18"\nweights = "w.safetensors"\n'
    )
    first, second = load(path, environ={}).models
    assert first.source == str(Path("a.bundle").absolute())
    assert second.source == "torchvision:resnet18"
    assert second.weights == str(Path("w.safetensors").absolute())


@pytest.mark.parametrize(
    ("names_text", "names"),
    [
        ("auto", ("auto",)),
        ("cpu", ("cpu",)),
        ("cuda:1", ("cuda:1",)),
        ("cpu:0, cpu:1", ("cpu:0", "cpu:1")),
        ("cpu,cpu:2", ("cpu:0", "cpu:2")),
    ],
)
def test_several_devices_are_named_with_commas(names_text: str, names: tuple[str, ...]) -> None:
    assert parse({"device": {"name": names_text}}).device.names == names


def test_a_kind_of_device_is_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"cpu", "cuda"} == config.DEVICE_KINDS
    monkeypatch.setattr(config, "DEVICE_KINDS", {"cpu", "tpu"})
    kind = SimpleNamespace(choose=lambda _, name, **more: name)
    monkeypatch.setitem(
        sys.modules, "pipeswitch.devices.tpu.kind", cast("Any", SimpleNamespace(KIND=kind))
    )
    device = parse({"device": {"name": "tpu:1"}}).device
    assert registry.choose_devices(device, workers=1, available_bytes=1) == ("tpu:1",)


@pytest.mark.parametrize(
    ("names_text", "problem"),
    [
        ("cpu:x", "'cpu:x' is none of auto, cpu, cpu:0, cpu:1, cuda:0, …"),
        ("cpu:0,cpu:0", "cpu:0 appears twice"),
        ("cpu,cpu:0", "cpu:0 appears twice"),
        ("auto,cpu:0", "'auto' is none of auto, cpu, cpu:0, cpu:1, cuda:0, …, which goes alone"),
        ("", "'' is none of auto, cpu, cpu:0, cpu:1, cuda:0, …"),
    ],
)
def test_devices_that_cannot_be_are_refused(names_text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse({"device": {"name": names_text}})
    assert str(refused.value).startswith(f"[device] name: {problem}")
