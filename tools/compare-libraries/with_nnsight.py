import torch
from nnsight import TransformersModel
from tasks import *


def load(folder):
    model = TransformersModel(folder, task="text-generation", dispatch=True, dtype=torch.float32, attn_implementation="eager")
    model.tokenizer.padding_side = "left"
    return model


def token(model, text):
    return model.tokenizer(text).input_ids[0]


def capture(model):
    with model.trace(TEXT):
        state = model.model.layers[12].output.save()
    return state[0]


def attention(model):
    with model.trace(TEXT):
        pattern = model.model.layers[5].self_attn.output[1].save()
    return pattern[0]


def patch(model):
    with model.trace(OTHER):
        state = model.model.layers[12].output[:, -1].save()
    with model.trace(TEXT):
        model.model.layers[12].output[:, -1] = state
        logits = model.lm_head.output[0, -1].save()
    return logits


def ablate_head(model):
    with model.trace(TEXT):
        model.model.layers[7].self_attn.o_proj.input[..., 3 * SIZE:4 * SIZE] = 0
        logits = model.lm_head.output[0, -1].save()
    return logits


def knockout(model):
    rows = []
    for layer in range(2):
        for head in range(HEADS):
            with model.trace(TEXT):
                model.model.layers[layer].self_attn.o_proj.input[..., head * SIZE:(head + 1) * SIZE] = 0
                logits = model.lm_head.output[0, -1].save()
            rows.append(logits)
    return torch.stack(rows)


def lens(model):
    with model.trace(TEXT):
        rows = [model.lm_head(model.model.norm(layer.output[0, -1])) for layer in model.model.layers].save()
    return torch.stack(rows)


def probe_states(model):
    with model.trace(TEXTS):
        states = [layer.output[:, -1] for layer in model.model.layers].save()
    return torch.stack(states)


def causal_trace(model):
    end, shares = len(model.tokenizer(SUBJECT).input_ids), []
    with model.trace(TEXT):
        clean = [layer.output[:, end - 1] for layer in model.model.layers].save()
    for layer in range(LAYERS):
        with model.trace(TEXT):
            embedded = model.model.embed_tokens.output
            embedded[:, :end] = embedded.mean(1, keepdim=True)
            model.model.layers[layer].output[:, end - 1] = clean[layer]
            share = model.lm_head.output[0, -1].softmax(-1)[token(model, PARIS)].save()
        shares.append(share)
    return torch.stack(shares)


def gradient(model):
    value, subject = torch.zeros(WIDTH, requires_grad=True), len(model.tokenizer(SUBJECT).input_ids) - 1
    with model.trace(TEXT):
        model.model.layers[5].mlp.output[:, subject] += value
        loss = (-model.lm_head.output[0, -1].log_softmax(-1)[token(model, ROME)]).save()
    return torch.autograd.grad(loss, value)[0]
