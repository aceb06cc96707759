"""Local sources of models: they are uploaded, and a registration refers to their digests."""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from inspect import Parameter
from pathlib import Path
from typing import Any, Final, ParamSpec, TypedDict, TypeVar

import msgspec

from ..base.errors import InvalidInput, RegistrationRefused
from ..base.model_options import ModelOptions, RegisterRequest, SourceFile
from ..base.settings import settings
from ..base.units import escape_control_chars
from ..programs.interface.odd_files import check_file
from ..programs.interface.pytree import Tree, flatten
from .verbs import Progress, as_texts

P = ParamSpec("P")
R = TypeVar("R")

Inputs = Mapping[str, Any]
"""``{name: (shape, dtype)}``; the pairs may also be nested in dicts, lists and tuples."""
FILES: Final = (".pt2", ".pt", ".pth", ".ts", ".torchscript")  # files that may contain a program
PICKLED: Final = (".pt", ".pth", ".bin", ".ckpt")  # files that may contain weights
WEIGHTS_ALONE: Final = (
    "it has only weights: pipeswitch register NAME package.module:function --weights FILE"
)
SHARDS: Final = ".index.json"  # suffix of an index of weight files
_NO_PROGRAMS: Final = {
    ".onnx": "pip install onnx2torch; then client.register(NAME, onnx2torch.convert(FILE), "
    "example_inputs=(x,))",
    ".gguf": "pipeswitch register NAME hf:FILE --generate",
    ".safetensors": WEIGHTS_ALONE,
    ".ckpt": WEIGHTS_ALONE,
    ".py": "a model's code is package.module:function; a script that trains: pipeswitch train FILE",
}
Dynamic = Mapping[str, Mapping[int, tuple[int, int] | tuple[str, int, int]]]


class RegisterOptions(TypedDict, total=False):
    """Options of ``Client.register`` in the forms that Python's users have (``ModelOptions``)."""

    weights: str | os.PathLike[str]
    adapter: str | os.PathLike[str]
    inputs: Inputs | None
    max_batch: int
    batch: int
    batch_delay_ms: float
    devices: str | Sequence[str]
    preprocess: str
    raw: Inputs | None
    postprocess: str
    returns: Inputs | None
    state: Mapping[str, str | tuple[str, int]] | None
    generate: bool
    precision: str
    max_error: float
    aliases: str | Sequence[str]
    priority: str
    like: str
    pin: bool


def with_options(verb: Callable[P, R]) -> Callable[P, R]:
    """Add each option to the signature of ``Client.register``, and its help to the docstring."""
    items = [one for one in settings(ModelOptions).values() if one.name != "source"]
    own, defaults = inspect.signature(verb), ModelOptions()
    names = [
        Parameter(
            one.name,
            Parameter.KEYWORD_ONLY,
            default=getattr(defaults, one.name),
            annotation=RegisterOptions.__annotations__[one.name].__forward_arg__,
        )
        for one in items
    ]
    fixed = [one for one in own.parameters.values() if one.kind is not Parameter.VAR_KEYWORD]
    verb.__signature__ = own.replace(parameters=[*fixed, *names])  # type: ignore[attr-defined]
    texts = "".join(f"            {one.name}: {one.help}\n" for one in items)
    verb.__doc__ = (verb.__doc__ or "").replace("\n        Raises:", f"{texts}\n        Raises:")
    return verb


def request_of(options: RegisterOptions, *, as_version: bool) -> RegisterRequest:
    """Return the request with these options.

    Raises:
        InvalidInput: ``inputs``, ``raw`` or ``returns`` is not a mapping of shapes and dtypes.
    """
    fields: dict[str, Any] = {**options}
    fields["takes"], fields["inputs"] = declared(fields.get("inputs"))
    for name in ("raw", "returns"):
        fields[name] = declared(fields.get(name), nests=False)[1]
    for name in ("aliases", "devices"):
        fields[name] = as_texts(fields.get(name))
    # A text names an output that replaces its input.
    states = (fields.get("state") or {}).items()
    fields["state"] = {key: (one, -1) if isinstance(one, str) else one for key, one in states}
    for name in ("weights", "adapter"):
        fields[name] = os.fspath(fields.get(name) or "")
    return RegisterRequest(**fields, as_version=as_version)


Upload = Callable[[str | os.PathLike[str], str, Progress | None], str]


@dataclass
class LocalSource:
    """Arguments of ``Client.register`` that exist only on the client; ``sent`` uploads them."""

    source: Any
    example_inputs: Any = None
    dynamic: Dynamic | None = None
    tokenizer: Any = None
    file: SourceFile | None = None  # the file that was named
    upload: Upload = field(init=False)
    progress: Progress | None = field(init=False)
    stack: contextlib.ExitStack = field(init=False)

    @contextlib.contextmanager
    def sent(
        self, request: RegisterRequest, upload: Upload, progress: Progress | None
    ) -> Iterator[RegisterRequest]:
        """Upload local files and modules; yield the request with ``put:DIGEST`` in their place.
        Temporary files stay until the end of the context, so that they can be sent again.

        Raises:
            InvalidInput, RegistrationRefused: the arguments contradict each other or the source.
        """
        self.upload, self.progress = upload, progress
        with contextlib.ExitStack() as self.stack:  # deletes temporary files at the end
            source, weights = self._source(request), request.weights
            adapter = request.adapter and os.path.abspath(os.path.expanduser(request.adapter))
            more = {"source": source, "adapter": adapter, "file": self.file}
            request = msgspec.structs.replace(request, **more)
            if self.example_inputs is not None and ":" in source and not source.startswith("put:"):
                request = self._with_example(request)
            if weights.endswith((*PICKLED, ".safetensors", SHARDS)) and not os.path.isfile(weights):
                raise InvalidInput(
                    f"no file {weights!r}", hint="weights must be a path on this machine"
                )
            if weights.endswith((*PICKLED, SHARDS)):
                from ..programs.compiler.files import convert_weights

                weights = str(self._folder / "weights.safetensors")
                convert_weights(request.weights, weights)
            if weights.endswith(".safetensors") and os.path.isfile(weights):
                # An index has no numbers: the digest is that of all its shards together.
                content = weights if request.weights.endswith(SHARDS) else request.weights
                file = file_of(content, named=request.weights)
                request = msgspec.structs.replace(request, file=file)
            if weights.endswith(".safetensors"):
                if os.path.isfile(weights):
                    check_file(weights, f"weights {weights!r}")
                weights = upload(weights, "safetensors", progress)
            yield msgspec.structs.replace(request, weights=weights)

    def _source(self, request: RegisterRequest) -> str:
        """Return the source for the server, after an upload if it is a file or a module."""
        source = self.source
        options = {"max_batch": request.max_batch} if request.max_batch else {}
        if not isinstance(source, str | os.PathLike):
            return self._module(request, options)
        text = os.fspath(source)
        if text.startswith("hf:"):
            text = here(text)
        suffix = os.path.splitext(text)[1]
        check_program_options(text, request.weights, request.inputs)
        if self.dynamic:
            raise InvalidInput(
                "dynamic is only for modules; for a file or a name give ranges in inputs",
                hint='inputs={"ids": ((1, (1, 512)), "int64")}',
            )
        if suffix in (".bundle", ".pt2") and self.example_inputs is not None:
            raise InvalidInput(f"{text!r} says what it takes", hint="leave example_inputs out")
        if suffix in _NO_PROGRAMS and not text.startswith("hf:"):
            hint = _NO_PROGRAMS[suffix].replace("FILE", repr(text))
            raise InvalidInput(f"{text!r} is not a program", hint=hint)
        if suffix in (".bundle", *FILES) and os.path.isfile(text):
            check_file(text, text)
            self.file = self.file or file_of(text)
        if suffix in FILES:
            if not os.path.isfile(text):
                raise InvalidInput(
                    f"no file {text!r}", hint="give the path of a file on this machine"
                )
            from ..programs.compiler.files import convert

            bundle = self._bundle()
            convert(text, bundle, request.inputs, self.example_inputs, **options)
            return self.upload(bundle, "bundle", self.progress)
        return self.upload(text, "bundle", self.progress) if suffix == ".bundle" else text

    def _module(self, request: RegisterRequest, options: dict[str, Any]) -> str:
        from ..programs.compiler.export import export_module_to_bundle, export_wrapped_to_bundle

        if not callable(self.source):
            raise InvalidInput(
                f"source {self.source!r:.40} is not a model",
                hint="a torch.nn.Module, a file's path, torchvision:NAME or hf:NAME",
            )
        if request.weights:
            raise InvalidInput("a module has its own weights", hint="leave weights out")
        if request.generate and self.example_inputs is not None:
            raise InvalidInput(
                "a language model needs no example_inputs", hint="omit example_inputs"
            )
        if not request.generate and self.example_inputs is None:
            raise InvalidInput(
                "a module needs example_inputs, because it is exported by running it once",
                hint="give the arguments of its forward: example_inputs=(x,)",
            )
        bundle = self._bundle()
        if request.generate:
            export_wrapped_to_bundle(self.source, bundle, "generate", self.tokenizer, **options)
        else:
            options |= {} if self.dynamic is None else {"dynamic": self.dynamic}
            export_module_to_bundle(self.source, self.example_inputs, bundle, **options)
        return self.upload(bundle, "bundle", self.progress)

    def _with_example(self, request: RegisterRequest) -> RegisterRequest:
        """Upload example values for a factory that the server imports; keep their nesting."""
        import numpy as np
        from safetensors.numpy import save_file

        example_arrays = self.example_inputs
        if not isinstance(example_arrays, Mapping):
            raise InvalidInput(
                "example_inputs of a named model must be a dict by argument name",
                hint='example_inputs={"x": x}',
            )
        # Keys may be positions: 0 is the first argument.
        example_arrays = {str(name): value for name, value in example_arrays.items()}
        tree, leaves = flatten(example_arrays, "input", lambda value: hasattr(value, "__array__"))
        # ``ascontiguousarray`` would give a number a dimension.
        arrays = {name: np.asarray(value, order="C") for name, value in leaves.items()}
        save_file(arrays, self._folder / "example.safetensors")
        example = self.upload(self._folder / "example.safetensors", "safetensors", None)
        inputs, takes = request.inputs, request.takes
        if not inputs:
            inputs = {name: (a.shape, str(a.dtype)) for name, a in arrays.items()}
            takes = tree if list(arrays) != list(example_arrays) else None
        return msgspec.structs.replace(request, example=example, inputs=inputs, takes=takes)

    def _bundle(self) -> Path:
        if self.progress is not None:
            self.progress("export", 0.0)
        return self._folder / "program.bundle"

    @cached_property
    def _folder(self) -> Path:
        folder = tempfile.TemporaryDirectory(prefix="pipeswitch-export-")
        return Path(self.stack.enter_context(folder))


def file_of(path: str, *, named: str = "") -> SourceFile:
    """Return the name, which ``models --versions`` shows, and the digest of a file's content."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    name = os.fsencode(os.path.basename(named or path)).decode(errors="replace")
    return SourceFile(escape_control_chars(name, keep="")[:256], digest)


def here(source: str) -> str:
    """Return ``hf:FOLDER`` with an absolute path, because the server runs in another folder.

    Raises:
        InvalidInput: a path is not a folder. A name without ``.`` or ``/`` in front may be a hub's.
    """
    name, mark, wished = source.removeprefix("hf:").partition("#")
    path = os.path.expanduser(name)
    if os.path.isdir(path) or (path.endswith(".gguf") and os.path.isfile(path)):
        return f"hf:{os.path.abspath(path)}{mark}{wished}"
    if path.startswith((".", "/")):
        hint = "a folder with config.json, a .gguf file, or a hub's name"
        raise InvalidInput(f"nothing at {name!r}", hint=hint)
    return source


def check_program_options(source: str, weights: str, inputs: object) -> None:
    """Refuse options that would have no effect on a program in a file.

    Raises:
        InvalidInput: the program has its own weights or its own signature.
    """
    suffix = os.path.splitext(source)[1]
    if weights and suffix in (".bundle", *FILES):
        raise InvalidInput(
            f"{source!r} has its own weights, so weights {weights!r} would have no effect",
            hint="omit weights, or register the module's code: pipeswitch register "
            f"NAME package.module:function --weights {weights}",
        )
    if inputs and suffix in (".bundle", ".pt2"):
        raise InvalidInput(f"{source!r} says what it takes", hint="omit inputs")


def declared(inputs: Inputs | None, *, nests: bool = True) -> tuple[Tree, dict[str, Any]]:
    """Return the nesting of declared inputs (None if flat), and shape and dtype by name.

    Raises:
        InvalidInput: an input is not a ``(shape, dtype)``, or is nested while ``nests`` is False.
    """
    try:
        tree, leaves = flatten(dict(inputs or {}), "input", _is_declared)
        flat = {
            key: [[n if isinstance(n, int) else list(n) for n in shape], dtype]
            for key, (shape, dtype) in leaves.items()
        }
    except (TypeError, ValueError, AttributeError, RegistrationRefused) as error:
        raise InvalidInput(
            f"inputs are not {{name: (shape, dtype)}}: {error}",
            hint='inputs={"x": ((8, 3, 224, 224), "float32")}',
        ) from error
    takes = tree if list(flat) != list(inputs or {}) else None
    if takes is not None and not nests:
        raise InvalidInput("raw and returns cannot be nested")
    return takes, flat


def _is_declared(value: Any) -> bool:
    return isinstance(value, list | tuple) and len(value) == 2 and isinstance(value[1], str)
