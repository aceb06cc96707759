"""Downloads from a model hub during a build: the caches, the token, and the limit of bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pipeswitch.ipc.messages.base import Message, ModelName, OpId, ResourceLimits
from pipeswitch.ipc.messages.builder import BuildDone, BuildFailed, BuildSettings
from pipeswitch.programs.compiler import build_process, hub
from pipeswitch.programs.compiler import program as build_module
from pipeswitch.programs.interface.layout import Manifest
from pipeswitch.programs.spec import BuildSpec
from pipeswitch.sandbox.confine import missing
from tests.unit.manifests import plain_manifest
from tests.unit.test_job_host import Sent

KIB = 1 << 10
TOKEN, OWNERS = "hf_secret", "what the owner fetched"
MANIFEST = plain_manifest(digest="a" * 64, source="hf:a/b")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield the folder of an owner's hub caches and token; restore the environment afterwards."""
    home = tmp_path / "home"
    (tmp_path / "org" / "model").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)  # the server's working directory
    (home / "hub").mkdir(parents=True)
    (home / "token").write_text(TOKEN)
    (home / "hub" / "config.json").write_text(OWNERS)
    before = dict(os.environ)
    for name in [name for name in os.environ if name.startswith("HF_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HF_HOME", str(home))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield home
    os.environ.clear()
    os.environ.update(before)


def reads_when_confined(spec: BuildSpec, work: Path, *paths: Path) -> list[str]:
    """Fork a confined child; return the token that it has, and what it can read of each path."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        build_process._confine(msgspec.msgpack.encode(spec), spec.source, work)
        results = [os.environ.get("HF_TOKEN", "")]
        for path in (*paths, Path(os.environ["HF_TOKEN_PATH"])):
            try:
                results.append(path.read_text())
            except OSError as error:
                results.append(type(error).__name__)
        os.write(writing, "\n".join(results).encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with open(reading) as file:
        return file.read().split("\n")


@pytest.mark.skipif(bool(missing()), reason="this kernel has no sandbox")
@pytest.mark.parametrize(
    ("source", "cached"), [("hf:org/model", OWNERS), ("torchvision:resnet18", "PermissionError")]
)
def test_a_confined_build_reads_no_token_and_the_hubs_cache_when_it_is_of_one(
    source: str, cached: str, home: Path, tmp_path: Path
) -> None:
    work = tmp_path / "work"
    work.mkdir()
    spec = BuildSpec(name="m", source=source, weights="random:0")
    results = reads_when_confined(spec, work, home / "token", home / "hub" / "config.json")
    assert results == ["", "PermissionError", cached, "FileNotFoundError"]


@pytest.mark.skipif(bool(missing()), reason="this kernel has no sandbox")
def test_a_folder_that_the_owner_names_is_read_wherever_it_is(tmp_path: Path) -> None:
    folder, work = tmp_path / "mine", tmp_path / "work"
    folder.mkdir()
    work.mkdir()
    (folder / "config.json").write_text("{}")
    spec = BuildSpec(name="m", source=f"hf:{folder}#BertModel", weights="random:0")
    assert reads_when_confined(spec, work, folder / "config.json")[1] == "{}"


class Ended(BaseException):
    """Replacement for the end of the process."""


def build_that(
    monkeypatch: pytest.MonkeyPatch, folder: Path, pieces: int, *, is_owners: bool
) -> tuple[Message, dict[str, str | None]]:
    """Run a build that downloads ``pieces`` KiB of pretrained weights; return its last message, and
    the environment in which it searches for the weights."""
    environment: dict[str, str | None] = {}

    def build(spec: BuildSpec, work: Path, progress: Any, disk_bytes: int, **_: bool) -> Manifest:
        names = ("HF_HOME", "HF_HUB_CACHE", "TORCH_HOME", "HF_TOKEN")
        environment.update({name: os.environ.get(name) for name in names})
        environment["folder"] = (
            str(Path("org/model").resolve()) if Path("org/model").exists() else None
        )
        cache = Path(os.environ["HF_HOME"]) / "hub"
        cache.mkdir(parents=True, exist_ok=True)
        for piece in range(pieces):
            (cache / f"part-{piece}").write_bytes(bytes(KIB))
        is_over = pieces * KIB > disk_bytes and not is_owners
        for meter in meters:  # instead of its thread, which checks at times of its own
            meter.close()
            if is_over:
                meter._on_over(hub.folder_bytes(cache))
        return MANIFEST

    meters: list[hub.Meter] = []

    class Noted(hub.Meter):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            meters.append(self)

    def leave(status: int) -> None:
        raise Ended

    monkeypatch.setattr(hub, "Meter", Noted)
    monkeypatch.setattr(build_module, "build", build)
    monkeypatch.setattr(os, "_exit", leave)
    sent = Sent()
    import torch

    spec = BuildSpec(name="m", source="hf:a/b", weights="pretrained")
    settings = BuildSettings(
        model=ModelName("m"),
        op_id=OpId(1),
        spec=msgspec.msgpack.encode(spec),
        directory=str(folder),
        disk_bytes=8 * KIB,
        is_owners=is_owners,
        limits=ResourceLimits(is_sandboxed=True, threads=torch.get_num_threads()),
    )
    try:
        build_process.run(settings, sent)  # type: ignore[arg-type]
    except Ended:
        assert isinstance(sent.messages[-1], BuildFailed)
    return sent.messages[-1], environment


def test_what_a_client_fetches_is_its_builds_own_and_is_gone_with_it(
    monkeypatch: pytest.MonkeyPatch, home: Path, tmp_path: Path
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(home / "hub"))
    models = tmp_path / "models"
    models.mkdir()
    last, environment = build_that(monkeypatch, models, 8, is_owners=False)
    assert isinstance(last, BuildDone)
    [work] = models.iterdir()
    assert list(work.iterdir()) == []
    own = str(work / "hub")
    assert environment == {
        "HF_HOME": own,
        "HF_HUB_CACHE": None,
        "TORCH_HOME": own,
        "HF_TOKEN": None,
        "folder": None,
    }
    assert [path.name for path in (home / "hub").iterdir()] == ["config.json"]


def test_a_client_fetches_no_more_than_its_share_of_the_disk(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    last, _ = build_that(monkeypatch, tmp_path, 9, is_owners=False)
    assert isinstance(last, BuildFailed)
    assert last.error == "HostStoreFull"
    assert "hf:a/b does not fit: 9.00 KiB were downloaded, 8.00 KiB are left" in last.message


def test_the_owner_fetches_into_his_own_caches_with_his_token(
    monkeypatch: pytest.MonkeyPatch, home: Path, tmp_path: Path
) -> None:
    last, environment = build_that(monkeypatch, tmp_path, 9, is_owners=True)
    assert isinstance(last, BuildDone)
    assert (environment["HF_HOME"], environment["HF_TOKEN"]) == (str(home), TOKEN)
    assert environment["folder"] is not None
    assert len(list((home / "hub").iterdir())) == 10


def test_the_meter_looks_by_itself_and_once(tmp_path: Path) -> None:
    import threading

    over = threading.Event()
    sizes: list[int] = []
    (tmp_path / "shard").write_bytes(bytes(3 * KIB))
    (tmp_path / "link").symlink_to("shard")

    def on_over(held_bytes: int) -> None:
        sizes.append(held_bytes)
        over.set()

    meter = hub.Meter(tmp_path, 2 * KIB, on_over)
    assert over.wait(20)
    meter.close()
    assert sizes == [hub.folder_bytes(tmp_path)]
    assert sizes[0] < 4 * KIB
