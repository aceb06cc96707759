"""Simulated worker: a main thread that computes or runs a script, and a termination thread."""

from __future__ import annotations

from functools import partial

from ...ipc.messages import worker as worker_msg
from ...ipc.messages.base import Message, OpId, Ping, Pong, SlabTensor, Turn
from ...ipc.messages.run import Run
from ...scheduler.state.events import Address
from ...scheduler.state.records import NO_OP_ID
from .clock import Move
from .device import ByteSpan, User, Violation, region_of, require
from .process import SimulatedProcess
from .simulated_script import SimulatedScript

OF_A_JOB = (
    worker_msg.StopTask
    | worker_msg.GrantTurn
    | worker_msg.EvictTask
    | worker_msg.LeaseGranted
    | worker_msg.LeaseRefused
    | worker_msg.HideSlice
    | worker_msg.ShowSlice
)


class SimulatedInference:
    """Run in a worker, and its progress. It begins when it has the turn."""

    def __init__(
        self, order: worker_msg.RunInference, costs_ms: tuple[float, ...], now_ms: float
    ) -> None:
        self.order = order
        self.costs_ms = costs_ms  # computing time of each group
        self.turn_at_ms = now_ms
        self.has_begun = False
        self.hangs = False
        self.begins_at_ms: list[float] = []
        self.ends_at_ms: list[float] = []

    @property
    def next_group(self) -> int:
        return len(self.ends_at_ms)

    def computed(self, now_ms: float) -> None:
        """Record the times of a computed group; it ends now, or later if the last one was late."""
        cost_ms = self.costs_ms[self.next_group]
        last_ms = self.ends_at_ms[-1] if self.ends_at_ms else self.turn_at_ms
        begin_ms = max(last_ms, now_ms - cost_ms)
        self.begins_at_ms.append(begin_ms)
        self.ends_at_ms.append(begin_ms + cost_ms)


class SimulatedWorker(SimulatedProcess):
    """Simulated worker: the process in a slot."""

    def __init__(self, address: Address, *of_process: object) -> None:
        super().__init__(f"worker {address.slot}", address, *of_process)  # type: ignore[arg-type]
        self.slot = address.slot
        self.is_ready = False
        self.is_replacement = False  # the worker gets its task before it is ready
        self.runs_code: bool | None = None
        self.inference: SimulatedInference | None = None
        self.script: SimulatedScript | None = None
        self.begun: OpId | None = NO_OP_ID  # the worker's word on the control page; None: unknown
        self.lease: ByteSpan | None = None  # slice, from the grant until the worker is reaped
        self.taken_back: tuple[OpId, ...] = ()  # tasks that it must drop
        self._preparing: worker_msg.PrepareModel | None = None
        self._cleaning = NO_OP_ID
        self._job_op_id = NO_OP_ID  # operation id of the RunJob that it was sent

    @property
    def computes(self) -> bool:
        """True if the worker uses the device now (invariant I5)."""
        if self.status is not None:
            return False
        if self.inference is not None:
            return self.inference.has_begun
        return self.script is not None and self.script.computes

    @property
    def orders(self) -> list[worker_msg.RunInference]:
        """Runs that it computes, or that are on their way to it."""
        waiting = [m for m in self.inbox.get("task", ()) if isinstance(m, worker_msg.RunInference)]
        orders = [self.inference.order, *waiting] if self.inference is not None else waiting
        return [order for order in orders if order.op_id not in self.taken_back]

    def take_back(self, op_id: OpId) -> None:
        """Drop a task without a turn when the main thread reads it; it may have failed already."""
        require(self.scene.device.turn != op_id, "a task that has its turn is taken back")
        if op_id in [order.op_id for order in self.orders]:
            self.taken_back += (op_id,)

    def users(self) -> list[User]:
        """Return every range that the worker reads or writes."""
        contents = self.scene.device.contents
        users = [] if self.lease is None else [(f"the slice of {self.name}", self.lease)]
        for order in self.orders:
            region = region_of(contents[order.model].order)
            users.append((f"{order.model}, which {self.name} reads", region))
        return users

    # -- messages ------------------------------------------------------------------------------

    def hear(self, channel: str, message: Message) -> None:
        may_hear = self.is_ready or self.is_replacement or not self.runs
        require(may_hear, f"{self.name} is used before it is ready")
        match message:
            case worker_msg.RunInference(model=model, plan=plan):
                require(not self._job_op_id, f"a request for a job's process: {self.name}")
                require(not self.orders, f"two tasks on {self.name}")
                program = self.scene.programs[model]
                self.scene.device.check_order(message, len(plan) or len(program.plan))
            case worker_msg.RunJob(op_id=op_id):
                require(not self.orders and not self._job_op_id, f"{self.name} is taken")
                self._job_op_id = op_id
            case worker_msg.GrantTurn() if self.script is not None:
                require(not self.script.computes, "granted what it never gave up")
        if isinstance(message, OF_A_JOB) and message.op_id != self._job_op_id:
            raise Violation(f"{message} names another dispatch")
        super().hear(channel, message)

    def steps(self) -> list[Move]:
        costs = self.scene.costs
        if not self.is_ready:
            return [Move("task", "starts", costs.start_ms, self._becomes_ready)]
        hears = self._reads("signal", self._hears) if self.may_hear else []
        return hears + self.main_steps()

    def main_steps(self) -> list[Move]:
        """Return the next steps of the main thread."""
        costs, script = self.scene.costs, self.script
        if self.inference is not None:
            return self._inference_steps(self.inference)
        if script is not None:
            if script.phase == "over" and not script.is_stubborn:
                return [Move("main", "leaves", 0.0, partial(self.end, 0))]
            return script.steps()
        if self._cleaning:
            return [Move("main", "cleans", 0.0, self._cleaned)]
        if self._preparing is not None:
            return [Move("main", "prepares", costs.prepare_ms, self._prepared)]
        return self._reads("task", self._takes)

    def _becomes_ready(self) -> None:
        self.is_ready = True
        self.say("task", worker_msg.WorkerReady(slot=self.slot, pid=100 + self.slot))

    def _cleaned(self) -> None:
        self.say("task", worker_msg.WorkerClean(op_id=self._cleaning))
        self._cleaning = NO_OP_ID

    @property
    def may_hear(self) -> bool:
        """True if a signal waits that can be handled now: a ping, or one for a started script."""
        signals = self.inbox.get("signal")
        if not signals:
            return False
        return self.script is not None or isinstance(signals[0], Ping)

    def _hears(self, message: Message) -> None:
        """Handle a message on the termination thread, independent of the task."""
        if isinstance(message, Ping):
            self.say("signal", Pong(op_id=message.op_id))
        elif self.script is not None:
            self.script.hears(message)

    def _prepared(self) -> None:
        order, self._preparing = self._preparing, None
        assert order is not None
        error = "no" if self.scene.choices.happens("prepare_error", order.model) else ""
        self.say(
            "task",
            worker_msg.ModelPrepared(
                model=order.model, digest=order.digest, plan=order.plan, error=error
            ),
        )

    def _takes(self, message: Message) -> None:
        match message:
            case worker_msg.PrepareModel():
                self._preparing = message
            case worker_msg.ForgetModel():
                pass
            case worker_msg.RunInference():
                self._receives(message)
            case worker_msg.RunJob():
                area = self.scene.commits.get(message.job)
                saved = None if area is None else area.last()
                self.script = SimulatedScript(message, self.scene, self.say, saved)
            case _:
                raise Violation(f"a worker takes no {message}")

    # -- inference -----------------------------------------------------------------------------

    def _receives(self, order: worker_msg.RunInference) -> None:
        happens, program = self.scene.choices.happens, self.scene.programs[order.model]
        batch, prompts = len(order.runs), self.scene.prompts
        more = sum(prompts.get(run.request_id, 0.0) for run in order.runs)
        costs_ms = program.group_ms(order.plan, batch, more)
        self.inference = SimulatedInference(order, costs_ms, self.scene.clock.now_ms)
        self.inference.hangs = happens("hang", order.model)
        if happens("early_error", order.model):
            self._fails("TaskFailed", "it does not load")

    def _inference_steps(self, task: SimulatedInference) -> list[Move]:
        """Return the next move of a run: begin, yield, compute a group that is there, or answer."""
        order, device = task.order, self.scene.device
        if not task.has_begun:
            if order.op_id in self.taken_back:
                return [Move("main", "drops", 0.0, self._drops)]
            is_its_turn = device.turn == order.op_id
            return [Move("main", "begins", 0.0, self._begins)] if is_its_turn else []
        if task.hangs:
            return []
        is_asked = device.stop_words.get(self.slot) == order.op_id
        if order.staging and is_asked and 0 < task.next_group < len(task.costs_ms):
            return [Move("main", "yields", 0.0, partial(self._steps_aside, task))]
        if task.next_group == len(task.costs_ms):
            return [Move("main", "answers", 0.0, self._answers)]
        if not device.has_arrived(order, task.next_group):
            return []
        return [Move("main", "computes", task.costs_ms[task.next_group], self._computes_group)]

    def _begins(self) -> None:
        task = self.inference
        assert task is not None
        task.has_begun, self.begun = True, task.order.op_id
        if not task.begins_at_ms:
            task.turn_at_ms = self.scene.clock.now_ms

    def _drops(self) -> None:
        assert self.inference is not None
        op_id = self._cleaning = self.inference.order.op_id
        self.inference = None
        self.taken_back = tuple([one for one in self.taken_back if one != op_id])

    def _steps_aside(self, task: SimulatedInference) -> None:
        device, op_id = self.scene.device, task.order.op_id
        require(device.turn == op_id, "it gives away what it has not")
        device.turn, task.has_begun = Turn(0), False
        device.stop_words = {**device.stop_words, self.slot: NO_OP_ID}
        self.say("task", worker_msg.Yielded(op_id=op_id))

    def _computes_group(self) -> None:
        task, scene = self.inference, self.scene
        assert task is not None
        scene.device.check_read(task.order, task.next_group, scene.programs[task.order.model])
        task.computed(scene.clock.now_ms)
        if task.order.staging:
            scene.device.computed = (task.order.residency_id, task.next_group)
        if scene.choices.happens("poison", task.order.model):
            self.end(-11)

    def _answers(self) -> None:
        task = self.inference
        assert task is not None
        order, happens = task.order, self.scene.choices.happens
        if happens("infer_error", order.model):
            self._fails("TaskFailed", "NaN")
            return
        is_clean = not happens("unclean", order.model)
        computed_ms = sum(task.costs_ms)
        first_ms, last_ms = task.begins_at_ms[0], task.ends_at_ms[-1]
        done = worker_msg.InferenceDone(
            op_id=order.op_id,
            outputs=tuple((output_of(run),) for run in order.runs),
            tokens=self._tokens(order),
            turn_at_ms=task.turn_at_ms,
            first_group_at_ms=first_ms,
            ended_at_ms=last_ms,
            stall_ms=max(0.0, last_ms - task.turn_at_ms - computed_ms),
            is_clean=is_clean,
            group_begins_at_ms=tuple(task.begins_at_ms),
            group_ends_at_ms=tuple(task.ends_at_ms),
        )
        self._ends(order, done)
        if is_clean:
            self._cleaning = NO_OP_ID

    def _tokens(self, order: worker_msg.RunInference) -> tuple[tuple[int, ...], ...]:
        """Return as many tokens as each request allows; one token if the stop word is written."""
        is_asked = self.scene.device.stop_words.get(self.slot) == order.op_id
        sampling_params = [run.sampling_params for run in order.runs]
        steps = min([1 if is_asked else one.steps for one in sampling_params if one], default=0)
        count = [min(steps, one.left) if one and not one.is_piece else 0 for one in sampling_params]
        return tuple((1,) * one for one in count) if any(sampling_params) else ()

    def _fails(self, error: str, text: str) -> None:
        assert self.inference is not None
        order = self.inference.order
        self._ends(order, worker_msg.InferenceFailed(op_id=order.op_id, error=error, message=text))

    def _ends(self, order: worker_msg.RunInference, message: Message) -> None:
        self.inference, self._cleaning = None, order.op_id
        self.say("task", message)


def output_of(run: Run) -> SlabTensor:
    """Return an output tensor that has the request's id as its name."""
    return SlabTensor(
        name=run.request_id,
        dtype="uint8",
        shape=(1,),
        offset_bytes=run.reply_offset_bytes,
        size_bytes=1,
    )
