"""A length that was never asked for, against a model registered at exactly that length.

    python -m benchmarks.lengths [--layers 4] [--width 256] [--rounds 200]

One encoder on one server: once with the length open, and once more for each tried length with it
fixed. Requests alternate between the two. Prints one JSON line for each length: the first request
of the open one, then p50 of both over the rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

import torch
from torch import nn

from pipeswitch.testing import server

LENGTHS = (7, 64, 200, 511)
HEADS, VOCABULARY, LONGEST, WARM_ROUNDS = 8, 1000, 512, 3


class Encoder(nn.Module):
    """A stack of encoder layers over words and places."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(LONGEST, width)
        layer = nn.TransformerEncoderLayer(width, HEADS, 4 * width, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(
            self.words(ids) + self.places(torch.arange(ids.shape[1]))[None]
        )
        return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    torch.backends.mha.set_fastpath_enabled(False)
    torch.manual_seed(0)
    module = Encoder(options.width, options.layers).eval()
    facts = {"layers": options.layers, "width": options.width, "torch": torch.__version__}
    with server(arena="1GiB", host_store="1GiB", args=("--threads", "1")) as running:
        client = running.client()

        def ask(name: str, length: int) -> float:
            ids = torch.randint(0, VOCABULARY, (1, length))
            return client.infer(name, ids).timing.total_ms

        example = torch.randint(0, VOCABULARY, (1, 32))
        client.register("open", module, example_inputs=example,
                        dynamic={"ids": {1: (1, LONGEST)}})  # fmt: skip
        for _ in range(WARM_ROUNDS):
            ask("open", 32)
        for length in LENGTHS:
            name = f"fixed-{length}"
            client.register(name, module, example_inputs=example[:, :1].repeat(1, length))
            for _ in range(WARM_ROUNDS):
                ask(name, length)
            first_ms = ask("open", length)
            both = [(ask("open", length), ask(name, length)) for _ in range(options.rounds)]
            opened, fixed = (statistics.median(times) for times in zip(*both, strict=True))
            row = {"length": length, "first_ms": first_ms, "open_p50_ms": opened,
                   "fixed_p50_ms": fixed, "ratio": opened / fixed}  # fmt: skip
            row = {key: round(value, 3) for key, value in row.items()}
            sys.stdout.write(json.dumps({**row, "rounds": options.rounds, **facts}) + "\n")
            sys.stdout.flush()
            client.unregister(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
