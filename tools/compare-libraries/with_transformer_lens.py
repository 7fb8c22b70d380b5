import torch
from tasks import *
from transformer_lens.model_bridge import TransformerBridge
from transformers import AutoModelForCausalLM, AutoTokenizer

RESIDUALS = [f"blocks.{layer}.hook_resid_post" for layer in range(LAYERS)]


def load(folder):
    hf = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model = TransformerBridge.boot_transformers(folder, hf_model=hf, tokenizer=AutoTokenizer.from_pretrained(folder), dtype=torch.float32)
    model.cfg.default_prepend_bos = False
    return model


def token(model, text):
    return model.to_tokens(text, prepend_bos=False)[0, 0]


def capture(model):
    return model.run_with_cache(TEXT, names_filter=RESIDUALS[12])[1][RESIDUALS[12]][0]


def attention(model):
    return model.run_with_cache(TEXT, names_filter="blocks.5.attn.hook_pattern")[1]["blocks.5.attn.hook_pattern"][0]


def patch(model):
    state = model.run_with_cache(OTHER, names_filter=RESIDUALS[12])[1][RESIDUALS[12]][:, -1]
    def put(value, hook):
        value[:, -1] = state
        return value
    return model.run_with_hooks(TEXT, fwd_hooks=[(RESIDUALS[12], put)])[0, -1]


def ablate_head(model):
    def zero(z, hook):
        z[:, :, 3] = 0
        return z
    return model.run_with_hooks(TEXT, fwd_hooks=[("blocks.7.attn.hook_z", zero)])[0, -1]


def knockout(model):
    def zero(z, hook, head):
        z[:, :, head] = 0
        return z
    return torch.stack([model.run_with_hooks(TEXT, fwd_hooks=[(f"blocks.{layer}.attn.hook_z", lambda z, hook: zero(z, hook, head))])[0, -1]
                        for layer in range(2) for head in range(HEADS)])


def lens(model):
    cache = model.run_with_cache(TEXT, names_filter=RESIDUALS)[1]
    return torch.cat([model.unembed(model.ln_final(cache[name][:, -1:]))[0] for name in RESIDUALS])


def probe_states(model):
    cache = model.run_with_cache(TEXTS, names_filter=RESIDUALS, padding_side="left")[1]
    return torch.stack([cache[name][:, -1] for name in RESIDUALS])


def causal_trace(model):
    end = model.to_tokens(SUBJECT, prepend_bos=False).shape[1]
    clean = model.run_with_cache(TEXT, names_filter=RESIDUALS)[1]
    def blot(value, hook):
        value[:, :end] = value.mean(1, keepdim=True)
        return value
    def restore(value, hook):
        value[:, end - 1] = clean[hook.name][:, end - 1]
        return value
    runs = [model.run_with_hooks(TEXT, fwd_hooks=[("hook_embed", blot), (name, restore)]) for name in RESIDUALS]
    return torch.stack([logits[0, -1].softmax(-1)[token(model, PARIS)] for logits in runs])


def gradient(model):
    value, subject = torch.zeros(WIDTH, requires_grad=True), model.to_tokens(SUBJECT, prepend_bos=False).shape[1] - 1
    def add(out, hook):
        return out + value * (torch.arange(out.shape[1]) == subject)[:, None]
    logits = model.run_with_hooks(TEXT, fwd_hooks=[("blocks.5.hook_mlp_out", add)])
    return torch.autograd.grad(-logits[0, -1].log_softmax(-1)[token(model, ROME)], value)[0]
