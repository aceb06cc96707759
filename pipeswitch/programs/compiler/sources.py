"""Loading of a model from its source: ``torchvision:``, ``hf:`` or ``package.module:factory``."""

from __future__ import annotations

import contextlib
import inspect
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from ...base.errors import PipeSwitchError, RegistrationRefused
from ...base.extras import BUILDERS
from ...base.units import nearest
from ...commits.weights import load_weights
from ..interface.dims import Dim, typical
from ..interface.layout import ITEM_BYTES, KindSettings, ValueSpec
from ..interface.matching import match
from ..interface.odd_files import check_file
from ..interface.pytree import Tree, argument_names, arguments
from ..running.factories import factory, keywords_of, split_arguments, without_cache
from ..running.torch_settings import seeded
from ..running.unregistered_tensors import loose_tensors
from ..running.values import dtype_name, flatten_outputs
from ..spec import BuildSpec
from . import model_folder
from .adapters import merged
from .checking import align
from .dynamic import Dynamic, Range
from .export import Builder
from .export_hints import refuse_engines
from .statefulness import Fresh

InputShapes = dict[str, tuple[tuple[int, ...], str]]
OpenShapes = Mapping[str, tuple[tuple[Any, ...], str]]
"""Declared inputs: name -> (shape, dtype); an extent is a number, or the range for requests."""

_DIGEST: Final = re.compile(r"[0-9a-f]{64}\.safetensors")
_FACTORY: Final = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")

# Names that need no hub: name -> model type, and changes of its default configuration. Other models
# need a local folder or a filled cache.
_WELL_KNOWN: Final[Mapping[str, tuple[str, dict[str, Any]]]] = {
    "bert-base-uncased": ("bert", {}),
    "bert-large-uncased": (
        "bert",
        {
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
        },
    ),
    "distilbert": ("distilbert", {}),
    "distilbert-base-uncased": ("distilbert", {}),
    "gpt2": ("gpt2", {}),
    "gpt2-medium": ("gpt2", {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "roberta-base": (
        "roberta",
        {
            "vocab_size": 50265,
            "max_position_embeddings": 514,
            "type_vocab_size": 1,
            "layer_norm_eps": 1e-5,
        },
    ),
}


MAX_SHOWN: Final = 8  # names of weights in an error
WRAPPERS: Final = ("module.", "model.")  # prefixes of DataParallel and Lightning
LONGEST_TEXT: Final = 512  # maximum tokens of a text, unless inputs are declared
MIN_SIDE: Final = 32  # minimum side of a picture, in pixels

_WEIGHTS_ONLY: Final = "TORCH_FORCE_WEIGHTS_ONLY_LOAD"


@dataclass
class Loaded:
    """A module with data on the host, and the inputs for which it is built."""

    module: nn.Module
    inputs: InputShapes
    construct: Callable[[], nn.Module]  # constructs the same structure again
    dynamic: Dynamic = field(default_factory=dict)  # dimensions that requests choose
    is_wish: bool = False  # whether dimensions of ``dynamic`` may be dropped
    takes: Tree = None  # tree of the arguments; None: each input is an argument
    examples: list[torch.Tensor] = field(default_factory=list)  # declared values of the inputs
    loose: dict[str, torch.Tensor] = field(default_factory=dict)  # tensors in plain attributes
    imported_before: frozenset[str] = frozenset()  # modules imported before the source
    output_names: list[str] = field(default_factory=list)  # output order; empty: the module's own
    settings: KindSettings | None = None  # None: a plain model
    notes: list[str] = field(default_factory=list)  # decisions of the build, for people
    seed: int = 0  # seed with which the module was constructed

    def __post_init__(self) -> None:
        """Save the module's initial state, before its first call."""

        def call(inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            try:
                outputs = flatten_outputs(self.nested(inputs))
                return [outputs[name] for name in self.output_names or outputs]
            except (SystemExit, KeyboardInterrupt) as error:  # the module refuses these values
                raise RuntimeError(f"it raised {type(error).__name__}") from error

        self.fresh = Fresh(self.module, call)

    def arguments(self, inputs: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return the arguments of a call by name, from the inputs in order."""
        return arguments(self.takes, dict(zip(self.inputs, inputs, strict=True)))

    def keywords(self) -> frozenset[str]:
        """Return the names of the arguments that are passed by keyword."""
        return keywords_of(self.module, argument_names(self.takes, self.inputs))

    def nested(self, inputs: Sequence[torch.Tensor]) -> Any:
        """Return the module's own result, with its nesting."""
        places, named = split_arguments(self.arguments(inputs), self.keywords())
        return self.module(*places, **named, **without_cache(self.module))

    def outputs(self, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the outputs, in order, of the module in its initial state."""
        return self.fresh(inputs)


def load_source(spec: BuildSpec) -> Loaded:
    """Construct the module of a spec whose source is not a bundle, and load its weights.

    Raises:
        RegistrationRefused: there is no such model, or its weights are unavailable or do not fit.
    """
    imported_before = frozenset(sys.modules)
    if spec.adapter and not spec.source.startswith("hf:"):
        hint = "register the whole model, with the adapter's weights merged"
        raise RegistrationRefused("adapter", "it needs a source hf:NAME", hint=hint)
    construct, usual = _constructor(spec)
    seed = _seed(spec.weights)
    with seeded(seed):
        module = _with_weights(spec, construct)
    if spec.adapter:
        assert isinstance(module, _ByPosition)
        module.model = merged(module.model, spec.adapter)
    refuse_engines(module)
    for child in module.modules():
        child.training = False
    for parameter in module.parameters():
        parameter.requires_grad_(False)
    align(module)
    if spec.generate:
        return _wrapped(BUILDERS.load("generate")(), module, spec, construct)
    inputs, dynamic = checked_inputs(spec.inputs or usual)
    examples = _examples(spec.example, inputs, dynamic)
    if examples:
        inputs = {name: (tuple(value.shape), inputs[name][1]) for name, value in examples.items()}
    loose = {name: tensor.detach() for name, tensor in loose_tensors(module).items()}
    settings, notes = _embedding(spec, module, inputs, dynamic)
    return Loaded(
        module,
        inputs,
        construct,
        dynamic,
        not spec.inputs,
        spec.takes,
        [*examples.values()],
        loose,
        imported_before,
        settings=settings,
        notes=notes,
        seed=seed,
    )


def _embedding(
    spec: BuildSpec, module: nn.Module, inputs: InputShapes, dynamic: Dynamic
) -> tuple[KindSettings | None, list[str]]:
    """Return a text-embedding model's settings and notes on the files of its folder.
    The settings are None for other models."""
    if not isinstance(module, _ByPosition):
        return None, []
    is_text = [*inputs] == ["input_ids", "attention_mask"]
    longest = dynamic.get("input_ids", {}).get(1)
    if not is_text or not isinstance(longest, tuple) or "embedding" not in BUILDERS.names():
        return None, model_folder.unused_files(spec)
    settings, notes = BUILDERS.load("embedding")(spec, module.model, int(longest[-1]))
    return settings, notes


def _wrapped(
    builder: Builder, module: nn.Module, spec: BuildSpec, construct: Callable[[], nn.Module]
) -> Loaded:
    if not isinstance(module, _ByPosition):
        raise RegistrationRefused(
            "generate", "the source is hf:NAME, or a bundle that was exported to generate"
        )
    wrapped = builder.wrap(module.model)
    settings, notes = builder.read_folder(wrapped, spec)
    shapes = {n: (tuple(v.shape), dtype_name(v.dtype, n)) for n, v in wrapped.example.items()}
    return Loaded(
        wrapped.module,
        shapes,
        construct,
        wrapped.dynamic,
        examples=[*wrapped.example.values()],
        settings=settings,
        notes=[*wrapped.notes, *notes],
    )


def _examples(path: str, inputs: InputShapes, dynamic: Dynamic) -> dict[str, torch.Tensor]:
    """Return the inputs' values in order, or none if the file is gone: uploads may be deleted."""
    if not os.path.isfile(path):
        return {}
    from safetensors.torch import load_file

    tensors = load_file(path)
    for name, (shape, dtype) in inputs.items():
        if name not in tensors:
            raise RegistrationRefused(f"example {name!r}", f"it is not among {', '.join(tensors)}")
        extents = tuple(tensors[name].shape)
        is_open = dynamic.get(name, {})
        expected = tuple(
            extents[a] if a in is_open and a < len(extents) else n for a, n in enumerate(shape)
        )
        if (dtype_name(tensors[name].dtype, f"example {name!r}"), extents) != (dtype, expected):
            text = f"it is {tensors[name].dtype}{list(extents)}, not {dtype}{list(shape)}"
            raise RegistrationRefused(f"example {name!r}", text)
    return {name: tensors[name] for name in inputs}


def _constructor(spec: BuildSpec) -> tuple[Callable[[], nn.Module], OpenShapes]:
    scheme, _, name = spec.source.partition(":")
    if scheme == "torchvision":
        return _torchvision(name, spec.weights == "pretrained")
    if scheme == "hf":
        return _transformers(name, spec)
    if _FACTORY.fullmatch(spec.source):
        if spec.weights == "pretrained":
            raise RegistrationRefused(
                "weights", "a factory has no 'pretrained'; it can load weights itself"
            )
        return factory(spec.source), {}
    raise RegistrationRefused(
        f"source {spec.source!r}",
        "expected torchvision:NAME, hf:NAME, a path ending in .bundle, or package.module:factory",
    )


def _torchvision(name: str, is_pretrained: bool) -> tuple[Callable[[], nn.Module], OpenShapes]:
    try:
        import torchvision
    except ImportError as error:
        raise RegistrationRefused("source", f"torchvision cannot be imported: {error}") from error
    known = torchvision.models.list_models()
    if name not in known:
        why = f"torchvision has no such model{nearest(name, known)}"
        raise RegistrationRefused(f"torchvision model {name!r}", why)
    side = 299 if name == "inception_v3" else 224

    def construct() -> nn.Module:
        weights = "DEFAULT" if is_pretrained else None
        builder = inspect.signature(torchvision.models.get_model_builder(name))
        has_backbone = "weights_backbone" in builder.parameters
        # Otherwise the backbone of a segmenter or detector is downloaded, even for random weights.
        more = {"weights_backbone": None} if has_backbone else {}
        with _unpickling_refused():
            module: nn.Module = torchvision.models.get_model(name, weights=weights, **more)
        return module

    return construct, {"x": ((1, 3, side, side), "float32")}


@contextlib.contextmanager
def _unpickling_refused() -> Iterator[None]:
    """Forbid torch.hub to unpickle files; only an environment variable can do that."""
    before = os.environ.get(_WEIGHTS_ONLY)
    os.environ[_WEIGHTS_ONLY] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_WEIGHTS_ONLY]
        else:
            os.environ[_WEIGHTS_ONLY] = before


class _ByPosition(nn.Module):
    """A transformers model that is called by position, and returns all its outputs by name."""

    def __init__(self, model: nn.Module, names: tuple[str, ...]) -> None:
        super().__init__()
        self.model = model
        self._names = names

    def forward(self, *inputs: Any) -> Mapping[str, Any]:
        keywords: dict[str, Any] = dict(zip(self._names, inputs, strict=True))
        if hasattr(self.model.config, "use_cache"):
            keywords["use_cache"] = (
                False  # a request does not use a cache, which would be an output
            )
        outputs: Mapping[str, Any] = self.model(**keywords, return_dict=True)
        return outputs


def _transformers(name: str, spec: BuildSpec) -> tuple[Callable[[], nn.Module], OpenShapes]:
    """Return the constructor and the inputs of ``NAME``; ``NAME#Class`` also names the class."""
    try:
        import transformers
    except ImportError as error:
        raise RegistrationRefused(
            f"source hf:{name}", "transformers is not installed: pip install 'pipeswitch[hf]'"
        ) from error
    _, _, wished = name.partition("#")
    name, gguf = model_folder.name_of(spec), model_folder.gguf_of(spec)
    if gguf:
        BUILDERS.load("gguf")(spec)
    is_pretrained = spec.weights == "pretrained"
    config = _config(transformers, name, is_pretrained, gguf)
    model_folder.refuse_adapter(spec)
    _refuse_kernels(name, config)
    bare: Any = transformers.AutoModel  # untyped upstream
    if spec.generate:
        bare = BUILDERS.load("generate")().auto_class(config)
    own = None if spec.generate and not wished else _class(transformers, wished, config)
    cls = own or bare
    mapped = bare._model_mapping.get(type(config), bare)  # class that the auto class chooses
    inputs = spec.inputs or _usual_inputs(own or mapped, config)
    names = tuple(argument_names(spec.takes, inputs))

    def construct() -> nn.Module:
        if is_pretrained:
            model, report = cls.from_pretrained(
                name,
                trust_remote_code=False,
                use_safetensors=True,
                output_loading_info=True,
                **_as_plain_tensors(name, config),
                **gguf,
            )
            _refuse_missing(f"weights of hf:{name}", sorted(report["missing_keys"]), cls.__name__)
            is_quantized = getattr(config, "quantization_config", None) is not None
            for weight in model.parameters() if is_quantized else ():
                if weight.dtype.itemsize < model.dtype.itemsize:  # transformers 5.17 narrows mxfp4
                    weight.data = weight.data.to(model.dtype)
        elif cls is bare:
            model = bare.from_config(config)
        else:
            model = cls._from_config(config)  # like auto classes, this uses the config's dtype
        if getattr(config, "_experts_implementation", None) == "grouped_mm":
            model.set_experts_implementation("batched_mm")  # no other can be exported
        return _ByPosition(model, names)

    return construct, inputs


def _as_plain_tensors(name: str, config: Any) -> dict[str, Any]:
    """Return the arguments with which transformers loads a quantized checkpoint as plain tensors.
    Raises RegistrationRefused: transformers cannot do that for the checkpoint's quantization
    method."""
    declared = getattr(config, "quantization_config", None)
    if declared is None:
        return {}
    method, why = str(dict(declared).get("quant_method", "an unknown method")), ""
    try:
        from transformers.quantizers.auto import AutoQuantizationConfig

        loads: Any = AutoQuantizationConfig  # untyped upstream
        quantization = loads.from_dict(dict(declared))
        if hasattr(quantization, "dequantize"):
            return {"quantization_config": type(quantization)(dequantize=True)}
    except Exception as error:  # a library is missing, or the method lacks a setting
        why = f" ({type(error).__name__}: {str(error)[:200]})"
    raise RegistrationRefused(
        f"weights of hf:{name}",
        f"they are quantized with {method[:40]}, and do not load as plain tensors here{why}",
        hint="give the checkpoint that is not quantized, with precision='int8' to make it small",
    )


def _refuse_missing(part: str, missing: Sequence[str], what: str) -> None:
    """Refuse a checkpoint that lacks weights: transformers would initialize them randomly."""
    if missing:
        more = f" and {len(missing) - MAX_SHOWN} more" if len(missing) > MAX_SHOWN else ""
        raise RegistrationRefused(
            part,
            f"missing {', '.join(missing[:MAX_SHOWN])}{more}",
            hint=f"give a checkpoint that has all of {what}, or hf:NAME#CLASS for the class whose "
            "weights these are",
        )


def _refuse_kernels(name: str, config: Any) -> None:
    """Refuse a configuration that names a repository of compiled attention (``org/kernel``).

    A configuration is data, but transformers would download and run that code.
    """
    parts = [config, *(getattr(config, key, None) for key in getattr(config, "sub_configs", ()))]
    named = [str(getattr(part, "_attn_implementation", None) or "") for part in parts]
    for kernel in named:
        if "/" in kernel:
            raise RegistrationRefused(
                f"source hf:{name}", f"its configuration names code of a hub: {kernel[:80]!r}"
            )


def _class(transformers: Any, wished: str, config: Any) -> Any:
    """Return the requested class, or the configuration's own; None if neither names one.
    Raises RegistrationRefused: transformers has no such class, or it is for other
    configurations."""
    wished = wished or next(iter(config.architectures or ()), "")
    if not wished:
        return None
    cls: Any = getattr(transformers, wished, None)
    is_model = isinstance(cls, type) and issubclass(cls, transformers.PreTrainedModel)
    if not is_model:
        raise RegistrationRefused(
            f"architecture {wished!r}", f"transformers {transformers.__version__} has no such model"
        )
    if not isinstance(config, cls.config_class or ()):  # config_class is None in a base class
        raise RegistrationRefused(
            f"architecture {wished!r}", f"the source is a {config.model_type}, which does not match"
        )
    return cls


def _usual_inputs(cls: Any, config: Any) -> OpenShapes:
    """Return the default inputs: a text of up to ``LONGEST_TEXT`` tokens, or a picture.
    A picture has at most the model's size. Other models get none: inputs must be declared."""
    main = getattr(cls, "main_input_name", "input_ids")
    if main == "pixel_values":
        size = getattr(config, "image_size", 224)
        height, width = (size, size) if isinstance(size, int) else size
        sides = [("height", min(MIN_SIDE, height), height), ("width", min(MIN_SIDE, width), width)]
        return {main: ((1, getattr(config, "num_channels", 3), *sides), "float32")}
    if main != "input_ids":
        return {}
    longest = min(LONGEST_TEXT, getattr(config, "max_position_embeddings", None) or LONGEST_TEXT)
    inputs = dict.fromkeys(("input_ids", "attention_mask"), ((1, ("length", 1, longest)), "int64"))
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ((1, ("decoder_length", 1, longest)), "int64")
    return inputs


def _config(transformers: Any, name: str, is_pretrained: bool, gguf: dict[str, str]) -> Any:
    if name in _WELL_KNOWN and not is_pretrained:
        model_type, changes = _WELL_KNOWN[name]
        return transformers.AutoConfig.for_model(model_type, **changes)
    try:
        return transformers.AutoConfig.from_pretrained(
            name, local_files_only=not is_pretrained, trust_remote_code=False, **gguf
        )
    except Exception as error:  # a hub client's errors share no base class
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
        if not os.path.isdir(name):
            why = f"there is no such folder, and no hub that can be reached has it ({why})"
        raise RegistrationRefused(
            f"source hf:{name}",
            f"its configuration cannot be read: {why}",
            hint="give the checkpoint that it was made from: hf:NAME"
            if gguf
            else f"known without a folder or a hub: {', '.join(_WELL_KNOWN)}",
        ) from error


def _with_weights(spec: BuildSpec, construct: Callable[[], nn.Module]) -> nn.Module:
    weights = spec.weights
    is_factory = bool(_FACTORY.fullmatch(spec.source)) and not spec.source.startswith(
        ("torchvision:", "hf:")
    )
    if not weights and not is_factory:
        raise RegistrationRefused(
            "weights",
            f"{spec.source} needs --weights: a .safetensors file, pretrained or random:SEED",
        )
    is_path = weights.endswith(".safetensors") or os.path.isdir(weights)
    if not (is_path or weights in ("", "pretrained") or weights.startswith("random:")):
        raise RegistrationRefused(
            f"weights {weights!r}", "expected random:SEED, pretrained or a .safetensors file"
        )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warnings are for the model's author
            module = construct()
    except RegistrationRefused:
        raise
    except Exception as error:
        if weights == "pretrained":
            raise RegistrationRefused(
                "weights pretrained",
                f"cannot be loaded ({type(error).__name__}: {str(error)[:200]}); give a "
                ".safetensors file, or random:SEED to try the system",
            ) from error
        raise RegistrationRefused(
            f"source {spec.source!r}", f"raised {type(error).__name__}: {str(error)[:300]}"
        ) from error
    if weights.endswith(".safetensors"):
        _load_file(module, weights)
    elif os.path.isdir(weights):
        _load_commit(module, weights, spec.part)
    return module


def _seed(weights: str) -> int:
    if not weights.startswith("random:"):
        return 0
    seed = weights.removeprefix("random:")
    if not re.fullmatch(r"\d{1,18}", seed):
        raise RegistrationRefused(f"weights {weights!r}", "expected random:SEED with a number")
    return int(seed)


def _load_commit(module: nn.Module, folder: str, part: str) -> None:
    """Load the weights that a job committed; a tied weight is stored under its first name."""
    weights = load_weights(Path(folder))[1]
    target = module.model if isinstance(module, _ByPosition) else module
    state = target.state_dict(keep_vars=True).items()
    first = {id(t): name for name, t in reversed(state) if isinstance(t, torch.Tensor)}
    tensors = {name: tensor for name, tensor in state if first.get(id(tensor)) == name}
    names = match(
        {
            name: (str(t.dtype).removeprefix("torch."), tuple(t.shape))
            for name, t in tensors.items()
        },
        {name: (weight.dtype, weight.shape) for name, weight in weights.items()},
        part,
    )
    with torch.no_grad():
        for name, tensor in tensors.items():
            values = np.array(weights[names[name]].values, order="C")
            tensor.copy_(torch.from_numpy(values).view(tensor.dtype))


def _load_file(module: nn.Module, path: str) -> None:
    from safetensors.torch import load_file

    is_upload = _DIGEST.fullmatch(os.path.basename(path)) is not None
    part = "weights" if is_upload else f"weights {path!r}"  # an upload's path is only a digest
    try:
        check_file(path, part)
        state = load_file(path)
    except PipeSwitchError:
        raise
    except Exception as error:  # OSError, or the safetensors crate's own error
        raise RegistrationRefused(part, f"cannot be read: {error}") from error
    target = module.model if isinstance(module, _ByPosition) else module
    own = target.state_dict()
    state = _unwrapped(state, own)
    for name in state.keys() & own.keys():
        if state[name].is_floating_point() != own[name].is_floating_point():
            actual, expected = (dtype_name(v[name].dtype, part) for v in (state, own))
            raise RegistrationRefused(part, f"{name} is {actual}; the module expects {expected}")
    try:
        keys = target.load_state_dict(state, strict=False)
    except RuntimeError as error:  # a shape differs
        raise RegistrationRefused(part, str(error)[:500]) from error
    missing = set(keys.missing_keys)
    for names in _tied_names(target):
        present = [state[name] for name in names if name in state]
        if not all(torch.equal(one, present[0]) for one in present):
            reason = f"{', '.join(names)} share one weight in the module but differ in the file"
            raise RegistrationRefused(part, reason)
        missing -= set(names if present else ())
    if missing or keys.unexpected_keys:
        lists = [sorted(missing)[:MAX_SHOWN], keys.unexpected_keys[:MAX_SHOWN]]
        texts = [", ".join(names) or "none" for names in lists]
        raise RegistrationRefused(part, f"missing {texts[0]}; unexpected {texts[1]}")


def _unwrapped(state: dict[str, torch.Tensor], own: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return ``state`` without torch.compile's prefixes, and without WRAPPERS if no name fits."""
    state = {n if n in own else n.replace("_orig_mod.", ""): value for n, value in state.items()}
    while state and not state.keys() & own.keys():
        wrapper = next((w for w in WRAPPERS if all(name.startswith(w) for name in state)), "")
        if not wrapper:
            break
        state = {name.removeprefix(wrapper): value for name, value in state.items()}
    return state


def _tied_names(module: nn.Module) -> list[list[str]]:
    """Return all names of each parameter: a file may contain only one name of a tied weight."""
    by_tensor: dict[int, list[str]] = {}
    for name, tensor in module.named_parameters(remove_duplicate=False):
        by_tensor.setdefault(id(tensor), []).append(name)
    return list(by_tensor.values())


def checked_inputs(inputs: OpenShapes) -> tuple[InputShapes, Dynamic]:
    """Return the shapes of example inputs, and the ranges of the open dimensions."""
    if not inputs:
        raise RegistrationRefused("inputs", "this source needs them: --input 8x3x224x224:float32")
    shapes: InputShapes = {}
    dynamic: dict[str, dict[int, Range]] = {}
    for name, (shape, dtype) in inputs.items():
        if dtype not in ITEM_BYTES:
            raise RegistrationRefused(f"input {name!r}", f"dtype {dtype!r} is not known")
        ranges = {axis: extent for axis, extent in enumerate(shape) if not isinstance(extent, int)}
        shapes[name] = (tuple(map(_example, enumerate(shape))), dtype)
        if any(extent < 1 for extent in shapes[name][0]):
            raise RegistrationRefused(f"input {name!r}", f"{shape} has an extent below 1")
        if ranges:
            dynamic[name] = ranges
    return shapes, dynamic


def _example(axis_and_extent: tuple[int, Any]) -> int:
    axis, extent = axis_and_extent
    if isinstance(extent, int):
        return extent
    *_, low, high = extent
    return typical(Dim("", low, high)) if axis else int(low)


def example_specs(inputs: InputShapes) -> list[ValueSpec]:
    """Return the declared inputs as value specs with a fixed shape."""
    return [ValueSpec(name=n, dtype=d, shape=tuple(s)) for n, (s, d) in inputs.items()]
