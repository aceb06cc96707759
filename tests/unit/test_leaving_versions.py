"""Requests for model versions that are being removed, from frontends with old or new lists."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from pipeswitch.base import errors
from pipeswitch.scheduler.state import events as ev
from pipeswitch.scheduler.state.states import ModelState, TaskState
from tests.unit.test_scheduler_rules import Rig, publish, register_net, trained, unregister

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("publish"), st.just(0)),
        st.tuples(st.just("rollback"), st.integers(0, 4)),
        st.tuples(st.just("split"), st.integers(1, 4)),
        st.tuples(st.just("unregister one"), st.integers(1, 4)),
        st.tuples(st.just("unregister all"), st.just(0)),
        st.tuples(st.just("register"), st.just(0)),
        st.tuples(st.just("serve"), st.integers(1, 4)),
        st.tuples(st.just("infer"), st.integers(0, 12)),
        st.tuples(st.just("infer version"), st.integers(0, 12)),
    ),
    max_size=40,
)


class Frontend(Rig):
    """Scheduler, with all lists of versions that its frontend has had; a request may use any."""

    def __init__(self) -> None:
        self.known: list[tuple[ev.ModelAvailable, ...]] = [()]
        super().__init__(keep_versions=2)

    def _take(self, commands: list[ev.Command]) -> None:
        super()._take(commands)
        for command in commands:
            if isinstance(command, ev.ModelAvailable):
                others = [one for one in self.known[-1] if one.model != command.model]
                self.known.append((*others, command))
            elif isinstance(command, ev.ModelRemoved):
                versions = [one for one in self.known[-1] if one.model != command.model]
                self.known.append(tuple(versions))

    def ask_as(self, announced: ev.ModelAvailable, version: int) -> ev.Token:
        """Send a request for an announced version; ``version`` 0: the caller named none."""
        return self.infer(
            announced.model,
            digest=announced.manifest.digest,
            registration_id=0 if version else announced.registration_id,
        )

    def serve(self) -> None:
        """Suspend a stopping job; copy the computing task's model; then end the task."""
        for job in self.state.jobs.values():
            if job.state.state is TaskState.STOPPING:
                self.park(job, self.state.owner.pending.turn)
        for task in self.state.owner.tasks[:1]:
            if self.state.replicas[task.model].is_being_sent:
                self.arrived(task.model)
            if self.state.owner.running is not None:
                self.done()

    def do(self, what: str, number: int) -> None:
        versions = self.scheduler.versions
        current = versions.current("net")
        is_there = current is not None and current.state.state is ModelState.READY
        match what:
            case "publish" if is_there:
                job = next(iter(self.state.jobs.values()))
                publish(self, job)
            case "rollback" | "split":
                share = 30 if what == "split" else -1
                self.ask(ev.RollbackRequest, model="net", version=number, share=share)
            case "unregister one" if versions.of("net", number) is not None:
                unregister(self, "net" if number == 1 else f"net@{number}")
            case "unregister all":
                unregister(self)
            case "register" if versions.served("net") is None:
                register_net(self)
            case "serve":
                for _ in range(number):
                    self.serve()


@given(steps=STEPS)
def test_no_request_meets_a_version_that_left_without_a_word_for_it(
    steps: list[tuple[str, int]],
) -> None:
    rig = Frontend()
    register_net(rig)
    trained(rig)
    requests: list[tuple[ev.Token, int, bool, bool]] = []
    for what, number in steps:
        if not what.startswith("infer"):
            rig.do(what, number)
            continue
        known = rig.known[-1 - number % len(rig.known)]
        names_one = what == "infer version"
        of = [one for one in known if names_one or one.is_current]
        for announced in of[-1:]:
            served = rig.scheduler.versions.served("net")
            is_same = served is not None and served.born == announced.registration_id
            stays = any(
                model.manifest is not None and model.state.state is not ModelState.LEAVING
                for model in rig.scheduler.versions.all_of("net")
            )
            version = announced.version if names_one else 0
            requests.append((rig.ask_as(announced, version), version, is_same and stays, stays))
    for _ in range(200):
        rig.serve()
    for token, version, is_served, stays in requests:
        error = rig.error(token)
        if error is None:
            continue
        assert "@" not in f"{error} {error.data}"
        if not version:
            assert not is_served, "it named no version, and the name stands for one"
        assert type(error) is errors.ModelNotFound
        assert ("has no version" in str(error)) == bool(version and stays)


def test_a_version_that_has_left_is_refused_as_the_frontend_would() -> None:
    rig = Frontend()
    register_net(rig)
    first, job = rig.known[-1][0], trained(rig)
    for _ in range(2):
        publish(rig, job)
    error = rig.error(rig.ask_as(first, 1))
    assert (type(error), error.data) == (errors.ModelNotFound, {"version": 1})
    assert "2, 3" in str(error)
