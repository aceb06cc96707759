"""The ``infer`` verb: random inputs or those of files, one or many requests, and their timing."""

from __future__ import annotations

import contextlib
import os
import random
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ..base.bytes_tensors import BYTES
from ..base.errors import InvalidInput, PipeSwitchError
from ..base.quantiles import percentile
from ..base.units import escape_control_chars
from ..wire.request_timing import OPTIONAL, PARTS, RequestTiming
from . import views
from .common import connected, json_option, milliseconds, name_argument

if TYPE_CHECKING:  # a command starts faster without these imports
    from concurrent.futures import Future

    from ..client.client import Client
    from ..client.tensors import Result, Signature

IMAGENET_MEAN: Final = (0.485, 0.456, 0.406)
IMAGENET_STD: Final = (0.229, 0.224, 0.225)
IMAGE_SUFFIXES: Final = (".jpg", ".jpeg", ".png", ".webp", ".bmp")
MOST_TEXTS: Final = 16  # maximum number of texts of a result to print
SIDE: Final = 224  # image side in pixels, if the model accepts it
RESIZE_OVER_CROP: Final = 256 / 224  # ratio of the resized shorter side to the crop
_RATE: Final = re.compile(r"(?:(poisson|constant):)?([0-9]+(?:\.[0-9]+)?|\.[0-9]+)")


@click.command()
@name_argument
@click.option("--input", "path", type=click.Path(), help="x.npy, inputs.npz or photo.jpg.")
@click.option(
    "--text", "texts", multiple=True, help="Text, for models that take texts (repeatable)."
)
@click.option("--random", "is_random", is_flag=True, help="Random inputs (the default).")
@click.option("--output", type=click.Path(), help="File for the last result: y.npy or y.npz.")
@click.option("-n", "count", type=click.IntRange(1), default=1, help="Number of requests.")
@click.option("--rate", help="Requests per second: poisson:50 or constant:50.")
@click.option("--deadline", help="Maximum waiting time after sending: 50ms.")
@click.option("--priority", type=click.Choice(["high", "normal", "low"]), default=None)
@click.option("--version", type=click.IntRange(1), help="Default: the current version.")
@click.option("--seed", type=click.IntRange(0), default=0, help="Seed of inputs and arrivals.")
@json_option
def infer(
    name: str,
    path: str | None,
    texts: tuple[str, ...],
    is_random: bool,
    output: str | None,
    count: int,
    rate: str | None,
    deadline: str | None,
    priority: str | None,
    version: int | None,
    seed: int,
    as_json: bool,
) -> None:
    """Send requests and print where the time of each went."""
    if bool(path) + bool(texts) + is_random > 1:
        raise click.UsageError("--input, --text and --random exclude each other")
    if output:
        _check_output(output)
    try:
        pace = parse_rate(rate) if rate is not None else None
    except InvalidInput as error:
        raise click.BadParameter(error.message, param_hint="--rate") from None
    options: dict[str, Any] = {"priority": priority or "", "version": version or 0}
    if deadline is not None:
        options["deadline_ms"] = milliseconds("--deadline", deadline)
    with connected() as client:
        inputs = list(texts) if texts else load_inputs(path, client.signature(name), seed)
        on_done = (lambda outcome: None) if as_json else _timing_printer(count)
        dues_s = [*instants(*pace, count, seed)] if pace else [0.0] * count
        outcomes = run_requests(client, name, inputs, dues_s, options, on_done, is_paced=bool(pace))
    results = [outcome.result for outcome in outcomes if outcome.result]
    if output and results:
        output = _save(output, results[-1].outputs)
    summary = _summary(outcomes)
    if as_json:
        views.print_json({"requests": [o.row() for o in outcomes], "summary": summary})
    else:
        if count > 1:
            _print_summary(summary)
        if output and results:
            views.echo(f"wrote {output}")
        elif results:
            _print_texts(results[-1].outputs)
    if len(outcomes) < count:
        raise KeyboardInterrupt
    errors = [outcome.error for outcome in outcomes if outcome.error]
    if errors and (as_json or count > 1):  # the error was already printed
        sys.exit(errors[0].exit_code)
    if errors:
        raise errors[0]


def _timing_printer(count: int) -> Callable[[Any], None]:
    width = len(str(count))
    titles = "".join(f"{title.removesuffix('_ms'):>10}" for title in views.TIMING_COLUMNS)

    def show_timing(outcome: Any) -> None:
        number = f"{outcome.number + 1:>{width}}"
        if count == 1 and outcome.error is not None:  # the error itself is printed later
            return
        if outcome.number == 0:
            views.echo(f"{'n':>{width}}{titles}    client   (ms)")
        if outcome.error is not None:
            views.echo(f"{number}  {type(outcome.error).__name__}: {outcome.error.message}")
            return
        timing = outcome.result.timing
        for step, part in timing.steps.items():
            views.echo(f"{'':{width}}{_numbers(part)}{'':10}   {step}")
        numbers = _numbers(timing)
        costs = {
            name.removesuffix("_ms"): getattr(timing, name) for name in PARTS if name in OPTIONAL
        }
        notes = "".join(f"{name} {ms:.2f} " for name, ms in costs.items() if ms)
        notes += "resident " * timing.resident
        notes += f"preempted {timing.preempted}" if timing.preempted else ""
        if outcome.is_late:
            notes += f" late: {outcome.deadline_ms:g} ms were given"
        views.echo(f"{number}{numbers}{outcome.total_ms:10.2f}   {notes}")

    return show_timing


def _numbers(timing: RequestTiming) -> str:
    return "".join(f"{getattr(timing, column):10.2f}" for column in views.TIMING_COLUMNS)


def texts_of(outputs: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the outputs that contain texts, by name."""
    return {
        name: [one.decode(errors="replace") for one in value.reshape(-1)]
        for name, value in outputs.items()
        if getattr(getattr(value, "dtype", None), "kind", "") == "O"
    }


def _print_texts(outputs: Mapping[str, Any]) -> None:
    for name, texts in texts_of(outputs).items():
        more = f", and {len(texts) - MOST_TEXTS} more" if len(texts) > MOST_TEXTS else ""
        views.echo(f"{name}: {escape_control_chars(', '.join(texts[:MOST_TEXTS]))}{more}")


def _summary(outcomes: list[Any]) -> dict[str, Any]:
    """Return counts, and p50 and p99 of the client's own time and of the server's timing."""
    good = [outcome for outcome in outcomes if outcome.result]
    summary: dict[str, Any] = {"ok": len(good), "failed": len(outcomes) - len(good)}
    if any(outcome.deadline_ms is not None for outcome in outcomes):
        summary["late"] = sum(outcome.is_late for outcome in good)
    columns = {"client_ms": [outcome.total_ms for outcome in good]}
    for column in views.TIMING_COLUMNS:
        columns[column] = [getattr(outcome.result.timing, column) for outcome in good]
    for column, values in columns.items():
        if values:
            p50, p99 = percentile(values, 0.5), percentile(values, 0.99)
            summary[column] = {"p50": round(p50, 3), "p99": round(p99, 3)}
    return summary


def _print_summary(summary: dict[str, Any]) -> None:
    rows = [
        {"time": column.removesuffix("_ms"), "p50_ms": both["p50"], "p99_ms": both["p99"]}
        for column, both in summary.items()
        if isinstance(both, dict)
    ]
    late = f", {summary['late']} late" if "late" in summary else ""
    views.echo(f"\n{summary['ok']} answered{late}, {summary['failed']} failed")
    if rows:
        views.console().print(views.Listing(rows, ("time", "p50_ms", "p99_ms")))


def _check_output(path: str) -> None:
    """Raise BadParameter before the request if its result could not be written afterwards."""
    folder = Path(path).absolute().parent
    if not path.endswith((".npy", ".npz")):
        raise click.BadParameter(f"{path!r} is neither .npy nor .npz", param_hint="--output")
    if not folder.is_dir() or not os.access(folder, os.W_OK) or Path(path).is_dir():
        raise click.BadParameter(f"{path!r} cannot be written", param_hint="--output")


def _save(path: str, outputs: dict[str, Any]) -> str:
    """Write a result and return its path; several outputs change .npy to .npz."""
    import numpy as np

    # numpy would pickle an array of objects.
    outputs = {name: v.astype("S") if v.dtype.kind == "O" else v for name, v in outputs.items()}
    if len(outputs) > 1:
        path = str(Path(path).with_suffix(".npz"))
    if path.endswith(".npz"):
        np.savez(path, **outputs)
    else:
        np.save(path, next(iter(outputs.values())))
    return path


def load_inputs(path: str | None, signature: Signature, seed: int) -> Any:
    """Return a request's inputs; random ones if ``path`` is None.

    ``.npy`` is one array, ``.npz`` has inputs by name. An image is resized, cropped and normalised
    for torchvision's classifiers, and repeated to the model's smallest batch. If the only input is
    a row of bytes or texts, any other file is sent unchanged.
    """
    import numpy as np

    if path is None:
        return signature.random(seed=seed)
    file = Path(path)
    if not file.is_file():
        raise InvalidInput(f"no file {path!r}", hint="--input x.npy, or --random")
    is_arrays = file.suffix.lower() in (".npy", ".npz")
    if not is_arrays and [v.dtype for v in signature.inputs] == [BYTES]:
        return [file.read_bytes()]
    if not is_arrays and [(v.dtype, len(v.shape)) for v in signature.inputs] == [("uint8", 1)]:
        return np.frombuffer(file.read_bytes(), np.uint8)
    if file.suffix.lower() in IMAGE_SUFFIXES:
        return _image(file, signature)
    try:
        loaded = np.load(file, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            return {name: loaded[name] for name in loaded}
    except PermissionError:
        raise
    except Exception:
        # A broken .npz raises any error of its decompressor. For an unknown format, numpy
        # suggests to load it as a pickle, which is unsafe, so numpy's text is not shown.
        raise InvalidInput(
            f"{path} has no arrays of numbers", hint="give a .npy, .npz, .jpg or .png file"
        ) from None


def _image(file: Path, signature: Signature) -> Any:
    import numpy as np
    from PIL import Image

    spec = signature.inputs[0]
    if len(signature.inputs) != 1 or len(spec.shape) != 4 or spec.shape[1] != 3:
        raise InvalidInput(
            "images are only for models with one input [batch, 3, height, width]",
            hint="give a .npy file with an input of this model",
        )
    ranges = {dim.name: dim for dim in signature.dims}
    sides = [n if isinstance(n, int) else ranges[str(n)] for n in spec.shape[2:]]
    height, width = (n if isinstance(n, int) else max(n.low, min(n.high, SIDE)) for n in sides)
    try:
        with Image.open(file) as opened:
            image = opened.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidInput(f"{file} is not a readable image: {error}") from None
    scale = max(height / image.height, width / image.width) * RESIZE_OVER_CROP
    size = (round(image.width * scale), round(image.height * scale))
    image = image.resize(size, Image.Resampling.BILINEAR)
    left, top = (image.width - width) // 2, (image.height - height) // 2
    image = image.crop((left, top, left + width, top + height))
    pixels = np.asarray(image, dtype=np.float32) / 255
    mean, std = (np.asarray(v, dtype=np.float32) for v in (IMAGENET_MEAN, IMAGENET_STD))
    pixels = (pixels - mean) / std
    batch = spec.shape[0] if isinstance(spec.shape[0], int) else signature.batch_min
    return np.repeat(pixels.transpose(2, 0, 1)[None], batch, axis=0).astype(spec.dtype)


def parse_rate(text: str) -> tuple[str, float]:
    """Return the arrival kind and the requests per second; a bare number is constant."""
    match = _RATE.fullmatch(text)
    if match is None or not float(match.group(2)) >= 1e-6:  # one in twelve days
        raise InvalidInput(f"--rate {text!r} is not of the form poisson:50")
    return match.group(1) or "constant", float(match.group(2))


def instants(kind: str, per_s: float, count: int, seed: int) -> Iterator[float]:
    """Yield the time at which each request is due, in seconds from the start."""
    source = random.Random(seed)
    at_s = 0.0
    for _ in range(count):
        yield at_s
        at_s += source.expovariate(per_s) if kind == "poisson" else 1 / per_s


class RequestOutcome:
    """Outcome of one request. ``total_ms`` is measured by the client."""

    def __init__(self, number: int, deadline_ms: float | None = None) -> None:
        self.number = number
        self.deadline_ms = deadline_ms
        self.result: Result | None = None
        self.error: PipeSwitchError | None = None
        self.total_ms = 0.0

    @property
    def is_late(self) -> bool:
        """True if the result came after the deadline: a request that computes is not stopped."""
        limit_ms = self.deadline_ms
        return self.result is not None and limit_ms is not None and self.total_ms > limit_ms

    def row(self) -> dict[str, Any]:
        """Return the row of this request for ``--json``."""
        timing = self.result.timing.as_dict() if self.result else {}
        error = {"error": type(self.error).__name__, "text": str(self.error)} if self.error else {}
        late = {"late": self.is_late} if self.deadline_ms is not None else {}
        texts = {"texts": rows} if self.result and (rows := texts_of(self.result.outputs)) else {}
        told_ms = {"client_ms": round(self.total_ms, 3)}
        return {"n": self.number, **timing, **told_ms, **late, **texts, **error}


def run_requests(
    client: Client,
    model: str,
    inputs: Any,
    dues_s: Sequence[float],
    options: dict[str, Any],
    on_done: Callable[[RequestOutcome], None],
    *,
    is_paced: bool,
) -> list[RequestOutcome]:
    """Send a request at each time in ``dues_s``; if not paced, each after the previous result.

    Paced times are fixed in advance (an open loop), so a slow result does not delay the next
    request, and the time in the server's queue is visible. Return fewer outcomes after Ctrl-C.
    """
    outcomes = [RequestOutcome(number, options.get("deadline_ms")) for number in range(len(dues_s))]
    waiting: deque[tuple[RequestOutcome, Future[Result], float]] = deque()
    begin_s = time.perf_counter()
    with contextlib.suppress(KeyboardInterrupt):  # results that have arrived are shown all the same
        for outcome, due_s in zip(outcomes, dues_s, strict=True):
            time.sleep(max(0.0, begin_s + due_s - time.perf_counter()))
            at_s = time.perf_counter()
            future = client.submit(model, inputs, **options)
            future.add_done_callback(_stamper(outcome, at_s))
            waiting.append((outcome, future, at_s))
            if not is_paced:
                _watch(*waiting.popleft(), on_done)
        while waiting:
            _watch(*waiting.popleft(), on_done)
    for outcome, future, at_s in waiting:
        if future.done():
            _watch(outcome, future, at_s, on_done)
    return [outcome for outcome in outcomes if outcome.result or outcome.error]


def _stamper(outcome: RequestOutcome, at_s: float) -> Callable[[Future[Result]], None]:
    def stamp(_: Future[Result]) -> None:
        outcome.total_ms = (time.perf_counter() - at_s) * 1000

    return stamp


def _watch(
    outcome: RequestOutcome,
    future: Future[Result],
    at_s: float,
    on_done: Callable[[RequestOutcome], None],
) -> None:
    try:
        outcome.result = future.result()
    except PipeSwitchError as error:
        outcome.error = error
    if not outcome.total_ms:
        outcome.total_ms = (time.perf_counter() - at_s) * 1000
    on_done(outcome)
