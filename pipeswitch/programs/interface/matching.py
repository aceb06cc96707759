"""Matching of a job's tensors with a program's weights by name, dtype and shape. No torch."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Final

from ...base.errors import InvalidInput, RegistrationRefused
from .layout import signature_text

Given = Mapping[str, tuple[str, tuple[int, ...]]]
"""Parameters and buffers: name -> dtype and shape."""

ALL_PARTS: Final = "*"  # label of all parts of a job together
WRAPPER: Final = "model."  # prefix of the names in a program from an ``hf:`` source
AVERAGED: Final = "module."  # prefix of the names in ``torch.optim.swa_utils.AveragedModel``
_CONSTANT: Final = re.compile(r"(.*\.)?_?(lifted_tensor|tensor_constant)_?\d+")  # constant's name
_MAX_SHOWN: Final = 8


def match(
    weights: Given, own: Given, part: str = "", unsaved: Collection[str] = ()
) -> dict[str, str]:
    """Return the job's tensor name for each weight of the program, except its constants.

    The job may have more tensors than the program, such as tensors that only training uses.

    Args:
        weights: the program's weights.
        own: the job's tensors; each name is the part's name, a dot and the name in the part.
        part: the job's part to match; empty: the only part that fits.
        unsaved: weights that a state dict does not have; they may be missing.

    Raises:
        RegistrationRefused: weights are missing or differ; the error names them.
        InvalidInput: several parts fit, or no part has this name; the error names the parts.
    """
    constants_free = {n: kind for n, kind in weights.items() if not _CONSTANT.fullmatch(n)}
    parts = sorted({name.partition(".")[0] for name in own})
    if part not in ("", ALL_PARTS, *parts):
        raise InvalidInput(
            f'the job has no part "{part[:80]}"; it has {_listed(parts)}',
            hint='job.steps(model={"net": net, "ema": ema}) names them',
        )
    fits: dict[str, dict[str, str]] = {}
    problems: list[list[str]] = []
    for label, names in _readings(own, parts):
        if part in ("", label):
            here = [name for name in constants_free if name in names or name not in unsaved]
            wrong = [_problem(name, constants_free[name], own, names) for name in here]
            problems.append([text for text in wrong if text])
            if not problems[-1]:
                fits.setdefault(label, {name: names[name] for name in here})
    if len({tuple(names.values()) for names in fits.values()}) > 1:
        raise InvalidInput(
            f"several parts of the job fit the model: {_listed(fits)}",
            hint=f'name one: --part {min(fits)}, in Python part="{min(fits)}"',
        )
    if fits:
        return next(iter(fits.values()))
    fewest = min(problems, key=len)
    more = f"; and {len(fewest) - _MAX_SHOWN} more" if len(fewest) > _MAX_SHOWN else ""
    text = "; ".join(fewest[:_MAX_SHOWN]) + more
    raise RegistrationRefused("weights", text, hint="the registered module's own state_dict()")


def _readings(own_weights: Given, parts: Iterable[str]) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (part, names) for each way to read the job's names: program's name -> job's name."""
    for part in parts:
        named = {
            name.partition(".")[2]: name for name in own_weights if name.startswith(f"{part}.")
        }
        own = {uncompiled(name): full for name, full in named.items()}
        for inner in ("", AVERAGED):
            bare = {name.removeprefix(inner): full for name, full in own.items()}
            yield part, bare
            yield part, {WRAPPER + name: full for name, full in bare.items()}
    yield ALL_PARTS, {uncompiled(name): name for name in own_weights}


def uncompiled(name: str) -> str:
    """Return a tensor's name without the prefix that ``torch.compile`` adds to a module."""
    return name.replace("_orig_mod.", "")


def _listed(parts: Iterable[str]) -> str:
    texts = [f'"{part}"' + " (all in one)" * (part == ALL_PARTS) for part in parts]
    return ", ".join(texts[:_MAX_SHOWN]) + ", …" * (len(texts) > _MAX_SHOWN)


def _problem(
    name: str, kind: tuple[str, tuple[int, ...]], own: Given, names: Mapping[str, str]
) -> str:
    shown = name.removeprefix(WRAPPER) if all(one.startswith(WRAPPER) for one in names) else name
    if name not in names:
        return f"{shown}: missing"
    here = own[names[name]]
    if here == kind:
        return ""
    return f"{shown}: the model has {signature_text(*kind)}, here it is {signature_text(*here)}"
