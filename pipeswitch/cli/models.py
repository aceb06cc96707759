"""The verbs about models: register, load, list."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import click

from ..base.errors import InvalidInput, RegistrationRefused, ServerUnavailable
from ..base.model_options import ModelOptions, RegisterRequest
from ..base.units import nearest, short_bytes
from . import common, views

# A function in torchvision's files that returns a model, whose name may be another.
REGISTERED: Final = re.compile(r'^@register_model\((?:name="(\w+)")?\)(?:.*\n)*?def (\w+)', re.M)
CONVERT: Final = """\
import json, sys
from pipeswitch.programs.compiler.files import convert
convert(*sys.argv[1:3], json.loads(sys.argv[3]))
"""


@click.command()
@click.argument("name")
@click.argument("source", required=False, default="")
@click.option(
    "--from-job",
    metavar="JOB[@STEP]",
    help="Make the job's newest commit the model's next version.",
)
@click.option("--as-version", is_flag=True, help="Make --weights FILE the model's next version.")
@click.option(
    "--part",
    default="",
    metavar="NAME",
    help="With --from-job: the part of the job, if several fit the model.",
)
@click.option(
    "--example",
    type=click.Path(exists=True, dir_okay=False),
    metavar="FILE.npz",
    help="For package.module:factory: values of the inputs by name.",
)
@common.model_options(*{*ModelOptions.__struct_fields__} - {"source"})
@common.json_option
def register(
    name: str,
    source: str,
    from_job: str | None,
    as_version: bool,
    part: str,
    example: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Register a model, so that clients can send requests to it.

    SOURCE is torchvision:resnet152, hf:bert-base-uncased, FILE.bundle, FILE.pt2, FILE.pt (of
    TorchScript, with --input) or package.module:factory; or --from-job names the job that trained
    a registered model, or --like a registered model.
    """
    if bool(source) + bool(from_job) + as_version + bool(options["like"]) != 1:
        raise click.UsageError(
            "give SOURCE, --like NAME, --from-job JOB[@STEP], or --weights FILE --as-version"
        )
    if part and not from_job:
        raise click.UsageError("--part needs --from-job JOB")
    if from_job:
        _publish(name, from_job, part, as_json)
        return
    from ..client.model_sources import FILES, LocalSource, check_program_options, file_of

    fields = {key: value for key, value in options.items() if value} | {"as_version": as_version}
    request = RegisterRequest(source=source, **fields)
    check_program_options(source, request.weights, request.inputs)
    if example and source.endswith(FILES):
        raise click.UsageError("--example is only for package.module:factory; give --input")
    is_shown = not as_json and sys.stderr.isatty()
    with contextlib.ExitStack() as stack:
        report = stack.enter_context(views.progress_bar(is_shown, name))
        file = None
        if source.endswith(FILES):
            path, source = source, converted(source, fields.pop("inputs", {}), stack)
            file = file_of(path)
            request = RegisterRequest(source=source, **fields)
        try:
            client = stack.enter_context(common.connected())
        except ServerUnavailable:  # a wrong name is wrong without a server, too
            _check_torchvision(source)
            raise
        local = LocalSource(source, _arrays(example) if example else None, file=file)
        row = client._register(name, request, local, report)
    common.print_done(row, _registered(name, row), as_json)


def _check_torchvision(source: str) -> None:
    """Refuse a name that torchvision lacks; read its files, because importing it takes seconds."""
    spec = find_spec("torchvision") if source.startswith("torchvision:") else None
    if spec is None or spec.origin is None:
        return
    texts = [path.read_text("utf-8") for path in Path(spec.origin).parent.rglob("models/**/*.py")]
    names = {one or other for text in texts for one, other in REGISTERED.findall(text)}
    if names and (name := source.partition(":")[2]) not in names:
        raise InvalidInput(f"torchvision has no model {name!r}{nearest(name, names)}")


def _registered(name: str, row: dict[str, Any]) -> str:
    """Return the text that is printed for a new model."""
    size = f", {short_bytes(row['bytes'])}" if row.get("bytes") else ""
    why = f" ({row['mode_reason']})" if row.get("mode_reason") else ""
    groups = f", {row['groups']} group{'s' * (row['groups'] > 1)}" if row.get("groups") else ""
    notes = "".join(f"\n  {note}" for note in row["notes"])
    batching = row.get("batching")
    if batching and not batching["is_exact"]:
        notes += "\n  batched answers may differ in the last bits"
    if precision := row.get("precision"):
        notes += (
            f"\n  {short_bytes(row['bytes'])} instead of {short_bytes(precision['plain_bytes'])}"
            f", error at most {precision['max_error']:.1e} of the largest output"
        )
        if precision["is_batch_invariant"]:
            notes += "\n  a row has the same bits in any batch"
    version = row.get("version", 1)
    intro = f"registered {name}" if version == 1 else f"{name} is version {version} now"
    return f"{intro}{size}{groups}, {row.get('mode', 'graph')} mode{why}{notes}"


@click.command()
@click.argument("ids", nargs=-1, metavar="[end ID...]")
@common.json_option
def sequences(ids: tuple[str, ...], as_json: bool) -> None:
    """List sequences whose state the server keeps; "end ID" ends one."""
    if ids and (ids[0] != "end" or len(ids) == 1):
        raise click.UsageError("pipeswitch sequences, or pipeswitch sequences end ID")
    if ids:
        with common.connected() as client:
            for one in ids[1:]:
                client.end_sequence(one)
    columns = ("id", "model", "version", "tenant", "steps", "bytes", "idle_ms")
    common.listing(
        lambda c: c.sequences(), lambda rows: views.Listing(rows, columns), as_json, watch=False
    )


def _arrays(path: str) -> dict[str, Any]:
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            return dict(file)
    except Exception:  # a .npy file is no context manager, a broken .npz raises any error
        why = f"{path} has no arrays by name; numpy.savez(FILE, x=x) writes them"
        raise click.BadParameter(why, param_hint="--example") from None


def _publish(name: str, from_job: str, part: str, as_json: bool) -> None:
    job, _, step = from_job.partition("@")
    if step and not (step.isdecimal() and len(step) < 20):
        raise click.BadParameter(f"{from_job!r} is not JOB or JOB@STEP", param_hint="--from-job")
    with common.connected() as client:
        row = client.publish(name, job, int(step) if step else -1, part)
    notes = "".join(f"\n  {note}" for note in row.get("notes", []))
    common.print_done(row, f"{name} is version {row['version']} now, of job {job}{notes}", as_json)


def converted(source: str, signature: dict[str, Any], stack: contextlib.ExitStack) -> str:
    """Convert a torch file to a bundle, in a child process because torch must not be imported."""
    if not Path(source).is_file():
        raise InvalidInput(f"no file {source!r}", hint="give the path of a file on this machine")
    folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pipeswitch-convert-"))
    bundle = str(Path(folder, "program.bundle"))
    command = [sys.executable, "-P", "-c", CONVERT, source, bundle, json.dumps(signature)]
    child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        lines = child.stderr.strip().splitlines() or [f"exit status {child.returncode}"]
        reason = lines[-1].removeprefix(f"{RegistrationRefused.__module__}.RegistrationRefused: ")
        raise RegistrationRefused(source, reason.removeprefix(f"{source}: "))
    return bundle


def _model_verb(verb: str, done: str, help_text: str) -> click.Command:
    """Return a command for a model; these commands differ only in name and help."""

    @click.command(verb, help=help_text)
    @common.name_argument
    @common.json_option
    def act(name: str, as_json: bool) -> None:
        with common.connected() as client:
            common.print_done(getattr(client, verb)(name), f"{done} {name}", as_json)

    return act


unregister = _model_verb("unregister", "unregistered", "Remove a model or a chain.")
load = _model_verb("load", "pinned", "Pin a model on the device; this also ends its quarantine.")
unload = _model_verb("unload", "unpinned", "Unpin a model, so that the server may evict it.")


@click.group(cls=common.Group, invoke_without_command=True)
@click.option("--versions", is_flag=True, help="List all versions, not only the current ones.")
@common.json_option
@common.watch_option
@click.pass_context
def models(ctx: click.Context, versions: bool, as_json: bool, watch: bool) -> None:
    """List registered models."""
    if ctx.invoked_subcommand is None:
        columns = views.VERSION_COLUMNS if versions else views.MODEL_COLUMNS

        def shown(rows: list[dict[str, Any]]) -> Any:
            more = [name for name in ("aliases", "reason") if any(row.get(name) for row in rows)]
            visible = {key for row in rows for key in row} or {*columns}  # keys the role may see
            return views.Listing(rows, (*(one for one in columns if one in visible), *more))

        common.listing(lambda c: c.models(versions=versions), shown, as_json, watch)


@models.command("rollback")
@common.name_argument
@click.argument("version", type=click.IntRange(1), required=False)
@common.json_option
def models_rollback(name: str, version: int | None, as_json: bool) -> None:
    """Make VERSION the current one again (default: the previous one)."""
    with common.connected() as client:
        row = client.rollback(name, version or 0)
    common.print_done(row, f"{name} is version {row['version']} now, not {row['before']}", as_json)


@models.command("split")
@common.name_argument
@click.argument("share", metavar="VERSION=PERCENT%")
@common.json_option
def models_split(name: str, share: str, as_json: bool) -> None:
    """Send a share of the requests to a version: 2=10% a tenth of them, 2=0% ends it."""
    match = re.fullmatch(r"(\d{1,9})=(\d{1,3})%", share)
    if match is None or int(match[2]) > 100:
        raise click.BadParameter(
            f"{share!r} is not of the form 2=10%", param_hint="VERSION=PERCENT%"
        )
    with common.connected() as client:
        row = client.split(name, int(match[1]), int(match[2]))
    common.print_done(row, f"{name}: {match[2]} % to version {match[1]}", as_json)


@click.command()
@common.name_argument
@click.option(
    "--version", type=click.IntRange(1), help="Version of the model (default: the current one)."
)
@common.json_option
@common.watch_option
def show(name: str, version: int | None, as_json: bool, watch: bool) -> None:
    """Show all fields of a model, with inputs and outputs."""
    common.listing(lambda c: c.show(name, version or 0), views.details, as_json, watch)
