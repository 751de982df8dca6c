#!/usr/bin/env python3
"""Removes each wait and each event of what runs on CUDA streams, one at a time, and sees that a test on the fake driver
fails: of the pipelines and their pool, of ranks that share a device, of devices, of NCCL.

    python3 tests/fake-cuda/mutants.py [FILTER]

Works on a copy of the repository under target/; takes minutes. Prints a line for each mutant and fails if one survives.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COPY = ROOT / "target" / "mutants"
# Of its own: cargo takes what is built from the copy for the repository's.
BUILT = ROOT / "target" / "mutants-built"
RUNTIME = Path("fsdp-runtime/src")
COMM = Path("fsdp-comm/src")
MAIN = Path("tests/fake-cuda/tests/pipelines")

# Compiled into the test from their own source: only the test is built again for their mutants.
IN_TEST = {
    RUNTIME / f"engine/schedule/{name}.rs": f"mutant/schedule/{name}.rs"
    for name in ["all_gather", "weights", "grad_reduce", "grads"]
} | {
    RUNTIME / "memory/pool.rs": "mutant/pool.rs",
}
IN_COMM = [
    COMM / "comm/local/shared_device.rs",
    COMM / "device/cuda/driver/block.rs",
    COMM / "device/cuda/driver/stream.rs",
]
IN_NCCL = [
    COMM / "comm/nccl/mod.rs",
    COMM / "comm/nccl/flight.rs",
    COMM / "comm/nccl/launch.rs",
    COMM / "comm/nccl/scratch.rs",
]

PASSED = 'crate::device::Stream::record(&*crate::device::cpu::ComputeStream::new("passed"))'
MUTATIONS = [
    # A stream does not wait.
    (re.compile(r"^(\s*).*\.wait\(.*\)\?;$"), r"\1"),
    (re.compile(r"^(\s*)stream\.wait\(.*\)$"), r"\1Ok(())"),
    (re.compile(r"^(.*)\|event\| resources\.streams\.compute\.wait\(event\)\)$"), r"\1|_| Ok(()))"),
    (re.compile(r"^(.*)self\.enqueue\(.waiting for an event.*\)(,)$"), r"\1Ok(())\2"),
    # An event tells nothing.
    (re.compile(r"^(?!.*\.wait\()(.*[ (])[\w.]+\.record\(\)(.*)$"), rf"\1{PASSED}\2"),
    # The host does not wait: for a device, or until NCCL has done with a call.
    (re.compile(r"^(\s*).*\.synchronize\(\)\)?\?;$"), r"\1"),
    (re.compile(r"^(\s*)(?:comm|self)\.settle\(.*\)(\??;?)$"), lambda found: found[1] + ("" if found[2] else "Ok(())")),
    (re.compile(r"^(\s*.* => )self\.comm\.settle\(.*\)(,)$"), r"\1Ok(())\2"),
    # What a stream uses is not noted.
    (re.compile(r"^(\s*)note_use\(.*$"), r"\1Ok(())"),
    (re.compile(r"^(\s*)turn\.scratch\.used_until\(.*$"), r"\1"),
]


def mutants(text):
    """Line number and mutated text, without those in the file's unit tests."""
    lines = text.split("\n")
    end = lines.index("#[cfg(test)]") if "#[cfg(test)]" in lines else len(lines)
    for number, line in enumerate(lines[:end]):
        for pattern, replacement in MUTATIONS:
            changed = pattern.sub(replacement, line)
            if changed != line:
                yield number + 1, line.strip(), "\n".join(lines[:number] + [changed] + lines[number + 1 :])
                break


def copy():
    if not BUILT.exists() and (ROOT / "target/debug").exists():
        skipped = shutil.ignore_patterns("incremental", "examples")
        shutil.copytree(ROOT / "target/debug", BUILT / "debug", symlinks=True, ignore=skipped)
    shutil.rmtree(COPY, ignore_errors=True)
    files = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True)
    for name in filter(None, files.stdout.split("\0")):
        target = COPY / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target)
    mutant = COPY / MAIN / "mutant"
    shutil.copytree(COPY / RUNTIME / "engine/schedule", mutant / "schedule")
    shutil.copy2(COPY / RUNTIME / "memory/pool.rs", mutant / "pool.rs")
    for name, old, new in [
        ("main.rs", "../../../../fsdp-runtime/src/engine/schedule/mod.rs", "mutant/schedule/mod.rs"),
        ("memory.rs", "../../../../fsdp-runtime/src/memory/pool.rs", "mutant/pool.rs"),
    ]:
        path = COPY / MAIN / name
        text = path.read_text()
        assert old in text, (name, old)
        path.write_text(text.replace(old, new))


def passes(tests):
    """True if the tests pass, False if one fails; an error if a mutant does not compile."""
    return all(run(test) for test in tests)


def run(test):
    command = ["cargo", "test", "--workspace", "--no-run", "--target-dir", BUILT, "--test", test]
    build = subprocess.run(command, cwd=COPY, capture_output=True, text=True)
    if build.returncode:
        sys.exit(f"a mutant does not compile:\n{build.stderr}")
    program = re.search(rf"tests/{test}/main.rs \((\S+)\)", build.stderr)[1]
    # The unit tests of what is compiled in are no concern here.
    command = [program, "--skip", "memory::pool", "--skip", "schedule::"]
    try:
        return subprocess.run(command, cwd=COPY / "tests/fake-cuda", capture_output=True, timeout=300).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def main():
    wanted = sys.argv[1] if len(sys.argv) > 1 else ""
    copy()
    if not passes(["communicator", "pipelines", "devices"]):
        sys.exit("the tests fail without a mutant")
    survivors, count = [], 0
    for source in [*IN_TEST, *IN_COMM, *IN_NCCL]:
        target = COPY / MAIN / IN_TEST[source] if source in IN_TEST else COPY / source
        original = target.read_text()
        tests = ["communicator", "pipelines"] if source in IN_NCCL else ["pipelines", "devices", "communicator"]
        for number, line, text in mutants(original):
            where = f"{source}:{number}"
            if wanted not in where:
                continue
            target.write_text(text)
            count += 1
            survived = passes(tests)
            print(f"{'SURVIVED' if survived else 'found':8}  {where}: {line}", flush=True)
            if survived:
                survivors.append(where)
        target.write_text(original)
    print(f"{count - len(survivors)} of {count} mutants were found")
    sys.exit(1 if survivors else 0)


main()
