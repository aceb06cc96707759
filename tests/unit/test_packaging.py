"""Container files, which these tests read but do not build: files, settings, ports and paths."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeswitch.base.config import PROFILES_VARIABLE, Config, ServerConfig, load
from pipeswitch.base.errors import PipeSwitchError
from pipeswitch.cli.main import main
from pipeswitch.controller.gateway_process import DEFAULTS
from pipeswitch.extras.cluster.command import up
from pipeswitch.extras.cluster.ray_nodes import RESOURCE
from pipeswitch.extras.demo import digits

ROOT = Path(__file__).parents[2]
PACKAGING = ROOT / "packaging"
DOCKERFILE = (PACKAGING / "Dockerfile").read_text().replace("\\\n", " ")
COMPOSE = yaml.safe_load((PACKAGING / "compose.yaml").read_text())
COMPOSE_GPU = yaml.safe_load((PACKAGING / "compose.gpu.yaml").read_text())
SERVICE, STATEFUL_SET = yaml.safe_load_all((PACKAGING / "kubernetes.yaml").read_text())
POD = STATEFUL_SET["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]
(COMPOSED,) = COMPOSE["services"].values()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PORTS = [int(address.rpartition(":")[2]) for address in DEFAULTS.values()]
STATE = "/var/lib/pipeswitch"
USER = 10001


def instructions(name: str) -> list[str]:
    return re.findall(rf"^{name} (.*)$", DOCKERFILE, re.MULTILINE)


def of_image() -> dict[str, str]:
    """Return the environment variables that the image sets."""
    return dict(re.findall(r"\b([A-Z_]+)=(\S+)", " ".join(instructions("ENV"))))


def test_the_image_copies_what_is_there_and_all_that_is_installed() -> None:
    ours = [line.split() for line in instructions("COPY") if not line.startswith("--from")]
    copied = {source for *sources, _ in ours for source in sources}
    assert all((ROOT / source).exists() for source in copied)
    tops = {"pipeswitch", *PROJECT["tool"]["setuptools"]["package-dir"].values()}
    assert tops | {"pyproject.toml", PROJECT["project"]["readme"]} <= copied
    context = (PACKAGING / "Dockerfile.dockerignore").read_text().splitlines()
    assert {f"!{source}" for source in copied} <= set(context)
    (extras,) = re.findall(r"/src\[([\w,]+)\]", DOCKERFILE)
    assert set(extras.split(",")) <= set(PROJECT["project"]["optional-dependencies"])
    assert instructions("FROM")[0].split()[0] == instructions("FROM")[1]  # both have one Python


def test_the_image_runs_as_its_own_user_and_says_how_it_is() -> None:
    (user,), (check,) = instructions("USER"), re.findall(r"CMD (\[.*ping.*\])", DOCKERFILE)
    assert user == "pipeswitch"
    assert f"--uid {USER}" in DOCKERFILE
    assert check == '["pipeswitch", "ping"]'
    assert instructions("ENTRYPOINT") == ['["pipeswitch"]']
    assert instructions("VOLUME") == [STATE]
    assert [int(port) for port in instructions("EXPOSE")[0].split()] == PORTS


@pytest.mark.parametrize(
    "environment",
    [COMPOSED["environment"], {one["name"]: one["value"] for one in CONTAINER["env"]}],
    ids=["compose", "k8s"],
)
def test_a_server_takes_every_setting_of_a_container(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a folder without a settings file
    environ = of_image() | environment
    assert set(map(type, environ.values())) == {str}
    assert load(environ=environ).gateway.behind_proxy
    for name, value in environ.items():
        if name.startswith("PIPESWITCH_"):
            assert "__" in name or name == PROFILES_VARIABLE  # the server ignores other names
            if "/" in value:
                assert value.startswith(f"{STATE}/"), name  # the path must be in the volume


@pytest.mark.parametrize(
    "command", [COMPOSED["command"], CONTAINER["args"]], ids=["compose", "k8s"]
)
def test_both_serve_with_flags_that_exist_and_with_tokens(command: list[str]) -> None:
    verb, *rest = command
    flags = {flag for option in main.commands[verb].params for flag in option.opts}
    options = dict(zip(rest[::2], rest[1::2], strict=True))
    assert set(options) <= flags
    assert [int(options[name].rpartition(":")[2]) for name in ("--http", "--grpc")] == PORTS
    assert options["--gateway-tokens"]


def test_a_gpu_is_asked_for_by_one_file_and_one_line_alone() -> None:
    (name, added), *_ = COMPOSE_GPU["services"].items()
    assert name in COMPOSE["services"]
    (device,) = added["deploy"]["resources"]["reservations"]["devices"]
    assert device["capabilities"] == ["gpu"]
    builds = COMPOSED["build"]["args"], added["build"]["args"]
    assert [set(args) for args in builds] == 2 * [set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.M))]
    assert COMPOSED["image"] != added["image"] == CONTAINER["image"]
    lines = (PACKAGING / "kubernetes.yaml").read_text().splitlines()
    without = yaml.safe_load_all("\n".join(line for line in lines if "nvidia.com/gpu" not in line))
    limits = list(without)[1]["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert limits | {"nvidia.com/gpu": 1} == CONTAINER["resources"]["limits"] != limits


def test_compose_has_memory_state_and_time_to_drain() -> None:
    assert COMPOSED["ulimits"]["memlock"] == -1
    assert "deploy" not in COMPOSED
    (volume,) = COMPOSED["volumes"]
    name, _, place = volume.partition(":")
    assert (name in COMPOSE["volumes"], place) == (True, STATE)
    build = COMPOSED["build"]
    assert (build["context"], build["dockerfile"]) == ("..", "packaging/Dockerfile")
    assert all(port.startswith("127.0.0.1:") for port in COMPOSED["ports"])
    assert int(COMPOSED["stop_grace_period"].rstrip("s")) * 1000 > drain_ms()
    secret = f"/run/secrets/{COMPOSED['secrets'][0]}"
    assert secret in COMPOSED["command"]
    assert COMPOSED["secrets"][0] in COMPOSE["secrets"]


def drain_ms() -> float:
    server: ServerConfig = Config().server
    return server.drain_grace_ms


def test_kubernetes_probes_paths_that_need_no_token() -> None:
    rest = (ROOT / "pipeswitch/gateway/rest.py").read_text()
    ports = {one["name"]: one["containerPort"] for one in CONTAINER["ports"]}
    assert sorted(ports.values()) == PORTS
    for kind in ("startupProbe", "livenessProbe", "readinessProbe"):
        probe = CONTAINER[kind]["httpGet"]
        assert probe["path"].startswith("/v2/health/")
        assert f'"{probe["path"]}"' in rest
        assert probe["port"] in ports
    for port in SERVICE["spec"]["ports"]:
        assert ports[port["targetPort"]] == port["port"]


def test_kubernetes_names_agree_and_nothing_may_more_than_it_must() -> None:
    labels: Any = STATEFUL_SET["spec"]["template"]["metadata"]["labels"]
    assert SERVICE["spec"]["selector"] == STATEFUL_SET["spec"]["selector"]["matchLabels"] == labels
    assert STATEFUL_SET["spec"]["serviceName"] == SERVICE["metadata"]["name"]
    assert STATEFUL_SET["spec"]["replicas"] == 1
    volumes = {one["name"] for one in POD["volumes"]}
    volumes |= {one["metadata"]["name"] for one in STATEFUL_SET["spec"]["volumeClaimTemplates"]}
    for container in (CONTAINER, *POD["initContainers"]):
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
    places = {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    runtime = re.search(r"XDG_RUNTIME_DIR=(\S+)", DOCKERFILE)
    assert {STATE, "/tmp", runtime[1]} <= places
    assert POD["securityContext"]["runAsUser"] == POD["securityContext"]["fsGroup"] == USER
    assert POD["terminationGracePeriodSeconds"] * 1000 > drain_ms()


# ---- a cluster whose machines come and go ------------------------------------------------------

LAUNCHER = yaml.safe_load((PACKAGING / "cluster.yaml").read_text())
RAY_CLUSTER, POLICY = yaml.safe_load_all((PACKAGING / "kuberay.yaml").read_text())
HEAD, (GROUP,) = (RAY_CLUSTER["spec"][key] for key in ("headGroupSpec", "workerGroupSpecs"))


def test_rays_launcher_takes_its_file() -> None:
    spec = importlib.util.find_spec("ray")  # importing ray would change the environment
    if spec is not None and spec.origin is not None:
        schema = Path(spec.origin).with_name("autoscaler") / "ray-schema.json"
        pytest.importorskip("jsonschema").validate(LAUNCHER, json.loads(schema.read_text()))
    server = LAUNCHER["available_node_types"]["server"]
    starts, profile = LAUNCHER["head_start_ray_commands"], " ".join(LAUNCHER["setup_commands"])
    assert (server["resources"], [text for text in starts if "--head" in text]) == (
        {RESOURCE: 1},
        [text for text in starts if "--include-dashboard=false" in text],
    )
    assert all(word in profile for word in ("RAY_AUTH_MODE=token", "chmod 600 ~/.ray/auth_token"))
    assert words_of_up(starts[-1]) == (1, server["max_workers"])


def test_nothing_installs_by_a_name_that_no_index_knows() -> None:
    pages = [ROOT / "README.md", *ROOT.glob("docs/guide/*.md"), *PACKAGING.iterdir()]
    lines = [(page.name, line) for page in pages for line in page.read_text().splitlines()]
    by_name = re.compile(r"pip install ['\"]?pipeswitch\b(?!.*@ git)")
    (line,) = [(name, line) for name, line in lines if by_name.search(line)]
    assert line[0] == "start.md"
    assert "adds an extra" in line[1], "pip fetches its packages alone, where PipeSwitch is"
    (setup,) = [text for text in LAUNCHER["setup_commands"] if "pip install" in text]
    (folder,) = [place for place, here in LAUNCHER["file_mounts"].items() if here == "dist"]
    assert f"{folder}/pipeswitch-*.whl" in setup


def test_every_extra_that_something_names_exists() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    code = [path.read_text() for path in ROOT.glob("pipeswitch/**/*.py")]
    named = re.findall(r"pipeswitch\[([a-z,]+)\]", "".join(code))
    start = (ROOT / "docs/guide/start.md").read_text()
    named += re.findall(r"\.whl\)\[([a-z,]+)\]", start)
    assert {one for names in named for one in names.split(",")} <= set(extras)
    install = re.search(r"^Extras: .*?\n\n", start, re.MULTILINE | re.DOTALL)
    assert install is not None
    assert {name for name in extras if f"`{name}`" not in install[0]} == {"docs", "fuzz", "test"}


def test_the_demos_job_names_the_extra_that_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    monkeypatch.setattr(sys, "argv", ["digits"])
    with pytest.raises(PipeSwitchError, match=r"pip install 'pipeswitch\[demo\]'"):
        digits.main()


def test_the_operators_pods_have_a_token_and_no_dashboard_that_others_reach() -> None:
    assert RAY_CLUSTER["spec"]["authOptions"] == {"mode": "token"}
    assert HEAD["rayStartParams"]["dashboard-host"] == "127.0.0.1"
    assert json.loads(json.loads(GROUP["rayStartParams"]["resources"])) == {RESOURCE: 1}
    assert POLICY["spec"]["policyTypes"] == ["Ingress"]
    for template in (HEAD["template"], GROUP["template"]):
        assert template["metadata"]["labels"] == POLICY["spec"]["podSelector"]["matchLabels"]
        (container,), pod = template["spec"]["containers"], template["spec"]
        assert (container["image"], pod["securityContext"]["runAsUser"]) == ("pipeswitch", USER)
        assert {one["name"] for one in container["volumeMounts"]} == {
            one["name"] for one in pod["volumes"]
        }
        assert container["securityContext"] == CONTAINER["securityContext"]
        assert pod["terminationGracePeriodSeconds"] * 1000 > drain_ms()
    hook = HEAD["template"]["spec"]["containers"][0]["lifecycle"]["postStart"]["exec"]["command"]
    assert words_of_up(hook[-1]) == (1, GROUP["maxReplicas"])


def words_of_up(text: str) -> object:
    (words,) = re.findall(r"pipeswitch cluster up ([^;]*)", text)
    return up.make_context("up", words.split()).params["scale"]
