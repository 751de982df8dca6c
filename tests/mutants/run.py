#!/usr/bin/env python3
"""Plants the faults of `faults.py` in the crates below the facade, one at a time, and sees that the tests find each.

    python3 tests/mutants/run.py [--list] [--check] [--plant] [FILTER ..]

All faults are built into one copy of the repository (`target/mutants/source`), each behind a question of the environment
variable `FSDP_FAULT`, so there is one build; without the variable the tests must pass. A fault is found if at least two tests of
the short suite fail or the suite ends early. Prints a line for each fault and fails if one is not found. `--list` prints the names,
`--check` only sees that each fault has its place and that the tests of `found.json` exist, `--plant` only makes the copy. A `FILTER`
is a part of a name or of a file.

`found.json` names for each fault the tests that found it when it was last run. They are tried first, and where two of them still
fail no others are run. It is written anew after each fault: a new fault needs no entry.
"""

import json
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
# The tests that have found each fault, which are tried first the next time.
FOUND = ROOT / "tests/mutants/found.json"
# Where faults are planted.
CRATES = ["fsdp-layout", "fsdp-comm", "fsdp-runtime"]
# The short suite, the binaries that find most first.
TESTS = ["engine", "checkpoint", "layout_properties", "row_alignment_against_megatron", "local_communicator", "combinations"]
# A fault may make a rank wait: for that long.
ENVIRONMENT = {"FSDP_TIMEOUT_SECS": "10", "RUST_BACKTRACE": "0", "CANDLE_NUM_THREADS": "1"}
LIMIT = 300
WANTED = 2
# Not run: it reads the sources, with the faults in them.
SKIPPED = ["--skip", "module_graph::"]
# Of a program that shows a fault by ending early or late.
BAD_END = "it does not end well"

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


class NoPlace(Exception):
    """A fault whose place is not there, or is not the only one."""


def planted(text, fault):
    """`text` with the fault in it."""
    start = 0
    if fault.after:
        if fault.after not in text:
            raise NoPlace(f"{fault.file}: no place for `{fault.name}`, as there is no: {fault.after}")
        start = text.index(fault.after) + len(fault.after)
    elif text.count(fault.old) != 1:
        raise NoPlace(f"{fault.file}: {text.count(fault.old)} places for `{fault.name}`, expected 1: {fault.old}")
    at = text.find(fault.old, start)
    if at < 0:
        raise NoPlace(f"{fault.file}: no place for `{fault.name}`: {fault.old}")
    new = fault.new.replace("FAULT", f'crate::planted::is("{fault.name}")')
    return text[:at] + new + text[at + len(fault.old) :]


def sources():
    """The files of the repository by their paths, with all faults in them."""
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    texts = {name: (ROOT / name).read_bytes() for name in files.stdout.split("\0") if name and (ROOT / name).is_file()}
    names = [fault.name for fault in FAULTS]
    wrong = [f"two faults have the name `{name}`" for name in sorted(set(names)) if names.count(name) > 1]
    for fault in FAULTS:
        places = [name for name in (fault.file, *(f"{crate}/src/{fault.file}" for crate in CRATES)) if name in texts]
        if len(places) != 1:
            wrong.append(f"{fault.file}: {len(places)} such files for `{fault.name}`, expected 1")
            continue
        try:
            texts[places[0]] = planted(texts[places[0]].decode(), fault).encode()
        except NoPlace as error:
            wrong.append(str(error))
    if wrong:
        sys.exit("\n".join([*wrong, "tests/mutants/faults.py has to follow the code"]))
    for lib in (f"{crate}/src/lib.rs" for crate in CRATES):
        if lib in texts:
            texts[lib] += MODULE.encode()
    return texts


def check_found():
    """Sees that `found.json` is of the faults and tests that there are."""
    listed = subprocess.run(["git", "ls-files", "*.rs"], cwd=ROOT, capture_output=True, check=True, text=True).stdout.split()
    tests = {name for path in listed if "tests/" in path for name in re.findall(r"fn (\w+)\(", (ROOT / path).read_text())}
    found = json.loads(FOUND.read_text()) if FOUND.exists() else {}
    names = [fault.name for fault in FAULTS]
    wrong = [f"there is no fault `{name}`" for name in found if name not in names]
    gone = [(name, test) for name in found for test in found[name] if test.split("::")[-1] not in tests]
    wrong += [f"there is no test {test}, which found `{name}`" for name, test in gone]
    if wrong:
        sys.exit("\n".join([*wrong, "tests/mutants/found.json has to follow: `python3 tests/mutants/run.py FAULT` renews it"]))


def copy():
    """Brings the copy up to date, files that are the same untouched, so that cargo builds only what has changed."""
    texts = sources()
    for stale in (path for path in COPY.rglob("*") if path.is_file() and str(path.relative_to(COPY)) not in texts):
        stale.unlink()
    for name, content in texts.items():
        target = COPY / name
        if not target.exists() or target.read_bytes() != content:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
            shutil.copymode(ROOT / name, target)


def copy_built(source, target):
    """Copies what cargo has built. Compilers and linkers replace libraries and programs whole, so links to them do."""
    if Path(source).parent.name == "deps" and not source.endswith(".d"):
        os.link(source, target)
    else:
        shutil.copy2(source, target)


def build():
    """The test programs by name, each with the folder that it runs in."""
    selected = [argument for test in TESTS for argument in ("--test", test)]
    command = ["cargo", "test", "--workspace", "--no-run", "--message-format", "json-render-diagnostics"]
    if not BUILT.exists() and (ROOT / "target/debug").exists():
        BUILT.mkdir(parents=True)
        kept = shutil.ignore_patterns("incremental", "examples")
        shutil.copytree(ROOT / "target/debug", BUILT / "debug", symlinks=True, ignore=kept, copy_function=copy_built)
    built = subprocess.run([*command, "--target-dir", str(BUILT), *selected], cwd=COPY, capture_output=True, text=True)
    if built.returncode:
        sys.exit(f"the planted faults do not compile:\n{built.stderr}")
    programs = {}
    for message in map(json.loads, built.stdout.splitlines()):
        if message["reason"] == "compiler-artifact" and message["target"]["kind"] == ["test"] and message["executable"]:
            programs[message["target"]["name"]] = (message["executable"], Path(message["manifest_path"]).parent)
    if missing := [test for test in TESTS if test not in programs]:
        sys.exit(f"no program for the tests {missing}, but for {sorted(programs)}")
    return {test: programs[test] for test in TESTS}


def failures(program, folder, fault, filters=()):
    """Names of the tests that fail, of all or of those that `filters` choose."""
    environment = {**os.environ, **ENVIRONMENT}
    environment.pop("FSDP_FAULT", None)
    if fault:
        environment["FSDP_FAULT"] = fault
    command = [program, *filters, *SKIPPED]
    try:
        run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, errors="replace", timeout=LIMIT)
    except subprocess.TimeoutExpired as expired:
        output = (expired.stdout or b"").decode(errors="replace")
        return re.findall(r"^test (\S+) \.\.\. FAILED", output, re.M) + [f"({BAD_END}: {LIMIT} s)"]
    failed = re.findall(r"^test (\S+) \.\.\. FAILED", run.stdout, re.M)
    if run.returncode and not re.search(r"^test result: ", run.stdout, re.M):
        failed.append(f"({BAD_END}: status {run.returncode})")
    return failed


class Search:
    """Looks for tests that find faults, and remembers them for the next time."""

    def __init__(self, programs, chosen):
        self.programs = programs
        self.found = json.loads(FOUND.read_text()) if FOUND.exists() else {}
        # What fails without a fault finds none.
        self.broken = set()
        self.passed = set()
        names = [name for fault in chosen for name in self.found.get(fault.name, [])]
        self.known = {test: sorted({name for name in names if name.startswith(f"{test}::")}) for test in programs}

    def rounds(self, fault):
        """What is run for a fault until enough tests fail: a program, some of its tests or all, and which must pass without it."""
        for test, known in self.known.items():
            names = tuple(name for name in self.found.get(fault.name, []) if name.startswith(f"{test}::"))
            if names:
                yield test, names, tuple(known)
        order = ["checkpoint", "engine"] if fault.file.startswith("checkpoint") else list(self.programs)
        first = tuple(f"{order[0]}::{name}::" for name in fault.first)
        yield order[0], first, first
        for test in dict.fromkeys([*order, *self.programs]):
            yield test, (), ()

    def failures(self, test, fault, names):
        """Names of the tests of a program that fail, of all or of those that `names` choose."""
        failed = failures(*self.programs[test], fault, [name.removeprefix(f"{test}::") for name in names])
        return [f"{test}::{name}" for name in failed]

    def of(self, fault):
        """The tests that fail with this fault, as many as are wanted if there are."""
        failed = []
        for test, names, sound in self.rounds(fault):
            if (test, sound) not in self.passed:
                self.passed.add((test, sound))
                broken = self.failures(test, None, sound)
                self.broken.update(broken)
                print(*(f"FAILS WITHOUT A FAULT: {name}" for name in broken), sep="\n", end="\n" if broken else "", flush=True)
            # Those that were tried before are run again among others.
            failed = dict.fromkeys([*failed, *self.failures(test, fault.name, names)])
            failed = [name for name in failed if name not in self.broken]
            if len(failed) >= WANTED or BAD_END in "".join(failed):
                break
        self.found[fault.name] = [name for name in failed if "(" not in name][: 2 * WANTED]
        in_order = {fault.name: self.found[fault.name] for fault in FAULTS if fault.name in self.found}
        FOUND.write_text(json.dumps(in_order, indent=2) + "\n")
        return failed


def main():
    arguments = [argument for argument in sys.argv[1:] if not argument.startswith("--")]
    wanted = arguments or [""]
    chosen = [fault for fault in FAULTS if any(part in fault.name or part in fault.file for part in wanted)]
    if "--list" in sys.argv:
        print(*(f"{fault.file}: {fault.name}" for fault in chosen), sep="\n")
        return
    if "--check" in sys.argv:
        sources()
        check_found()
        return
    begun = time.monotonic()
    copy()
    if "--plant" in sys.argv:
        return
    programs = build()
    print(f"built in {time.monotonic() - begun:.0f} s", flush=True)
    search, missed = Search(programs, chosen), []
    for fault in chosen:
        failed = search.of(fault)
        found = len(failed) >= WANTED or BAD_END in "".join(failed)
        if not found:
            missed.append(fault.name)
        verdict = f"found by {len(failed)}" if found else f"MISSED ({len(failed)})"
        print(f"{verdict:14} {fault.file}: {fault.name} [{', '.join(failed[:3])}]", flush=True)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} faults found, in {(time.monotonic() - begun) / 60:.0f} min")
    sys.exit(1 if missed or search.broken else 0)


main()
