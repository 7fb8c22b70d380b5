import emend
import torch
from tasks import *

SITES = [f"layers.{layer}.layer_out" for layer in range(LAYERS)]


def load(folder):
    return emend.load(folder)


def token(model, text):
    return model.encode(text, add_special=False)[0]


def capture(model):
    return model.trace(TEXT, [SITES[12]])[SITES[12]][0]


def attention(model):
    return model.trace(TEXT, ["layers.5.attn_pattern"])["layers.5.attn_pattern"][0]


def patch(model):
    other = model.trace(OTHER, [SITES[12]])
    return model.trace(TEXT, edit={SITES[12]: emend.Patch(other, tokens=[-1])}).logits[0, -1]


def ablate_head(model):
    return model.trace(TEXT, edit={"layers.7.attn_z": emend.Patch("zero", heads=[3])}).logits[0, -1]


def knockout(model):
    return torch.stack([model.trace(TEXT, edit={f"layers.{layer}.attn_z": emend.Patch("zero", heads=[head])}).logits[0, -1]
                        for layer in range(2) for head in range(HEADS)])


def lens(model):
    run = model.trace(TEXT, SITES)
    return torch.cat([model.project(run.at(site, 0, -1)[None]) for site in SITES])


def probe_states(model):
    run = model.trace(TEXTS, SITES)
    return torch.stack([torch.stack([run.at(site, row, -1) for row in range(len(TEXTS))]) for site in SITES])


def causal_trace(model):
    clean = model.trace(TEXT, SITES)
    begin, end = clean.span(SUBJECT)
    blotted = {"embedding": emend.Patch("mean", tokens=range(begin, end))}
    runs = [model.trace(TEXT, edit=blotted | {site: emend.Patch(clean, tokens=[end - 1])}) for site in SITES]
    return torch.stack([run.logits[0, -1].softmax(-1)[token(model, PARIS)] for run in runs])


def gradient(model):
    value = torch.zeros(WIDTH, requires_grad=True)
    subject = len(model.encode(SUBJECT, add_special=False)) - 1
    run = model.trace(TEXT, edit={"layers.5.mlp_out": emend.Patch(value, add=True, tokens=[subject])})
    return torch.autograd.grad(-run.logits[0, -1].log_softmax(-1)[token(model, ROME)], value)[0]


def edit(model):
    session = emend.edit(model, {"prompt": "{} is in the city of", "subject": SUBJECT, "target_new": "Rome"}, "rome", progress=None)
    said = model.next_tokens(TEXT, 1)
    session.undo()
    return said
