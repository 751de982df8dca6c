"""Llama in plain PyTorch, and its weights from a GGUF file: an independent reader, written from the papers and the formats.

    python reference.py GGUF TEXT REPORT.json LOGITS.safetensors EXPORTED_DIR

Prints as JSON: where the token ids of REPORT.json are not those of TEXT; the loss on them, and how far the program's logits are from
these; the same after training, from the exported weights; and what of these is not as in transformers' Llama.
"""

import json
import sys
from pathlib import Path

import numpy
import regex
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def unpermute(weight, heads):
    """Undoes `permute` of llama.cpp's converter."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def read_gguf(path):
    """(config, weights by Hugging Face's names), dequantised by the gguf package."""
    reader = GGUFReader(path)
    field = lambda name: reader.fields[name].contents()
    config = {
        "layers": field("llama.block_count"),
        "heads": field("llama.attention.head_count"),
        "kv_heads": field("llama.attention.head_count_kv"),
        "eps": field("llama.attention.layer_norm_rms_epsilon"),
        "theta": field("llama.rope.freq_base"),
    }
    weights = {}
    for tensor in reader.tensors:
        value = dequantize(tensor.data, tensor.tensor_type).astype(numpy.float32)
        value = value.reshape(tuple(reversed(tensor.shape.tolist())))
        name = tensor.name
        if name.startswith("blk."):
            _, layer, rest, _ = name.split(".")
            if rest == "attn_q":
                value = unpermute(value, config["heads"])
            elif rest == "attn_k":
                value = unpermute(value, config["kv_heads"])
            name = f"model.layers.{layer}.{BLOCK[rest]}.weight"
        else:
            name = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
                    "output.weight": "lm_head.weight"}[name]
        weights[name] = torch.from_numpy(value.copy())
    return config, weights


def read_directory(path):
    """Weights of a directory, with PyTorch's `safetensors`, by its index if there is one."""
    index = path / "model.safetensors.index.json"
    files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
    weights = {}
    for name in files:
        with safe_open(path / name, framework="pt") as file:
            for tensor in file.keys():
                weights[tensor] = file.get_tensor(tensor)
    return weights


def tokenize(path, text):
    """Byte-level BPE of SmolLM2, from the lists in the GGUF file: digits one by one, the rest cut as GPT-2 does."""
    reader = GGUFReader(path)
    tokens = {token: at for at, token in enumerate(reader.fields["tokenizer.ggml.tokens"].contents())}
    merges = reader.fields["tokenizer.ggml.merges"].contents()
    ranks = {tuple(merge.split(" ")): at for at, merge in enumerate(merges)}
    visible = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in visible]
    letters = {byte: chr(byte) for byte in visible} | {byte: chr(256 + at) for at, byte in enumerate(others)}
    words = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
    ids = []
    for piece in regex.findall(r"\p{N}|\P{N}+", text):
        for word in regex.findall(words, piece):
            parts = [letters[byte] for byte in word.encode()]
            while len(parts) > 1:
                pairs = list(zip(parts, parts[1:]))
                best = min(pairs, key=lambda pair: ranks.get(pair, len(ranks)))
                if best not in ranks:
                    break
                at = pairs.index(best)
                parts[at:at + 2] = ["".join(best)]
            ids += [tokens[part] for part in parts]
    return ids


def norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def rotate(x, theta):
    """x: [batch, heads, time, head_dim]; pairs are (i, i + head_dim / 2)."""
    _, _, time, width = x.shape
    frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles = torch.outer(torch.arange(time, dtype=torch.float64), frequencies)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def forward(config, w, ids):
    """Logits [batch, time, vocabulary]."""
    batch, time = ids.shape
    heads, kv_heads, eps = config["heads"], config["kv_heads"], config["eps"]
    x = w["model.embed_tokens.weight"][ids]
    mask = torch.full((time, time), float("-inf"), dtype=x.dtype).triu(1)
    for layer in range(config["layers"]):
        at = lambda name: w[f"model.layers.{layer}.{name}.weight"]
        h = norm(x, at("input_layernorm"), eps)
        split = lambda y, n: y.view(batch, time, n, -1).transpose(1, 2)
        q = rotate(split(h @ at("self_attn.q_proj").T, heads), config["theta"])
        k = rotate(split(h @ at("self_attn.k_proj").T, kv_heads), config["theta"])
        v = split(h @ at("self_attn.v_proj").T, kv_heads)
        k, v = (y.repeat_interleave(heads // kv_heads, dim=1) for y in (k, v))
        scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + mask
        h = (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, time, -1)
        x = x + h @ at("self_attn.o_proj").T
        h = norm(x, at("post_attention_layernorm"), eps)
        gate = h @ at("mlp.gate_proj").T
        x = x + (gate * gate.sigmoid() * (h @ at("mlp.up_proj").T)) @ at("mlp.down_proj").T
    x = norm(x, w["model.norm.weight"], eps)
    return x @ w.get("lm_head.weight", w["model.embed_tokens.weight"]).T


def relative(ours, theirs):
    """Largest difference, of the largest value."""
    return ((ours.double() - theirs).abs().max() / theirs.abs().max()).item()


def main():
    torch.manual_seed(0)
    gguf, text, report, logits, exported = map(Path, sys.argv[1:])
    report = json.loads(report.read_text())
    ids, seq = torch.tensor(report["ids"]), report["seq"]
    inputs, targets = ids[:-1].view(-1, seq), ids[1:].view(-1, seq)
    with safe_open(logits, framework="pt") as file:
        before, after = file.get_tensor("before"), file.get_tensor("after")
    result = {}
    known = tokenize(gguf, text.read_text())[:len(ids)]
    again = AutoTokenizer.from_pretrained(exported)(text.read_text())["input_ids"][:len(ids)]
    result["tokens"] = [at for at, token in enumerate(report["ids"]) if [token, token] != [known[at], again[at]]]
    loss = lambda logits: torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).item()
    double = lambda weights: {name: value.double() for name, value in weights.items()}
    with torch.no_grad():
        config, weights = read_gguf(gguf)
        theirs = forward(config, double(weights), inputs)
        result["loss"], result["logits_before"] = loss(theirs), relative(before, theirs[0])
        saved = read_directory(exported)
        theirs = forward(config, double(saved), inputs)
        result["loss_after"], result["logits_after"] = loss(theirs), relative(after, theirs[0])
        result["changed"] = max((saved[name] - weights[name]).abs().max().item() for name in saved)
        model, info = AutoModelForCausalLM.from_pretrained(exported, output_loading_info=True, dtype=torch.float32)
        result["unloaded"] = {key: sorted(map(str, value)) for key, value in info.items() if value}
        expected = {name: list(value.shape) for name, value in model.state_dict().items()}
        # The tied head is one tensor with the embedding, which is saved once.
        expected.pop("lm_head.weight")
        shapes = {name: list(value.shape) for name, value in saved.items()}
        result["differences"] = sorted(name for name in {*shapes, *expected} if shapes.get(name) != expected.get(name))
        result["logits_transformers"] = relative(after, model(inputs[:1]).logits[0])
    print(json.dumps(result))


if __name__ == "__main__":
    main()
