"""Training by transformers, Lightning and accelerate, bit-equal after evictions and kills."""

from __future__ import annotations

import importlib
import importlib.util
import os
import random
import re
import runpy
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeswitch import job
from pipeswitch.base.errors import InvalidInput, TaskPreempted
from tests.process import tools
from tests.process.test_training_exact import Crashed, FakeHost, HookedGate, begun

pytestmark = pytest.mark.filterwarnings("default")  # libraries may warn
DOCS = Path(__file__).parents[4] / "docs/guide/trainers.md"
SEED = 1125
ENVIRONMENT = {
    "PIPESWITCH_SCHEDULER__COMMIT_EVERY": "10ms",
    "PIPESWITCH_WORKERS__RESTART_BACKOFF": "20ms",
    "HF_HUB_OFFLINE": "1",
}
LIBRARIES = ("transformers", "lightning", "accelerate")

PRELUDE = """
    import hashlib, os, random, sys, warnings
    import numpy as np
    import torch
    from torch import nn
    from torch.nn import functional as F
    from torch.utils.data import DataLoader, Dataset
    from pipeswitch import job

    out, lives = sys.argv[1], int(sys.argv[2])
    torch.manual_seed(0); random.seed(0); np.random.seed(0)

    class Noisy(Dataset):
        '''Draws from the three global generators for each sample.'''
        def __init__(self, count=88):
            self.x = torch.randn(count, 20); self.y = torch.randint(0, 3, (count,))
        def __len__(self):
            return len(self.x)
        def __getitem__(self, i):
            x = self.x[i] + 0.1 * torch.randn(20) + random.random() + float(np.random.rand())
            return {"x": x, "labels": self.y[i]}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(20, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 3))
        def forward(self, x, labels=None):
            poke()
            logits = self.layers(x)
            return {"loss": F.cross_entropy(logits, labels), "logits": logits}

    def save(*parts):
        total = hashlib.sha256()
        def add(value):
            if isinstance(value, torch.Tensor):
                total.update(f"{value.dtype} {value.shape} {value.detach().tolist()!r}".encode())
            elif isinstance(value, dict):
                for key, item in value.items():
                    total.update(repr(key).encode())
                    add(item)
            elif isinstance(value, (list, tuple)):
                for item in value:
                    add(item)
            else:
                total.update(repr(value).encode())
        lines = []
        for part in (*parts, (torch.get_rng_state(), random.getstate(), np.random.rand())):
            add(part)
            lines.append(total.hexdigest()[:16])
        with open(out, "w") as file:
            file.write("\\n".join(lines))
"""

TRANSFORMERS = """
    from transformers import EarlyStoppingCallback, Trainer, TrainingArguments

    def arguments(**more):
        return TrainingArguments(**{**dict(
            output_dir=out + ".d", num_train_epochs=5, per_device_train_batch_size=8, seed=1,
            learning_rate=0.01, warmup_steps=3, lr_scheduler_type="cosine", logging_steps=3,
            save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True), **more})

    def history(trainer):
        timed = ("runtime", "per_second", "flos")
        return [{k: v for k, v in one.items() if not any(t in k for t in timed)}
                for one in trainer.state.log_history]

    def saved(trainer, output):
        save(trainer.model.state_dict(), trainer.optimizer.state_dict()["state"],
             trainer.lr_scheduler.state_dict(), trainer.state.global_step, history(trainer),
             output.training_loss)
"""

LIGHTNING = """
    import lightning as L, torchmetrics
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
    warnings.simplefilter("ignore")

    class Module(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net(); self.accuracy = torchmetrics.MeanMetric()
        def training_step(self, batch, index):
            answer = self.net(**batch)
            self.accuracy(answer["loss"])
            self.log("loss", answer["loss"], on_step=True, on_epoch=True)
            self.log("mean", self.accuracy, on_epoch=True)
            return answer["loss"]
        def validation_step(self, batch, index):
            self.log("val", self.net(**batch)["loss"])
        def configure_optimizers(self):
            optimizer = torch.optim.Adam(self.parameters(), 0.01)
            schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer,
                    "lr_scheduler": {"scheduler": schedule, "monitor": "loss_epoch"}}

    def trainer(**more):
        return L.Trainer(**{**dict(
            accelerator="cpu", max_epochs=5, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=1,
            log_every_n_steps=2, default_root_dir=out + ".d"), **more})

    def loader(dataset, **more):
        return DataLoader(dataset, batch_size=8, shuffle=True, **more)

    def saved(trainer, module):
        save(module.state_dict(), [o.state_dict() for o in trainer.optimizers],
             [c.scheduler.state_dict() for c in trainer.lr_scheduler_configs],
             trainer.global_step, trainer.current_epoch, dict(trainer.callback_metrics))
"""

KEEPS = """
    class Keeps:
        '''What people write into a callback.'''
        def __init__(self):
            self.calls, self.best, self.losses, self.shadow = 0, 9.0, [], {}
            self.dice, self.kept = random.Random(5), None
        def begin(self, net):
            self.kept = torch.optim.swa_utils.AveragedModel(net)
        def keep(self, net):
            self.kept.update_parameters(net)
            self.calls += 1
            for name, value in net.state_dict().items():
                now = self.shadow.setdefault(name, value.clone().float())
                now.lerp_(value.float(), 0.1)
            self.best = min(self.best, now.sum().item())
            self.losses.append((self.calls, self.dice.random()))
        def all(self):
            return self.calls, self.best, self.losses, self.shadow, self.kept.state_dict()
"""

EXACT = {
    "transformers, a callback that keeps much": TRANSFORMERS
    + KEEPS
    + """
    from transformers import TrainerCallback
    class Mine(Keeps, TrainerCallback):
        def on_train_begin(self, args, state, control, model=None, **_):
            self.begin(model)
        def on_step_end(self, args, state, control, model=None, **_):
            self.keep(model)
    mine = Mine()
    trainer = job.trainer(Trainer(Net(), arguments(), train_dataset=Noisy(), callbacks=[mine]))
    trainer.train()
    save(trainer.model.state_dict(), mine.all())
    """,
    "lightning, a table of metrics": LIGHTNING
    + """
    from lightning.pytorch.loggers import CSVLogger
    module, it = Module(), trainer(logger=CSVLogger(out + ".logs"))
    job.trainer(it).fit(module, loader(Noisy()), loader(Noisy(16)))
    save(module.state_dict(), [open(it.logger.log_dir + "/metrics.csv").read()])
""",
    "lightning, callbacks that keep much": LIGHTNING
    + KEEPS
    + """
    from lightning.pytorch.callbacks import EMAWeightAveraging
    class Mine(Keeps, L.Callback):
        def setup(self, trainer, module, stage):
            self.begin(module.net)
        def on_train_batch_end(self, trainer, module, *_):
            self.keep(module.net)
    class Saved(Mine):
        def on_save_checkpoint(self, trainer, module, checkpoint):
            checkpoint["mine"] = self.calls
        def state_dict(self):
            return {"other": 1}
    mine, saved_too = Mine(), Saved()
    fitting, module = job.trainer(
        trainer(callbacks=[mine, EMAWeightAveraging(decay=0.9), saved_too])), Module()
    fitting.fit(module, loader(Noisy()))
    save(module.state_dict(), mine.all(), saved_too.all())
    """,
    "transformers": TRANSFORMERS
    + """
    trainer = job.trainer(Trainer(Net(), arguments(), train_dataset=Noisy()))
    saved(trainer, trainer.train())
    """,
    "transformers, accumulation with a rest, evaluation, its own checkpoints": TRANSFORMERS
    + """
    trainer = job.trainer(Trainer(
        Net(), arguments(gradient_accumulation_steps=2, eval_strategy="epoch", num_train_epochs=8,
                         save_strategy="epoch", load_best_model_at_end=True, eval_on_start=True,
                         metric_for_best_model="loss"),
        train_dataset=Noisy(), eval_dataset=Noisy(24),
        callbacks=[EarlyStoppingCallback(early_stopping_patience=2)]))
    found = os.path.isdir(out + ".d") and os.listdir(out + ".d")
    saved(trainer, trainer.train(resume_from_checkpoint=lives > 1 and bool(found)))
    """,
    "transformers, an end in the middle, and twice": TRANSFORMERS
    + """
    model = Net()
    first = job.trainer(Trainer(model, arguments(max_steps=17), train_dataset=Noisy()))
    output = first.train()
    again = job.trainer(Trainer(model, arguments(max_steps=20), train_dataset=Noisy(64)))
    saved(again, again.train())
    """,
    "transformers, worker processes": TRANSFORMERS
    + """
    trainer = job.trainer(Trainer(
        Net(), arguments(dataloader_num_workers=1, num_train_epochs=3), train_dataset=Noisy()))
    saved(trainer, trainer.train())
    """,
    "lightning": LIGHTNING
    + """
    fitting, module = job.trainer(trainer()), Module()
    fitting.fit(module, loader(Noisy()), loader(Noisy(24)))
    saved(fitting, module)
    """,
    "lightning, accumulation with a rest, an early end": LIGHTNING
    + """
    stops = EarlyStopping("val", patience=4, min_delta=0.02)
    best = ModelCheckpoint(out + ".d", monitor="val", save_last=True)
    fitting, module = job.trainer(trainer(
        accumulate_grad_batches=3, max_epochs=9, callbacks=[stops, best], gradient_clip_val=1.0,
        val_check_interval=4, enable_checkpointing=True)), Module()
    last = out + ".d/last.ckpt"
    fitting.fit(module, loader(Noisy()), loader(Noisy(24)),
                ckpt_path=last if lives > 1 and os.path.exists(last) else None)
    saved(fitting, module)
    """,
    "lightning, by hand, two optimizers, twice": LIGHTNING
    + """
    class Two(Module):
        automatic_optimization = False
        def training_step(self, batch, index):
            self.manual_backward(self.net(**batch)["loss"])
            for optimizer in self.optimizers():
                optimizer.step(); optimizer.zero_grad()
        def configure_optimizers(self):
            layers = self.net.layers
            return [torch.optim.Adam(layers[:2].parameters(), 0.01),
                    torch.optim.SGD(layers[4].parameters(), 0.1)]
    module = Two()
    for steps in (40, 50):
        fitting = job.trainer(trainer(max_steps=steps, max_epochs=-1))
        fitting.fit(module, loader(Noisy()))
    saved(fitting, module)
    """,
    "lightning, groups that are added in mid-run": LIGHTNING
    + """
    from lightning.pytorch.callbacks import BackboneFinetuning
    class Tuned(Module):
        @property
        def backbone(self):
            return self.net.layers[:2]
        def configure_optimizers(self):
            return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], 0.01)
    for thaws in (2, 1):
        fitting, module = job.trainer(trainer(max_epochs=4, callbacks=[
            BackboneFinetuning(thaws, backbone_initial_ratio_lr=0.5, train_bn=False)])), Tuned()
        fitting.fit(module, loader(Noisy()))
    saved(fitting, module)
    """,
    "lightning, settings that callbacks change": LIGHTNING
    + """
    from lightning.pytorch.callbacks import GradientAccumulationScheduler
    from lightning.pytorch.plugins import Precision
    class Fading(Precision):
        calls = 0
        def pre_backward(self, loss, module):
            self.calls += 1
            return super().pre_backward(loss / self.calls ** 0.1, module)
        def state_dict(self):
            return {"calls": self.calls}
        def load_state_dict(self, state):
            self.calls = state["calls"]
    class Changes(EarlyStopping):
        seen = 0
        def on_train_batch_end(self, trainer, module, *_):
            self.seen += 1
            module.net.layers[3].p = 0.3 - 0.001 * self.seen
            module.hparams.scale *= 0.99
            trainer.gradient_clip_val = 1.0 / self.seen
    class Scaled(Module):
        def __init__(self, scale=1.0):
            super().__init__(); self.save_hyperparameters()
        def training_step(self, batch, index):
            return super().training_step(batch, index) * self.hparams.scale
    changes, module = Changes("loss_epoch", patience=9), Scaled()
    fitting = job.trainer(trainer(max_epochs=4, gradient_clip_val=2.0, plugins=[Fading()],
        callbacks=[changes, GradientAccumulationScheduler({1: 3, 3: 2})]))
    fitting.fit(module, loader(Noisy()))
    saved(fitting, module)
    assert changes.seen == fitting.precision_plugin.calls == 44
    """,
    "lightning, weights that are averaged": LIGHTNING
    + """
    from lightning.pytorch.callbacks import StochasticWeightAveraging
    for begins in (2, 1):
        fitting, module = job.trainer(trainer(max_epochs=4, callbacks=[
            StochasticWeightAveraging(0.02, begins, annealing_epochs=2)])), Module()
        fitting.fit(module, loader(Noisy()))
        saved(fitting, module)
    assert module.net.layers[1].momentum == 0.1
    """,
    "lightning, attributes and what the user's hooks save": LIGHTNING
    + """
    class Data(L.LightningDataModule):
        def __init__(self):
            super().__init__(); self.level, self.odd = 0, {object(): 1}
        def train_dataloader(self):
            return loader(Noisy())
        def state_dict(self):
            return {"odd": sum(self.odd.values())}
        def load_state_dict(self, state):
            self.odd = {object(): state["odd"]}
    class Changes(Module):
        def __init__(self):
            super().__init__(); self.losses, self.hidden, self.odd = [], None, {object(): 1}
        def training_step(self, batch, index):
            loss = super().training_step(batch, index) * sum(self.odd.values()) ** 0.1
            self.losses.append(loss.detach()); self.hidden = batch["x"][0].clone()
            for one in (self, self.trainer.datamodule):
                one.odd = {object(): sum(one.odd.values()) + 1}
            self.trainer.datamodule.level += 1; self.net.calls = getattr(self.net, "calls", 0) + 1
            return loss
        def on_train_epoch_end(self):
            self.mean = torch.stack(self.losses).mean(); self.losses.clear()
        def on_save_checkpoint(self, checkpoint):
            checkpoint["state_dict"].pop("net.layers.0.bias")
            checkpoint["odd"] = sum(self.odd.values())
        def on_load_checkpoint(self, checkpoint):
            self.odd = {object(): checkpoint["odd"]}
    fitting, module, data = job.trainer(trainer(max_epochs=3)), Changes(), Data()
    fitting.fit(module, datamodule=data)
    saved(fitting, module)
    both = [sum(one.odd.values()) for one in (module, data)]
    assert both == [34, 34] and module.net.calls == data.level == 33, both
    """,
    "transformers, attributes of a trainer of one's own": TRANSFORMERS
    + """
    from transformers.trainer_callback import ExportableState, TrainerCallback
    class Mine(Trainer):
        buffered, calls = None, 0
        def training_step(self, model, inputs, *more):
            if self.calls % 3 == 0 or self.buffered is None:
                self.buffered = [{k: v.clone() for k, v in inputs.items()}]
            self.calls += 1
            model.calls = getattr(model, "calls", 0) + 1
            model.layers[3].p = 0.1 + 0.001 * model.calls
            return super().training_step(model, dict(self.buffered[0]), *more)
    class Counts(TrainerCallback, ExportableState):
        seen = 0
        def on_step_end(self, *_, **__):
            self.seen += 1
        def state(self):
            return {"args": {}, "attributes": {}}
    counts = Counts()
    trainer = job.trainer(Mine(Net(), arguments(), train_dataset=Noisy(), callbacks=[counts]))
    saved(trainer, trainer.train())
    assert trainer.calls == trainer.model.calls == counts.seen == 55
    """,
    "accelerate": """
    from accelerate import Accelerator
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = Net(); optimizer = torch.optim.Adam(model.parameters(), 0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 10)
    data = DataLoader(Noisy(), batch_size=8, shuffle=True)
    model, optimizer, data, schedule = accelerator.prepare(model, optimizer, data, schedule)
    for epoch in job.epochs(5):
        for batch in job.steps(data, model=model, optimizer=optimizer, scheduler=schedule):
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step(); schedule.step(); optimizer.zero_grad()
    save(model.state_dict(), optimizer.state_dict(), schedule.state_dict(), job.step)
    """,
}
REFUSED = {
    "transformers": (
        "dispatch_batches",
        TRANSFORMERS
        + """
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(Noisy())
    job.trainer(Trainer(Net(), arguments(max_steps=3), train_dataset=Endless())).train()
    """,
    ),
    "transformers, in epochs": (
        "inside job.epochs",
        TRANSFORMERS
        + """
    for epoch in job.epochs(2):
        job.trainer(Trainer(Net(), arguments(), train_dataset=Noisy())).train()
    """,
    ),
    "lightning": (
        "give its dataset a __len__",
        LIGHTNING
        + """
    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(Noisy())
    job.trainer(trainer()).fit(Module(), DataLoader(Endless(), batch_size=8))
    """,
    ),
    **{
        f"lightning, {name}": (
            says,
            LIGHTNING
            + f"""
    from lightning.pytorch.callbacks import {name}
    class Sized(Module):
        batch_size, lr = 8, 0.1
        def train_dataloader(self):
            return loader(Noisy())
    job.trainer(trainer(callbacks=[{name}({argument})])).fit(Sized())
    """,
        )
        for name, argument, says in (
            ("ModelPruning", "'l1_unstructured'", "ModelPruning changes the model's layers"),
            ("LearningRateFinder", "", "LearningRateFinder trains in a loop of its own"),
            ("BatchSizeFinder", "", "BatchSizeFinder trains in a loop of its own"),
        )
    },
    "lightning, two loaders": (
        "several training loaders",
        LIGHTNING
        + """
    job.trainer(trainer()).fit(Module(), {"a": loader(Noisy()), "b": loader(Noisy())})
    """,
    ),
}


def script(folder: Path, name: str, body: str) -> Path:
    needs(name)
    name = "".join(c if c.isalnum() else "-" for c in name)
    body = textwrap.dedent(PRELUDE) + textwrap.dedent(body)
    return tools.write_script(folder, f"with-{name}.py", body)


def needs(name: str) -> None:
    library = next(one for one in LIBRARIES if one in name)
    for one in (library, "accelerate" if library == "transformers" else library):
        if importlib.util.find_spec(one) is None:
            pytest.skip(f"{one} is not installed: pip install -e '.[test]'")
    importlib.import_module(library)  # now, because the first import draws random numbers


@pytest.fixture(autouse=True)
def as_a_worker() -> Iterator[None]:
    """Use one thread, and restore the process after the scripts."""
    threads, argv, environment = torch.get_num_threads(), sys.argv, dict(os.environ)
    torch.set_num_threads(1)
    yield
    for name in os.environ.keys() - environment:
        del os.environ[name]
    torch.set_num_threads(threads)
    sys.argv = argv
    job._install(None)


def run(path: Path, out: Path, lives: int, poke: Callable[[], None]) -> str:
    """Run the script; return the digests of its end state, from its output file."""
    random.seed()  # another process has other random states
    np.random.seed(random.randrange(1 << 30))
    torch.manual_seed(random.randrange(1 << 30))
    sys.argv = [str(path), str(out), str(lives)]
    runpy.run_path(str(path), {"poke": poke}, run_name="__main__")
    return out.read_text()


def live(host: FakeHost, path: Path, out: Path, lives: int, dice: random.Random) -> str:
    """Run one life; return "" if an eviction in a layer or a simulated kill -9 ended it."""
    gate = HookedGate(lambda *_: None)
    gate.grant(1)
    gate.countdown = dice.randrange(1, 120) if dice.random() < 0.7 else -1
    chances = iter(range(dice.randrange(1, 14)))

    def poke() -> None:
        if gate.countdown < 0 and next(chances, None) is None:
            session.place.is_over = True  # no more commits, even during the exit
            raise Crashed

    session = begun(host, gate, commit_every_ms=9.0)
    try:
        ended = run(path, out, lives, poke)
    except (TaskPreempted, Crashed) as end:
        if isinstance(end, Crashed):
            host.crash()
        session.close()
        return ""
    session.finish()
    return ended


@pytest.mark.parametrize("name", EXACT)
def test_evicted_and_crashed_in_any_step_it_ends_bit_equal(tmp_path: Path, name: str) -> None:
    path = script(tmp_path, name, EXACT[name])
    expected = run(path, tmp_path / "plain", 0, lambda: None)
    host, dice, lives, ended = FakeHost(), random.Random(SEED), 0, ""
    while not ended:
        lives += 1
        assert lives < 200, "no progress"
        ended = live(host, path, tmp_path / "served", lives, dice)
    assert ended == expected
    assert lives > 4


@pytest.mark.parametrize("name", REFUSED)
def test_what_could_not_be_resumed_is_refused_in_words(tmp_path: Path, name: str) -> None:
    says, body = REFUSED[name]
    path = script(tmp_path, name, body)
    session = begun(FakeHost())
    with pytest.raises(InvalidInput, match=says):
        run(path, tmp_path / "served", 1, lambda: None)
    session.close()


@pytest.mark.parametrize("name", ["transformers", "lightning"])
def test_what_a_callback_keeps_and_cannot_be_captured_is_warned_of_once(
    tmp_path: Path, name: str
) -> None:
    body = {
        "transformers": TRANSFORMERS
        + """
    from transformers import TrainerCallback
    class Mine(TrainerCallback):
        def __init__(self):
            self.odd, self.other, self.say = object(), object(), print
    trainer = job.trainer(Trainer(Net(), arguments(), train_dataset=Noisy(), callbacks=[Mine()]))
    trainer.train()
    """,
        "lightning": LIGHTNING.replace('warnings.simplefilter("ignore")', "")
        + """
    class Mine(L.Callback):
        def __init__(self):
            self.odd, self.other, self.say = object(), object(), print
    job.trainer(trainer(callbacks=[Mine()])).fit(Module(), loader(Noisy()))
    """,
    }[name]
    needs(name)
    session = begun(FakeHost())
    path = script(tmp_path, f"odd {name}", body + "\n    save(1)\n")
    with pytest.warns(job.InexactResumeWarning, match=r"Mine\.odd, of type object") as warned:
        run(path, tmp_path / "out", 1, lambda: None)
    assert [one.category for one in warned].count(job.InexactResumeWarning) == 1
    session.close()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("library", ["transformers", "lightning"])
def test_the_documents_example_survives_its_worker_and_its_server(
    tmp_path: Path, library: str
) -> None:
    """Kill the worker, evict the job, and kill the server; the weights must equal a plain run's."""
    needs(library)
    blocks = re.findall(r"```python\n(.*?)```", DOCS.read_text("utf-8"), re.DOTALL)
    (example,) = [block for block in blocks if re.search(rf"(import|from) {library}", block)]
    path = tools.write_script(tmp_path, "example.py", example)
    tools.run_plain(path, str(tmp_path / "plain.pt"))
    options = {"arena": "64MiB", "state_dir": tmp_path / "state", "environment": ENVIRONMENT}
    with tools.checked_server(**options, settles=False, status=-signal.SIGKILL) as checked:
        task = checked.client.train(path, name="it", args=[str(tmp_path / "served.pt")])
        trains_on(checked, -1)
        tools.kill(checked.row("it")["pid"])
        trains_on(checked, task.status()["step"])
        task.pause()
        task.resume()
        trains_on(checked, task.status()["step"])
        tools.until(lambda: task.status()["persisted_step"] > 0, "a commit is on disk")
        tools.kill(checked.pid)
        checked.running.process.wait(30)
        checked.client.close()
        tools.gone(checked.mark)
    with tools.checked_server(**options) as checked:
        row = tools.finish(checked.client.task("it"), 120)
    assert row["restarts"] == 2
    weights = [torch.load(tmp_path / name) for name in ("plain.pt", "served.pt")]
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(one, weights[1][name]) for name, one in weights[0].items())


def trains_on(checked: tools.Checked, step: int) -> None:
    tools.until(lambda: checked.client.task("it").status()["step"] > step, "it trains on", 60)
