"""Permissions to name code: a pattern is compared with exactly the code that will run."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeswitch.base.errors import InvalidInput, PermissionDenied
from pipeswitch.base.model_options import RegisterRequest
from pipeswitch.base.roles import ANYONE, OWNER, Principal
from pipeswitch.frontend.intake import validation
from pipeswitch.frontend.intake.validation import Body
from pipeswitch.frontend.permissions import Rules, check_entry, check_place, check_source
from pipeswitch.frontend.registration import check_origin

STRANGER = Principal(tenant=ANYONE)


def script(folder: Path, name: str) -> str:
    path = folder / name
    path.write_text("print(1)")
    return str(path)


def entry(text: str, *allow_code: str) -> str:
    return check_entry(text, STRANGER, Rules(allow_code=allow_code))


def test_an_allowed_script_admits_no_file_whose_name_goes_on_after_a_colon(tmp_path: Path) -> None:
    allowed, evil = script(tmp_path, "train.py"), script(tmp_path, "train.py:evil.py")
    assert entry(allowed, allowed) == allowed
    with pytest.raises(PermissionDenied) as caught:
        entry(evil, allowed)
    assert f"--allow-code '{evil}'" in caught.value.hint


def test_an_allowed_module_admits_its_functions_and_no_path(tmp_path: Path) -> None:
    assert entry("pkg.train:main", "pkg.*") == "pkg.train:main"
    with pytest.raises(PermissionDenied):
        entry("other.train:main", "pkg.*")
    with pytest.raises(PermissionDenied):
        entry(script(tmp_path, "pkg.train"), "pkg.*")


def test_a_star_in_a_scripts_pattern_stays_within_its_folder(tmp_path: Path) -> None:
    below = tmp_path / "below"
    below.mkdir()
    assert entry(script(tmp_path, "a.py"), f"{tmp_path}/*.py")
    with pytest.raises(PermissionDenied):
        entry(script(below, "a.py"), f"{tmp_path}/*.py")
    assert entry(script(below, "a.py"), "*")  # "*" alone also allows subfolders


def test_a_link_counts_as_what_it_leads_to(tmp_path: Path) -> None:
    evil = script(tmp_path, "evil.py")
    link = tmp_path / "train.py"
    link.symlink_to(evil)
    with pytest.raises(PermissionDenied):
        entry(str(link), str(link))


def test_a_file_that_a_worker_would_import_is_no_script(tmp_path: Path) -> None:
    other = script(tmp_path, "train.sh")
    with pytest.raises(InvalidInput):
        check_entry(other, OWNER, Rules())


def test_a_factory_is_matched_by_its_module_alone() -> None:
    def source(text: str, *allow_code: str) -> None:
        check_source(text, "", "", STRANGER, Rules(allow_code=allow_code))

    source("pkg.models:make", "pkg.models")
    with pytest.raises(PermissionDenied):
        source("pkg.models.more:make", "pkg.models")


@pytest.mark.parametrize("adapter", ["adapters/mine", "mine", "/srv/mine"])
def test_only_the_owner_names_the_folder_of_an_adapter(adapter: str) -> None:
    """The build would open this path relative to the server's folder."""
    asked = RegisterRequest(like="m", adapter=adapter)
    with pytest.raises(PermissionDenied, match=adapter):
        check_origin(asked, STRANGER, Rules())
    with pytest.raises(InvalidInput, match="no folder"):
        check_origin(asked, OWNER, Rules())


def test_only_the_owner_names_the_address_that_a_request_comes_from() -> None:
    """The gateway sends the address, so that all requests from one address share their turns."""
    named = Body("infer", {"address": "10.0.0.1"})
    assert validation.address_of(named, OWNER.tenant) == "10.0.0.1"
    assert validation.address_of(Body("infer", {}), "alice") == ""
    with pytest.raises(PermissionDenied):
        validation.address_of(Body("infer", {"address": "10.0.0.1"}), "alice")
    with pytest.raises(InvalidInput):
        validation.address_of(Body("infer", {"address": "1" * 65}), OWNER.tenant)


def test_the_owner_alone_chooses_a_jobs_folder_and_variables(tmp_path: Path) -> None:
    place = str(tmp_path), ("A=1=2", "B=")
    assert check_place(*place, OWNER) == place
    assert check_place("", (), STRANGER) == ("", ())
    for folder, env in ((*place[:1], ()), ("", ("A=1",))):
        with pytest.raises(PermissionDenied, match="owner"):
            check_place(folder, env, STRANGER)
    for folder, *env in ((str(tmp_path / "none"),), (".",), ("", "A"), ("", "=1"), ("", "A=\0")):
        with pytest.raises(InvalidInput):
            check_place(folder, tuple(env), OWNER)
    for name in ("LD_PRELOAD", "PYTHONPATH", "PIPESWITCH_HOST"):
        with pytest.raises(InvalidInput, match="when the server starts"):
            check_place("", (f"{name}=1",), OWNER)
    body = Body("train", {"env": ["A=" + "x" * 1000] * 100})
    with pytest.raises(InvalidInput, match="at most"):
        body.texts("env")
