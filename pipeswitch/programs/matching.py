"""Which of a job's tensors are a program's weights: by name, dtype and shape. Pure, no torch."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Protocol

from ..errors import RegistrationRefused
from .signature import signature_text

Given = Mapping[str, tuple[str, tuple[int, ...]]]
"""A job's parameters and buffers: name -> dtype and shape."""

WRAPPER: Final = "model."  # stands before the names of a program that was made of an ``hf:`` source
_CONSTANT: Final = re.compile(r"(.*\.)?_?(lifted_tensor|tensor_constant)_?\d+")  # of its graph
_MAX_SHOWN: Final = 8


class Named(Protocol):
    """A tensor of a manifest or of a bundle."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


def match(weights: Iterable[Named], given: Given) -> dict[str, str]:
    """The given name of each of the program's weights; constants of its graph keep their values.

    A job may have more than the program: what only training uses. Where it trains several models,
    the one that fits is taken.

    Raises:
        RegistrationRefused: a weight is missing or is another one; names all of them.
    """
    wanted = {w.name: w for w in weights if not _CONSTANT.fullmatch(w.name)}
    problems: list[list[str]] = []
    for names in _readings(given):
        wrong = [_problem(weight, given, names) for weight in wanted.values()]
        found = [text for text in wrong if text]
        if not found:
            return {name: names[name] for name in wanted}
        problems.append(found)
    fewest = min(problems, key=len)
    more = f"; and {len(fewest) - _MAX_SHOWN} more" if len(fewest) > _MAX_SHOWN else ""
    raise RegistrationRefused("weights", "; ".join(fewest[:_MAX_SHOWN]) + more)


def _readings(given: Given) -> Iterator[dict[str, str]]:
    """Ways to call the given tensors: name as the program may have it -> given name."""
    yield {name: name for name in given}
    yield {WRAPPER + name: name for name in given}
    for key in sorted({name.partition(".")[0] for name in given}):
        yield {n.partition(".")[2]: n for n in given if n.startswith(f"{key}.")}


def _problem(weight: Named, given: Given, names: Mapping[str, str]) -> str:
    if weight.name not in names:
        return f"{weight.name}: the job has none"
    dtype, shape = given[names[weight.name]]
    if (dtype, shape) == (weight.dtype, weight.shape):
        return ""
    wanted = signature_text(weight.dtype, weight.shape)
    return f"{weight.name}: the model has {wanted}, the job {signature_text(dtype, shape)}"
