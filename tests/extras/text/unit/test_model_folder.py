"""Each file of a model's folder is used, named in a note, or refuses the registration."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

from pipeswitch.base.errors import RegistrationRefused
from pipeswitch.base.model_options import RegisterRequest
from pipeswitch.client.model_sources import LocalSource
from pipeswitch.extras.text import builders
from pipeswitch.extras.text.embeddings import pooled
from pipeswitch.frontend.registration import registration
from pipeswitch.programs.compiler import model_folder
from pipeswitch.programs.compiler.sources import load_source
from pipeswitch.programs.spec import BuildSpec
from pipeswitch.scheduler.state.events import RegisterModelRequest, Token

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())


def spec_of(folder: Path, **fields: Any) -> BuildSpec:
    values = {"name": "m", "source": f"hf:{folder}", "weights": "pretrained"} | fields
    return BuildSpec(**values)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = transformers.BertConfig(
        vocab_size=300,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    transformers.BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    for one in saved.iterdir():
        (tmp_path / one.name).write_bytes(one.read_bytes())
    return tmp_path


def byte_level(folder: Path) -> None:
    made = Tokenizer(models.BPE(vocab={one: n for n, one in enumerate(LETTERS)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made)
    fast.save_pretrained(folder)


def vocabulary_and_merges(folder: Path) -> None:
    (folder / "vocab.json").write_text(json.dumps({one: n for n, one in enumerate(LETTERS)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')


def word_pieces(folder: Path) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "fox", "##es"]
    (folder / "vocab.txt").write_text("\n".join(words))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')


@pytest.mark.parametrize("write", [byte_level, vocabulary_and_merges, word_pieces])
def test_a_tokenizer_of_any_form_is_used(folder: Path, write: Callable[[Path], None]) -> None:
    write(folder)
    loaded = load_source(spec_of(folder))
    assert loaded.settings is not None
    assert loaded.settings.tokenizer
    assert not loaded.notes


def test_without_a_tokenizer_the_model_takes_ids_and_no_file_is_named(folder: Path) -> None:
    loaded = load_source(spec_of(folder))
    assert (loaded.settings, loaded.notes) == (None, [])


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"[]"])
def test_a_tokenizer_that_cannot_be_read_refuses(folder: Path, content: bytes) -> None:
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(RegistrationRefused, match=r"tokenizer\.json"):
        load_source(spec_of(folder))


@pytest.mark.parametrize("file", ["tokenizer.model", "spiece.model", "spm.model", "vocab.json"])
def test_a_tokenizer_that_cannot_be_made_here_is_named(folder: Path, file: str) -> None:
    """Its package may not be installed, or its class reads other files."""
    (folder / file).write_bytes(b"{}")
    assert any(file in note for note in load_source(spec_of(folder)).notes)


def test_a_tokenizer_of_its_authors_code_is_named(folder: Path) -> None:
    (folder / "vocab.txt").write_text("a")
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(own))
    assert any("vocab.txt" in note for note in load_source(spec_of(folder)).notes)


POOLINGS = [
    ({"pooling_mode": "cls", "embedding_dimension": 32, "include_prompt": True}, "cls"),
    ({"pooling_mode": "lasttoken"}, "last"),
    ({"pooling_mode": ["mean", "cls"]}, "cls+mean"),
    ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
    ({"pooling_mode_mean_tokens": True}, "mean"),
    ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False}, "max"),
    ({"pooling_mode_mean_sqrt_len_tokens": True}, "mean_sqrt_len"),
    ({"pooling_mode_weightedmean_tokens": True}, "weightedmean"),
    ({"pooling_mode_lasttoken": True}, "last"),
    ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, "cls+mean"),
]


def write_pooling(folder: Path, content: str) -> None:
    (folder / "1_Pooling").mkdir()
    (folder / builders.POOLING).write_text(content)


@pytest.mark.parametrize(("config", "expected"), POOLINGS)
def test_each_pooling_of_sentence_transformers_is_followed(
    tmp_path: Path, config: dict[str, Any], expected: str
) -> None:
    write_pooling(tmp_path, json.dumps(config))
    assert builders.pooling(spec_of(tmp_path)) == expected


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        '{"pooling_mode": "attention"}',
        '{"pooling_mode": 5}',
        '{"pooling_mode": true}',
        '{"pooling_mode": [["mean"]]}',
        '{"pooling_mode_new": true}',
    ],
)
def test_another_pooling_is_refused(tmp_path: Path, content: str) -> None:
    write_pooling(tmp_path, content)
    with pytest.raises(RegistrationRefused, match="1_Pooling"):
        builders.pooling(spec_of(tmp_path))


def test_poolings_are_those_of_their_names() -> None:
    hidden = np.array([[1.0, -2.0], [3.0, 0.0], [-4.0, 5.0]], np.float32)
    rows = {
        "cls": hidden[0],
        "max": [3.0, 5.0],
        "mean": hidden.mean(0),
        "mean_sqrt_len": hidden.sum(0) / np.sqrt(3),
        "weightedmean": (hidden * [[1], [2], [3]]).sum(0) / 6,
        "last": hidden[2],
    }
    for name, row in [*rows.items(), ("cls+mean", np.concatenate([rows["cls"], rows["mean"]]))]:
        facts: Any = SimpleNamespace(pooling=name)
        got = pooled(hidden, facts)
        assert np.allclose(got, np.asarray(row) / np.linalg.norm(row), atol=1e-6), name


def modules_of(*kinds: str) -> str:
    paths = [f"{n}_{kind}" if n else "" for n, kind in enumerate(kinds)]
    return json.dumps(
        [
            {"idx": n, "path": path, "type": f"sentence_transformers.models.{kind}"}
            for n, (path, kind) in enumerate(zip(paths, kinds, strict=True))
        ]
    )


@pytest.mark.parametrize(
    ("text", "is_served"),
    [
        (modules_of("Transformer", "Pooling"), True),
        (modules_of("Transformer", "Pooling", "Normalize"), True),
        (modules_of("Transformer", "Pooling", "Dense"), False),
        (modules_of("Transformer", "Pooling", "Dense", "Dense", "Normalize"), False),
        (modules_of("Transformer", "Pooling", "LayerNorm"), False),
        (modules_of("WordEmbeddings", "Pooling"), False),
        (modules_of("Transformer", "Dense", "Pooling"), False),
        (modules_of("Pooling", "Transformer"), False),
        ("{}", False),
        ("[1]", False),
        ("", False),
    ],
)
def test_layers_behind_the_pooling_are_refused_by_name(
    folder: Path, text: str, is_served: bool
) -> None:
    byte_level(folder)
    write_pooling(folder, '{"pooling_mode": "mean"}')
    (folder / builders.MODULES).write_text(text)
    if is_served:
        assert load_source(spec_of(folder)).notes == []
    else:
        with pytest.raises(RegistrationRefused, match=r"modules\.json"):
            load_source(spec_of(folder))


def test_a_hub_that_cannot_be_reached_is_asked_once_and_named(
    saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def cached_file(name: str, file: str, *, local_files_only: bool, **_: Any) -> str | None:
        if not local_files_only:
            asked.append(file)
            raise OSError("no network")
        path = saved / file
        return str(path) if path.exists() else None

    monkeypatch.setattr(transformers.utils, "cached_file", cached_file)
    monkeypatch.setattr(model_folder, "_UNREACHED", set())
    spec = BuildSpec(name="m", source="hf:some/model", weights="pretrained")
    assert model_folder.find(spec, "config.json") == saved / "config.json"
    assert builders.pooling(spec) == ""
    assert len(asked) == 1
    (note,) = model_folder.unused_files(spec)
    assert "not reached" in note


def test_an_adapter_is_refused_beside_weights_and_named_beside_random_ones(folder: Path) -> None:
    (folder / model_folder.ADAPTER).write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(RegistrationRefused, match="adapter"):
        load_source(spec_of(folder))
    assert any("adapter" in note for note in load_source(spec_of(folder, weights="random:1")).notes)


@pytest.mark.parametrize(
    "file",
    [
        "pytorch_model.bin",
        "tf_model.h5",
        "flax_model.msgpack",
        "consolidated.safetensors",
        "preprocessor_config.json",
        "config_sentence_transformers.json",
        "sentence_bert_config.json",
        "generation_config.json",
        "modeling_own.py",
        "README.md",
        "onnx/model.onnx",
        "2_Dense/config.json",
        "what.ever",
    ],
)
def test_a_file_that_is_not_used_is_named(folder: Path, file: str) -> None:
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_bytes(b"{}")
    notes = load_source(spec_of(folder)).notes
    assert any(Path(file).parts[0] in note for note in notes), notes


def test_a_classifiers_tokenizer_is_named_because_its_requests_are_ids(folder: Path) -> None:
    config = transformers.BertConfig.from_pretrained(folder)
    transformers.BertForSequenceClassification(config).save_pretrained(folder)
    byte_level(folder)
    assert "tokenizer.json" in " ".join(load_source(spec_of(folder)).notes)


# -- a source that was saved again is another registration -----------------------------------------


def digest_of(source: str, **fields: Any) -> str:
    event = registration(Token(1), "m", RegisterRequest(source=source, **fields))
    assert isinstance(event, RegisterModelRequest)
    return event.spec_digest


def later(path: Path) -> None:
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


@pytest.mark.parametrize(
    "file", ["model.safetensors", "config.json", "tokenizer.json", "1_Pooling/config.json"]
)
@pytest.mark.parametrize("mark", ["", "#BertModel"])
def test_a_folder_that_was_saved_again_is_another_source(
    folder: Path, file: str, mark: str
) -> None:
    byte_level(folder)
    write_pooling(folder, "{}")
    source = f"hf:{folder}{mark}"
    before = digest_of(source, weights="pretrained")
    assert digest_of(source, weights="pretrained") == before
    later(folder / file)
    assert digest_of(source, weights="pretrained") != before


def test_a_factory_whose_code_was_edited_is_another_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "single_file_of_mine.py").write_text("raise SystemExit('not imported')")
    (tmp_path / "package_of_mine/a/b").mkdir(parents=True)
    (tmp_path / "single_file_of_mine").mkdir()  # data beside the module
    for name in ("__init__.py", "nets.py", "a/b/deep.py"):
        (tmp_path / "package_of_mine" / name).write_text("raise SystemExit('not imported')")
    for source, file in (
        ("single_file_of_mine:net", "single_file_of_mine.py"),
        ("package_of_mine.nets:net", "package_of_mine/nets.py"),
        ("package_of_mine.nets:net", "package_of_mine/__init__.py"),
        ("package_of_mine.a.b.deep:net", "package_of_mine/a/b/deep.py"),
    ):
        before = digest_of(source)
        assert digest_of(source) == before
        later(tmp_path / file)
        assert digest_of(source) != before


@pytest.mark.parametrize(
    "file", ["runs/events", "checkpoint-5/optimizer.pt", "README.md", "x.lock"]
)
def test_a_file_that_no_build_reads_does_not_count(folder: Path, file: str) -> None:
    before = digest_of(f"hf:{folder}", weights="pretrained")
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_bytes(b"x")
    assert digest_of(f"hf:{folder}", weights="pretrained") == before


def test_a_file_with_another_name_is_another_source(folder: Path) -> None:
    (folder / "generation_config.json").write_text("{}")
    before = digest_of(f"hf:{folder}", weights="pretrained")
    (folder / "generation_config.json").rename(folder / "generation_config.off.json")
    assert digest_of(f"hf:{folder}", weights="pretrained") != before


def test_a_name_of_a_hub_or_a_folder_that_is_gone_has_no_files() -> None:
    for source in ("hf:bert-base-uncased", "hf:/no/such/folder", "no_such_module_of_mine:net"):
        assert digest_of(source) == digest_of(source)


@pytest.mark.parametrize("value", [0.5, True, 3])
def test_an_example_without_dimensions_keeps_none(value: object) -> None:
    seen: dict[str, np.ndarray[Any, Any]] = {}

    def upload(path: Any, kind: str, progress: Any) -> str:
        from safetensors.numpy import load_file

        seen.update(load_file(path))
        return "put:x"

    example = {"x": torch.ones(2, 4), "t": torch.tensor(value)}
    source = LocalSource("own_models:net", example)
    with source.sent(RegisterRequest(source=""), upload, None) as request:
        assert request.inputs["t"][0] == ()
    assert seen["t"].shape == ()
