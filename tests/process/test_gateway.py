"""Unmodified clients of other servers, each in its own process, against a real server."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
from collections import deque
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from process_tools import Checked, checked_server, eager, mlp, until, write_script

pytest.importorskip("httptools", reason="make installs it")
for _client in ("tritonclient.http", "tritonclient.grpc"):
    pytest.importorskip(_client, reason="make installs it")

CROWD = 4  # number of open requests
TOKEN = "a-token-of-the-operator"


class Doubled(torch.nn.Module):
    """Module whose result is exact in every dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + x


class Long(torch.nn.Module):
    """Module whose computation takes at least ten times as long as a caller waits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(1024, 1024) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.pad(x, (0, 1008)).repeat(400, 1)
        for _ in range(16):
            for layer in self.layers:
                y = torch.tanh(layer(y))
        return y.view(400, -1, 1024)[0, :, :16]


@pytest.fixture(scope="module")
def net() -> torch.nn.Module:
    module: torch.nn.Module = mlp(16, 2, seed=0)
    return module


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gateway") / "tokens"
    path.touch(0o600)
    path.write_text(f"ops {TOKEN} infer,operate\n")
    return path


@pytest.fixture(scope="module")
def checked(tokens: Path, net: torch.nn.Module) -> Iterator[Checked]:
    args = ("--gateway-tokens", str(tokens))
    write_script(tokens.parent, "worded.py", WORDED)
    environment = {
        "PIPESWITCH_SCHEDULER__MAX_WAIT": "1m",  # by default, requests older than 2 s go first
        "PYTHONPATH": os.pathsep.join((str(tokens.parent), os.environ.get("PYTHONPATH", ""))),
    }
    with checked_server(http=True, args=args, arena="128MiB", environment=environment) as checked:
        client = checked.client
        client.register(
            "moods",
            net,
            example_inputs=(torch.zeros(2, 16),),
            preprocess="worded:rows",
            raw={"text": (((1, 8),), "bytes")},
            postprocess="worded:moods",
            returns={"mood": (((1, 8),), "bytes")},
        )
        client.register("mlp", net, example_inputs=(torch.zeros(2, 16),), max_batch=64)
        for name, dtype in (("half", torch.float16), ("brain", torch.bfloat16)):
            client.register(name, Doubled(), example_inputs=(torch.zeros(2, 4, dtype=dtype),))
        yield checked


@pytest.fixture
def http(checked: Checked) -> str:
    return checked.running.http_address


def run(source: str, *args: str, python: str = sys.executable) -> Any:
    """Run a client in its own process; return its output, decoded as JSON."""
    done = subprocess.run(
        [python, "-c", textwrap.dedent(source), *args],
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def resident_bytes(pid: int) -> int:
    return int(psutil.Process(pid).memory_info().rss)


def curl(address: str, path: str, *args: str) -> tuple[int, Any]:
    """Run curl; return the HTTP status and the decoded JSON."""
    output = subprocess.run(
        ["curl", "-s", "-w", "\n%{http_code}", f"http://{address}{path}", *args],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    ).stdout
    body, _, status = output.rpartition("\n")
    return int(status), json.loads(body)


WORDED = """
import numpy as np

def rows(text):
    found = np.zeros((len(text), 16), np.float32)
    for row, one in zip(found, text):
        row[: len(one)] = list(one[:16])
    return found

def moods(y):
    return {"mood": np.array([b"\\xff" if not row.any() else f"mood {row.argmax()}" for row in y])}
"""
WORDS = """
    import json, sys
    import numpy as np
    import tritonclient.http as triton
    import tritonclient.grpc as remote

    texts = np.array(sys.argv[3:], dtype=object)
    found = {}
    for name, kind, address in (("http", triton, sys.argv[1]), ("grpc", remote, sys.argv[2])):
        client = kind.InferenceServerClient(address)
        given = kind.InferInput("text", texts.shape, "BYTES")
        given.set_data_from_numpy(texts)
        answer = client.infer("moods", [given]).as_numpy("mood")
        found[name] = [one.decode() for one in answer.tolist()]
    print(json.dumps(found))
"""


def test_a_text_goes_in_and_a_label_comes_out(checked: Checked, http: str) -> None:
    texts = ["a text", "größer"]
    expected = [one.decode() for one in checked.client.infer("moods", texts)["mood"].tolist()]
    assert all(one.startswith("mood ") for one in expected)
    actual = run(WORDS, http, checked.running.grpc_address, *texts)
    assert actual == {"http": expected, "grpc": expected}
    ask = {"inputs": [{"name": "text", "shape": [2], "datatype": "BYTES", "data": texts}]}
    status, answer = curl(http, "/v2/models/moods/infer", "-d", json.dumps(ask))
    assert (status, answer["outputs"][0]["datatype"]) == (200, "BYTES"), answer
    assert answer["outputs"][0]["data"] == expected
    assert answer["parameters"]["postprocess_ms"] > 0
    about = curl(http, "/v2/models/moods")[1]
    assert about["inputs"] == [{"name": "text", "datatype": "BYTES", "shape": [-1]}]
    assert about["outputs"] == [{"name": "mood", "datatype": "BYTES", "shape": [-1]}]
    assert curl(http, "/v2/models/moods/config")[1]["input"][0]["data_type"] == "TYPE_STRING"
    ask["inputs"][0] |= {"data": [1, 2]}
    status, answer = curl(http, "/v2/models/moods/infer", "-d", json.dumps(ask))
    assert (status, "its data must be texts" in answer["error"]) == (400, True)
    ask["inputs"][0] |= {"shape": [1], "data": ["x"], "datatype": "FP32"}
    assert curl(http, "/v2/models/moods/infer", "-d", json.dumps(ask))[0] == 400
    raw = subprocess.run(
        [
            "curl",
            "-s",
            f"http://{http}/v2/models/moods/infer",
            "--data-binary",
            texts[0],
            "-H",
            "Inference-Header-Content-Length: 0",
        ],
        capture_output=True,
        check=True,
        timeout=60,
    ).stdout
    assert raw.endswith(expected[0].encode())


ASK = '{"inputs": [{"name": "x", "shape": [1, 16], "datatype": "FP32", "data": [%s]}]}'
ONES = ASK % ", ".join(["1"] * 16)

TRITON = """
    import json, sys
    import numpy as np
    import tritonclient.http as triton
    from tritonclient.utils import InferenceServerException

    client = triton.InferenceServerClient(sys.argv[1])
    ops = {"Authorization": "Bearer " + sys.argv[2]}
    x = np.random.default_rng(0).standard_normal((5, 16), dtype=np.float32)
    found = {
        "live": client.is_server_live(), "ready": client.is_server_ready(),
        "model_ready": client.is_model_ready("mlp"), "no_model": client.is_model_ready("nlp"),
        "about": client.get_server_metadata(), "config": client.get_model_config("mlp"),
        "metadata": client.get_model_metadata("mlp", "1"),
        "index": client.get_model_repository_index(), "answers": [], "bill": [],
    }
    client.load_model("mlp", headers=ops)
    client.unload_model("mlp", headers=ops)
    for binary_in in (True, False):
        for binary_out in (True, False, None):
            given = triton.InferInput("x", x.shape, "FP32")
            given.set_data_from_numpy(x, binary_data=binary_in)
            wanted = None
            if binary_out is not None:
                wanted = [triton.InferRequestedOutput("y", binary_data=binary_out)]
            answer = client.infer("mlp", [given], outputs=wanted, request_id="r-1", priority=2,
                                  timeout=20_000_000)
            assert answer.get_response()["id"] == "r-1"
            found["answers"].append(answer.as_numpy("y").tolist())
            found["bill"].append(answer.get_response()["parameters"])
    for coding in ("gzip", "deflate"):
        answer = client.infer("mlp", [given], request_compression_algorithm=coding,
                              response_compression_algorithm=coding)
        found["answers"].append(answer.as_numpy("y").tolist())
    later = client.async_infer("mlp", [given])
    found["answers"].append(later.get_result().as_numpy("y").tolist())
    half = triton.InferInput("x", (2, 4), "FP16").set_data_from_numpy(np.ones((2, 4), np.float16))
    found["half"] = client.infer("half", [half]).as_numpy("y").tolist()
    found["refused"] = []
    for model, version, options in (
        ("mpl", "", {}), ("mlp", "2", {}), ("half", "", {}), ("mlp", "", {"timeout": 1}),
    ):
        try:
            client.infer(model, [given], version, **options)
        except InferenceServerException as error:
            found["refused"].append((error.status(), error.message()))
    try:
        client.load_model("mlp")
    except InferenceServerException as error:
        found["refused"].append((error.status(), error.message()))
    try:
        client.load_model("mlp", headers=ops, files={"file:1/model.pt": b"x"}, config="{}")
    except InferenceServerException as error:
        found["refused"].append((error.status(), error.message()))
    try:
        client.load_model("mlp", headers=ops, config='{"max_batch_size": 8}')
    except InferenceServerException as error:
        found["refused"].append((error.status(), error.message()))
    found["statistics"] = client.get_inference_statistics("mlp")["model_stats"]
    print(json.dumps(found))
"""


def test_tritons_client_does_every_verb(http: str, net: torch.nn.Module) -> None:
    actual = run(TRITON, http, TOKEN)
    assert [actual[key] for key in ("live", "ready", "model_ready", "no_model")] == [True] * 3 + [
        False
    ]
    assert "binary_tensor_data" in actual["about"]["extensions"]
    assert actual["config"]["max_batch_size"] == 64
    assert actual["config"]["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [16]}]
    assert actual["metadata"]["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 16]}]
    assert {row["name"]: row["state"] for row in actual["index"]} == dict.fromkeys(
        ("mlp", "half", "brain", "moods"), "READY"
    )
    x = np.random.default_rng(0).standard_normal((5, 16), dtype=np.float32)
    plain = eager(net, torch.from_numpy(x)).numpy()
    for answer in actual["answers"]:
        assert np.array_equal(np.array(answer, np.float32), plain)
    assert len(actual["answers"]) == 9
    assert all(timing["total_ms"] >= timing["compute_ms"] > 0 for timing in actual["bill"])
    assert actual["half"] == [[2.0] * 4] * 2
    statuses, words = zip(*actual["refused"], strict=True)
    assert statuses == ("404", "404", "400", "504", "403", "400", "400")
    for part, text in zip(
        (
            'did you mean "mlp"',
            "no version 2",
            "float16",
            "deadline",
            '"operate"',
            "files",
            "load takes no config: it would have no effect",
        ),
        words,
        strict=True,
    ):
        assert part.lower() in text.lower()
    (row,) = actual["statistics"]
    assert row["inference_count"] >= 7
    assert row["inference_stats"]["compute_infer"]["ns"] > 0


SHARED = """
    import importlib, json, sys
    import numpy as np
    import tritonclient.utils.shared_memory as shm
    from tritonclient.utils import InferenceServerException

    kind, address, token = sys.argv[1:]
    triton = importlib.import_module("tritonclient." + kind)
    client = triton.InferenceServerClient(address)
    name = "Authorization" if kind == "http" else "authorization"
    owner = {"headers": {name: "Bearer " + token}}
    x = np.random.default_rng(0).standard_normal((64, 16), dtype=np.float32)
    found = {}
    inputs = shm.create_shared_memory_region("in", "/pipeswitch-in-" + kind, x.nbytes)
    outputs = shm.create_shared_memory_region("out", "/pipeswitch-out-" + kind, 2 * x.nbytes)
    try:
        shm.set_shared_memory_region(inputs, [x])
        try:
            client.register_system_shared_memory("in", "/pipeswitch-in-" + kind, x.nbytes)
        except InferenceServerException as error:
            found["stranger"] = error.message()
        client.register_system_shared_memory("in", "/pipeswitch-in-" + kind, x.nbytes, **owner)
        client.register_system_shared_memory("out", "/pipeswitch-out-" + kind, 2 * x.nbytes,
                                             **owner)
        given = triton.InferInput("x", x.shape, "FP32")
        given.set_shared_memory("in", x.nbytes)
        wanted = triton.InferRequestedOutput("y")
        answer = client.infer("mlp", [given], outputs=[wanted], **owner)
        found["answer"] = answer.as_numpy("y").tolist()
        columns = len(found["answer"][0])
        wanted.set_shared_memory("out", x.nbytes, offset=x.nbytes)
        answer = client.infer("mlp", [given], outputs=[wanted], **owner)
        y = shm.get_contents_as_numpy(outputs, np.float32, (64, columns), x.nbytes)
        found["shared"] = y.tolist()
        if kind == "http":
            rows = client.get_system_shared_memory_status(**owner)
        else:
            rows = client.get_system_shared_memory_status(as_json=True, **owner)["regions"]
            rows = list(rows.values())
        found["rows"] = sorted(row["name"] for row in rows)
        try:
            client.infer("mlp", [given])
        except InferenceServerException as error:
            found["without"] = error.message()
        client.unregister_system_shared_memory("in", **owner)
        client.unregister_system_shared_memory(**owner)
        try:
            client.infer("mlp", [given], **owner)
        except InferenceServerException as error:
            found["after"] = error.message()
    finally:
        shm.destroy_shared_memory_region(inputs)
        shm.destroy_shared_memory_region(outputs)
    print(json.dumps(found))
"""


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_tritons_client_hands_tensors_over_in_shared_memory(
    checked: Checked, net: torch.nn.Module, kind: str
) -> None:
    address = getattr(checked.running, f"{kind}_address")
    token = (checked.running.state_dir / "owner.token").read_text().strip()
    actual = run(SHARED, kind, address, token)
    x = np.random.default_rng(0).standard_normal((64, 16), dtype=np.float32)
    plain = eager(net, torch.from_numpy(x)).numpy()
    for key in ("answer", "shared"):
        assert np.array_equal(np.array(actual[key], np.float32), plain)
    assert actual["rows"] == ["in", "out"]
    assert all('"code"' in actual[key] for key in ("stranger", "without"))
    assert 'no region "in"' in actual["after"]


AIO = """
    import asyncio, importlib, json, sys
    import numpy as np

    triton = importlib.import_module(f"tritonclient.{sys.argv[1]}.aio")

    async def main():
        async with triton.InferenceServerClient(sys.argv[2]) as client:
            assert await client.is_server_ready() and await client.is_model_ready("mlp", "1")
            x = np.ones((3, 16), np.float32)
            given = triton.InferInput("x", x.shape, "FP32")
            given.set_data_from_numpy(x)
            asked = [client.infer("mlp", [given]) for _ in range(40)]
            print(json.dumps([one.as_numpy("y").tolist() for one in await asyncio.gather(*asked)]))

    asyncio.run(main())
"""


@pytest.mark.parametrize("kind", ["http", "grpc"])
def test_tritons_asyncio_clients_ask_forty_at_once(
    checked: Checked, net: torch.nn.Module, kind: str
) -> None:
    answers = run(AIO, kind, getattr(checked.running, f"{kind}_address"))
    plain = eager(net, torch.ones(3, 16)).numpy()
    assert len(answers) == 40
    assert all(np.array_equal(np.array(answer, np.float32), plain) for answer in answers)


GRPC = """
    import json, queue, sys
    import numpy as np
    import tritonclient.grpc as triton
    from tritonclient.grpc import service_pb2
    from tritonclient.utils import InferenceServerException
    import pipeswitch.extras.grpc.protos  # beside the client's own descriptors

    client = triton.InferenceServerClient(sys.argv[1])
    ops = {"authorization": "Bearer " + sys.argv[2]}
    x = np.random.default_rng(0).standard_normal((5, 16), dtype=np.float32)
    found = {
        "live": client.is_server_live(), "ready": client.is_server_ready(),
        "model_ready": client.is_model_ready("mlp", "1"),
        "about": list(client.get_server_metadata().extensions),
        "metadata": client.get_model_metadata("mlp", as_json=True),
        "config": client.get_model_config("mlp", as_json=True)["config"],
        "index": [row.name for row in client.get_model_repository_index().models],
        "answers": [], "refused": [],
    }
    client.load_model("mlp", headers=ops)
    client.unload_model("mlp", headers=ops)
    given = triton.InferInput("x", x.shape, "FP32")
    given.set_data_from_numpy(x)
    wanted = [triton.InferRequestedOutput("y")]
    answer = client.infer("mlp", [given], outputs=wanted, request_id="r-1", priority=2,
                          timeout=20_000_000)
    assert answer.get_response().id == "r-1"
    found["bill"] = answer.get_response().parameters["total_ms"].double_param
    found["answers"].append(answer.as_numpy("y").tolist())

    typed = service_pb2.ModelInferRequest(model_name="mlp")  # as clients without numpy ask
    tensor = typed.inputs.add(name="x", datatype="FP32", shape=x.shape)
    tensor.contents.fp32_contents.extend(x.reshape(-1).tolist())
    typed.parameters["priority"].int64_param = 2
    raw = client._client_stub.ModelInfer(typed).raw_output_contents[0]
    found["answers"].append(np.frombuffer(raw, np.float32).reshape(5, 16).tolist())

    said = queue.Queue()
    client.start_stream(lambda result, error: said.put((result, error)))
    for model in ("mlp", "mpl", "mlp"):
        client.async_stream_infer(model, [given], request_id=model)
    for _ in range(3):
        result, error = said.get(timeout=60)
        if error is None:
            found["answers"].append(result.as_numpy("y").tolist())
        else:
            found["refused"].append(("stream", error.message()))
    client.stop_stream()

    for model, version, options in (("mpl", "", {}), ("mlp", "2", {}), ("half", "", {})):
        try:
            client.infer(model, [given], version, **options)
        except InferenceServerException as error:
            found["refused"].append((error.status(), error.message()))
    try:
        client.load_model("mlp")
    except InferenceServerException as error:
        found["refused"].append((error.status(), error.message()))
    row = client.get_inference_statistics("mlp").model_stats[0]
    found["statistics"] = [row.inference_count, row.inference_stats.compute_infer.ns]

    import grpc
    from pipeswitch.extras.grpc.protos import HEALTH
    with grpc.insecure_channel(sys.argv[1]) as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check", HEALTH["HealthCheckRequest"].SerializeToString,
            HEALTH["HealthCheckResponse"].FromString,
        )
        watch = channel.unary_stream(
            "/grpc.health.v1.Health/Watch", HEALTH["HealthCheckRequest"].SerializeToString,
            HEALTH["HealthCheckResponse"].FromString,
        )
        request = HEALTH["HealthCheckRequest"](service="inference.GRPCInferenceService")
        found["health"] = [check(request).status, next(watch(request)).status]
        try:
            channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(b"\\xff")
        except grpc.RpcError as error:
            found["garbage"] = [error.code().name, error.details()]
        reflect = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
        found["reflected"] = str(next(reflect(iter([b"\\x3a\\x00"]))))  # list_services
    print(json.dumps(found))
"""


def test_tritons_grpc_client_does_every_verb(checked: Checked, net: torch.nn.Module) -> None:
    actual = run(GRPC, checked.running.grpc_address, TOKEN)
    assert (actual["live"], actual["ready"], actual["model_ready"]) == (True, True, True)
    assert "binary_tensor_data" in actual["about"]
    assert actual["config"]["max_batch_size"] == 64
    assert actual["config"]["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": ["16"]}]
    assert actual["metadata"]["outputs"][0]["shape"] == ["-1", "16"]
    assert {"brain", "half", "mlp"} <= set(actual["index"])
    x = np.random.default_rng(0).standard_normal((5, 16), dtype=np.float32)
    plain = eager(net, torch.from_numpy(x)).numpy()
    assert len(actual["answers"]) == 4
    assert all(np.array_equal(np.array(a, np.float32), plain) for a in actual["answers"])
    assert actual["bill"] > 0
    codes, words = zip(*actual["refused"], strict=True)
    assert codes == (
        "stream",
        "StatusCode.NOT_FOUND",
        "StatusCode.NOT_FOUND",
        "StatusCode.INVALID_ARGUMENT",
        "StatusCode.PERMISSION_DENIED",
    )
    for part, text in zip(
        ('did you mean "mlp"', 'did you mean "mlp"', "no version 2", "float16", '"operate"'),
        words,
        strict=True,
    ):
        assert part in text
    assert min(actual["statistics"]) > 0
    assert actual["health"] == [1, 1]
    assert actual["garbage"] == [
        "INVALID_ARGUMENT",
        "these bytes are not a valid inference.ModelInferRequest",
    ]
    assert "inference.GRPCInferenceService" in actual["reflected"]


HALF_OPEN = """
    import asyncio, contextlib, json, sys
    import grpc, grpc.aio
    from pipeswitch.extras.grpc.grpc_server import CALLS_PER_ADDRESS

    LIVE = "/inference.GRPCInferenceService/ServerLive"
    INFER = "/inference.GRPCInferenceService/ModelInfer"

    async def refused(call):
        try:
            await call
        except grpc.RpcError as error:
            return [error.code().name, error.details()]

    async def main():
        async with contextlib.AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(grpc.aio.insecure_channel(
                    sys.argv[1], options=[("grpc.use_local_subchannel_pool", 1)]))
                for _ in range(3)
            ]
            live = channels[0].unary_unary(LIVE)
            half = [channels[n % 3].stream_unary(INFER)() for n in range(CALLS_PER_ADDRESS)]
            while not (full := await refused(live(b""))):  # it may have had the place of one
                half.append(channels[len(half) % 3].stream_unary(INFER)())
                await asyncio.sleep(0.01)
            for call in half:
                call.cancel()
            while await refused(live(b"")):
                await asyncio.sleep(0.01)
            print(json.dumps(full))

    asyncio.run(main())
"""


def test_calls_whose_message_does_not_come_leave_room_for_other_addresses(checked: Checked) -> None:
    full = run(HALF_OPEN, checked.running.grpc_address)
    assert full[0] == "RESOURCE_EXHAUSTED"
    assert "calls from this address" in full[1]


STRANGER = """
    import json, sys
    import grpc

    INFER = "/inference.GRPCInferenceService/ModelInfer"

    def pending():
        yield from iter(is_over.wait, True)  # no message before the call ends

    import threading
    is_over = threading.Event()
    with grpc.insecure_channel(sys.argv[1]) as channel:
        try:
            channel.stream_unary(INFER)(pending(), metadata=(("authorization", "Bearer wrong"),))
        except grpc.RpcError as error:
            print(json.dumps([error.code().name, error.details()]))
        is_over.set()
"""


def test_an_address_that_gives_no_roles_needs_a_known_token(tokens: Path) -> None:
    args = ("--gateway-tokens", str(tokens), "--gateway-roles", "")
    with checked_server(http=True, args=args) as checked:
        http = checked.running.http_address
        load = "/v2/repository/index"
        for header in ("Authorization: Bearer wrong", "x-api-key: wrong"):
            status, answer = curl(http, load, "-X", "POST", "-H", header)
            assert (status, answer["error"]) == (401, "unknown token")
            assert "[gateway] tokens" in answer["hint"]
            status, answer = curl(http, "/v1/models", "-H", header)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        for header in ("Authorization: bearer EMPTY", "x-api-key;", "Accept: */*"):
            assert curl(http, load, "-X", "POST", "-H", header)[0] == 403
        for header in (f"authorization: BEARER {TOKEN}", f"x-api-key: {TOKEN}"):
            assert curl(http, load, "-X", "POST", "-H", header)[0] == 200
        # It is refused before the client has sent its message.
        assert run(STRANGER, checked.running.grpc_address)[0] == "UNAUTHENTICATED"


HALF_MESSAGES = """
    import socket, struct, sys

    STREAMS, SIZE, FRAME = 12, 60 << 20, 16 << 10

    def frame(kind, flags, stream, payload=b""):
        head = struct.pack(">I", len(payload))[1:] + bytes([kind, flags])
        return head + struct.pack(">I", stream) + payload

    path = b"/inference.GRPCInferenceService/" + sys.argv[2].encode()
    fields = {b":method": b"POST", b":scheme": b"http", b":authority": b"localhost", b":path": path,
              b"te": b"trailers", b"content-type": b"application/grpc"}
    head = b"".join(b"\\0" + bytes([len(k)]) + k + bytes([len(v)]) + v for k, v in fields.items())
    host, _, port = sys.argv[1].rpartition(":")
    one = socket.create_connection((host, int(port)), source_address=("127.0.0.2", 0))
    one.settimeout(60)
    one.sendall(b"PRI * HTTP/2.0\\r\\n\\r\\nSM\\r\\n\\r\\n" + frame(4, 0, 0))
    streams, windows = [2 * number + 1 for number in range(STREAMS)], {0: 65535}
    for stream in streams:
        windows[0], windows[stream] = windows[0] - 5, 65535 - 5
        one.sendall(frame(1, 4, stream, head) + frame(0, 0, stream, struct.pack(">BI", 0, SIZE)))
    reader, initial, sent, statuses = one.makefile("rb"), 65535, 0, 0
    while not statuses:
        for stream in streams:
            while (size := min(FRAME, windows[0], windows[stream])) > 0:
                one.sendall(frame(0, 0, stream, bytes(size)))
                windows[0], windows[stream], sent = (
                    windows[0] - size, windows[stream] - size, sent + size)
        size = int.from_bytes(reader.read(3), "big")
        kind, flags, stream = struct.unpack(">BBI", reader.read(6))
        payload = reader.read(size)
        if kind == 8:
            windows[stream] += int.from_bytes(payload, "big")
        elif kind == 4 and not flags:
            one.sendall(frame(4, 1, 0))  # else they do not count
            for at in range(0, size, 6):
                name, value = struct.unpack_from(">HI", payload, at)
                if name == 4:
                    for each in streams:
                        windows[each] += value - initial
                    initial = value
        statuses += kind in (1, 3)  # trailers, or a reset
    print(sent)
"""


@pytest.mark.parametrize("verb", ["ModelInfer", "ModelStreamInfer", "ServerLive"])
def test_half_messages_beyond_a_share_end_and_their_memory_comes_back(
    checked: Checked, verb: str
) -> None:
    gateway = checked.gateway_pid()
    sent = run(HALF_MESSAGES, checked.running.grpc_address, verb)
    assert 150 << 20 < sent < 400 << 20
    assert checked.gateway_pid() == gateway
    until(lambda: resident_bytes(gateway) < 200 << 20, "the memory came back")


UNREAD = """
    import asyncio, contextlib, json, sys
    import grpc, grpc.aio
    import numpy as np
    from pipeswitch.extras.grpc.protos import INFERENCE

    STREAM = "/inference.GRPCInferenceService/ModelStreamInfer"
    STREAMS, LIMIT = 12, 64

    async def fill(call, message):
        for sent in range(LIMIT):
            writing = asyncio.ensure_future(call.write(message))
            if not (await asyncio.wait([writing], timeout=3))[0]:
                return sent  # the server reads no more
            await writing
        return LIMIT

    async def main():
        request = INFERENCE["ModelInferRequest"](model_name="large")
        request.inputs.add(name="x", datatype="FP32", shape=[1 << 18])
        request.raw_input_contents.append(np.zeros(1 << 18, np.float32).tobytes())
        message = request.SerializeToString()
        async with contextlib.AsyncExitStack() as stack:
            calls = []
            for _ in range(STREAMS):
                channel = grpc.aio.insecure_channel(
                    sys.argv[1], options=[("grpc.use_local_subchannel_pool", 1)])
                calls.append((await stack.enter_async_context(channel)).stream_stream(STREAM)())
            sent = await asyncio.gather(*(fill(call, message) for call in calls))
            for call in calls:
                call.cancel()
            print(json.dumps(sent))

    asyncio.run(main())
"""


def test_a_stream_whose_answers_nobody_reads_is_not_read_on(checked: Checked) -> None:
    """Send requests of 1 MiB, and read no answer: the gateway's memory must stay bounded."""
    gateway = checked.gateway_pid()
    checked.client.register("large", Doubled(), example_inputs=(torch.ones(1 << 18),))
    sent = run(UNREAD, checked.running.grpc_address)
    assert max(sent) < 16
    assert checked.gateway_pid() == gateway
    until(lambda: resident_bytes(gateway) < 200 << 20, "the memory came back")


KSERVE = """
    import asyncio, json, sys
    import grpc, httpx
    import numpy as np
    from kserve import InferenceGRPCClient, InferenceRESTClient, InferInput, InferRequest
    from kserve import RESTConfig

    def request(model, x, datatype="FP32", *, binary):
        given = InferInput("x", list(x.shape), datatype)
        given.set_data_from_numpy(x, binary_data=binary)
        asked = {"priority": 2, "binary_data_output": binary}
        return InferRequest(model, [given], request_id="r-1", parameters=asked)

    def values(answer):
        assert answer.id == "r-1"
        return answer.outputs[0].as_numpy().tolist()

    async def main():
        x = np.random.default_rng(0).standard_normal((5, 16), dtype=np.float32)
        half = np.ones((2, 4), np.float16)
        odd = np.array([[np.nan, 1, 2, 3]] * 2, np.float32)
        refused = []
        rest = InferenceRESTClient(RESTConfig(protocol="v2", retries=0))
        url = "http://" + sys.argv[1]
        states = [await rest.is_server_live(url), await rest.is_server_ready(url),
                  await rest.is_model_ready(url, "mlp"), await rest.is_model_ready(url, "mpl")]
        answers = [values(await rest.infer(url, request("mlp", x, binary=binary), "mlp"))
                   for binary in (True, False)]
        halves = [values(await rest.infer(url, request("half", half, "FP16", binary=True), "half"))]
        odds = [values(await rest.infer(url, request("plain", odd, binary=binary), "plain"))
                for binary in (True, False)]
        try:
            await rest.infer(url, request("mlp", half, "FP16", binary=True), "mlp")
        except httpx.HTTPStatusError as error:
            refused.append([error.response.status_code, str(error)])
        await rest.close()
        async with InferenceGRPCClient(sys.argv[2], retries=0) as client:
            states += [await client.is_server_live(), await client.is_server_ready(),
                       await client.is_model_ready("mlp")]
            answers += [values(await client.infer(request("mlp", x, binary=binary)))
                        for binary in (True, False)]
            halves.append(values(await client.infer(request("half", half, "FP16", binary=True))))
            for asked in (client.is_model_ready("mpl"),
                          client.infer(request("mlp", half, "FP16", binary=True)),
                          client.infer(request("long", x, binary=True), timeout=0.1)):
                try:
                    await asked
                except grpc.RpcError as error:
                    refused.append([error.code().name, error.details()])
        print(json.dumps({"states": states, "answers": answers, "halves": halves, "odds": odds,
                          "refused": refused}))

    asyncio.run(main())
"""


def test_kserves_clients_ask_over_rest_and_grpc(
    checked: Checked, http: str, net: torch.nn.Module
) -> None:
    """Run kserve in another Python, because it installs 450 MB that no other test needs."""
    python = os.environ.get("TESTS_KSERVE_PYTHON")
    if not python:
        pytest.skip("TESTS_KSERVE_PYTHON names no Python that has kserve")
    checked.client.register("plain", Doubled(), example_inputs=(torch.zeros(2, 4),))
    checked.client.register("long", Long(), example_inputs=(torch.zeros(2, 16),))
    actual = run(KSERVE, http, checked.running.grpc_address, python=python)
    checked.client.unregister("plain")
    checked.client.unregister("long")
    assert actual["states"] == [True, True, True, False, True, True, True]
    x = np.random.default_rng(0).standard_normal((5, 16), dtype=np.float32)
    plain = eager(net, torch.from_numpy(x)).numpy()
    assert len(actual["answers"]) == 4
    assert all(np.array_equal(np.array(one, np.float32), plain) for one in actual["answers"])
    assert actual["halves"] == [[[2.0] * 4] * 2] * 2
    assert len(actual["odds"]) == 2
    for odd in actual["odds"]:
        assert np.array_equal(odd, [[np.nan, 2, 4, 6]] * 2, equal_nan=True)
    codes, words = zip(*actual["refused"], strict=True)
    assert codes == (400, "NOT_FOUND", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED")
    for part, text in zip(("float16", 'did you mean "mlp"', "float16", ""), words, strict=True):
        assert part in text


def test_curl_asks_in_json_and_reads_the_bill(http: str, net: torch.nn.Module) -> None:
    status, answer = curl(http, "/v2/models/mlp/versions/1/infer", "-d", ONES, "-D", "/dev/stderr")
    assert status == 200
    (row,) = answer["outputs"]
    assert (row["name"], row["datatype"], row["shape"]) == ("y", "FP32", [1, 16])
    assert np.array_equal(np.array([row["data"]], np.float32), eager(net, torch.ones(1, 16)))
    assert {"queue_ms", "switch_ms", "compute_ms", "gateway_ms"} <= answer["parameters"].keys()
    ask = '{"inputs": [{"name": "x", "shape": [1, 4], "datatype": "BF16", "data": [1, -2, 3, 4]}]}'
    status, answer = curl(http, "/v2/models/brain/infer", "-d", ask)
    assert answer["outputs"][0]["data"] == [2.0, -4.0, 6.0, 8.0]
    for path, key in (("/v2/health/live", "live"), ("/v2/health/ready", "ready")):
        assert curl(http, path) == (200, {key: True})
    assert curl(http, "/v2/models/mlp/ready") == (200, {"name": "mlp", "ready": True})
    assert {row["name"] for row in curl(http, "/v2/models/stats")[1]["model_stats"]} >= {"mlp"}


def test_a_token_that_is_added_or_taken_counts_soon_on_a_connection_that_is_kept(
    http: str, tokens: Path
) -> None:
    connection = HTTPConnection(http, timeout=30)
    head = {"Authorization": "Bearer a-token-that-was-added"}

    def status() -> int:
        connection.request("POST", "/v2/repository/models/mlp/unload", "{}", head)
        with connection.getresponse() as answer:
            answer.read()
        return answer.status

    without = tokens.read_text()
    assert status() == 403
    tokens.write_text(f"{without}late a-token-that-was-added operate\n")
    until(lambda: status() == 200, "it counts")
    socket_kept = connection.sock
    assert [status(), status()] == [200, 200]
    assert connection.sock is socket_kept
    tokens.write_text(without)
    until(lambda: status() == 403, "it counts no more")
    connection.close()


def scrape(address: str, *args: str) -> str:
    command = ["curl", "-s", "--fail", f"http://{address}/metrics", *args]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_scraper_reads_requests_and_an_operators_the_server_too(http: str) -> None:
    curl(http, "/v2/models/mlp/infer", "-d", ONES)
    curl(http, "/v2/models/nowhere/infer", "-d", ONES)
    text = scrape(http)
    assert 'pipeswitch_gateway_requests_total{model="mlp",outcome="ok"}' in text
    assert 'pipeswitch_request_compute_seconds_count{model="mlp"}' in text
    assert "nowhere" not in text
    assert "pipeswitch_switches_total" not in text
    text = scrape(http, "-H", f"Authorization: Bearer {TOKEN}")
    assert 'pipeswitch_workers{state="standby"}' in text
    assert "pipeswitch_ready 1.0" in text


def test_prometheus_own_checker_has_nothing_to_say_of_the_metrics(http: str) -> None:
    """Check the default metrics; Triton's names, which promtool rejects, are off by default."""
    promtool = shutil.which("promtool")
    if promtool is None:
        assert not os.environ.get("TESTS_NEED_PROMTOOL"), "this must run here"
        pytest.skip("no promtool here: it is in Debian's package prometheus")
    curl(http, "/v2/models/mlp/infer", "-d", ONES)
    text = scrape(http, "-H", f"Authorization: Bearer {TOKEN}")
    done = subprocess.run(
        [promtool, "check", "metrics"], input=text, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("path", "args", "status", "words"),
    [
        ("/v2/models/mpl", (), 404, 'did you mean "mlp"'),
        ("/v2/model", (), 404, "/v2/models"),
        ("/v2/models/mlp/redy", (), 404, 'did you mean "/v2/models/mlp/ready"'),
        ("/v2/models/mlp", ("-X", "DELETE"), 405, "use GET"),
        ("/v2/models/mlp/infer", ("-d", "{"), 400, "not an inference request"),
        ("/v2/models/mlp/infer", ("-d", ASK % "1, 2"), 400, "needs 16; mlp takes x FP32[-1, 16]"),
        ("/predictions/mlp", ("-d", "{}"), 404, "use POST /v2/models/mlp/infer"),
        ("/invocations", ("-d", "{}"), 404, "use POST /v2/models/MODEL/infer"),
        ("/v2/models/mlp/infer", ("-d", ONES.replace('"x"', '"z"')), 400, "its inputs are x"),
        (
            "/v2/models/mlp/infer",
            ("-d", ONES, "-H", "Content-Encoding: gzip"),
            400,
            "Content-Encoding",
        ),
        ("/v2/models/mlp/infer", ("-d", ONES, "-H", "Content-Encoding: br"), 415, "deflate"),
        ("/v2/models/..%2F..%2Fetc/infer", ("-d", ONES), 404, "no model"),
        ("/v2", ("-H", "Host: evil.example"), 403, "evil.example"),
        ("/v2", ("-H", "Origin: https://evil.example"), 403, "evil.example"),
        ("/v2/repository/models/mlp/load", ("-X", "POST"), 403, '"operate"'),
        (
            "/v2/repository/models/mlp/load",
            ("-X", "POST", "-H", "Authorization: Bearer wrong"),
            403,
            "a caller without a known token",
        ),
        ("/v2/repository/index", ("-d", '{"ready": 1}'), 400, "true or false"),
        ("/v2/models/mlp/infer", ("-d", "", "-H", "Content-Length: 9999999999"), 413, "64.00 MiB"),
    ],
)
def test_every_refusal_is_json_and_says_what_would_be_right(
    http: str, path: str, args: tuple[str, ...], status: int, words: str
) -> None:
    answer_status, answer = curl(http, path, *args)
    assert (answer_status, set(answer)) == (status, {"error", "code", "hint"})
    assert words in f"{answer['error']} {answer['hint']}"


IMPATIENT = """
    import sys
    import numpy as np
    import tritonclient.grpc as triton

    client = triton.InferenceServerClient(sys.argv[1])
    given = triton.InferInput("x", (1, 1024), "FP32")
    given.set_data_from_numpy(np.zeros((1, 1024), np.float32))
    print(client.is_server_ready(), flush=True)
    sys.stdin.readline()
    client.infer("slow", [given])
"""


@contextlib.contextmanager
def crowded(client: Any, model: str, x: Any) -> Iterator[None]:
    """Send so many urgent requests, during the block, that no other request is computed."""
    is_over = threading.Event()

    def ask() -> None:
        waiting = deque(client.submit(model, x, priority="high") for _ in range(CROWD))
        while waiting:
            waiting.popleft().result(30)
            if not is_over.is_set():
                waiting.append(client.submit(model, x, priority="high"))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def test_requests_whose_callers_hang_up_are_taken_back(checked: Checked, http: str) -> None:
    slow = mlp(1024, 8, seed=1)  # a run takes tens of milliseconds
    checked.client.register("slow", slow, example_inputs=(torch.zeros(2, 1024),), max_batch=256)
    x = np.zeros((256, 1024), np.float32)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    by_grpc = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(IMPATIENT), checked.running.grpc_address], **pipes
    )
    by_http = subprocess.Popen(
        [
            "curl",
            "-s",
            f"http://{http}/v2/models/slow/infer",
            "-H",
            "Inference-Header-Content-Length: 0",
            "--data-binary",
            "@-",
        ],
        **pipes,
    )
    with crowded(checked.client, "slow", x):
        try:
            assert by_grpc.stdout.readline() == b"True\n"
            before = checked.stats()["inference"]["error"]
            by_grpc.stdin.write(b"go\n")
            by_grpc.stdin.close()
            by_http.stdin.write(x.tobytes())
            by_http.stdin.close()
            until(lambda: checked.stats()["inference"]["in_flight"] == CROWD + 2, "both wait")
        finally:
            for caller in (by_grpc, by_http):
                caller.kill()
                caller.wait()
                caller.stdout.close()
        until(lambda: checked.stats()["inference"]["error"] == before + 2, "both taken back")
    checked.client.unregister("slow")


def test_the_gateway_is_no_place_for_torch() -> None:
    source = "import json, sys, pipeswitch.gateway.main; print(json.dumps('torch' in sys.modules))"
    assert run(source) is False
