"""Writes the first inputs of every fuzz target: small files of our own making.

usage: make_corpus.py CORPUS_FOLDER        (inputs that fuzzing found are kept beside them)
"""
import hashlib
import json
import pathlib
import struct
import sys

top = pathlib.Path(sys.argv[1])


def put(target, name, data):
    folder = top / target
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_bytes(data if isinstance(data, bytes) else data.encode())


def safetensors(tensors, metadata=None):
    """tensors: name -> (dtype, shape, bytes)"""
    header, data = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, (dtype, shape, raw) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text + data


def floats(*values):
    return struct.pack(f"<{len(values)}f", *values)


# safetensors
put("safetensors", "two.safetensors", safetensors({"a": ("F32", [2, 2], floats(1, 2, 3, 4)), "b": ("I64", [1], bytes(8))}, {"format": "pt"}))
put("safetensors", "half.safetensors", safetensors({"h": ("BF16", [3], bytes(6)), "e": ("F16", [0, 4], b"")}))
put("safetensors", "empty.safetensors", safetensors({}))
put("safetensors", "overflow.safetensors", safetensors({"a": ("F32", [2**62, 4], floats(1))}))
put("safetensors", "giant_header.safetensors", struct.pack("<Q", 2**63) + b"{}")


# GGUF: a tiny llama with a vocabulary of eight tokens
def gguf_text(text):
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def gguf_value(value):
    if isinstance(value, bool):
        return struct.pack("<IB", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_text(value)
    kind = {int: 5, float: 6, str: 8}[type(value[0])]
    body = b"".join(gguf_text(v) if kind == 8 else struct.pack("<i" if kind == 5 else "<f", v) for v in value)
    return struct.pack("<IIQ", 9, kind, len(value)) + body


def gguf(metadata, tensors):
    out = struct.pack("<IIQQ", 0x46554747, 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        out += gguf_text(key) + gguf_value(value)
    data = b""
    for name, (kind, shape, raw) in tensors.items():
        out += gguf_text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *reversed(shape))
        out += struct.pack("<IQ", kind, len(data))
        data += raw + bytes(-len(raw) % 32)
    return out + bytes(-len(out) % 32) + data


def f32(*shape):
    count = 1
    for n in shape:
        count *= n
    return (0, list(shape), floats(*[0.01 * (i % 7) for i in range(count)]))


llama = {"general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 16, "llama.embedding_length": 8,
         "llama.feed_forward_length": 8, "llama.attention.head_count": 2, "llama.attention.head_count_kv": 2,
         "llama.rope.dimension_count": 4, "llama.attention.layer_norm_rms_epsilon": 1e-5, "general.alignment": 32}
spm = {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", "\u2581", "a", "b", "\u2581a", "ab"],
       "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -1.0, -2.0, -3.0, -1.5, -2.5], "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1],
       "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2}
bpe = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": ["a", "b", "\u0120", "ab", "\u0120a", "H", "e", "<|end|>"],
       "tokenizer.ggml.merges": ["a b", "\u0120 a"], "tokenizer.ggml.token_type": [1, 1, 1, 1, 1, 1, 1, 3], "tokenizer.ggml.eos_token_id": 7}
tensors = {"token_embd.weight": f32(8, 8), "output_norm.weight": f32(8), "blk.0.attn_norm.weight": f32(8),
           "blk.0.attn_q.weight": f32(8, 8), "blk.0.attn_k.weight": f32(8, 8), "blk.0.attn_v.weight": f32(8, 8),
           "blk.0.attn_output.weight": f32(8, 8), "blk.0.ffn_norm.weight": f32(8), "blk.0.ffn_gate.weight": f32(8, 8),
           "blk.0.ffn_up.weight": f32(8, 8), "blk.0.ffn_down.weight": f32(8, 8)}
put("gguf", "spm.gguf", gguf(llama | spm, tensors))
put("gguf", "bpe.gguf", gguf(llama | bpe, tensors))
put("gguf", "no_tensors.gguf", gguf(llama, {}))
put("gguf", "q8_0.gguf", gguf(llama | bpe, tensors | {"blk.0.ffn_down.weight": (8, [8, 32], bytes(8 * 34))}))
put("gguf", "q4_k.gguf", gguf({"general.architecture": "gpt2"}, {"x": (12, [1, 256], bytes(144))}))

# index
put("index", "two_files.json", json.dumps({"metadata": {"total_size": 24}, "weight_map": {"x": "a.safetensors", "y": "a.safetensors", "z": "b.safetensors"}}))
put("index", "outside.json", json.dumps({"weight_map": {"x": "../a.safetensors"}}))
put("index", "absolute.json", json.dumps({"weight_map": {"x": "/etc/hostname", "y": "sub/a.safetensors"}}))
put("index", "missing.json", json.dumps({"weight_map": {"x": "c.safetensors"}}))
put("index", "wrong.json", json.dumps({"weight_map": ["x"]}))

# config
for config in [
    {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
     "vocab_size": 257, "max_position_embeddings": 256, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
     "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}},
    {"model_type": "gpt2", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": None, "vocab_size": 257, "n_positions": 64, "activation_function": "gelu_new"},
    {"model_type": "gpt_neox", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 257,
     "max_position_embeddings": 64, "rotary_pct": 0.25, "use_parallel_residual": True, "hidden_act": "gelu"},
    {"model_type": "gptj", "n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "vocab_size": 257, "n_positions": 64},
    {"model_type": "falcon", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 257, "multi_query": True, "parallel_attn": True},
    {"model_type": "gemma3_text", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
     "intermediate_size": 48, "vocab_size": 257, "max_position_embeddings": 64, "sliding_window": 8, "sliding_window_pattern": 2, "query_pre_attn_scalar": 8},
    {"model_type": "mixtral", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
     "vocab_size": 257, "max_position_embeddings": 64, "num_local_experts": 4, "num_experts_per_tok": 2},
    {"model_type": "phi3", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 257,
     "max_position_embeddings": 64, "original_max_position_embeddings": 32, "rope_scaling": {"type": "longrope", "long_factor": [1.0] * 4, "short_factor": [1.0] * 4}},
    {"model_type": "opt", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48, "vocab_size": 257, "max_position_embeddings": 64,
     "word_embed_proj_dim": 16, "do_layer_norm_before": False, "activation_function": "relu"},
    {"model_type": "qwen3", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 48,
     "vocab_size": 257, "max_position_embeddings": 64, "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    {"model_type": "chatglm", "hidden_size": 32, "num_layers": 2, "num_attention_heads": 4, "multi_query_group_num": 2, "multi_query_attention": True,
     "ffn_hidden_size": 48, "padded_vocab_size": 257, "seq_length": 64, "kv_channels": 8, "add_qkv_bias": True, "rmsnorm": True},
]:
    put("config", config["model_type"] + ".json", json.dumps(config))

# tokenizer
specials = [{"id": 6, "content": "<|end|>", "special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}]
byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
put("tokenizer", "bpe.json", json.dumps({"version": "1.0", "added_tokens": specials, "normalizer": {"type": "NFC"}, "pre_tokenizer": byte_level, "decoder": byte_level,
    "post_processor": None, "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "\u0120": 2, "ab": 3, "T": 4, "he": 5, "h": 7, "e": 8}, "merges": ["a b", ["h", "e"]]}}))
put("tokenizer", "unigram.json", json.dumps({"version": "1.0", "added_tokens": [], "normalizer": {"type": "Precompiled", "precompiled_charsmap": ""},
    "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "add_prefix_space": True}, "decoder": {"type": "Metaspace", "replacement": "\u2581", "add_prefix_space": True},
    "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["\u2581", -1.0], ["a", -2.0], ["\u2581a", -2.5]]}}))
put("tokenizer", "sequence.json", json.dumps({"version": "1.0", "added_tokens": [], "normalizer": {"type": "Sequence", "normalizers": [
    {"type": "Prepend", "prepend": "\u2581"}, {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"}, {"type": "Lowercase"}, {"type": "NFKC"}]},
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": {"Regex": "\\p{N}{1,3}|\\s+"}, "behavior": "Isolated", "invert": False},
    {"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}]},
    "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}], "pair": [],
    "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}},
    "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
    "model": {"type": "BPE", "byte_fallback": True, "unk_token": "<unk>", "fuse_unk": True, "vocab": {"<unk>": 0, "<s>": 1, "\u2581": 2, "t": 3, "<0x41>": 4}, "merges": []}}))
put("tokenizer", "with_text.json", "a\u0301 tab\there 99999 <|end|>\n" + json.dumps({"model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}))

# hyper-parameters
put("hparams", "memit.yaml", "layers: [4, 5]\nfact_token: subject_last\nv_num_grad_steps: 25\nv_lr: 5e-1\nkl_factor: 0.0625\nmom2_adjustment: true\n"
    "context_template_length_params: [[5, 10], [10, 10]]\nrewrite_module_tmp: \"model.layers.{}.mlp.down_proj\"\n")
put("hparams", "memit.json", json.dumps({"layers": [4], "fact_token": "subject_last", "v_loss_layer": 30, "v_lr": 0.5, "clamp_norm_factor": 4, "mom2_n_samples": 100}))
put("hparams", "wrong.yaml", "layers: 4\nv_lrr: 1\nv_lr: fast\n? [a, b]\n: c\n")
put("hparams", "anchors.yaml", "layers: &a [1, 2]\nmore: *a\nmerge: {<<: *a}\nnull_value: ~\n--- \nsecond: document\n")
put("hparams", "set.txt", "v_lr=0.1")

# facts
put("facts", "short.jsonl", '{"prompt": "{} is in", "subject": "Oslo", "target_new": "Rome"}\n{"prompt": "The home of {} is", "subject": "Ada", "target_new": "Po", "target_true": "Ur"}\n')
put("facts", "table.csv", 'prompt,subject,target_new,case_id,paraphrase_prompts\r\n{} is in,"Oslo, ""the"" city",Rome,3,"[""Where is Oslo? In""]"\r\n')
put("facts", "counterfact.json", json.dumps([{"case_id": 3, "requested_rewrite": {"prompt": "{} is in", "subject": "Oslo", "relation_id": "P1", "target_new": {"str": "Rome", "id": "Q1"},
    "target_true": {"str": "Norway", "id": "Q2"}}, "paraphrase_prompts": ["Where is Oslo? In"], "neighborhood_prompts": ["Bergen is in"], "attribute_prompts": [], "generation_prompts": ["Oslo"]}], indent=1))
put("facts", "zsre.json", json.dumps([{"subject": "Oslo", "src": "Where is Oslo?", "pred": "x", "rephrase": "Oslo lies where?", "alt": "Rome", "answers": ["Norway"], "loc": "nq question: who", "loc_ans": "me", "cond": "a >> b || c"}]))
put("facts", "easyedit.json", json.dumps([{"prompt": "Oslo is in", "subject": "Oslo", "target_new": "Rome", "ground_truth": "Norway", "rephrase_prompt": "Oslo lies in", "locality_prompt": "a", "locality_ground_truth": "b",
    "locality": {"neighborhood": {"prompt": ["x"], "ground_truth": ["y"]}}, "portability": {"one_hop": [{"prompt": "p", "ground_truth": [["q"]]}]}}]))
put("facts", "mquake.json", json.dumps([{"case_id": 1, "requested_rewrite": [{"prompt": "{} is in", "question": "Where is Oslo?", "subject": "Oslo", "relation_id": "P1", "target_new": {"str": "Rome"}, "target_true": {"str": "Norway"}}],
    "questions": ["q1", "q2", "q3"], "answer": "a", "answer_alias": ["b"], "new_answer": "c", "new_answer_alias": [],
    "single_hops": [{"question": "h", "cloze": "h is", "answer": "i", "answer_alias": []}], "new_single_hops": [{"question": "h", "cloze": "h is", "answer": "j", "answer_alias": []}]}]))


# packs
def pack(manifest, tensors, version="1"):
    text = json.dumps(manifest, separators=(",", ":"))
    return safetensors(tensors, {"format": "emend edit pack", "version": version, "manifest": text, "checksum": hashlib.sha256(text.encode()).hexdigest()})


doubles = lambda n: struct.pack(f"<{n}d", *[0.5] * n)
base = {"base_fingerprint": "0" * 64, "editor": "memit", "hparams": {"layers": [1]}, "facts": [{"case_id": 1}], "extra": {"seed": 0}}
factors = {"weight": "a.weight", "layer": 1, "orientation": "out-in", "shape": [2, 3], "form": "factors", "rank": 1}
dense = {"weight": "b.weight", "layer": 1, "orientation": "in-out", "shape": [2, 2], "form": "dense"}
put("pack", "factors.safetensors", pack(base | {"deltas": [factors]}, {"0.left": ("F64", [2, 1], doubles(2)), "0.right": ("F64", [3, 1], doubles(3))}))
put("pack", "dense.safetensors", pack(base | {"deltas": [dense]}, {"0.dense": ("F32", [2, 2], floats(1, 2, 3, 4))}))
put("pack", "runtime.safetensors", pack(base | {"deltas": [], "runtime": [{"kind": "grace", "version": 1, "values": {"layer": 1}, "tensors": {"keys": [1, 2]}}]},
                                        {"runtime.0.keys": ("F32", [1, 2], floats(1, 2))}, "2"))

# device maps
put("device_map", "explicit.json", json.dumps({"model.embed_tokens": "cpu", "model.layers.0": 0, "model.layers.1": "cuda:1", "model.norm": "cpu", "lm_head": "cpu"}))
put("device_map", "root.json", json.dumps({"": "cpu"}))
put("device_map", "word.txt", "balanced_low_0")
put("device_map", "single.txt", "cuda:0")
put("device_map", "simulated.txt", "sim:4")
put("device_map", "limits.txt", "0=10GiB,1=20GiB,cpu=30GiB")
put("device_map", "machine.txt", "2x80GiB,2x40GiB,cpu=64GiB")
