"""``bench variants``: switches between fine-tunes of one base, which copy only what differs.

A training job runs, and the arena has room for two models. Each arm asks for the variant of its
kind that it asked for longest ago, while two others of its kind are on the device; so each answer
is cold. The control's variants have no digests, as if
an earlier release had built them: they are copied whole.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from pipeswitch.base.quantiles import quantile
from pipeswitch.client.client import Client
from pipeswitch.programs.graphs.bundle import read_safetensors_header, write_safetensors
from pipeswitch.programs.spec import BUNDLE_FILE, load_manifest, save_manifest
from pipeswitch.testing import server

from .models import MIB, MODELS, BenchModel
from .serving import SLICE_ROOM_BYTES, Training, ask
from .trials import Arm, Numbers, Run, paired_differences, ratio

ROUNDS: Final = 12
QUICK_ROUNDS: Final = 10
RANK: Final = 8
FEW: Final = 3  # with room for two, each of three variants is cold
LARGE_BYTES: Final = 200 * MIB  # a larger model has only a few variants of each kind
STORED: Final = (56, 20)  # number of models in the host store; of large ones
MAX_LAST_MS: Final = 2.0  # limit of cold minus resident if only the last layer differs
MAX_SHARES: Final = {"adapters": 0.4, "all layers": 1.1}  # limits of the wait / the control's
KINDS: Final = ("last layer", "last two layers", "adapters", "all layers", "control")


class Weights:
    """Weights of the base's program, from which those of variants are made."""

    def __init__(self, bundle: Path, seed: int) -> None:
        self._bundle, self._random = bundle, np.random.default_rng(seed)
        self._tensors = read_safetensors_header(bundle)[0]

    def changed(self, kind: str) -> set[str]:
        """Return the names of the tensors in which variants of this kind differ."""
        floats = [one for one in self._tensors if one.dtype == "float32"]
        layers = list(dict.fromkeys(_layer(one.name) for one in floats if len(one.shape) > 1))
        if kind == "adapters":
            return {
                n for one in floats if (n := one.name).endswith(("query.weight", "value.weight"))
            }
        if kind != "all layers":
            layers = layers[-2:] if kind == "last two layers" else layers[-1:]
        return {one.name for one in floats if _layer(one.name) in layers}

    def write(self, path: Path, kind: str) -> None:
        """Write the weights of a new variant."""
        head = [(one.name, one.dtype, one.shape) for one in self._tensors]
        write_safetensors(path, head, self._data(self.changed(kind), kind), {})

    def _data(self, changed: set[str], kind: str) -> Iterator[bytes]:
        for one in self._tensors:
            size, at = one.size_bytes, one.file_offset_bytes
            data = np.fromfile(self._bundle, np.uint8, size, offset=at)
            if one.name in changed:
                values = data.view(np.float32).reshape(one.shape)
                if kind == "adapters":
                    high, wide = one.shape
                    values += self._normal(high, RANK) @ self._normal(RANK, wide)
                else:
                    values *= 1 + self._normal(*one.shape)
            yield data.tobytes()

    def _normal(self, *shape: int) -> Any:
        return 0.01 * self._random.standard_normal(shape, np.float32)


def _layer(name: str) -> str:
    return name.rpartition(".")[0]


def run(bench: Run, models: Sequence[str]) -> None:
    """Measure each model with its own server."""
    names = ("resnet18",) if bench.is_quick else ("resnet50", "bert-base")
    for name in bench.usable(models or names):
        with tempfile.TemporaryDirectory(prefix="pipeswitch-bench-") as folder:
            _measure(bench, MODELS[name], Path(folder))
    bench.notes.append("wait and bill: cold minus resident, p50 of pairs; bill: of switch + stall")


def _measure(bench: Run, model: BenchModel, folder: Path) -> None:
    programs = folder / "state" / "models"
    options: dict[str, Any] = {
        "arena": str(2 * model.room_bytes + SLICE_ROOM_BYTES),
        "host_store": str(STORED[model.room_bytes > LARGE_BYTES] * model.room_bytes),
        "state_dir": folder / "state",
        "args": ("--threads", str(bench.threads)),
    }
    bench.say(f"{model.name}: registering")
    with server(**options) as running, running.client() as client:
        digests = _register(bench, client, model, folder)
    for digest in digests["control"].values():
        manifest = load_manifest(programs / digest)
        plain = tuple([msgspec.structs.replace(one, digest="") for one in manifest.tensors])
        save_manifest(programs / digest, msgspec.structs.replace(manifest, tensors=plain))
    names = {kind: [*one][:FEW] for kind, one in digests.items()}
    for count in (8, 32):
        if len(digests["last layer"]) >= count:
            names[f"last layer, {count}"] = [*digests["last layer"]][:count]
    bench.say(f"{model.name}: measuring")
    with server(**options) as running, running.client() as client:
        training, arms = Training(client, bench.threads, bench.seed), list[Arm]()
        for kind, variants in names.items():
            one = Requests(client, variants)
            cold, warm = (
                partial(one.ask, is_resident=is_resident) for is_resident in (False, True)
            )
            arms += [
                Arm(kind, cold, partial(one.fill, training)),
                Arm(f"{kind}, resident", warm, training.run),
            ]
        bench.trial_loop(model.name, arms, bench.rounds(ROUNDS, QUICK_ROUNDS))
    _findings(bench, model.name, [*names])


def _register(
    bench: Run, client: Client, model: BenchModel, folder: Path
) -> dict[str, dict[str, str]]:
    """Register the base and all variants; return their digests by kind and name."""
    seed = f"random:{bench.seed}"
    base = client.register("base", model.source, weights=seed, inputs=model.inputs)["digest"]
    weights = Weights(folder / "state" / "models" / base / BUNDLE_FILE, bench.seed)
    digests: dict[str, dict[str, str]] = {}
    for kind in [kind for kind in KINDS if weights.changed(kind)]:
        is_many = kind == "last layer" and model.room_bytes < LARGE_BYTES
        for number in range((8 if bench.is_quick else 32) if is_many else FEW):
            weights.write(folder / "own.safetensors", kind)
            name = f"{kind.replace(' ', '-')}-{number}"
            row = client.register(name, like="base", weights=folder / "own.safetensors")
            digests.setdefault(kind, {})[name] = row["digest"]
    return digests


class Requests:
    """Requests for the variants of one kind, in turns."""

    def __init__(self, client: Client, names: list[str]) -> None:
        self._client, self._names, self._last = client, names, 0
        row = client.show(names[0])
        self._size_bytes, self._inputs = row["bytes"], []
        for shape, dtype in row["inputs"].values():
            numbers = [one if isinstance(one, int) else 1 for one in shape]
            self._inputs.append(np.zeros(numbers, dtype))

    def fill(self, training: Training) -> None:
        """Let two other variants of the kind be on the device while the job trains."""
        for _ in range(2):
            self._client.infer(self._next(), self._inputs)
        training.run()

    def _next(self) -> str:
        self._last = (self._last + 1) % len(self._names)
        return self._names[self._last]

    def ask(self, *, is_resident: bool) -> Numbers:
        """Request the next variant, or the last one again."""
        name = self._names[self._last] if is_resident else self._next()
        result, numbers = ask(self._client, name, self._inputs, is_resident=is_resident)
        copied_bytes = 0 if is_resident else self._size_bytes - result.timing.resident_bytes
        bill_ms = result.timing.switch_ms + result.timing.stall_ms
        return numbers | {"copied_mib": copied_bytes / MIB, "bill_ms": bill_ms}


def _findings(bench: Run, case: str, kinds: Sequence[str]) -> None:
    def values(kind: str, key: str) -> tuple[list[float], list[float]]:
        return bench.values(case, kind, key), bench.values(case, f"{kind}, resident", key)

    def median_ms(kind: str, key: str) -> float:
        return quantile(paired_differences(*values(kind, key)), 0.5)

    wait_ms = partial(median_ms, key="total_ms")

    for kind in kinds:
        what, limit = f"{case}, {kind}", MAX_LAST_MS if kind.startswith("last layer") else None
        bench.find(f"{what}: copied, p50", bench.p50(case, kind, "copied_mib"), "MiB")
        bench.find(f"{what}: wait", wait_ms(kind), "ms", at_most=limit)
        bench.find(f"{what}: bill", median_ms(kind, "bill_ms"), "ms")
        share = ratio(wait_ms(kind), wait_ms("control"))
        bench.find(f"{what}: wait / control", share, at_most=MAX_SHARES.get(kind))
