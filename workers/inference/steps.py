"""Steps of a language model: each token is chosen here, and is the next step's input (ADR 54).

The caches are copied once, into memory of ours with room for the new rows. Nothing that lies in the
pool is changed before the run has ended, so one that is killed is computed again from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from pipeswitch.devices.view import now_ms
from pipeswitch.ipc.messages import JoinedRequest, ModelName, RunInference, SlabTensor
from pipeswitch.programs.executor import BoundProgram
from pipeswitch.programs.generation import CACHE, CACHE_NEW, COUNT, IDS, LOGITS, TOKENS, USED
from pipeswitch.programs.layout import MOST_JOINED_BYTES, Manifest, ValueSpec
from pipeswitch.programs.sampling import Sampling, next_token

RUN_MS: Final = 40.0  # then the clients hear of it: 25 times a second
CHOSEN: Final = ValueSpec(name=TOKENS, dtype="int64", shape=("batch", "steps"))

Requests = Sequence[RunInference | JoinedRequest]


class StepTimes:
    """How long a step of each model took last, by rows: whether another one may follow."""

    def __init__(self) -> None:
        self._known: dict[tuple[ModelName, int], float] = {}

    def most(self, message: RunInference, requests: Requests, manifest: Manifest) -> int | None:
        """So many steps may follow one another; 0: there is one, in the pool's own memory; None:
        nobody has tokens chosen.

        A prompt is one, and so is the first one that this process computes, whose time it learns.
        """
        choosing = [one.choosing for one in requests if one.choosing is not None]
        if not choosing:
            return None
        if len(choosing) < len(requests) or manifest.batching is None or message.landings:
            return 0
        slabs = [slabs_of(one, manifest) for one in requests]
        most = min(one.steps for one in choosing)
        step_ms = self._known.get((message.model, len(requests)), RUN_MS)
        is_long = any(named[IDS].shape != (1, 1) for named in slabs)
        caches_bytes = sum(named[CACHE].size_bytes for named in slabs)
        is_large = caches_bytes > MOST_JOINED_BYTES or 2 * step_ms > RUN_MS
        return 0 if is_long or is_large or most < 2 else most

    def took(self, message: RunInference, ms: float) -> None:
        self._known[message.model, 1 + len(message.joined)] = ms


def slabs_of(request: RunInference | JoinedRequest, manifest: Manifest) -> dict[str, SlabTensor]:
    """Its inputs by name."""
    pairs = zip(manifest.inputs, request.inputs, strict=True)
    return {spec.name: slab for spec, slab in pairs}


class Steps:
    """Those of one run; each row is a sequence of its own."""

    def __init__(
        self, bound: BoundProgram, requests: Requests, most: int, device: str,
        is_over: Callable[[], bool],
    ) -> None:  # fmt: skip
        """
        Args:
            most: steps, or 0: as ``StepTimes.most``.
            device: where the caches are meanwhile.
            is_over: others wait.
        """
        self._bound, self._requests, self._most = bound, requests, most
        self._device, self._is_over = device, is_over
        self._cache: torch.Tensor
        self._first: list[int] = []  # of each row of it, where the first step's token lies
        self._tokens: list[list[int]] = []  # of each step, of each row

    @property
    def count(self) -> int:
        """Steps that were computed."""
        return len(self._tokens)

    def run(
        self, inputs: Sequence[torch.Tensor], before_group: Callable[[int], None]
    ) -> list[torch.Tensor]:
        """As ``BoundProgram.run``, of the last step; the cache given has room for all of them."""
        began_ms, specs = now_ms(), self._bound.manifest.inputs
        named = {spec.name: value for spec, value in zip(specs, inputs, strict=True)}
        self._first = named[USED].tolist()
        upto = (named[USED] + named[COUNT]).tolist()  # tokens, with those of this step
        if self._most:
            self._cache = named[CACHE] = named[CACHE].to(self._device)
        while True:
            outputs = self._bound.run([*named.values()], before_group)
            logits, rows = self._named(outputs)
            self._tokens.append(self._choose(logits, upto))
            if not self._most:
                return outputs
            for row, end in enumerate(upto):
                self._cache[row, end - 1].copy_(rows[row, 0])
            if self._is_last(now_ms() - began_ms):
                return outputs
            named[IDS], named[USED] = torch.tensor(self._tokens[-1])[:, None], torch.tensor(upto)
            upto = [end + 1 for end in upto]
            before_group = _is_there

    def told(
        self, row: int, own: Sequence[torch.Tensor]
    ) -> tuple[Sequence[ValueSpec], Sequence[torch.Tensor]]:
        """What a row's request gets, where ``own`` is its part of the last step's outputs."""
        outputs = self._bound.manifest.outputs
        if self._requests[row].choosing is None:
            return outputs, own
        chosen, (_, rows) = torch.tensor([[step[row] for step in self._tokens]]), self._named(own)
        if self._most:
            rows = self._cache[row : row + 1].narrow(1, self._first[row], self.count)
        return [CHOSEN, *[spec for spec in outputs if spec.name == CACHE_NEW]], [chosen, rows]

    def _named(self, outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = zip(self._bound.manifest.outputs, outputs, strict=True)
        named = {spec.name: value for spec, value in pairs}
        return named[LOGITS], named[CACHE_NEW]

    def _is_last(self, ms: float) -> bool:
        is_late = ms * (self.count + 1) / self.count > RUN_MS
        ends: Sequence[Any] = self._bound.manifest.extra["generation"]["eos_ids"]
        is_end = any(token in ends for token in self._tokens[-1])
        return self.count == self._most or is_late or is_end or self._is_over()

    def _choose(self, logits: torch.Tensor, upto: Sequence[int]) -> list[int]:
        values = logits.float().cpu().numpy()
        return [
            0 if one.choosing is None else next_token(
                values[row],
                Sampling(temperature=one.choosing.temperature, top_p=one.choosing.top_p,
                         seed=one.choosing.seed),
                upto[row],
            )
            for row, one in enumerate(self._requests)
        ]  # fmt: skip


def _is_there(_: int) -> None:
    """Its groups came with the first step."""
