"""Odd models and odd clients on a real server.
Models leave the measured path, change torch's global settings, or differ from their export."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from process_tools import Checked, checked_server, eager, is_bit_equal, mlp, until, write_script
from torch import nn

import pipeswitch as ps
from pipeswitch.base import errors

ROOT = Path(__file__).parents[2]
WIDTH = 256
WAIT_S = 60.0

FACTORIES = """
    import sys
    import torch
    from torch import nn
    from torch.nn import functional as F

    WIDTH = 256

    def layers(count=44):
        return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(count)])

    class TiedElsewhere(nn.Module):
        '''On one path the tied table is read by its other name, long before its own.'''
        def __init__(self):
            super().__init__()
            self.body = layers()
            self.table = nn.Linear(WIDTH, WIDTH, bias=False)
            self.head = nn.Linear(WIDTH, WIDTH, bias=False)
            self.head.weight = self.table.weight

        def forward(self, x):
            return self.head(x) if x.sum() > 0 else self.table(self.body(x))

    class ReadByAnother(nn.Module):
        '''On one path the last layer's weight is read without the layer being entered.'''
        def __init__(self):
            super().__init__()
            self.body, self.last = layers(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return F.linear(x, self.last.weight) if x.sum() > 0 else self.last(self.body(x))

    class ReadInAList(ReadByAnother):
        def forward(self, x):
            if x.sum() > 0:
                return F.linear(x, list(self.last.parameters())[0])
            return self.last(self.body(x))

    class TiedInOrder(nn.Module):
        '''The tied weight's first name is entered last.'''
        def __init__(self):
            super().__init__()
            self.last = nn.Linear(WIDTH, WIDTH, bias=False)
            self.body = layers()
            self.first = nn.Linear(WIDTH, WIDTH, bias=False)
            self.first.weight = self.last.weight

        def forward(self, x):
            x = self.first(x)
            return self.last(self.body(x if x.sum() < 1e9 else x + 1))

    class Mapping(nn.Module):
        '''On one path its outputs come in another order, on one there is another.'''
        def __init__(self):
            super().__init__()
            self.linear = layers(1)

        def forward(self, x):
            if x.sum() > 1e9:
                return {"other": x}
            y = self.linear(x)
            return {"y": y, "x": x} if x.sum() > 0 else {"x": x, "y": y}

    class Raises(nn.Module):
        def __init__(self, error):
            super().__init__()
            self.linear, self.error = layers(1), error

        def forward(self, x):
            if x.sum() > 0:
                raise self.error
            return self.linear(x)

    class Mute(Exception):
        def __str__(self):
            raise RuntimeError("no text")

    def raises_surrogates(): return Raises(ValueError("\\udc80"))
    def raises_mute(): return Raises(Mute())
    def raises_exit(): return Raises(SystemExit(3))
    def raises_interrupt(): return Raises(KeyboardInterrupt())

    class Sets(nn.Module):
        def __init__(self, what):
            super().__init__()
            self.linear, self.what = layers(1), what

        def forward(self, x):
            y = self.linear(x if x.sum() < 1e9 else x + 1)
            self.what()
            return y

    def flush(): torch.set_flush_denormal(True)
    def coarse(): torch.set_float32_matmul_precision("medium")
    def double(): torch.set_default_dtype(torch.float64)
    def enter_autocast(): torch.autocast("cpu", dtype=torch.bfloat16).__enter__()

    def sets_flush(): return Sets(flush)
    def sets_coarse(): return Sets(coarse)
    def sets_double(): return Sets(double)
    def sets_autocast(): return Sets(enter_autocast)
"""


@pytest.fixture(scope="module")
def factories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ModuleType]:
    """Write a package of models, import it here, and put it on the server's ``PYTHONPATH``."""
    folder = tmp_path_factory.mktemp("operators")
    write_script(folder, "odd_operators.py", FACTORIES)
    sys.path.insert(0, str(folder))
    yield importlib.import_module("odd_operators")
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def running(factories: ModuleType) -> Iterator[Checked]:
    folder = Path(str(factories.__file__)).parent
    with checked_server(
        arena="16MiB",
        host_store="64MiB",
        args=("--link-gbps", "0.2"),  # the last group arrives 50 ms after the first
        environment={"PYTHONPATH": f"{folder}:{ROOT}"},
    ) as checked:
        evictor = mlp(1024, 3, 0)
        checked.client.register("evictor", evictor, example_inputs=torch.zeros(1, 1024))
        yield checked


def made(factory: Callable[[], nn.Module]) -> nn.Module:
    """Make a module with the weights that the server makes for ``random:5``."""
    torch.manual_seed(5)
    return factory().eval().requires_grad_(False)


def register_factory(running: Checked, factories: ModuleType, factory: str, batch: int = 2) -> str:
    name = factory.lower().replace("_", "-")
    running.client.register(
        name,
        f"{factories.__name__}:{factory}",
        weights="random:5",
        inputs={"x": ((batch, WIDTH), "float32")},
    )
    assert running.client.show(name)["mode"] == "module"
    return name


# ------------------------------------------------------------------------------- other paths


@pytest.mark.parametrize(
    "factory", ["TiedElsewhere", "ReadByAnother", "ReadInAList", "TiedInOrder"]
)
def test_no_weight_is_read_before_it_has_arrived_whatever_path_is_taken(
    running: Checked, factories: ModuleType, factory: str
) -> None:
    name = register_factory(running, factories, factory)
    module = made(getattr(factories, factory))
    for sign in (1, -1, 1):
        running.client.infer("evictor", torch.zeros(1, 1024))  # fills the memory with other bytes
        x = torch.full((2, WIDTH), 0.5 * sign)
        answer = running.client.infer(name, x)
        assert not answer.timing.resident
        assert is_bit_equal(answer["y"], eager(module, x))
    running.client.unregister(name)


def test_outputs_keep_their_names_whatever_order_they_come_in(
    running: Checked, factories: ModuleType
) -> None:
    name, module = register_factory(running, factories, "Mapping"), made(factories.Mapping)
    for sign in (1, -1):
        x = torch.full((2, WIDTH), 0.5 * sign)
        answer, expected = running.client.infer(name, x), eager(module, x)
        assert all(is_bit_equal(answer[key], expected[key]) for key in ("x", "y"))
    with pytest.raises(errors.TaskFailed, match="returned other instead of"):
        running.client.infer(name, torch.full((2, WIDTH), 1e9))


@pytest.mark.parametrize(
    ("factory", "says"),
    [
        ("raises_surrogates", "ValueError: ?"),
        ("raises_mute", "no text"),
        ("raises_exit", "SystemExit"),
        ("raises_interrupt", "KeyboardInterrupt"),
    ],
)
def test_whatever_a_models_code_raises_fails_that_request_alone(
    running: Checked, factories: ModuleType, factory: str, says: str
) -> None:
    name = register_factory(running, factories, factory)
    restarts, x = running.count("worker_restarts"), torch.ones(2, WIDTH)
    with pytest.raises(errors.TaskFailed) as caught:
        running.client.infer(name, x)
    assert says in str(caught.value)
    assert is_bit_equal(
        running.client.infer(name, -x)["y"], eager(made(getattr(factories, factory)), -x)
    )
    assert running.count("worker_restarts") == restarts


@pytest.mark.parametrize("what", ["flush", "coarse", "double", "autocast"])
def test_what_one_model_sets_in_torch_is_not_set_for_another(
    running: Checked, factories: ModuleType, what: str
) -> None:
    def tell(x: torch.Tensor) -> torch.Tensor:
        subnormal = x.double() * 5e-324
        return torch.cat([x @ x.t(), subnormal.view(torch.int64).float() @ x.t() / 3])

    class Tells(nn.Module):
        """Module whose output shows matmul precision, subnormals, autocast and default dtype."""

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return tell(x), x.to(torch.int64) / 3

    x = torch.linspace(0.1, 3, 64 * 64).reshape(64, 64)
    if not running.client.models() or "tells" not in [m["name"] for m in running.client.models()]:
        running.client.register("tells", Tells(), example_inputs=torch.ones(64, 64), max_batch=1)
    expected = eager(Tells(), x)
    name = register_factory(running, factories, f"sets_{what}")
    for _ in range(3):  # at least one run of ``tells`` is in the worker that just ran the other
        running.client.infer(name, torch.ones(2, WIDTH))
        outputs = list(running.client.infer("tells", x).outputs.values())
        assert [is_bit_equal(a, b) for a, b in zip(outputs, expected, strict=True)] == [True, True]
    running.client.unregister(name)


# ------------------------------------------------------------------------------- inputs


def encoder() -> nn.Module:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)


def test_a_graph_that_does_not_compute_the_modules_bits_is_refused(running: Checked) -> None:
    x = torch.linspace(-1, 1, 2 * 5 * 32).reshape(2, 5, 32)
    module = encoder()
    with pytest.raises(errors.RegistrationRefused, match="set_fastpath_enabled") as caught:
        running.client.register("encoder", module, example_inputs=x)
    assert caught.value.part == "verification"
    assert module.training
    assert all(parameter.requires_grad for parameter in module.parameters())
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        running.client.register("encoder", module, example_inputs=x)
        expected = eager(encoder().eval().requires_grad_(False), x)
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
    assert is_bit_equal(running.client.infer("encoder", x)["y"], expected)


class Tables(nn.Module):
    """Module that makes tensors of the default dtype."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.linspace(0, 1, 4) + torch.full((4,), 0.1)


class Divides(nn.Module):
    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers / 7


def test_a_default_dtype_travels_in_the_graph_or_the_module_is_refused(running: Checked) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        x = torch.arange(8.0).reshape(2, 4) / 3
        expected = eager(Tables(), x)
        running.client.register("tables", Tables(), example_inputs=x)
        with pytest.raises(errors.RegistrationRefused, match="set_default_dtype"):
            running.client.register("divides", Divides(), example_inputs=torch.arange(8))
    finally:
        torch.set_default_dtype(torch.float32)
    assert is_bit_equal(running.client.infer("tables", x)["y"], expected)


# ------------------------------------------------------------------------------- the client


@pytest.fixture
def client(running: Checked) -> Iterator[ps.Client]:
    with running.running.client() as client:
        yield client


X = np.zeros((1, 1024), dtype=np.float32)


@pytest.mark.parametrize(
    "deadline_ms", [np.float32(9e6), np.int64(9_000_000), torch.tensor(9e6), 9_000_000]
)
def test_a_number_is_a_number_whoever_made_it(client: ps.Client, deadline_ms: Any) -> None:
    assert client.submit("evictor", X, deadline_ms=deadline_ms).result(WAIT_S)["y"].shape == X.shape


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (None, {}),
        ("\udc80", {}),
        ("evictor", {"deadline_ms": "soon"}),
        ("evictor", {"deadline_ms": 10**400}),
        ("evictor", {"priority": 5}),
        ("evictor", {"priority": "\udc80"}),
        ("evictor", {"\udc80": X}),
    ],
)
def test_what_cannot_be_sent_is_an_invalid_input_and_the_client_goes_on(
    client: ps.Client, model: Any, options: dict[str, Any]
) -> None:
    arguments = () if "\udc80" in options else (X,)
    with pytest.raises(errors.InvalidInput):
        client.submit(model, *arguments, **options).result(WAIT_S)
    assert client.submit("evictor", X).result(WAIT_S)["y"].shape == X.shape


def test_numpys_scalars_and_texts_travel_in_every_verb(client: ps.Client) -> None:
    with pytest.raises(errors.RegistrationRefused):
        within(
            lambda: client.register(
                str(np.str_("np")),
                "torchvision:nothing",
                weights="random:0",
                pin=np.bool_(False),
                max_batch=np.int64(4),  # type: ignore[arg-type]
            )
        )
    assert client.show(np.str_("evictor"))["name"] == "evictor"


def within(work: Callable[[], Any]) -> Any:
    """Return the result of ``work``, or raise its error; fail after WAIT_S."""
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return done.result(WAIT_S)


def test_a_progress_callback_that_raises_ends_its_own_call_alone(client: ps.Client) -> None:
    waiting = client.submit("evictor", X)

    def refuse(stage: str, fraction: float) -> None:
        raise ValueError("the caller's own")

    with pytest.raises(ValueError, match="the caller's own"):
        within(
            lambda: client.register(
                "np", "torchvision:nothing", weights="random:0", progress=refuse
            )
        )
    assert waiting.result(WAIT_S)["y"].shape == X.shape
    assert client.submit("evictor", X).result(WAIT_S)["y"].shape == X.shape


def test_a_callback_may_submit_and_close_but_not_wait_for_its_own_client(running: Checked) -> None:
    client = running.running.client()
    caught: list[Exception] = []
    second: Future[Future[ps.Result]] = Future()

    def call_back(_: object) -> None:
        # If the answer is there already, the main thread runs this callback itself, and may wait.
        if threading.current_thread() is threading.main_thread() or second.done():
            return
        for wait in (
            lambda: client.infer("evictor", X),
            lambda: client.submit("evictor", X).result(),
            lambda: client.models(),
        ):
            try:
                wait()
            except errors.PipeSwitchError as error:
                caught.append(error)
        second.set_result(client.submit("evictor", X))

    def was_called() -> bool:
        future = client.submit("evictor", X)
        future.add_done_callback(call_back)
        future.result(WAIT_S)
        return second.done()

    until(was_called, "the client's own thread called")
    assert second.result(WAIT_S).result(WAIT_S)["y"].shape == X.shape
    assert [type(error) for error in caught] == [errors.InvalidInput] * 3

    client.submit("evictor", X).add_done_callback(lambda _: client.close())
    until(lambda: not client._connection._thread.is_alive(), "the client is closed")
    with pytest.raises(errors.Cancelled):
        client.models()


def test_a_subscription_that_somebody_holds_does_not_hold_close_up(running: Checked) -> None:
    client = running.running.client()
    records = client.events("model.")
    heard = threading.Event()

    def make_news() -> None:
        while not heard.is_set():  # the server may read the subscription only after some events
            running.client.register("news", mlp(8, 1, 0), example_inputs=torch.zeros(1, 8))
            running.client.unregister("news")

    thread = threading.Thread(target=make_news)
    thread.start()
    try:
        assert next(records)["topic"].startswith("model.")
    finally:
        heard.set()
        thread.join()
    within(client.close)
    assert list(records) == []


@pytest.mark.parametrize("timeout_s", [float("inf"), 1e12])
def test_a_very_long_timeout_is_for_ever(running: Checked, timeout_s: float) -> None:
    with running.running.client(timeout_s=timeout_s) as client:
        assert within(lambda: client.infer("evictor", X))["y"].shape == X.shape
        assert client.ping(timeout_s=timeout_s)["ready"]


@pytest.mark.parametrize("timeout_s", [float("nan"), "soon", [1]])
def test_a_timeout_that_is_no_number_is_an_invalid_input(running: Checked, timeout_s: Any) -> None:
    with pytest.raises(errors.InvalidInput):
        running.running.client(timeout_s=timeout_s)
    with pytest.raises(errors.InvalidInput):
        running.client.ping(timeout_s=timeout_s)
