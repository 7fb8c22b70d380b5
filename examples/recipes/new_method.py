"""A locate-then-edit method of one's own: which value at the subject makes the new answer likely, and the smallest change
of the matrix that gives it for the subject's key. Taken back in the end."""
import sys

import emend
import torch

model = emend.load(sys.argv[1])
prompt = "The Eiffel Tower is in the city of"
answer = model.encode(prompt + " Rome")[len(model.encode(prompt))]
before = model.trace(prompt, ["layers.1.mlp_down_in"])
token = before.span("The Eiffel Tower")[1] - 1
loss = lambda run: -run.logits[0, -1].log_softmax(-1)[answer]

value = torch.zeros(model.hidden_size, requires_grad=True)
for _ in range(20):
    run = model.trace(prompt, edit={"layers.1.mlp_down_out": emend.Patch(value, add=True, tokens=[token])})
    gradient, = torch.autograd.grad(loss(run), value)
    value = (value - 0.5 * gradient / gradient.norm()).detach().requires_grad_(True)

key, weight = before.at("layers.1.mlp_down_in", 0, token), model.weight_at("layers.1.mlp_down_out")
original = weight.clone()
with torch.no_grad():
    weight += torch.outer(value, key / (key @ key))
    print(f"loss of the answer: {loss(before):.2f}, edited {loss(model.trace(prompt)):.2f}")
    weight.copy_(original)
