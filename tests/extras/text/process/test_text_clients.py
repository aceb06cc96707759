"""Unmodified clients of other projects: litellm and LangChain over ``/v1``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from process_tools import checked_server

from tests.models.words import published

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")  # allows the clients' own warnings
SAID: Any = [{"role": "user", "content": "The data set has"}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    chat, words = tmp_path_factory.mktemp("chat"), tmp_path_factory.mktemp("words")
    published(
        chat,
        transformers.AutoModelForCausalLM,
        scale=8.0,
        chat_template="{{ messages[0].content }}",
    )
    published(words, transformers.AutoModel, "bert")
    with checked_server(arena="64MiB", host_store="256MiB", http=True) as checked:
        checked.client.register("chat", f"hf:{chat}", weights="pretrained", generate=True)
        checked.client.register("words", f"hf:{words}", weights="pretrained")
        yield f"http://{checked.running.http_address}/v1"


def test_litellm(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # importing litellm sets this
    litellm = pytest.importorskip("litellm", reason="pip install litellm")
    here: Any = {"api_base": url, "api_key": "EMPTY"}
    options: Any = {**here, "model": "openai/chat", "max_tokens": 9, "temperature": 0}
    text = litellm.completion(**options, messages=SAID).choices[0].message.content
    stream = litellm.completion(**options, messages=SAID, stream=True)
    assert "".join(one.choices[0].delta.content or "" for one in stream) == text
    assert len(litellm.completion(**options, messages=SAID, n=2, seed=1).choices) == 2
    rows = litellm.embedding("openai/words", ["Once", "The data"], **here).data
    assert [len(row["embedding"]) for row in rows] == [64, 64]
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(**options, messages=[{**SAID[0], "content": "x1y2" * 2000}])


def test_langchain(url: str) -> None:
    langchain = pytest.importorskip("langchain_openai", reason="pip install langchain-openai")
    here: Any = {"base_url": url, "api_key": "EMPTY"}
    chat = langchain.ChatOpenAI(**here, model="chat", max_tokens=9, temperature=0)
    text = chat.invoke("The data set has").content
    assert "".join(one.content for one in chat.stream("The data set has")) == text
    assert [one.content for one in chat.batch(["The data set has"] * 3)] == [text] * 3
    plain = langchain.OpenAI(**here, model="chat", max_tokens=9, temperature=0)
    texts = [one[0].text for one in plain.generate(["Once", "The data"]).generations]
    assert texts == [plain.invoke("Once"), plain.invoke("The data")]
    words = langchain.OpenAIEmbeddings(**here, model="words", check_embedding_ctx_length=False)
    assert len(words.embed_documents(["Once", "The data"])) == 2
