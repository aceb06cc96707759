"""Process of ``bench peers`` with a peer's own library: the peer's best case, without a server.

Usage: ``PYTHON -P peer_child.py VERB ORDER``, where PYTHON's environment has the libraries.
``gguf`` converts the weights in a transformers folder for llama.cpp. ``llama_cpp`` and ``vllm``
answer lines of JSON with ``model``, ``prompts`` (token ids) and ``new`` (number of new tokens).
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

FIRST_LETTER: Final = 0x20000  # character of token 0; equal in ``lm_child.py``
BLOCK: Final = {
    "ln_1": "attn_norm",
    "attn.c_attn": "attn_qkv",
    "attn.c_proj": "attn_output",
    "ln_2": "ffn_norm",
    "mlp.c_fc": "ffn_up",
    "mlp.c_proj": "ffn_down",
}
AROUND: Final = {"wte": "token_embd", "wpe": "position_embd", "ln_f": "output_norm"}
F32: Final = 0  # ggml's number for float32; keys and values are float16 by default


class Engine(Protocol):
    """Engine that answers prompts; ``ask`` returns the fields of an output line."""

    def ask(self, model: int, prompts: list[list[int]], new: int) -> dict[str, Any]: ...


def convert(order: dict[str, Any]) -> None:
    """Convert GPT-2 models to GGUF files. Tokens are letters; no token ends an answer.

    Only linear layers and the token table have the file's type; the rest is float32.
    """
    import gguf

    for folder, path, kind in order["files"]:
        config = json.loads(Path(folder, "config.json").read_text("utf-8"))
        writer = gguf.GGUFWriter(path, "gpt2")
        writer.add_context_length(config["n_positions"])
        writer.add_embedding_length(config["n_embd"])
        writer.add_feed_forward_length(4 * config["n_embd"])
        writer.add_block_count(config["n_layer"])
        writer.add_head_count(config["n_head"])
        writer.add_layer_norm_eps(config["layer_norm_epsilon"])
        kind_of_values = gguf.GGMLQuantizationType[kind]
        writer.add_tokenizer_model("rwkv")  # takes the longest matching token, which is one letter
        letters = [chr(FIRST_LETTER + token) for token in range(config["vocab_size"])]
        writer.add_token_list(letters)
        writer.add_token_types([gguf.TokenType.NORMAL] * len(letters))
        for name, values in tensors(Path(folder, "model.safetensors")):
            title, values = renamed(name, values)
            if values.ndim == 2 and title != "position_embd.weight" and kind != "F32":
                values = gguf.quants.quantize(values, kind_of_values)
                writer.add_tensor(title, values, raw_dtype=kind_of_values)
            else:
                writer.add_tensor(title, values)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield name and float32 values of each tensor in a safetensors file."""
    data = np.memmap(path, np.uint8, "r")
    size = int(data[:8].view(np.uint64)[0])
    for name, entry in json.loads(bytes(data[8 : 8 + size])).items():
        if name != "__metadata__":
            begin, end = (8 + size + offset for offset in entry["data_offsets"])
            yield name, data[begin:end].view(np.float32).reshape(entry["shape"])


def renamed(name: str, values: Any) -> tuple[str, Any]:
    """Return a tensor's name and values for GGUF, which has linear layers' weights transposed."""
    words = name.removeprefix("transformer.").split(".")
    if words[0] != "h":
        return f"{AROUND[words[0]]}.{words[-1]}", values
    layer = ".".join(words[2:-1])
    is_linear = layer.rpartition(".")[2].startswith("c_") and words[-1] == "weight"
    return f"blk.{words[1]}.{BLOCK[layer]}.{words[-1]}", values.T.copy() if is_linear else values


class LlamaCpp:
    """Engine on llama.cpp's library. It batches sequences, and takes the largest logit's token."""

    def __init__(self, order: dict[str, Any]) -> None:
        import llama_cpp

        self._lib: Any = llama_cpp
        self._order, self._loaded, self._room = order, -1, 0
        self._model: Any = None
        self._context: Any = None
        llama_cpp.llama_backend_init()
        self._silent = llama_cpp.llama_log_callback(lambda *_: None)
        llama_cpp.llama_log_set(self._silent, None)
        self._batch: Any = llama_cpp.llama_batch_init(order["context"], 0, order["together"])

    def ask(self, model: int, prompts: list[list[int]], new: int) -> dict[str, Any]:
        """Answer the prompts; if another model is loaded, first replace it by the requested one."""
        lib, began_s = self._lib, time.monotonic()
        if model != self._loaded or len(prompts) > self._room:
            self._load(model, len(prompts))
        loaded_s = time.monotonic()
        lib.llama_memory_clear(lib.llama_get_memory(self._context), True)
        rows = [
            (number, at, token)
            for number, prompt in enumerate(prompts)
            for at, token in enumerate(prompt)
        ]
        tokens = self._decode(rows, len(prompts))
        first_s, own_tokens = time.monotonic(), [tokens]
        while len(own_tokens) < new:
            rows = [
                (number, len(prompts[number]) + len(own_tokens) - 1, token)
                for number, token in enumerate(tokens)
            ]
            own_tokens.append(tokens := self._decode(rows, len(prompts)))
        return {
            "tokens": [[*sequence] for sequence in zip(*own_tokens, strict=True)],
            "first_ms": (first_s - began_s) * 1e3,
            "load_ms": (loaded_s - began_s) * 1e3,
        }

    def _decode(self, rows: list[tuple[int, int, int]], count: int) -> list[int]:
        """Compute all rows in one call; return the next token of each sequence."""
        batch, last = self._batch, {number: row for row, (number, _, _) in enumerate(rows)}
        batch.n_tokens = len(rows)
        for row, (number, position, token) in enumerate(rows):
            batch.token[row], batch.pos[row] = token, position
            batch.n_seq_id[row], batch.seq_id[row][0] = 1, number
            batch.logits[row] = last[number] == row
        if self._lib.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        return [int(self._logits(last[number]).argmax()) for number in range(count)]

    def _logits(self, row: int) -> Any:
        logits = self._lib.llama_get_logits_ith(self._context, row)
        return np.ctypeslib.as_array(logits, (self._vocabulary,))

    def _load(self, model: int, room: int) -> None:
        """Load a model for just ``room`` sequences: a larger cache would take longer to clear."""
        lib, order = self._lib, self._order
        if self._model is not None:
            lib.llama_free(self._context)
            lib.llama_model_free(self._model)
        path = order["files"][model].encode()
        how = lib.llama_model_default_params()
        # With its AMX buffers, llama.cpp 0.3.36 ends by SIGSEGV in a product of Q8_0.
        how.use_extra_bufts = "Q8_0" not in order["files"][model]
        self._model = lib.llama_model_load_from_file(path, how)
        options = lib.llama_context_default_params()
        options.n_ctx = order["context"] * room
        options.n_batch = options.n_ubatch = order["context"]
        options.n_seq_max = room
        options.n_threads = options.n_threads_batch = order["threads"]
        options.type_k = options.type_v = F32
        self._context = lib.llama_init_from_model(self._model, options)
        self._vocabulary = lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self._model))
        self._loaded, self._room = model, room


class Vllm:
    """Engine on vLLM's ``LLM``, in this process."""

    def __init__(self, order: dict[str, Any]) -> None:
        from vllm import LLM, SamplingParams

        self._sampling: Any = SamplingParams
        self._model: Any = LLM(
            model=order["folders"][0],
            dtype="float32",
            max_model_len=order["context"],
            max_num_seqs=order["together"],
            disable_log_stats=True,
        )

    def ask(self, model: int, prompts: list[list[int]], new: int) -> dict[str, Any]:
        assert model == 0
        how = self._sampling(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        prompts_of = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers = self._model.generate(prompts_of, how, use_tqdm=False)
        return {"tokens": [[*one.outputs[0].token_ids] for one in answers]}


def answer(engine: Engine, out: Any) -> None:
    """Answer lines until standard input ends."""
    print(json.dumps({"ready": True}), file=out, flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        began_s = time.monotonic()
        reply = engine.ask(order["model"], order["prompts"], order["new"])
        took_ms = (time.monotonic() - began_s) * 1e3
        print(json.dumps({"first_ms": took_ms, **reply, "took_ms": took_ms}), file=out, flush=True)


def main(verb: str, order: dict[str, Any]) -> None:
    # Standard output is for answers only: the libraries' own output goes to standard error.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    if verb == "gguf":
        convert(order)
    else:
        answer(LlamaCpp(order) if verb == "llama_cpp" else Vllm(order), out)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
