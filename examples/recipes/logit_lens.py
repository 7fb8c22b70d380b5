"""The logit lens: what each layer would say if it were the last."""
import sys

import emend
import torch

torch.set_grad_enabled(False)
model = emend.load(sys.argv[1])
sites = [f"layers.{layer}.layer_out" for layer in range(model.n_layers)]
run = model.trace("The Eiffel Tower is in the city of", sites)
for site in sites:
    print(f"{site}: {model.project(run.at(site, 0, -1)[None])[0].argmax()}")
print(f"the model: {model.next_tokens('The Eiffel Tower is in the city of', 1)[0][2]}")
