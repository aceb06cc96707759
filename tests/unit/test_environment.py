"""Environment variables that the server's child processes get."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from pipeswitch.sandbox.environment import environment_file, harmless, take_environment


@pytest.fixture
def environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.mark.parametrize(
    "name", ["HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "NVIDIA_API_KEY", "LD_SDK_KEY", "https_proxy"]
)
def test_what_may_be_a_secret_is_none_of_a_programs_business(name: str) -> None:
    assert harmless({name: "x", "PATH": "/bin"}) == {"PATH": "/bin"}


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "PYTHONPATH", "LC_ALL", "HF_HOME", "HOME"])
def test_what_imports_read_they_find(name: str) -> None:
    assert harmless({name: "x"}) == {name: "x"}


@pytest.mark.usefixtures("environment")
def test_the_owners_code_finds_all_and_what_the_process_has_set_stays() -> None:
    os.environb[b"ODD"] = b"\xff=\n"
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    file = environment_file()
    for _ in range(2):  # a second process reads the same file from its beginning
        del os.environ["ODD"]
        os.environ["CUDA_VISIBLE_DEVICES"] = "1"
        take_environment(os.dup(file))
        assert os.environb[b"ODD"] == b"\xff=\n"
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    os.close(file)


@pytest.mark.parametrize("_", ["first", "second"])
def test_a_warning_of_torch_is_there_for_each_test_not_for_the_first_alone(_: str) -> None:
    norm, half = torch.nn.RMSNorm(3, device="meta"), torch.float16
    with pytest.warns(UserWarning, match="Mismatch dtype"):
        norm(torch.empty(2, 3, dtype=half, device="meta"))
