"""Documents agree with the code: state diagrams, modules, links, messages."""

from __future__ import annotations

import importlib.util
import json
import pkgutil
import re
from pathlib import Path
from types import ModuleType
from typing import get_args

import click
import pytest

from pipeswitch import Timing
from pipeswitch.ipc.channel import AnyMessage
from pipeswitch.scheduler.state import states

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), ROOT / "profiles/README.md"])
RECORDS = sorted(ROOT.glob("docs/adr/*.md"))
CODE = [
    path.read_text("utf-8")
    for folder in ("pipeswitch", "workers", "memory_daemon")
    for path in (ROOT / folder).rglob("*.py")
]
FIGURES = ROOT / "benchmarks/results/reliability"
TABLES = {
    "task": states.TASK_TRANSITIONS,
    "worker": states.WORKER_TRANSITIONS,
    "residency": states.RESIDENCY_TRANSITIONS,
    "model": states.MODEL_TRANSITIONS,
}


@pytest.mark.parametrize("name", TABLES)
def test_the_page_of_states_shows_the_current_diagram(name: str) -> None:
    text = (ROOT / "docs/states.md").read_text()
    block = f"```mermaid\n{states.diagram(name, TABLES[name])}\n```"
    assert block in text, "python docs/diagrams.py writes them again"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)", document.read_text()):
        if "://" not in target:
            assert (document.parent / target).exists(), target


def test_every_module_the_architecture_names_exists() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    named = set(re.findall(r"`([\w/]+(?:\.py|/))`", text))
    assert named, "it names modules"
    for name in named:
        places = [ROOT / name, ROOT / "pipeswitch" / name]
        assert any(place.exists() for place in places), name


def test_every_object_that_the_site_documents_exists() -> None:
    named = re.findall(r"^::: (\S+)$", (ROOT / "docs/guide/api.md").read_text(), re.MULTILINE)
    assert named, "it names objects"
    for name in named:
        assert pkgutil.resolve_name(name) is not None


def test_every_room_stands_in_the_architecture() -> None:
    text = (
        (ROOT / "docs/architecture.md").read_text().partition("## Rooms")[2].partition("\n## ")[0]
    )
    folders = {
        path.name for path in (ROOT / "pipeswitch").iterdir() if (path / "__init__.py").exists()
    }
    for folder in {*folders, "workers", "memory_daemon"}:
        assert f"`{folder}/`" in text, folder


def test_every_message_between_processes_says_what_it_is() -> None:
    for message in get_args(AnyMessage):
        assert (message.__doc__ or "").strip(), message.__name__


def script(name: str) -> ModuleType:
    """Import one of the scripts in ``docs`` that generate documents."""
    spec = importlib.util.spec_from_file_location(name, ROOT / f"docs/{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("page", ["commands.md", "settings.md"])
def test_the_generated_pages_of_the_manual_are_current(page: str) -> None:
    written = (ROOT / "docs/guide" / page).read_text("utf-8")
    assert written == script("reference").PAGES[page](), "python docs/reference.py writes it again"


def test_the_manual_names_every_page_of_its_own() -> None:
    for index in ("README.md", "docs/README.md"):
        text = (ROOT / index).read_text("utf-8")
        for page in (ROOT / "docs/guide").glob("*.md"):
            assert f"guide/{page.name})" in text, f"{index}: {page.name}"


def test_the_manual_explains_every_field_of_the_bill() -> None:
    timing = (ROOT / "docs/guide/python.md").read_text("utf-8").partition("## Timing")[2]
    fields = {
        name
        for row in re.findall(r"^\| (`.+?) \|", timing, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", row)
    }
    assert fields == {*Timing.__struct_fields__}


def test_the_pictures_show_the_newest_results() -> None:
    generator = script("picture")
    drawn = generator.drawings(generator.RESULTS)
    kept = {name: (generator.IMAGES / name).read_text("utf-8") for name in drawn}
    assert kept == drawn, "python docs/picture.py draws them again"
    shown = re.findall(r"\]\(images/(.+?)\)", (ROOT / "docs/papers.md").read_text("utf-8"))
    assert sorted(shown) == sorted(drawn)
    assert "](docs/images/switch.svg)" in (ROOT / "README.md").read_text("utf-8")


def test_no_file_cites_a_document_that_is_not_in_the_repository() -> None:
    gone = ("DESIGN", "RELIABILITY", "SCHEDULING", "CUDA_NOTES", "INTERFACE")
    cited = re.compile(rf"\b(?:{'|'.join(gone)})\b")
    for top in ("pipeswitch", "workers", "memory_daemon", "benchmarks", "docs", "tests"):
        for path in (ROOT / top).rglob("*.*"):
            if path.suffix in (".py", ".md") and path != Path(__file__):
                match = cited.search(path.read_text("utf-8"))
                assert match is None, f"{path.relative_to(ROOT)} cites {match and match[0]}"


def test_each_decision_has_a_number_and_its_sections_unless_it_was_withdrawn() -> None:
    numbers = [int(path.name[:4]) for path in RECORDS]
    assert numbers == sorted(set(numbers))  # gaps are allowed, for decisions that are not finished
    for path in RECORDS:
        text = path.read_text()
        assert text.startswith(f"# {int(path.name[:4])}. "), path.name
        status = re.search(r"^Status: (accepted|withdrawn|superseded)\b", text, re.MULTILINE)
        assert status is not None, path.name
        if status[1] != "accepted":
            continue
        for heading in ("## Context", "## Decision", "## Consequences"):
            assert heading in text, f"{path.name}: {heading}"


@pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)
def test_what_a_decision_names_is_there_or_its_head_says_that_it_is_not(record: Path) -> None:
    head, _, body = record.read_text().partition("## Context")
    gone = {
        name
        for name in re.findall(r"`([\w/]+(?:\.py|/))`", body)
        if not any((ROOT / top / name).exists() for top in ("", "pipeswitch", "tests/process"))
    }
    for owner, member in re.findall(r"`([A-Z]\w+)\.(\w+)`", body):
        homes = [text for text in CODE if re.search(rf"^class {owner}\b", text, re.MULTILINE)]
        has = re.compile(rf"def {member}\b|self\.{member}\b|^ +{member}:", re.MULTILINE)
        if homes and not any(map(has.search, homes)):
            gone.add(f"{owner}.{member}")
    assert {name for name in gone if f"`{name}`" not in head} == set()


def test_every_dependency_has_its_reason() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    reasons = (ROOT / "docs/adr/0002-dependencies.md").read_text()
    extras = [name for names in project["optional-dependencies"].values() for name in names]
    for requirement in [*project["dependencies"], *extras]:
        name = re.split(r"[<>=\[]", requirement)[0]
        assert re.search(rf"\b{re.escape(name)}\b", reasons), name


GOALS = {  # goal -> text of its row, with placeholders for figures
    "G1": "{chaos[faults_survived]}/{chaos[faults_injected]} faults survived, {chaos[lost]} lost, "
    "{chaos[duplicated]} duplicated, {chaos[wrong]} wrong, 0 violations of {chaos[requests]:,} "
    "requests; {chaos[cells_exercised]}/{chaos[cells]} cells; dead worker p99 "
    "{chaos[dead_worker_recovery_ms][alone][p99]} ms",
    "G2": "{failpoints[reached]}/{failpoints[points]} points reached; "
    "actions: crash, error, memory, disk, delay; {failpoints[survived]} survived",
    "G3": "{training_kills[kills]} kills under {training_kills[jobs]} real jobs at 33 instants: "
    "{training_kills[differences]} differ",
    "G4": "over 10 targets, {fuzz[escapes]} escapes",
    "G5": "{switches[switches]:,} switches; steepest "
    "{switches[slope_mib_per_10000][controller]:+.2f} MiB per 10,000 (controller); deltas 0",
    "G6": "0 violations, {model[mutants_caught]}/{model[mutants]} mutants caught",
    "G7": "{hostile_keys_once[connections]:,} connections, with keys: "
    "{hostile_keys_all[rss_growth_mib]:+.1f} MiB, p99 {hostile_keys_once[quiet_p99_ms]:.3g} → "
    "{hostile_keys_once[attacked_p99_ms]:.3g} ms",
    "G9": "{server_kills[kills]} servers killed, {server_kills[acknowledged]} acknowledged, "
    "{server_kills[removed]} removed, {server_kills[lost]} lost, {server_kills[twice]} twice, "
    "{server_kills[torn]} torn",
}


@pytest.mark.parametrize("goal", GOALS)
def test_the_reliability_page_says_what_its_files_say(goal: str) -> None:
    files = {path.stem: json.loads(path.read_text()) for path in FIGURES.glob("*.json")}
    page = (ROOT / "docs/reliability.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith(f"| {goal} "))
    for name in re.findall(r"\{(\w+)\[", GOALS[goal]):
        assert f"/{name}.json)" in row, "the file of each figure is named"
        assert files[name].get("passed", True), f"{name}: its test failed"
    assert GOALS[goal].format_map(files) in row
    assert not files["chaos"]["violations"]
    assert not any(scope["violation"] for scope in files["model"]["scopes"])


@pytest.mark.parametrize(
    "page", [ROOT / "README.md", *sorted(ROOT.glob("docs/guide/*.md"))], ids=lambda path: path.stem
)
def test_the_manual_shows_only_commands_and_flags_that_exist(page: Path) -> None:
    from pipeswitch.cli.main import main

    text = page.read_text().replace("\\\n", "")
    for line in re.findall(r"(?:^|`|&& )(pipeswitch [a-z][^`\n|]*)", text, re.MULTILINE):
        words = line.partition(" #")[0].partition(" -- ")[0].split()
        command = main.get_command(click.Context(main), words[1])
        assert command is not None, line
        if isinstance(command, click.Group) and len(words) > 2 and words[2] in command.commands:
            command = command.commands[words[2]]
        known = {flag for parameter in command.params for flag in parameter.opts}
        for word in words[2:]:
            assert not word.startswith("-") or word in known | {"--help"}, line


def test_the_readme_starts_with_the_command_that_needs_no_gpu() -> None:
    text = (ROOT / "README.md").read_text()
    assert "make demo" in text.partition("```bash")[2].partition("```")[0]
    assert re.search(r"^demo:", (ROOT / "Makefile").read_text(), re.MULTILINE)


def test_the_readme_names_the_sizes_of_an_install_that_the_guide_explains() -> None:
    pages = ROOT / "README.md", ROOT / "docs" / "guide" / "start.md"
    sizes, explained = ({*re.findall(r"[\d.]+ GB", page.read_text())} for page in pages)
    assert sizes
    assert sizes <= explained
