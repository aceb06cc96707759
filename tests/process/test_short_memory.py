"""Clients' requests in a process that cannot allocate: always an error, never a crash."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("httptools", reason="make installs it")

CASES = {
    "an answer in JSON": "http.json_answer({'text': TEXT})",
    "an answer's parameters": "oip.encode_answer('m', asked, [], {'text': TEXT})",
    "an event of the feed": "event_stream.EventLog().add('topic', {'text': TEXT})",
    "a message to a text process": "tokenizers._encoded(tokenizer_worker.Abort(answer=TEXT))",
    "a message to the server": "frames.pack_dict({'text': TEXT})",
    "a message between processes": "channel.encode_message(TEXT)",
    "a request with a long name": "oip.decode_request(NAME, None)",
    "an object": "rest._object(OBJECT)",
    "a registration": "api._registration(lambda: api.decode_json(NAME, api.RegisterRequest))",
    "a completion": "completions._said(PROMPT, completions.CompletionRequest)",
    "a chat": "tokenizer_worker.parsed(CHAT)",
}
PROGRAM = """
import resource, sys
from pathlib import Path
from pipeswitch.gateway import rest
from pipeswitch.extras.page import api, event_stream
from pipeswitch.gateway.http import http_server as http
from pipeswitch.extras.text import completions, tokenizer_worker, tokenizers
from pipeswitch.gateway.serving import oip
from pipeswitch.ipc import channel
from pipeswitch.wire import frames

rest.MAX_OBJECT_BYTES = oip.MAX_JSON_BYTES = oip.LONG_BYTES = 1 << 30
asked = oip.InferRequest(id="", inputs=(), frames=[])
TEXT = "x" * (24 << 20)
NAME = ('{"id": "%s", "inputs": []}' % TEXT).encode()
OBJECT = ('{"a": "%s"}' % TEXT).encode()
PROMPT = ('{"model": "m", "prompt": "%s"}' % TEXT).encode()
CHAT = ('[{"role": "%s"}]' % TEXT[: 64 << 10]).encode()
pages = int(Path("/proc/self/statm").read_text().split()[5])
limit = pages * resource.getpagesize() + (1 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    %s
except (MemoryError, OSError):
    sys.exit(7)
"""


@pytest.mark.parametrize("what", CASES)
def test_what_finds_no_memory_is_an_error(what: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.replace("%s\nexcept", f"{CASES[what]}\nexcept")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 7, done.stderr
