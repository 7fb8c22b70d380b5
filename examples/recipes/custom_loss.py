"""A loss of one's own for a target: the new answer (its last token) beats the old one by a margin, another prompt stays."""
import sys

import emend
import torch

model = emend.load(sys.argv[1])
prompt, other = "The Eiffel Tower is in the city of", "The Eiffel Tower is"
wanted, old = (model.encode(answer, add_special=False)[-1] for answer in (" Rome", " Paris"))
token = model.trace(prompt).span("The Eiffel Tower")[1] - 1
kept = model.trace(other).logits[0, -1].log_softmax(-1)

value = torch.zeros(model.hidden_size, requires_grad=True)
for step in range(31):
    patch = {"layers.1.mlp_out": emend.Patch(value, add=True, tokens=[token])}
    logits = model.trace(prompt, edit=patch).logits[0, -1]
    now = model.trace(other, edit=patch).logits[0, -1].log_softmax(-1)
    margin, drift = logits[wanted] - logits[old], (kept.exp() * (kept - now)).sum()
    if step % 30 == 0:
        print(f"step {step}: margin {margin:.2f}, drift {drift:.2f}")
    gradient, = torch.autograd.grad((1 - margin).relu() + 10 * drift, value)
    value = (value - 0.2 * gradient / gradient.norm()).detach().requires_grad_(True)
