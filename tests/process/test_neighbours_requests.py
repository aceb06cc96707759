"""Known faults of other servers in the contents of well-formed requests, tried on ours."""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from frontend_rig import FakeScheduler
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import pipeswitch as ps
from pipeswitch.frontend.intake.validation import check_name
from pipeswitch.frontend.uploads import KEPT_UPLOADS
from pipeswitch.frontend.verbs import VERBS
from pipeswitch.ipc.control_page import sealed_memfd
from pipeswitch.programs.graphs.bundle import Graph, Node, check_graph
from pipeswitch.programs.graphs.operators import OVERLOADS
from pipeswitch.programs.interface.layout import ITEM_BYTES, ValueSpec
from pipeswitch.programs.spec import BuildSpec
from pipeswitch.scheduler.state.events import Query
from pipeswitch.wire.frames import decode_reply
from tests.process.bombs import pickled
from tests.raw_peer import RawPeer, ask, raw_peer

ROOT = Path(__file__).parents[2]
TENSOR = {"name": "x", "dtype": "float32", "shape": [1, 4], "frame": 0}
REFUSED = {"InvalidInput", "RemoteProtocolError", "PermissionDenied", "ModelNotFound"}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FakeScheduler]:
    scheduler = FakeScheduler(tmp_path, max_upload_bytes=1 << 20)
    scheduler.announce("m")
    yield scheduler
    scheduler.close()


class Stranger:
    """A client whose headers may have any content."""

    def __init__(self, sock: RawPeer) -> None:
        self._sock = sock
        self._session = ask(sock, op="hello").session

    def ask(self, *frames: bytes, **fields: Any) -> Any:
        header = {"v": 1, "id": "1", "session": self._session, **fields}
        self._sock.send(msgspec.msgpack.encode(header), *frames)
        return decode_reply(self._sock.hear())

    def put(self, data: bytes, digest: str, size: int, offset: int = 0) -> Any:
        body = {"digest": digest, "size_bytes": size, "offset_bytes": offset}
        return self.ask(data, op="put", body=body)


@pytest.fixture
def stranger(server: FakeScheduler) -> Iterator[Stranger]:
    with raw_peer(server.listeners.tcp.address) as sock:
        yield Stranger(sock)


def is_refused(reply: Any) -> bool:
    return reply.error is not None and reply.error.type in REFUSED


# ---- names, addresses, formats -----------------------------------------------------------------


@settings(deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(st.text(max_size=80))
def test_triton_a_name_never_leads_out_of_its_folder(name: str) -> None:
    try:
        accepted = check_name(name, "model")
    except ps.InvalidInput:
        return
    inside = Path("/store", accepted)
    assert Path(os.path.normpath(inside)) == inside
    assert inside.parent == Path("/store")
    assert not accepted.startswith(".")


OUTSIDE = [
    "..",
    "../secret",
    "a/../../secret",
    "/etc/passwd",
    "\0",
    ".hidden",
    "s/t",
    "%2e%2e",
    "a\\b",
]


@pytest.mark.parametrize("name", OUTSIDE)
def test_triton_no_verb_takes_a_name_that_leads_out_of_its_folder(
    server: FakeScheduler, stranger: Stranger, name: str
) -> None:
    state = Path(server.config.server.state_dir)
    (state / "secret.log").write_text("secret")
    before = sorted(state.rglob("*"))
    register = {"source": "torchvision:resnet18", "weights": "random:0"}
    assert is_refused(stranger.ask(op="register", model=name, body=register))
    for action in ("show", "logs", "cancel"):
        assert is_refused(stranger.ask(op="job", body={"name": name, "action": action}))
    assert is_refused(stranger.ask(op="infer", model=name))
    assert is_refused(stranger.put(b"x", name, 1))
    assert is_refused(stranger.ask(op="register", model="n", body={"source": f"put:{name}"}))
    path = {"source": f"hf:../{name}", "weights": "random:0"}
    assert is_refused(stranger.ask(op="register", model="n", body=path))
    assert sorted(state.rglob("*")) == before
    assert not [event for event in server.seen if not isinstance(event, Query)]


@pytest.mark.parametrize(
    "scheme", ["http://", "https://", "ftp://", "file://", "s3://", "//", "hf:http://"]
)
def test_shelltorch_no_source_is_fetched_from_an_address(
    server: FakeScheduler, stranger: Stranger, scheme: str
) -> None:
    """Register from a URL, which nothing may fetch; TorchServe ran models from any address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        url = f"{scheme}127.0.0.1:{listener.getsockname()[1]}/net"
        for body in (
            {"source": f"{url}.bundle"},
            {"source": "torchvision:resnet18", "weights": f"{url}.safetensors"},
            {"source": "hf:gpt2", "weights": url},
        ):
            assert is_refused(stranger.ask(op="register", model="n", body=body)), body
        with pytest.raises(BlockingIOError):
            listener.accept()
    assert not server.seen


def test_shadowray_a_stranger_starts_no_job(server: FakeScheduler, stranger: Stranger) -> None:
    """Submit a job over TCP, which is refused; Ray runs code of any peer that reaches its port."""
    for entry in ("os:abort", "/bin/true", "train.py", "pickle:loads", "__main__:x"):
        reply = stranger.ask(op="train", body={"name": "j", "entry": entry, "args": []})
        assert reply.error.type == "PermissionDenied", entry
    assert not server.seen


@pytest.mark.parametrize(
    ("source", "reason"),
    [("torchvision:resnet18", "Unpickl"), ("hf:{}", "no file named model.safetensors")],
)
def test_torch_pretrained_weights_are_never_unpickled(
    source: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put pickled weights where a download would leave them; loading must not unpickle them."""
    from pipeswitch.programs.compiler.sources import load_source

    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    before = dict(os.environ)
    target = tmp_path / "unpickled"
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    for name in ("resnet18-f37072fd.pth", "pytorch_model.bin"):
        (folder / name).write_bytes(pickled(target))
    (folder / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_embd": 12}')
    with pytest.raises(ps.RegistrationRefused, match=reason):
        load_source(BuildSpec(name="n", source=source.format(folder), weights="pretrained"))
    assert not target.exists()
    changed = {name for name, _ in before.items() ^ os.environ.items()}
    assert changed <= {"TORCHINDUCTOR_CACHE_DIR"}, "servers from the keeper need the same"


@pytest.mark.parametrize("weights", ["pretrained", "random:0"])
def test_torch_a_hubs_configuration_names_no_compiled_attention(
    weights: str, tmp_path: Path
) -> None:
    """Name a hub's kernel; with ``kernels`` installed, transformers would fetch and load it."""
    from pipeswitch.programs.compiler.sources import load_source

    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 12}
    named = {"attn_implementation": "enemy/kernel"}
    (tmp_path / "config.json").write_text(json.dumps({**config, **named}))
    with pytest.raises(ps.RegistrationRefused, match="names code of a hub: 'enemy/kernel'"):
        load_source(BuildSpec(name="n", source=f"hf:{tmp_path}", weights=weights))


@pytest.mark.parametrize("key", ["if", "x=1, y", "__import__('os')", "a.b", "é", "", "None"])
def test_torch_a_bundles_words_never_become_code_of_its_own(key: str) -> None:
    """Use odd argument names, which are refused; torch.export's loader evaluates their text."""
    value = ValueSpec(name="x", dtype="float32", shape=(1, 4))
    graph = Graph(
        version=2,
        inputs=(value,),
        weights=(),
        nodes=(Node("aten.relu.default", ({"v": 0},), {key: 1}),),
        results=(1,),
        outputs=(value,),
    )
    with pytest.raises(ps.RegistrationRefused):
        check_graph(graph)


# ---- values ------------------------------------------------------------------------------------


ODD_TENSORS: dict[str, dict[str, Any]] = {
    "a layout": {"layout": "sparse_coo"},
    "indices": {"indices": [[1 << 40]], "values": 0},
    "a sparse dtype": {"dtype": "sparse"},
    "a quantised dtype": {"dtype": "qint8"},
    "an object dtype": {"dtype": "object"},
    "a dtype that is a map": {"dtype": {}},
    "strides": {"strides": [0, 1 << 40]},
    "a segment's name": {"shared_memory_region": "pool", "shared_memory_offset": 0},
    "an offset": {"offset_bytes": 1 << 20},
    "a negative frame": {"frame": -1},
    "a frame of another": {"frame": 1},
    "a shape of fractions": {"shape": [1.0, 4.0]},
    "a shape that wraps 64 bits": {"shape": [(1 << 62) + 1, 4]},
    "a name that is half a character": {"name": "\ud800"},
}


@pytest.mark.parametrize("what", ODD_TENSORS)
def test_vllm_and_triton_only_dense_tensors_in_their_own_frame_reach_a_model(
    server: FakeScheduler, stranger: Stranger, what: str
) -> None:
    """Send sparse tensors, which corrupted vLLM, and tensors in shared memory, as for Triton."""
    tensor = msgspec.msgpack.encode({**TENSOR, **ODD_TENSORS[what]}) if "half" not in what else b""
    reply = (
        stranger.ask(bytes(16), op="infer", model="m", inputs=[msgspec.Raw(tensor)])
        if tensor
        else stranger.ask(bytes(16), op="infer", model=b"\xed\xa0\x80", inputs=[TENSOR])
    )
    assert is_refused(reply)
    assert not server.seen


def test_vllm_no_operator_makes_a_tensor_that_is_not_dense() -> None:
    kinds = ("sparse", "quantize", "nested", "mkldnn", "_csr", "_coo")
    assert [name for name in OVERLOADS if any(kind in name for kind in kinds)] == []
    assert not [name for name in ITEM_BYTES if name.startswith(("q", "object", "str"))]


ODD_FIELDS: list[dict[str, Any]] = [
    *(
        {"op": "infer", "model": "m", "inputs": [TENSOR], "deadline_ms": n}
        for n in (float("nan"), float("inf"), -1.0, 0, 1e999, "1", {})
    ),
    *(
        {"op": op, "body": {"\x00": {}, "a": [float("nan")]}}
        for op in VERBS
        if op not in ("hello", "infer", "prefetch")
    ),
    {"op": "trace", "body": {"seconds": float("nan")}},
    {"op": "job", "body": {"name": {}, "action": []}},
    {"op": "register", "model": "n", "body": {"source": {}, "inputs": [[]]}},
    {"op": "register", "model": "n", "body": {"source": "hf:gpt2", "inputs": {"x": [[4], {}]}}},
    {"op": {}},
    {"op": "\x00"},
    {"priority": 7, "op": "infer", "model": "m"},
    {"priority": "urgent", "op": "infer", "model": "m", "inputs": [TENSOR]},
]


@pytest.mark.parametrize("fields", ODD_FIELDS, ids=lambda fields: str(fields)[:60])
def test_gateways_no_odd_value_is_an_error_of_the_servers_own(
    server: FakeScheduler, stranger: Stranger, fields: dict[str, Any]
) -> None:
    """Send ``"datatype": {}``, NaN, 1e999 or half a character; other HTTP stubs answered 500."""
    reply = stranger.ask(*([bytes(16)] if "inputs" in fields else []), **fields)
    assert is_refused(reply), reply
    assert not server.seen


def test_a_clients_text_starts_no_line_of_its_own_in_the_log(
    server: FakeScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    text = "x\nERROR forged\r\x1b[2J"
    with (
        caplog.at_level(logging.DEBUG, "pipeswitch"),
        raw_peer(server.listeners.tcp.address) as sock,
    ):
        for op in (text, "infer", "show"):
            header = {"v": 1, "id": "1", "op": op, "model": text, "session": text}
            sock.send(msgspec.msgpack.encode(header))
            assert decode_reply(sock.hear()).error is not None
        session = ask(sock, op="hello").session
        assert ask(sock, op="show", id="2", model=text, session=session) is not None
        assert ask(sock, op="infer", id="3", model=text, session=session).error is not None
    assert caplog.records
    assert not [r for r in caplog.records if {"\n", "\r", "\x1b"} & set(r.getMessage())]


# ---- sizes and disks ---------------------------------------------------------------------------


def test_a_files_size_is_refused_before_a_byte_of_it_is_written(
    server: FakeScheduler, stranger: Stranger
) -> None:
    """Declare too large a size, or send more bytes than declared (CVE-2026-55646)."""
    uploads = Path(server.config.server.state_dir, "uploads")
    assert is_refused(stranger.put(b"x", "0" * 64, (1 << 20) + 1))
    assert is_refused(stranger.put(b"xy", "0" * 64, 1))
    assert is_refused(stranger.put(b"x", "0" * 64, 1 << 20, offset=1 << 19))
    assert list(uploads.iterdir()) == []
    assert stranger.put(b"x", "1" * 64, 2).error is None
    assert is_refused(stranger.put(b"yz", "1" * 64, 2, offset=1))  # longer than declared
    (unfinished,) = uploads.iterdir()
    assert unfinished.read_bytes() == b"x\0"  # the full declared size counts at once


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def test_vllm_uploads_that_nobody_uses_do_not_fill_the_disk(
    server: FakeScheduler, stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Upload and never register; in vLLM, requests left files without limit (CVE-2025-29770)."""
    monkeypatch.setattr("pipeswitch.frontend.uploads.FRESH_S", 0.0)
    uploads = Path(server.config.server.state_dir, "uploads")
    for number in range(12):
        data = bytes([number]) * (1 << 20)
        digest = hashlib.sha256(data).hexdigest()
        assert stranger.put(data, digest, len(data)).body["complete"]
        assert (uploads / f"{digest}.bundle").is_file()  # the newest upload exists
        assert folder_bytes(uploads) <= KEPT_UPLOADS * (1 << 20)
    for number in range(KEPT_UPLOADS - 1):  # uploads that are announced, but not sent
        assert stranger.put(b"", f"{number:064x}", 1 << 20).error is None
    assert stranger.put(b"", "f" * 64, 1 << 20).error.type == "QueueFull"


def test_vllm_uploads_leave_room_on_the_disk_for_others(
    server: FakeScheduler, stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeswitch.frontend.uploads.FRESH_S", 0.0)
    assert stranger.put(b"x", hashlib.sha256(b"x").hexdigest(), 1).error is None
    monkeypatch.setattr("pipeswitch.frontend.uploads.MIN_FREE_SHARE", 1.0)
    monkeypatch.setattr("pipeswitch.frontend.uploads.MIN_FREE_BYTES", 1 << 60)
    reply = stranger.put(b"y", "0" * 64, 1)
    assert "No space left" in reply.error.message
    assert list(Path(server.config.server.state_dir, "uploads").iterdir()) == []  # all removed


# ---- the language ------------------------------------------------------------------------------


GUARDS = (
    "tests/unit/test_wire.py",
    "tests/unit/test_store.py",
    "tests/unit/test_programs_bundle.py",
    "tests/process/test_tcp.py",
    "tests/process/test_neighbours.py",
    "tests/process/test_neighbours_requests.py",
)
REFUSALS = """
    refused or refuses or nonsense or malformed or misfit or only or digest or outside
    or lead or leads or address or size or stranger or odd or declared or stolen or chosen
"""


@pytest.mark.slow  # Python compiles all imports anew
@pytest.mark.skipif(not __debug__, reason="this is the run without assert")
def test_no_guard_of_ours_is_an_assert_that_an_option_removes() -> None:
    """Run tests of refusals with ``python -O``, which removes our asserts (CVE-2026-41523)."""
    done = subprocess.run(
        [
            sys.executable,
            "-O",
            "-m",
            "pytest",
            "-q",
            "-x",
            "-p",
            "no:cacheprovider",
            "-W",
            "ignore::pytest.PytestConfigWarning",
            "-k",
            " ".join(REFUSALS.split()),
            *GUARDS,
        ],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        cwd=ROOT,
        env={**os.environ, "HYPOTHESIS_PROFILE": "quick"},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert int(passed[1]) > 300


ATTACHED = "import mmap, os, sys; mmap.mmap(int(sys.argv[1]), 0)[0] = 7; {}"


@pytest.mark.parametrize("end", ["sys.exit()", "os.kill(os.getpid(), 9)"])
def test_python_a_process_that_leaves_takes_no_memory_of_others_along(end: str) -> None:
    """Attach to memory and exit; Python 3.11's SharedMemory would remove the memory for all."""
    descriptor = sealed_memfd("shared", 4096)
    try:
        command = [sys.executable, "-c", ATTACHED.format(end), str(descriptor)]
        for _ in range(2):  # the second process must find the memory, too
            subprocess.run(command, pass_fds=[descriptor], check=False, timeout=250)
            with mmap.mmap(descriptor, 0) as memory:
                assert memory[0] == 7
                memory[0] = 0
    finally:
        os.close(descriptor)
    assert not [name for name in sys.modules if name == "multiprocessing.shared_memory"]
