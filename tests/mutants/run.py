#!/usr/bin/env python3
"""Plants the faults of `faults.py` in the crates below the facade, one at a time, and sees that the tests find each.

    python3 tests/mutants/run.py [--list] [--plant] [FILTER]

All faults are built into one copy of the repository (`target/mutants/source`), each behind a question of the environment
variable `FSDP_FAULT`, so there is one build; without the variable the tests must pass. A fault is found if at least two tests of
the short suite fail or the suite ends early. Prints a line for each fault and fails if one is not found. `--list` prints the names,
`--plant` only makes the copy. `FILTER` is a part of a name or of a file.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]
COPY = ROOT / "target/mutants/source"
# Of its own: cargo takes what is built from the copy for the repository's.
BUILT = ROOT / "target/mutants/built"
# Where faults are planted, and the tests of their own that are in the short suite.
CRATES = {
    "fsdp-layout": ["layout_properties", "row_alignment_against_megatron"],
    "fsdp-comm": ["local_communicator"],
    "fsdp-runtime": [],
}
# The short suite, the binaries that find most first.
TESTS = ["engine", "checkpoint", *(test for tests in CRATES.values() for test in tests), "combinations"]
# A fault may make a rank wait: for that long.
ENVIRONMENT = {"FSDP_TIMEOUT_SECS": "10", "RUST_BACKTRACE": "0", "CANDLE_NUM_THREADS": "1"}
LIMIT = 300
WANTED = 2

MODULE = '''
/// Faults that the test of the tests plants.
pub(crate) mod planted {
    /// Whether this fault is the one that is asked for.
    pub(crate) fn is(fault: &str) -> bool {
        static ASKED: std::sync::OnceLock<Option<String>> = std::sync::OnceLock::new();
        ASKED.get_or_init(|| std::env::var("FSDP_FAULT").ok()).as_deref() == Some(fault)
    }
}
'''


def planted(text, fault):
    """`text` with the fault in it."""
    start = 0
    if fault.after and fault.after not in text:
        sys.exit(f"{fault.file}: no place for `{fault.name}`: {fault.after}")
    if fault.after:
        start = text.index(fault.after) + len(fault.after)
    elif text.count(fault.old) != 1:
        sys.exit(f"{fault.file}: {text.count(fault.old)} places for `{fault.name}`, expected 1: {fault.old}")
    at = text.find(fault.old, start)
    if at < 0:
        sys.exit(f"{fault.file}: no place for `{fault.name}`: {fault.old}")
    new = fault.new.replace("FAULT", f'crate::planted::is("{fault.name}")')
    return text[:at] + new + text[at + len(fault.old) :]


def copy():
    """Brings the copy up to date, files that are the same untouched, so that cargo builds only what has changed."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    texts = {name: (ROOT / name).read_bytes() for name in files.stdout.split("\0") if name and (ROOT / name).is_file()}
    for fault in FAULTS:
        places = [fault.file, *(f"{crate}/src/{fault.file}" for crate in CRATES)]
        names = [name for name in places if name in texts]
        if len(names) != 1:
            sys.exit(f"{fault.file}: the crates have {len(names)} such files, expected 1")
        texts[names[0]] = planted(texts[names[0]].decode(), fault).encode()
    for crate in CRATES:
        texts[f"{crate}/src/lib.rs"] += MODULE.encode()
    for stale in (path for path in COPY.rglob("*") if path.is_file() and str(path.relative_to(COPY)) not in texts):
        stale.unlink()
    for name, content in texts.items():
        target = COPY / name
        if not target.exists() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            shutil.copymode(ROOT / name, target)


def build():
    """The test programs, by name."""
    selected = [argument for test in TESTS for argument in ("--test", test)]
    command = ["cargo", "test", "--workspace", "--no-run", "--target-dir", str(BUILT), *selected]
    if not BUILT.exists() and (ROOT / "target/debug").exists():
        BUILT.mkdir(parents=True)
        kept = shutil.ignore_patterns("incremental", "examples")
        shutil.copytree(ROOT / "target/debug", BUILT / "debug", symlinks=True, ignore=kept)
    built = subprocess.run(command, cwd=COPY, capture_output=True, text=True)
    if built.returncode:
        sys.exit(f"the planted faults do not compile:\n{built.stderr}")
    programs = re.findall(r"Executable (\S+) \((\S+)\)", built.stderr)
    programs = {re.sub(r"/main$", "", Path(source).with_suffix("").as_posix()).split("/")[-1]: program for source, program in programs}
    missing = [test for test in TESTS if test not in programs]
    if missing:
        sys.exit(f"no program for the tests {missing}, but for {sorted(programs)}")
    folders = {test: COPY / next((crate for crate, tests in CRATES.items() if test in tests), "") for test in TESTS}
    return {test: (BUILT.parent / programs[test] if not Path(programs[test]).is_absolute() else Path(programs[test]), folders[test]) for test in TESTS}


def failures(program, folder, fault, filters=()):
    """Names of the tests that fail, of all or of those that `filters` choose."""
    environment = {**os.environ, **ENVIRONMENT}
    environment.pop("FSDP_FAULT", None)
    if fault:
        environment["FSDP_FAULT"] = fault
    try:
        run = subprocess.run([program, *filters], cwd=folder, env=environment, capture_output=True, text=True, errors="replace", timeout=LIMIT)
    except subprocess.TimeoutExpired as expired:
        output = (expired.stdout or b"").decode(errors="replace")
        return re.findall(r"^test (\S+) \.\.\. FAILED", output, re.M) + ["(it does not end)", "(it does not end)"]
    failed = re.findall(r"^test (\S+) \.\.\. FAILED", run.stdout, re.M)
    if run.returncode and not re.search(r"^test result: ", run.stdout, re.M):
        failed += [f"(it ends with status {run.returncode})"] * 2
    return failed


def main():
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    wanted = arguments[0] if arguments else ""
    chosen = [fault for fault in FAULTS if wanted in fault.name or wanted in fault.file]
    if "--list" in sys.argv:
        print(*(f"{fault.file}: {fault.name}" for fault in chosen), sep="\n")
        return
    begun = time.monotonic()
    copy()
    if "--plant" in sys.argv:
        return
    programs = build()
    print(f"built in {time.monotonic() - begun:.0f} s", flush=True)
    for test, (program, folder) in programs.items():
        if failed := failures(program, folder, None):
            sys.exit(f"tests of `{test}` fail without a fault: {failed}")
    missed = []
    for fault in chosen:
        failed = []
        order = ["checkpoint", "engine"] if fault.file.startswith("checkpoint") else list(programs)
        rounds = [(order[0], fault.first), *((test, ()) for test in dict.fromkeys([*order, *programs]))]
        for test, filters in rounds:
            program, folder = programs[test]
            # Those that were tried first are run again among all.
            failed = [name for name in failed if not name.startswith(f"{test}::")]
            failed += [f"{test}::{name}" for name in failures(program, folder, fault.name, [f"{name}::" for name in filters])]
            if len(failed) >= WANTED:
                break
        if len(failed) < WANTED:
            missed.append(fault.name)
        verdict = f"found by {len(failed)}" if len(failed) >= WANTED else f"MISSED ({len(failed)})"
        print(f"{verdict:14} {fault.file}: {fault.name} [{', '.join(failed[:3])}]", flush=True)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults found, in {(time.monotonic() - begun) / 60:.0f} min")
    sys.exit(1 if missed else 0)


main()
