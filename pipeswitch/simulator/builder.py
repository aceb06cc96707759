"""A builder: one registration, then it is gone."""

from __future__ import annotations

from ..ipc.messages import BuildDone, BuildFailed, BuildProgress
from ..scheduler.events import StartBuild
from .clock import Move
from .process import Process


class SimulatedBuilder(Process):
    """Finds what the scene's library holds under the model's name."""

    def __init__(self, order: StartBuild, *of_process: object) -> None:
        super().__init__("builder", 0, *of_process)  # type: ignore[arg-type]
        self.order = order

    def steps(self) -> list[Move]:
        return [Move("main", "builds", self.scene.costs.build_ms, self._build)]

    def _build(self) -> None:
        model, epoch = self.order.model, self.order.epoch
        happens = self.scene.choices.happens
        if happens("builder_dies", model):
            self.end(1)
            return
        if happens("build_error", model):
            self.say("out", BuildFailed(
                model=model, epoch=epoch, error="RegistrationRefused", message="no"))  # fmt: skip
        else:
            digest = self.scene.programs[model].manifest.digest
            self.say("out", BuildProgress(model=model, epoch=epoch, stage="export", fraction=0.5))
            self.say("out", BuildDone(model=model, epoch=epoch, digest=digest))
        self.end(0)


__all__ = ["SimulatedBuilder"]
