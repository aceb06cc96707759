"""Embeddings of texts: hidden states of a model that was registered with its tokenizer."""

from __future__ import annotations

import asyncio
import base64
from array import array
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...base.errors import InvalidInput
from ...base.roles import Principal
from ...client.tensors import to_frames
from ...gateway.http.http_parser import Head
from ...gateway.serving.oip import InferRequest
from .answer_stream import Answers, turn_of
from .decoding.generation_settings import HIDDEN
from .decoding.model_config import LanguageModelConfig
from .decoding.output import StopCriteria
from .decoding.sampling import Sampling
from .tokenizer_worker import Abort, StartGeneration
from .tokenizers import TokenizerClient, config_of

MAX_TEXTS: Final = 2048  # texts of one request; OpenAI's limit
AT_ONCE: Final = 8
NUMBER: Final = 0  # number that no answer of a language model has


class Embed(msgspec.Struct, frozen=True, kw_only=True):
    """OpenAI's body of an embeddings request."""

    model: str
    input: list[str | list[int]]
    encoding_format: Literal["float", "base64"] | None = None


async def embedded(
    answers: Answers, caller: Principal, head: Head, request: Embed
) -> dict[str, Any]:
    """Return the embeddings in OpenAI's form."""
    facts = await config_of(answers.service, caller, request.model, "", embedding=True)
    rows: list[tuple[int, NDArray[np.float32]]] = []
    for start in range(0, len(request.input), AT_ONCE):
        some = request.input[start : start + AT_ONCE]
        works = [_row(answers, caller, head, request.model, facts, one) for one in some]
        rows += await asyncio.gather(*works)
    count, is_text = sum(tokens for tokens, _ in rows), request.encoding_format == "base64"
    data = []
    for index, (_, row) in enumerate(rows):
        one = base64.b64encode(row.tobytes()).decode() if is_text else row.tolist()
        data.append({"object": "embedding", "index": index, "embedding": one})
    usage = {"prompt_tokens": count, "total_tokens": count}
    return {"object": "list", "model": request.model, "data": data, "usage": usage}


async def _row(
    answers: Answers,
    caller: Principal,
    head: Head,
    model: str,
    facts: LanguageModelConfig,
    text: str | list[int],
) -> tuple[int, NDArray[np.float32]]:
    turn = turn_of(caller, head.peer)
    talk = await answers.texts.enter(caller, turn, model, facts)
    try:
        ending = StopCriteria(max_new_tokens=1)
        begin = StartGeneration(answer=NUMBER, prompt=text, sampling=Sampling(), ending=ending)
        ids = array("i", (await talk.ask(begin, turn)).prompt).tolist()
    finally:
        talk.send(Abort(answer=NUMBER))
        if isinstance(talk, TokenizerClient):
            answers.texts.leave(talk)
    tokens = np.array([ids], np.int64)
    inputs, frames, _ = to_frames({"input_ids": tokens, "attention_mask": np.ones_like(tokens)})
    outputs, _ = await answers.service.infer(
        caller,
        model,
        str(facts.version),
        InferRequest(id="", inputs=inputs, frames=frames),
        head.headers,
        head.peer,
    )
    output = next(one for one in outputs if one.name == HIDDEN)
    if output.dtype != "float32":
        raise InvalidInput(f"{model} answers in {output.dtype}, not float32")
    return len(ids), pooled(np.frombuffer(output.data, np.float32).reshape(len(ids), -1), facts)


_POOL: Final[Mapping[str, Callable[[NDArray[np.float32]], NDArray[np.float32]]]] = {
    "cls": lambda hidden: hidden[0],
    "max": lambda hidden: hidden.max(0),
    "mean": lambda hidden: hidden.mean(0),
    "mean_sqrt_len": lambda hidden: hidden.sum(0) / np.sqrt(np.float32(len(hidden))),
    "weightedmean": lambda hidden: np.average(
        hidden, axis=0, weights=np.arange(1, len(hidden) + 1)
    ),
    "last": lambda hidden: hidden[-1],
}


def pooled(hidden: NDArray[np.float32], facts: LanguageModelConfig) -> NDArray[np.float32]:
    """Return a text's embedding, of length 1. ``hidden``: [tokens, size]."""
    row = np.concatenate([_POOL[one](hidden) for one in facts.pooling.split("+")])
    return np.asarray(row / max(float(np.linalg.norm(row)), 1e-12), np.float32)
