"""Three nodes on this machine under Ray: verbs, other projects' clients, nodes that die."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from process_tools import ray_of_its_own, until

from pipeswitch import AlreadyExists, Client, ModelNotFound, PermissionDenied
from pipeswitch.base.errors import InvalidInput, ServerUnavailable
from pipeswitch.base.roles import ANYONE
from pipeswitch.extras.cluster.cluster_client import answer_of, connected_ray, placement_of
from pipeswitch.extras.cluster.placement_actor import start_nodes
from pipeswitch.wire.addresses import is_loopback, parse_listen
from pipeswitch.wire.tokens import OWNER_FILE, owner_token
from tests.extras.text.process.test_completions import PROMPT, made
from tests.extras.text.process.test_generate import wanted

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="no Ray: pip install 'pipeswitch[ray]'"
    ),
    pytest.mark.timeout(1200),  # servers restart; another test file may use Ray first
]

COMMAND = [sys.executable, "-P", "-c", "from pipeswitch.cli.main import main; main()"]
SMALL = (
    "--device",
    "cpu",
    "--arena",
    "64MiB",
    "--host-store",
    "128MiB",
    "--standby",
    "1",
    "--commit-every",
    "200ms",
)
NAMES = ("node-0", "node-1", "node-2")
REQUESTS = 200
X = np.random.default_rng(0).random((1, 8), dtype=np.float32)
TOKENS = 40
ASKING = """
import json, select, sys
import numpy as np
kind, address = sys.argv[1:]
x = np.random.default_rng(0).random((1, 8), dtype=np.float32)
if kind in ("openai", "whole"):
    import openai
    client = openai.OpenAI(base_url=f"http://{address}/v1", api_key="EMPTY")
    asked = {"model": "chat", "prompt": "The data set has", "max_tokens": 40, "temperature": 0}
    def ask():
        if kind == "whole":
            return client.completions.create(**asked).choices[0].text
        stream = client.completions.create(**asked, stream=True)
        return "".join(one.choices[0].text for one in stream)
else:
    import importlib
    triton = importlib.import_module(f"tritonclient.{kind}")
    client = triton.InferenceServerClient(address)
    given = triton.InferInput("x", x.shape, "FP32")
    given.set_data_from_numpy(x)
    def ask():
        return client.infer("m", [given]).as_numpy("y").tobytes().hex()
answers, errors, count = {}, [], 0
while not select.select([0], [], [], 0)[0]:
    try:
        answer = ask()
        answers[answer] = answers.get(answer, 0) + 1
    except Exception as error:
        errors.append(f"{count}: {type(error).__name__}: {error}")
    count += 1
    print(count, flush=True)
print(json.dumps({"answers": answers, "errors": errors}), flush=True)
"""
JOB = """
import os, sys, time
import torch
from pipeswitch import job
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for x in job.steps([torch.ones(2, 4)] * 400, model=model, optimizer=optimizer):
    time.sleep(0.0 if os.path.exists(sys.argv[2]) else 0.25)
    with open(sys.argv[1] + ".lives", "a") as file:
        print(os.getpid(), file=file)
    optimizer.zero_grad()
    model(x).pow(2).mean().backward()
    optimizer.step()
torch.save(model.state_dict(), sys.argv[1])
"""


NEEDED = ("openai", "tritonclient", "transformers")
LACKS = [name for name in NEEDED if importlib.util.find_spec(name) is None]


def of_doors(test: Any) -> Any:
    """Mark a test of unmodified HTTP and gRPC clients at each node, while nodes die."""
    return pytest.mark.slow(pytest.mark.skipif(bool(LACKS), reason=f"no {LACKS}")(test))


def ready_at(line: str) -> str:
    return line.partition(" at ")[2].rpartition(": ")[0]


class Cluster:
    def __init__(self, folder: Path) -> None:
        self.folder, self.pids = folder, dict[str, int]()
        self.process = subprocess.Popen(
            [*COMMAND, "cluster", "up", "--local", "3", "--state-dir", str(folder), "--", *SMALL],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if "of 3 nodes are ready" not in line or line.startswith("0"):
            self.process.terminate()
            raise AssertionError(line + self.process.communicate()[0])
        os.environ["RAY_ADDRESS"] = ready_at(line)  # "auto" may find another Ray on this machine

        # Ray tries to connect for 20 s, while other tests run.
        self.stranger = subprocess.Popen(
            [*COMMAND, "cluster", "status"],
            env={**os.environ, "RAY_AUTH_TOKEN": "0" * 64},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def cli(self, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*COMMAND, *words],
            env={**os.environ, **environment},
            text=True,
            capture_output=True,
            timeout=200,
        )

    def status(self) -> dict[str, Any]:
        with connected_ray("auto") as ray:
            status = dict(answer_of(ray, placement_of(ray).status.remote()))
        self.pids |= {node["name"]: node["pid"] for node in status["nodes"]}
        return status


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with ray_of_its_own() as (_, started):
        cluster = Cluster(tmp_path_factory.mktemp("cluster"))
        yield cluster
        started += psutil.Process(cluster.process.pid).children(recursive=True)
        cluster.stranger.kill()
        cluster.stranger.communicate()
        stopped = cluster.cli("cluster", "down")
        assert cluster.process.wait(200) == 0, stopped.stderr
        assert cluster.process.stdout is not None
        cluster.process.stdout.close()


@pytest.fixture(scope="module")
def client(nodes: Cluster) -> Iterator[Client]:
    with Client("cluster") as own_client:
        torch.manual_seed(0)
        module = torch.nn.Sequential(
            torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4)
        )
        row = own_client.register("m", module.eval(), example_inputs=(torch.zeros(1, 8),))
        assert row["notes"] == []  # no note, because a second node already has a copy
        yield own_client


def test_each_node_listens_on_loopback_and_asks_for_its_key(nodes: Cluster, client: Client) -> None:
    for node in nodes.status()["nodes"]:
        assert is_loopback(parse_listen(node["address"])[0])
        with (
            Client(node["address"]) as stranger,
            pytest.raises((PermissionDenied, ServerUnavailable)),
        ):
            stranger.models()


def test_the_verbs_speak_of_all_nodes(nodes: Cluster, client: Client, tmp_path: Path) -> None:
    (model,) = client.models()
    assert len(model["nodes"]) == 2
    assert client.show("m")["digest"] == model["digest"]
    assert client.ping(deep=True)["ready"]
    assert set(client.stats()["nodes"]) == {"node-0", "node-1", "node-2"}
    assert {row["name"].partition("/")[0] for row in client.ps()} == set(client.stats()["nodes"])
    with pytest.raises(ModelNotFound):
        client.job("nothing", "show")
    with pytest.raises(InvalidInput):
        client.trace()
    status = nodes.cli("cluster", "status", "--json")
    assert json.loads(status.stdout)["models"]["m"]["nodes"] == sorted(model["nodes"])
    table = nodes.cli("--host", "cluster", "ps")
    assert table.returncode == 0, table.stderr
    assert "node-2/memory-daemon" in table.stdout


def test_of_two_who_register_one_name_the_first_has_it(nodes: Cluster, client: Client) -> None:
    """Register a name at once from two clients, because threads of one client use one node."""
    modules = {width: torch.nn.Linear(8, width).eval() for width in (3, 5)}

    def register(one: Client, width: int) -> int:
        with contextlib.suppress(AlreadyExists):
            one.register("name", modules[width], example_inputs=(torch.zeros(1, 8),))
            return width
        return 0

    with Client("cluster") as other, ThreadPoolExecutor(3) as beside:
        clients = ((client, 3), (client, 3), (other, 5))
        outcomes = [*beside.map(lambda one: register(*one), clients)]
    assert outcomes in ([3, 3, 0], [0, 0, 5])
    wait_for(
        lambda: {
            node["name"]: node["models"]["name"][0]
            for node in nodes.status()["nodes"]
            if "name" in node["models"]
        },
        lambda digests: (len(digests), len({*digests.values()})) == (2, 1),
    )
    client.unregister("name")


def test_placement_that_is_started_again_knows_as_much(nodes: Cluster, client: Client) -> None:
    before = nodes.status()
    with connected_ray("auto") as ray:
        ray.kill(placement_of(ray), no_restart=False)  # returns while the old actor still answers

        def newer() -> Any:
            table = placement_of(ray).table.options(max_task_retries=-1).remote()
            return row if (row := answer_of(ray, table))["version"] > before["version"] else None

        again = until(newer, "placement has started again")
    assert again["holders"]["m"] == before["models"]["m"]["nodes"]
    assert again["models"]["m"] in again["holders"]["m"]


class Asking:
    """Process in which another project's client sends requests to one address without end."""

    def __init__(self, kind: str, address: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", ASKING, kind, address],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.count, self._last = 0, ""
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._last = line
            self.count += 1

    def goes_on(self, more: int = 10) -> None:
        """Wait until the client has had ``more`` further answers or errors."""
        target = self.count + more
        wait_for(lambda: self.count >= target or self.process.poll() is not None)
        assert self.process.poll() is None

    def end(self) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self._reading.join(100)
        return dict(json.loads(self._last))

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


@pytest.fixture(scope="module")
def chat(client: Client) -> None:
    model, tokenizer = made()
    row = client.register("chat", model, generate=True, tokenizer=tokenizer, precision="exact")
    assert row["notes"] == []


def asked(url: str, body: Any = None, method: str | None = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, method=method)
    try:
        with urllib.request.urlopen(request, timeout=100) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def rows_of(nodes: Cluster, model: str = "m") -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Wait until two nodes hold a model; return all nodes by name, and the holders."""
    status = wait_for(
        nodes.status,
        lambda status: (
            len(status["nodes"]) == 3 and len(status["models"].get(model, {}).get("nodes", ())) >= 2
        ),
    )
    return {one["name"]: one for one in status["nodes"]}, status["models"][model]["nodes"]


@of_doors
def test_each_node_serves_all_models_of_the_cluster(
    nodes: Cluster, client: Client, chat: None
) -> None:
    rows, _ = rows_of(nodes)
    expected = client.infer("m", X).outputs["y"].tolist()
    tensor = {"name": "x", "shape": [1, 8], "datatype": "FP32", "data": X.ravel().tolist()}
    for row in [*rows.values()]:
        url = f"http://{row['http']}"
        status, answer = asked(f"{url}/v2/models/m/infer", {"inputs": [tensor]})
        assert status == 200, answer
        assert np.float32(answer["outputs"][0]["data"]).reshape(1, 4).tolist() == expected
        rows = asked(f"{url}/v2/repository/index", {})[1]
        assert sorted(one["name"] for one in rows) == ["chat", "m"]
        assert [one["id"] for one in asked(f"{url}/v1/models")[1]["data"]] == ["chat"]
        assert asked(f"{url}/v2/models/m")[1]["inputs"][0]["name"] == "x"
        assert asked(f"{url}/v2/health/ready") == (200, {"ready": True})
        assert asked(f"{url}/v2/models/none/infer", {"inputs": [tensor]})[0] == 404
        late = {"inputs": [tensor], "parameters": {"timeout": 1}}
        assert asked(f"{url}/v2/models/m/infer", late)[0] == 504


@of_doors
def test_what_changes_the_cluster_is_refused_at_one_node(
    nodes: Cluster, client: Client, chat: None
) -> None:
    rows, _ = rows_of(nodes)
    for name, row in rows.items():
        token = owner_token(nodes.folder / name / OWNER_FILE)
        for path, method, data in (("other", "POST", b"a bundle"), ("m", "DELETE", None)):
            request = urllib.request.Request(
                f"http://{row['http']}/api/models/{path}",
                data,
                method=method,
                headers={
                    "Authorization": f"Bearer {token}",
                    "Content-Type": "application/octet-stream",
                },
            )
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(request, timeout=100)
            assert json.loads(refused.value.read())["code"] == "InvalidInput"
            refused.value.close()
    assert sorted(row["name"] for row in client.models()) == ["chat", "m"]


@of_doors
def test_callers_are_the_same_at_the_node_that_computes(
    nodes: Cluster, client: Client, chat: None
) -> None:
    """Check that a forwarded request keeps its tenant, and that a disconnect ends its sequence."""
    rows, holders = rows_of(nodes, "chat")
    body = {"model": "chat", "prompt": PROMPT, "max_tokens": 1900, "temperature": 0, "stream": True}
    for name, row in rows.items():
        request = urllib.request.Request(
            f"http://{row['http']}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=100) as answer:
            assert answer.readline().startswith(b"data: ")
            tenants = sequences(rows)
            assert [*tenants.values()] == [ANYONE]
            assert {*tenants} <= ({name} if name in holders else {*holders})
        until(lambda: not sequences(rows), "its sequence is gone")


def sequences(rows: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Return, by node, the tenant of the node's sequence."""
    tenants = {}
    for name, row in rows.items():
        with Client(row["owners"]) as owner:
            for one in owner.sequences():
                tenants[name] = one["tenant"]
    return tenants


@of_doors
def test_nodes_die_and_no_client_of_a_door_loses_a_request(
    nodes: Cluster, client: Client, chat: None
) -> None:
    """Kill the nodes that hold models one after the other, each after the previous one's return."""
    rows, holders = rows_of(nodes)
    answer = client.generate("chat", PROMPT, max_new_tokens=TOKENS)
    text, (model, tokenizer) = answer.text, made()
    assert answer.tokens == wanted(model, tokenizer(PROMPT)["input_ids"], TOKENS)
    expected = client.infer("m", X).outputs["y"].tobytes().hex()
    door = next(name for name in rows if name not in holders)
    clients = {
        kind: Asking(kind, rows[door]["grpc" if kind == "grpc" else "http"])
        for kind in ("openai", "http", "grpc")
    }
    try:
        for victim in (*holders, holders[0]):
            for one in clients.values():
                one.goes_on()
            killed(nodes, victim, clients)
        ends = {kind: one.end() for kind, one in clients.items()}
    finally:
        for one in clients.values():
            one.close()
    sys.stdout.write(f"{ {kind: [*one['answers'].values()] for kind, one in ends.items()} }\n")
    assert {kind: one["errors"] for kind, one in ends.items()} == {kind: [] for kind in clients}
    assert {*ends["openai"]["answers"]} == {text}
    assert {*ends["http"]["answers"]} == {*ends["grpc"]["answers"]} == {expected}


def killed(nodes: Cluster, victim: str, clients: dict[str, Asking]) -> None:
    """Kill a node's server and wait until it is back; check that clients are served meanwhile."""
    before = rows_of(nodes)[0][victim]
    os.kill(before["pid"], signal.SIGKILL)
    for one in clients.values():
        one.goes_on()
    wait_for(lambda: rows_of(nodes)[0], lambda rows: rows[victim]["pid"] != before["pid"])
    after = rows_of(nodes)[0][victim]
    assert [after[kind] for kind in ("http", "grpc")] == [before[kind] for kind in ("http", "grpc")]


@of_doors
def test_a_door_whose_server_dies_goes_on_with_the_other_nodes(
    nodes: Cluster, client: Client, chat: None
) -> None:
    """Kill the node of the client's own address; OpenAI's client retries until it is back."""
    rows, holders = rows_of(nodes)
    text = client.generate("chat", PROMPT, max_new_tokens=TOKENS).text
    for door in (holders[0], *[name for name in rows if name not in holders]):
        one = Asking("whole", rows[door]["http"])
        try:
            one.goes_on(3)
            killed(nodes, door, {"whole": one})
            one.goes_on(3)
            end = one.end()
        finally:
            one.close()
        sys.stdout.write(
            f"{door} {door in holders}: {[*end['answers'].values()]} {end['errors']}\n"
        )
        assert {*end["answers"]} == {text}
        assert end["errors"] == []


class Job:
    """Job on the cluster, slow until it is released, and a plain run of the same script."""

    def __init__(self, client: Client, folder: Path, name: str) -> None:
        self.client, self.folder, self.name = client, folder, name
        (folder / "job.py").write_text(JOB)
        for one, let_go in ((f"whole-{name}", folder), (name, folder / "let_go")):
            args = [f"{folder}/{one}.pt", str(let_go)]
            client.train(folder / "job.py", name=one, args=args)
        assert client.task(f"whole-{name}").wait(60)["state"] == "done"

    def has_come(self, nodes: Cluster, step: int) -> str:
        """Return the job's node, after this step is on its disk and on another node's disk."""
        row = wait_for(
            lambda: job_row(self.client, self.name), lambda row: row["persisted_step"] >= step
        )
        with connected_ray("auto"):  # one connection for all calls of ``status``
            wait_for(
                lambda: nodes.status()["jobs"].get(self.name, {}),
                lambda states: sorted(states.values()) == ["home", "replica"],
            )
        return str(row["node"])

    def ends_as_the_whole_one(self) -> None:
        """Release the job; compare its weights with the plain run's. Check that no two processes of
        the job have run at the same time."""
        (self.folder / "let_go").touch()
        assert self.client.task(self.name).wait(120)["state"] == "done"
        weights = [
            torch.load(self.folder / f"{one}.pt", weights_only=True)["weight"]
            for one in (f"whole-{self.name}", self.name)
        ]
        assert torch.equal(*weights)
        lives = (self.folder / f"{self.name}.pt.lives").read_text().split()
        assert len([*itertools.groupby(lives)]) == len(set(lives)) > 1


def test_a_jobs_server_is_killed_and_then_it_moves(
    nodes: Cluster, client: Client, tmp_path: Path
) -> None:
    """Check that the restarted server resumes the job."""
    job = Job(client, tmp_path, "moved")
    home = job.has_come(nodes, 2)
    os.kill(nodes.pids[home], signal.SIGKILL)
    wait_for(lambda: job_row(client, "moved"), lambda row: row["restarts"] == 1)
    assert job.has_come(nodes, 4) == home
    killed = job_row(client, "moved")

    to = next(name for name in NAMES if name != home)
    moved = nodes.cli("--host", "cluster", "jobs", "move", "moved", "--to", to)
    assert moved.returncode == 0, moved.stderr
    row = wait_for(lambda: job_row(client, "moved"), lambda row: row["node"] == to)
    for count in ("restarts", "steps_recomputed"):
        assert row[count] == killed[count]
    job.ends_as_the_whole_one()
    assert [row["node"] for row in client.jobs() if row["name"] == "moved"] == [to]


@pytest.mark.slow
def test_a_jobs_node_hangs(nodes: Cluster, client: Client, tmp_path: Path) -> None:
    """Check that a hung node's surviving server stops the job before another node starts it."""
    job = Job(client, tmp_path, "hung")
    to = job.has_come(nodes, 2)
    node = psutil.Process(nodes.pids[to]).parent()
    assert node is not None
    (tmp_path / "job.py").unlink()  # the node must use its own copy
    node.suspend()
    try:
        wait_for(
            lambda: nodes.status()["jobs"].get("hung", {}),
            lambda states: "home" in states.values() and to not in states,
        )
    finally:
        node.resume()
    job.ends_as_the_whole_one()
    assert to not in [row["node"] for row in client.jobs() if row["name"] == "hung"]


@pytest.mark.slow
def test_a_job_whose_node_is_lost_again_and_again(
    nodes: Cluster, client: Client, tmp_path: Path
) -> None:
    """End a job's node, which Ray does not restart: when it returns, it must not run the job."""
    job = Job(client, tmp_path, "lost")
    for number in range(2):
        home = job.has_come(nodes, 2 * number + 2)
        with connected_ray("auto") as ray:
            ray.kill(ray.get_actor(f"node:{home}", namespace="pipeswitch"), no_restart=True)
        os.kill(nodes.pids[home], signal.SIGKILL)
        wait_for(
            lambda: nodes.status()["jobs"].get("lost", {}), lambda states: "home" in states.values()
        )
        with connected_ray("auto") as ray:
            where = ray.get_runtime_context().get_node_id()
            start_nodes(ray, {home: where}, str(nodes.folder), {home: "127.0.0.1"}, SMALL)
        assert [row["node"] for row in client.jobs() if row["name"] == "lost"] != [home]
    job.ends_as_the_whole_one()


def job_row(client: Client, name: str) -> dict[str, Any]:
    """Return the job's row; {} if its node is down."""
    return next((row for row in client.jobs() if row["name"] == name), {})


def wait_for(look: Callable[[], Any], is_so: Callable[[Any], bool] = bool) -> Any:
    until_s = time.monotonic() + 200.0
    while not (value := look()) or not is_so(value):
        assert time.monotonic() < until_s, value
        time.sleep(0.05)
    return value


def test_a_node_is_killed_under_requests_and_none_is_lost(
    nodes: Cluster, client: Client, tmp_path: Path
) -> None:
    """Kill a node: each request must be answered once with equal bits, and the node must return.
    Then drain a node that trains: its models and its job must move, without a lost request."""
    x = np.random.default_rng(0).random((1, 8), dtype=np.float32)
    expected = client.infer("m", x).outputs["y"].tobytes()
    status = nodes.status()
    serving = status["models"]["m"]["serving"]
    victim = next(node for node in status["nodes"] if node["name"] == serving)
    killed_at = random.randrange(REQUESTS // 2)
    answers = []
    for number in range(REQUESTS):
        if number == killed_at:
            os.kill(victim["pid"], signal.SIGKILL)
        answer = client.submit("m", x).result(60) if number % 2 else client.infer("m", x)
        answers.append((answer.request_id, answer.outputs["y"].tobytes()))
    assert len({request for request, _ in answers}) == REQUESTS
    assert {bits for _, bits in answers} == {expected}

    job = Job(client, tmp_path, "drained")
    home = job.has_come(nodes, 2)
    with ThreadPoolExecutor(1) as beside:
        drained = beside.submit(nodes.cli, "cluster", "drain", home)
        answers = [client.infer("m", x)]
        while not drained.done():
            answers.append(client.infer("m", x))
    assert drained.result().returncode == 0, drained.result().stderr
    assert {answer.outputs["y"].tobytes() for answer in answers} == {expected}
    assert len({answer.request_id for answer in answers}) == len(answers)
    last_status = nodes.status()
    assert home not in {node["name"] for node in last_status["nodes"]}
    assert home not in last_status["models"]["m"]["nodes"]
    job.ends_as_the_whole_one()
    client.unregister("m")
    with pytest.raises(ModelNotFound):
        client.infer("m", x)


@pytest.mark.slow
def test_tokens_go_on_where_their_node_died(nodes: Cluster, client: Client) -> None:
    """Kill the node of a generation: another node must continue with equal tokens."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(
        "qwen2",
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        eos_token_id=None,
        num_key_value_heads=2,
        intermediate_size=64,
        vocab_size=300,
        max_position_embeddings=128,
    )
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert client.register("answers", model, generate=True, precision="exact")["notes"] == []
    ids = [*range(5, 20)]
    expected = [
        token.id
        for token in client.generate("answers", ids, max_new_tokens=60, seed=3, temperature=1.0)
    ]
    answer = client.generate("answers", ids, max_new_tokens=60, seed=3, temperature=1.0)
    first_ids = [next(answer).id for _ in range(9)]
    (row,) = client.sequences()
    nodes.status()
    os.kill(nodes.pids[row["node"]], signal.SIGKILL)
    assert first_ids + [token.id for token in answer] == expected
    with client.generate("answers", ids, max_new_tokens=60) as another:
        next(another)
        assert row["node"] not in [now["node"] for now in client.sequences()]
    assert client.sequences() == []
    client.unregister("answers")


def test_who_has_another_token_hears_nothing(nodes: Cluster) -> None:
    heard, error = nodes.stranger.communicate(timeout=200)
    assert (nodes.stranger.returncode, heard) == (3, ""), error
    assert "no Ray answers" in error
