"""All settings in one place: a frozen value, and the reading of it from file, environment, flags.

The code sees the frozen dataclasses below, validated when made. The annotations of each field
(its TOML key, kind, and help) are the only list of settings there is: the parser, ``config init``
and ``config schema`` are generated from it. pydantic is used to read and report, all errors at
once, and is imported only when something is read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from .errors import ConfigError
from .roles import Role
from .units import Amount, nearest, parse_ms, parse_size

DEFAULT_LISTEN: Final = "tcp://127.0.0.1:5555"
_PORT: Final = r"\*|[0-9]{1,4}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-4]"
LISTEN_PATTERN: Final = (
    rf"tcp://([^:/\s]+|\[[^\]\s]+\]):({_PORT})"  # the port after it is taken too
)
NAME_PATTERN: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
"""Names of models, jobs and servers: safe as a file name, a topic and a column."""

MAX_MS: Final = 480 * 3600e3  # 20 days: what waits for it counts milliseconds in 31 bits
PRIORITIES: Final[Mapping[str, int]] = {"high": 0, "normal": 1, "low": 2}  # 0 is the most urgent

_AUTO: Final = Amount()

Kind = Literal["text", "bool", "count", "number", "size", "ms", "amount", "choice", "list", "any"]


def _setting(
    default: Any, kind: Kind, help_text: str, *, key: str = "", shown: str = "", **more: Any
) -> Any:
    """A field with its TOML key, kind and help; ``shown`` is the default as a user writes it."""
    metadata = {"kind": kind, "help": help_text, "key": key, "shown": shown, **more}
    return field(default=default, metadata=metadata)


class _Checked:
    """Validated when made: a value that is out of range cannot exist."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            problem = _problem(getattr(self, item.name), item.metadata)
            if problem:
                raise ConfigError(f"{type(self).__name__}.{item.name}: {problem}")


def _problem(value: Any, metadata: Mapping[str, Any]) -> str:
    """Why this value of this setting cannot be, or nothing."""
    low, high = metadata.get("low"), metadata.get("high")
    if metadata.get("kind") == "ms" and value > MAX_MS:
        return f"longer than {MAX_MS / 3600e3:.0f}h"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not a number to reckon with"
    if low is not None and value < low:
        return f"{value} is below {low}"
    if high is not None and value > high:
        return f"{value} is above {high}"
    choices = metadata.get("choices")
    for one in value if isinstance(value, tuple) else (value,):
        if choices and one not in choices:
            return f"{one!r} is none of {', '.join(choices)}{nearest(str(one), choices)}"
    pattern = metadata.get("pattern")
    if pattern is not None and value and not re.fullmatch(pattern, value):
        example = metadata.get("example")
        return f"{value!r} " + (
            f"is not of the form {example}" if example else f"does not match {pattern}"
        )
    return ""


@dataclass(frozen=True)
class ServerConfig(_Checked):
    """``[server]``: the doors and what may come through them."""

    listen: str = _setting(
        DEFAULT_LISTEN, "text", "where clients connect; events are published on the next port",
        pattern=LISTEN_PATTERN, example=DEFAULT_LISTEN,
    )  # fmt: skip
    name: str = _setting(
        "", "text", "of the owner's ipc socket; empty: the port", pattern=NAME_PATTERN.pattern
    )
    max_message_bytes: int = _setting(
        256 << 20, "size", "largest tensor or weight chunk a client may send",
        key="max_message", shown="256MiB", low=1 << 20,
    )  # fmt: skip
    pool_bytes: int = _setting(
        512 << 20, "size", "shared memory for waiting requests and replies",
        key="pool", shown="512MiB", low=1 << 20,
    )  # fmt: skip
    max_upload_bytes: int = _setting(
        32 << 30, "size", "largest model file a client may send",
        key="max_upload", shown="32GiB", low=1 << 20,
    )  # fmt: skip
    allow_code: tuple[str, ...] = _setting(
        (), "list", "module names and script paths TCP clients may name (shell wildcards)"
    )
    tcp_roles: tuple[str, ...] = _setting(
        (Role.INFER.value,), "list", "what every TCP client may do: infer, register, operate, "
        "code; its key may say more", choices=tuple(Role),
    )  # fmt: skip
    auth: str = _setting(
        "auto", "choice", "keys: TCP clients need an admitted key (pipeswitch keys); "
        "auto: only when other machines can reach the address", choices=("auto", "keys"),
    )  # fmt: skip
    keys_dir: str = _setting(
        "", "text", "the server's CURVE key and its clients'; empty: STATE_DIR/keys"
    )
    max_connections: int = _setting(
        1024, "count", "TCP connections at once, to each of the two ports", low=1
    )
    watchdog_ms: float = _setting(
        30000.0, "ms", "a scheduler that stands still this long ends the server; 0: never",
        key="watchdog", shown="30s", low=0,
    )  # fmt: skip
    drain_grace_ms: float = _setting(
        30000.0, "ms", "to finish what was accepted after SIGTERM or SIGINT",
        key="drain_grace", shown="30s", low=0,
    )  # fmt: skip
    state_dir: str = _setting(
        "", "text", "bundles, commits, journal, logs; empty: $XDG_STATE_HOME/pipeswitch"
    )
    runtime_dir: str = _setting(
        "", "text", "of the owner's ipc socket; empty: $XDG_RUNTIME_DIR/pipeswitch"
    )


@dataclass(frozen=True)
class DeviceConfig(_Checked):
    """``[device]``: which one, and how much of it."""

    name: str = _setting("auto", "text", "auto, cpu or cuda:0", pattern=r"auto|cpu|cuda(:[0-9]+)?")
    arena: Amount = _setting(  # noqa: RUF009 - Amount is frozen, sharing it is safe
        _AUTO, "amount", "device memory to take: auto, 20GiB or a fraction", shown="auto"
    )
    prefix: Amount = _setting(  # noqa: RUF009 - as above
        _AUTO, "amount",
        "of the arena, to keep the first groups of models that had to leave: auto (none), 1GiB…",
        shown="auto",
    )  # fmt: skip
    link_gbps: float = _setting(
        0.0, "number", "cpu device: model a host link of this many GB/s; 0: as fast as it goes",
        low=0,
    )  # fmt: skip
    waits: str = _setting(
        "auto", "choice", "cuda: who waits for a layer group to arrive: auto, cpu or gpu",
        choices=("auto", "cpu", "gpu"),
    )  # fmt: skip
    words: str = _setting(
        "auto", "choice", "cuda: how arrival is signalled: auto, copy or write",
        choices=("auto", "copy", "write"),
    )  # fmt: skip
    activations: str = _setting(
        "auto", "choice", "cuda: where models compute: auto, private or slice (of the arena)",
        choices=("auto", "private", "slice"),
    )  # fmt: skip
    slice: Amount = _setting(  # noqa: RUF009 - as above
        _AUTO, "amount", "cuda: size of that slice: auto, 4GiB or a fraction", shown="auto"
    )
    graphs: str = _setting(
        "auto", "choice", "cuda: replay layer groups as CUDA graphs: auto, off or on",
        choices=("auto", "off", "on"),
    )  # fmt: skip
    graph_budget_bytes: int = _setting(
        1 << 30, "size", "cuda: driver memory that one worker's graphs may take",
        key="graph_budget", shown="1GiB", low=0,
    )  # fmt: skip
    bindings: str = _setting(
        "cuda.bindings", "text", "cuda: the package with the bindings",
        pattern=r"[A-Za-z_][A-Za-z0-9_.]*",
    )  # fmt: skip


@dataclass(frozen=True)
class HostConfig(_Checked):
    """``[host]``: the store where registered models wait."""

    store: Amount = _setting(  # noqa: RUF009 - Amount is frozen, sharing it is safe
        _AUTO, "amount", "host memory for models: auto, 32GiB or a fraction", shown="auto"
    )


@dataclass(frozen=True)
class WorkersConfig(_Checked):
    """``[workers]``."""

    standby: int = _setting(2, "count", "warm workers beside the active one", low=1, high=32)
    threads: int = _setting(
        0, "count", "compute threads of a worker on the cpu device; 0: cores - 1", low=0, high=4096
    )
    build_timeout_ms: float = _setting(
        600e3, "ms", "a registration that builds and verifies longer is refused; 0: never",
        key="build_timeout", shown="10m", low=0,
    )  # fmt: skip
    build_memory: Amount = _setting(  # noqa: RUF009 - Amount is frozen, sharing it is safe
        _AUTO, "amount", "host memory of one build: auto (3/4 of what is free), 8GiB or a fraction",
        shown="auto",
    )  # fmt: skip
    restart_backoff_ms: float = _setting(
        1000.0, "ms", "pause before a process that keeps dying is started again",
        key="restart_backoff", shown="1s", low=0,
    )  # fmt: skip


@dataclass(frozen=True)
class SchedulerConfig(_Checked):
    """``[scheduler]``."""

    policy: str = _setting("priority", "choice", "fifo or priority", choices=("fifo", "priority"))
    max_queue: int = _setting(512, "count", "requests that may wait", low=1)
    max_queue_per_model: int = _setting(
        256, "count", "of them for one model: a flood for one leaves room for the others", low=1
    )
    max_wait_ms: float = _setting(
        2000.0, "ms", "after this a waiting request goes first",
        key="max_wait", shown="2s", low=0,
    )  # fmt: skip
    commit_every_ms: float = _setting(
        5000.0, "ms", "how often a training job's state is kept",
        key="commit_every", shown="5s", low=0,
    )  # fmt: skip
    persist_every_ms: float = _setting(
        30000.0, "ms", "how often a job's newest commit is written to disk",
        key="persist_every", shown="30s", low=0,
    )  # fmt: skip
    max_compute_ms: float = _setting(
        60000.0, "ms", "a request that computes so much longer than its model ever did is taken "
        "for an endless loop and killed; 0: never", key="max_compute", shown="60s", low=0,
    )  # fmt: skip
    deadline_grace_ms: float = _setting(
        5000.0, "ms", "a request that computes so long after its deadline is killed",
        key="deadline_grace", shown="5s", low=0,
    )  # fmt: skip
    stop_grace_ms: float = _setting(
        30000.0, "ms", "a job that does not step aside for so long is killed",
        key="stop_grace", shown="30s", low=0,
    )  # fmt: skip
    evict_grace_ms: float = _setting(
        30000.0, "ms", "a job that does not leave the device for so long is killed",
        key="evict_grace", shown="30s", low=0,
    )  # fmt: skip


@dataclass(frozen=True)
class ModelConfig(_Checked):
    """``[[model]]``: registered when the server starts."""

    name: str = _setting("", "text", "what requests call it", pattern=NAME_PATTERN.pattern)
    source: str = _setting("", "text", "torchvision:…, hf:…, a bundle file, package.module:factory")
    weights: str = _setting("", "text", "FILE.safetensors, pretrained or random:SEED")
    inputs: tuple[str, ...] = _setting((), "list", "like x=8x3x224x224:float32")
    priority: str = _setting("normal", "choice", "high, normal or low", choices=tuple(PRIORITIES))
    pin: bool = _setting(False, "bool", "keep on the device")
    max_batch: int = _setting(0, "count", "largest dynamic batch; 0: 64", low=0)


@dataclass(frozen=True)
class Config(_Checked):
    """Everything a server is told. ``profiles_dir`` is empty for the profiles that come along."""

    server: ServerConfig = field(default_factory=ServerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    host: HostConfig = field(default_factory=HostConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    models: tuple[ModelConfig, ...] = ()
    profiles_dir: str = ""


PROFILES_VARIABLE: Final = "PIPESWITCH_PROFILES_DIR"  # the one setting outside the sections
SECTIONS: Final[Mapping[str, type[_Checked]]] = {
    "server": ServerConfig,
    "device": DeviceConfig,
    "host": HostConfig,
    "workers": WorkersConfig,
    "scheduler": SchedulerConfig,
}


def _key(item: dataclasses.Field[Any]) -> str:
    return item.metadata["key"] or item.name


def _parser_model(section: str, cls: type[_Checked]) -> Any:
    """A pydantic model that reads one section; made on demand from the dataclass's fields."""
    from typing import Annotated

    import pydantic

    def reader(metadata: Mapping[str, Any]) -> Any:
        kind = metadata["kind"]
        parse = {"size": parse_size, "ms": parse_ms, "amount": Amount.parse}.get(kind)

        def read(value: Any) -> Any:
            if kind in ("count", "number") and isinstance(value, bool):
                raise ValueError(f"{value} is not a number")
            value = parse(value) if parse else value
            if kind == "list" and isinstance(value, str):
                value = [part.strip() for part in value.split(",") if part.strip()]
            return value

        def check(value: Any) -> Any:
            problem = _problem(value, metadata)
            if problem:
                raise ValueError(problem)
            return value

        base = {
            "text": str, "choice": str, "bool": bool, "count": int, "number": float,
            "size": Any, "ms": Any, "amount": Any, "list": tuple[str, ...],
        }[kind]  # fmt: skip
        return Annotated[base, pydantic.BeforeValidator(read), pydantic.AfterValidator(check)]

    fields: dict[str, Any] = {}
    for item in dataclasses.fields(cls):  # type: ignore[arg-type]
        default = item.metadata["shown"] or item.default
        required = section == "model" and item.name in ("name", "source")
        shown = pydantic.Field(
            ... if required else default,
            description=item.metadata["help"],
            validate_default=True,
        )
        fields[_key(item)] = (reader(item.metadata), shown)
    settings = pydantic.ConfigDict(extra="forbid")
    return pydantic.create_model(section, __config__=settings, **fields)


def _root_model() -> Any:
    import pydantic

    fields: dict[str, Any] = {
        name: (
            _parser_model(name, cls),
            pydantic.Field(default_factory=dict, validate_default=True),
        )
        for name, cls in SECTIONS.items()
    }
    fields["model"] = (tuple[_parser_model("model", ModelConfig), ...], ())  # type: ignore[misc]
    fields["profiles_dir"] = (str, "")
    settings = pydantic.ConfigDict(extra="forbid")
    return pydantic.create_model("pipeswitch", __config__=settings, **fields)


def parse(
    raw: Mapping[str, Any], where: str = "", origins: Mapping[str, str] | None = None
) -> Config:
    """Check a tree of settings as TOML gives it.

    Args:
        raw: sections by name.
        where: the file's name, for errors.
        origins: ``section.key`` of what did not come from the file, and where it came from.

    Raises:
        ConfigError: with every problem, one per line, and ``data["errors"]`` as a list.
    """
    import pydantic

    try:
        tree = _root_model().model_validate(dict(raw))
    except pydantic.ValidationError as error:
        errors = [
            _placed(_explain(dict(problem)), problem["loc"], where, origins or {})
            for problem in error.errors()
        ]
        raise _errors(errors) from None
    sections = {name: _from_parsed(cls, getattr(tree, name)) for name, cls in SECTIONS.items()}
    models = tuple(_from_parsed(ModelConfig, model) for model in tree.model)
    names = [model.name for model in models]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise _errors([_at(where, f"[[model]] name: {name!r} is there twice") for name in twice])
    return Config(**sections, models=models, profiles_dir=tree.profiles_dir)


def _from_parsed(cls: type[Any], parsed: Any) -> Any:
    return cls(**{item.name: getattr(parsed, _key(item)) for item in dataclasses.fields(cls)})


def _errors(errors: list[str]) -> ConfigError:
    return ConfigError(
        "\n".join(errors), hint="pipeswitch config init writes a commented example", errors=errors
    )


def _at(where: str, text: str) -> str:
    return f"{where}: {text}" if where else text


def _placed(text: str, place: tuple[int | str, ...], where: str, origins: Mapping[str, str]) -> str:
    """An error with what it is about: a variable, the command line, else the file."""
    return _at(origins.get(".".join(map(str, place[:2])), where), text)


def _explain(problem: dict[str, Any]) -> str:
    """One pydantic error in the file's own words."""
    place = [str(part) for part in problem["loc"]]
    key = place[-1]
    if place == ["model"]:
        return "model: write [[model]] above each model, with two brackets"
    if problem["type"] == "extra_forbidden":
        if len(place) == 1:
            known = [*SECTIONS, "model", "profiles_dir"]
            return f"[{key}]: unknown section{nearest(key, known)}"
        cls = SECTIONS.get(place[0], ModelConfig)
        keys = [_key(item) for item in dataclasses.fields(cls)]  # type: ignore[arg-type]
        text = f"unknown key{nearest(key, keys)}"
    elif problem["type"] == "missing":
        text = "is required"
    else:
        text = str(problem["msg"]).removeprefix("Value error, ")
        if problem["type"] != "value_error":
            text += f", got {problem['input']!r}"
    section = f"[[model]] {place[1]}" if place[0] == "model" else f"[{place[0]}]"
    return f"{section} {key}: {text}" if len(place) > 1 else f"{key}: {text}"


def _from_environment(environ: Mapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Settings of the form ``PIPESWITCH_SECTION__KEY``, and what is wrong with the others."""
    tree: dict[str, Any] = {}
    errors = []
    if PROFILES_VARIABLE in environ:
        tree["profiles_dir"] = environ[PROFILES_VARIABLE]
    for name, value in sorted(environ.items()):
        if not name.startswith("PIPESWITCH_") or "__" not in name:
            continue
        section, _, key = name.removeprefix("PIPESWITCH_").lower().partition("__")
        cls = SECTIONS.get(section)
        if cls is None:
            errors.append(f"${name}: unknown section {section!r}{nearest(section, SECTIONS)}")
            continue
        keys = [_key(item) for item in dataclasses.fields(cls)]  # type: ignore[arg-type]
        if key not in keys:
            errors.append(f"${name}: unknown key {key!r}{nearest(key, keys)}")
            continue
        tree.setdefault(section, {})[key] = value
    return tree, errors


def _merge(base: dict[str, Any], over: Mapping[str, Any]) -> None:
    for section, values in over.items():
        if isinstance(values, Mapping) and isinstance(base.get(section, {}), dict):
            base[section] = {**base.get(section, {}), **values}
        else:
            base[section] = values


def load(
    path: str | Path | None = None,
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Flags over environment over file over defaults; directories are made absolute.

    Args:
        path: a TOML file; None: ``pipeswitch.toml`` in the current folder if there is one.
        flags: a tree like the file's; keys whose value is None are ignored.
        environ: defaults to the process's environment.

    Raises:
        ConfigError: with every problem of all sources.
    """
    environ = os.environ if environ is None else environ
    tree: dict[str, Any] = {}
    if path is None and Path("pipeswitch.toml").is_file():
        path = "pipeswitch.toml"
        _check_found(Path(path))
    if path is not None:
        tree = _read_toml(Path(path))
    from_environment, errors = _from_environment(environ)
    _merge(tree, from_environment)
    origins = {
        f"{section}.{key}": f"$PIPESWITCH_{section.upper()}__{key.upper()}"
        for section in SECTIONS
        for key in from_environment.get(section, {})
    }
    for section, values in (flags or {}).items():
        if isinstance(values, Mapping):
            given = {key: value for key, value in values.items() if value is not None}
            _merge(tree, {section: given})
            origins |= {f"{section}.{key}": "command line" for key in given}
        elif values is not None:
            tree[section] = values
    try:
        config = parse(tree, str(path or ""), origins)
    except ConfigError as error:
        raise _errors([*error.data["errors"], *errors]) from None
    if errors:
        raise _errors(errors)
    return _with_directories(config, environ)


def _check_found(path: Path) -> None:
    """A file that was only come across must be this user's: it may name code to run."""
    facts = path.stat()
    if facts.st_uid not in (os.getuid(), 0) or facts.st_mode & 0o002:
        raise ConfigError(
            f"{path.absolute()} belongs to user {facts.st_uid} and has mode "
            f"{facts.st_mode & 0o7777:04o}: another user may have put it here",
            hint=f"--config {path} if you know what it says, or start in another folder",
        )


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}", hint="pipeswitch config init > pipeswitch.toml"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not TOML: {error}") from None


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """``$XDG_STATE_HOME/pipeswitch``."""
    base = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME", "~"), ".local/state"))
    return Path(base).expanduser() / "pipeswitch"


def default_runtime_dir(environ: Mapping[str, str]) -> Path:
    """``$XDG_RUNTIME_DIR/pipeswitch``; without one, a folder of the user's own under /tmp."""
    base = environ.get("XDG_RUNTIME_DIR")
    return Path(base, "pipeswitch") if base else Path(f"/tmp/pipeswitch-{os.getuid()}")


def _with_directories(config: Config, environ: Mapping[str, str]) -> Config:
    state = config.server.state_dir or str(default_state_dir(environ))
    runtime = config.server.runtime_dir or str(default_runtime_dir(environ))
    server = dataclasses.replace(
        config.server,
        state_dir=str(Path(state).expanduser().absolute()),
        runtime_dir=str(Path(runtime).expanduser().absolute()),
        keys_dir=str(Path(config.server.keys_dir or Path(state, "keys")).expanduser().absolute()),
    )
    models = tuple(
        dataclasses.replace(
            model,
            source=_absolute_file(model.source, ".bundle"),
            weights=_absolute_file(model.weights, ".safetensors"),
        )
        for model in config.models
    )
    return dataclasses.replace(config, server=server, models=models)


def _absolute_file(text: str, suffix: str) -> str:
    """A file of a [[model]] may be named from the folder the server is started in."""
    return str(Path(text).expanduser().absolute()) if text.endswith(suffix) else text


def example() -> str:
    """The commented file that ``config init`` writes: every setting with its default."""
    lines = ["# PipeSwitch. Flags win over PIPESWITCH_SECTION__KEY, which win over this file.", ""]
    lines += ['profiles_dir = ""  # measured profiles of models; empty: those that come along', ""]
    for name, cls in SECTIONS.items():
        lines.append(f"[{name}]")
        lines += [_example_line(item) for item in dataclasses.fields(cls)]  # type: ignore[arg-type]
        lines.append("")
    lines += ["# [[model]]  # registered when the server starts; repeat for more"]
    shown = {"name": "resnet152", "source": "torchvision:resnet152", "weights": "random:0"}
    for item in dataclasses.fields(ModelConfig):
        value = json.dumps(shown.get(item.name, _shown(item)))
        lines.append(f"# {_key(item)} = {value}  # {item.metadata['help']}")
    return "\n".join(lines) + "\n"


def _shown(item: dataclasses.Field[Any]) -> Any:
    value = item.metadata["shown"] or item.default
    return list(value) if isinstance(value, tuple) else value


def _example_line(item: dataclasses.Field[Any]) -> str:
    return f"{_key(item)} = {json.dumps(_shown(item))}  # {item.metadata['help']}"


def schema() -> dict[str, Any]:
    """JSON Schema of the file."""
    result: dict[str, Any] = _root_model().model_json_schema()
    return result
