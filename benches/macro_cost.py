#!/usr/bin/env python3
"""Times what `#[derive(FsdpUnit)]` costs a build, beside `#[derive(serde::Serialize)]` on the same structs.

    python3 benches/macro_cost.py              # 500 structs of 10 fields, 9 rounds
    python3 benches/macro_cost.py --structs 100 --rounds 5

Writes a throwaway workspace under target/macro_cost: three crates that hold the same structs, one with each derive and one with
none, above one crate with the field type. Each round touches and checks each of the three in turn, so that a slow moment of the
machine falls on all of them. A figure is the median over the rounds of the wall time of `cargo check`, in which only that one crate
is compiled, whole (without incremental compilation) or after a touch (with it).
"""

import argparse
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROJECT = ROOT / "target" / "macro_cost"

DERIVES = {
    "FsdpUnit": ("#[derive(fsdp::FsdpUnit)]", "fsdp"),
    "Serialize": ("#[derive(serde::Serialize)]", "serde"),
    "no derive": ("", None),
}

# What a model's struct is made of; `{attr}` is the derive's own attribute.
FIELDS = [
    '{attr}(rename = "self_attn.q_proj")] q: Leaf,',
    "k: Leaf,",
    "v: Leaf,",
    '{attr}(rename = "mlp.gate")] gate: Leaf,',
    "norm: Option<Leaf>,",
    "layers: Vec<Leaf>,",
    "boxed: Box<Leaf>,",
    "pair: [Leaf; 2],",
    "heads: usize,",
    "eps: f64,",
]

LEAF = """
#[derive(fsdp::FsdpUnit)]
pub struct Leaf(pub fsdp::Param);

impl serde::Serialize for Leaf {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_unit()
    }
}
"""


def crate(name):
    return name.lower().replace(" ", "_")


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def manifest(name, leaf):
    return (
        f'[package]\nname = "{name}"\nversion = "0.0.0"\nedition = "2024"\n\n[dependencies]\n'
        f'fsdp = {{ path = "{ROOT}" }}\nserde = {{ version = "1", features = ["derive"] }}\n{leaf}'
    )


def write_project(structs, fields):
    members = ["leaf", *map(crate, DERIVES)]
    write(PROJECT / "Cargo.toml", f'[workspace]\nresolver = "3"\nmembers = {members}\n'.replace("'", '"'))
    shutil.copy(ROOT / "Cargo.lock", PROJECT / "Cargo.lock")
    write(PROJECT / "leaf/Cargo.toml", manifest("leaf", ""))
    write(PROJECT / "leaf/src/lib.rs", LEAF)
    for name, (derive, attribute) in DERIVES.items():
        source = ["#![allow(dead_code)]", "use leaf::Leaf;"]
        for index in range(structs):
            source += [derive, f"pub struct Module{index} {{"]
            for position in range(fields):
                field = FIELDS[position % len(FIELDS)]
                if attribute:
                    field = field.replace("{attr}", f"#[{attribute}")
                else:
                    field = field.split("] ", 1)[-1] if "{attr}" in field else field
                declared, rest = field.rsplit(": ", 1)
                unique = "" if position < len(FIELDS) else f"_{position}"
                source.append(f"    {declared}{unique}: {rest}")
            source.append("}")
        write(PROJECT / crate(name) / "Cargo.toml", manifest(crate(name), 'leaf = { path = "../leaf" }\n'))
        write(PROJECT / crate(name) / "src/lib.rs", "\n".join(source) + "\n")


def check(name, incremental):
    """Seconds of one `cargo check` of the crate."""
    (PROJECT / crate(name) / "src/lib.rs").touch()
    start = time.perf_counter()
    done = subprocess.run(
        ["cargo", "check", "--quiet", "--package", crate(name)],
        cwd=PROJECT,
        env={**os.environ, "CARGO_INCREMENTAL": str(int(incremental)), "CARGO_TARGET_DIR": str(PROJECT / "target")},
        capture_output=True,
        text=True,
    )
    seconds = time.perf_counter() - start
    if done.returncode:
        raise SystemExit(done.stderr)
    return seconds


def main():
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--structs", type=int, default=500)
    arguments.add_argument("--fields", type=int, default=10)
    arguments.add_argument("--rounds", type=int, default=9)
    options = arguments.parse_args()
    write_project(options.structs, options.fields)
    print(f"{options.structs} structs of {options.fields} fields, median of {options.rounds} rounds")
    for incremental in (False, True):
        for name in DERIVES:
            check(name, incremental)  # The dependencies, and the first state of the cache.
        rounds = [{name: check(name, incremental) for name in DERIVES} for _ in range(options.rounds)]
        median = {name: statistics.median(round[name] for round in rounds) for name in DERIVES}
        ratio = statistics.median(round["FsdpUnit"] / round["Serialize"] for round in rounds)
        figures = ", ".join(f"{name} {seconds:.3f} s" for name, seconds in median.items())
        print(f"{'after a touch' if incremental else 'whole'}: {figures}; FsdpUnit / Serialize {ratio:.2f}")


if __name__ == "__main__":
    main()
