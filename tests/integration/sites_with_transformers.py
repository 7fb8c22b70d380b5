"""Compares every site inside a block with what transformers computes there, for every fixture. Those whose code never became part of
transformers are compared with its class of the same arithmetic, which gets their weights under its own names (twin).

usage: sites_with_transformers.py FIXTURES_FOLDER      (the package is found by PYTHONPATH)
"""
import contextlib
import json
import pathlib
import sys

import torch
import transformers
from safetensors.torch import load_file

import emend

TOLERANCE = 1e-4
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
# Output of these modules, by their last name: site, and how its width is divided.
PROJECTIONS = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "gate_proj": "mlp_gate", "up_proj": "mlp_up", "c_fc": "mlp_up",
               "fc_in": "mlp_up", "dense_h_to_4h": "mlp_up", "fc1": "mlp_up", "gate_up_proj": "fused_mlp"}


def repeated(x, heads):
    return x.repeat_interleave(heads // x.shape[1], dim=1)


class Recorder:
    """What one pass of a transformers model computes: {site: [layer]} without the batch dimension."""

    def __init__(self, model):
        self.model, self.seen = model, {}

    def add(self, site, value):
        self.seen.setdefault(site, []).append(value[0].detach().float())

    def attention(self, original):
        def eager(module, query, key, value, attention_mask, *words, **named):
            out, pattern = original(module, query, key, value, attention_mask, *words, **named)
            scaling = named.get("scaling") or (words[0] if words else None) or query.shape[-1] ** -0.5
            if scaling == 1 and getattr(module, "scaling", 1) != 1:  # OPT scales its queries first
                query, scaling = query / module.scaling, module.scaling
            scores = query @ repeated(key, query.shape[1]).transpose(2, 3) * scaling
            if named.get("softcap"):
                scores = torch.tanh(scores / named["softcap"]) * named["softcap"]
            if attention_mask is not None:
                scores = scores + attention_mask[:, :, :, :key.shape[2]]
            else:
                scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
            for site, tensor in (("attn_q_rotary", query), ("attn_k_rotary", key), ("attn_v", value)):
                self.add(site, tensor.transpose(1, 2))
            self.add("attn_scores", scores)
            self.add("attn_pattern", pattern)
            self.add("attn_z", out)
            return out, pattern
        return eager

    def hook(self, name):
        def record(_, __, out):
            if name == "fused_mlp":
                self.add("mlp_gate", out.chunk(2, -1)[0])
                self.add("mlp_up", out.chunk(2, -1)[1])
            elif name == "attn_v" and self.library_attention:
                pass  # seen already
            else:
                self.add(name, out.view(1, -1, out.shape[-1]))
        return record

    def experts(self, block, words):
        """Mixtral: router's logits and every expert's output, from the weights."""
        x = words[0].reshape(-1, words[0].shape[-1])
        logits = torch.nn.functional.linear(x, block.gate.weight)
        outs = []
        for gate_up, down in zip(block.experts.gate_up_proj, block.experts.down_proj):
            gate, up = (x @ gate_up.T).chunk(2, -1)
            outs.append((torch.nn.functional.silu(gate) * up) @ down.T)
        chosen = torch.zeros_like(logits).scatter(1, logits.topk(self.model.config.num_experts_per_tok, -1).indices, 1.0)
        self.add("router", logits[None])
        self.add("expert_out", (torch.stack(outs, 1) * chosen[:, :, None])[None])

    def run(self, ids):
        module = sys.modules[type(self.model).__module__]
        self.library_attention = hasattr(module, "eager_attention_forward")
        with contextlib.ExitStack() as stack, torch.no_grad():
            if self.library_attention:
                original = module.eager_attention_forward
                module.eager_attention_forward = self.attention(original)
                stack.callback(setattr, module, "eager_attention_forward", original)
            for name, part in self.model.named_modules():
                last = name.rsplit(".", 1)[-1]
                if last in PROJECTIONS and isinstance(getattr(part, "weight", None), torch.Tensor):
                    stack.callback(part.register_forward_hook(self.hook(PROJECTIONS[last])).remove)
                if type(part).__name__ == "MixtralSparseMoeBlock":
                    stack.callback(part.register_forward_pre_hook(self.experts).remove)
            mask = {"attention_mask": alibi_mask(self.model.config.num_attention_heads, len(ids))} if self.model.alibi else {}
            out = self.model(torch.tensor([ids]), output_attentions=True, **mask)
        if not self.library_attention:
            for pattern in out.attentions:
                self.add("attn_pattern", pattern)
        return out.logits[0].float()


def alibi_mask(heads, tokens):
    """[1, heads, tokens, keys]: the paper's slopes times the key's place, as Baichuan's code has it; future keys hidden."""
    near = 2 ** (heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / near) for i in range(near)] + [2 ** (-4 * (2 * i + 1) / near) for i in range(heads - near)]
    future = torch.ones(tokens, tokens, dtype=torch.bool).triu(1)
    return (torch.tensor(slopes)[:, None, None] * torch.arange(tokens)).expand(-1, tokens, -1).masked_fill(future, torch.finfo(torch.float32).min)[None]


class NoRotary(torch.nn.Module):
    def forward(self, hidden, position_ids):
        shape = (1, hidden.shape[1], self.head_dim)
        return torch.ones(shape), torch.zeros(shape)


def renamed(name):
    for old, new in (("transformer.encoder.layers.", "model.layers."), ("transformer.h.", "model.layers."), ("self_attention.dense.", "self_attn.o_proj."),
                     ("attention.wo.", "self_attn.o_proj."), ("attn.c_proj.", "self_attn.o_proj."), (".attention_norm.", ".input_layernorm."),
                     (".ffn_norm.", ".post_attention_layernorm."), (".ln_1.", ".input_layernorm."), (".ln_2.", ".post_attention_layernorm."),
                     ("dense_h_to_4h", "gate_up_proj"), ("dense_4h_to_h", "down_proj"), ("feed_forward.w1", "mlp.gate_proj"),
                     ("feed_forward.w3", "mlp.up_proj"), ("feed_forward.w2", "mlp.down_proj"), ("mlp.w1", "mlp.up_proj"), ("mlp.w2", "mlp.gate_proj"),
                     ("mlp.c_proj", "mlp.down_proj"), ("transformer.encoder.final_layernorm", "model.norm"), ("transformer.ln_f", "model.norm"),
                     ("transformer.embedding.word_embeddings", "model.embed_tokens"), ("model.tok_embeddings", "model.embed_tokens"),
                     ("transformer.wte", "model.embed_tokens"), ("transformer.output_layer", "lm_head")):
        name = name.replace(old, new)
    return "lm_head.weight" if name == "output.weight" else name


def twin(folder, config):
    """transformers' class of the same arithmetic, with the fixture's weights."""
    of = lambda *names, default=None: next((config[name] for name in names if name in config), default)
    heads, kind = config["num_attention_heads"], config["model_type"]
    groups = of("multi_query_group_num", "num_key_value_heads", default=heads)
    size = of("kv_channels", default=config["hidden_size"] // heads)
    named = {"hidden_size": config["hidden_size"], "num_hidden_layers": of("num_hidden_layers", "num_layers"), "num_attention_heads": heads,
             "num_key_value_heads": groups, "head_dim": size, "vocab_size": of("vocab_size", "padded_vocab_size"),
             "intermediate_size": of("ffn_hidden_size", "intermediate_size") // (2 if kind == "qwen" else 1), "tie_word_embeddings": False,
             "rms_norm_eps": of("rms_norm_eps", "layernorm_epsilon", "layer_norm_epsilon"), "attention_bias": kind in ("chatglm", "internlm"), "pad_token_id": None,
             "rope_parameters": {"rope_type": "default", "rope_theta": of("rope_theta", default=10000.0) * float(of("rope_ratio", default=1)),
                                 "partial_rotary_factor": 0.5 if kind == "chatglm" else 1.0}}
    family = {"chatglm": "Glm", "qwen": "Qwen2"}.get(kind, "Llama")
    settings = getattr(transformers, f"{family}Config")(**named)
    settings._attn_implementation = "eager"
    model = getattr(transformers, f"{family}ForCausalLM")(settings).eval()
    weights = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if ".wqkv." in name:  # a group: its queries, its key, its value
            value = value.view(groups, heads // groups + 2, size, -1)
            parts = [part.flatten(0, -2) for part in (value[:, :-2], value[:, -2], value[:, -1])]
        elif any(word in name for word in ("W_pack", "query_key_value", "c_attn")):
            parts = value.split([heads * size, groups * size, groups * size])
        else:
            weights[renamed(name)] = value
            continue
        layer = name.split(".layers.")[-1].split(".h.")[-1].split(".")[0]
        weights |= {f"model.layers.{layer}.self_attn.{which}_proj.{name.rsplit('.', 1)[1]}": part for which, part in zip("qkv", parts)}
    weights.pop("transformer.rotary_pos_emb.inv_freq", None)
    model.load_state_dict(weights)
    model.alibi = kind == "baichuan" and "max_position_embeddings" not in config
    if model.alibi:
        model.model.rotary_emb = NoRotary()
        model.model.rotary_emb.head_dim = size
    return model


def worst_difference(folder):
    """{site: largest difference}."""
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        reference = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
        reference.alibi = False
    else:
        reference = twin(folder, config)
    model = emend.load(str(folder))
    rows = [[3, 17, 40, 2, 2, 71, 9, 60, 33, 5], [11, 12, 13, 14]]
    longest = min(10, config.get("seq_length", 10))  # beyond it Qwen's first version computes what no class of transformers does
    rows = [[id % model.vocab_size for id in row[:longest]] for row in rows]
    run = model.trace(rows, [site for site in emend.sites(model) if site.startswith("layers.")])
    worst = {}
    for number, ids in enumerate(rows):
        recorder = Recorder(reference)
        logits = recorder.run(ids)
        worst["logits"] = max(worst.get("logits", 0), (run.logits[number, :len(ids)] - logits).abs().max().item())
        for site, layers in recorder.seen.items():
            assert len(layers) == model.n_layers, f"{folder.name}: {site} was seen {len(layers)} times"
            for layer, wanted in enumerate(layers):
                mine = run[f"layers.{layer}.{site}"][number]
                mine = mine[:, :len(ids), :len(ids)] if site in ("attn_scores", "attn_pattern") else mine[:len(ids)]
                wanted = wanted.reshape(mine.shape)
                hidden = wanted < -1e30
                assert site == "attn_scores" or not hidden.any()
                if site == "attn_scores":
                    assert torch.equal(hidden, mine.isinf()), f"{folder.name}: other keys are hidden"
                worst[site] = max(worst.get(site, 0), (mine - wanted)[~hidden].abs().max().item())
    return worst


def main():
    compared, failed = 0, []
    for config in sorted(pathlib.Path(sys.argv[1]).glob("*/config.json")):
        worst = worst_difference(config.parent)
        compared += 1
        print(config.parent.name, " ".join(f"{site} {value:.1e}" for site, value in sorted(worst.items())), flush=True)
        failed += [f"{config.parent.name} {site} {value}" for site, value in worst.items() if not value <= TOLERANCE]
        assert "attn_pattern" in worst and ("mlp_up" in worst or "router" in worst), worst
    assert not failed, failed
    assert compared == 33, compared
    print(f"{compared} families agree")


main()
