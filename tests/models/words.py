"""A tokenizer, trained on the texts that scikit-learn ships with its data sets."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any


def trained(kind: str) -> Any:
    """Train and return a tokenizer like GPT-2's (``bytes``) or Llama's (``fallback``). A word
    includes the space before it, and unknown words become bytes."""
    import tokenizers
    from tokenizers import decoders, models, pre_tokenizers

    spec = find_spec("sklearn")  # does not import sklearn, which would change the environment
    assert spec is not None
    assert spec.origin is not None
    folder = Path(spec.origin).parent / "datasets" / "descr"
    texts = [file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.rst"))]
    tokenizer: Any
    if kind == "bytes":
        tokenizer = tokenizers.Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        special, alphabet = ["<end>"], pre_tokenizers.ByteLevel.alphabet()
    else:
        tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
        tokenizer.normalizer = tokenizers.normalizers.Replace(" ", "▁")
        tokenizer.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        )
        special, alphabet = ["<end>", "<unk>"], ["▁"]
        texts = [word for text in texts for word in text.split()]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=700, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    if kind == "fallback":  # byte tokens are ordinary words of the vocabulary, not special tokens
        text = json.loads(tokenizer.to_str())
        vocabulary = text["model"]["vocab"]
        for byte in range(256):
            vocabulary.setdefault(f"<0x{byte:02X}>", len(vocabulary))
        tokenizer = tokenizers.Tokenizer.from_str(json.dumps(text))
    return tokenizer


def published(folder: Path, cls: Any, kind: str = "qwen2", scale: float = 1.0, **more: Any) -> Any:
    """Save a small transformers model and its tokenizer in ``folder``; return the tokenizer."""
    import torch
    import transformers

    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model(
        kind,
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=128,
        vocab_size=700,
        max_position_embeddings=2048,
        num_key_value_heads=2,
        bos_token_id=0,
        eos_token_id=None,
    )
    model = cls.from_config(config).eval()
    for parameter in model.parameters():
        parameter.data.mul_(scale if parameter.dim() > 1 else 1.0)
    model.save_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=trained("bytes"), **more)
    tokenizer.save_pretrained(folder)
    return tokenizer
