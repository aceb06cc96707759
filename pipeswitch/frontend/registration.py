"""Checks of a registration, and its conversion into the scheduler's event.

All registrations come through here: from the wire (SDK and command line), HTTP, and ``[[model]]``
in the configuration file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import msgspec

from ..base.bytes_tensors import BYTES
from ..base.errors import InvalidInput
from ..base.model_options import (
    DTYPES,
    PRECISIONS,
    BuildOptions,
    RegisterRequest,
    Signature,
    SourceFile,
)
from ..base.roles import OWNER, URGENT_PRIORITY, Principal, Role
from ..base.units import escape_control_chars
from ..ipc.messages.base import ModelName
from ..programs.interface.layout import ORIGIN
from ..programs.interface.pytree import check_takes
from ..programs.spec import DEFAULT_MAX_BATCH, DEFAULT_SEQUENCES, BuildSpec, wrapper_of
from ..scheduler.state.events import RegisterModelRequest, Token, VersionRequest
from .intake.validation import check_name, priority_number
from .permissions import CheckedSource, Rules, check_function, check_source, owners_only

OF_A_VERSION: Final = {"as_version", "weights", "file", "precision", "max_error"}
OF_A_VARIANT: Final = {
    *("like", "weights", "file", "adapter", "precision", "max_error", "aliases", "priority", "pin")
}
NO_RULES: Final = Rules()  # no code and no uploads: the owner needs no permission


def check(request: RegisterRequest) -> None:
    """Raise InvalidInput or RegistrationRefused if a value or a combination is not allowed."""
    _check_signature("inputs", request.inputs, DTYPES)
    _check_signature("raw", request.raw, (*DTYPES, BYTES))
    _check_signature("returns", request.returns, (*DTYPES, BYTES))
    check_takes(request.takes, request.inputs)
    for alias in request.aliases:
        check_name(alias, "alias")
    priority_number(request.priority, default=1)
    is_file = request.weights.startswith("put:") or request.weights.endswith(".safetensors")
    has_file = is_file or bool(request.adapter)
    allowed = OF_A_VARIANT if request.like else OF_A_VERSION
    others = ", ".join(sorted(request.body().keys() - allowed))
    if (request.as_version or request.like) and (others or not has_file):
        missing = "--weights FILE is missing"
        what = f"weights {request.weights!r} are not a file" if request.weights else missing
        raise InvalidInput(
            f"a new {'model like another' if request.like else 'version'} changes only the weights "
            f"and the precision of a registered model: {f'omit {others}' if others else what}",
            hint="pipeswitch register NAME --weights FILE "
            + ("--like OTHER" if request.like else "--as-version"),
        )
    if request.precision not in ("", *PRECISIONS):
        raise InvalidInput(
            f"unknown precision {request.precision[:40]!r}", hint=f"one of {', '.join(PRECISIONS)}"
        )
    is_exact = request.precision == "exact" or not (request.precision or request.generate)
    if request.max_error and is_exact:
        raise InvalidInput("max_error needs a precision", hint="add --precision bf16, fast or int8")
    if request.batch == 1 or (request.batch_delay_ms and not request.batch):
        raise InvalidInput(
            "a batch needs at least two rows" if request.batch else "batch_delay without batch",
            hint="--batch 8 --batch-delay 2ms, or neither",
        )
    if request.state and (request.preprocess or request.postprocess):
        raise InvalidInput("a model with a state cannot have preprocess or postprocess")


def _check_signature(field: str, signature: Signature, dtypes: Sequence[str]) -> None:
    for name, (shape, dtype) in signature.items():
        if escape_control_chars(name, keep="") != name:
            raise InvalidInput(f"register: {field}: name {name[:80]!r} has control characters")
        if dtype not in dtypes or not all(map(_is_extent, shape)):
            raise InvalidInput(
                f"register: {field}: {name[:80]!r} must be [shape, dtype] with positive "
                f"dimensions, or ranges of them, and one of {', '.join(dtypes)}",
                hint=f'{field}={{"x": [[8, [1, 512]], "float32"]}}',
            )


def _is_extent(extent: int | tuple[int, int]) -> bool:
    low, high = (extent, extent) if isinstance(extent, int) else extent
    return 0 < low <= high < 1 << 32


def check_origin(request: RegisterRequest, caller: Principal, rules: Rules) -> CheckedSource:
    """Check that this client may use these files and functions, and has the roles for them."""
    if not (request.source or request.as_version or request.like):
        raise InvalidInput("a registration needs a source", hint="pipeswitch register NAME SOURCE")
    source = check_source(request.source, request.weights, request.example, caller, rules)
    if request.adapter:
        if not caller.is_owner:  # else a hub's name could mean a folder of the server
            raise owners_only(request.adapter)
        if not os.path.isdir(request.adapter):
            what = f"no folder {request.adapter!r} on the server's machine"
            hint = "one with adapter_config.json, from peft's save_pretrained"
            raise InvalidInput(what, hint=hint)
        adapter = check_source(f"hf:{request.adapter}", "", "", caller, rules)
        source = replace(source, owner_files=source.owner_files + adapter.owner_files)
    check_function("preprocess", request.preprocess, request.raw, caller, rules)
    check_function("postprocess", request.postprocess, request.returns, caller, rules)
    require_roles(request, caller, is_code=source.is_code)
    return source


def require_roles(request: RegisterRequest, caller: Principal, *, is_code: bool = False) -> None:
    """Require a role for each option that needs more than the role ``register``."""
    for is_asked, role, purpose in (
        (is_code, Role.CODE, "a factory"),
        (request.preprocess, Role.CODE, "to preprocess"),
        (request.postprocess, Role.CODE, "to postprocess"),
        (request.priority == URGENT_PRIORITY, Role.URGENT, "a model of priority high"),
        (request.pin, Role.OPERATE, "to pin a model"),
    ):
        if is_asked:
            caller.require(role, purpose)


def _set_options(spec: bytes) -> bytes:
    """Return a spec's options that are set, by name: a new option changes no earlier digest.
    A file's name and the time are left out: they change no model."""
    options = msgspec.msgpack.decode(spec)
    pairs = (pair for pair in options.items() if pair[1] and pair[0] not in ORIGIN)
    return msgspec.msgpack.encode(sorted(pairs))


def _file_of(request: RegisterRequest) -> SourceFile | None:
    """Return the file that the client uploaded, or that is on the server's machine."""
    paths = filter(os.path.isabs, (request.weights, request.source))
    names = (escape_control_chars(os.path.basename(one), keep="")[:256] for one in paths)
    return request.file or next((SourceFile(name) for name in names if name), None)


def registration(
    token: Token,
    model: str,
    request: RegisterRequest,
    principal: Principal = OWNER,
    rules: Rules = NO_RULES,
) -> RegisterModelRequest | VersionRequest:
    """Return the event of a registration, or raise the error of the first check that fails."""
    check_name(model, "model")
    check(request)
    source = check_origin(request, principal, rules)
    names = (*BuildOptions.__struct_fields__, "takes")
    fields = {name: getattr(request, name) for name in names}
    usual = "pretrained" if request.generate and source.source.startswith("hf:") else ""
    weights = source.weights or usual  # as ``pipeswitch run`` takes them
    fields |= {"source": source.source, "weights": weights, "example": source.example}
    if not (request.as_version or request.like):  # else they are those of the registered model
        fields["max_batch"] = fields["max_batch"] or (
            DEFAULT_SEQUENCES if request.generate else DEFAULT_MAX_BATCH
        )
        # A language model is checked only within rounding, so ``exact`` would gain nothing.
        fields["precision"] = request.precision or ("fast" if request.generate else "exact")
    fields |= {"file": _file_of(request), "registered_at_s": int(time.time())}
    built = BuildSpec(name=model, allow_module_mode=source.is_code, **fields)
    spec = msgspec.msgpack.encode(built)
    if request.as_version:
        name, tenant = ModelName(model), principal.tenant
        return VersionRequest(token=token, model=name, spec=spec, tenant=tenant)
    # Equal requests give equal digests.
    digest = hashlib.sha256(_set_options(spec) + request.like.encode())
    for path in source.owner_files:
        with contextlib.suppress(FileNotFoundError):  # removed meanwhile: the builder says so
            facts = os.stat(path)  # a changed file under the same path is another model
            shown = os.path.basename(path) if len(source.owner_files) > 1 else ""
            digest.update(f"{shown}{facts.st_size}:{facts.st_mtime_ns}".encode())
    return RegisterModelRequest(
        token=token,
        model=ModelName(model),
        spec=spec,
        spec_digest=digest.hexdigest(),
        priority=priority_number(request.priority, default=1) if request.priority else None,
        is_pinned=request.pin,
        tenant=principal.tenant,
        devices=request.devices,
        like=ModelName(request.like),
        aliases=tuple(ModelName(one) for one in dict.fromkeys(request.aliases) if one != model),
        wrapper=wrapper_of(built),
    )
