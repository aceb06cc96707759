"""The objects that a training script hands to ``job.steps``."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Final

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from pipeswitch.base.errors import InvalidInput
from pipeswitch.commits.weights import OPTIMIZER
from pipeswitch.job import InexactResumeWarning, script_level

from .attributes import Attributes
from .snapshot import load_state, state_of
from .torch_private import has_aliases, made_in_forward, registered_buffers, wrapped_by

SHARDED: Final = ("DTensor", "FlatParameter")  # parameters of fully_shard and of FSDP


@dataclass
class TrainedObjects:
    """Objects that one phase trains; they are the same in every loop of the phase."""

    models: Mapping[str, nn.Module]
    optimizers: Mapping[str, torch.optim.Optimizer]
    schedulers: Mapping[str, Any]
    extras: Mapping[str, Any]
    wrapped: Mapping[str, Any] = field(init=False)  # optimizers as the script has them
    parameters: dict[str, nn.Parameter] = field(default_factory=dict)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    owners: dict[str, tuple[nn.Module, str]] = field(default_factory=dict)  # buffers, even if None
    modules: list[nn.Module] = field(default_factory=list)
    groups: dict[str, list[int]] = field(default_factory=dict)  # number of parameters in each group
    with_extra_state: dict[str, nn.Module] = field(default_factory=dict)  # with own get_extra_state
    wrappers: dict[str, Any] = field(default_factory=dict)  # optimizers that wrap another one
    attributes: Attributes = field(init=False)  # of optimizers of other classes than torch's

    def __post_init__(self) -> None:
        self.wrapped = self.optimizers
        self.optimizers = {name: bare(one) for name, one in self.wrapped.items()}
        self._unwrap()
        visited: set[int] = set()
        for key, model in self.models.items():
            for path, module in model.named_modules(prefix=key):
                self.modules.append(module)
                if type(module).get_extra_state is not nn.Module.get_extra_state:
                    self.with_extra_state[path] = module
                for name, parameter in module.named_parameters(recurse=False):
                    self._add(f"{path}.{name}", parameter, visited)
                for name, buffer in registered_buffers(module):
                    if buffer is not None and id(buffer) in visited:
                        continue
                    self.owners[f"{path}.{name}"] = (module, name)
                    if buffer is not None:
                        visited.add(id(buffer))
                        self.buffers[f"{path}.{name}"] = buffer
        for key, optimizer in self.optimizers.items():
            self.groups[key] = [len(group["params"]) for group in optimizer.param_groups]
            for g, group in enumerate(optimizer.param_groups):
                for i, parameter in enumerate(group["params"]):
                    self._add(f"optimizer.{key}.{g}.{i}", parameter, visited)
        optimizers = {**self.optimizers, **self.wrappers}.items()
        own = {key: one for key, one in optimizers if type(one).__module__[:6] != "torch."}
        self.attributes = Attributes(own, {}, visited)

    def _unwrap(self) -> None:
        """Add the optimizers inside of wrappers (Lookahead, SAM), which have states of their own.

        A wrapper that only passes on the inner optimizer's state is replaced by it.
        """
        todo, optimizers = [*self.optimizers.items()], dict[str, Any]()
        known = {id(one) for _, one in todo}
        for key, one in todo:  # grows
            inner = {f"{key}.{name}": other for name, other in wrapped_by(one).items()}
            if inner:
                self.wrappers[key] = one
            passes_on = any(getattr(one, "state", None) is other.state for other in inner.values())
            if hasattr(one, "state") and not passes_on:
                optimizers[key] = one
            todo += [(name, other) for name, other in inner.items() if id(other) not in known]
            known |= {id(other) for other in inner.values()}
        self.optimizers = optimizers

    def _add(self, name: str, parameter: torch.Tensor, visited: set[int]) -> None:
        if id(parameter) in visited:
            return
        visited.add(id(parameter))
        if any(kind.__name__ in SHARDED for kind in type(parameter).__mro__):
            raise InvalidInput(
                f"{name} is a {type(parameter).__name__}, a part of a parameter that several "
                "processes share: a job has one process and one device",
                hint="leave out fully_shard, FSDP and distribute_tensor; "
                "if memory is short, use activation_memory",
            )
        if is_lazy(parameter) or parameter.device.type == "meta":
            raise InvalidInput(
                f"{name} has no values yet",
                hint="materialize lazy modules before job.steps: run one forward",
            )
        if parameter.layout is not torch.strided or parameter.is_quantized:
            raise InvalidInput(f"{name}: only dense parameters can be trained")
        self.parameters[name] = parameter  # type: ignore[assignment]

    def weights(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return name, dtype and shape of each parameter and buffer."""
        return [
            (name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
            for name, tensor in (*self.parameters.items(), *self.buffers.items())
            if not name.startswith(OPTIMIZER)
        ]

    def refuse_other_structure(self) -> None:
        """Raise if the script has changed its models: a resumed script would build the old ones.

        Raises:
            InvalidInput: layers or parameters were added, replaced or removed since the loop began.
        """
        now = TrainedObjects(self.models, self.optimizers, self.schedulers, self.extras)
        ours = {name: id(parameter) for name, parameter in self.parameters.items()}
        theirs = {name: id(parameter) for name, parameter in now.parameters.items()}
        changed = sorted(name for name, _ in ours.items() ^ theirs.items())
        changed += sorted(self.owners.keys() ^ now.owners.keys())
        if not changed and list(map(type, self.modules)) != list(map(type, now.modules)):
            changed = ["a layer"]
        old = self.groups
        if not changed and any(now.groups[key][: len(old[key])] != old[key] for key in old):
            changed = ["a parameter group"]
        if changed:
            hint = "change models between two job.epochs (or two job.steps outside of one), not "
            hint += "within; a model may have frozen parameters that an optimizer takes later"
            raise InvalidInput(
                f"{', '.join(changed[:4])}: added, replaced or removed since the loop began; a "
                "resumed script would build the model without that",
                hint=hint,
            )
        self.groups = now.groups  # groups may be added: ``add_groups`` restores them

    def refuse_shared_memory(self, states: Mapping[str, torch.Tensor] | None = None) -> None:
        """Raise if a parameter, or one of ``states``, shares memory: each needs its own place.

        Raises:
            InvalidInput: one overlaps another, or a buffer.
        """
        spans = []
        moved = self.parameters if states is None else states
        for name, tensor in {**self.parameters, **self.buffers, **moved}.items():
            if tensor.numel():
                start = tensor.data_ptr()
                reach = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
                end = start + (reach + 1) * tensor.element_size()
                spans.append((tensor.device.type, start, end, name))
        spans.sort()
        for one, other in pairwise(spans):
            is_moved = one[3] in moved or other[3] in moved
            if is_moved and one[0] == other[0] and other[1] < one[2]:
                raise InvalidInput(
                    f"{one[3]} and {other[3]} share memory",
                    hint="clone() one; to tie weights, assign the Parameter: b.weight = a.weight",
                )

    def aliased(self) -> list[str]:
        """Return the names of parameters whose memory another tensor of the script shares."""
        modules = (module for model in self.models.values() for module in model.modules())
        known = Counter(t.data_ptr() for module in modules for t in made_in_forward(module))
        return [n for n, one in self.parameters.items() if has_aliases(one, known[one.data_ptr()])]

    def warn_of_what_is_lost(self) -> None:
        """Warn about state that a resumed script will not restore."""
        groups = [g for o in self.optimizers.values() for g in o.param_groups]
        if not self.schedulers and any("initial_lr" in group for group in groups):
            warnings.warn(
                "job.steps: a scheduler drives the optimizer and was not passed, so a resumed "
                "script starts it over. Pass scheduler=…",
                InexactResumeWarning,
                stacklevel=script_level(),
            )
        for wrapper in self.wrappers.values():
            for name, value in vars(wrapper).items():
                is_passed = any(value is one for one in self.extras.values())
                if _keeps_numbers(value) and not is_passed:
                    warnings.warn(
                        f"job.steps: {type(wrapper).__name__}.{name}, of type "
                        f"{type(value).__name__}, starts over in a resumed script. If it has a "
                        "state_dict(), pass it in extra_state",
                        InexactResumeWarning,
                        stacklevel=script_level(),
                    )
        aliased = self.aliased()
        if aliased:
            warnings.warn(
                f"job.steps: {', '.join(aliased[:4])}: other tensors share this memory (a view, "
                "`.data`, a state_dict()) and will keep their current values. Create them in the "
                "loop, or clone them",
                UserWarning,
                stacklevel=script_level(),
            )

    def refuse_other_objects(self, other: TrainedObjects) -> None:
        """Raise InvalidInput if a later loop of the phase has other objects or names."""
        pairs = (
            (self.models, other.models),
            (self.optimizers, other.optimizers),
            (self.schedulers, other.schedulers),
        )
        if any(a.keys() != b.keys() or any(a[key] is not b[key] for key in a) for a, b in pairs):
            raise InvalidInput(
                "the loops inside one job.epochs train different objects",
                hint="pass all models, optimizers and schedulers to each of them, and create new "
                "ones between two job.epochs",
            )
        if self.extras.keys() != other.extras.keys():
            raise InvalidInput(
                f"the loops inside one job.epochs differ in these names of extra_state: "
                f"{', '.join(sorted(self.extras.keys() ^ other.extras.keys()))}",
                hint="pass the same extra_state to each of them",
            )


def is_wrapper_of(value: Any, known: set[int]) -> bool:
    """Return True if an optimizer only passes on the state of one that is in ``known``."""
    inner = {} if isinstance(value, nn.Module) or _numbers_of(value) else wrapped_by(value)
    state = getattr(value, "state", None)
    return any(id(one) in known and (not state or state is one.state) for one in inner.values())


def _keeps_numbers(value: Any) -> bool:
    """Return True for an object with numbers or tensors, such as an averager or a loss scaler."""
    values = getattr(value, "__dict__", {}).values()
    is_known = callable(value) or isinstance(value, torch.optim.Optimizer)
    return not is_known and any(type(one) in (int, float, torch.Tensor) for one in values)


def _numbers_of(wrapper: Any) -> dict[str, Any]:
    attributes = getattr(wrapper, "__dict__", {})
    return {n: one for n, one in attributes.items() if type(one) in (int, float, bool)}


def bare(optimizer: Any) -> Any:
    """Return the optimizer without accelerate's wrapper: hooks must be added to the optimizer."""
    return optimizer.optimizer if type(optimizer).__name__ == "AcceleratedOptimizer" else optimizer


def options_of(
    objects: TrainedObjects, odd_buffers: Mapping[str, torch.Tensor | None] | None = None
) -> dict[str, Any]:
    """Return the small state at a step boundary: groups' options, schedulers, extra_state."""
    return {
        "odd_buffers": dict(odd_buffers or {}),
        "modules": {path: m.get_extra_state() for path, m in objects.with_extra_state.items()},
        "groups": {
            key: [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
            for key, optimizer in objects.optimizers.items()
        },
        "attributes": objects.attributes.state_dict(),
        "schedulers": {key: state_of(item) for key, item in objects.schedulers.items()},
        "extras": {key: state_of(item) for key, item in objects.extras.items()},
    }


def add_groups(
    objects: TrainedObjects, groups: Mapping[str, Any], names: Mapping[str, Any]
) -> None:
    """Add the parameter groups that the script added in its loops.

    Args:
        groups: options of each optimizer's groups when it was committed.
        names: names of the parameters in these groups.
    """
    for key, optimizer in [*objects.optimizers.items()][::-1]:  # wrapped ones first
        count = len(optimizer.param_groups)
        stored = zip(groups.get(key, ()), names.get(key, ()), strict=False)
        for options, parameters in [*stored][count:]:
            params = [objects.parameters[name] for name in parameters]
            optimizer.add_param_group({"params": params, **options})


def load_options(objects: TrainedObjects, options: Mapping[str, Any]) -> None:
    """Load the result of ``options_of`` into the objects, in place.

    Raises:
        InvalidInput: the commit has other optimizers, groups, schedulers or extras.
    """
    for kind, items in (("schedulers", objects.schedulers), ("extras", objects.extras)):
        if options[kind].keys() != items.keys():
            raise InvalidInput(f"{kind}: committed {sorted(options[kind])}, now {sorted(items)}")
        for key, item in items.items():
            load_state(item, options[kind][key])
    for path, module in objects.with_extra_state.items():
        module.set_extra_state(options["modules"][path])
    objects.attributes.load_state_dict(options.get("attributes", {}))
    for key, optimizer in objects.optimizers.items():
        stored = options["groups"].get(key, [])
        if len(stored) != len(optimizer.param_groups):
            raise InvalidInput(f"optimizer {key!r}: its parameter groups changed since the commit")
        for group, values in zip(optimizer.param_groups, stored, strict=True):
            for name, value in values.items():
                if isinstance(group.get(name), torch.Tensor) and isinstance(value, torch.Tensor):
                    group[name].copy_(value)
                else:
                    group[name] = value
