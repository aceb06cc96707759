"""Language models on a real server: even with faults, tokens equal those of transformers."""

from __future__ import annotations

import contextlib
import json
import random
import threading
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from process_tools import Checked, checked_server, fake_gpu, kill, start_endless_job, until

from pipeswitch.base.errors import DeadlineExceeded, InvalidInput, PipeSwitchError
from pipeswitch.cli.main import main
from pipeswitch.client import Client
from tests.models.words import trained

transformers = pytest.importorskip("transformers")

VOCABULARY, CONTEXT = 700, 320
SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 0,
    "eos_token_id": None,
    "num_key_value_heads": 2,
}


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(7)
    config = transformers.AutoConfig.for_model("qwen2", **SIZES)
    model_made = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():  # so that answers do not repeat one word
        for parameter in model_made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(8)
    return model_made


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.PreTrainedTokenizerFast(tokenizer_object=trained("bytes"))


@pytest.fixture(scope="module", params=["cpu", "cuda:0"])
def running(
    model: Any, tokenizer: Any, request: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Checked]:
    sizes = {"arena": "64MiB", "host_store": "256MiB", "http": True}
    gpu = {} if request.param == "cpu" else fake_gpu(tmp_path_factory.mktemp("gpu"))
    with checked_server(**sizes, devices=(request.param,), environment=gpu) as checked:
        checked.client.register(
            "chat", model, generate=True, tokenizer=tokenizer, precision="exact"
        )
        yield checked


@pytest.fixture(autouse=True)
def nothing_is_left(running: Checked) -> Iterator[None]:
    yield
    until(
        lambda: (s := running.stats())["pool_slabs"] == s["pool_spare_slabs"], "the pool is empty"
    )


def wanted(model: Any, ids: list[int], new: int) -> list[int]:
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        output = model.generate(torch.tensor([ids]), max_new_tokens=new, do_sample=False)
    return [int(one) for one in output[0, len(ids) :]]


@pytest.mark.parametrize("rounds", [1, pytest.param(17, marks=pytest.mark.soak)])
def test_two_hundred_tokens_beside_a_job_with_workers_that_die(
    running: Checked, model: Any, tmp_path: Path, rounds: int
) -> None:
    """Kill all workers three times during each of 17 answers, which are 51 kills."""
    client, ids, is_over = running.client, [*range(5, 38)], threading.Event()
    expected, turn, delays = wanted(model, ids, 200), threading.Semaphore(0), random.Random(0)

    def strike() -> None:
        """Kill all workers once per release of ``turn``, at a random moment of the next token."""
        while turn.acquire() and not is_over.is_set():
            is_over.wait(delays.uniform(0.0, 0.01))
            for row in running.rows("worker"):
                if row["pid"]:
                    kill(row["pid"])

    task = start_endless_job(running, tmp_path)
    striking = threading.Thread(target=strike)
    striking.start()
    try:
        for _ in range(rounds):
            moment = delays.randrange(5, 60)
            with client.generate("chat", ids, max_new_tokens=200) as answer:
                for number, token in enumerate(answer):
                    assert token.id == expected[number]
                    if number % 70 == moment:
                        turn.release()
                assert (number, answer.reason) == (199, "length")
    finally:
        is_over.set()
        turn.release()
        striking.join()
        with contextlib.suppress(InvalidInput):  # the job may have ended, because of 51 deaths
            task.cancel()
    assert client.sequences() == []


def by_hand(client: Any, ids: list[int], new: int, deadlines: list[float | None]) -> list[int]:
    """Return greedy tokens of single steps; repeat a step whose deadline has passed."""
    tokens, done = list(ids), 0
    with client.sequence("chat") as sequence:
        while len(tokens) < len(ids) + new:
            inputs = {"ids": np.array([tokens[done:]]), "used": np.array([done])}
            inputs["count"] = np.array([len(tokens) - done])
            try:
                logits = sequence.infer(inputs, deadline_ms=deadlines[len(tokens) % 3])["logits"]
            except DeadlineExceeded:
                deadlines = [*deadlines[1:], None]
                continue
            done = len(tokens)
            tokens.append(int(logits[0].argmax()))
    return tokens[len(ids) :]


def test_in_one_run_with_others_that_leave_fail_and_die_each_answers_its_own_tokens(
    running: Checked, model: Any
) -> None:
    client, new, gone = running.client, 36, Client(running.running.ipc_address)
    prompts = [[5 + n, *range(1, 2 + 5 * n)] for n in range(8)]
    expected = [wanted(model, ids, new) for ids in prompts]
    ids: list[list[int]] = [[] for _ in prompts]
    before, start = (running.count("runs"), running.count("inferences")), threading.Barrier(9)

    def talk(number: int, client_of: Any) -> None:
        start.wait()
        with client_of.generate("chat", prompts[number], max_new_tokens=new) as answer:
            for token in answer:
                ids[number].append(token.id)
                if number == 0 and len(ids[0]) in (9, 24):  # the other generations may be anywhere
                    for row in running.rows("worker"):
                        if row["pid"]:
                            kill(row["pid"])
                if number == 1 and len(ids[1]) == 12:
                    break

    def is_gone() -> None:
        with contextlib.suppress(PipeSwitchError):
            talk(2, gone)

    def fails() -> None:
        start.wait()
        ids[3][:] = by_hand(client, prompts[3], new, [None, 0.05, 2.0])

    tasks = [partial(talk, number, client) for number in (0, 1, 4, 5, 6, 7)]
    with ThreadPoolExecutor(8) as pool:
        ends = [pool.submit(task) for task in (*tasks, is_gone, fails)]
        start.wait()
        until(lambda: len(ids[2]) > 15, "it has some tokens")
        gone.close()
        for end in ends:
            end.result()
    for number, tokens in enumerate(expected):
        count = 12 if number == 1 else len(ids[2]) if number == 2 else new
        assert ids[number] == tokens[:count], number
    runs, inferences = running.count("runs") - before[0], running.count("inferences") - before[1]
    assert runs < inferences


def test_a_text_comes_back_as_text_and_a_seed_says_which(
    running: Checked, model: Any, tokenizer: Any
) -> None:
    client, prompt = running.client, "The data set has"
    ids = tokenizer(prompt)["input_ids"]
    plain = wanted(model, ids, 60)
    answer = client.generate("chat", prompt, max_new_tokens=60)
    whole = answer.text
    assert answer.tokens == plain
    assert whole == tokenizer.decode([*ids, *plain], skip_special_tokens=True)[len(prompt) :]
    stop = whole[10:14]
    cut = client.generate("chat", prompt, max_new_tokens=60, stop=[stop])
    assert (cut.text, cut.reason) == (whole[: whole.index(stop)], "stop")
    drawn = [
        client.generate("chat", prompt, max_new_tokens=30, temperature=1.0, top_p=0.9, seed=seed)
        for seed in (1, 1, 2)
    ]
    texts = [one.text for one in drawn]
    assert texts[0] == texts[1] != texts[2]
    words = ["generate", "chat", prompt, "--max-new-tokens", "60", "--json"]
    environment = {"PIPESWITCH_HOST": running.running.ipc_address}
    done = CliRunner().invoke(main, words, env=environment, catch_exceptions=False)
    assert json.loads(done.stdout)["text"] == whole


def test_what_a_conversation_has_computed_is_not_computed_again(
    running: Checked, model: Any
) -> None:
    """Continue a conversation, and begin another from its prompt, while a worker dies."""
    client, ids = running.client, [3 + 7 * n % 600 for n in range(150)]
    for turn in range(3):
        expected, before = wanted(model, ids, 20), running.stats()
        requests_before = client.show("chat")["requests"]
        tokens_before = before["sequences_by_model"].get("chat", {}).get("tokens", 0)
        with client.generate("chat", ids, max_new_tokens=20) as answer:
            assert [next(answer).id for _ in range(5)] == expected[:5]
            other = client.generate("chat", [*ids[:120], 9], max_new_tokens=20)
            kill(next(iter(running.worker_pids().values())))
            assert [token.id for token in other] == wanted(model, [*ids[:120], 9], 20)
            assert [token.id for token in answer] == expected[5:]
        reused = running.stats()["tokens_reused"] - before["tokens_reused"]
        (row,) = [row for row in client.ps() if row["name"] == "chat"]
        assert row["tokens"] - tokens_before == 40
        assert client.show("chat")["requests"] - requests_before == 2
        assert row["spare_bytes"] >= row["sequence_bytes"] == row["sequences"] == 0
        assert reused >= (240 if turn else 120)  # the second may use the first one's blocks
        ids += [*answer.tokens, 5, 6]


def test_an_answer_that_is_dropped_or_closed_ends_on_the_server(running: Checked) -> None:
    client = running.client
    before = running.stats()["inference"]
    answer = client.generate("chat", [1, 2, 3], max_new_tokens=300)
    assert next(answer)
    del answer  # drops the last reference
    with client.generate("chat", [1, 2, 4], max_new_tokens=300) as answer:
        next(answer)
    until(lambda: client.sequences() == [], "both are gone")
    until(lambda: running.stats()["inference"]["in_flight"] == 0, "both are answered")
    now = running.stats()["inference"]
    assert now["accepted"] - before["accepted"] == 2
    whole = client.generate("chat", [1, 2, 3], max_new_tokens=9)
    assert len([*whole]) == whole.usage["completion_tokens"] == 9
    assert whole.timing is not None
    assert whole.timing.total_ms >= whole.timing.compute_ms > 0.0


def test_what_cannot_be_generated_is_said(running: Checked) -> None:
    client = running.client
    client.register("plain", torch.nn.Linear(4, 4), example_inputs=torch.zeros(2, 4))
    for arguments, words in (
        (("plain", [1]), "does not generate text"),
        (("chat", []), "1 to 319"),
        (("chat", [VOCABULARY]), "not a token from 0 to 699"),
        (("chat", 4), "or token ids"),
        (("chat", [1] * CONTEXT), "a prompt of 320 tokens"),
    ):
        with pytest.raises(InvalidInput, match=words):
            client.generate(*arguments)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput):
        client.generate("chat", [1], temperature="hot")  # type: ignore[arg-type]
    with pytest.raises(InvalidInput):
        client.generate("chat", [1, 2], stop=["x"])
    client.unregister("plain")
