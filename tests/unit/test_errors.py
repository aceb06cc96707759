"""``pipeswitch.errors`` is the public name of ``pipeswitch.base.errors``; values of errors."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import pipeswitch
import pipeswitch.errors
from pipeswitch.base import errors
from pipeswitch.base.quotas import FairQuota
from pipeswitch.gateway.http.http_errors import body_of


def test_the_public_module_has_the_very_same_classes() -> None:
    classes = {name: one for name, one in vars(errors).items() if isinstance(one, type)}
    own = {name for name, one in classes.items() if issubclass(one, errors.PipeSwitchError)}
    assert own
    assert all(getattr(pipeswitch.errors, name) is classes[name] for name in own)
    assert pipeswitch.QueueFull is pipeswitch.errors.QueueFull


def test_each_refusal_of_a_full_queue_names_its_limit() -> None:
    top = Path(pipeswitch.__file__).parent
    limits: list[ast.expr | None] = []
    for path in top.rglob("*.py"):
        for call in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(call, ast.Call) and getattr(call.func, "id", "") == "QueueFull":
                limits.append(next((k.value for k in call.keywords if k.arg == "limit"), None))
    assert len(limits) > 15
    assert None not in limits


def test_a_http_error_has_the_limit_as_a_field() -> None:
    quota = FairQuota(4, "uploads", "uploads")
    quota.add("me", 3)
    with pytest.raises(pipeswitch.QueueFull) as full:
        quota.take("me", 1)
    assert body_of(full.value)["limit"] == "uploads"
    assert "limit" not in body_of(pipeswitch.errors.InvalidInput("no"))
