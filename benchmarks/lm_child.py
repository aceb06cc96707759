"""Process that writes language models, or measures ``generate()`` of the transformers library.

``write`` creates models from configurations and saves them. ``serve`` imports transformers, loads a
model and answers lines of JSON; the stop-and-start baseline starts it anew for each switch.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any, Final

from .trials import now_ms, say

FIRST_LETTER: Final = 0x20000  # token 0's character, four bytes long; equal in ``peer_child.py``
STARTED_AT_MS = time.monotonic() * 1000


def write(order: dict[str, Any]) -> None:
    """Write a GPT-2 model of the order's size to each folder, each with different weights."""
    import torch
    import transformers

    for seed, folder in enumerate(order["folders"]):
        torch.manual_seed(seed)
        config = transformers.GPT2Config(
            vocab_size=order["vocabulary"],
            n_positions=order["context"],
            n_embd=order["hidden"],
            n_layer=order["layers"],
            n_head=8,
            bos_token_id=None,
            eos_token_id=None,
        )
        transformers.GPT2LMHeadModel(config).save_pretrained(folder)
        if order.get("has_letters"):
            letters(order["vocabulary"]).save_pretrained(folder)
    say(bytes=sum(file.stat().st_size for file in Path(order["folders"][0]).iterdir()))


def letters(count: int) -> Any:
    """Return a tokenizer with one character per token, so that a text shows its tokens."""
    import transformers
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer: Any = Tokenizer(
        models.WordLevel(
            {chr(FIRST_LETTER + token): token for token in range(count)},
            unk_token=chr(FIRST_LETTER),
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def serve(order: dict[str, Any]) -> None:
    """Answer lines with ``ids`` (token ids of each prompt) and ``new`` (number of new tokens)."""
    import torch
    import transformers

    warnings.simplefilter("ignore")
    torch.set_num_threads(order["threads"])
    device = order.get("device", "cpu")
    model = transformers.GPT2LMHeadModel.from_pretrained(order["folders"][0]).eval().to(device)
    for line in sys.stdin:
        request = json.loads(line)
        ids = torch.tensor(request["ids"], device=device)
        began_ms = now_ms()
        with torch.no_grad():
            output = model.generate(ids, max_new_tokens=request["new"], do_sample=False)
        took_ms = now_ms() - began_ms
        say(
            tokens=output[:, ids.shape[1] :].tolist(),
            took_ms=took_ms,
            since_start_ms=now_ms() - STARTED_AT_MS,
        )


if __name__ == "__main__":
    {"write": write, "serve": serve}[sys.argv[1]](json.loads(sys.argv[2]))
