"""SDK: ``Client`` connects to a server. Any thread may use it; a background thread does the I/O.

If the connection breaks, safe requests (those that change nothing, or that may be repeated) are
sent again to the next server that answers; others end in ServerUnavailable. Tensors are numpy or
torch. The SDK imports torch only to export a module, or if the caller passes torch tensors.
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
from typing import Any, Final, Unpack

from ..base.errors import InvalidInput, ModelNotFound
from ..base.extras import METHODS, SCHEMES
from ..base.model_options import RegisterRequest
from ..wire.addresses import default_address, full_address
from ..wire.frames import CHUNK_BYTES
from ..wire.tracing import Traced, open_tracer
from .calls import RETURN_S, FinalReply, as_wait_s
from .connection import Connection
from .model_sources import Dynamic, LocalSource, RegisterOptions, request_of, with_options
from .sequence import RequestSequence
from .subscription import Subscription
from .tensors import Result, from_reply, to_frames
from .verbs import Progress, Verbs, as_texts, progress_caller, repeated

CONNECT_TIMEOUT_S: Final = 2.5
LOG_WAIT_S: Final = 0.5  # after this time without an event, ``logs`` reads the log again


class Client(Verbs):
    """Connection to a server. Use it as a context manager, from any number of threads.

    Args:
        address: ``host:port``, ``tcp://host:port`` or ``ipc://path``; for a cluster of machines
            ``cluster``. Extras add schemes. Default: ``PIPESWITCH_HOST``, else the owner's ipc
            socket if a server listens there, else ``tcp://127.0.0.1:5555``.
        timeout_s: maximum wait for the server's first answer, and later for a server to listen at
            the address again. A server that listens but does not answer is restarting: a connected
            client waits 30 s for its answer, or until a call's ``deadline_ms``.
        key: this client's ``.key_secret`` file; default: ``PIPESWITCH_KEY``. TCP only.
        server_key: the server's public key, or its file; default: ``PIPESWITCH_SERVER_KEY``.
        shared_memory: pass tensors of 64 KiB or more through shared memory if the server is your
            own; False: through the socket.

    Verbs raise errors of ``pipeswitch.errors``: ``ServerUnavailable`` if no server answers,
    ``PermissionDenied`` if the server does not know the key.

    If OpenTelemetry is set up before the client is created (a tracer provider, or an exporter in
    the ``OTEL_…`` variables), each inference is a child of the caller's current span.
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
        scheme = self.address.partition("://")[0]
        keys = _named_keys(key, server_key) if scheme == "tcp" else ()  # the owner needs none
        self._connection: Connection
        if any(keys):
            self._connection = SCHEMES.load(scheme)(self.address, timeout_s, *keys)
        elif scheme in ("ipc", "tcp"):
            self._connection = Connection(
                self.address, timeout_s, shared_memory=shared_memory, return_s=RETURN_S
            )
        else:
            self._connection = SCHEMES.load(scheme)(self.address, timeout_s)
        self._tracer = open_tracer()
        self._subscriptions: weakref.WeakSet[Subscription] = weakref.WeakSet()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection. Calls without a reply end in Cancelled, and event iterators end."""
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
        """Send a request; return a future for its Result. ``future.cancel()`` cancels the request.

        The future's callbacks run in the thread that reads the replies. They may ``submit`` and
        ``close``. A callback that waits for a result of the same client gets ``InvalidInput``.

        Args:
            model: registered name of the model.
            *inputs: the arguments, as the module itself takes them; or one sequence of them in
                call order, or one mapping by name. An argument may be nested: dicts, lists, tuples,
                dataclasses and None around arrays. Arrays are not copied: do not change them before
                the result arrives.
            deadline_ms: deadline, counted from now. A request that has not begun by then ends in
                ``DeadlineExceeded``; a request that has begun to compute still gets its result.
            priority: high, normal or low; empty: the model's default.
            version: version of the model; 0: the current one. ``result.timing.version`` reports it.
            **named: inputs by name, instead of ``inputs`` or after them.
        """
        request = self._request(model, inputs, deadline_ms, priority, version, named)
        send = self._connection.request
        return (
            send("infer", **request) if self._tracer is None else self._traced(send, model, request)
        )

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
        """Send a request, as ``submit`` does, and wait for its result.

        If no other call is under way, this saves the two thread switches of ``submit``.
        """
        request = self._request(model, inputs, deadline_ms, priority, version, named)
        send = self._connection.call
        result: Result = (
            send("infer", **request) if self._tracer is None else self._traced(send, model, request)
        )
        return result

    def _traced(self, send: Callable[..., Any], model: str, request: dict[str, Any]) -> Any:
        """Call ``send`` within a span of the request; return its future or its result."""
        traced = Traced(self._tracer, model)
        if traced.traceparent:
            request["body"] = {**(request["body"] or {}), "traceparent": traced.traceparent}
        try:
            answer = send("infer", **request)
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
        values = inputs[0] if len(inputs) == 1 else inputs or None
        if values is None:
            values = named
        elif named or len(inputs) > 1:
            values = _arguments(inputs, named)
        tensors, frames, wants_torch = to_frames(values)
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
            name: name of a model that is ready.
            batches: batch sizes to time; the groups are planned for the first one. Default: the
                batch size of the model's requests.
            inputs: returns the inputs of a request with that batch size. Default: random inputs.
            progress: called as the work proceeds.

        Raises:
            DeviceBusy: other requests or a job use the device, at the start or later.
        """
        begin = partial(self._connection.request, "regroup", model=name)
        measure = METHODS.load("profile")
        row: dict[str, Any] = measure(self, begin, name, batches, inputs, progress)
        return row

    def sequence(self, model: str, *, id: str = "", version: int = 0) -> RequestSequence:
        """Return a sequence of requests to a model with a ``state``.

        Use ``with client.sequence("cell") as s: s.infer(x)``. The server keeps the state between
        the requests and frees it when the block ends.

        Args:
            id: id of the sequence, as in ``pipeswitch sequences``; empty: a random one.
            version: version of the model for the whole sequence; 0: the current one at its start.
        """
        return RequestSequence(
            self._step, self.end_sequence, model, id or uuid.uuid4().hex, version
        )

    def _step(self, model: str, *options: Any, **sequence: Any) -> Result:
        """Send a step of a sequence. It is unsafe to send twice: the server would do two steps."""
        request = self._request(model, *options)
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
        stop: str | Sequence[str] = (),
        priority: str = "",
        version: int = 0,
        **options: Any,
    ) -> Any:
        """Generate text: ``for token in client.generate("chat", "Once"): …``.

        Args:
            model: name of a model that was registered with ``generate``.
            prompt: a text, which needs the model's tokenizer and the extra ``text``; or token ids,
                for which the generated tokens have no text.
            max_new_tokens: maximum number of new tokens; the model's context may allow fewer.
            temperature: the randomness of the choice; 0 takes the likeliest token.
            top_p: sample from the smallest set of tokens whose probabilities sum to ``top_p``; 1
                disables this.
            seed: equal seeds give equal tokens, whatever else the server does.
            stop: texts that end the generated text; they are not part of it.
            priority: as in ``infer``.
            version: as in ``infer``.
            options: less common options: ``logprobs`` (0 to 20: report the log probability of
                each token, and of this many likeliest tokens), ``top_k``, ``min_p``,
                ``repetition_penalty``, ``presence_penalty``, ``frequency_penalty``, ``logit_bias``.

        Returns:
            An iterator over tokens with ``id`` and ``text``; with ``logprobs`` also ``logprob`` and
            ``top`` (pairs of id and log probability). The iterator's ``text`` is the whole text.
        """
        return METHODS.load("generate")(
            self,
            model,
            prompt,
            version=version,
            priority=priority,
            stop=as_texts(stop),
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            seed=seed,
            options=options or None,
        )

    def sequences(self) -> list[dict[str, Any]]:
        """Return this client's sequences, for the owner all: rows with id, model, steps, bytes."""
        rows: list[dict[str, Any]] = self._ask("sequences")["sequences"]
        return rows

    def end_sequence(self, id: str) -> None:
        """End a sequence and free its state, like ``close`` of the sequence itself.

        Raises:
            SequenceNotFound: the server keeps no sequence with this id.
        """
        self._ask("sequences", body={"end": id}, is_safe=False)

    def prefetch(self, model: str) -> None:
        """Hint to the server that requests for ``model`` will follow. Do not wait for a reply."""
        self._connection.notify("prefetch", model=model)

    # ---- models --------------------------------------------------------------------------------

    @with_options
    def register(
        self,
        name: str,
        source: Any = "",
        *,
        as_version: bool = False,
        example_inputs: Any = None,
        dynamic: Dynamic | None = None,
        tokenizer: Any = None,
        progress: Progress | None = None,
        **options: Unpack[RegisterOptions],
    ) -> dict[str, Any]:
        """Register a model; return when the server accepts requests for it.

        The result's ``notes`` explain what was decided, such as why a length is fixed. Modules
        are exported in this process, one at a time. Meanwhile other threads compute without
        mkldnn and cudnn: slower, and with different last bits.

        Args:
            name: name of the model in requests.
            source: ``torchvision:NAME``, ``hf:NAME[#CLASS]``; a local ``.bundle`` or ``.pt2`` file,
                or a local TorchScript ``.pt`` with its ``inputs`` or ``example_inputs``;
                ``package.module:factory``, which the server imports; or an ``nn.Module``, which is
                exported here and sent as a graph and safetensors.
            as_version: make ``weights`` the next version of the registered model, as ``publish``
                does. Give only ``name`` and these two, and ``precision`` if it changes.
            example_inputs: for a module: the arguments of its ``forward``. In a mapping, names are
                keywords and numbers are positions: ``{0: x, "scale": s}``. For
                ``package.module:factory``: values by name, instead of generated ones.
            dynamic: for a module: ranges of the dimensions, other than the batch, that requests
                may choose: ``{"ids": {1: (1, 512)}}``, ``{"cache.0.key": {2: (1, 512)}}``. Equal
                ranges with equal extents in the example are one dimension; a name makes one
                separate: ``("source", 1, 512)``. ``"cache.*.k"`` matches all inputs with such
                names. PyTorch's own forms work too: ``torch.export.Dim("length", min=1, max=512)``,
                and a tuple in the order of the inputs.
            tokenizer: fast tokenizer of transformers for a model object with ``generate``; ``hf:``
                sources have their own. Without one, prompts and generated texts are token ids.
            progress: called as the work proceeds. If it raises, this call ends, but not the work.
            options: those of ``[[model]]`` in docs/guide/settings.md, which
                ``help(Client.register)`` lists, in Python's forms: ``inputs={"x": ((8, (1, 512)),
                "int64")}``, nested like the arguments, with a range of sizes; ``raw`` and
                ``returns`` alike but flat; ``state={"h": "h_out", "cache": ("rows", 1)}``: an
                output that replaces the input, or is appended along dimension 1. ``preprocess`` and
                ``postprocess`` get and return arrays by name, in a CPU process.

        Raises:
            RegistrationRefused: the model cannot be served; the error says why.
            AlreadyExists: another model has this name.
            HostStoreFull, OutOfDeviceMemory: the host store or the device has no room for it.
            PermissionDenied: this client may not register.
        """
        request = request_of(options, as_version=as_version)
        local = LocalSource(source, example_inputs, dynamic, tokenizer)
        return self._register(name, request, local, progress)

    def _register(
        self,
        name: str,
        request: RegisterRequest,
        local: LocalSource,
        progress: Progress | None = None,
    ) -> dict[str, Any]:
        """Upload the local files, then send the registration. The command line calls this, too."""
        files: list[tuple[str | os.PathLike[str], str]] = []

        def upload(path: str | os.PathLike[str], kind: str, progress: Progress | None) -> str:
            files.append((path, kind))
            return self.upload(path, kind, progress)

        def upload_again() -> None:
            for path, kind in files:
                self.upload(path, kind, progress)

        def register() -> dict[str, Any]:
            future = self._connection.request(
                "register",
                model=name,
                body=sent.body(),
                is_safe=True,  # the same registration again is a no-op
                on_progress=progress_caller(progress),
            )
            return {"notes": [], **future.result().body}  # a reply for a new version has no notes

        with local.sent(request, upload, progress) as sent:
            return repeated(register, upload_again)

    def upload(
        self, path: str | os.PathLike[str], kind: str, progress: Progress | None = None
    ) -> str:
        """Send a file in chunks. The server's credit limits the chunks that are under way.

        Returns:
            ``put:DIGEST``, for ``register``. A file that the server already has is not sent again.
        """
        try:
            with open(path, "rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
                size = os.fstat(file.fileno()).st_size
                repeated(lambda: self._send_file(file, digest, size, kind, progress))
        except FileNotFoundError:
            what = f"no file {os.fspath(path)!r}"
            raise InvalidInput(what, hint="give the path of a file on this machine") from None
        return f"put:{digest}"

    def _send_file(
        self, file: Any, digest: str, size: int, kind: str, progress: Progress | None
    ) -> None:
        body = {"digest": digest, "size_bytes": size, "kind": kind}
        send = partial(self._connection.request, "put", is_safe=True)  # ``upload`` sends all again
        reply = send(body={**body, "offset_bytes": 0}).result().body
        waiting: list[Future[FinalReply]] = []
        file.seek(0)
        offset = 0
        while offset < size and not reply["complete"]:  # another upload may complete the file
            if len(waiting) >= int(reply["credit"]):
                reply = waiting.pop(0).result().body
                continue
            if not (chunk := file.read(CHUNK_BYTES)):
                raise InvalidInput("a file became shorter while it was sent", hint="send it again")
            frames = [chunk]
            waiting.append(send(body={**body, "offset_bytes": offset}, frames=frames))
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
        devices: str | Sequence[str] = (),
        offload: str | None = None,
        activation_memory: str | int | None = None,
        folder: str | os.PathLike[str] | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Task:
        """Start a training script as a background job.

        Args:
            entry: a script's path on the server's machine (a relative one is made absolute here)
                or ``package.module:function``.
            name: name of the job; default: made from the script's name.
            args: command-line arguments of the script.
            priority: priority among jobs.
            share: name of a group of jobs that share their ``job.shared`` batches.
            devices: devices of the server that may train it, by name or kind, all of one kind;
                empty: all devices of the same kind as the first one.
            offload: which saved activations leave the device, unless the script sets it.
            activation_memory: device memory for saved activations, unless the script sets it.
            folder: current folder of the script. Default: this process's, if the server is on this
                machine, else the script's folder.
            env: variables for the script, besides those of the server.

        Raises:
            InvalidInput: the script is missing or not valid Python, ``offload`` is unknown, or the
                server cannot use ``folder`` or ``env``.
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
            **({"devices": as_texts(devices)} if devices else {}),
            **({"env": [f"{name}={value}" for name, value in env.items()]} if env else {}),
        }
        if folder is not None or self.address.startswith("ipc://"):
            body["folder"] = os.path.abspath(folder or "")
        self._connection.request("train", body=body).result()
        return Task(self, str(body["name"]))

    def task(self, name: str) -> Task:
        """Return the handle of an existing job."""
        return Task(self, name)

    # ---- events ---------------------------------------------------------------------------------

    def events(self, *topics: str, timeout_s: float | None = None) -> Iterator[dict[str, Any]]:
        """Return an iterator over records that the server publishes; each record has a ``topic``.

        Records show what all clients do, so you need the role ``operate`` (else
        ``PermissionDenied``). The subscription is confirmed before this returns; earlier records
        are not replayed.

        Args:
            *topics: prefixes of topics: ``switch. model. job. worker. queue.``; none: all.
            timeout_s: end after this many seconds without a record; None: never.
        """
        records = _records(self.subscribe(*topics), as_wait_s(timeout_s))
        next(records)  # run to the first ``yield``, so that ``finally`` closes the connection
        return records

    def subscribe(self, *topics: str, on_news: Callable[[], None] = lambda: None) -> Subscription:
        """Return a new subscription; close it after use. ``Subscription`` explains ``on_news``."""
        subscription = Subscription(self._connection.another(), topics, on_news)
        self._subscriptions.add(subscription)
        return subscription


class Task:
    """Handle of a training job. Its rows have the keys of ``pipeswitch jobs --json``."""

    def __init__(self, client: Client, name: str) -> None:
        self._client = client
        self.name = name

    def __repr__(self) -> str:
        return f"Task({self.name!r})"

    def status(self) -> dict[str, Any]:
        """Return the job's current row."""
        return self._row("show")

    def pause(self) -> dict[str, Any]:
        """Pause the job until ``resume``: it commits and releases the device."""
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
        """Move the job to a device (``cpu:1``) or a node; it continues after its last step.

        Raises:
            InvalidInput: there is no such device, or the job is over.
        """
        return self._row("move", to=to)

    def wait(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Block until the job is over; return its last row.

        Raises:
            TaskFailed: the script raised an error.
            TimeoutError: the job is not over after ``timeout_s``.
        """
        wait_s, future = as_wait_s(timeout_s), self._end()
        try:
            return dict(future.result(wait_s).body["job"])
        finally:
            future.cancel()  # otherwise the server keeps the request after a timeout

    def _end(self) -> Future[FinalReply]:
        """Return a future for the reply at the job's end."""
        body = {"name": self.name, "action": "wait"}
        return self._client._connection.request("job", body=body, is_safe=True)

    def logs(self, follow: bool = False) -> Iterator[str]:
        """Yield the log from its start, in pieces; with ``follow``, until the job is over."""
        news = self._client.subscribe("job.") if follow else None
        offset = 0
        try:
            while True:
                # Get the state before reading, so that the last read is after the job's end.
                is_over = not follow or self.status()["state"] in FINAL_JOB_STATES
                for piece in self._pieces("logs", offset):
                    offset = piece["offset_bytes"]
                    if piece["text"]:
                        yield piece["text"]
                if is_over:
                    return
                if news is not None and news.take(LOG_WAIT_S):
                    while news.take(0):  # events only wake this loop; the text comes from the log
                        continue
        finally:
            if news is not None:
                news.close()

    def history(self) -> list[dict[str, Any]]:
        """Return all values of ``job.log``, a row for each step: ``{"step": 3, "loss": 0.5}``.

        A step that was computed again after a restart has one row, with its latest values.
        """
        rows: dict[int, dict[str, Any]] = {}
        with contextlib.suppress(ModelNotFound):  # the job has logged nothing
            pieces = self._pieces("history")
            for line in "".join(piece["text"] for piece in pieces).splitlines():
                with contextlib.suppress(ValueError):  # a line that a worker's death cut off
                    row = json.loads(line)
                    rows.setdefault(row["step"], {}).update(row)
        return [rows[step] for step in sorted(rows)]

    def export(self, path: str | os.PathLike[str], part: str = "") -> dict[str, Any]:
        """Write the newest commit's parameters and buffers to safetensors; return the job's row.

        The names are those of the model's ``state_dict()``. If a job trains several models, each
        name begins with the model's key in ``job.steps(model={…})``. With ``part``, only that
        key's model is written, without the key. The row's ``persisted_step`` is the commit's.

        Raises:
            InvalidInput: the job has no commit or no such part.
        """
        from ..commits import weights as files  # numpy

        target = Path(path)
        if not target.parent.is_dir():
            raise InvalidInput(f"no folder {str(target.parent)!r}")
        row = self._row("export")
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=f".{target.name}-") as file:
            digest = ""
            for piece in self._pieces("state"):
                if piece["digest"] != digest:  # the first piece, or the first of a newer commit
                    digest = piece["digest"]
                    file.truncate(file.seek(0))
                file.write(piece["data"])
            file.flush()
            every = files.weights_of(files.read_image(Path(file.name), digest))
            weights = files.of_part(every, part) if part else files.for_anybody(every)
            files.save_weights(weights, target)
        return row

    def remove(self) -> dict[str, Any]:
        """Delete everything that the server stores about the job. The job must be over."""
        return self._row("rm")

    def _pieces(self, kind: str, offset: int = 0) -> Iterator[dict[str, Any]]:
        """Yield a file from ``offset`` on, in pieces; start again at 0 if the file was replaced."""
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


def _named_keys(*paths: str | os.PathLike[str] | None) -> tuple[str, ...]:
    """Return the client's key and the server's, from the arguments or the environment."""
    names = ("PIPESWITCH_KEY", "PIPESWITCH_SERVER_KEY")
    return tuple(
        os.fspath(os.environ.get(name, "") if path is None else path)
        for name, path in zip(names, paths, strict=True)
    )


def _refuse_bad_syntax(path: str) -> None:
    """Raise InvalidInput if a script has a syntax error; accept one that only the server reads."""
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
    """Return a job's name for its script or module: ``My Train.py`` becomes ``my-train``."""
    stem = entry.split(":")[0].rsplit(".", 1)[-1] if ":" in entry else Path(entry).stem
    letters = [c if c.isascii() and (c.isalnum() or c in "._-") else "-" for c in stem.lower()]
    return "".join(letters).strip("._-")[:64] or "job"


def _report(progress: Progress | None, stage: str, fraction: float) -> None:
    if progress is not None:
        progress(stage, fraction)


def _records(subscription: Subscription, timeout_s: float | None) -> Iterator[dict[str, Any]]:
    """Yield an empty record, then the subscription's records. The caller takes the empty one, which
    starts the generator: the ``finally`` of a generator that never started would not run."""
    try:
        yield {}
        while (record := subscription.take(timeout_s)) is not None:
            yield record
    finally:
        subscription.close()


def _arguments(inputs: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
    """Return the arguments of a call by position and by name.
    Raises InvalidInput: a sequence or mapping holds all arguments, but some are also passed by
    name."""
    if not named and all(hasattr(value, "dtype") for value in inputs):
        return inputs
    if named and len(inputs) == 1 and isinstance(inputs[0], list | tuple | Mapping):
        raise InvalidInput(
            f"inputs are given together and by name ({', '.join(named)})",
            hint='client.infer(model, a, b, x=x), or all in one mapping: {"x": x, …}',
        )
    return {**{str(place): value for place, value in enumerate(inputs)}, **named}
