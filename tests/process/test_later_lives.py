"""The world of a later life of a script is that of the first one: files, seeds, hashes."""

from __future__ import annotations

import contextlib
import copy
import csv
import importlib
import json
import os
import pickle
import random
import signal
import sys
import threading
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import process_tools as tools
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from pipeswitch import job
from pipeswitch.base.errors import InvalidInput
from pipeswitch.client.client import Task
from pipeswitch.ipc.gate import Gate
from pipeswitch.ipc.messages.base import OpId
from pipeswitch.ipc.messages.worker import JobEnded
from pipeswitch.workers.training import script as script_module
from pipeswitch.workers.training.entropy import entropy, repeatable_seeds
from pipeswitch.workers.training.script import SIGNALS, _end_by_exit, _server_stops_first
from tests.process.test_training_exact import FakeHost, begun
from tests.process.test_training_state import Poke, Script, live, one_thread

__all__ = ["one_thread"]


def in_lives(script: Script, seed: int = 0, **options: Any) -> list[str]:
    """Run lives of the script that die at random pokes, with a commit at each step; return the
    texts of all warnings."""
    host, dice = FakeHost(), random.Random(seed)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        while not live(host, script, crash_at=dice.randint(1, 14), every_ms=0.0, **options):
            pass
    return [str(one.message) for one in caught]


def trained(poke: Poke, epochs: int = 4) -> Any:
    """Yield the epoch, and None for each of its 5 steps."""
    torch.manual_seed(0)
    net = nn.Linear(2, 2)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for epoch in job.epochs(epochs):
        for x in job.steps([torch.ones(1, 2)] * 5, model=net, optimizer=opt):
            poke()
            net(x).sum().backward()
            opt.step()
            yield epoch, job.step
        yield epoch, None


@pytest.mark.parametrize("seed", range(4))
def test_rows_of_a_killed_script_are_in_its_files_once(tmp_path: Path, seed: int) -> None:
    def script(poke: Poke) -> str:
        with job.open(tmp_path / "log.csv") as log:
            rows = csv.writer(log)
            rows.writerow(["epoch", "step"])
            for epoch, step in trained(poke):
                rows.writerow([epoch, step])
                poke()
                if step is None:  # a file that is opened again and again, and another format
                    with job.open(tmp_path / "epochs.jsonl") as lines:
                        lines.write(json.dumps({"epoch": epoch}) + "\n")
                    poke()
        return "ended"

    told = in_lives(script, seed, files=tmp_path / "job-j.files")
    rows = [["epoch", "step"]]
    for epoch in range(4):
        rows += [[str(epoch), str(step + 5 * epoch)] for step in range(5)] + [[str(epoch), ""]]
    assert [*csv.reader((tmp_path / "log.csv").read_text().splitlines())] == rows
    lines = (tmp_path / "epochs.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in lines] == [0, 1, 2, 3]
    assert told == []


def test_a_life_without_a_commit_leaves_no_row(tmp_path: Path) -> None:
    log, record = tmp_path / "log.csv", tmp_path / "job-j.files"
    log.write_text("of an earlier run\n")
    for _ in range(3):  # each dies before it has committed anything
        session = begun(FakeHost(), files=record)
        with job.open(log) as file:
            file.write("header\n")
        session.close()
    assert log.read_text() == "of an earlier run\nheader\n"
    begun(FakeHost(), files=record).close()
    assert log.read_text() == "of an earlier run\n"
    record.write_text('{"')
    begun(FakeHost(), files=record).close()


@pytest.mark.parametrize("way", ["kept open", "header", "unlinked", "same", "new"])
def test_a_log_that_a_later_life_empties_is_named(tmp_path: Path, way: str) -> None:
    path = tmp_path / "log.csv"
    lives = 0

    def script(poke: Poke) -> str:
        nonlocal lives
        lives += 1
        log = None
        if way == "kept open":
            log = path.open("w")
        elif way == "header":
            path.write_text("epoch\n")
        elif way == "same":  # a file of the settings, for example
            path.write_text("lr 0.1\n")
        elif way == "new":
            log = (tmp_path / f"log-{lives}.csv").open("w")
        else:
            path.unlink(missing_ok=True)
        with contextlib.closing(log) if log else contextlib.nullcontext():
            for epoch, step in trained(poke):
                if way == "unlinked":
                    log = job.open(path)
                elif way == "header":
                    log = path.open("a")
                if log:
                    print(epoch, step, file=log, flush=True)
                if way in ("unlinked", "header"):
                    log.close()
        return "ended"

    told = [text for text in in_lives(script) if "job.open" in text]
    assert bool(told) == (way not in ("same", "new")), told
    assert all("log.csv: emptied since the last commit" in text for text in told)


def test_a_script_opens_a_limited_number_of_files(tmp_path: Path) -> None:
    session = begun(FakeHost())
    for index in range(64):
        job.open(tmp_path / f"{index}").close()
    with pytest.raises(InvalidInput, match="one more than 64"):
        job.open(tmp_path / "more")
    session.close()


@pytest.mark.parametrize(("status", "is_in_loop"), [(0, False), (0, True), (3, False)])
def test_only_an_exit_behind_the_loops_with_status_0_is_an_end(
    monkeypatch: pytest.MonkeyPatch, status: int, is_in_loop: bool
) -> None:
    left: list[int] = []
    ended: list[JobEnded] = []
    session = SimpleNamespace(is_in_loop=is_in_loop, finish=lambda: None, step=3)
    monkeypatch.setattr(os, "_exit", left.append)
    host: Any = SimpleNamespace(end=ended.append)
    with _end_by_exit(session, host, OpId(1)):  # type: ignore[arg-type]
        os._exit(status)
        threading.Thread(target=os._exit, args=(0,)).run()
    assert left == [status, 0]
    assert len(ended) == (not is_in_loop) * (2 - bool(status))


def draws() -> list[float]:
    """Return a number from each kind of generator that nobody seeds."""
    own = torch.Generator()
    own.seed()
    children = np.random.SeedSequence().spawn(2)
    numbers = [torch.rand((), generator=own).item(), np.random.default_rng(children[1]).random()]
    for seed in (random.seed, np.random.seed, torch.seed):
        seed()
        numbers += [random.random(), np.random.rand(), torch.rand(()).item()]
    numbers += [np.random.default_rng().random(), np.random.RandomState().rand()]
    return [*numbers, random.Random().random(), random.Random().random()]


@pytest.mark.parametrize("seed", range(4))
def test_unseeded_generators_draw_the_same_numbers_in_each_life(seed: int) -> None:
    tops: list[list[float]] = []

    def script(poke: Poke) -> str:
        tops.append(draws())
        for _ in trained(poke):
            last = draws()
        return repr(last)

    def ended(dies: bool) -> str:
        host, dice, text = FakeHost(), random.Random(seed), ""
        while not text:
            crash_at = dice.randint(4, 9) if dies else -1
            text = live(host, script, crash_at=crash_at, every_ms=0.0)
            entropy.renew()  # each process has its own
        return text

    with repeatable_seeds():
        state = entropy.state
        undisturbed = ended(dies=False)
        entropy.state = state
        assert ended(dies=True) == undisturbed
    assert len(tops) > 3
    assert all(top == tops[0] for top in tops)
    assert len(set(tops[0])) == len(tops[0])
    assert draws() != draws()


def test_each_process_has_its_own_seeds_and_generators_stay_what_they_are() -> None:
    with repeatable_seeds():
        data = DataLoader(cast(Any, Drawing()), num_workers=2)
        assert len({float(x) for x in data}) == 4
        generator = copy.deepcopy(torch.Generator().manual_seed(3))
        assert isinstance(generator, torch.Generator)
        assert isinstance(torch.default_generator, torch.Generator)
        assert pickle.loads(pickle.dumps(generator)).initial_seed() == 3
        assert generator.seed() == generator.initial_seed()
        assert random.Random(5).random() == random.Random(5).random()


class Drawing:
    """Dataset of numbers from generators that nobody seeds."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, _: int) -> float:
        return float(np.random.default_rng().random())


@pytest.mark.parametrize("late", [False, True])
def test_an_edited_import_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    name, host = f"own_{late}", FakeHost()
    (tmp_path / "data.py").write_text("")
    told: list[list[str]] = []

    def script(poke: Poke) -> str:
        if not late:
            importlib.import_module(name)
        for _, step in trained(poke):
            if late and step is not None and step > 1:
                importlib.import_module(name)
        return "ended"

    for text in ("a = 1", "a = 1", "a = 2", "a = 2"):
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", job.InexactResumeWarning)
            live(host, script, crash_at=5, every_ms=0.0)
        told.append([str(one.message) for one in caught if "edited" in str(one.message)])
    assert [len(texts) for texts in told] == [0, 0, 1, 0]
    assert told[2][0].startswith(f"{name}.py: edited since step ")


LOGS = """
    import os, signal, sys, threading, time
    import torch
    from pipeswitch import job

    path = sys.argv[1]
    threading.Thread(target=time.sleep, args=(3600,)).start()  # it would hang by hand, too
    torch.manual_seed(0)
    net = torch.nn.Linear(4, 4)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    log = job.open(path)
    print("step", file=log)
    for _ in job.epochs(3):
        for x in job.steps([torch.ones(1, 4)] * 20, model=net, optimizer=opt):
            time.sleep(0.01)
            if job.step in (17, 33) and not os.path.exists(died := f"{path}.{job.step}"):
                open(died, "w").close()
                os.kill(os.getpid(), signal.SIGKILL)
            net(x).sum().backward()
            opt.step()
            print(job.step, file=log)
    os._exit(0)
"""


def test_a_log_has_each_row_once_and_a_script_may_end_by_exit(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    with tools.checked_server(environment=tools.ENVIRONMENT) as checked:
        row = tools.finish(
            checked.client.train(tools.write_script(tmp_path, "logs.py", LOGS), args=[str(log)])
        )
        assert (row["restarts"], row["step"]) == (2, 60)
        assert log.read_text().split() == ["step", *map(str, range(60))]
        shown = tools.command("--host", checked.running.ipc_address, "jobs").stdout.split()
        at = shown.index("COMMITTED")
        assert shown[at : at + 4] == ["COMMITTED", "STEP", "PERSISTED", "STEP"]


WORLD = """
    import time
    import numpy as np
    import torch
    from pipeswitch import job

    words = {"quick", "brown", "fox", "jumps", "over", "lazy", "dog", "wizards", "vex", "quartz"}
    print("WORLD", list(words), np.random.default_rng().random(), flush=True)
    net = torch.nn.Linear(4, 4)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for x in job.steps([torch.ones(1, 4)] * 100_000, model=net, optimizer=opt):
        time.sleep(0.01)
        net(x).sum().backward()
        opt.step()
"""


def test_sets_and_unseeded_generators_are_the_same_in_the_next_server(tmp_path: Path) -> None:
    worlds: list[str] = []
    for life in range(2):
        options: Any = {"environment": tools.ENVIRONMENT, "state_dir": tmp_path / "state"}
        with tools.checked_server(settles=False, **options) as checked:
            client = checked.client
            if not life:
                client.train(tools.write_script(tmp_path, "world.py", WORLD))
            task = client.task("world")
            tools.until(partial(has_gone_on, task, life), "it goes on, and is on disk")
            if life:
                worlds = [line for line in "".join(task.logs()).splitlines() if "WORLD" in line]
                task.cancel()
    assert len(worlds) == 2
    assert worlds[0] == worlds[1]


def has_gone_on(task: Task, life: int) -> bool:
    log = "".join(task.logs())
    return log.count("WORLD") > life and bool(task.status()["persisted_step"] > 0)


def test_a_scripts_handler_runs_if_the_server_does_not_stop_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def handler(number: int, _: Any) -> None:
        numbers.append(number)

    numbers: list[int] = []
    monkeypatch.setattr(script_module, "STOP_ORDER_S", 0.01)
    gate, before = Gate(lambda *_: None), {one: signal.getsignal(one) for one in SIGNALS}
    with _server_stops_first(gate):
        os.kill(os.getpid(), signal.SIGTERM)  # the script has no handler
        signal.signal(signal.SIGTERM, handler)
        assert signal.getsignal(signal.SIGTERM) is handler
        os.kill(os.getpid(), signal.SIGTERM)
        assert numbers == [signal.SIGTERM]
        monkeypatch.setattr(script_module, "STOP_ORDER_S", 30.0)
        threading.Timer(0.05, gate.request_evict).start()
        os.kill(os.getpid(), signal.SIGTERM)
        assert gate.is_evicting
        assert numbers == [signal.SIGTERM]
        assert signal.signal(signal.SIGTERM, signal.SIG_IGN) is handler
    for number, former in before.items():
        signal.signal(number, former)


STOPS = """
    import signal, sys, time
    import torch
    from pipeswitch import job

    def handler(number, frame):
        print("SIGNAL", flush=True)
        sys.exit(0)

    signal.signal(signal.SIGTERM, handler)
    data = torch.utils.data.DataLoader(range(100_000), num_workers=1)
    net = torch.nn.Linear(1, 1)
    opt = torch.optim.SGD(net.parameters(), 0.001)
    for x in job.steps(data, model=net, optimizer=opt):
        time.sleep(0.01)
        net(torch.ones(1, 1)).sum().backward()
        opt.step()
"""


def test_a_signal_to_all_processes_stops_the_server_and_ends_no_job(tmp_path: Path) -> None:
    script = tools.write_script(tmp_path, "stops.py", STOPS)
    options: Any = {"environment": tools.ENVIRONMENT, "state_dir": tmp_path / "state"}
    with tools.checked_server(settles=False, **options) as checked:
        task = checked.client.train(script)
        tools.until(lambda: task.status()["committed_step"] > 0, "it trains")
        worker = checked.worker_pids()[task.status()["worker"]]
        tools.stop(checked.pid)  # the server learns of it last
        for pid in (*tools.children_of(worker), worker, checked.pid):
            tools.kill(pid, signal.SIGTERM)
        tools.kill(checked.pid, signal.SIGCONT)
        checked.running.process.wait(tools.DEADLINE_S)
    with tools.checked_server(**options) as checked:
        task = checked.client.task("stops")
        step = task.status()["step"]
        tools.until(lambda: task.status()["step"] > step, "it goes on")
        assert "SIGNAL" not in "".join(task.logs())
        tools.kill(checked.worker_pids()[task.status()["worker"]], signal.SIGTERM)  # by hand
        tools.finish(task)
        assert "SIGNAL" in "".join(task.logs())


EDITED = """
    import time
    import torch
    from pipeswitch import job
    from edited_part import VERSION

    print("VERSION", VERSION, flush=True)
    net = torch.nn.Linear(4, 4)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for x in job.steps([torch.ones(1, 4)] * 100_000, model=net, optimizer=opt):
        time.sleep(0.01)
        net(x).sum().backward()
        opt.step()
"""


def test_a_job_goes_on_with_edited_files_and_says_so(tmp_path: Path) -> None:
    part, script = tmp_path / "edited_part.py", tools.write_script(tmp_path, "edited.py", EDITED)
    part.write_text("VERSION = 1")
    with tools.checked_server(environment=tools.ENVIRONMENT) as checked:
        task = checked.client.train(script)
        for version, names in ((2, "edited_part.py"), (3, "edited.py, edited_part.py")):
            step = task.status()["committed_step"]
            tools.until(partial(has_committed, task, step), "it commits")
            task.pause()
            part.write_text(f"VERSION = {version}")
            if version == 3:
                script.write_text(script.read_text() + "# edited")
            task.resume()
            tools.until(partial(names_edited, task, names), "it names the files")
        log = "".join(task.logs())
        assert [line for line in log.splitlines() if line[:1] == "V"] == [
            f"VERSION {version}" for version in (1, 2, 3)
        ]
        assert log.count("InexactResumeWarning") == 2
        assert "the job continues after step" in log


def has_committed(task: Task, step: int) -> bool:
    return bool(task.status()["committed_step"] > max(step, 0))


def names_edited(task: Task, names: str) -> bool:
    return str(task.status()["why"]).startswith(f"{names}: edited since step ")


PLACE = """
    import os, sys, time
    import torch
    from pipeswitch import job

    print("PLACE", os.getcwd(), os.environ["MY_SECRET"], open(sys.argv[1]).read(), flush=True)
    net = torch.nn.Linear(4, 4)
    opt = torch.optim.SGD(net.parameters(), 0.1)
    for x in job.steps([torch.ones(1, 4)] * 100_000, model=net, optimizer=opt):
        time.sleep(0.01)
        net(x).sum().backward()
        opt.step()
"""


def test_a_job_has_its_callers_folder_and_variables_in_each_life(tmp_path: Path) -> None:
    folder = tmp_path / "project"
    for name in ("scripts", "data"):
        (folder / name).mkdir(parents=True)
    tools.write_script(folder / "scripts", "place.py", PLACE)
    (folder / "data/x.txt").write_text("DATA")
    options: Any = {"environment": tools.ENVIRONMENT, "state_dir": tmp_path / "state"}
    words = ("train", "scripts/place.py", "--json", "--", "data/x.txt")
    for life in range(2):
        with tools.checked_server(settles=False, **options) as checked:
            if not life:
                host, secret = ("--host", checked.running.ipc_address), {"MY_SECRET": "m1ne"}
                done = tools.command(*host, *words, environment=secret, cwd=folder)
                row = json.loads(done.stdout)
                assert (row["folder"], row["env"]) == (str(folder), ["MY_SECRET"])
                assert done.stderr == "variables: MY_SECRET\n"
                assert "m1ne" not in done.stdout
            task = checked.client.task("place")
            tools.until(
                partial(has_printed, task, life + 1, f"PLACE {folder} m1ne DATA"), "it goes on"
            )
            if life:
                task.pause()
                folder.rename(tmp_path / "moved")
                task.resume()
                tools.until(
                    lambda task=task: task.status()["state"] == "failed", "its folder is gone"
                )
                assert task.status()["error"].startswith(
                    f"InvalidInput: the job's folder '{folder}"
                )


def has_printed(task: Task, count: int, line: str) -> bool:
    is_on_disk = bool(task.status()["persisted_step"] > 0)
    return is_on_disk and "".join(task.logs()).splitlines().count(line) == count
