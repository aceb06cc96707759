"""Builders of language models and of models that embed texts (``BUILDERS``)."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from ...base.errors import RegistrationRefused
from ...base.machine import available_bytes
from ...base.units import format_bytes
from ...programs.compiler.export import WrappedModel, first_line
from ...programs.compiler.model_folder import find, gguf_of, name_of, settings_in, unused_files
from ...programs.interface.layout import KindSettings
from ...programs.interface.odd_files import AGAIN, check_file
from ...programs.spec import BuildSpec
from .decoder import decoder, refuse_encoder
from .decoding.generation_settings import (
    VERSION,
    GenerationSettings,
    packed_tokenizer,
    tokenizer_text,
)

# Any of these holds a tokenizer's vocabulary; transformers converts the older forms.
VOCABULARIES: Final = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "spm.model",
    "sentencepiece.bpe.model",
    "tekken.json",
)
TOKENIZER_FILES: Final = (
    *VOCABULARIES,
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "chat_template.json",
    "chat_template.jinja",
    "additional_chat_templates",
)
POOLING: Final = "1_Pooling/config.json"
MODULES: Final = "modules.json"
EMBEDDING_FILES: Final = (*TOKENIZER_FILES, "1_Pooling", "2_Normalize", MODULES)
_MODES: Final = {  # sentence-transformers' name of a pooling -> ours, in its order of concatenation
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
    "weightedmean": "weightedmean",
    "lasttoken": "last",
}
_FLAGS: Final = {  # the same in files before release 5.4
    f"pooling_mode_{mode if mode.endswith('_tokens') else mode + end}": mode
    for mode, end in zip(_MODES, ("_token", "_tokens", "_tokens", "", "_tokens", ""), strict=True)
}


class DecoderBuilder:
    """Builder of language models, for the option ``generate`` (``export.Builder``)."""

    def auto_class(self, config: Any) -> Any:
        from transformers import AutoModelForCausalLM

        refuse_encoder(config)
        return AutoModelForCausalLM

    def wrap(self, model: Any) -> WrappedModel:
        module = decoder(model)
        return WrappedModel(
            module, module.example(), module.dynamic(), module.notes, module.generation
        )

    def read_folder(self, wrapped: WrappedModel, spec: BuildSpec) -> tuple[KindSettings, list[str]]:
        tokenizer, notes = read_tokenizer(spec)
        files = () if tokenizer is None else TOKENIZER_FILES
        if gguf := gguf_of(spec):
            notes += gguf_notes(spec)
        notes += unused_files(spec, ["generation_config.json", *files, *gguf.values()])
        return wrapped.settings(tokenizer), notes


def gguf_notes(spec: BuildSpec) -> list[str]:
    """Return a note that says what becomes of a GGUF file's weights.

    Raises:
        RegistrationRefused: a package or the file is missing, it is damaged, or lacks ``generate``.
    """
    name = gguf_of(spec)["gguf_file"]
    path = find(spec, name)
    missing = [one for one in ("gguf", "accelerate") if importlib.util.find_spec(one) is None]
    if path is None or not path.is_file():
        raise RegistrationRefused(name, "there is no such file", hint="hf:FOLDER/FILE.gguf")
    if not spec.generate:
        hint = f"pipeswitch register {spec.name} {spec.source} --generate"
        raise RegistrationRefused(name, "a GGUF file needs --generate", hint=hint)
    if missing:
        why = f"{' and '.join(missing)} not installed"
        raise RegistrationRefused(name, why, hint="pip install 'pipeswitch[gguf]'")
    return _read_gguf(path, name)


@functools.cache
def _read_gguf(path: Path, name: str) -> list[str]:
    check_file(path, name)
    try:
        tensors = importlib.import_module("gguf").GGUFReader(path).tensors
        kinds = sorted({one.tensor_type.name for one in tensors})
        held_bytes = sum(int(one.n_bytes) for one in tensors)
        plain_bytes = sum(4 * int(one.n_elements) for one in tensors)
    except Exception as error:  # numpy's or gguf's, which defines no error class
        why = f"it is cut short or damaged ({first_line(error)[:80]})"
        raise RegistrationRefused(name, why, hint=AGAIN) from None
    if plain_bytes > (free_bytes := available_bytes()):
        why = f"as float32 its weights take {format_bytes(plain_bytes)}"
        hint = f"{format_bytes(free_bytes)} of memory are available: give a smaller model"
        raise RegistrationRefused(name, why, hint=hint)
    note = f"{name}: its weights ({', '.join(kinds)}) are taken as float32"
    sizes = f"{format_bytes(plain_bytes)} instead of {format_bytes(held_bytes)}"
    return [f"{note}, {sizes}; --precision int8 or bf16 makes them smaller"]


def embedding(
    spec: BuildSpec, model: Any, longest: int
) -> tuple[GenerationSettings | None, list[str]]:
    """Return the settings of a model that embeds texts, and notes on the files of its folder.
    Without a tokenizer there are no settings. A text has at most ``longest`` tokens."""
    tokenizer, notes = read_tokenizer(spec)
    embeds = tokenizer is not None and model.base_model is model  # others have a head
    notes += unused_files(spec, EMBEDDING_FILES if embeds else ())
    if tokenizer is None:
        return None, notes
    is_causal = any(getattr(part, "is_causal", False) for part in model.modules())
    settings = GenerationSettings(
        version=VERSION,
        vocabulary=model.get_input_embeddings().weight.shape[0],
        context=longest + 1,  # so that a prompt of the longest length is allowed
        tokenizer=packed_tokenizer(tokenizer_text(tokenizer)),
        pooling=(embeds and pooling(spec)) or ("last" if is_causal else "mean"),
    )
    return settings, notes


def pooling(spec: BuildSpec) -> str:
    """Return the pooling that sentence-transformers would use; empty if its files name none.

    Several poolings are joined by ``+``, in the order in which their vectors are concatenated.

    Raises:
        RegistrationRefused: a file cannot be read, or names what is not served.
    """
    _refuse_modules(spec)
    config = settings_in(spec, POOLING)
    if config is None:
        return ""
    if not isinstance(config, dict):
        raise RegistrationRefused(POOLING, "it is not an object")
    named = config.get("pooling_mode")
    modes = [named] if isinstance(named, str) else named or []
    if not isinstance(modes, list) or not all(isinstance(mode, str) for mode in modes):
        raise RegistrationRefused(POOLING, f"pooling_mode is {str(named)[:80]!r}")
    modes = [*modes]
    modes += [mode for flag, mode in _FLAGS.items() if not modes and config.get(flag)]
    unknown = [str(mode) for mode in modes if mode not in _MODES]
    unknown += [key for key in config if key.startswith("pooling_mode_") and key not in _FLAGS]
    if unknown:
        raise RegistrationRefused(
            POOLING,
            f"its pooling {', '.join(unknown)[:80]!r} is not served",
            hint=f"served: {', '.join(_MODES)}",
        )
    return "+".join(_MODES[mode] for mode in _MODES if mode in modes)


def _refuse_modules(spec: BuildSpec) -> None:
    """Refuse a model whose embedding passes more layers than transformer, pooling and norm."""
    modules = settings_in(spec, MODULES)
    if modules is None:
        return
    if not isinstance(modules, list) or not all(isinstance(one, dict) for one in modules):
        raise RegistrationRefused(MODULES, "it is not a list of modules")
    for number, module in enumerate(modules):
        kind = str(module.get("type", "")).rpartition(".")[2]
        if kind not in ("Transformer", "Pooling", "Normalize") or (
            kind != "Normalize" and number != ("Transformer", "Pooling").index(kind)
        ):
            raise RegistrationRefused(
                MODULES,
                f"its module {str(module.get('path'))[:80]!r} ({kind[:80]}) is not served",
                hint="register a module of your own that computes the whole embedding",
            )
        if kind == "Pooling" and module.get("path") != "1_Pooling":
            raise RegistrationRefused(MODULES, "its pooling is not in the folder 1_Pooling")


def read_tokenizer(spec: BuildSpec) -> tuple[Any, list[str]]:
    """Return the model's fast tokenizer, or None, and notes for people.

    A tokenizer that needs a package that is not installed, or its author's code, is named in a
    note: prompts are then token ids.

    Raises:
        RegistrationRefused: it has files of a tokenizer that cannot be read.
    """
    gguf = gguf_of(spec)
    files = [*gguf.values()] or [file for file in VOCABULARIES if find(spec, file) is not None]
    if not files:
        return None, []
    from transformers import AutoTokenizer

    loader: Any = AutoTokenizer  # untyped upstream
    names, why = ", ".join(files), ""
    try:
        fast = loader.from_pretrained(
            name_of(spec),
            local_files_only=spec.weights != "pretrained",
            trust_remote_code=False,
            **gguf,
        )
        if not fast.is_fast:
            why = f"{type(fast).__name__} has no fast form"
        elif len(fast.get_vocab()) > len({*fast.all_special_tokens}):
            return fast, []
        elif not {*files} & {*fast.vocab_files_names.values(), "tokenizer.json"}:
            why = f"{type(fast).__name__} reads other files"
        else:
            raise ValueError("no vocabulary was found")
    except Exception as error:  # a file may raise any error
        why = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"
        if not (
            gguf or _needs_more(spec) or isinstance(error, ImportError) or _lacks_package(files)
        ):
            raise RegistrationRefused(
                "tokenizer",
                f"{names} cannot be read: {why}",
                hint="save it again with tokenizer.save_pretrained(FOLDER), or remove these files "
                "to serve token ids",
            ) from error
    return None, [f"{names}: prompts are token ids, because {why}"]


def _needs_more(spec: BuildSpec) -> bool:
    """Return True if the tokenizer is code of its author, which never runs here."""
    config = settings_in(spec, "tokenizer_config.json")
    return isinstance(config, dict) and "auto_map" in config


def _lacks_package(files: Iterable[str]) -> bool:
    is_piece = all(file.endswith(".model") for file in files)
    return is_piece and importlib.util.find_spec("sentencepiece") is None
