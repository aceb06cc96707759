"""Small mistakes of first-time users, and the messages that they get."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import pipeswitch as ps
from pipeswitch.base.errors import InvalidInput, RegistrationRefused
from pipeswitch.base.model_options import RegisterRequest
from pipeswitch.base.units import LogFile
from pipeswitch.cli.infer import load_inputs
from pipeswitch.client.model_sources import LocalSource
from pipeswitch.client.tensors import Signature
from pipeswitch.client.verbs import Verbs
from pipeswitch.programs.compiler import program
from pipeswitch.programs.spec import BuildSpec


def sent(source: Any, **fields: Any) -> RegisterRequest:
    request = RegisterRequest(source="", **fields)
    upload = lambda path, kind, progress: "put:" + 64 * "0"  # noqa: E731
    with LocalSource(source).sent(request, upload, None) as uploaded:
        return uploaded


@pytest.mark.parametrize("address", [5, 5555, b"gpu1", ("gpu1", 5555)])
def test_an_address_is_a_text(address: Any) -> None:
    with pytest.raises(InvalidInput):
        ps.Client(address)


@pytest.mark.parametrize("source", [5, None, {"a": 1}, [1]])
def test_what_is_no_model_is_named_for_what_it_is(source: Any) -> None:
    with pytest.raises(InvalidInput):
        sent(source)


@pytest.mark.parametrize("weights", ["gone.pt", "gone.safetensors", "./gone.bin"])
def test_weights_that_are_not_there_are_missing_and_not_of_the_wrong_kind(weights: str) -> None:
    with pytest.raises(InvalidInput):
        sent("torchvision:resnet18", weights=weights)


@pytest.mark.parametrize("look", [sent, partial(load_inputs, signature=Signature(()), seed=0)])
@pytest.mark.parametrize("name", ["gone.pt2", "./gone.pt2"])
def test_the_hint_for_a_file_that_is_not_there_says_what_to_type(look: Any, name: str) -> None:
    with pytest.raises(InvalidInput, match=name) as caught:
        look(name)
    assert caught.value.hint


def test_a_script_is_no_model_and_the_hint_says_how_to_train_it() -> None:
    with pytest.raises(InvalidInput, match=r"pipeswitch train 'train.py'"):
        sent("train.py")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "llama-tiny").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("named", ["llama-tiny", "./llama-tiny", "~/llama-tiny", "llama-tiny/"])
@pytest.mark.parametrize("wished", ["", "#BertModel"])
def test_a_folder_of_a_language_model_is_the_clients(folder: Path, named: str, wished: str) -> None:
    source = sent(f"hf:{named}{wished}", weights="pretrained").source
    assert source == f"hf:{folder}/llama-tiny{wished}"


def test_a_folder_that_is_not_there_is_missed_here_and_a_hubs_name_stays(folder: Path) -> None:
    for named in ("./gone", "/gone", "~/gone", "../gone#BertModel"):
        with pytest.raises(InvalidInput):
            sent(f"hf:{named}", weights="pretrained")
    assert sent("hf:gpt2", weights="pretrained").source == "hf:gpt2"
    assert sent("hf:org/name#GPT2", weights="pretrained").source == "hf:org/name#GPT2"


@pytest.mark.parametrize("percent", [101, 150, -1])
def test_a_share_is_a_percentage(percent: int) -> None:
    with pytest.raises(InvalidInput):
        Verbs.split(Verbs.__new__(Verbs), "m", 2, percent)


def test_arguments_of_a_job_are_a_list() -> None:
    client = ps.Client.__new__(ps.Client)
    with pytest.raises(InvalidInput):
        client.train("train.py", args="a b")  # type: ignore[arg-type]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[tuple[logging.Logger, Path]]:
    path = tmp_path / "server.log"
    handler = LogFile(path, maxBytes=1 << 20, backupCount=1)
    logger = logging.Logger("test")
    logger.addHandler(handler)
    yield logger, path
    handler.close()


def test_a_full_disk_is_one_line_until_the_log_can_be_written_again(
    log: tuple[logging.Logger, Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logger, path = log
    (handler,) = logger.handlers
    assert isinstance(handler, LogFile)

    def full() -> None:
        raise OSError(28, os.strerror(28))

    with monkeypatch.context() as patched:
        patched.setattr(handler, "flush", full)
        for _ in range(20):
            logger.warning("lost")
    text = capsys.readouterr().err
    assert text == f"{path} cannot be written: {os.strerror(28)}\n"
    logger.warning("kept")
    assert path.read_text().endswith("kept\n")
    with monkeypatch.context() as patched:
        patched.setattr(handler, "flush", full)
        logger.warning("lost")
    assert capsys.readouterr().err == text


@pytest.mark.parametrize(
    ("error", "is_full"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), True),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), True),
        (RuntimeError("I/O error: No space left on device (os error 28)"), True),
        (OSError(errno.EACCES, os.strerror(errno.EACCES)), False),
    ],
)
def test_a_program_that_the_disk_has_no_room_for_is_refused_with_what_to_do(
    error: Exception, is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise error

    monkeypatch.setattr(program, "_build_module", full)
    with pytest.raises(RegistrationRefused) as refused:
        program.build(BuildSpec(name="m", source="torchvision:resnet18"), tmp_path, lambda *_: None)
    assert bool(refused.value.hint) is is_full
    assert ("cannot be written" in str(refused.value)) is is_full
