"""A tokenizer, trained on the texts that scikit-learn ships with its data sets."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def trained(kind: str) -> Any:
    """Of GPT-2's kind ("bytes"), or of Llama's ("fallback"): words with their space, and bytes
    where a word is unknown."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    spec = find_spec("sklearn")  # not imported: it sets the environment
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "datasets" / "descr"
    texts = [file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.rst"))]
    found: Any
    if kind == "bytes":
        found = tokenizers.Tokenizer(models.BPE())
        found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        found.decoder = decoders.ByteLevel()
        special, alphabet = ["<end>"], pre_tokenizers.ByteLevel.alphabet()
    else:
        found = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        found.normalizer = tokenizers.normalizers.Replace(" ", "▁")
        found.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        special, alphabet = ["<end>", "<unk>"], ["▁"]
        texts = [word for text in texts for word in text.split()]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    found.train_from_iterator(texts, trainer)
    if kind == "fallback":  # byte tokens are words of the vocabulary, not special ones
        text = json.loads(found.to_str())
        vocabulary = text["model"]["vocab"]
        for byte in range(256):
            vocabulary.setdefault(f"<0x{byte:02X}>", len(vocabulary))
        found = tokenizers.Tokenizer.from_str(json.dumps(text))
    return found
