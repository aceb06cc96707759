"""Lightning's ``Trainer`` as a job: its training batches come from a ``LoaderProxy``.

Between two batches Lightning's loop keeps its whole state in objects, none in local variables. So a
resumed script begins like the first run, and all state is restored at the first fetch. This module
uses these private names of Lightning: the data fetcher's count, the epoch's results so far, the
metrics that callbacks saw last, and flags of callbacks that finetune or average weights.
"""

from __future__ import annotations

import csv
import importlib
import inspect
import json
import operator
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from pipeswitch.base.errors import InvalidInput

from ...workers.training.attributes import LIBRARIES, Keepers
from ...workers.training.loader_proxy import LoaderProxy, TrainerLoop

REFUSED: Final = {
    "ModelPruning": (
        "changes the model's layers in mid-run; a resumed script would build the old ones",
        "prune with torch.nn.utils.prune before fit(), or between two of them",
    ),
    **dict.fromkeys(
        ("LearningRateFinder", "BatchSizeFinder"),
        (
            "trains in a loop of its own before the fit, which cannot be resumed",
            "run it by hand once, without the server, and give the script its result",
        ),
    ),
}
NUMBERED: Final = ("CSVLogger", "TensorBoardLogger")  # they start a folder, version_N, in each run


class LightningLoop(TrainerLoop):
    """Lightning's fit loop as a loop of the session.

    Raises:
        InvalidInput: the trainer uses several devices or reloads its loaders between epochs.
    """

    def __init__(self, session: Any, trainer: Any) -> None:
        super().__init__(session, trainer)
        if trainer.world_size > 1:
            raise InvalidInput("job.trainer: a job has one device; this Trainer uses several")
        if trainer.reload_dataloaders_every_n_epochs:
            raise InvalidInput("job.trainer: reload_dataloaders_every_n_epochs cannot be resumed")
        self._fit, trainer.fit = trainer.fit, self.fit
        strategy = trainer.strategy
        self._process, strategy.process_dataloader = strategy.process_dataloader, self.loader
        module = next(
            kind.__module__ for kind in type(trainer).__mro__ if kind.__name__ == "Trainer"
        )
        callback = importlib.import_module(module.partition(".trainer")[0]).Callback()
        callback.on_train_start, callback.on_train_end = self.began, self.ended
        callback.on_train_batch_end = self.batch_ended
        trainer.callbacks.append(callback)
        self._saves = True  # the module's on_save_checkpoint may add state
        self._rows, self._tables = 0, list[Path]()  # rows of metrics.csv, and the files
        self._keep_logs()

    def _keep_logs(self) -> None:
        """Log to the folders of this job's first run, if the loggers number their folders."""
        place = self.session.place
        versions = [] if place.saved is None else place.saved.values.get("logs", [])
        loggers = [one for one in self.trainer.loggers if type(one).__name__ in NUMBERED]
        for logger, version in zip_longest(loggers, versions[: len(loggers)]):
            logger._version = logger.version if version is None else version
            path = Path(logger.log_dir, "metrics.csv")
            if type(logger).__name__ != "CSVLogger":
                continue
            if version is not None and path.exists():
                table = path.read_bytes()
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # Lightning warns that it deletes the table
                    logger.experiment.metrics_keys = next(
                        csv.reader([table.decode().splitlines()[0]])
                    )
                path.write_bytes(table)
                self._tables.append(path)
            logger.log_metrics = partial(self._counted, logger.log_metrics)
        place.entry["logs"] = [one.version for one in loggers]

    def _counted(self, log: Callable[..., None], *args: Any, **options: Any) -> None:
        self._rows += 1
        log(*args, **options)

    def fit(self, *args: Any, **options: Any) -> Any:
        """Run ``Trainer.fit``; if the job has a commit, ignore the script's ``ckpt_path``."""
        for one in self.trainer.callbacks:
            for kind in type(one).__mro__:
                if kind.__name__ in REFUSED and kind.__module__.startswith(LIBRARIES):
                    text, hint = REFUSED[kind.__name__]
                    raise InvalidInput(f"job.trainer: {type(one).__name__} {text}", hint=hint)
        upcoming, self.feed = self.session.place.upcoming(), None
        call = inspect.signature(self._fit).bind(*args, **options)
        self.was_over = upcoming is not None and upcoming[1]
        if upcoming is not None:
            call.arguments.pop("ckpt_path", None)
        return self._fit(*call.args, **call.kwargs)

    def loader(self, loader: Any) -> Any:
        """Replace ``Strategy.process_dataloader``; wrap a training loader in ``LoaderProxy``."""
        loader = self._process(loader)
        if not self.trainer.training:
            return loader
        if self.feed is not None:
            raise InvalidInput("job.trainer: fit() with several training loaders cannot be resumed")
        if operator.length_hint(loader, -1) < 0:
            raise InvalidInput(
                "job.trainer: the training loader has no length", hint="give its dataset a __len__"
            )
        self.feed = LoaderProxy(self, loader)
        return self.feed

    def objects(self) -> dict[str, Any]:
        trainer = self.trainer
        keepers = Keepers(trainer.callbacks, "on_save_checkpoint", trainer.lightning_module)
        module, data, loop = trainer.lightning_module, trainer.datamodule, trainer.fit_loop
        owners = {"datamodule": data, "hparams": module.hparams}
        owners["datamodule.hparams"] = None if data is None else data.hparams
        attributes = self.attributes(module, owners, trainer=trainer, loop=loop)
        return {
            "model": module,
            "optimizer": trainer.optimizers,
            "scheduler": [config.scheduler for config in trainer.lr_scheduler_configs],
            "extra_state": {
                **self.extras(trainer.precision_plugin, keepers),
                "attributes": attributes,
            },
        }

    def _checkpoint(self) -> dict[str, Any]:
        """Return what hooks may read; what they change in it is not used."""
        trainer = self.trainer
        return {
            "state_dict": trainer.lightning_module.state_dict(),
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
        }

    def _hooks(self) -> dict[str, Any]:
        """Return what the user's own hooks add to a checkpoint."""
        added: dict[str, Any] = {}
        if self._saves:
            checkpoint = self._checkpoint()
            known = set(checkpoint)
            self.trainer.lightning_module.on_save_checkpoint(checkpoint)
            added = {name: value for name, value in checkpoint.items() if name not in known}
            self._saves = bool(added)  # a hook that adds nothing may write files instead
        data = self.trainer.datamodule
        return {"module": added, "data": {} if data is None else data.state_dict()}

    def batch_ended(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step % max(trainer.log_every_n_steps, 1) == 0:
            self.session.log(trainer.logged_metrics)

    def state_dict(self) -> dict[str, Any]:
        trainer, loop = self.trainer, self.trainer.fit_loop
        results = loop.epoch_loop._results.items()
        return {
            "loops": json.dumps(loop.state_dict()),
            "fetched": loop._data_fetcher.fetched if loop._data_fetcher is not None else 0,
            "rows": self._rows,
            "hooks": self._hooks(),
            "stops": trainer.should_stop,
            "callbacks": {c.state_key: s for c in trainer.callbacks if (s := c.state_dict())},
            "seen": dict(trainer._logger_connector._callback_metrics),
            "results": {name: _of_metric(one) for name, one in results if one.is_tensor},
            "metrics": {name: _of_metric(metric) for name, metric in self._metrics()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        trainer, loop = self.trainer, self.trainer.fit_loop
        loop.load_state_dict(json.loads(state["loops"]))
        for one in _loops(loop):
            one.on_iteration_done()  # the loops continue in the middle instead of starting over
        if loop._data_fetcher is not None:
            loop._data_fetcher.fetched = state["fetched"]
        trainer.should_stop = state["stops"]
        for callback in trainer.callbacks:
            if callback.state_key in state["callbacks"]:
                callback.load_state_dict(state["callbacks"][callback.state_key])
            if hasattr(callback, "_restarting"):
                callback._restarting = False  # the commit, not its ``on_fit_start``, adds groups
            if hasattr(callback, "_average_model") and hasattr(callback, "swa_end"):
                self._continue_averaging(callback)
        trainer._logger_connector._callback_metrics.update(state["seen"])
        for name, metric in self._metrics():
            vars(metric).update(state["metrics"][name])
            metric.to(trainer.strategy.root_device)
        hooks, self._rows = state.get("hooks", {}), state["rows"]
        if hooks.get("module"):
            trainer.lightning_module.on_load_checkpoint(self._checkpoint() | hooks["module"])
        if hooks.get("data"):
            trainer.datamodule.load_state_dict(hooks["data"])
        for table in self._tables:
            _cut_rows(table, self._rows)
        _fill_when_logged(loop.epoch_loop._results, dict(state["results"]))
        batches = getattr(self.feed, "batch_sampler", None)
        for sampler in (getattr(self.feed, "sampler", None), getattr(batches, "sampler", None)):
            if sampler is not None and hasattr(sampler, "set_epoch"):  # Lightning set epoch 0
                sampler.set_epoch(loop.epoch_progress.current.processed)

    def _continue_averaging(self, callback: Any) -> None:
        """Make ``StochasticWeightAveraging`` replace the scheduler, as it did in its epochs."""
        module, progress = self.trainer.lightning_module, self.trainer.fit_loop.epoch_progress
        values = {name: value.clone() for name, value in module.state_dict().items()}
        epoch = progress.current.completed
        callback._initialized, callback.n_averaged = False, None
        last = callback.swa_end + callback._model_contains_batch_norm  # one more epoch for these
        for progress.current.completed in (min(epoch, callback.swa_end), min(epoch, last)):
            callback.on_train_epoch_start(self.trainer, module)
        progress.current.completed = epoch
        module.load_state_dict(values)  # the callback may have reset BatchNorm

    def _metrics(self) -> list[tuple[str, Any]]:
        modules = self.trainer.lightning_module.named_modules()
        return [(name, module) for name, module in modules if hasattr(module, "metric_state")]


def _of_metric(metric: Any) -> dict[str, Any]:
    return {**metric.metric_state, "_update_count": metric.update_count}


def _cut_rows(table: Path, count: int) -> None:
    """Drop the rows of steps that are about to be computed again."""
    lines = table.read_bytes().splitlines(keepends=True)
    table.write_bytes(b"".join(lines[: count + 1]))  # keeps the header, too


def _loops(loop: Any) -> Iterator[Any]:
    yield loop
    for inner in vars(loop).values():
        if hasattr(inner, "on_iteration_done"):
            yield from _loops(inner)


def _fill_when_logged(results: Any, sums: dict[str, dict[str, Any]]) -> None:
    """Restore each epoch mean when its first value is logged: Lightning creates it only then."""
    update = results.update_metrics

    def filled(key: str, value: Any, batch_size: int) -> None:
        vars(results[key]).update(sums.pop(key, {}))
        update(key, value, batch_size)

    results.update_metrics = filled
