#!/usr/bin/env python3
"""Compares, counts and tabulates for `benches/gpu/run`. Needs nothing but Python.

    report.py tokens FILE ...      random token ids for both sides
    report.py losses A B ...       fails unless the losses of two runs are the same within the dtype's tolerance
    report.py setting FILE ...     what was run, on what
    report.py results DIR          DIR/results.json and DIR/results.md
"""

import argparse
import json
import random
import statistics
import struct
import sys
from array import array
from pathlib import Path

# Largest difference of a loss of the first 20 steps: at the first step, where weights are the same, and later.
TOLERANCE = {"f32": (1e-4, 2e-3), "bf16": (5e-3, 2e-2)}

# Dense bf16 TFLOP/s by what the names of cards contain, the first that fits; from the vendor's data sheets.
PEAKS = [
    ("GB200", 2500), ("B200", 2250), ("B100", 1750), ("GH200", 989), ("H200", 989), ("H100 PCIe", 756), ("H100 NVL", 835),
    ("H100", 989), ("H800", 989), ("A100", 312), ("A800", 312), ("L40S", 362), ("L40", 181), ("RTX 6000 Ada", 364),
    ("L4", 121), ("A40", 150), ("A30", 165), ("A10", 125), ("RTX A6000", 155), ("RTX 5090", 210), ("RTX 4090", 165),
    ("RTX 3090", 71),
]
COLLECTIVES = (1, 2)


def sizes(parser):
    for name in ("dim", "layers", "heads", "kv-heads", "ffn", "vocab", "seq", "batch"):
        parser.add_argument(f"--{name}", type=int, required=True)


def read_steps(path):
    """The steps of a metrics file and its summary, if it has one."""
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    summary = lines.pop()["summary"] if lines and "summary" in lines[-1] else None
    return lines, summary


# ---------------------------------------------------------------- tokens
def tokens(args):
    """Safetensors with `tokens`, I32 [steps, batch, seq + 1]: random ids, the same every time."""
    shape = [args.steps, args.batch, args.seq + 1]
    draw = random.Random(0)
    ids = array("i", (draw.randrange(args.vocab) for _ in range(shape[0] * shape[1] * shape[2])))
    if sys.byteorder == "big":
        ids.byteswap()
    data = ids.tobytes()
    header = json.dumps({"tokens": {"dtype": "I32", "shape": shape, "data_offsets": [0, len(data)]}}).encode()
    header += b" " * (-len(header) % 8)
    with open(args.file, "wb") as file:
        file.write(struct.pack("<Q", len(header)) + header + data)


# ---------------------------------------------------------------- losses
def losses(args):
    (a, _), (b, _) = read_steps(args.a), read_steps(args.b)
    first, later = TOLERANCE[args.dtype]
    if len(a) != len(b) or not a:
        sys.exit(f"{args.a} has {len(a)} steps, {args.b} has {len(b)}")
    worst = 0.0
    for at, (x, y) in enumerate(zip(a, b)):
        limit = first if at == 0 else later
        if x["loss"] is None or y["loss"] is None or not abs(x["loss"] - y["loss"]) <= limit:
            sys.exit(f"step {x['step']}: the losses are {x['loss']} and {y['loss']}, {args.dtype} allows {limit}")
        worst = max(worst, abs(x["loss"] - y["loss"]))
    if not b[-1]["loss"] < b[0]["loss"] - later:
        sys.exit(f"nothing was learnt: the loss is {b[0]['loss']} at the first step, {b[-1]['loss']} at the last")
    print(f"{len(a)} steps, loss {b[0]['loss']:.4f} to {b[-1]['loss']:.4f}, at most {worst:.2e} apart")


# ---------------------------------------------------------------- setting
def setting(args):
    known = {**vars(args)}
    file = known.pop("file")
    known.pop("run")
    if known["peak"] is None:
        known["peak"] = next((peak for name, peak in PEAKS if name in args.gpu), None)
    known["parameters"], known["flops_a_token"] = parameters(args), flops_a_token(args)
    Path(file).write_text(json.dumps(known, indent=1) + "\n")


def block_weights(args):
    head = args.dim // args.heads
    return 2 * args.dim * args.dim + 2 * args.dim * head * args.kv_heads + 3 * args.dim * args.ffn


def parameters(args):
    norms = (2 * args.layers + 1) * args.dim
    return 2 * args.vocab * args.dim + args.layers * block_weights(args) + norms


def flops_a_token(args):
    """6 N + 6 L S d: two for each multiplication and addition, once in the forward and twice in the backward. N are the
    weights that are multiplied, so not those of the input embedding; of attention's scores and sums the causal half
    counts; recomputation does not count."""
    weights = args.layers * block_weights(args) + args.vocab * args.dim
    return 6 * weights + 6 * args.layers * args.seq * args.dim


# ---------------------------------------------------------------- results
def union(spans):
    """Sorted intervals that do not overlap."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def intersection(a, b):
    """Length of what two unions have in common."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(0.0, min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return total


def overlap(trace):
    """Of the time in which a rank's collectives run, the share in which it computes. Whole-model spans lie around those of
    the units and do not count."""
    communicating, hidden = 0.0, 0.0
    events = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    for rank in {event["pid"] for event in events}:
        of = [(e["tid"], e["name"], (e["ts"], e["ts"] + e["dur"])) for e in events if e["pid"] == rank]
        compute = union(span for lane, name, span in of if lane == 0 and not name.startswith("model "))
        collectives = union(span for lane, _, span in of if lane in COLLECTIVES)
        communicating += sum(end - start for start, end in collectives)
        hidden += intersection(collectives, compute)
    return {"communication_ms": communicating / 1e3, "hidden": hidden / communicating if communicating else None}


def accounted(summary):
    """Of the rank that holds most: bytes at the peak of each category, and what the layout says."""
    ranks = (summary or {}).get("memory") or []
    sums = [[sum(line[key] for line in rank["bytes"]) for key in ("peak", "formula")] for rank in ranks]
    return max(sums, default=[None, None])


def watched(path):
    """MiB that the GPU had in use at most, less those before."""
    if not path.exists():
        return None
    used = [int(line) for line in path.read_text().split() if line.isdigit()]
    return max(used) - used[0] if used else None


def measure(folder, name, known):
    steps, summary = read_steps(folder / f"{name}.jsonl")
    gpus = int(name.rsplit("-", 1)[1]) if name.rsplit("-", 1)[1].isdigit() else 1
    times = [line["step_ms"] for line in steps[known["warmup"]:]]
    if not times:
        raise ValueError(f"{len(steps)} steps")
    ms = statistics.median(times)
    tokens = gpus * known["batch"] * known["seq"]
    tflops = known["flops_a_token"] * tokens / gpus / ms / 1e9
    peak, formula = accounted(summary)
    return {
        "name": name, "gpus": gpus, "steps": len(times), "step_ms": ms, "fastest_ms": min(times), "slowest_ms": max(times),
        "tokens_per_s": tokens / ms * 1e3, "tflops_a_gpu": tflops, "mfu": tflops / known["peak"] if known["peak"] else None,
        "peak_bytes": peak, "formula_bytes": formula, "gpu_mib": watched(folder / f"{name}.memory"),
        "first_loss": steps[0]["loss"], "last_loss": steps[-1]["loss"],
    }


def show(value, text):
    return "" if value is None else text.format(value)


def results(args):
    folder = Path(args.folder)
    known = json.loads((folder / "setting.json").read_text())
    runs, problems = {}, []
    names = [path.stem for path in sorted(folder.glob("*.jsonl")) if path.stem.split("-")[0] in ("ours", "fsdp2")]
    for name in names:
        try:
            runs[name] = measure(folder, name, known)
        except (ValueError, KeyError, json.JSONDecodeError) as error:
            problems.append(f"{name} has no results: {error}")
    for path in sorted(folder.glob("trace-*.json")):
        try:
            share = overlap(json.loads(path.read_text()))
        except (ValueError, KeyError) as error:
            problems.append(f"{path.name}: {error}")
            continue
        runs.setdefault(path.stem.replace("trace", "ours", 1), {}).update(share)
    ratio = lambda a, b: runs[a]["step_ms"] / runs[b]["step_ms"] if {a, b} <= {*runs} else None
    everywhere = f"{max((run['gpus'] for run in runs.values() if 'gpus' in run), default=1)}"
    ratios = {
        "FSDP2's step over ours": ratio("fsdp2-1", "ours-1"),
        "the step of FSDP2 with compiled blocks over ours": ratio("fsdp2-compiled-1", "ours-1"),
        "our step without CUDA graphs over that with them": ratio("ours-1", "ours-graph-1"),
    }
    if everywhere != "1":
        ratios[f"the same on {everywhere} GPUs"] = ratio(f"fsdp2-{everywhere}", f"ours-{everywhere}")
    ratios = {name: value for name, value in ratios.items() if value is not None}
    (folder / "results.json").write_text(
        json.dumps({"setting": known, "runs": runs, "ratios": ratios, "problems": problems}, indent=1) + "\n")

    lines = [
        f"{known['gpu']}, driver {known['driver']}, CUDA {known['cuda']}, commit {known['commit']}. "
        f"{known['parameters'] / 1e6:,.0f} million parameters (dim {known['dim']}, {known['layers']} layers, {known['heads']} and "
        f"{known['kv_heads']} heads, ffn {known['ffn']}, vocabulary {known['vocab']}), bf16 with f32 main weights, "
        f"{known['batch']} sequences of {known['seq']} tokens a GPU{', recomputed' if known['recompute'] else ''}; medians.",
        "",
        "| run | step ms | tokens/s | TFLOP/s a GPU | MFU | GiB of the formula | GiB of the GPU | communication hidden |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, run in runs.items():
        if "step_ms" not in run:
            continue
        of_formula = ""
        if run["formula_bytes"]:
            of_formula = f"{run['peak_bytes'] / 2**30:.2f} of {run['formula_bytes'] / 2**30:.2f}"
        gpu = None if run["gpu_mib"] is None else run["gpu_mib"] / 1024
        cells = [name, f"{run['step_ms']:.1f}", f"{run['tokens_per_s']:,.0f}", f"{run['tflops_a_gpu']:.1f}",
                 show(run["mfu"], "{:.1%}"), of_formula, show(gpu, "{:.1f}"), show(run.get("hidden"), "{:.0%}")]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *(f"- {name}: {value:.2f}" for name, value in ratios.items()), *(f"- {problem}" for problem in problems)]
    (folder / "results.md").write_text("\n".join(lines) + "\n")
    if problems or not runs:
        sys.exit("; ".join(problems) or "there is no run")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    command = commands.add_parser("tokens")
    command.add_argument("file")
    sizes(command)
    command.add_argument("--steps", type=int, required=True)
    command.set_defaults(run=tokens)

    command = commands.add_parser("losses")
    command.add_argument("a")
    command.add_argument("b")
    command.add_argument("--dtype", choices=TOLERANCE, required=True)
    command.set_defaults(run=losses)

    command = commands.add_parser("setting")
    command.add_argument("file")
    sizes(command)
    command.add_argument("--recompute", action="store_true")
    command.add_argument("--warmup", type=int, required=True)
    command.add_argument("--peak", type=float, help="dense bf16 TFLOP/s of the card")
    for name in ("gpu", "driver", "cuda", "commit"):
        command.add_argument(f"--{name}", required=True)
    command.set_defaults(run=setting)

    command = commands.add_parser("results")
    command.add_argument("folder")
    command.set_defaults(run=results)

    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()
