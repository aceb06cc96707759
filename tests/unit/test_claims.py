"""Checks of messages and files of a builder, which a malicious program may control."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from pipeswitch.base.errors import RegistrationRefused
from pipeswitch.controller.builds import Builds
from pipeswitch.controller.folders import StateDir
from pipeswitch.ipc.messages.base import Exit, Message, ModelName, OpId
from pipeswitch.ipc.messages.builder import BuildDone, BuildFailed, BuildProgress
from pipeswitch.programs.graphs.operators import checked_by
from pipeswitch.programs.graphs.partition import Layer, UnplacedWeight, place
from pipeswitch.programs.interface import layout
from pipeswitch.programs.interface.dims import Dim
from pipeswitch.programs.interface.layout import PADS
from pipeswitch.programs.spec import BuildSpec, save_manifest
from pipeswitch.scheduler.state.events import Received, StartBuild
from tests.unit.manifests import plain_manifest

WEIGHTS = [UnplacedWeight(f"w{n}", "float32", (n + 1, 10), 40 * (n + 1)) for n in range(3)]
TENSORS, LAYERS, GROUPS, TOTAL = place(
    [Layer(0, 2, (0,)), Layer(2, 3, (1,)), Layer(3, 5, (2,))], WEIGHTS, (0, 2), [100, 140, 220]
)
VALUE = layout.ValueSpec(name="x", dtype="float32", shape=("batch", 10))
HONEST = plain_manifest(
    digest="a" * 64,
    total_bytes=TOTAL,
    tensors=TENSORS,
    groups=GROUPS,
    layers=LAYERS,
    inputs=(VALUE,),
    outputs=(VALUE,),
    dims=(Dim("batch", 1, 8),),
    batching=layout.Batching(limit=4, delay_ms=1.0, is_exact=True),
    extra={
        "notes": ["a note"],
        "intermediate_bytes": 80,
        "largest_value_bytes": 40,
        "is_whole": True,
        "checked_by": checked_by(),
        "last_readers": [1, 2, 5],
    },
)


def with_tensor(**changed: Any) -> dict[str, Any]:
    return {"tensors": (msgspec.structs.replace(TENSORS[0], **changed), *TENSORS[1:])}


def with_group(**changed: Any) -> dict[str, Any]:
    return {"groups": (msgspec.structs.replace(GROUPS[0], **changed), *GROUPS[1:])}


def with_extra(**changed: Any) -> dict[str, Any]:
    return {"extra": {**HONEST.extra, **changed}}


def batched(limit: int = 4, delay_ms: float = 1.0) -> dict[str, Any]:
    return {"batching": layout.Batching(limit=limit, delay_ms=delay_ms, is_exact=True)}


LIES: dict[str, dict[str, Any]] = {
    "a region of another size": {"total_bytes": TOTAL - 512},
    "a region of less than nothing": {"total_bytes": -1},
    "no groups": {"groups": ()},
    "a group behind the region": with_group(size_bytes=1 << 40),
    "a group before it": with_group(offset_bytes=-512),
    "groups of the same tensors": {"groups": (GROUPS[0], GROUPS[0])},
    "a group of tensors that are not there": with_group(tensors=(0, 1, 2, 3, 4)),
    "a group of tensors elsewhere": with_group(tensors=()),
    "a group that skips nodes": with_group(end_node=2),
    "a label that clears the screen": with_group(label="\x1b[2J"),
    "nodes without end": {
        "layers": (),
        "groups": (
            layout.GroupSpec(
                offset_bytes=0,
                size_bytes=TOTAL,
                tensors=(0, 1, 2),
                first_node=0,
                end_node=1 << 40,
                label="",
            ),
        ),
    },
    "layers with tensors twice": {"layers": (*LAYERS, layout.LayerSpec(5, 5, 1))},
    "layers that give some back": {
        "layers": (*LAYERS, layout.LayerSpec(5, 5, 2), layout.LayerSpec(5, 5, -2))
    },
    "a tensor in front of the region": with_tensor(offset_bytes=-512),
    "a tensor over another": {"tensors": (TENSORS[0], TENSORS[0], TENSORS[2])},
    "a tensor larger than its shape": with_tensor(size_bytes=1 << 40),
    "a tensor of another dtype": with_tensor(dtype="string"),
    "a tensor before the file": with_tensor(file_offset_bytes=-8),
    "a tensor's name that turns the text": with_tensor(name="\u202ew"),
    "a batch of none": batched(limit=0),
    "a batch of less": batched(limit=-4),
    "a batch that it does not take": batched(limit=9),
    "others are awaited for less than nothing": batched(delay_ms=-1.0),
    "joined, with a fixed batch": {"dims": (Dim("batch", 2, 2),)},
    "joined, with one answer for all": {
        "outputs": (layout.ValueSpec(name="x", dtype="float32", shape=(10,)),)
    },
    "a source of many lines": {"source": "x" * 5000},
    "a reason that commands a terminal": {"mode_reason": "\x9b2J"},
    "notes that are a number": with_extra(notes=7),
    "a note that is a list": with_extra(notes=[["a"]]),
    "bytes that are a text": with_extra(intermediate_bytes="much"),
    "nobody says what reads the weights": with_extra(last_readers=None),
    "one is read by more than there is": with_extra(last_readers=[1, 2, 1 << 40]),
    "rows of a table that is not there": {"lookups": (layout.LookupSpec(3, 0, 1),)},
    "rows that no input names": {"lookups": (layout.LookupSpec(0, 1, 1),)},
    "one is not spoken of": with_extra(last_readers=[1, 2]),
    "bytes that are negative": with_extra(largest_value_bytes=-1),
    "padding that no input speaks of": with_extra(pads=PADS),
    "padding along a dimension that is none": with_extra(pads={"length": "x"}),
    "padding that is a number": with_extra(pads=7),
}


@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
def test_a_manifest_whose_numbers_do_not_belong_together_is_refused(
    lie: dict[str, Any], tmp_path: Path
) -> None:
    rig = Rig(tmp_path, batch=4)
    rig.built(msgspec.structs.replace(HONEST, **lie))
    [answer] = rig.said()
    assert isinstance(answer, BuildFailed)
    assert answer.error == RegistrationRefused.__name__
    assert "as its owner asked" not in answer.message or "batching" in lie


class Children:
    """Stand-in for child processes; the test sends their messages."""

    def __init__(self) -> None:
        self.killed = 0
        self.descriptors: list[int] = []
        self.on_message: Any = None
        self.on_exit: Any = None

    def fork(self, *arguments: Any) -> object:
        self.descriptors, self.on_message, self.on_exit = arguments[-3:]
        return object()

    def kill(self, child: object) -> None:
        self.killed += 1


class Rig:
    """Controller's side of one build: number 7, of the model ``own``."""

    def __init__(
        self, folder: Path, batch: int = 0, source: str = "/x.bundle", weights: str = ""
    ) -> None:
        self.taken: list[Any] = []
        self.children = Children()
        self.places = StateDir(root=folder)
        self.places.models.mkdir()
        disk = SimpleNamespace(
            refusal=lambda *_: None, left_bytes=lambda *_: 1 << 30, digest_of=lambda _: ""
        )
        sizes = SimpleNamespace(
            threads=1,
            build_timeout_s=0.0,
            build_memory_bytes=0,
            task_memory_bytes=0,
            is_sandboxed=True,
            packs_weights=True,
        )
        context = SimpleNamespace(
            sizes=sizes,
            places=self.places,
            children=self.children,
            take=self.taken.append,
            frontend=SimpleNamespace(disk=disk, uploads=SimpleNamespace(remove=lambda _: None)),
            memory=SimpleNamespace(environment=99),
        )
        spec = msgspec.msgpack.encode(
            BuildSpec(
                name="own",
                source=source,
                weights=weights,
                batch=batch,
                batch_delay_ms=1.0 * bool(batch),
            )
        )
        self.builds = Builds(cast(Any, context), {}, ())
        self.builds.start(
            StartBuild(model=ModelName("own"), op_id=OpId(7), spec=spec, tenant="enemy")
        )

    def said(self) -> list[Message]:
        return [event.message for event in self.taken if isinstance(event, Received)]

    def built(self, manifest: layout.Manifest) -> None:
        work = self.places.models / ".build-7-x"
        work.mkdir()
        save_manifest(work, manifest)
        done = BuildDone(model=ModelName("own"), op_id=OpId(7), digest="a" * 64, folder=work.name)
        self.children.on_message(done, [])
        self.children.on_exit(0)


@pytest.mark.parametrize(
    ("source", "weights", "handed"),
    [
        ("/x.bundle", "", []),
        ("torchvision:alexnet", "random:0", []),
        ("hf:gpt2", "pretrained", [99]),
        ("package.module:factory", "", [99]),
    ],
)
def test_a_build_in_the_sandbox_gets_no_environment(
    source: str, weights: str, handed: list[int], tmp_path: Path
) -> None:
    assert Rig(tmp_path, source=source, weights=weights).children.descriptors == handed


def test_a_builder_speaks_of_no_build_but_its_own(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    others = {"model": ModelName("anothers"), "op_id": OpId(6)}
    rig.children.on_message(BuildProgress(**others, stage="pack", fraction=0.5), [])
    rig.children.on_message(BuildFailed(**others, error="Cancelled", message="no"), [])
    assert [(m.model, m.op_id) for m in cast(Any, rig.said())] == [("own", 7)] * 2
    assert not rig.children.killed
    rig.children.on_message(Exit(), [])
    assert rig.children.killed == 1
    assert len(rig.said()) == 2


@pytest.mark.parametrize(("batch", "built_batch"), [(0, 4), (8, 4), (4, 0)])
def test_requests_are_joined_as_the_owner_asked_and_not_as_the_builder_says(
    batch: int, built_batch: int, tmp_path: Path
) -> None:
    """With a false claim, other clients' requests would be batched in a process of the attacker."""
    rig = Rig(tmp_path, batch=batch)
    rig.built(
        msgspec.structs.replace(
            HONEST, **(batched(built_batch) if built_batch else {"batching": None})
        )
    )
    [answer] = rig.said()
    assert isinstance(answer, BuildFailed)
    assert "as its owner asked" in answer.message


def test_what_belongs_together_is_published(tmp_path: Path) -> None:
    rig = Rig(tmp_path, batch=4)
    rig.built(HONEST)
    [answer] = rig.said()
    assert isinstance(answer, BuildDone)


def test_these_are_the_fields_that_a_builder_fills() -> None:
    """List the manifest's fields. A new field needs a check if the server calculates with it."""
    digests = {"digest", "weights_sha256", "head_sha256"}  # if wrong, the program is refused
    assert set(layout.Manifest.__struct_fields__) - {*digests, "mode", "triggers"} == {
        "mode_reason",
        "source",
        "total_bytes",
        "tensors",
        "groups",
        "inputs",
        "outputs",
        "dims",
        "takes",
        "returns",
        "layers",
        "lookups",
        "batching",
        "extra",
        "precision",
    }
    assert set(layout.TensorSpec.__struct_fields__) == {
        "name",
        "dtype",
        "shape",
        "offset_bytes",
        "size_bytes",
        "file_offset_bytes",
        "digest",  # if wrong, the daemon refuses the program
    }
