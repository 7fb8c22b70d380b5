"""A linear probe over layers: can a question be told from a statement by the last token's state?"""
import sys

import emend
import torch

torch.set_grad_enabled(False)
model = emend.load(sys.argv[1])
things = ["tower", "river", "city", "house", "bridge", "garden", "road", "hill"]
texts = [text for thing in things for text in (f"Is the {thing} old?", f"The {thing} is old.")]
sites = [f"layers.{layer}.layer_out" for layer in range(model.n_layers)]
run = model.trace(texts, sites)
label, train = torch.tensor([1.0, -1.0]).repeat(8), 12  # the other four texts are the test
for site in sites:
    x = torch.stack([run.at(site, row, -1) for row in range(len(texts))])
    seen = x[:train]
    probe = torch.linalg.solve(seen.T @ seen + 0.1 * torch.eye(x.shape[1]), seen.T @ label[:train])
    right = (x[train:] @ probe).sign() == label[train:]
    print(f"{site}: {right.float().mean():.2f} of unseen texts")
