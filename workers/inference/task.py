"""One inference task: each layer group computes as soon as it has arrived (PipeSwitch 4.2)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch

from pipeswitch.base import failpoints
from pipeswitch.base.errors import PipeSwitchError, RegistrationRefused, to_wire
from pipeswitch.base.extras import RUNNERS
from pipeswitch.base.failpoints import reach
from pipeswitch.devices.cpu.packed import missing_half
from pipeswitch.devices.worker_device import WorkerDevice, now_ms
from pipeswitch.ipc.channel import Channel
from pipeswitch.ipc.messages.base import ModelName, SlabTensor
from pipeswitch.ipc.messages.run import Run
from pipeswitch.ipc.messages.worker import (
    InferenceDone,
    InferenceFailed,
    PrepareModel,
    RunInference,
    Shapes,
    Yielded,
)
from pipeswitch.programs import spec as specs
from pipeswitch.programs.graphs.bundle import Bundle, Graph, read_bundle
from pipeswitch.programs.graphs.operators import checked_by
from pipeswitch.programs.graphs.zeroed import allocator_switch
from pipeswitch.programs.interface.dims import shape_at, values_of
from pipeswitch.programs.interface.groups import (
    TableByRows,
    landed_tensors,
    regrouped,
    table_by_rows,
)
from pipeswitch.programs.interface.layout import TENSOR_ALIGN_BYTES, KindSettings, Manifest
from pipeswitch.programs.running import executor
from pipeswitch.programs.running.tensor_views import cut, tensor_over
from pipeswitch.programs.running.torch_settings import construct_without_data

from .pool import KindRun, MappedPool, Runner

WARM_SIDE: Final = 512  # side of a matrix; large enough that torch uses all its threads

Wanted = RunInference | PrepareModel
Version = tuple[str, tuple[int, ...]]  # digest and plan for which a program was loaded
Place = tuple[int, tuple[int, ...]]  # region's offset; for a streamed model, also each group's
Source = str | os.PathLike[str] | int  # a path, or a descriptor if the sandbox forbids opening


class Programs:
    """Program structures that this worker has loaded, and their parameters bound in the arena."""

    def __init__(self, view: WorkerDevice) -> None:
        self._view = view
        self._files: dict[ModelName, list[int]] = {}  # manifest and bundle, until they are read
        self._read: dict[ModelName, tuple[str, Manifest, Graph | None]] = {}  # first the digest
        self._programs: dict[ModelName, tuple[Version, executor.Program]] = {}
        self._bound: dict[ModelName, tuple[Version, Place, executor.BoundProgram]] = {}
        self.kinds: dict[str, Runner] = {}  # kind of settings -> its runner
        self.runners: dict[ModelName, Runner] = {}  # of models whose bundles have settings
        self.captured: tuple[Shapes, ...] = ()  # by the last task, until it is reported
        allocator_switch()  # must run while this process may still open a file

    def take_files(self, model: ModelName, descriptors: list[int]) -> None:
        """Keep the descriptors of a program's files; they are read at the first request for it."""
        self._close_files(model)
        self._files[model] = descriptors

    def _close_files(self, model: ModelName) -> None:
        for descriptor in self._files.pop(model, ()):
            os.close(descriptor)

    def prepare(self, message: PrepareModel) -> None:
        """Load the structure; bind the parameters if the model has a region in the arena."""
        self._program(message)
        if message.arena_offset_bytes >= 0:
            self.bound(message)

    def warm_up(self, message: PrepareModel) -> None:
        """Run a loaded program with zeros as weights and inputs, and capture its CUDA graphs,
        unless another task has the turn or too little memory is free."""
        view, bound, program = self._view, self.bound(message), self._program(message)
        if not view.trim(program.manifest.total_bytes):  # the weights are this process's own
            return

        def before_group(_: int) -> None:
            if view.control_page.turn > message.op_id:
                raise InterruptedError("another task has the turn")

        def zeros(dtype: str, shape: tuple[int, ...]) -> torch.Tensor:
            return torch.zeros(shape, dtype=getattr(torch, dtype), device=view.device)

        try:
            with view.computing(None):
                weights = zeros("uint8", (program.manifest.total_bytes,)).untyped_storage()
                scratch = program.bind(lambda spec: tensor_over(weights, spec, 0))
                scratch.run([zeros(*one[:2]) for one in message.shapes], before_group)
                view.quiesce()
            view.improve(bound, message.shapes)
        except Exception as error:  # a request will report it
            if view.is_lost(error):
                raise

    def _program(self, model: Wanted) -> executor.Program:
        version = (model.digest, model.plan)
        known = self._programs.get(model.model)
        if known is not None and known[0] == version:
            return known[1]
        _, manifest, graph = self._structure(model)
        form = manifest.precision
        kernels = self._view.kernels(form.layout) if form is not None else None
        program = make_program(regrouped(manifest, model.plan), graph, self._view.device, kernels)
        self._programs[model.model] = (version, program)
        self._unbind(model.model)
        return program

    def _structure(self, model: Wanted) -> tuple[str, Manifest, Graph | None]:
        known = self._read.get(model.model)
        if known is None or known[0] != model.digest:
            folder = Path(model.directory)
            files: Sequence[Source] = self._files.get(model.model, (folder / specs.MANIFEST_FILE,))
            manifest = specs.load_manifest(files[0])
            bundle_file = files[1] if len(files) > 1 else folder / specs.weights_file(manifest)
            if manifest.digest != model.digest:
                raise RegistrationRefused("manifest", "it is another program's")
            bundle = read_program(manifest, bundle_file)
            known = (model.digest, manifest, None if bundle is None else bundle.graph)
            self._take_settings(model, None if bundle is None else bundle.settings)
            self._read[model.model] = known
            self._close_files(model.model)
        return known

    def _take_settings(self, model: Wanted, settings: KindSettings | None) -> None:
        self.runners.pop(model.model, None)
        if settings is not None:
            if settings.kind not in self.kinds:
                self.kinds[settings.kind] = RUNNERS.load(settings.kind)()
            runner = self.runners[model.model] = self.kinds[settings.kind]
            runner.take(model.digest, settings)

    def bound(self, model: Wanted) -> executor.BoundProgram:
        """Return the program bound in its region; cached, because regions seldom move."""
        version, offset = (model.digest, model.plan), model.arena_offset_bytes
        place = (offset, model.staging)
        known = self._bound.get(model.model)
        if known is not None and known[:2] == (version, place):
            return known[2]
        program = self._program(model)
        self._unbind(model.model)
        landed = landed_tensors(program.manifest, model.staging)
        bound = self._view.program(
            program.bind(lambda spec: self._view.tensor(landed.get(spec.name, spec), offset))
        )
        self._bound[model.model] = (version, place, bound)
        return bound

    def _unbind(self, model: ModelName) -> None:
        known = self._bound.pop(model, None)
        if known is not None:
            self._view.drop(known[2])

    def remove(self, model: ModelName) -> None:
        self._close_files(model)
        known, runner = self._read.pop(model, None), self.runners.pop(model, None)
        if known is not None and runner is not None:
            runner.remove(known[0])
        self._programs.pop(model, None)
        self._unbind(model)

    def clear(self) -> None:
        for model in {*self._files, *self._read}:
            self.remove(model)


def read_program(manifest: Manifest, bundle: Source) -> Bundle | None:
    """Return the bundle; None in module mode, which has no bundle.

    Raises:
        RegistrationRefused: the file is damaged, or was not checked by this server's version of
            torch and of the operators' contracts.
    """
    if not specs.is_checked(manifest):
        raise RegistrationRefused("manifest", "not checked by this server", hint="register again")
    if manifest.mode == "module":
        return None
    is_derived = manifest.precision is not None
    return read_bundle(bundle, manifest.head_sha256, is_derived=is_derived)


def make_program(
    manifest: Manifest,
    graph: Graph | None,
    device: torch.device | str,
    kernels: executor.PackedKernels | None = None,
) -> executor.Program:
    """Return a program that compiles the graph or, in module mode, runs the operator's factory.

    It holds no parameter bytes: the memory daemon copies them to the arena.
    """
    if graph is not None:
        return executor.GraphProgram(manifest, graph, device, kernels)
    code, seed = manifest.extra.get("code", {}), manifest.extra.get("seed", 0)
    module, settings = construct_without_data(manifest.source, code, seed)
    return executor.ModuleProgram(manifest, module, device, settings)


def warm_up() -> None:
    """Run torch's first computations now, before the sandbox forbids their system calls.

    This starts all compute threads of this process; the libraries also inspect the processor.
    """
    checked_by()  # reads torch's version from a file
    missing_half()  # requests the processor's matrix registers (AMX) from Linux
    square = torch.ones(WARM_SIDE, WARM_SIDE)
    torch.mm(square, square).sum()
    torch.nn.functional.conv2d(torch.ones(1, 16, 16, 16), torch.ones(16, 16, 3, 3))


class _Groups:
    """Callback before each group: waits for the group's fence and opens access to its weights."""

    def __init__(
        self,
        view: WorkerDevice,
        message: RunInference,
        manifest: Manifest,
        task: Channel,
        slot: int,
    ) -> None:
        self._view, self._message = view, message
        self._task, self._slot, self._turn = task, slot, message.op_id
        self._groups = manifest.groups
        self._first_word = message.first_fence
        self._epoch = message.residency_id
        self._landings = message.staging  # for a streamed model: each group's offset
        self._is_timed = message.is_timed
        self.begins_ms: list[float] = []
        self.ends_ms: list[float] = []
        self.stall_ms = 0.0

    def __call__(self, index: int) -> None:
        if index < len(self.begins_ms):
            return  # a later step of the run
        if self._is_timed:
            self._view.quiesce()  # measure the group's computation, not its enqueueing
        if self._landings:
            self._view.report_computed(self._epoch, index)
        if self.begins_ms:
            self.ends_ms.append(now_ms())
        must = self._landings and self._view.control_page.stop(self._slot) == self._turn
        if must and self._view.can_yield:
            self._step_aside()
        self.stall_ms += self._view.wait_group(self._first_word + index, self._epoch)
        group = self._groups[index]
        if self._landings:
            self._view.show_landing(self._landings[index], group.size_bytes)
        else:
            self._view.show(group.offset_bytes + group.size_bytes)
        self._begin()

    def _begin(self) -> None:
        """Record the beginning of a group."""
        if failpoints.is_on:
            reach("worker.infer.group")
        self.begins_ms.append(now_ms())

    def end(self) -> None:
        """Record the end of the last group of a timed run, before the outputs are written."""
        self._view.quiesce()
        self.ends_ms.append(now_ms())

    def _step_aside(self) -> None:
        """Give the device to another task; block until this task gets its next turn."""
        self._view.quiesce()
        control_page = self._view.control_page
        control_page.write_stop(self._slot, 0)  # the scheduler sets it again if another task waits
        control_page.write_turn(0)
        self._task.send(Yielded(op_id=self._turn))
        self.stall_ms += self._view.wait_turn(self._turn)


class _GroupsByRows(_Groups):
    """Callback of a run for which rows of a table arrive first, and all of it later (ADR 67)."""

    def __init__(self, bound: executor.BoundProgram, pool: MappedPool, *own: Any) -> None:
        super().__init__(*own)
        self._bound, self._pool, self._table = bound, pool, table_by_rows(bound.manifest)

    def __call__(self, index: int) -> None:
        """Wait for the group, or for its rows. In a later step, only the table may be missing."""
        table, is_later = self._table, index < len(self.begins_ms)
        if table is not None and (
            index == table.before
            or (index == table.group and (is_later or not self._read_rows(table)))
        ):
            self._table = None
            self._await(table.group)
        if is_later:
            return
        if self.begins_ms:
            self.ends_ms.append(now_ms())
        if self._table is None or index != self._table.group:
            self._await(index)
        self._begin()

    def _await(self, index: int) -> None:
        self.stall_ms += self._view.wait_group(self._first_word + index, self._epoch)
        self._view.show_landing(self._groups[index].offset_bytes, self._groups[index].size_bytes)

    def _read_rows(self, table: TableByRows) -> bool:
        """Wait for the rows; return False if one does not exist."""
        slabs = [run.inputs[table.index_input] for run in self._message.runs]
        zero = torch.zeros(1, dtype=torch.int64)  # padding looks up row 0
        rows = torch.cat([zero, *[self._pool.own(slab).view(-1).long() for slab in slabs]])
        if int(rows.min()) < 0 or int(rows.max()) >= table.rows:
            return False  # the operator refuses such rows
        fence = self._first_word + len(self._groups)
        self.stall_ms += self._view.wait_group(fence, self._epoch)
        [weight] = self._groups[table.group].tensors
        spec, place = self._bound.manifest.tensors[weight], self._message.arena_offset_bytes
        private = self._view.table_of(spec, place, rows)
        if private is not None and isinstance(self._bound, executor.BoundGraph):
            self._bound.replace_once(table.group, weight, private)
        return True


def infer(
    message: RunInference,
    programs: Programs,
    pool: MappedPool,
    view: WorkerDevice,
    task: Channel,
    slot: int,
) -> bool:
    """Run one request and report the result; return the report's ``is_clean``."""
    try:
        if failpoints.is_on:
            reach("worker.infer.received")
        bound = programs.bound(message)
        steps, kind, inputs, rows = _opened(message, bound, programs, pool, view, slot)
        if not view.wait_first_turn(message.op_id, slot):
            return False
        turn_at_ms = now_ms()
        reach("worker.infer.turn")
        view.control_page.write_begun(slot, message.op_id)  # a later death may be the model's fault
        while True:
            groups = kind(view, message, bound.manifest, task, slot)
            try:
                with view.computing(bound):
                    outputs = (bound if steps is None else steps).run(inputs, groups)
                    if message.is_timed:
                        groups.end()
                    reach("worker.infer.outputs")
                    slabs = _write(bound, outputs, message, rows, pool, steps)
                    view.quiesce()
                break
            except torch.OutOfMemoryError:
                if not view.leave_slice(bound) or message.staging:
                    raise  # a streamed model's first groups are already overwritten
        ended_at_ms = now_ms()
        groups.stall_ms += view.waited_ms
        groups.ends_ms += [] if message.is_timed else [ended_at_ms]
        if steps is not None:
            programs.runners[message.model].ended(message, steps, ended_at_ms - turn_at_ms)
    except BaseException as error:  # a model's own code may fail here, or call sys.exit
        return _report_failure(message, view, task, slot, error)
    is_clean = not view.can_improve(bound)
    reach("worker.infer.done")
    task.send(
        InferenceDone(
            op_id=message.op_id,
            outputs=tuple(slabs),
            turn_at_ms=turn_at_ms,
            first_group_at_ms=groups.begins_ms[0] if groups.begins_ms else turn_at_ms,
            ended_at_ms=ended_at_ms,
            stall_ms=groups.stall_ms,
            is_clean=is_clean,
            tokens=() if steps is None else steps.tokens(),
            chances=() if steps is None else steps.chances(),
            group_begins_at_ms=tuple(groups.begins_ms),
            group_ends_at_ms=tuple(groups.ends_ms),
        )
    )
    if not is_clean:
        programs.captured = view.improve(bound)
    return is_clean


def _opened(
    message: RunInference,
    bound: executor.BoundProgram,
    programs: Programs,
    pool: MappedPool,
    view: WorkerDevice,
    slot: int,
) -> tuple[KindRun | None, Callable[..., _Groups], list[torch.Tensor], list[int]]:
    """Open program and inputs; return the kind's run, the callback's class, inputs, their rows."""
    manifest, region_bytes = bound.manifest, bound.manifest.total_bytes
    if message.staging:
        pairs = zip(message.staging, manifest.groups, strict=True)
        region_bytes = max([landing + group.size_bytes for landing, group in pairs])
    _lend_inputs(view, message, manifest)
    # A run by rows opens each group by itself.
    last_fence = -1 if message.by_rows else message.first_fence + message.last_group
    view.enter(message.arena_offset_bytes, region_bytes, last_fence, message.residency_id)
    if pool.batched_for and pool.batched_for != message.model:
        pool.let_go()
    for one in programs.kinds.values():
        one.let_go(manifest.digest)
    steps, runner = None, programs.runners.get(message.model)
    if runner is not None and (len(message.runs) > 1 or message.runs[0].sampling_params):
        waits = partial(_waits, view, slot, message)
        steps = runner.begin(message, bound, pool, view.device, waits)
    kind = partial(_GroupsByRows, bound, pool) if message.by_rows else _Groups
    return steps, kind, *_inputs(message, pool, steps, runner)


def _report_failure(
    message: RunInference, view: WorkerDevice, task: Channel, slot: int, error: BaseException
) -> bool:
    """Report a failed task when its turn comes; re-raise if this process cannot continue.
    Return False, because the error's traceback still holds the task's tensors."""
    if view.is_lost(error):
        fault = view.fault()
        if fault is not None:  # a retry would break one worker after another
            task.send(_failure(message, fault))
        raise error  # this process is replaced; unless a failure was sent, the request is retried
    # A task that failed early takes and ends its turn, too.
    if view.wait_first_turn(message.op_id, slot):
        task.send(_failure(message, error))
    return False


def _waits(view: WorkerDevice, slot: int, message: RunInference) -> bool:
    """Return True if another request waits for this task's turn to end."""
    return view.control_page.stop(slot) == message.op_id


def _lend_inputs(view: WorkerDevice, message: RunInference, manifest: Manifest) -> None:
    """Map a single run's inputs until the next task; the operator's own module may write to them.

    Inputs of one run lie in one slab, in order. Inputs that a chain or a sequence kept lie in
    slabs of their own, and other requests' slabs may lie between them."""
    slabs: list[tuple[int, int]] = []
    for one in message.runs[0].inputs if len(message.runs) == 1 else ():
        if one.pieces:  # pieces are gathered into a copy instead
            continue
        start, end = one.offset_bytes, one.offset_bytes + one.size_bytes
        if slabs and 0 <= start - slabs[-1][1] < TENSOR_ALIGN_BYTES:
            slabs[-1] = slabs[-1][0], end
        else:
            slabs.append((start, end))
    if slabs:
        view.map_inputs(tuple(slabs), writable=manifest.mode == "module")
    else:
        view.unmap_inputs()


def _inputs(
    message: RunInference, pool: MappedPool, steps: KindRun | None, runner: Runner | None
) -> tuple[list[torch.Tensor], list[int]]:
    """Return the program's inputs, and the row count of each run if several are batched.

    Batched runs lie in one tensor, in private memory of the pool or of the runner.
    """
    if len(message.runs) == 1 and (steps is None or not steps.most):
        return [pool.tensor(slab, is_code=message.is_code) for slab in message.runs[0].inputs], []
    rows = [run.inputs[0].shape[0] for run in message.runs]
    if steps is not None and steps.most:
        pool.let_go()
        return steps.inputs(), rows
    if runner is not None:
        runner.let_go()
    columns = zip(*(run.inputs for run in message.runs), strict=True)
    return pool.batched(columns, message.model), rows


def _write(
    bound: executor.BoundProgram,
    outputs: list[torch.Tensor],
    message: RunInference,
    rows: list[int],
    pool: MappedPool,
    steps: KindRun | None,
) -> list[tuple[SlabTensor, ...]]:
    """Write each run's outputs to its own slab, without padding; a kind's run may write its own.
    ``split`` raises if the outputs have other row counts than the inputs."""
    manifest = bound.manifest
    parts: Iterable[Sequence[torch.Tensor]] = [outputs]
    if rows:
        parts = zip(*(torch.split(value, rows) for value in outputs), strict=True)
    slabs = []
    for number, (run, part) in enumerate(zip(message.runs, parts, strict=True)):
        own = _its_own(part, run, manifest) if rows and manifest.pads else part
        values, own = (manifest.outputs, own) if steps is None else steps.outputs_of(number, own)
        slabs.append(pool.write(values, own, run.reply_offset_bytes, run.reply_bytes))
    return slabs


def _its_own(outputs: Sequence[torch.Tensor], run: Run, manifest: Manifest) -> list[torch.Tensor]:
    shapes = (slab.shape for slab in run.inputs)
    own = values_of((spec.shape for spec in manifest.inputs), shapes)
    assert own is not None
    pairs = zip(outputs, manifest.outputs, strict=True)
    return [cut(output, shape_at(spec.shape, own)) for output, spec in pairs]


def _failure(message: RunInference, error: BaseException) -> InferenceFailed:
    if isinstance(error, PipeSwitchError):
        wire = to_wire(error)
        return InferenceFailed(
            op_id=message.op_id,
            error=wire["type"],
            message=wire["message"],
            data={key: str(value) for key, value in wire["data"].items()},
        )
    kind, text = type(error).__name__, _text(error)
    return InferenceFailed(
        op_id=message.op_id,
        error="TaskFailed",
        message=f'"{message.model}" raised {kind}: {text}',
        data={"type": kind, "text": text},
    )


def _text(error: BaseException) -> str:
    """Return the error's text in a form that can be sent; a model's own ``__str__`` may raise."""
    try:
        return str(error)[:2000].encode("utf-8", "replace").decode()
    except Exception:
        return "(no text: its __str__ raised)"
