"""Adapters (LoRA and others) that peft merges into the weights of a model of transformers."""

from __future__ import annotations

import os
import warnings

from safetensors import safe_open
from torch import nn

from ...base.errors import RegistrationRefused
from .model_folder import ADAPTER, listed

WEIGHTS = "adapter_model.safetensors"


def merged(model: nn.Module, folder: str) -> nn.Module:
    """Return the model with the adapter of a folder in its weights.

    Raises:
        RegistrationRefused: peft is missing, or the adapter is damaged, does not fit the model, or
            is of a type that cannot be merged.
    """
    try:
        import peft
    except ImportError as error:
        raise RegistrationRefused(
            "adapter", "peft is not installed: pip install 'pipeswitch[adapters]'"
        ) from error
    try:
        with safe_open(os.path.join(folder, WEIGHTS), "np") as file:
            names = {*file.keys()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # names that do not fit are refused below
            wrapped = peft.PeftModel.from_pretrained(model, folder)
        own = peft.get_peft_model_state_dict(wrapped, save_embedding_layers=False).keys()
        kind = wrapped.peft_config["default"].peft_type
        wrong = [*(own - names), *(names - own - wrapped.state_dict().keys())]
        if not wrong and hasattr(wrapped, "merge_and_unload"):
            result: nn.Module = wrapped.merge_and_unload(safe_merge=True)
            return result
    except Exception as error:  # errors of peft and safetensors share no base class
        why = f"{type(error).__name__}: {str(error).partition(chr(10))[0][:300]}"
        hint = f"save_pretrained(FOLDER) of peft writes {ADAPTER} and {WEIGHTS}"
        raise RegistrationRefused("adapter", f"it cannot be merged: {why}", hint=hint) from error
    why = f"its {kind} changes no weights, so it cannot be merged"
    if wrong:
        why = listed(sorted(wrong), f"its {WEIGHTS} does not fit {ADAPTER} and the model: ")
    raise RegistrationRefused("adapter", why)
