"""Files that an author put beside a model's weights: each is used, named in a note, or refused.

A folder of Hugging Face holds more than weights. A file that changes the answers and is left out in
silence makes a wrong model, and an error while one is read does not mean that there is none.
"""

from __future__ import annotations

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
MODEL_FILES: Final = ("config.json", "model.safetensors.index.json")
GGUF: Final = ".gguf"
ADAPTER: Final = "adapter_config.json"
_SAID: Final = {  # file -> what is left out with it
    "preprocessor_config.json": "requests are not preprocessed: send what the processor returns",
    "processor_config.json": "requests are not preprocessed: send what the processor returns",
    "video_preprocessor_config.json": "requests are not preprocessed",
    "config_sentence_transformers.json": "prompts for queries and documents are not added",
    "sentence_bert_config.json": "texts are neither cut nor changed to lower case",
}
_UNREACHED: Final[set[str]] = set()  # hub's names whose hub this build could not reach


def name_of(spec: BuildSpec) -> str:
    """Return the folder or the hub's name of a source ``hf:NAME#CLASS``; for GGUF, its folder."""
    name = spec.source.partition(":")[2].partition("#")[0]
    return os.path.dirname(name) if name.endswith(GGUF) else name


def gguf_of(spec: BuildSpec) -> dict[str, str]:
    """Return transformers' argument for a GGUF file, or for a folder that has no config.json.

    Raises:
        RegistrationRefused: the folder has several.
    """
    name = spec.source.partition(":")[2].partition("#")[0]
    files = [os.path.basename(name)] if name.endswith(GGUF) else []
    if not files and os.path.isdir(name) and not os.path.exists(os.path.join(name, MODEL_FILES[0])):
        files = sorted(one for one in os.listdir(name) if one.endswith(GGUF))
    if len(files) > 1:
        why = listed(files, "it has several GGUF files: ")
        raise RegistrationRefused(f"source hf:{name}", why, hint=f"name one: hf:{name}/{files[0]}")
    return {"gguf_file": files[0]} if files else {}


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


def settings_in(spec: BuildSpec, file: str) -> Any:
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


def refuse_adapter(spec: BuildSpec) -> None:
    """Refuse an adapter beside the weights: the answers would be those of the base alone."""
    if spec.weights == "pretrained" and find(spec, ADAPTER) is not None:
        raise RegistrationRefused(
            ADAPTER,
            "the folder has an adapter beside the weights, which would not be applied",
            hint="move the adapter into a folder of its own, and name that: --adapter FOLDER",
        )


def unused_files(spec: BuildSpec, used: Iterable[str] = ()) -> list[str]:
    """Return notes that name each unused file of a local folder.
    ``used`` has the names of files that an extra uses."""
    folder = Path(name_of(spec))
    if spec.source.partition("#")[0].endswith(GGUF):
        return []  # the source is one file
    if not folder.is_dir():
        is_unsure = spec.weights == "pretrained" and name_of(spec) in _UNREACHED
        return ["the hub was not reached: a file that is not in the cache was not used"] * is_unsure
    own_path = Path(spec.weights or "")
    own = {own_path.name} if own_path.parent.resolve() == folder.resolve() else set[str]()
    weights = _weights(folder) if spec.weights == "pretrained" else own
    unused = sorted({one.name for one in folder.iterdir()} - {*MODEL_FILES, *used} - weights)
    explained = [f"{file}: {_SAID[file]}" for file in unused if file in _SAID]
    others = [file for file in unused if file not in _SAID and not file.startswith(".")]
    return explained + ([listed(others)] if others else [])


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


def listed(files: Iterable[str], what: str = "not used: ") -> str:
    """Return a text that names the first files or tensors."""
    names = [*files]
    more = f" and {len(names) - MAX_NAMED} more" if len(names) > MAX_NAMED else ""
    return f"{what}{', '.join(names[:MAX_NAMED])}{more}"


def _unreadable(file: str, error: Exception) -> RegistrationRefused:
    return RegistrationRefused(
        file,
        f"it cannot be read: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}",
        hint="repair the file, or remove it if the model does not need it",
    )
