#!/usr/bin/env python3
"""The peer of `benches/gpu/run`: a Llama in plain PyTorch, sharded by FSDP2, on the same batches as train_llama.

    python3 -m torch.distributed.run --standalone --nproc-per-node 1 benches/gpu/fsdp2.py --tokens FILE --metrics FILE

`fully_shard` of each block and of the root; weights and optimizer state f32, computed in bf16, gradients reduced in f32;
attention by scaled_dot_product_attention, fused AdamW, clipping at 1, as train_llama. Metrics are train_llama's. On the CPU, by
gloo, where there is no GPU, to try it out.
"""

import argparse
import json
import os
import struct
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint


class Attention(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.heads, self.kv_heads, self.head = c.heads, c.kv_heads, c.dim // c.heads
        self.q = nn.Linear(c.dim, c.heads * self.head, bias=False)
        self.k = nn.Linear(c.dim, c.kv_heads * self.head, bias=False)
        self.v = nn.Linear(c.dim, c.kv_heads * self.head, bias=False)
        self.o = nn.Linear(c.heads * self.head, c.dim, bias=False)

    def forward(self, x, cos, sin):
        batch, seq, _ = x.shape

        def heads(x, count):
            return x.view(batch, seq, count, self.head).transpose(1, 2)

        def rotate(x):
            a, b = x.chunk(2, dim=-1)
            return x * cos + torch.cat((-b, a), dim=-1) * sin

        q, k, v = heads(self.q(x), self.heads), heads(self.k(x), self.kv_heads), heads(self.v(x), self.kv_heads)
        out = F.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
        return self.o(out.transpose(1, 2).reshape(batch, seq, -1))


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.norm1, self.attention = nn.RMSNorm(c.dim, eps=1e-5), Attention(c)
        self.norm2 = nn.RMSNorm(c.dim, eps=1e-5)
        self.gate = nn.Linear(c.dim, c.ffn, bias=False)
        self.up = nn.Linear(c.dim, c.ffn, bias=False)
        self.down = nn.Linear(c.ffn, c.dim, bias=False)
        self.recompute = c.recompute

    def whole(self, x, cos, sin):
        x = x + self.attention(self.norm1(x), cos, sin)
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def forward(self, x, cos, sin):
        if self.recompute:
            return checkpoint(self.whole, x, cos, sin, use_reentrant=False)
        return self.whole(x, cos, sin)


class Llama(nn.Module):
    def __init__(self, c, seq):
        super().__init__()
        self.embed = nn.Embedding(c.vocab, c.dim)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.norm, self.head = nn.RMSNorm(c.dim, eps=1e-5), nn.Linear(c.dim, c.vocab, bias=False)
        head = c.dim // c.heads
        frequencies = 10_000.0 ** (-torch.arange(0, head, 2, dtype=torch.float32) / head)
        angles = torch.outer(torch.arange(seq, dtype=torch.float32), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, ids, targets):
        x = self.embed(ids)
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def read_tokens(path):
    """`tokens` of a safetensors file, I32 [steps, batch, seq + 1]."""
    with open(path, "rb") as file:
        header = json.loads(file.read(struct.unpack("<Q", file.read(8))[0]))["tokens"]
        assert header["dtype"] == "I32", header
        data = bytearray(file.read(header["data_offsets"][1]))
    return torch.frombuffer(data, dtype=torch.int32).view(header["shape"])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("dim", "layers", "heads", "kv-heads", "ffn", "vocab", "steps"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--compile", action="store_true", help="torch.compile each block")
    parser.add_argument("--lr", type=float, default=1e-4)
    parser.add_argument("--tokens", required=True)
    parser.add_argument("--metrics", required=True)
    c = parser.parse_args()

    rank, world, local = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", **({"device_id": device} if cuda else {}))
    tokens = read_tokens(c.tokens)
    steps, batch, seq = tokens.shape[0], tokens.shape[1] // world, tokens.shape[2] - 1
    assert c.steps <= steps and tokens.shape[1] % world == 0, tokens.shape

    torch.manual_seed(0)
    with device:
        model = Llama(c, seq)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(std=0.02)
    mesh = init_device_mesh(device.type, (world,))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        if c.compile:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=c.lr, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, fused=True)

    metrics = open(c.metrics, "w") if rank == 0 else None
    for step in range(c.steps):
        start = time.perf_counter()
        rows = tokens[step, rank * batch : (rank + 1) * batch].to(device=device, dtype=torch.long)
        loss = model(rows[:, :-1], rows[:, 1:])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        mean = loss.detach()
        dist.all_reduce(mean)
        # Both wait for the device, as train_llama does in each step.
        loss, norm = mean.item() / world, norm.full_tensor().item()
        ms = (time.perf_counter() - start) * 1e3
        if metrics:
            line = {"step": step, "loss": loss, "grad_norm": norm, "step_ms": ms}
            print(json.dumps(line), file=metrics, flush=True)
    if rank == 0 and cuda:
        print(f"allocated at most {torch.cuda.max_memory_allocated() / 2**30:.2f} GiB, torch {torch.__version__}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
