"""The SDK: ``Client`` talks to a server from any thread; one background thread does the I/O.

Safe retries only: when the connection breaks, requests that change nothing (or the same thing
twice) are sent again to the server that answers next; others end in ServerUnavailable. Tensors
are numpy or torch; torch is never imported here unless a module is exported or torch came in.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import uuid
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from ..base.errors import InvalidInput, ModelNotFound
from ..wire.addresses import default_address, full_address
from ..wire.frames import CHUNK_BYTES
from ..wire.keys import keys_from
from ..wire.register_request import RegisterRequest
from ..wire.tracing import Traced, open_tracer
from .calls import Reply, as_wait_s
from .connection import Connection
from .events import Subscription
from .holders import RETURN_S
from .model_sources import Dynamic, Inputs, LocalSource, declared
from .sequence import Sequenced
from .tensors import Result, from_reply, to_frames
from .verbs import Progress, Verbs, progress_caller

if TYPE_CHECKING:
    from .generation import GenerationStream

CONNECT_TIMEOUT_S: Final = 2.5
LOG_WAIT_S: Final = 0.5  # between looks at a log that is followed when no event came


class Client(Verbs):
    """A connection to a server. Use it as a context manager, from any number of threads.

    Args:
        address: ``host:port``, ``tcp://host:port``, ``ipc://path``, or of many machines
            ``cluster``, ``ray://host:port``; default:
            ``PIPESWITCH_HOST``, else the owner's ipc socket if a server listens there, else
            ``tcp://127.0.0.1:5555``.
        timeout_s: maximum time for the server to answer the first hello, and later for nobody to
            listen at the address. If a server listens but does not answer, it is restarting: a
            connected client waits 30 s for it, or until a call's ``deadline_ms``.
        key: this client's ``.key_secret`` file; default: ``PIPESWITCH_KEY``. TCP only.
        server_key: the server's public key, or its file; default: ``PIPESWITCH_SERVER_KEY``.
        shared_memory: pass tensors of 64 KiB or more to your own server in memory that both map;
            False: through the socket.

    Every verb raises an error of ``pipeswitch.errors``: ``ServerUnavailable`` when none answers,
    ``PermissionDenied`` when the server does not know the key.

    Where OpenTelemetry is set up when this is made (a tracer provider, or an exporter by the
    ``OTEL_…`` variables), each inference is a span, under the caller's current one.
    """

    def __init__(
        self,
        address: str | None = None,
        *,
        timeout_s: float = CONNECT_TIMEOUT_S,
        key: str | os.PathLike[str] | None = None,
        server_key: str | os.PathLike[str] | None = None,
        shared_memory: bool = True,
    ) -> None:
        if address is not None and not isinstance(address, str):
            raise InvalidInput(f"an address is a text, not {address!r}", hint='Client("gpu1:5555")')
        self.address = full_address(address) if address else default_address(os.environ)
        keys = None
        if self.address.startswith("ray://"):
            from .cluster import ClusterConnection

            self._connection: Connection | ClusterConnection = ClusterConnection(
                self.address, timeout_s
            )
        else:
            if not self.address.startswith("ipc://"):  # the owner's listener asks for none
                keys = keys_from(key, server_key, os.environ)
            self._connection = Connection(
                self.address, timeout_s, keys, shared_memory=shared_memory, return_s=RETURN_S
            )
        self._tracer = open_tracer()
        self.tokenizers: dict[str, Any] = {}  # by program, of language models
        self._subscriptions: weakref.WeakSet[Subscription] = weakref.WeakSet()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection; what still waits for an answer ends in Cancelled, events end."""
        for subscription in list(self._subscriptions):
            subscription.close()
        self._connection.close()

    # ---- inference -----------------------------------------------------------------------------

    def submit(
        self,
        model: str,
        /,
        *inputs: Any,
        deadline_ms: float | None = None,
        priority: str = "",
        version: int = 0,
        **named: Any,
    ) -> Future[Result]:
        """Send a request; the future holds its Result. ``future.cancel()`` takes it back.

        The future's callbacks run in the thread that reads the answers: they may ``submit``, and
        ``close``, but not wait for an answer of this client (that is an ``InvalidInput``).

        Args:
            model: its registered name.
            *inputs: the arguments, as the module itself takes them; or all of them in one
                sequence in call order, or in one mapping by name. An argument may nest: dicts,
                lists, tuples, dataclasses and None around arrays. They are not copied: leave them
                unchanged until the result is there.
            deadline_ms: from now. A request that still waits then is not computed and ends in
                ``DeadlineExceeded``; one that computes already is answered, though late.
            priority: high, normal or low; empty: the model's own.
            version: of the model; 0: the current one. ``result.timing.version`` says which it was.
            **named: inputs by name, instead of ``inputs`` or after them.
        """
        asked = self._request(model, inputs, deadline_ms, priority, version, named)
        send = self._connection.request
        return send("infer", **asked) if self._tracer is None else self._traced(send, model, asked)

    def infer(
        self,
        model: str,
        /,
        *inputs: Any,
        deadline_ms: float | None = None,
        priority: str = "",
        version: int = 0,
        **named: Any,
    ) -> Result:
        """``submit`` and wait for the result; alone on this client it saves two thread switches."""
        asked = self._request(model, inputs, deadline_ms, priority, version, named)
        send = self._connection.call
        result: Result = (
            send("infer", **asked) if self._tracer is None else self._traced(send, model, asked)
        )
        return result

    def _traced(self, send: Callable[..., Any], model: str, asked: dict[str, Any]) -> Any:
        """Call ``send`` within a span of the request; return its future or result."""
        traced = Traced(self._tracer, model)
        if traced.traceparent:
            asked["body"] = {**(asked["body"] or {}), "traceparent": traced.traceparent}
        try:
            answer = send("infer", **asked)
        except BaseException as error:
            traced.failed(error)
            raise
        if isinstance(answer, Future):
            answer.add_done_callback(traced.over)
        else:
            traced.answered(answer.timing.as_dict())
        return answer

    @staticmethod
    def _request(
        model: str,
        inputs: tuple[Any, ...],
        deadline_ms: float | None,
        priority: str,
        version: int,
        named: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the arguments of ``Connection.request`` for an inference."""
        given = inputs[0] if len(inputs) == 1 else inputs or None
        if given is None:
            given = named
        elif named or len(inputs) > 1:
            given = _arguments(inputs, named)
        tensors, frames, wants_torch = to_frames(given)
        if not isinstance(priority or "", str):
            raise InvalidInput(f"priority must be a text, got {priority!r:.80}")
        try:
            deadline_ms = None if deadline_ms is None else float(deadline_ms)
        except (TypeError, ValueError, OverflowError):
            raise InvalidInput(f"deadline_ms must be a number, got {deadline_ms!r:.80}") from None
        return {
            "model": model,
            "inputs": tensors,
            "frames": frames,
            "deadline_ms": deadline_ms,
            "priority": priority or "",
            "body": {"version": version} if version else None,
            "is_safe": True,
            "convert": partial(from_reply, model, wants_torch),
        }

    def profile(
        self,
        name: str,
        batches: Sequence[int] = (),
        *,
        inputs: Callable[[int], Any] | None = None,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Measure a model layer by layer with requests of this client, and return its profile.

        No other client and no job may use the device meanwhile.

        Args:
            name: of a model that is ready.
            batches: batch sizes to time; the groups are planned for the first one. Default: the
                batch size of the model's requests.
            inputs: returns the inputs of a request with that batch size. Default: random inputs.
            progress: called as the work proceeds.

        Raises:
            DeviceBusy: other requests or a job use the device, at the start or later.
        """
        from .measuring import Requests, measure

        body = {"batches": list(batches)}
        begin = partial(self._connection.request, "profile", model=name, body=body)
        requests = Requests(partial(self.infer, name), partial(self.signature, name), inputs)
        return measure(begin, requests, progress)

    def sequence(self, model: str, *, id: str = "", version: int = 0) -> Sequenced:
        """Requests that go on from what the one before left: of a model with a ``state``.

        ``with client.sequence("cell") as s: s.infer(x)``. Its state stays on the server, and is
        given back when the block ends.

        Args:
            id: what ``pipeswitch sequences`` calls it; empty: made up.
            version: of the model, for all of it; 0: the one that is current as it starts.
        """
        return Sequenced(self._step, self.end_sequence, model, id or uuid.uuid4().hex, version)

    def _step(self, model: str, *asked: Any, **sequence: Any) -> Result:
        """Send a step of a sequence once only: sent again, it would be two steps."""
        request = self._request(model, *asked)
        request |= {"is_safe": False, "body": {**(request["body"] or {}), **sequence}}
        future = (
            self._connection.request("infer", **request)
            if self._tracer is None
            else (self._traced(self._connection.request, model, request))
        )
        result: Result = future.result()
        return result

    def generate(
        self,
        model: str,
        prompt: str | Sequence[int],
        *,
        max_new_tokens: int = 128,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int = 0,
        stop: Sequence[str] = (),
        priority: str = "",
        version: int = 0,
        **options: Any,
    ) -> GenerationStream:
        """Text from a language model: ``for token in client.generate("chat", "Once"): …``.

        Args:
            model: registered with ``generate``.
            prompt: a text, for the model's own tokenizer (the extra ``text``), or
                token ids: then its tokens have no text.
            max_new_tokens: the maximum number of new tokens; the model's context may end it sooner.
            temperature: the randomness of the choice; 0 takes the likeliest token.
            top_p: sample from the smallest set of tokens whose probabilities sum to ``top_p``;
                1 disables the filter.
            seed: equal seeds give equal tokens, whatever else the server does.
            stop: texts that end the answer; they are not part of it.
            priority: as in ``infer``.
            version: as in ``infer``.
            options: the rarer ones: ``logprobs`` (report each token's log probability, and those
                of this many likeliest tokens, 0 to 20), ``top_k``, ``min_p``,
                ``repetition_penalty``, ``presence_penalty``, ``frequency_penalty``, ``logit_bias``.

        Returns:
            An iterator over tokens, each with ``id`` and ``text``, and with ``logprobs`` also
            ``logprob`` and ``top`` (pairs of id and log probability); its ``text`` is all of it.
        """
        from .generation import generated  # numpy, and the pure parts of text

        return generated(
            self,
            model,
            prompt,
            version=version,
            priority=priority,
            stop=tuple(stop),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            options=options or None,
        )

    def sequences(self) -> list[dict[str, Any]]:
        """Return the sequences that are kept: id, model, steps, bytes. The owner sees all."""
        rows: list[dict[str, Any]] = self._ask("sequences")["sequences"]
        return rows

    def end_sequence(self, id: str) -> None:
        """Give a sequence's state back, as its own client would.

        Raises:
            SequenceNotFound: there is none of this name.
        """
        self._ask("sequences", body={"end": id}, is_safe=False)

    def prefetch(self, model: str) -> None:
        """A hint that requests for ``model`` follow; it is not answered."""
        self._connection.notify("prefetch", model=model)

    # ---- models --------------------------------------------------------------------------------

    def register(
        self,
        name: str,
        source: Any = "",
        *,
        as_version: bool = False,
        weights: str | os.PathLike[str] = "",
        inputs: Inputs | None = None,
        example_inputs: Any = None,
        dynamic: Dynamic | None = None,
        priority: str = "",
        pin: bool = False,
        max_batch: int = 0,
        batch: int = 0,
        batch_delay_ms: float = 0.0,
        devices: Sequence[str] = (),
        preprocess: str = "",
        raw: Inputs | None = None,
        postprocess: str = "",
        returns: Inputs | None = None,
        state: Mapping[str, str | tuple[str, int]] | None = None,
        generate: bool = False,
        tokenizer: Any = None,
        precision: str = "",
        max_error: float = 0.0,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Make a model servable; returns when requests for it are accepted.

        The row's ``notes`` say what was decided on the way, such as why a length is fixed.
        Modules are exported in this process, one at a time. Threads that compute meanwhile do
        without mkldnn and cudnn: slower, and with other last bits.

        Args:
            name: what requests will call it.
            source: ``torchvision:NAME``, ``hf:NAME[#CLASS]``, a ``.bundle`` or ``.pt2`` file of
                this machine, or a ``.pt`` of TorchScript with its ``inputs`` or
                ``example_inputs``; ``package.module:factory`` (of the server's), or an
                ``nn.Module``, which is exported here and sent as graph and safetensors.
            as_version: make ``weights`` the next version of the model that has this name, as a
                publication does; without ``source`` and everything else.
            weights: ``random:SEED``, ``pretrained``, or a file of this machine: safetensors, or
                what ``torch.save(module.state_dict(), "weights.pt")`` wrote.
            inputs: shapes and dtypes where the source does not know them, by the arguments' names,
                nested as they are; ``(1, 512)`` in a shape is a range that requests choose from.
            example_inputs: for a module: what its ``forward`` takes, nested as it is; a mapping
                gives keywords, and with numbers as keys places too, ``{0: x, "scale": s}``. For
                ``package.module:factory`` the same by name; values are not made up then.
            dynamic: for a module: the dimensions beside the batch that requests choose, and their
                ranges: ``{"ids": {1: (1, 512)}}``, ``{"cache.0.key": {2: (1, 512)}}``. Equal
                ranges with equal extents in the example are one dimension; a name sets one apart:
                ``("source", 1, 512)``. ``"cache.*.k"`` is each input of such a name. Torch's own
                form will do too: ``torch.export.Dim("length", min=1, max=512)``, a tuple in the
                inputs' order.
            priority: of its requests, unless they say otherwise.
            pin: keep it on the device.
            max_batch: largest dynamic batch; 0: the server's default.
            batch: join waiting requests into one run of up to this many rows; 0: never, but those
                of a language model (``generate``) up to ``max_batch``. ``show``
                says whether the last bits of an answer then depend on the batch (``batching``).
            batch_delay_ms: how long a request waits for others though the device is free.
            devices: the server's devices that may serve it, by name or kind (``cuda:1``, ``cpu``);
                none: all of the first one's kind.
            preprocess: ``package.module:function`` of the server's, which makes the model's inputs
                from what requests send. It gets numpy arrays by the names of ``raw``, in a process
                beside the devices, and returns an array, or a dict of arrays by input name.
            raw: shapes and dtypes of what requests then send, as in ``inputs``, not nested:
                ``{"image": (((1, 1 << 22),), "uint8")}`` takes a file's bytes, and
                ``{"text": (((1, 64),), "bytes")}`` up to 64 texts, ``bytes`` objects there.
            postprocess: a function as ``preprocess``, which is called with the model's outputs and
                makes the answer from them.
            returns: shapes and dtypes of that answer, as ``raw``.
            state: what a ``sequence`` keeps from one request to the next: names of inputs, and of
                the outputs that they come from, ``{"h": "h_out"}``, of equal shapes; or that are
                appended along a dimension, ``{"cache": ("rows", 1)}``.
            generate: a causal language model of transformers (``hf:NAME``, or the model itself), as
                one program whose ``state`` is its cache. It says why one cannot be.
            tokenizer: with that, for a model itself: its fast tokenizer of transformers. ``hf:``
                brings its own; without one, prompts and answers are ids.
            precision: ``exact`` (the module's bits), ``fast`` (packed weights), ``bf16``, ``int8``
                (fewer bytes). Empty: ``fast`` with ``generate``, else ``exact``. The row's
                ``precision`` has the measurements.
            max_error: refuse an error larger than this share of the module's largest output. 0:
                0.001 for ``fast``, 0.05 for ``bf16``, 0.1 for ``int8``.
            progress: called as the work proceeds; what it raises ends the wait, not the work.

        Raises:
            RegistrationRefused: the model cannot be served; the error says why.
            AlreadyExists: another model has this name.
            HostStoreFull: the host store has no room for its weights.
            OutOfDeviceMemory: it does not fit on the device.
            PermissionDenied: this client may not register.
        """
        takes, signature = declared(inputs)
        state = state or {}  # an output alone replaces its input
        request = RegisterRequest(
            as_version=as_version,
            weights=os.fspath(weights or ""),
            inputs=signature,
            takes=takes,
            priority=priority,
            pin=pin,
            devices=tuple(devices),
            max_batch=max_batch,
            batch=batch,
            batch_delay_ms=batch_delay_ms,
            preprocess=preprocess,
            raw=declared(raw, nests=False)[1],
            postprocess=postprocess,
            returns=declared(returns, nests=False)[1],
            state={key: (one, -1) if isinstance(one, str) else one for key, one in state.items()},
            generate=generate,
            precision=precision,
            max_error=max_error,
        )
        local = LocalSource(source, example_inputs, dynamic, tokenizer)
        return self._register(name, request, local, progress)

    def _register(
        self,
        name: str,
        request: RegisterRequest,
        local: LocalSource,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Upload what ``local`` has, then send the registration; the command line fills its own."""
        body = local.send(request, self.upload, progress).body()
        future = self._connection.request(
            "register",
            model=name,
            body=body,
            is_safe=True,  # the same registration again is a no-op
            on_progress=progress_caller(progress),
        )
        return {"notes": [], **future.result().body}  # a new version has none

    def upload(
        self, path: str | os.PathLike[str], kind: str, progress: Progress | None = None
    ) -> str:
        """Send a file in chunks, as many on their way as the server gives credit for.

        Returns:
            ``put:DIGEST``, to name in ``register``. A file the server has is not sent again.
        """
        try:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                size = os.fstat(file.fileno()).st_size
                self._send_file(file, digest, size, kind, progress)
        except FileNotFoundError:
            raise InvalidInput(f"no file {os.fspath(path)!r}") from None
        return f"put:{digest}"

    def _send_file(
        self, file: Any, digest: str, size: int, kind: str, progress: Progress | None
    ) -> None:
        body = {"digest": digest, "size_bytes": size, "kind": kind}
        first = self._connection.request("put", body={**body, "offset_bytes": 0}).result().body
        waiting: list[Future[Reply]] = []
        file.seek(0)
        offset = 0
        while offset < size and not first["complete"]:
            if len(waiting) >= int(first["credit"]):
                waiting.pop(0).result()
            chunk = file.read(CHUNK_BYTES)
            frames = [chunk]
            waiting.append(
                self._connection.request(
                    "put", body={**body, "offset_bytes": offset}, frames=frames
                )
            )
            offset += len(chunk)
            _report(progress, "upload", offset / size)
        for future in waiting:
            future.result()

    # ---- jobs ----------------------------------------------------------------------------------

    def train(
        self,
        entry: str | os.PathLike[str],
        *,
        name: str = "",
        args: Sequence[str] = (),
        priority: str = "",
        share: str = "",
        devices: Sequence[str] = (),
        offload: str | None = None,
        activation_memory: str | int | None = None,
    ) -> Task:
        """Start a training script as a background job.

        Args:
            entry: a script's path on the server's machine (a relative one is made absolute here)
                or ``package.module:function``.
            name: of the job; default: the script's own, in the allowed letters.
            args: its command line.
            priority: among jobs.
            share: jobs of one group find each other's ``job.shared`` batches.
            devices: the server's devices that may train it, of one kind, by name or kind; none:
                all of the first one's kind.
            offload: which saved activations leave the device, unless the script says it.
            activation_memory: device memory for saved activations, unless the script says it.

        Raises:
            InvalidInput: there is no such script, or it is no Python; no such ``offload``.
        """
        if isinstance(args, str):
            raise InvalidInput(f"args is one text, {args!r}", hint="a list: args=[...]")
        text = os.fspath(entry)
        is_script = text.endswith(".py") or os.sep in text
        if is_script:
            _refuse_bad_syntax(text)
        body = {
            "name": name or job_name(text),
            "entry": os.path.abspath(text) if is_script else text,
            "args": [str(arg) for arg in args],
            "priority": priority,
            "share": share,
            **({"offload": offload} if offload else {}),
            **({"activation_memory": str(activation_memory)} if activation_memory else {}),
            **({"devices": list(devices)} if devices else {}),
        }
        self._connection.request("train", body=body).result()
        return Task(self, str(body["name"]))

    def task(self, name: str) -> Task:
        """The handle of a job that is there already."""
        return Task(self, name)

    # ---- events ---------------------------------------------------------------------------------

    def events(self, *topics: str, timeout_s: float | None = None) -> Iterator[dict[str, Any]]:
        """Records as the server publishes them; each has ``topic``. No topic: all of them.

        They tell what all clients do, so they need the role ``operate`` (``PermissionDenied``).

        The subscription is made before this returns; records before it are not replayed.

        Args:
            *topics: prefixes: ``switch. model. job. worker. queue.``
            timeout_s: end after this long without a record; None: never.
        """
        records = _records(self.subscribe(*topics), as_wait_s(timeout_s))
        next(records)  # one that is never looked at closes its connection too
        return records

    def subscribe(self, *topics: str, on_news: Callable[[], None] = lambda: None) -> Subscription:
        """The subscription behind ``events``; you close it. ``on_news``: as of ``Subscription``."""
        made = Subscription(self._connection.another(), topics, on_news)
        self._subscriptions.add(made)
        return made


class Task:
    """A training job's handle. Rows have the keys of ``pipeswitch jobs --json``."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self.name = name

    def __repr__(self) -> str:
        return f"Task({self.name!r})"

    def status(self) -> dict[str, Any]:
        """Return its row now."""
        return self._row("show")

    def pause(self) -> dict[str, Any]:
        """Commit, give the device back, hold until ``resume``."""
        return self._row("pause")

    def resume(self) -> dict[str, Any]:
        """Resume a paused job, or restart a failed one from its last commit.

        Raises:
            InvalidInput: the job is done or cancelled.
            ServerUnavailable: its commit cannot be read.
            HostStoreFull: the host store has no room for its commit.
        """
        return self._row("resume")

    def cancel(self) -> dict[str, Any]:
        return self._row("cancel")

    def move(self, to: str) -> dict[str, Any]:
        """Train on that device (``cpu:1``) or node of a cluster from now on, behind its last step.

        Raises:
            InvalidInput: there is no such device, or the job is over.
        """
        return self._row("move", to=to)

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Block until the job is over; its last row.

        Raises:
            TaskFailed: its script raised.
            TimeoutError: it is not over after ``timeout_s``.
        """
        body, wait_s = {"name": self.name, "action": "wait"}, as_wait_s(timeout_s)
        future = self._client._connection.request("job", body=body, is_safe=True)
        return dict(future.result(wait_s).body["job"])

    def logs(self, follow: bool = False) -> Iterator[str]:
        """The log from its start, in pieces; ``follow`` goes on until the job is over."""
        news = self._client.subscribe("job.") if follow else None
        offset = 0
        try:
            while True:
                # Asked before reading: what is written before the end is read after it.
                is_over = not follow or self.status()["state"] in FINAL_JOB_STATES
                for piece in self._pieces("logs", offset):
                    offset = piece["offset_bytes"]
                    if piece["text"]:
                        yield piece["text"]
                if is_over:
                    return
                if news is not None and news.take(LOG_WAIT_S):
                    while news.take(0):  # any news will do: the log itself is read
                        continue
        finally:
            if news is not None:
                news.close()

    def history(self) -> list[dict[str, Any]]:
        """All that its ``job.log`` reported, by step: ``{"step": 3, "loss": 0.5}``.

        A step that was computed again after a restart is there once, as it was the last time.
        """
        rows: dict[int, dict[str, Any]] = {}
        with contextlib.suppress(ModelNotFound):  # it has reported nothing
            pieces = self._pieces("history")
            for line in "".join(piece["text"] for piece in pieces).splitlines():
                with contextlib.suppress(ValueError):  # cut off by a worker's death
                    row = json.loads(line)
                    rows.setdefault(row["step"], {}).update(row)
        return [rows[step] for step in sorted(rows)]

    def export(self, path: str | os.PathLike[str], part: str = "") -> dict[str, Any]:
        """Write its newest commit's parameters and buffers to a safetensors file; its row.

        They have the names of the model's ``state_dict()``; if a job trains several models, behind
        their key in ``job.steps(model={…})``, unless ``part`` is one of these keys.
        ``persisted_step`` in the row is their step.

        Raises:
            InvalidInput: it has committed nothing, or has no such part.
        """
        from ..commits import weights as files  # numpy

        target = Path(path)
        if not target.parent.is_dir():
            raise InvalidInput(f"no folder {str(target.parent)!r}")
        row = self._row("export")
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}-") as file:
            digest = ""
            for piece in self._pieces("state"):
                if piece["digest"] != digest:  # the first, or a newer commit's
                    digest = piece["digest"]
                    file.truncate(file.seek(0))
                file.write(piece["data"])
            file.flush()
            every = files.weights_of(files.read_image(Path(file.name)))
            found = files.of_part(every, part) if part else files.for_anybody(every)
            files.save_weights(found, target)
        return row

    def remove(self) -> dict[str, Any]:
        """Drop what is kept of it; it must be over."""
        return self._row("rm")

    def _pieces(self, kind: str, offset: int = 0) -> Iterator[dict[str, Any]]:
        """All of a file from there on; from its start again when another has taken its place."""
        digest = None
        while True:
            piece = self._client.job(self.name, kind, offset_bytes=offset)
            if digest not in (None, piece.get("digest")):
                offset, digest = 0, None
                continue
            digest = piece.get("digest")
            yield piece
            if piece["offset_bytes"] in (offset, piece["end_bytes"]):
                return
            offset = piece["offset_bytes"]

    def _row(self, action: str, **fields: Any) -> dict[str, Any]:
        return dict(self._client.job(self.name, action, **fields)["job"])


FINAL_JOB_STATES: Final = frozenset({"done", "failed", "cancelled", "expired"})


def _refuse_bad_syntax(path: str) -> None:
    """Raise InvalidInput if a script has a mistake; one on the server's machine is not read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            compile(Path(path).read_bytes(), path, "exec")
    except SyntaxError as error:
        where = f"{path}:{error.lineno}"
        raise InvalidInput(f"{where}: {error.msg}", hint=(error.text or "").strip()) from None
    except (OSError, ValueError):
        return


def job_name(entry: str) -> str:
    """A job's name made from its script or module: ``My Train.py`` becomes ``my-train``."""
    stem = entry.split(":")[0].rsplit(".", 1)[-1] if ":" in entry else Path(entry).stem
    letters = [c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in stem.lower()]
    return "".join(letters).strip("._-")[:64] or "job"


def _report(progress: Progress | None, stage: str, fraction: float) -> None:
    if progress is not None:
        progress(stage, fraction)


def _records(subscription: Subscription, timeout_s: float | None) -> Iterator[dict[str, Any]]:
    """Records, behind an empty one: a generator that was not begun would not end either."""
    try:
        yield {}
        while (record := subscription.take(timeout_s)) is not None:
            yield record
    finally:
        subscription.close()


def _arguments(inputs: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Return the arguments of a call by place and by name.

    Raises:
        InvalidInput: all arguments are in one sequence or mapping, and others beside it.
    """
    if not named and all(hasattr(value, "dtype") for value in inputs):
        return inputs
    if named and len(inputs) == 1 and isinstance(inputs[0], list | tuple | Mapping):
        raise InvalidInput(
            f"inputs are given together and by name ({', '.join(named)})",
            hint='client.infer(model, a, b, x=x), or all in one mapping: {"x": x, …}',
        )
    return {**{str(place): value for place, value in enumerate(inputs)}, **named}
