from types import SimpleNamespace

import torch
from baukit import Trace, TraceDict
from tasks import *
from transformers import AutoModelForCausalLM, AutoTokenizer

BLOCKS = [f"model.layers.{layer}" for layer in range(LAYERS)]


def load(folder):
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return SimpleNamespace(hf=hf, tokenizer=AutoTokenizer.from_pretrained(folder, padding_side="left"))


def token(model, text):
    return model.tokenizer(text).input_ids[0]


def words(model, text):
    return model.tokenizer(text, return_tensors="pt", padding=not isinstance(text, str))


def capture(model):
    with Trace(model.hf, BLOCKS[12]) as kept:
        model.hf(**words(model, TEXT))
    return kept.output[0]


def attention(model):
    with Trace(model.hf, "model.layers.5.self_attn") as kept:
        model.hf(**words(model, TEXT))
    return kept.output[1][0]


def patch(model):
    with Trace(model.hf, BLOCKS[12]) as other:
        model.hf(**words(model, OTHER))
    def put(output):
        output[:, -1] = other.output[:, -1]
        return output
    with Trace(model.hf, BLOCKS[12], edit_output=put):
        return model.hf(**words(model, TEXT)).logits[0, -1]


def ablate_head(model):
    def zero(output, inputs):
        inputs[0][..., 3 * SIZE:4 * SIZE] = 0
        return model.hf.model.layers[7].self_attn.o_proj.forward(inputs[0])
    with Trace(model.hf, "model.layers.7.self_attn.o_proj", edit_output=zero):
        return model.hf(**words(model, TEXT)).logits[0, -1]


def knockout(model):
    rows = []
    for layer in range(2):
        for head in range(HEADS):
            def zero(output, inputs):
                inputs[0][..., head * SIZE:(head + 1) * SIZE] = 0
                return model.hf.model.layers[layer].self_attn.o_proj.forward(inputs[0])
            with Trace(model.hf, f"model.layers.{layer}.self_attn.o_proj", edit_output=zero):
                rows.append(model.hf(**words(model, TEXT)).logits[0, -1])
    return torch.stack(rows)


def lens(model):
    with TraceDict(model.hf, BLOCKS) as kept:
        model.hf(**words(model, TEXT))
    return torch.stack([model.hf.lm_head(model.hf.model.norm(kept[name].output[0, -1])) for name in BLOCKS])


def probe_states(model):
    with TraceDict(model.hf, BLOCKS) as kept:
        model.hf(**words(model, TEXTS))
    return torch.stack([kept[name].output[:, -1] for name in BLOCKS])


def causal_trace(model):
    end, shares = len(model.tokenizer(SUBJECT).input_ids), []
    with TraceDict(model.hf, BLOCKS) as clean:
        model.hf(**words(model, TEXT))
    def change(output, layer):
        if layer == "model.embed_tokens":
            output[:, :end] = output.mean(1, keepdim=True)
        else:
            output[:, end - 1] = clean[layer].output[:, end - 1]
        return output
    for block in BLOCKS:
        with TraceDict(model.hf, ["model.embed_tokens", block], edit_output=change):
            shares.append(model.hf(**words(model, TEXT)).logits[0, -1].softmax(-1)[token(model, PARIS)])
    return torch.stack(shares)


def gradient(model):
    value, subject = torch.zeros(WIDTH, requires_grad=True), len(model.tokenizer(SUBJECT).input_ids) - 1
    def add(output):
        return output + value * (torch.arange(output.shape[1]) == subject)[:, None]
    with Trace(model.hf, "model.layers.5.mlp", edit_output=add):
        logits = model.hf(**words(model, TEXT)).logits
    return torch.autograd.grad(-logits[0, -1].log_softmax(-1)[token(model, ROME)], value)[0]
