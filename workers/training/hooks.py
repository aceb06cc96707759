"""Public PyTorch hooks in which training checks the gate for a stop request.

Forward: ``Module.register_forward_pre_hook`` on every module that owns parameters, and on leaf
modules. On a GPU, modules in ``_NORMS`` and leaves without parameters have no hook: they run for
microseconds, and so does a hook. Backward: ``Tensor.register_post_accumulate_grad_hook`` on
one parameter of each module; an exception raised there propagates through ``backward()``.
Optimizers: ``register_step_pre_hook`` and ``register_step_post_hook``.
(``register_full_backward_pre_hook`` would change the graph.)

The hooks are module-level functions that find the gate in a module-level variable. They are not
closures, so a script may deep-copy its model. A saved or scripted model does not contain them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pipeswitch.devices.worker_device import Pacer
from pipeswitch.ipc.gate import Gate

from .torch_private import hook_unseen

Closure = Callable[..., Any]

_NORMS: Final = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.LayerNorm, nn.GroupNorm)

_gate: Gate | None = None


def look_at_the_gate_before_forward(module: nn.Module, args: Any) -> None:
    """Forward pre-hook: park or unwind before this module computes."""
    if Pacer.current is not None:
        Pacer.current.look()
    gate = _gate
    if gate is not None and gate.is_pending:
        gate.answer("forward")


def look_at_the_gate_in_backward(parameter: torch.Tensor) -> None:
    """Post-accumulate-grad hook: park or unwind when this module's gradient is done."""
    if Pacer.current is not None:
        Pacer.current.look()
    gate = _gate
    if gate is not None and gate.is_pending:
        gate.answer("backward")


def use_gate(gate: Gate | None) -> None:
    """Set the gate that all module hooks of this process check; None: no gate."""
    global _gate
    _gate = gate


def hook_modules(models: Iterable[nn.Module]) -> list[RemovableHandle]:
    """Register the gate's hooks on the layers of ``models``; return the handles to remove them."""
    on_host = Pacer.current is None
    handles: list[RemovableHandle] = []
    visited: set[int] = set()
    for model in models:
        for module in model.modules():
            own = list(module.parameters(recurse=False))
            is_leaf = next(module.children(), None) is None
            is_long = bool(own or is_leaf) if on_host else own and not isinstance(module, _NORMS)
            if id(module) in visited or not is_long:
                continue
            visited.add(id(module))
            handles.append(hook_unseen(module, look_at_the_gate_before_forward))
            trained = next((p for p in own if p.requires_grad and id(p) not in visited), None)
            if trained is not None:
                visited.add(id(trained))
                register: Any = trained.register_post_accumulate_grad_hook  # untyped in torch
                handles.append(register(look_at_the_gate_in_backward))
    return handles
