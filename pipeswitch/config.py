"""All settings in one place: a frozen value, and the reading of it from file, environment, flags.

The code sees the frozen dataclasses below, validated when made. Their fields are the only list of
settings there is: the reader, which reports all errors at once, ``config init`` and ``config
schema`` follow it.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_type_hints

from .errors import ConfigError
from .roles import ANYONE, Role
from .units import Amount, Keep, nearest, parse_ms, parse_size

DEFAULT_LISTEN: Final = "tcp://127.0.0.1:5555"
_PORT: Final = r"\*|[0-9]{1,4}|[1-5][0-9]{4}|6[0-4][0-9]{3}|65[0-4][0-9]{2}|655[0-2][0-9]|6553[0-4]"
LISTEN_PATTERN: Final = rf"tcp://([^:/\s]+|\[[^\]\s]+\]):({_PORT})"
GATEWAY_PATTERN: Final = rf"auto|off|([^:/\s]+|\[[^\]\s]+\]):({_PORT})"
ORIGIN_PATTERN: Final = r"https?://([a-z0-9.-]+|\[[0-9a-f:]+\])(:[0-9]+)?"  # as browsers write it
NAME_PATTERN: Final = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
"""Names of models, jobs and servers: safe as a file name, a topic and a column."""

MAX_MS: Final = 480 * 3600e3  # 20 days: what waits for it counts milliseconds in 31 bits
PRIORITIES: Final[Mapping[str, int]] = {"high": 0, "normal": 1, "low": 2}  # 0 is the most urgent

POLICIES: Final = ("priority", "fifo", "edf", "sjf", "collate", "alternating")
PLACEMENTS: Final = ("least-finish", "spread", "pack")
JOB_ORDERS: Final = ("rotate", "fair", "srtf", "fifo", "pack", "coshift")
POLICY_GROUP: Final = "pipeswitch.policies"
"""Entry points of this group are policies too."""


def policy_name(value: object) -> str:
    """One that comes along, ``module:name``, or an installed entry point."""
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not a text")
    if value in POLICIES or re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", value):
        return value
    from importlib import metadata  # here: the command line starts without it

    names = [*POLICIES, *(point.name for point in metadata.entry_points(group=POLICY_GROUP))]
    if value not in names:
        raise ValueError(
            f"{value!r} is none of {', '.join(names)}, and no module:name of your own"
            f"{nearest(value, names)}"
        )
    return value


def _setting(
    default: Any, help_text: str, read: Callable[[object], Any] | None = None, **rules: Any
) -> Any:
    """A field with its help.

    Args:
        default: as a user writes it.
        help_text: for the example and the schema.
        read: from what a user writes; without it the field has the default's type.
        **rules: ``low``, ``high``, ``choices``, ``pattern`` with an ``example``, ``is_required``.
    """
    metadata = {"help": help_text, "shown": default, "read": read, **rules}
    return field(default=read(default) if read else default, metadata=metadata)


class _Checked:
    """Validated when made: a value that is out of range cannot exist."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):  # type: ignore[arg-type]
            problem = _problem(getattr(self, item.name), item.metadata)
            if problem:
                raise ConfigError(f"{type(self).__name__}.{item.name}: {problem}")


def _problem(value: Any, metadata: Mapping[str, Any]) -> str:
    """Why this value of this setting cannot be, or nothing."""
    reader, high = metadata.get("read"), metadata.get("high")
    low = metadata.get("low", 0 if reader in (parse_ms, parse_size) else None)
    if reader is parse_ms and value > MAX_MS:
        return f"longer than {MAX_MS / 3600e3:.0f}h"
    if isinstance(value, float) and not math.isfinite(value):
        return f"{value} is not a number to reckon with"
    if low is not None and value < low:
        return f"{value} is below {low}"
    if high is not None and value > high:
        return f"{value} is above {high}"
    choices, pattern = metadata.get("choices"), metadata.get("pattern")
    for one in value if isinstance(value, tuple) else (value,):
        if choices and one not in choices:
            return f"{one!r} is none of {', '.join(choices)}{nearest(str(one), choices)}"
        if pattern is not None and one and not re.fullmatch(pattern, one):
            example = metadata.get("example")
            return f"{one!r} " + (
                f"is not of the form {example}" if example else f"does not match {pattern}"
            )
    return ""


@dataclass(frozen=True)
class ServerConfig(_Checked):
    """``[server]``: the doors and what may come through them."""

    listen: str = _setting(
        DEFAULT_LISTEN, "where clients connect",
        pattern=LISTEN_PATTERN, example=DEFAULT_LISTEN,
    )  # fmt: skip
    name: str = _setting(
        "", "name of the owner's socket; empty: the port", pattern=NAME_PATTERN.pattern
    )
    max_message_bytes: int = _setting(
        "256MiB", "largest tensor or weight chunk a client may send", parse_size, low=1 << 20
    )
    pool_bytes: int = _setting(
        "512MiB", "shared memory for waiting requests and replies", parse_size, low=1 << 20
    )
    shares: bool = _setting(
        True,
        "clients on the owner's socket hand over large tensors in shared memory: a quarter "
        "of pool_bytes each, eight clients at once",
    )
    max_upload_bytes: int = _setting(
        "32GiB", "largest model file a client may send", parse_size, low=1 << 20
    )
    max_disk: Amount = _setting(  # noqa: RUF009 - Amount is frozen, sharing it is safe
        "auto", "programs, uploads and commits in state_dir, all together: auto (9/10 of its "
        "disk), 100GiB or a fraction", Amount.parse,
    )  # fmt: skip
    max_disk_per_client: Amount = _setting(  # noqa: RUF009 - as above
        "auto", "of that, programs and uploads of one TCP client (a key's name): auto (half), "
        "10GiB or a fraction", Amount.parse,
    )  # fmt: skip
    max_models_per_client: int = _setting(
        1000, "models that one TCP client (a key's name) may have registered", low=1
    )
    allow_code: tuple[str, ...] = _setting(
        (), "module names and script paths TCP clients may name (shell wildcards)"
    )
    tcp_roles: tuple[str, ...] = _setting(
        (Role.INFER.value,), "what every TCP client may do: infer, urgent (priority high), "
        "register, operate, code; its key may say more", choices=tuple(Role),
    )  # fmt: skip
    auth: str = _setting(
        "auto", "keys: TCP clients need an admitted key (pipeswitch keys); "
        "auto: only when other machines can reach the address", choices=("auto", "keys"),
    )  # fmt: skip
    keys_dir: str = _setting("", "the server's CURVE key and its clients'; empty: STATE_DIR/keys")
    max_connections: int = _setting(1024, "TCP connections at once", low=1)
    watchdog_ms: float = _setting(
        "30s", "a scheduler that stands still this long ends the server; 0: never", parse_ms
    )
    drain_grace_ms: float = _setting(
        "30s", "time to finish what was accepted, after SIGTERM or SIGINT", parse_ms
    )
    state_dir: str = _setting(
        "", "bundles, commits, journal, logs; empty: $XDG_STATE_HOME/pipeswitch"
    )
    runtime_dir: str = _setting("", "folder of its socket; empty: $XDG_RUNTIME_DIR/pipeswitch")


def _device_names(given: object) -> str:
    """One or more devices, each once, with commas between them."""
    names = [part.strip() for part in str(given).split(",")]
    if names == ["auto"]:
        return "auto"
    places = []
    for name in names:
        found = re.fullmatch(r"(cpu|cuda)(?::([0-9]{1,3}))?", name)
        if found is None:
            alone = ", which goes alone" if name == "auto" else ""
            raise ValueError(f"{name!r} is none of auto, cpu, cpu:0, cpu:1, cuda:0, …{alone}")
        places.append(f"{found[1]}:{int(found[2] or 0)}")
    for name in places:
        if places.count(name) > 1:
            raise ValueError(f"{name} is there twice")
    return ",".join(places if len(places) > 1 else names)


@dataclass(frozen=True)
class DeviceConfig(_Checked):
    """``[device]``: which one, and how much of it."""

    name: str = _setting("auto", "auto, cpu or cuda:0; several: cuda:0,cuda:1,cpu", _device_names)
    arena: Amount = _setting(  # noqa: RUF009 - Amount is frozen, sharing it is safe
        "auto", "device memory to take: auto, 20GiB or a fraction", Amount.parse
    )
    prefix: Amount = _setting(  # noqa: RUF009 - as above
        "auto",
        "part of the arena for the first groups of models that had to leave: auto (none), 1GiB…",
        Amount.parse,
    )
    link_gbps: float = _setting(
        0.0, "cpu device: model a host link of this many GB/s; 0: as fast as it goes", low=0
    )
    waits: str = _setting(
        "auto", "cuda: what waits for a layer group to arrive: auto, cpu or gpu",
        choices=("auto", "cpu", "gpu"),
    )  # fmt: skip
    words: str = _setting(
        "auto", "cuda: how arrival is signalled: auto, copy or write",
        choices=("auto", "copy", "write"),
    )  # fmt: skip
    activations: str = _setting(
        "auto", "cuda: where models compute: auto, private or slice (of the arena)",
        choices=("auto", "private", "slice"),
    )  # fmt: skip
    slice: Amount = _setting(  # noqa: RUF009 - as above
        "auto", "cuda: size of that slice: auto, 4GiB or a fraction", Amount.parse
    )
    graphs: str = _setting(
        "auto", "cuda: replay layer groups as CUDA graphs: auto, off or on",
        choices=("auto", "off", "on"),
    )  # fmt: skip
    graph_budget_bytes: int = _setting(
        "1GiB", "cuda: driver memory that one worker's graphs may take", parse_size
    )
    bindings: str = _setting(
        "cuda.bindings", "cuda: the package with the bindings", pattern=r"[A-Za-z_][A-Za-z0-9_.]*"
    )

    @property
    def names(self) -> tuple[str, ...]:
        """Each device's own."""
        return tuple(self.name.split(","))


@dataclass(frozen=True)
class HostConfig(_Checked):
    """``[host]``: the store where registered models wait."""

    store: Amount = _setting(  # noqa: RUF009 - Amount is frozen, sharing it is safe
        "auto", "host memory for models: auto, 32GiB or a fraction", Amount.parse
    )


@dataclass(frozen=True)
class WorkersConfig(_Checked):
    """``[workers]``."""

    standby: int = _setting(2, "warm workers beside the active one", low=1, high=32)
    threads: int = _setting(
        0, "compute threads of a worker on a cpu device; 0: cores - 1, shared among the devices",
        low=0, high=4096,
    )  # fmt: skip
    build_timeout_ms: float = _setting(
        "10m", "a registration that builds and verifies longer is refused; 0: never", parse_ms
    )
    build_memory: Amount = _setting(  # noqa: RUF009 - Amount is frozen, sharing it is safe
        "auto", "host memory of one build: auto (3/4 of what is free), 8GiB or a fraction",
        Amount.parse,
    )  # fmt: skip
    task_memory: Amount = _setting(  # noqa: RUF009 - as above
        "auto", "host memory for the intermediate values of a client's model (cpu device): auto "
        "(half of what is free), 4GiB or a fraction", Amount.parse,
    )  # fmt: skip
    restart_backoff_ms: float = _setting(
        "1s", "pause before a process that keeps dying is started again", parse_ms
    )


@dataclass(frozen=True)
class PreprocessConfig(_Checked):
    """``[preprocess]``."""

    processes: int = _setting(
        1, "processes that run --preprocess functions, beside the devices", low=1, high=64
    )
    max_time_ms: float = _setting(
        "60s", "a function that runs longer for one request is killed; 0: never", parse_ms
    )


@dataclass(frozen=True)
class SchedulerConfig(_Checked):
    """``[scheduler]``."""

    policy: str = _setting(
        "priority", f"{', '.join(POLICIES)}, or your own: module:name", policy_name
    )
    admission: str = _setting(
        "off", "deadline: a request whose deadline cannot be met, by what its model took before, "
        "is refused at once", choices=("off", "deadline"),
    )  # fmt: skip
    default_deadline_ms: float = _setting(
        "0", "the deadline of requests that name none; 0: none", parse_ms
    )
    placement: str = _setting(
        "least-finish", "which of several devices a request goes to: where it would compute first, "
        "spread (as many requests everywhere) or pack (on few, the others train)",
        choices=PLACEMENTS,
    )  # fmt: skip
    move_after_ms: float = _setting(
        "0", "a job whose device computes requests for so long moves to one that is idle; 0: it "
        "waits", parse_ms,
    )  # fmt: skip
    look_ahead: bool = _setting(
        True, "send the next request's model while the device computes, where it fits"
    )
    training: str = _setting(
        "rotate", "which of several jobs trains next: rotate (in turns), fair (the least of the "
        "device's time so far), srtf (the one that ends first), fifo (the one that came first), "
        "pack (the smallest), coshift (in turns, and while one waits for a batch another computes)",
        choices=JOB_ORDERS,
    )  # fmt: skip
    activation_memory_bytes: int = _setting(
        "0", "with coshift: device memory for the activations of all jobs together; one computes "
        "while another waits for its copies; 0: each keeps to its own", parse_size,
    )  # fmt: skip
    max_queue: int = _setting(512, "requests that may wait", low=1)
    max_queue_per_model: int = _setting(
        256, "of them for one model: a flood for one leaves room for the others", low=1
    )
    max_queue_time_ms: float = _setting(
        "0", "how long the requests that wait for one model may compute; 0: no limit", parse_ms
    )
    max_wait_ms: float = _setting("2s", "after this a waiting request goes first", parse_ms)
    commit_every_ms: float = _setting(
        "5s", "how often a training job's state is kept, in memory and on disk", parse_ms
    )
    max_compute_ms: float = _setting(
        "60s", "a request that computes longer is taken for an endless loop and killed; 0: never",
        parse_ms,
    )  # fmt: skip
    deadline_grace_ms: float = _setting(
        "5s", "a request that computes so long after its deadline is killed", parse_ms
    )
    stop_grace_ms: float = _setting(
        "30s",
        "time after which a job that does not step aside is killed; the next time it has a "
        "quarter of that, at least 1s, and after four times it is paused",
        parse_ms,
    )
    evict_grace_ms: float = _setting(
        "30s", "a job that does not leave the device for so long is killed", parse_ms
    )


@dataclass(frozen=True)
class JobsConfig(_Checked):
    """``[jobs]``."""

    keep: Keep = _setting(  # noqa: RUF009 - Keep is frozen, sharing it is safe
        "20", "finished jobs that are kept, with their last state and log: a number, or a "
        "time (7d)", Keep.parse,
    )  # fmt: skip
    shared_input_bytes: int = _setting(
        "256MiB", "host memory for the batches of each group of jobs that share their input",
        parse_size, low=4 << 20,
    )  # fmt: skip
    keep_versions: int = _setting(
        2, "versions of a model that stay when a job publishes the next: the current one and those "
        "before it", low=1,
    )  # fmt: skip


@dataclass(frozen=True)
class LogConfig(_Checked):
    """``[log]``."""

    max_bytes: int = _setting(
        "16MiB", "what stays of each log of the server and its processes, beside two older ones of "
        "that size, and of each job's", parse_size, low=1 << 18,
    )  # fmt: skip
    requests: float = _setting(
        0.0, "share of the inferences whose end is a line of JSON in STATE_DIR/logs/requests.jsonl:"
        " 1: of all, 0.1: of one in ten, 0: none", low=0, high=1,
    )  # fmt: skip


@dataclass(frozen=True)
class SecurityConfig(_Checked):
    """``[security]``."""

    sandbox: str = _setting(
        "on", "clients' programs may open no file, socket or process: on (what the "
        "kernel has of it), require (all of it, or no start) or off",
        choices=("on", "require", "off"),
    )  # fmt: skip
    tenants: str = _setting(
        "shared", "shared: models of different keys take turns in the workers' processes; "
        "separate: a process serves one key's models and maps nothing of another's (cpu device, "
        "with the sandbox; docs/adr/0023-tenants.md says what a switch costs)",
        choices=("shared", "separate"),
    )  # fmt: skip


@dataclass(frozen=True)
class GatewayConfig(_Checked):
    """``[gateway]``: HTTP and gRPC for other people's clients."""

    http: str = _setting(
        "auto", "where HTTP clients connect; auto: 127.0.0.1:8000, another port if that is taken, "
        "and nowhere if grpc alone is named; off: nowhere",
        pattern=GATEWAY_PATTERN, example="127.0.0.1:8000",
    )  # fmt: skip
    grpc: str = _setting(
        "auto", "where gRPC clients connect, if grpcio is installed; auto: 127.0.0.1:8001, another "
        "port if that is taken, and nowhere if http alone is named; off: nowhere",
        pattern=GATEWAY_PATTERN, example="127.0.0.1:8001",
    )  # fmt: skip
    roles: tuple[str, ...] = _setting(
        (Role.INFER.value,), "what every caller may do: infer, urgent (priority high), register, "
        "operate, code; its token may say more", choices=tuple(Role),
    )  # fmt: skip
    tokens: str = _setting("", "file of bearer tokens, mode 0600: lines of NAME TOKEN ROLE,ROLE")
    origins: tuple[str, ...] = _setting(
        (), "pages of other sites that may ask here (CORS), such as https://app.example.com",
        pattern=ORIGIN_PATTERN, example="https://app.example.com",
    )  # fmt: skip
    tls_cert: str = _setting("", "file of the certificate chain; with tls_key")
    tls_key: str = _setting("", "file of its key")
    behind_proxy: bool = _setting(
        False, "a proxy in front does TLS, and passes other Hosts on; callers need tokens"
    )
    max_body_bytes: int = _setting(
        "64MiB", "largest request, and all unfinished ones together", parse_size, low=1 << 16
    )
    nv_metrics: bool = _setting(
        False, "/metrics by Triton's names (nv_inference_…, nv_gpu_…) too, for its dashboards"
    )
    max_connections: int = _setting(1024, "HTTP connections at once; half from one address", low=2)
    text_processes: int = _setting(
        8,
        "maximum number of language models with a tokenizer that have a text process at once; "
        "others wait for their turn",
        low=1,
    )
    cluster: str = _setting(
        "", "file with the table of the cluster's nodes, written by the node; the gateway routes "
        "requests by it"
    )  # fmt: skip


@dataclass(frozen=True)
class ModelConfig(_Checked):
    """``[[model]]``: registered when the server starts."""

    name: str = _setting(
        "", "what requests call it", pattern=NAME_PATTERN.pattern, is_required=True
    )
    source: str = _setting(
        "", "torchvision:…, hf:…, a bundle file, package.module:factory", is_required=True
    )
    weights: str = _setting("", "FILE.safetensors, pretrained or random:SEED")
    inputs: tuple[str, ...] = _setting((), "like x=8x3x224x224:float32")
    priority: str = _setting("normal", "high, normal or low", choices=tuple(PRIORITIES))
    pin: bool = _setting(False, "keep on the device")
    devices: tuple[str, ...] = _setting(
        (), "devices that may serve it, by name or kind; empty: all of the first one's kind"
    )
    max_batch: int = _setting(0, "largest dynamic batch; 0: 64", low=0)
    batch: int = _setting(0, "waiting requests are joined up to this batch; 0: never", low=0)
    batch_delay_ms: float = _setting("0", "how long a request waits for others to join", parse_ms)
    precision: str = _setting(
        "exact", "exact, or fast: packed weights and fused calls", choices=("exact", "fast")
    )
    preprocess: str = _setting("", "package.module:function that makes its inputs from raw ones")
    raw: tuple[str, ...] = _setting((), "what clients send it, like text=1..64:bytes")
    postprocess: str = _setting(
        "", "package.module:function that makes the answer from its outputs"
    )
    returns: tuple[str, ...] = _setting((), "what clients get, like label=1..64:bytes")


@dataclass(frozen=True)
class Config(_Checked):
    """Everything a server is told. ``profiles_dir`` is empty for the profiles that come along."""

    server: ServerConfig = field(default_factory=ServerConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    host: HostConfig = field(default_factory=HostConfig)
    workers: WorkersConfig = field(default_factory=WorkersConfig)
    preprocess: PreprocessConfig = field(default_factory=PreprocessConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    jobs: JobsConfig = field(default_factory=JobsConfig)
    log: LogConfig = field(default_factory=LogConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    gateway: GatewayConfig = field(default_factory=GatewayConfig)
    tenants: Mapping[str, float] = field(default_factory=dict)  # weights
    models: tuple[ModelConfig, ...] = ()
    profiles_dir: str = ""


WEIGHT: Final = _setting(
    1.0, "of the device's time inside a priority: so many parts for a key or token by its name; "
    '"*": for all without one, "": for yourself', low=0.01, high=100,
)  # fmt: skip
PROFILES_VARIABLE: Final = "PIPESWITCH_PROFILES_DIR"  # the one setting outside the sections
SECTIONS: Final[Mapping[str, type[_Checked]]] = {
    name: kind
    for name, kind in get_type_hints(Config).items()
    if isinstance(kind, type) and issubclass(kind, _Checked)
}


def _settings(cls: type[_Checked]) -> dict[str, dataclasses.Field[Any]]:
    """The fields by their key in the file, which has no unit: its values bring theirs."""
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    return {item.name.removesuffix("_bytes").removesuffix("_ms"): item for item in fields}


def _read(item: dataclasses.Field[Any], given: Any) -> Any:
    """A setting's value from what a file, a variable or a flag gives. ValueError says why not."""
    read, kind = item.metadata["read"], type(item.default)
    value: Any = given
    if read is not None:
        value = read(given)
    elif kind is tuple:
        if isinstance(given, str):
            value = [part.strip() for part in given.split(",") if part.strip()]
        if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
            raise ValueError(f"{given!r} is not a list of texts")
        value = tuple(value)
    elif kind in (int, float):
        try:
            value = kind(given)
        except (TypeError, ValueError, OverflowError):
            value = None
        is_cut = kind is int and isinstance(given, float) and value != given
        if value is None or is_cut or isinstance(given, bool):
            raise ValueError(f"{given!r} is not a {'whole ' * (kind is int)}number")
    elif kind is bool and given in ("true", "false"):  # of the environment: all is text there
        value = given == "true"
    elif not isinstance(given, kind):
        raise ValueError(f"{given!r} is not " + ("true or false" if kind is bool else "a text"))
    problem = _problem(value, item.metadata)
    if problem:
        raise ValueError(problem)
    return value


class _Reader:
    """Reads tables of settings; ``errors`` collects every problem with its origin."""

    def __init__(self, where: str, origins: Mapping[str, str]) -> None:
        self._where, self._origins = where, origins
        self.errors: list[str] = []

    def complain(self, text: str, place: str) -> None:
        origin = self._origins.get(place, self._where)
        self.errors.append(f"{origin}: {text}" if origin else text)

    def table(self, cls: type[_Checked], title: str, section: str, given: Any) -> dict[str, Any]:
        """Values of a section by the fields' names."""
        known, values = _settings(cls), {}
        if not isinstance(given, Mapping):
            self.complain(f"{section}: {given!r} is not a table", section)
            return {}
        for key, value in given.items():
            try:
                if key not in known:
                    raise ValueError(f"unknown key{nearest(key, known)}")
                values[known[key].name] = _read(known[key], value)
            except ValueError as problem:
                self.complain(f"{title} {key}: {problem}", f"{section}.{key}")
        for key, item in known.items():
            if item.metadata.get("is_required") and key not in given:
                self.complain(f"{title} {key}: is required", section)
        return values

    def models(self, tables: Any) -> list[dict[str, Any]]:
        if not isinstance(tables, list):
            self.complain("model: write [[model]] above each model, with two brackets", "model")
            return []
        models = [
            self.table(ModelConfig, f"[[model]] {index}", "model", table)
            for index, table in enumerate(tables)
        ]
        names = [model.get("name") for model in models]
        for name in dict.fromkeys(name for name in names if name and names.count(name) > 1):
            self.complain(f"[[model]] name: {name!r} is there twice", "model")
        return models


def parse(
    raw: Mapping[str, Any], where: str = "", origins: Mapping[str, str] | None = None
) -> Config:
    """Check a tree of settings as TOML gives it.

    Args:
        raw: sections by name.
        where: the file's name, for errors.
        origins: ``section`` and ``section.key`` of what did not come from the file, and where it
            came from.

    Raises:
        ConfigError: with every problem, one per line, and ``data["errors"]`` as a list.
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
            if name not in ("", ANYONE) and not NAME_PATTERN.fullmatch(name):
                raise ValueError("is no name of a key or token")
            weights[name] = _read(WEIGHT, value)
        except ValueError as problem:
            reader.complain(f"[tenants] {name}: {problem}", f"tenants.{name}")
    others = [*SECTIONS, "tenants", "model", "profiles_dir"]
    for name in raw:
        if name not in others:
            reader.complain(f"[{name}]: unknown section{nearest(name, others)}", name)
    if reader.errors:
        hint = "pipeswitch config init writes a commented example"
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
    """Flags over ``PIPESWITCH_SECTION__KEY`` over file over defaults; folders are made absolute.

    Args:
        path: a TOML file; None: ``pipeswitch.toml`` in the current folder if there is one.
        flags: a tree like the file's; keys whose value is None are ignored.
        environ: defaults to the process's environment.

    Raises:
        ConfigError: with every problem of all sources.
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
    files: dict[str, Any] = {
        name: str(Path(getattr(config.gateway, name)).expanduser().absolute())
        for name in ("tokens", "tls_cert", "tls_key", "cluster")
        if getattr(config.gateway, name)
    }
    gateway = dataclasses.replace(config.gateway, **files)
    return dataclasses.replace(config, server=server, gateway=gateway, models=models)


def _absolute_file(text: str, suffix: str) -> str:
    """A file of a [[model]] may be named from the folder the server is started in."""
    return str(Path(text).expanduser().absolute()) if text.endswith(suffix) else text


def example() -> str:
    """The commented file that ``config init`` writes: every setting with its default."""
    lines = ["# PipeSwitch. Flags win over PIPESWITCH_SECTION__KEY, which win over this file.", ""]
    lines += ['profiles_dir = ""  # measured profiles of models; empty: those that come along', ""]
    for name, cls in SECTIONS.items():
        lines += [f"[{name}]", *map(_example_line, _settings(cls), _settings(cls).values()), ""]
    lines += [f"[tenants]  # {WEIGHT.metadata['help']}", "# alice = 1.0", ""]
    lines += ["# [[model]]  # registered when the server starts; repeat for more"]
    shown = {"name": "resnet152", "source": "torchvision:resnet152", "weights": "random:0"}
    for key, item in _settings(ModelConfig).items():
        lines.append("# " + _example_line(key, item, shown.get(key)))
    return "\n".join(lines) + "\n"


def _example_line(key: str, item: dataclasses.Field[Any], shown: str | None = None) -> str:
    return f"{key} = {json.dumps(shown or item.metadata['shown'])}  # {item.metadata['help']}"


_JSON_TYPES: Final = {
    str: "string", bool: "boolean", int: "integer", float: "number", tuple: "array",
}  # fmt: skip


def schema() -> dict[str, Any]:
    """JSON Schema of the file."""

    def table(cls: type[_Checked]) -> dict[str, Any]:
        items = _settings(cls).items()
        required = [key for key, item in items if item.metadata.get("is_required")]
        properties = {key: setting(item) for key, item in items}
        return {
            "type": "object", "additionalProperties": False, "required": required,
            "properties": properties,
        }  # fmt: skip

    def setting(item: dataclasses.Field[Any]) -> dict[str, Any]:
        facts = {"description": item.metadata["help"], "default": item.metadata["shown"]}
        if item.metadata["read"] is None:  # else text or number: 20GiB, 0.9, 0
            facts["type"] = _JSON_TYPES[type(item.default)]
        if "choices" in item.metadata:
            one = facts.setdefault("items", {}) if facts["type"] == "array" else facts
            one["enum"] = item.metadata["choices"]
        return facts

    sections: dict[str, Any] = {name: table(cls) for name, cls in SECTIONS.items()}
    sections["tenants"] = {"type": "object", "additionalProperties": setting(WEIGHT)}
    sections["model"] = {"type": "array", "items": table(ModelConfig)}
    sections["profiles_dir"] = {"type": "string", "default": ""}
    return {
        "title": "pipeswitch", "type": "object", "additionalProperties": False,
        "properties": sections,
    }  # fmt: skip
