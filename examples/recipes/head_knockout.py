"""Attention-head knock-out: every head once without its share."""
import sys

import emend
import torch

torch.set_grad_enabled(False)
model = emend.load(sys.argv[1])
prompt = "The Eiffel Tower is in the city of"
whole = model.trace(prompt, ["layers.0.attn_z"])
changes = {}
for layer in range(model.n_layers):
    for head in range(whole["layers.0.attn_z"].shape[2]):
        run = model.trace(prompt, edit={f"layers.{layer}.attn_z": emend.Patch("zero", heads=[head])})
        changes[f"layer {layer} head {head}"] = (run.logits - whole.logits)[0, -1].abs().max().item()
which = max(changes, key=changes.get)
print(f"{which} matters most: {changes[which]:.2f}")
