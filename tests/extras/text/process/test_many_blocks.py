"""Waits of one client while 20,000 cached blocks of another are freed, beside 60 callers."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from process_tools import checked_server, mlp, until

from tests.process.figures import publishing

transformers = pytest.importorskip("transformers")
BLOCKS, PROMPT, CALLERS = 20_000, 1900, 60
X = np.ones((1, 16), np.float32)


@pytest.mark.soak
def test_freeing_many_blocks_of_separate_tenants_is_not_felt() -> None:
    config = transformers.AutoConfig.for_model(
        "qwen2",
        hidden_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=700,
        max_position_embeddings=2048,
        eos_token_id=None,
    )
    environment = {"PIPESWITCH_SECURITY__TENANTS": "separate", "PIPESWITCH_SERVER__POOL": "1GiB"}
    with (
        publishing("many_blocks") as figures,
        checked_server(arena="256MiB", environment=environment) as checked,
    ):
        client, chance, over = checked.client, random.Random(1), threading.Event()
        for name in ("tiny", "other"):
            client.register(name, mlp(16, 1, 1), example_inputs=(torch.zeros(1, 16),))
        client.register("lm", transformers.AutoModelForCausalLM.from_config(config), generate=True)
        while checked.count("pool_spare_slabs") < BLOCKS:
            [
                *client.generate(
                    "lm", [chance.randrange(700) for _ in range(PROMPT)], max_new_tokens=1
                )
            ]

        def call() -> None:
            with checked.running.client() as own:
                while not over.wait(0.25):
                    own.infer("other", X)

        def measure(name: str, is_done: Callable[[], bool]) -> None:
            waits_ms = []
            while not is_done() or len(waits_ms) < 1000:
                began_s = time.perf_counter()
                client.infer("tiny", X)
                waits_ms.append((time.perf_counter() - began_s) * 1000)
            figures[name] = {"p50": np.median(waits_ms), "p99": np.percentile(waits_ms, 99)}

        measure("alone", lambda: True)
        callers = [threading.Thread(target=call) for _ in range(CALLERS)]
        for one in callers:
            one.start()
        measure("quiet", lambda: True)
        with checked.running.client() as owner:
            gone = threading.Thread(target=owner.unregister, args=("lm",))
            gone.start()
            measure("freeing", lambda: not gone.is_alive())
        until(lambda: not checked.count("pool_spare_slabs"), "all blocks are free")
        over.set()
        for one in callers:
            one.join()
