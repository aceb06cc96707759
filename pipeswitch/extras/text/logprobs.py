"""Log probabilities in OpenAI's forms: one for chats, an older one for completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...base.errors import InvalidInput
from ...programs.decoding.model_config import Token, TokenName


def requested(logprobs: bool | int | None, top: int | None, *, is_chat: bool) -> int | None:
    """Return the number of likeliest tokens to report for each token; None: report nothing.

    ``logprobs`` is a flag for a chat, and a number for a completion; only a chat has ``top``.
    """
    is_absent = logprobs is None or logprobs is False
    if top and (is_absent or not is_chat):
        raise InvalidInput("top_logprobs needs a chat with logprobs: true", param="top_logprobs")
    if not is_absent and is_chat is not isinstance(logprobs, bool):
        form = "true or false, together with top_logprobs" if is_chat else "a number from 0 to 20"
        raise InvalidInput(f"logprobs is {form}", param="logprobs")
    return None if is_absent else top or 0 if is_chat else logprobs


def of_chat(tokens: Sequence[Token], names: Mapping[int, TokenName]) -> dict[str, Any]:
    """Return the ``logprobs`` of a chat's choice. ``names`` has each token's text and bytes."""

    def entry(id: int, logprob: float | None) -> dict[str, Any]:
        text, data = names[id]
        return {"token": text, "logprob": logprob, "bytes": None if data is None else [*data]}

    rows = [
        {**entry(one.id, one.logprob), "top_logprobs": [entry(*other) for other in one.top]}
        for one in tokens
    ]
    return {"content": rows, "refusal": None}


def of_text(tokens: Sequence[Token], names: Mapping[int, TokenName], offset: int) -> dict[str, Any]:
    """Return the ``logprobs`` of a completion's choice, whose first token begins at ``offset``.

    The prompt's first token has no log probability, so its entry is null.
    """
    texts, offsets, tops = [names[one.id][0] for one in tokens], [], []
    for text, one in zip(texts, tokens, strict=True):
        offsets.append(offset)
        offset += len(text)
        top: dict[str, float] = {}
        own = [] if one.logprob is None else [(one.id, one.logprob)]
        for id, logprob in (*one.top, *own):  # the likelier one of two equal texts comes first
            top.setdefault(names[id][0], logprob)
        tops.append(top or None)
    return {
        "tokens": texts,
        "token_logprobs": [one.logprob for one in tokens],
        "top_logprobs": tops,
        "text_offset": offsets,
    }
