"""All settings: frozen structs, and the code that reads them from file, environment and flags.

The structs below are validated when they are created. Their fields, with the help texts in their
docstrings, are the only list of settings. The reader (which reports all errors at once), ``config
init`` and ``config schema`` use it. A key in the file has no unit suffix: its value has the unit.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args

import msgspec
from msgspec import Meta

from .errors import ConfigError
from .model_options import ModelConfig
from .settings import (
    NAME_PATTERN,
    AmountSetting,
    ConfigKey,
    Count,
    LargeSize,
    Name,
    Section,
    Size,
    Time,
    form,
    read,
    rules_of,
    settings,
    written,
)
from .units import RetentionPolicy, SizeSpec, nearest, parse_ms, parse_size

DEFAULT_LISTEN: Final = "tcp://127.0.0.1:5555"
_HOST: Final = r"[^:/\s]+|\[[^\]\s]+\]"
_PORT: Final = r"\*|[0-9]{1,4}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-4]"
_ORIGIN: Final = r"https?://([a-z0-9.-]+|\[[0-9a-f:]+\])(:[0-9]+)?"  # as browsers send it
POLICIES: Final = ("priority", "fifo", "edf", "sjf", "collate", "alternating")
Placement = Literal["least-finish", "spread", "pack"]
PLACEMENTS: Final = get_args(Placement)
JobOrder = Literal["rotate", "fair", "srtf", "fifo", "pack", "coshift"]
JOB_ORDERS: Final = get_args(JobOrder)
POLICY_GROUP: Final = "pipeswitch.policies"
"""Entry points of this group are policies, too."""


def policy_name(value: object) -> str:
    """Return a policy: built in, ``module:name`` or an entry point, else raise ValueError."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    if value in POLICIES or re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
        return value
    from importlib import metadata  # only here, because the command line starts faster without it

    names = [*POLICIES, *(point.name for point in metadata.entry_points(group=POLICY_GROUP))]
    if value not in names:
        is_file = value.endswith(".py")
        near = f"; write {Path(value).stem}:NAME" if is_file else nearest(value, names)
        known = ", ".join(names)
        raise ValueError(f"{value!r} is none of {known}, and not module:name of your own{near}")
    return value


TenantName = Annotated[str, form(rf"\*|{NAME_PATTERN.pattern}", "the name of a key or token")]
ListenAddress = Annotated[str, form(f"tcp://({_HOST}):({_PORT})", f"of the form {DEFAULT_LISTEN}")]
GatewayAddress = Annotated[str, form(f"auto|off|({_HOST}):({_PORT})", "of the form 127.0.0.1:8000")]
Origin = Annotated[str, form(_ORIGIN, "of the form https://app.example.com")]
Alias = Annotated[str, form(rf"[^=\s]+={NAME_PATTERN.pattern}", "of the form gpt-4o=chat")]
RoleName = Literal["infer", "urgent", "register", "operate", "code"]
Weight = Annotated[float, Meta(ge=0.01, le=100)]


class ServerConfig(Section, frozen=True):
    """``[server]``: listeners, limits and folders.

    listen: address for TCP clients
    name: name of the owner's socket; empty: the port
    max_message: largest tensor or weight chunk that a client may send
    pool: shared memory for waiting requests and replies
    shares: clients of the owner's socket pass large tensors in shared memory, a quarter of pool
        each, for up to eight clients
    max_upload: largest model file that a client may send
    max_disk: limit for programs, uploads and commits in state_dir together: auto (9/10 of its
        disk), 100GiB or a fraction
    max_disk_per_client: share of max_disk for programs and uploads of one TCP client (one key):
        auto (half), 10GiB or a fraction
    max_models_per_client: maximum number of registered models of one TCP client (one key)
    allow_code: module names and script paths that TCP clients may name (shell wildcards)
    tcp_roles: roles of every TCP client: infer, urgent (priority high), register, operate, code; []
        gives none; a key may add roles
    auth: keys: TCP clients need an admitted key (pipeswitch keys); auto: only if other machines can
        reach the address
    keys_dir: folder of the server's CURVE key and its clients' keys; empty: STATE_DIR/keys
    max_connections: maximum number of TCP connections
    watchdog: the server ends if its scheduler does not respond for this long; 0: never
    drain_grace: time to finish accepted requests after SIGTERM, SIGINT or SIGHUP
    models: watched folder of models, NAME/VERSION/FILE; empty: none
    state_dir: folder of programs, commits, journal and logs; empty: $XDG_STATE_HOME/pipeswitch
    runtime_dir: folder of the socket; empty: $XDG_RUNTIME_DIR/pipeswitch
    """

    listen: ListenAddress = DEFAULT_LISTEN
    name: Name = ""
    max_message_bytes: LargeSize = parse_size("256MiB")
    pool_bytes: LargeSize = parse_size("512MiB")
    shares: bool = True
    max_upload_bytes: LargeSize = parse_size("32GiB")
    max_disk: AmountSetting = SizeSpec()
    max_disk_per_client: AmountSetting = SizeSpec()
    max_models_per_client: Count = 1000
    allow_code: tuple[str, ...] = ()
    tcp_roles: tuple[RoleName, ...] = ("infer",)
    auth: Literal["auto", "keys"] = "auto"
    keys_dir: str = ""
    max_connections: Count = 1024
    watchdog_ms: Time = parse_ms("30s")
    drain_grace_ms: Time = parse_ms("30s")
    models: str = ""
    state_dir: str = ""
    runtime_dir: str = ""


# A kind of device is a folder with this file (``devices/registry.py``).
DEVICE_KINDS: Final = frozenset(
    path.parent.name for path in (Path(__file__).parents[1] / "devices").glob("*/kind.py")
)


def _device_names(text: object) -> str:
    """Return device names, separated by commas; raise ValueError for a wrong or repeated name."""
    names = [part.strip() for part in str(text).split(",")]
    if names == ["auto"]:
        return "auto"
    places = []
    for name in names:
        match = re.fullmatch(r"([a-z]+)(?::([0-9]{1,3}))?", name)
        if match is None or match[1] not in DEVICE_KINDS:
            alone = ", which goes alone" if name == "auto" else ""
            raise ValueError(f"{name!r} is none of auto, cpu, cpu:0, cpu:1, cuda:0, …{alone}")
        places.append(f"{match[1]}:{int(match[2] or 0)}")
    for name in places:
        if places.count(name) > 1:
            raise ValueError(f"{name} appears twice")
    return ",".join(places if len(places) > 1 else names)


class DeviceConfig(Section, frozen=True):
    """``[device]``: the devices, and how to use them.

    name: auto, cpu or cuda:0; several: cuda:0,cuda:1,cpu
    arena: device memory for models and jobs: auto, 20GiB or a fraction
    link_gbps: cpu device: simulate a host link of this many GB/s; 0: full speed
    waits: cuda: whether the CPU or the GPU waits for layer groups: auto, cpu or gpu
    words: cuda: how fences are written: auto, copy or write
    activations: cuda: where activations are: auto, private or slice (of the arena)
    slice: cuda: size of that slice: auto, 4GiB or a fraction
    graphs: cuda: replay layer groups as CUDA graphs: auto, off or on
    graph_budget: cuda: maximum driver memory of one worker's graphs
    holds: cuda: how a job leaves the GPU: auto, drain (its short queue ends) or stream (the GPU
        stops inside its queue)
    """

    name: Annotated[str, written("a device", _device_names)] = "auto"
    arena: AmountSetting = SizeSpec()
    link_gbps: Annotated[float, Meta(ge=0, le=10**6)] = 0.0
    waits: Literal["auto", "cpu", "gpu"] = "auto"
    words: Literal["auto", "copy", "write"] = "auto"
    activations: Literal["auto", "private", "slice"] = "auto"
    slice: AmountSetting = SizeSpec()
    graphs: Literal["auto", "off", "on"] = "auto"
    graph_budget_bytes: Size = parse_size("1GiB")
    holds: Literal["auto", "drain", "stream"] = "auto"

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each device."""
        return tuple(self.name.split(","))


class HostConfig(Section, frozen=True):
    """``[host]``: host memory.

    store: host memory for models: auto, 32GiB or a fraction
    """

    store: AmountSetting = SizeSpec()


class WorkersConfig(Section, frozen=True):
    """``[workers]``: processes that compute and build.

    standby: number of standby workers beside the active one
    threads: compute threads of a worker on a cpu device; 0: number of cores - 1, divided among the
        devices
    build_timeout: maximum time of a registration; 0: no limit
    build_memory: host memory of one build: auto (3/4 of the free memory), 8GiB or a fraction
    task_memory: host memory for the intermediate values of a client's model on a cpu device: auto
        (half of the free memory), 4GiB or a fraction
    restart_backoff: pause before a process that dies repeatedly is started again
    """

    standby: Annotated[int, Meta(ge=1, le=32)] = 2
    threads: Annotated[int, Meta(ge=0, le=4096)] = 0
    build_timeout_ms: Time = parse_ms("10m")
    build_memory: AmountSetting = SizeSpec()
    task_memory: AmountSetting = SizeSpec()
    restart_backoff_ms: Time = parse_ms("1s")


class PreprocessConfig(Section, frozen=True):
    """``[preprocess]``: processes for --preprocess and --postprocess functions.

    processes: number of processes for --preprocess and --postprocess functions
    max_time: maximum time of a function for one request; 0: no limit
    """

    processes: Annotated[int, Meta(ge=1, le=64)] = 1
    max_time_ms: Time = parse_ms("60s")


class SchedulerConfig(Section, frozen=True):
    """``[scheduler]``: order, deadlines and time limits.

    policy: order of requests: priority, fifo, edf, sjf, collate, alternating, or your own as
        module:name
    admission: deadline: refuse requests at once if they are predicted to miss their deadline; off:
        accept them
    default_deadline: deadline of requests that have none; 0: none
    placement: device for a request: least-finish (the earliest predicted end), spread (equal
        numbers) or pack (few devices, so that the others can train)
    move_after: a job moves to an idle device if requests use its device for this long; 0: it waits
    look_ahead: copy the next request's model while the device computes, if there is memory for it
    training: which job trains next: rotate (take turns), fair (least device time so far), srtf
        (shortest remaining time), fifo (first submitted), pack (smallest), coshift (take turns, and
        one computes while another waits for a batch)
    activation_memory: with coshift: device memory for the activations of all jobs together, so that
        one job computes while another waits for its copies; 0: each job has its own
    max_queue: maximum number of waiting requests
    max_queue_per_model: maximum number of waiting requests of one model
    max_queue_time: maximum predicted computing time of the waiting requests of one model; 0: no
        limit
    max_wait: a request that has waited this long goes first
    commit_every: interval between commits of a training job's state, in memory and on disk
    max_compute: a request that computes longer is killed; 0: never
    deadline_grace: a request that still computes this long after its deadline is killed
    max_swapped: maximum number of jobs per device whose memory is in host memory, because requests
        or other jobs need their place; on a GPU at most 1; 0: they restart from their last commit
    stop_grace: a job that is not suspended within this time is killed; each kill reduces the limit
        to a quarter (at least 1s), and after four the job is paused
    evict_grace: a job that does not leave the device within this time is killed
    """

    policy: Annotated[str, written("a policy", policy_name)] = "priority"
    admission: Literal["off", "deadline"] = "off"
    default_deadline_ms: Time = 0
    placement: Placement = "least-finish"
    move_after_ms: Time = 0
    look_ahead: bool = True
    training: JobOrder = "rotate"
    activation_memory_bytes: Size = 0
    max_queue: Count = 512
    max_queue_per_model: Count = 256
    max_queue_time_ms: Time = 0
    max_wait_ms: Time = parse_ms("2s")
    commit_every_ms: Time = parse_ms("5s")
    max_compute_ms: Time = parse_ms("60s")
    deadline_grace_ms: Time = parse_ms("5s")
    max_swapped: Annotated[int, Meta(ge=0)] = 4
    stop_grace_ms: Time = parse_ms("30s")
    evict_grace_ms: Time = parse_ms("30s")


class JobsConfig(Section, frozen=True):
    """``[jobs]``: what is kept of jobs.

    keep: finished jobs to keep, with their last state and log: a number, or a time (7d)
    shared_input: host memory for the batches of each group of jobs that share their input
    keep_versions: number of versions of a model to keep when a job publishes a new one, including
        the current one
    """

    keep: Annotated[RetentionPolicy, written("a number or a time", RetentionPolicy.parse)] = (
        RetentionPolicy(20)
    )
    shared_input_bytes: Annotated[Size, Meta(ge=4 << 20)] = parse_size("256MiB")
    keep_versions: Count = 2


class LogConfig(Section, frozen=True):
    """``[log]``: size and contents of logs.

    max: maximum size of each log; of the server's and its processes' logs, two older files of that
        size are kept too
    requests: share of the inferences that are logged in STATE_DIR/logs/requests.jsonl, one JSON
        object per line: 1: all, 0.1: one in ten, 0: none
    """

    max_bytes: Annotated[Size, Meta(ge=1 << 18)] = parse_size("16MiB")
    requests: Annotated[float, Meta(ge=0, le=1)] = 0.0


class SecurityConfig(Section, frozen=True):
    """``[security]``: what clients' programs can reach.

    sandbox: clients' programs may open no file, socket or process: on (as far as the kernel
        supports it), require (completely, or the server does not start) or off
    tenants: shared: one process serves models of several keys in turn; separate: a process serves
        only one key's models and maps only their memory (cpu device, with the sandbox;
        docs/adr/0023-tenants.md has the cost of a switch)
    """

    sandbox: Literal["on", "require", "off"] = "on"
    tenants: Literal["shared", "separate"] = "shared"


class GatewayConfig(Section, frozen=True):
    """``[gateway]``: HTTP and gRPC.

    http: address for HTTP clients; auto: 127.0.0.1:8000, or another port if that is taken, or none
        if only grpc is given; off: none
    grpc: address for gRPC clients, if grpcio is installed; auto: 127.0.0.1:8001, or another port if
        that is taken, or none if only http is given; off: none
    roles: roles of every caller: infer, urgent (priority high), register, operate, code; [] gives
        none, so callers need tokens; a token may add roles
    tokens: file of bearer tokens, mode 0600, with lines NAME TOKEN ROLE,ROLE
    origins: other sites whose pages may send requests (CORS), such as https://app.example.com
    tls_cert: file of the certificate chain; needs tls_key
    tls_key: file of the private key; needs tls_cert
    behind_proxy: a proxy in front terminates TLS and may forward any Host; callers need tokens
    max_body: largest request, and limit for all incomplete requests together
    nv_metrics: /metrics also has Triton's names (nv_inference_…, nv_gpu_…), for its dashboards
    max_connections: maximum number of HTTP connections; half of them from one address
    text_processes: maximum number of language models with a tokenizer that have a text process at
        the same time; others wait
    aliases: other model names for OpenAI's clients, such as gpt-4o=chat
    cluster: file with the table of the cluster's nodes; the node writes it
    """

    http: GatewayAddress = "auto"
    grpc: GatewayAddress = "auto"
    roles: tuple[RoleName, ...] = ("infer",)
    tokens: str = ""
    origins: tuple[Origin, ...] = ()
    tls_cert: str = ""
    tls_key: str = ""
    behind_proxy: bool = False
    max_body_bytes: Annotated[Size, Meta(ge=1 << 16)] = parse_size("64MiB")
    nv_metrics: bool = False
    max_connections: Annotated[int, Meta(ge=2)] = 1024
    text_processes: Count = 8
    aliases: tuple[Alias, ...] = ()
    cluster: str = ""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """All settings of a server. If ``profiles_dir`` is empty, the built-in profiles are used."""

    server: ServerConfig = ServerConfig()
    device: DeviceConfig = DeviceConfig()
    host: HostConfig = HostConfig()
    workers: WorkersConfig = WorkersConfig()
    preprocess: PreprocessConfig = PreprocessConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    jobs: JobsConfig = JobsConfig()
    log: LogConfig = LogConfig()
    security: SecurityConfig = SecurityConfig()
    gateway: GatewayConfig = GatewayConfig()
    tenants: dict[str, float] = {}  # weights
    models: tuple[ModelConfig, ...] = ()
    profiles_dir: str = ""


VARIABLES: Final = "host, key, server_key, token, profiles_dir, failpoints, cuda_bindings"
WEIGHT_HELP: Final = (
    "weight of a key or token, by its name, for its share of the device's time within a priority; "
    '"*": all clients without one, "": the owner'
)
PROFILES_VARIABLE: Final = "PIPESWITCH_PROFILES_DIR"  # a setting outside the sections
SECTIONS: Final[Mapping[str, type[Section]]] = {
    item.name: item.type
    for item in msgspec.structs.fields(Config)
    if isinstance(item.type, type) and issubclass(item.type, Section)
}


def _elsewhere(key: str) -> str:
    owners = [f"[{name}]" for name, cls in SECTIONS.items() if key in settings(cls)]
    return f"; it belongs to {' or '.join(owners)}" if owners else ""


class _Reader:
    """Reader of settings from tables; ``errors`` lists every problem with its origin."""

    def __init__(self, where: str, origins: Mapping[str, str]) -> None:
        self._where, self._origins = where, origins
        self.errors: list[str] = []

    def complain(self, text: str, place: str) -> None:
        origin = self._origins.get(place, self._where)
        self.errors.append(f"{origin}: {text}" if origin else text)

    def table(
        self, cls: type[msgspec.Struct], title: str, section: str, raw: Any
    ) -> dict[str, Any]:
        """Return the values of a section, by field name."""
        known, values = settings(cls), dict[str, Any]()
        if not isinstance(raw, Mapping):
            self.complain(f"{section}: {raw!r} is not a table", section)
            return values
        for key, value in raw.items():
            try:
                if key not in known:
                    raise ValueError(f"unknown key{_elsewhere(key) or nearest(key, known)}")
                values[known[key].name] = read(known[key].kind, value)
            except ValueError as problem:
                self.complain(f"{title} {key}: {problem}", f"{section}.{key}")
        for key, item in known.items():
            if item.is_required and key not in raw:
                self.complain(f"{title} {key}: is required", section)
        return values

    def models(self, tables: Any) -> list[dict[str, Any]]:
        """Return the values of each ``[[model]]``."""
        if not isinstance(tables, list):
            self.complain("model: write [[model]] above each model, with two brackets", "model")
            return []
        models = [
            self.table(ModelConfig, f"[[model]] {index}", "model", table)
            for index, table in enumerate(tables)
        ]
        for index, model in enumerate(models):
            if not model.keys() & {"source", "like"}:
                self.complain(f"[[model]] {index} source: is required, or like", "model")
        names = [model.get("name") for model in models]
        for name in dict.fromkeys(name for name in names if name and names.count(name) > 1):
            self.complain(f"[[model]] name: {name!r} appears twice", "model")
        return models


def parse(
    raw: Mapping[str, Any], where: str = "", origins: Mapping[str, str] | None = None
) -> Config:
    """Check a tree of settings in the form of a TOML file, and return them.

    Args:
        raw: sections by name.
        where: the file's name, for errors.
        origins: origin of each ``section`` and ``section.key`` that did not come from the file.

    Raises:
        ConfigError: a setting is wrong; the text has one line for each problem, and
            ``data["errors"]`` lists them.
    """
    reader = _Reader(where, origins or {})
    sections = {
        name: reader.table(cls, f"[{name}]", name, raw.get(name, {}))
        for name, cls in SECTIONS.items()
    }
    models = reader.models(raw.get("model", []))
    profiles_dir = raw.get("profiles_dir", "")
    if not isinstance(profiles_dir, str):
        reader.complain(f"profiles_dir: {profiles_dir!r} is not a text", "profiles_dir")
    tenants, weights = raw.get("tenants", {}), {}
    if not isinstance(tenants, Mapping):
        reader.complain(f"tenants: {tenants!r} is not a table", "tenants")
        tenants = {}
    for name, value in tenants.items():
        try:
            weights[read(TenantName, name)] = read(Weight, value)
        except ValueError as problem:
            reader.complain(f"[tenants] {name}: {problem}", f"tenants.{name}")
    others = [*SECTIONS, "tenants", "model", "profiles_dir"]
    for name in raw:
        if name not in others:
            reader.complain(f"[{name}]: unknown section{nearest(name, others)}", name)
    if reader.errors:
        are_flags = all(one.startswith("command line:") for one in reader.errors)
        hint = "pipeswitch " + ("serve --help" if are_flags else "config init writes an example")
        raise ConfigError("\n".join(reader.errors), hint=hint, errors=reader.errors)
    return Config(
        **{name: cls(**sections[name]) for name, cls in SECTIONS.items()},  # type: ignore[arg-type]
        tenants=weights,
        models=tuple(ModelConfig(**model) for model in models),
        profiles_dir=profiles_dir,
    )


def load(
    path: str | Path | None = None,
    *,
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
) -> Config:
    """Return settings with absolute folders; flags win over environment, file and defaults.

    Args:
        path: a TOML file; None: ``pipeswitch.toml`` in the current folder if there is one.
        flags: a tree like the file's; keys whose value is None are ignored.
        environ: variables ``PIPESWITCH_SECTION__KEY``; default: the process's environment.

    Raises:
        ConfigError: a setting is wrong; the text has every problem of all sources.
    """
    environ = os.environ if environ is None else environ
    if path is None and Path("pipeswitch.toml").is_file():
        path = "pipeswitch.toml"
        _check_found(Path(path))
    tree: dict[str, Any] = {} if path is None else _read_toml(Path(path))
    origins: dict[str, str] = {}

    def overrule(section: str, key: str, value: Any, origin: str) -> None:
        table = tree.get(section)
        tree[section] = {**(table if isinstance(table, dict) else {}), key: value}
        origins[section] = origins[f"{section}.{key}"] = origin

    if PROFILES_VARIABLE in environ:
        tree["profiles_dir"] = environ[PROFILES_VARIABLE]
    for name, value in sorted(environ.items()):
        section, separator, key = name.removeprefix("PIPESWITCH_").lower().partition("__")
        if name.startswith("PIPESWITCH_") and separator:
            overrule(section, key, value, f"${name}")
    for section, values in (flags or {}).items():
        if isinstance(values, Mapping):
            for key, value in values.items():
                if value is not None:
                    overrule(section, key, value, "command line")
        elif values is not None:
            tree[section] = values
    return _with_directories(parse(tree, str(path or ""), origins), environ)


def misspelt_variables(environ: Mapping[str, str]) -> list[str]:
    """Return a warning for each variable with our prefix that nothing reads, if one is near."""
    full = {key: f"{name}__{key}" for name, cls in SECTIONS.items() for key in settings(cls)}
    others, texts = VARIABLES.split(", "), []
    full |= {name: name for name in others}
    for name in environ:
        prefix, _, word = name.lower().partition("_")
        is_odd = prefix == "pipeswitch" and "__" not in word and word not in others
        if is_odd and (near := nearest(word, full)):
            meant = full[near.split('"')[1]].upper()
            texts.append(f"unknown variable {name}; did you mean PIPESWITCH_{meant}?")
    return texts


def _check_found(path: Path) -> None:
    """Raise ConfigError if another user may have written the file: it may name code to run."""
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
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = "pipeswitch config init writes an example"
        raise ConfigError(f"{path} is not TOML: {error}", hint=hint) from None


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """Return ``$XDG_STATE_HOME/pipeswitch``, by default below ``~/.local/state``."""
    base = environ.get("XDG_STATE_HOME") or str(Path(environ.get("HOME", "~"), ".local/state"))
    return Path(base, "pipeswitch")


def default_runtime_dir(environ: Mapping[str, str]) -> Path:
    """Return ``$XDG_RUNTIME_DIR/pipeswitch``, or without one a folder of the user's in /tmp."""
    base = environ.get("XDG_RUNTIME_DIR")
    return Path(base, "pipeswitch") if base else Path(f"/tmp/pipeswitch-{os.getuid()}")


def _with_directories(config: Config, environ: Mapping[str, str]) -> Config:
    replace, server, gateway = msgspec.structs.replace, config.server, config.gateway
    state = _absolute(server.state_dir or default_state_dir(environ))
    server = replace(
        server,
        models=server.models and _absolute(server.models),
        state_dir=state,
        runtime_dir=_absolute(server.runtime_dir or default_runtime_dir(environ)),
        keys_dir=_absolute(server.keys_dir or Path(state, "keys")),
    )
    files = {name: getattr(gateway, name) for name in ("tokens", "tls_cert", "tls_key", "cluster")}
    gateway = replace(gateway, **{name: _absolute(file) for name, file in files.items() if file})
    models = tuple(
        replace(
            model,
            source=_absolute_file(model.source, ".bundle"),
            weights=_absolute_file(model.weights, ".safetensors"),
            adapter=model.adapter and _absolute(model.adapter),
        )
        for model in config.models
    )
    return replace(config, server=server, gateway=gateway, models=models)


def _absolute(path: str | Path) -> str:
    try:
        return str(Path(path).expanduser().absolute())
    except RuntimeError:
        raise ConfigError(f"no user {str(path).partition('/')[0]!r} has a home: {path}") from None


def _absolute_file(text: str, suffix: str) -> str:
    return _absolute(text) if text.endswith(suffix) else text


def example() -> str:
    """Return the commented file that ``config init`` writes: every setting with its default."""
    lines = ["# PipeSwitch. Flags win over PIPESWITCH_SECTION__KEY, which win over this file.", ""]
    lines += ['profiles_dir = ""  # measured profiles of models; empty: those that come along', ""]
    for name, cls in SECTIONS.items():
        lines += [f"[{name}]", *map(_example_line, settings(cls), settings(cls).values()), ""]
    lines += [f"[tenants]  # {WEIGHT_HELP}", "# alice = 1.0", ""]
    lines += ["# [[model]]  # registered when the server starts; repeat for more"]
    shown = {"name": "resnet152", "source": "torchvision:resnet152", "weights": "random:0"}
    for key, item in settings(ModelConfig).items():
        lines.append("# " + _example_line(key, item, shown.get(key)))
    return "\n".join(lines) + "\n"


def _example_line(key: str, item: ConfigKey, shown: str | None = None) -> str:
    return f"{key} = {json.dumps(shown or item.default)}  # {item.help}"


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the file."""

    def table(cls: type[msgspec.Struct]) -> dict[str, Any]:
        facts: dict[str, Any] = msgspec.json.schema(cls)["$defs"][cls.__name__]
        rows = {}
        for key, item in settings(cls).items():
            # A parsed setting is a text or a number: 20GiB, 0.9, 0.
            rules = {} if "read" in rules_of(item.kind).extra else facts["properties"][item.name]
            rows[key] = rules | {"description": item.help, "default": item.default}
        facts |= {"properties": rows, "description": (cls.__doc__ or "").splitlines()[0]}
        return facts

    sections: dict[str, Any] = {name: table(cls) for name, cls in SECTIONS.items()}
    weight = msgspec.json.schema(Weight) | {"description": WEIGHT_HELP, "default": 1.0}
    sections["tenants"] = {"type": "object", "additionalProperties": weight}
    sections["model"] = {"type": "array", "items": table(ModelConfig)}
    sections["profiles_dir"] = {"type": "string", "default": ""}
    return {
        "title": "pipeswitch",
        "type": "object",
        "additionalProperties": False,
        "properties": sections,
    }
