"""Files that an author put beside a model's weights: each is used, named in a note, or refused.

A folder of Hugging Face holds more than weights. A file that changes the answers and is left out in
silence makes a wrong model, and an error while one is read does not mean that there is none.
"""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

from ...base.errors import RegistrationRefused
from ..spec import BuildSpec

MAX_NAMED: Final = 8  # number of unused files that a note names
MAX_SETTINGS_BYTES: Final = 16 << 20  # a settings file that is larger is damaged
# Files that transformers reads with the weights, beside ``*.safetensors``.
MODEL_FILES: Final = ("config.json", "generation_config.json", "model.safetensors.index.json")
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
ADAPTER: Final = "adapter_config.json"
_SAID: Final = {  # file -> what is left out with it
    "preprocessor_config.json": "requests are not preprocessed: send what the processor returns",
    "processor_config.json": "requests are not preprocessed: send what the processor returns",
    "video_preprocessor_config.json": "requests are not preprocessed",
    "config_sentence_transformers.json": "prompts for queries and documents are not added",
    "sentence_bert_config.json": "texts are neither cut nor changed to lower case",
}
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


_UNREACHED: Final[set[str]] = set()  # hub's names whose hub this build could not reach


def name_of(spec: BuildSpec) -> str:
    """Return the folder or the hub's name of a source ``hf:NAME#CLASS``."""
    return spec.source.partition(":")[2].partition("#")[0]


def find(spec: BuildSpec, file: str) -> Path | None:
    """Return the path of one of the model's files; None if the model does not have it."""
    name = name_of(spec)
    if os.path.isdir(name):
        path = Path(name, file)
        return path if path.exists() or path.is_symlink() else None
    from transformers import utils

    for is_local in (False, True) if spec.weights == "pretrained" else (True,):
        if not is_local and name in _UNREACHED:
            continue
        try:
            path_text = utils.cached_file(
                name, file, local_files_only=is_local, _raise_exceptions_for_missing_entries=False
            )
            return None if path_text is None else Path(path_text)
        except Exception:  # a hub client's errors share no base class
            _UNREACHED.add(name)  # a build asks once: each try takes many seconds
    return None


def settings(spec: BuildSpec, file: str) -> Any:
    """Return the content of a JSON file of the model; None if the model does not have it.

    Raises:
        RegistrationRefused: the file cannot be read.
    """
    path = find(spec, file)
    if path is None:
        return None
    try:
        if not path.is_file():
            raise ValueError("it is not a file")
        if path.stat().st_size > MAX_SETTINGS_BYTES:
            raise ValueError(f"it is larger than {MAX_SETTINGS_BYTES >> 20} MiB")
        return json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _unreadable(file, error) from error


def pooling(spec: BuildSpec) -> str:
    """Return the pooling that sentence-transformers would use; empty if its files name none.

    Several poolings are joined by ``+``, in the order in which their vectors are concatenated.

    Raises:
        RegistrationRefused: a file cannot be read, or names what is not served.
    """
    _refuse_modules(spec)
    config = settings(spec, POOLING)
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
    modules = settings(spec, MODULES)
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


def tokenizer(spec: BuildSpec) -> tuple[Any, list[str]]:
    """Return the model's fast tokenizer, or None, and notes for people.

    A tokenizer that needs a package that is not installed, or its author's code, is named in a
    note: prompts are then token ids.

    Raises:
        RegistrationRefused: it has files of a tokenizer that cannot be read.
    """
    files = [file for file in VOCABULARIES if find(spec, file) is not None]
    if not files:
        return None, []
    from transformers import AutoTokenizer

    loader: Any = AutoTokenizer  # untyped upstream
    names, why = ", ".join(files), ""
    try:
        fast = loader.from_pretrained(
            name_of(spec), local_files_only=spec.weights != "pretrained", trust_remote_code=False
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
        if not (_needs_more(spec) or isinstance(error, ImportError) or _lacks_package(files)):
            raise RegistrationRefused(
                "tokenizer",
                f"{names} cannot be read: {why}",
                hint="save it again with tokenizer.save_pretrained(FOLDER), or remove these files "
                "to serve token ids",
            ) from error
    return None, [f"{names}: prompts are token ids, because {why}"]


def _needs_more(spec: BuildSpec) -> bool:
    """Return True if the tokenizer is code of its author, which never runs here."""
    config = settings(spec, "tokenizer_config.json")
    return isinstance(config, dict) and "auto_map" in config


def _lacks_package(files: Iterable[str]) -> bool:
    """Return True if all files are SentencePiece's and its library is not installed."""
    is_piece = all(file.endswith(".model") for file in files)
    return is_piece and importlib.util.find_spec("sentencepiece") is None


def refuse_adapter(spec: BuildSpec) -> None:
    """Refuse an adapter beside the weights: the answers would be those of the base alone."""
    if spec.weights == "pretrained" and find(spec, ADAPTER) is not None:
        raise RegistrationRefused(
            ADAPTER,
            "the folder has an adapter beside the weights, which would not be applied",
            hint="merge it: peft's merge_and_unload(), then save_pretrained(FOLDER); or remove "
            f"{ADAPTER} to serve the base",
        )


def notes(spec: BuildSpec, *, has_tokenizer: bool, has_pooling: bool) -> list[str]:
    """Return notes that name each file of a local folder that is not used."""
    folder = Path(name_of(spec))
    if not folder.is_dir():
        is_unsure = spec.weights == "pretrained" and name_of(spec) in _UNREACHED
        return ["the hub was not reached: a file that is not in the cache was not used"] * is_unsure
    used = {*MODEL_FILES} if spec.generate else {*MODEL_FILES} - {"generation_config.json"}
    used |= {*TOKENIZER_FILES} if has_tokenizer else set()
    used |= {"1_Pooling", "2_Normalize", MODULES} if has_pooling else set()
    own_path = Path(spec.weights or "")
    own = {own_path.name} if own_path.parent.resolve() == folder.resolve() else set[str]()
    weights = _weights(folder) if spec.weights == "pretrained" else own
    unused = sorted({one.name for one in folder.iterdir()} - used - weights)
    explained = [f"{file}: {_SAID[file]}" for file in unused if file in _SAID]
    others = [file for file in unused if file not in _SAID and not file.startswith(".")]
    return explained + ([_listed(others)] if others else [])


def _weights(folder: Path) -> set[str]:
    """Return the weights that transformers reads: one file, or all files of the index."""
    if (folder / "model.safetensors").exists():
        return {"model.safetensors"}
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            return {*json.loads(index.read_text("utf-8"))["weight_map"].values()}
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ) as error:
            raise _unreadable(index.name, error) from error
    return {one.name for one in folder.glob("*.safetensors")}


def _listed(files: Iterable[str]) -> str:
    names = [*files]
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"not used: {', '.join(names[:MAX_NAMED])}{more}"


def _unreadable(file: str, error: Exception) -> RegistrationRefused:
    return RegistrationRefused(
        file,
        f"it cannot be read: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}",
        hint="repair the file, or remove it if the model does not need it",
    )
