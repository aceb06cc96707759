"""Decode steps of a language model: a chosen token is the next step's input (ADR 54).

Caches of keys and values are copied from the pool's blocks to the device, with room for new rows.
If a request's cache is already there, the next run does not copy it again. A run writes its new
rows to the pool behind the rows in use, so another worker can repeat a killed run.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import repeat
from typing import Final

import numpy as np
import torch

from ...devices.cuda.graphs import DeviceProgram
from ...devices.worker_device import now_ms
from ...ipc.messages.base import ModelName, SlabTensor
from ...ipc.messages.run import Run
from ...ipc.messages.worker import RunInference
from ...programs.graphs.cached_attention import DecodeRows
from ...programs.interface.layout import (
    CACHE,
    MAX_JOINED_BYTES,
    Manifest,
    ValueSpec,
    aligned,
)
from ...programs.running.executor import BoundProgram
from ...workers.inference.pool import MappedPool
from .decoding.generation_settings import (
    CACHE_NEW,
    COUNT,
    IDS,
    LOGITS,
    USED,
    GenerationSettings,
)
from .decoding.grammar import Matcher, Tokenizers, ends_of
from .decoding.sampling import Chance, chance_of, next_token, sampling_of

with contextlib.suppress(ImportError):  # it comes with the extra ``grammar``
    import llguidance  # noqa: F401  # a sandboxed worker cannot import it

RUN_MS: Final = 125.0  # target time of a run; streams get its tokens at its end, 8 times a second
ROWS_STEP: Final = 16  # rows are a multiple of this, so shapes seldom change; few rows are unused
GPU_ROWS_STEP: Final = 128  # larger on a GPU, which captures each shape

_NO_ROWS: Final = torch.empty(2, 0)

Known = tuple[int, int, int]  # cache, run that computed its last rows, number of rows


class KVBatchCache:
    """Caches of a model's last runs; the pool holds all of their contents, too."""

    def __init__(self) -> None:
        self.device = "cpu"
        self._numbers = torch.empty(4, 0)
        self.let_go()

    def numbers(self, count: int) -> torch.Tensor:
        """Return a step's numbers [4, count], at one address until more sequences come: each one's
        row, token, count of tokens, and used rows."""
        if self._numbers.shape[1] < count:
            columns = aligned(count, ROWS_STEP)
            self._numbers = torch.empty(4, columns, dtype=torch.int64, device=self.device)
        return self._numbers[:, :count]

    def let_go(self) -> None:
        """Free the caches, because another model's run has its own memory limit."""
        self.model = ""
        self._memory = torch.empty(0, dtype=torch.uint8, device=self.device)
        self._rows = torch.empty(0, 0, 0)
        self.known: list[Known | None] = []  # contents of each row of ``_rows``

    def place(
        self,
        model: str,
        slabs: Sequence[SlabTensor],
        known: Sequence[Known],
        extent: int,
        most: int,
        pool: MappedPool,
    ) -> tuple[list[int], torch.Tensor]:
        """Return all caches as one tensor, and the row of each cache in it.

        The tensor has at least ``extent`` and at most ``most`` places for tokens. Caches that are
        still there from the last run are not copied.
        """
        rows, width, count = self._rows, slabs[0].shape[2], len(slabs)
        dtype = getattr(torch, slabs[0].dtype)
        is_other = (model, dtype, width) != (self.model, rows.dtype, rows.shape[2])
        does_fit = extent <= rows.shape[1] <= 3 * extent and count <= len(rows)
        step = ROWS_STEP if self.device == "cpu" else GPU_ROWS_STEP
        extent = min(aligned(extent, step), most)
        if is_other or not does_fit:
            self._make_room(dtype, width, count, min(aligned(extent * 3 // 2, step), most))
            self.model = model
        lie = {one: row for row, one in enumerate(self.known[:count]) if one is not None}
        free = sorted({*range(count)} - {lie[one] for one in known if one in lie})
        order = []
        for value, one in zip(slabs, known, strict=True):
            row = lie.get(one)
            if row is None:
                row = free.pop(0)
                pool.gather(value, self._rows[row])  # waits; a GPU copies from pinned memory
                self._rows[row, -1, -1].item()  # else a GPU's compute stream may overtake zeros
            order.append(row)
        self.known[:count] = [None] * count  # set again if the run succeeds
        return order, self._rows[:count, :extent]

    def _make_room(self, dtype: torch.dtype, width: int, count: int, extent: int) -> None:
        """Allocate, in old pages if possible: a copy to fresh pages takes five times as long."""
        shape = (count, extent, width)
        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes > len(self._memory):
            self.let_go()  # else old and new memory would exist at once
            self._memory = torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
        self._rows = self._memory[:size_bytes].view(dtype).view(shape)
        self.known = [None] * count


class DecodeRunner:
    """State that a worker keeps between runs: the time of a step, and the caches (``Runner``)."""

    def __init__(self) -> None:
        self._step_ms: dict[tuple[ModelName, int], float] = {}  # duration of a step in the last run
        self.caches = KVBatchCache()
        self.tokenizers = Tokenizers()

    def take(self, digest: str, settings: GenerationSettings) -> None:
        self.tokenizers.packed[digest] = settings.tokenizer

    def remove(self, digest: str) -> None:
        self.tokenizers.packed.pop(digest, None)

    def let_go(self, digest: str = "") -> None:
        if self.caches.model not in ("", digest):
            self.caches.let_go()

    def begin(
        self,
        message: RunInference,
        bound: BoundProgram,
        pool: MappedPool,
        device: str,
        is_over: Callable[[], bool],
    ) -> DecodeRun | None:
        runs = message.runs
        if not any(one.sampling_params for one in runs):
            return None
        most = 0 if message.staging else self._most(message, bound)
        if device != self.caches.device:
            self.caches.device = device
            self.caches.let_go()
        return DecodeRun(bound, runs, most, self, pool, is_over)

    def _most(self, message: RunInference, bound: BoundProgram) -> int:
        """Return the maximum number of steps of a run; 0: one step whose cache is not kept.

        A prompt is computed as a single step. The first step of a model in this process is single,
        too, because its duration is not known yet. So is a timed run, and
        on a GPU one whose vocabulary exceeds the model's table.
        """
        runs, manifest = message.runs, bound.manifest
        sampling_params = [one.sampling_params for one in runs if one.sampling_params is not None]
        slabs = [_slabs_of(one, manifest) for one in runs]
        is_long = any(named[IDS].shape != (1, 1) for named in slabs)
        caches_bytes = sum(named[CACHE].size_bytes for named in slabs)
        is_large = len(runs) > 1 and caches_bytes > MAX_JOINED_BYTES
        tables = bound.limits.items() if isinstance(bound, DeviceProgram) else ()
        is_odd = any(
            manifest.inputs[at].name == IDS and rows < manifest.extra["generation"]["vocabulary"]
            for at, rows in tables
        )
        is_single = is_long or is_large or is_odd or message.is_timed
        if len(sampling_params) < len(runs) or is_single:
            return 0
        most = min(one.steps for one in sampling_params)
        if 2 * self._step_ms.get((message.model, len(runs)), RUN_MS) > RUN_MS:
            most = 1
        return most

    def ended(self, message: RunInference, steps: DecodeRun, ms: float) -> None:
        self._step_ms[message.model, len(message.runs)] = ms / steps.count
        steps.keep(message.op_id)
        if steps.matchers:
            self.tokenizers.keep(steps.matchers.values())


class DecodeRun:
    """Decode steps of one run, with one cache for each request (``KindRun``)."""

    def __init__(
        self,
        bound: BoundProgram,
        runs: Sequence[Run],
        most: int,
        runner: DecodeRunner,
        pool: MappedPool,
        is_over: Callable[[], bool],
    ) -> None:
        self._bound, self.most = bound, most
        self._caches, self._tokenizers = runner.caches, runner.tokenizers
        self._device_program = bound if isinstance(bound, DeviceProgram) else None
        self._pool, self._is_over = pool, is_over
        self._runs, self._order = runs, [*range(len(runs))]  # the row of each run
        self._cache: torch.Tensor
        self._begin: torch.Tensor  # ids, counts and used rows of the first step, on the host
        self._first: list[int] = []  # for each row, the position of the first step's token
        self._tokens: list[list[int]] = []  # for each step, the token of each row
        hows = [one.sampling_params for one in runs]
        self._samplings = [
            None if how is None or how.is_piece else sampling_of(how) for how in hows
        ]
        self._chances: list[list[Chance]] = [[] for _ in runs]
        self.matchers: dict[int, Matcher] = {}  # index of a request -> its matcher
        self._follow_schemas()

    @property
    def count(self) -> int:
        return len(self._tokens)

    def _follow_schemas(self) -> None:
        manifest = self._bound.manifest
        for number, one in enumerate(self._runs):
            how = one.sampling_params
            if how is not None and how.options is not None and how.schema and not how.is_piece:
                facts = manifest.extra["generation"]
                place = manifest.digest, facts["vocabulary"], ends_of(facts["eos_ids"], how.stop)
                self.matchers[number] = self._tokenizers.matcher(*place, how.schema, how.answer)

    def inputs(self) -> list[torch.Tensor]:
        manifest, pool = self._bound.manifest, self._pool
        slabs = [_slabs_of(one, manifest) for one in self._runs]
        ids, used = ([pool.number(one[name]) for one in slabs] for name in (IDS, USED))
        pairs = zip(self._runs, used, strict=True)
        high = next(dim.high for dim in manifest.dims if dim.name == "past")
        self._order, cache = self._caches.place(
            manifest.digest,
            [one[CACHE] for one in slabs],
            [(one.cache, one.after, count) for one, count in pairs],
            max(used) + self.most,
            high,
            pool,
        )
        by_row = sorted(zip(self._order, ids, repeat(1), used, strict=False))
        self._begin = torch.tensor(by_row).t()
        self._each, self._ids, counts, used = self._caches.numbers(len(by_row))
        named = {IDS: self._ids[:, None], COUNT: counts, USED: used, CACHE: cache}
        return [named[spec.name] for spec in manifest.inputs]

    def run(
        self, inputs: Sequence[torch.Tensor], before_group: Callable[[int], None]
    ) -> list[torch.Tensor]:
        began_ms, specs = now_ms(), self._bound.manifest.inputs
        named = {spec.name: value for spec, value in zip(specs, inputs, strict=True)}
        if self._tokens:  # an earlier try chose them before it ran out of memory
            self._chances = [[] for _ in self._runs]
            self._follow_schemas()
        counts, used = named[COUNT], named[USED]
        if self.most:
            self._cache = named[CACHE]
            self._caches.numbers(len(self._runs)).copy_(self._begin)
            _, _, counts, used = self._begin
        upto = (used + counts).tolist()  # each sequence's tokens after this step
        self._first, self._tokens = used.tolist(), []
        advance, program = partial(self._advance, named), self._device_program
        while True:
            if program is not None and self.most:
                *outputs, best = program.run(inputs, before_group, advance)
            else:
                with DecodeRows([end - 1 for end in upto] if self.most else []):
                    *outputs, best = advance(self._bound.run(inputs, before_group))
            is_likeliest = self._choose(self._named(outputs)[0], best, upto)
            if not self.most or self._is_last(now_ms() - began_ms):
                return outputs
            if not is_likeliest:
                self._ids.copy_(torch.tensor(self._tokens[-1]))
            upto = [end + 1 for end in upto]

    def _advance(
        self, named: Mapping[str, torch.Tensor], outputs: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Keep a step's new rows, and change its inputs to those of the next step.

        Return the outputs and, as float64 [2, rows], each row's largest logit and its first token;
        [2, 0] on the host, where numpy finds them in a tenth of torch's time.
        """
        logits, rows = self._named(outputs)
        if self.most:
            named[CACHE][self._each, named[USED]] = rows[:, 0]
            named[USED].add_(1)
        if self._device_program is None:
            return [*outputs, _NO_ROWS]
        highest, tokens = logits.max(-1)
        if self.most:
            self._ids.copy_(tokens)
        return [*outputs, torch.stack([highest.double(), tokens.double()])]

    def outputs_of(
        self, number: int, own: Sequence[torch.Tensor]
    ) -> tuple[Sequence[ValueSpec], Sequence[torch.Tensor]]:
        """See ``KindRun``. With ``sampling_params`` there are none: new rows go to the cache."""
        manifest, row = self._bound.manifest, self._order[number]
        if self._runs[number].sampling_params is None:
            return manifest.outputs, own
        if self.most:
            rows = self._cache[row].narrow(0, self._first[row], self.count)
        else:
            _, rows = self._named(own)
        self._pool.extend(_slabs_of(self._runs[number], manifest)[CACHE], rows)
        return [], []

    def tokens(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            [
                ()
                if (how := one.sampling_params) is None or how.is_piece
                else tuple([step[row] for step in self._tokens])
                for one, row in zip(self._runs, self._order, strict=True)
            ]
        )

    def chances(self) -> tuple[tuple[Chance, ...], ...]:
        return tuple(map(tuple, self._chances)) if any(self._chances) else ()

    def keep(self, op_id: int) -> None:
        if not self.most:
            return
        for one, row in zip(self._runs, self._order, strict=True):
            if one.cache:
                self._caches.known[row] = one.cache, op_id, self._first[row] + self.count

    def _named(self, outputs: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = zip(self._bound.manifest.outputs, outputs, strict=True)
        named = {spec.name: value for spec, value in pairs}
        return named[LOGITS], named[CACHE_NEW]

    def _is_last(self, ms: float) -> bool:
        is_late = ms * (self.count + 1) / self.count > RUN_MS
        is_end = any(
            one.sampling_params is not None and self._tokens[-1][row] in one.sampling_params.stop
            for one, row in zip(self._runs, self._order, strict=True)
        )
        return self.count == self.most or is_late or is_end or self._is_over()

    def _choose(self, logits: torch.Tensor, best: torch.Tensor, upto: Sequence[int]) -> bool:
        """Choose the next token of each row; return True if all are the likeliest of ``best``.

        On a GPU, only logits of rows whose choice needs more than that are copied to the host.
        """
        count, rows, is_here = self.count, len(upto), best is _NO_ROWS
        highest, likeliest = ([math.nan] * rows, [0] * rows) if is_here else best.tolist()
        values = logits.float().numpy() if is_here else None
        tokens = [*map(int, likeliest)]
        self._tokens.append(tokens)
        for number, (one, row, sampling) in enumerate(
            zip(self._runs, self._order, self._samplings, strict=True)
        ):
            if (how := one.sampling_params) is None or sampling is None:
                continue
            options = sampling.options
            if options is None and sampling.temperature == 0.0 and math.isfinite(highest[row]):
                continue
            own = logits[row].float().cpu().numpy() if values is None else values[row]
            if options is None:
                tokens[row] = next_token(own, sampling, upto[row])
                continue
            token_counts = Counter(dict(how.seen))  # the prompt's tokens have zero counts
            token_counts.update(step[row] for step in self._tokens[:count])
            allowed = own
            if (matcher := self.matchers.get(number)) is not None:
                allowed = np.where(matcher.allowed(), own, -np.inf)
            tokens[row] = next_token(allowed, sampling, upto[row], token_counts)
            if matcher is not None:
                matcher.take(tokens[row])
            if count < len(how.forced):
                tokens[row] = how.forced[count]
            if options.logprobs is not None:
                chance = chance_of(own, tokens[row], options.logprobs)
                self._chances[number].append(chance)
        return not is_here and tokens == likeliest


def _slabs_of(run: Run, manifest: Manifest) -> dict[str, SlabTensor]:
    pairs = zip(manifest.inputs, run.inputs, strict=True)
    return {spec.name: slab for spec, slab in pairs}
