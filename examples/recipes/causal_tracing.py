"""Causal tracing by hand: the subject is blotted out, then one clean state at a time is put back."""
import sys

import emend
import torch

torch.set_grad_enabled(False)
model = emend.load(sys.argv[1])
prompt = "The Eiffel Tower is in the city of"
states = [f"layers.{layer}.layer_out" for layer in range(model.n_layers)]
clean = model.trace(prompt, states)
begin, end = clean.span("The Eiffel Tower")
blotted = {"embedding": emend.Patch("mean", tokens=range(begin, end))}

answer = clean.logits[0, -1].argmax()
chance = lambda run: run.logits[0, -1].softmax(-1)[answer].item()
low, high = chance(model.trace(prompt, edit=blotted)), chance(clean)
for state in states:
    shares = {token: (chance(model.trace(prompt, edit=blotted | {state: emend.Patch(clean, tokens=[token])})) - low) / (high - low)
              for token in range(begin, len(clean.tokens))}
    where = max(shares, key=shares.get)
    print(f"{state}: token {where} brings back {shares[where]:.2f}")
