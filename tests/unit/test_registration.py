"""Registrations: every interface fills the same request, which one function checks."""

from __future__ import annotations

import inspect
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from pipeswitch.base.errors import ConfigError, InvalidInput, PipeSwitchError
from pipeswitch.base.model_options import (
    PRECISIONS,
    ModelConfig,
    ModelOptions,
    RegisterRequest,
    SourceFile,
)
from pipeswitch.base.roles import OWNER
from pipeswitch.base.settings import settings
from pipeswitch.cli import common
from pipeswitch.cli.main import main
from pipeswitch.client.client import Client
from pipeswitch.client.model_sources import RegisterOptions
from pipeswitch.controller.restore import configured
from pipeswitch.frontend import registration, verbs
from pipeswitch.frontend.verbs import Rules, ask
from pipeswitch.programs.spec import BuildSpec
from pipeswitch.scheduler.state.events import RegisterModelRequest, Token
from pipeswitch.wire.frames import VERSION, RequestHeader, encode_header

SOURCE = "torchvision:resnet18"


class Recorded(Client):
    """Client that records its requests and sends none."""

    def __init__(self) -> None:
        self.body: dict[str, Any] = {}
        self._connection: Any = SimpleNamespace(request=self._request)

    def _request(self, op: str, **options: Any) -> Future[Any]:
        header = encode_header(RequestHeader(v=VERSION, op=op, id="1", body=options["body"]))
        self.body = msgspec.msgpack.decode(header)["body"]
        future: Future[Any] = Future()
        future.set_result(SimpleNamespace(body={"name": "m"}))
        return future


@pytest.fixture(autouse=True)
def kinds(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Kinds of requests that are installed, whatever the checkout has."""
    known = {"generation"}

    def load(name: str) -> None:
        if name not in known:
            raise ConfigError(name)

    monkeypatch.setattr(verbs, "KINDS", SimpleNamespace(load=load))
    monkeypatch.setattr(registration.time, "time", lambda: 1.5)
    return known


def asked(body: dict[str, Any]) -> RegisterModelRequest:
    header = RequestHeader(v=VERSION, op="register", id="1", model="m", body=body)
    event = ask(header, Token(1), OWNER, Rules())
    assert isinstance(event, RegisterModelRequest)
    return event


def test_the_sdk_the_command_line_and_the_file_ask_for_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("pipeswitch.extras.stages", reason="preprocess is an extra's")
    sdk, line = Recorded(), Recorded()
    sdk.register(
        "m",
        SOURCE,
        inputs={"x": ((8, (1, 9)), "float32")},
        max_batch=4,
        batch=2,
        batch_delay_ms=3.0,
        devices=["cpu:0"],
        preprocess="a.b:c",
        priority="normal",
        raw={"text": (((1, 64),), "bytes")},
        precision="exact",
        weights="random:1",
        generate=True,
        aliases=["a", "b"],
    )
    monkeypatch.setattr(common, "connected", lambda: line)
    monkeypatch.setattr(Recorded, "__exit__", lambda *_: None)
    words = [
        SOURCE,
        "--input=x=8x1..9:float32",
        "--max-batch=4",
        "--batch=2",
        "--batch-delay=3ms",
        "--priority=normal",
        "--devices=cpu:0",
        "--preprocess=a.b:c",
        "--raw=text=1..64:bytes",
        "--weights=random:1",
        "--generate",
        "--precision=exact",
        "--alias=a",
        "--alias=b",
        "--json",
    ]
    done = CliRunner().invoke(main, ["register", "m", *words])
    assert done.exit_code == 0, done.output
    assert sdk.body == line.body
    file = ModelConfig(
        name="m",
        source=SOURCE,
        inputs={"x": ((8, (1, 9)), "float32")},
        max_batch=4,
        batch=2,
        batch_delay_ms=3.0,
        devices=("cpu:0",),
        preprocess="a.b:c",
        raw={"text": (((1, 64),), "bytes")},
        priority="normal",
        weights="random:1",
        generate=True,
        precision="exact",
        aliases=("a", "b"),
    )
    assert configured(Token(1), file) == asked(sdk.body)


def test_each_option_is_declared_once_and_python_has_its_type_and_help() -> None:
    options = {*ModelOptions.__struct_fields__} - {"source"}
    assert RegisterOptions.__annotations__.keys() == options
    assert options < inspect.signature(Client.register).parameters.keys()
    helps = [item.help for item in settings(ModelOptions).values() if item.name in options]
    assert all(text in (Client.register.__doc__ or "") for text in helps)
    flags = {one.name for one in main.commands["register"].params}
    assert options < flags


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "--weights FILE is missing"),
        ({"weights": "random:3"}, "'random:3' are not a file"),
        ({"weights": "put:0", "max_batch": 3}, "omit max_batch"),
        ({"weights": "put:0", "source": SOURCE}, "omit source"),
    ],
)
@pytest.mark.parametrize("mark", [{"as_version": True}, {"like": "other"}])
def test_what_a_model_from_a_file_lacks_is_named(
    mark: dict[str, Any], fields: dict[str, Any], text: str
) -> None:
    with pytest.raises(InvalidInput, match=text):
        asked({**mark, **fields})


def test_the_name_of_a_file_and_the_time_make_no_other_model(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    Path(path := str(tmp_path / "new.safetensors")).touch()
    first = asked(body := {"source": SOURCE, "weights": path})
    assert msgspec.msgpack.decode(first.spec, type=BuildSpec).file == SourceFile("new.safetensors")
    monkeypatch.setattr(registration.time, "time", lambda: 9.5)
    again = asked({**body, "file": {"name": "other.pt"}})
    assert (again.spec_digest, again.spec == first.spec) == (first.spec_digest, False)


def test_a_version_and_a_model_like_another_are_two_things() -> None:
    with pytest.raises(InvalidInput, match="omit as_version"):
        asked({"as_version": True, "like": "other", "weights": "put:0"})
    with pytest.raises(InvalidInput, match="omit priority"):
        asked({"as_version": True, "weights": "put:0", "priority": "high"})


def test_a_file_can_name_the_model_that_another_is_like(tmp_path: Path) -> None:
    (weights := tmp_path / "x.safetensors").touch()
    body = {"like": "other", "weights": str(weights), "aliases": ["a"], "priority": "low"}
    event = asked(body)
    assert (event.like, event.aliases, event.priority) == ("other", ("a",), 2)
    file = ModelConfig(name="m", like="other", weights=str(weights), aliases=("a",), priority="low")
    assert configured(Token(1), file) == event
    assert asked({**body, "like": "another"}).spec_digest != event.spec_digest


@pytest.mark.parametrize("precision", ["", "exact", "fast", "bf16", "int8"])
def test_a_version_may_have_another_precision(precision: str, tmp_path: Path) -> None:
    (weights := tmp_path / "x.safetensors").touch()
    body = {"as_version": True, "weights": str(weights), "precision": precision}
    header = RequestHeader(v=VERSION, op="register", id="1", model="m", body=body)
    event: Any = ask(header, Token(1), OWNER, Rules(allow_code=True))
    assert msgspec.msgpack.decode(event.spec)["precision"] == precision


def test_a_client_that_sends_every_field_asks_for_the_same() -> None:
    defaults = msgspec.to_builtins(RegisterRequest(source=SOURCE))
    sdk = Recorded()
    sdk.register("m", SOURCE)
    assert sdk.body == {"source": SOURCE}
    assert asked(defaults) == asked(sdk.body)
    spec = msgspec.msgpack.decode(asked(defaults).spec, type=BuildSpec)
    assert (spec.max_batch, spec.precision) == (64, "exact")


@pytest.mark.parametrize(
    "field",
    [
        {"source": 3},
        {"source": "a\0b"},
        {"weights": "x" * 5000},
        {"pin": 1},
        {"max_batch": -1},
        {"max_batch": True},
        {"batch": 1},
        {"batch_delay_ms": 2},
        {"batch_delay_ms": float("nan")},
        {"max_error": float("inf")},
        {"max_error": 0.1},
        {"priority": "hgih"},
        {"precision": "fats"},
        {"devices": "cpu"},
        {"devices": ["a"] * 257},
        {"inputs": {"x": [[0], "int8"]}},
        {"inputs": {"x": [[1], "bytes"]}},
        {"inputs": {"x": [[[2, 1]], "int8"]}},
        {"inputs": {"x": [[1] * 9, "int8"]}},
        {"inputs": []},
        {"raw": {"x": [[1], "bytes"]}},
        {"preprocess": "a.b:c"},
        {"state": {"h": "o"}},
        {"state": {"h": ["o", -2]}},
        {"takes": "x"},
        {"example": "x"},
        {"bacth": 8},
        *({"file": {"name": name}} for name in ("", "a/b", "x\x1b[31m", "a\u202eb", "x" * 257)),
        {"file": {"name": "a", "sha256": "5"}},
    ],
)
def test_each_mistake_is_refused_with_a_hint_or_the_field(field: dict[str, Any]) -> None:
    with pytest.raises(PipeSwitchError) as caught:
        asked({"source": SOURCE, **field})
    (name,) = field
    error = caught.value
    assert type(error).__name__ in ("InvalidInput", "RegistrationRefused")
    assert error.hint or name in error.message or "the tree" in error.message


@pytest.mark.parametrize(
    ("fields", "precision"),
    [
        ({}, "exact"),
        ({"generate": True}, "fast"),
        ({"precision": "bf16"}, "bf16"),
        ({"generate": True, "precision": "exact"}, "exact"),
        ({"precision": "int8"}, "int8"),
    ],
)
def test_a_language_model_is_fast_and_a_module_exact_unless_the_request_says(
    fields: dict[str, Any], precision: str
) -> None:
    spec = msgspec.msgpack.decode(asked({"source": "hf:gpt2", **fields}).spec, type=BuildSpec)
    assert spec.precision == precision


def test_a_limit_of_the_error_is_for_a_precision_that_changes_the_answers() -> None:
    asked({"source": "hf:gpt2", "generate": True, "max_error": 0.1})  # it is fast
    with pytest.raises(InvalidInput, match="max_error"):
        asked({"source": "hf:gpt2", "generate": True, "max_error": 0.1, "precision": "exact"})


def test_a_language_model_needs_an_installed_kind_of_requests(kinds: set[str]) -> None:
    kinds.clear()
    with pytest.raises(ConfigError, match="generation"):
        asked({"source": "hf:gpt2", "generate": True})
    asked({"source": "hf:gpt2"})


def test_the_file_knows_every_precision() -> None:
    for precision in {*PRECISIONS} - {"exact"}:
        file = ModelConfig(
            name="m", source=SOURCE, weights="random:0", precision=precision, max_error=0.01
        )
        spec = msgspec.msgpack.decode(configured(Token(1), file).spec, type=BuildSpec)
        assert (spec.precision, spec.max_error) == (precision, 0.01)


def test_a_language_model_may_be_registered_when_the_server_starts() -> None:
    model = ModelConfig(name="m", source="hf:gpt2", weights="pretrained", generate=True, pin=True)
    event = configured(Token(1), model)
    assert event.is_pinned
    assert msgspec.msgpack.decode(event.spec, type=BuildSpec).generate
    without = configured(Token(1), ModelConfig(name="m", source="hf:gpt2", generate=True))
    assert msgspec.msgpack.decode(without.spec, type=BuildSpec).weights == "pretrained"
