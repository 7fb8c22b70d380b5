"""Activation patching per head: how far does each head of one prompt move another prompt's prediction?"""
import sys

import emend
import torch

torch.set_grad_enabled(False)
model = emend.load(sys.argv[1])
here, there = "The Eiffel Tower is in", "The Colosseum is in"
sites = [f"layers.{layer}.attn_z" for layer in range(model.n_layers)]
source, target = model.trace(there, sites), model.trace(here, sites)
start = target.logits[0, -1]
way = source.logits[0, -1] - start
shares = {}
for site in sites:
    for head in range(target[site].shape[2]):
        run = model.trace(here, edit={site: emend.Patch(source, tokens=[-1], heads=[head])})
        shares[f"{site} head {head}"] = ((run.logits[0, -1] - start) @ way / (way @ way)).item()
which = max(shares, key=shares.get)
print(f"{which} goes {shares[which]:.2f} of the way")
