#!/usr/bin/env python3
"""Times train_llama against PyTorch FSDP2 on this machine, in turn, and prints the ratios.

    python3 benches/peer/compare.py            # builds both sides (PyTorch into target/peer), then C1, C2, C3
    python3 benches/peer/compare.py --configs C1 --rounds 5

Each round runs, for each configuration: ours fully sharded, PyTorch FSDP2, ours without sharding; 2 ranks of 1 thread each, f32,
the same model. A figure is the median over rounds of the median step, the first three steps of a run left out. The limit is what
the matrix products alone would allow on two cores at 185 GFLOP/s each (the rate of MKL and of gemm with AVX-512 on the machine of the README).
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PEER = ROOT / "target" / "peer"

CONFIGS = {
    "C1": dict(dim=256, layers=6, heads=4, kv_heads=2, ffn=704, seq=256, batch=8),
    "C2": dict(dim=512, layers=8, heads=8, kv_heads=4, ffn=1408, seq=256, batch=8),
    "C3": dict(dim=768, layers=12, heads=12, kv_heads=4, ffn=2048, seq=256, batch=4),
}
VOCAB = 256
CORE_FLOPS = 185e9


def flags(config, steps):
    sizes = [part for name, value in config.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return [*sizes, "--steps", str(steps)]


def install():
    """PyTorch in a virtual environment under target/, made once."""
    python = PEER / "bin" / "python"
    if not python.exists():
        print("installing PyTorch into", PEER, flush=True)
        venv.create(PEER, with_pip=True)
    probe = subprocess.run([python, "-c", "import torch, numpy, safetensors"], capture_output=True)
    if probe.returncode:
        subprocess.run([python, "-m", "pip", "install", "-q", "torch==2.15.0", "numpy", "safetensors"], check=True)
    return python


def build():
    subprocess.run(["cargo", "build", "--release", "--example", "train_llama"], cwd=ROOT, check=True)
    return ROOT / "target" / "release" / "examples" / "train_llama"


def ours(binary, config, steps, strategy):
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics.jsonl"
        command = [binary, *flags(config, steps), "--ranks", "2", "--strategy", strategy, "--metrics", metrics]
        env = dict(os.environ, CANDLE_NUM_THREADS="1")
        subprocess.run(command, cwd=ROOT, check=True, capture_output=True, env=env)
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    return statistics.median(line["step_ms"] for line in lines[3:-1])


def fsdp2(python, config, steps):
    command = [python, "-m", "torch.distributed.run", "--nproc-per-node", "2",
               Path(__file__).with_name("train_llama_fsdp2.py"),
               "--mode", "fsdp2", "--attn", "sdpa", "--adam", "fused", *flags(config, steps)]
    env = dict(os.environ, OMP_NUM_THREADS="1")
    run = subprocess.run(command, cwd=PEER, check=True, capture_output=True, text=True, env=env)
    times = [float(line.split("ms=")[1]) for line in run.stdout.splitlines() if line.startswith("STEP")]
    return statistics.median(times[3:])


def matmul_flops(c):
    """Multiply-adds x 2 of all matrix products of a step, forward and backward, causal attention counted half."""
    head = c["dim"] // c["heads"]
    block = 2 * c["dim"] * c["dim"] + 2 * c["dim"] * head * c["kv_heads"] + 3 * c["dim"] * c["ffn"]
    tokens = c["batch"] * c["seq"]
    products = tokens * (c["layers"] * block + c["dim"] * VOCAB)
    attention = c["layers"] * tokens * c["seq"] * c["dim"]
    return 3 * 2 * (products + attention)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--configs", nargs="+", choices=CONFIGS, default=list(CONFIGS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=13)
    args = parser.parse_args()
    if args.steps < 5:
        sys.exit("at least 5 steps are needed: the first three are left out")
    python, binary = install(), build()
    print(f"{'':4}{'ours':>10}{'FSDP2':>10}{'no-shard':>10}{'vs FSDP2':>10}{'sharding':>10}{'of limit':>10}   (tokens/s)")
    for name in args.configs:
        config = CONFIGS[name]
        tokens = config["batch"] * config["seq"]
        rounds = []
        for _ in range(args.rounds):
            rounds.append((ours(binary, config, args.steps, "optim-grads-params"),
                           fsdp2(python, config, args.steps),
                           ours(binary, config, args.steps, "no-shard")))
        sharded, peer, whole = (statistics.median(column) for column in zip(*rounds))
        speedup = statistics.median(theirs / mine for mine, theirs, _ in rounds)
        cost = statistics.median(mine / plain - 1 for mine, _, plain in rounds)
        limit = tokens / (matmul_flops(config) / (2 * CORE_FLOPS))
        rate = [tokens / (ms / 1e3) for ms in (sharded, peer, whole)]
        print(f"{name:4}{rate[0]:10.0f}{rate[1]:10.0f}{rate[2]:10.0f}{speedup:9.2f}x{cost:+9.1%}{rate[0] / limit:10.0%}", flush=True)


if __name__ == "__main__":
    main()
