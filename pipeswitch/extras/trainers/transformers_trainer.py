"""``transformers.Trainer`` as a job: it fetches from a ``LoaderProxy`` and resumes like Trainer.

Trainer's loop keeps its position in local variables, which only ``resume_from_checkpoint`` sets. So
a resumed script gets a checkpoint that contains only the trainer's state; the commit restores
everything else at the first fetch. This module uses these private names of Trainer:
``_load_from_checkpoint``, the running loss in ``LOSSES`` and ``_tr_loss``, and
``skip_first_batches``, which Trainer's module imports.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any, Final

import transformers.trainer
from transformers.trainer_callback import ExportableState, TrainerCallback

from pipeswitch.base.errors import InvalidInput

from ...workers.training.attributes import Keepers
from ...workers.training.loader_proxy import LoaderProxy, TrainerLoop

LOSSES: Final = (
    "_total_loss_scalar",
    "_globalstep_last_logged",
    "_initial_global_step",
    "_initial_num_input_tokens_seen",
    "current_flos",
)
MAX_LOGGED: Final = 200  # newest entries of ``log_history`` in a commit, which must stay small
FOREVER: Final = 1 << 80  # a number of updates with which train() runs no epoch

_skip_first_batches = transformers.trainer.skip_first_batches


class TransformersLoop(TrainerLoop):
    """Trainer's loop as a loop of the session.

    Raises:
        InvalidInput: the trainer uses several devices.
    """

    def __init__(self, session: Any, trainer: Any) -> None:
        super().__init__(session, trainer)
        if trainer.args.parallel_mode.value != "not_parallel":
            raise InvalidInput("job.trainer: a job has one device; this Trainer uses several")
        self._logged: tuple[int, str] = (0, "[]")
        self._train, self._loader = trainer.train, trainer.get_train_dataloader
        trainer.train, trainer.get_train_dataloader = self.train, self.loader
        callback = TrainerCallback()
        callback.on_train_begin, callback.on_train_end = self.began, self.ended
        callback.on_epoch_end, callback.on_log = self.epoch_ended, self.log
        trainer.add_callback(callback)
        transformers.trainer.skip_first_batches = _skip

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        """Run ``Trainer.train``; if the job has a commit, ignore the script's checkpoint."""
        upcoming, self.was_over = self.session.place.upcoming(), False
        if upcoming is None:
            return self._train(resume_from_checkpoint, *args, **options)
        saved, self.was_over = upcoming
        state = json.loads(saved.options["extras"].get("trainer", {"state": "{}"})["state"])
        if self.was_over:
            state["global_step"] = FOREVER
        evaluates, self.trainer.args.eval_on_start = self.trainer.args.eval_on_start, False
        self.trainer._load_from_checkpoint = lambda *_, **__: None
        try:
            with tempfile.TemporaryDirectory(prefix="pipeswitch-trainer-") as folder:
                Path(folder, "trainer_state.json").write_text(json.dumps(state))
                return self._train(folder, *args, **options)
        finally:
            del self.trainer._load_from_checkpoint
            self.trainer.args.eval_on_start = evaluates

    def loader(self) -> Any:
        """Replace ``Trainer.get_train_dataloader``: return its loader in a ``LoaderProxy``."""
        loader = self._loader()
        if type(loader).__name__ == "DataLoaderDispatcher":
            raise InvalidInput(
                "job.trainer: accelerate would dispatch the batches of an iterable dataset",
                hint='TrainingArguments(accelerator_config={"dispatch_batches": False})',
            )
        self.feed = LoaderProxy(self, loader)
        return self.feed

    def objects(self) -> dict[str, Any]:
        keepers = Keepers(self.trainer.callback_handler.callbacks, "", self.trainer.model)
        return {
            "model": self.trainer.model,
            "optimizer": self.trainer.optimizer,
            "scheduler": self.trainer.lr_scheduler,
            "extra_state": {
                **self.extras(self.trainer.accelerator.scaler, keepers),
                "attributes": self.attributes(self.trainer.model, {"trainer": self.trainer}),
            },
        }

    def epoch_ended(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if control.should_epoch_stop:  # a resumed Trainer finds its epoch by counting full epochs
            raise InvalidInput("job.trainer: an epoch that a callback ends early cannot be resumed")

    def log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.session.log({k: v for k, v in (logs or {}).items() if isinstance(v, int | float)})

    def state_dict(self) -> dict[str, Any]:
        trainer, history = self.trainer, self.trainer.state.log_history
        if self._logged[0] != len(history):
            self._logged = (len(history), json.dumps(history[-MAX_LOGGED:]))
        return {
            "state": json.dumps({**vars(trainer.state), "log_history": []}),
            "log": self._logged[1],
            "callbacks": json.dumps([c.state()["attributes"] for c in self._stateful()]),
            "losses": {name: getattr(trainer, name) for name in LOSSES if hasattr(trainer, name)},
            "loss": float(trainer._tr_loss),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer = self.trainer
        vars(trainer.state).update(json.loads(state["state"]), log_history=json.loads(state["log"]))
        for callback, saved in zip(self._stateful(), json.loads(state["callbacks"]), strict=True):
            vars(callback).update(saved)
        vars(trainer).update(state["losses"])
        trainer._tr_loss.fill_(state["loss"])

    def _stateful(self) -> list[Any]:
        everyone = [*self.trainer.callback_handler.callbacks, self.trainer.control]
        return [one for one in everyone if isinstance(one, ExportableState)]


def _skip(loader: Any, num_batches: int = 0) -> Any:
    """Replace ``accelerate.skip_first_batches``, which would create another loader."""
    if isinstance(loader, LoaderProxy):
        return loader.skip(num_batches)
    return _skip_first_batches(loader, num_batches)
