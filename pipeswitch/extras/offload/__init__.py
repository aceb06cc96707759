"""Tensors that a training step saves, under a memory budget: those beyond it move to the host."""

JOBS = {
    "activation_budget": "activation_budget:ActivationBudget",
    "offload": "activations:Activations",
}
