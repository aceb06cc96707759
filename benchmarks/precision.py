"""``bench precision``: each precision, compared with eager PyTorch and ``torch.compile``.

The arms of a model run in one process, in turns, with one thread. They are compared by processor
time of the thread (``processor_ms``), which other programs disturb less than wall time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from pipeswitch.base.model_options import PRECISIONS

from .setting import end, read_line, spawn, tell
from .trials import Arm, Numbers, Run

ROUNDS: Final = 12
QUICK_ROUNDS: Final = 3
SEVERAL: Final = 8
MAX_CONVOLUTIONAL: Final = 0.60  # limit of a convolutional model's time in fast / in eager PyTorch
MAX_TRANSFORMER: Final = 0.50  # limit of a transformer's time in fast / in eager PyTorch, batch 8
MAX_SLOWER: Final = 1.0  # limit of a model's time in precision fast / in precision exact
COMPILED: Final = ("torch.compile", "torch.compile, freezing")
Inputs = dict[str, tuple[tuple[int, ...], str]]


@dataclass(frozen=True)
class Case:
    """A model, its inputs at a batch of one, and its limits in precision ``fast``."""

    source: str
    inputs: Inputs
    limits: dict[int, float | None]  # batch size -> limit of fast's / eager's time; None: no target


def _pictures(name: str, side: int = 224, *, is_transformer: bool = False) -> Case:
    limits: dict[int, float | None] = {1: MAX_CONVOLUTIONAL}
    if is_transformer:
        limits = {1: None, SEVERAL: MAX_TRANSFORMER}
    return Case(f"torchvision:{name}", {"x": ((1, 3, side, side), "float32")}, limits)


def _tokens(name: str, length: int) -> Case:
    inputs: Inputs = {"input_ids": ((1, length), "int64")}
    return Case(f"benchmarks.factories:{name}", inputs, {1: None, SEVERAL: MAX_TRANSFORMER})


def _own(name: str, *shape: int) -> Case:
    return Case(f"benchmarks.factories:{name}", {"x": ((1, *shape), "float32")}, {1: None})


CASES: Final = {
    "resnet50": _pictures("resnet50"),
    "resnet152": _pictures("resnet152"),
    "inception_v3": _pictures("inception_v3", 299),
    "mobilenet_v2": _pictures("mobilenet_v2"),
    "efficientnet_b0": _pictures("efficientnet_b0"),
    "vit_b_16": _pictures("vit_b_16", is_transformer=True),
    "swin_t": _pictures("swin_t", is_transformer=True),
    "bert-base": _tokens("bert_base", 32),
    "distilbert": _tokens("distilbert", 32),
    "gpt2": _tokens("gpt2", 1),
    "mlp": _own("mlp", 2048),
    "residual": _own("residual", 3, 64, 64),
}


def run(bench: Run, models: Sequence[str]) -> None:
    """Measure each model in its own process."""
    quick = ("mobilenet_v2",) if bench.is_quick else tuple(CASES)
    for name in [name for name in models or quick if name in CASES]:
        _measure(bench, name, CASES[name])
    bench.notes.append("processor_ms: processor time of the only thread; share: of eager's")
    bench.notes.append("error: largest difference from eager, relative to the largest output")
    bench.notes.append("gpt2: one token without a cache, as in a step of decoding")


def _measure(bench: Run, name: str, case: Case) -> None:
    order = {"source": case.source, "inputs": case.inputs, "seed": bench.seed, "threads": 1}
    arms = [*(() if bench.is_quick else COMPILED), *PRECISIONS]
    bench.say(f"{name}: building {', '.join(arms)}")
    child = spawn("serve", order | {"arms": arms}, module="precision_child")
    try:
        answer = read_line(child)
        bench.skip({f"{name}, {arm}": why for arm, why in answer["skipped"].items()})
        arms = [arm for arm in ("eager", *arms) if arm not in answer["skipped"]]
        for batch, limit in case.limits.items():
            title = f"{name}, batch {batch}"

            def measure(arm: str, batch: int) -> Numbers:
                tell(child, arm=arm, batch=batch)
                return read_line(child)

            turns = [Arm(arm, partial(measure, arm, batch)) for arm in arms]
            bench.trial_loop(title, turns, bench.rounds(ROUNDS, QUICK_ROUNDS))
            _findings(bench, title, arms, limit)
        for arm, facts in answer["facts"].items():
            bench.find(f"{name}, {arm}: bytes", facts["bytes"])
            bench.find(f"{name}, {arm}: copy", facts["copy_ms"], "ms")
            bench.notes += [f"{name}, {arm}: {note}" for note in facts["notes"]]
    finally:
        end(child)


def _findings(bench: Run, title: str, arms: Sequence[str], limit: float | None) -> None:
    least: dict[str, Any] = {arm: min(bench.values(title, arm, "processor_ms")) for arm in arms}
    for arm in arms:
        bench.find(f"{title}, {arm}: processor time, minimum", least[arm], "ms")
        if arm == "eager":
            continue
        share = least[arm] / least["eager"]
        at_most = limit if arm == "fast" else None
        bench.find(f"{title}, {arm}: share of eager", share, at_most=at_most)
        bench.find(f"{title}, {arm}: error", max(bench.values(title, arm, "error")))
    if "fast" in least:
        share = least["fast"] / least["exact"]
        bench.find(f"{title}, fast: share of exact", share, at_most=MAX_SLOWER)
