#!/usr/bin/env python3
"""Whether the crates can be published: their manifests, the Rust version that they need, what is packed, and their dependencies.

Needs nothing but cargo. `cargo deny` is run too where it is installed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
# crates.io takes no more.
MOST_KEYWORDS = 5
# Tracked files that nobody needs to build a crate.
LEFT_OUT = ("docs/", "tests/", "benches/", "examples/")
LEFT_OUT += ("ARCHITECTURE.md", "CONTRIBUTING.md", "deny.toml", "rust-toolchain.toml", "rustfmt.toml")
# What cargo says of targets that are left out on purpose.
EXPECTED = re.compile(r"warning: ignoring (test|example|benchmark) ")


def run(*command):
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def toolchain():
    return tomllib.loads((ROOT / "rust-toolchain.toml").read_text())["toolchain"]["channel"]


def check_manifest(package):
    """What is wrong with the manifest of a crate."""
    home = Path(package["manifest_path"]).parent
    for field in ("description", "license", "repository", "documentation", "readme", "keywords", "categories"):
        if not package.get(field):
            yield f"`{field}` is missing"
    if len(package["keywords"]) > MOST_KEYWORDS:
        yield f"{len(package['keywords'])} keywords: {MOST_KEYWORDS} are the most"
    for file in ("LICENSE-MIT", "LICENSE-APACHE", package.get("readme") or "README.md"):
        if not (home / file).is_file():
            yield f"there is no {file}"
    # The toolchain that tests everything is the oldest one that is promised.
    if not re.fullmatch(re.escape(package["rust_version"] or "none") + r"(\.\d+)?", toolchain()):
        yield f"rust-version is {package['rust_version']}, rust-toolchain.toml says {toolchain()}"
    if package["features"] and "rs" not in (package["metadata"] or {}).get("docs", {}):
        yield "it has features, and no [package.metadata.docs.rs]"
    for dependency in package["dependencies"]:
        # What is only for tests is left out when it has no version, and need not be published before.
        if dependency["kind"] != "dev" and dependency.get("path") and dependency["req"] == "*":
            yield f"`{dependency['name']}` has a path and no version"
        if dependency["kind"] == "dev" and dependency.get("path") and dependency["req"] != "*":
            if depends_on(dependency["name"], package["name"]):
                yield f"`{dependency['name']}` depends on it: leave its version out, or neither can be published first"


def depends_on(name, other, seen=None):
    """Whether a crate of the workspace is built with another one."""
    seen = seen if seen is not None else set()
    if name == other:
        return True
    if name in seen or name not in PACKAGES:
        return False
    seen.add(name)
    needed = (d["name"] for d in PACKAGES[name]["dependencies"] if d["kind"] != "dev" and d.get("path"))
    return any(depends_on(needed_name, other, seen) for needed_name in needed)


def check_files(package):
    """Tracked files of a crate that are not in its package."""
    home = Path(package["manifest_path"]).parent
    packed = set(run("cargo", "package", "--list", "--allow-dirty", "--offline", "-p", package["name"]).stdout.split("\n"))
    tracked = subprocess.run(["git", "ls-files", "."], cwd=home, capture_output=True, text=True).stdout.split("\n")
    nested = {
        os.path.relpath(Path(other["manifest_path"]).parent, home) + "/"
        for other in EVERY_PACKAGE
        if Path(other["manifest_path"]).parent.is_relative_to(home) and other["name"] != package["name"]
    }
    for file in tracked:
        if file and not file.startswith((*nested, *LEFT_OUT, ".")) and file not in packed:
            yield f"{file} is not packed"


def check_rust_versions():
    """Dependencies that need a newer Rust than is promised."""
    platform = ["--filter-platform", "x86_64-unknown-linux-gnu"]
    locked = run("cargo", "metadata", "--locked", "--format-version", "1", *platform)
    if locked.returncode != 0:
        yield f"cargo metadata: {locked.stderr.strip()}"
        return
    number = lambda version: tuple(int(part) for part in version.split(".")[:2])
    for package in json.loads(locked.stdout)["packages"]:
        if package["rust_version"] and number(package["rust_version"]) > number(toolchain()):
            yield f"{package['name']} {package['version']} needs Rust {package['rust_version']}"


def check_features():
    """Features that the examples are built with by `cargo run`, and not by `cargo test --workspace`: all above would be built twice."""
    tree = ["cargo", "tree", "--offline", "--prefix", "none", "--format", "{p} [{f}]", "--edges", "normal,build,dev"]
    resolved = lambda *more: {line.removesuffix(" (*)") for line in run(*tree, *more).stdout.split("\n")}
    for line in sorted(resolved() - resolved("--workspace")):
        yield f"tests/support/Cargo.toml does not add the workspace's features of {line.split(' [')[0]}"


METADATA = json.loads(run("cargo", "metadata", "--no-deps", "--format-version", "1").stdout)
EVERY_PACKAGE = METADATA["packages"]
# `publish` is null where a crate may be published anywhere.
PACKAGES = {package["name"]: package for package in EVERY_PACKAGE if package["publish"] is None}


def main():
    wrong = []
    for name, package in PACKAGES.items():
        wrong += [f"{name}: {problem}" for check in (check_manifest, check_files) for problem in check(package)]
    wrong += check_rust_versions()
    wrong += check_features()
    kept = [argument for package in EVERY_PACKAGE if package["publish"] is not None for argument in ("--exclude", package["name"])]
    packed = run("cargo", "package", "--workspace", "--no-verify", "--allow-dirty", *kept)
    wrong += [f"cargo package: {line}" for line in packed.stderr.split("\n") if line.startswith("warning") and not EXPECTED.match(line)]
    if packed.returncode != 0:
        wrong.append("cargo package: " + packed.stderr[packed.stderr.find("error") :].strip())
    if shutil.which("cargo-deny"):
        # Advisories come from the network: a job of their own.
        denied = run("cargo", "deny", "check", "licenses", "bans", "sources")
        wrong += [f"cargo deny: {line}" for line in denied.stderr.split("\n") if line and denied.returncode != 0]
    else:
        print("cargo-deny is not installed: licences and sources of dependencies are not checked (deny.toml)")
    for line in wrong:
        print(line)
    if wrong:
        sys.exit(f"{len(wrong)} things keep the crates from being published")
    print(f"{len(PACKAGES)} crates can be published: {', '.join(sorted(PACKAGES))}")


if __name__ == "__main__":
    main()
