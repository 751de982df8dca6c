//! Modules are layers: the graph of their imports, made from the sources, has no cycle and no edge upwards, and
//! `docs/modules.md` draws it.
//!
//! `FSDP_BLESS=1 cargo test --workspace --test engine module_graph` writes the drawing anew.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// The crates whose modules are layers, lowest first.
const CRATES: [&str; 4] = ["fsdp-layout", "fsdp-comm", "fsdp-runtime", "fsdp-models"];

/// The crate whose modules the facade `fsdp` shows, by which the crates above it know them.
const SHOWN: usize = 2;

/// A module by its crate and its name. They are ordered as layers are.
type Module = (usize, usize);

struct Crate {
    /// Lowest first: in the order of their declarations.
    modules: Vec<String>,
    /// What `crate::name` is of names that are no module of the crate, by crate and name.
    names: BTreeMap<String, Vec<(usize, String)>>,
}

/// A file without comments and without its unit tests, which may import whatever they need.
pub fn code(path: &Path) -> String {
    let text = fs::read_to_string(path).unwrap();
    let text = text.split("#[cfg(test)]\nmod ").next().unwrap();
    text.lines().map(|line| line.split("//").next().unwrap()).collect::<Vec<_>>().join("\n")
}

fn is_of_name(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The names that stand behind `path::` in a text, those of a list in braces among them.
fn behind<'a>(text: &'a str, path: &str) -> Vec<&'a str> {
    let mut names = Vec::new();
    let start = format!("{path}::");
    for (at, _) in text.match_indices(&start) {
        if text[..at].ends_with(is_of_name) {
            continue;
        }
        let rest = &text[at + start.len()..];
        match rest.strip_prefix('{') {
            // Of a list that has lists inside, the first names.
            Some(list) => {
                let mut depth = 0;
                for part in list.split_inclusive([',', '{', '}']) {
                    let name = part.trim_matches(|c: char| !is_of_name(c));
                    if depth == 0 && !name.is_empty() {
                        names.push(name.split("::").next().unwrap());
                    }
                    match part.chars().last() {
                        Some('{') => depth += 1,
                        Some('}') if depth == 0 => break,
                        Some('}') => depth -= 1,
                        _ => {}
                    }
                }
            }
            None => names.push(rest.split(|c| !is_of_name(c)).next().unwrap()),
        }
    }
    names
}

impl Crate {
    fn read(root: &Path, index: usize) -> Crate {
        let text = code(&root.join(CRATES[index]).join("src/lib.rs"));
        let (mut modules, mut names) = (Vec::new(), BTreeMap::<String, Vec<_>>::new());
        // A module that is written out there has names of other crates only.
        let (mut inside, mut statement) = (None, String::new());
        for line in text.lines().map(str::trim_end).filter(|line| !line.trim_start().starts_with("#[")) {
            let item = line.strip_prefix("pub ").unwrap_or(line);
            let module = item.strip_prefix("mod ");
            if let Some(module) = module.and_then(|module| module.strip_suffix(" {")) {
                inside = Some(module.to_owned());
                continue;
            } else if let Some(module) = module.and_then(|module| module.strip_suffix(';')) {
                modules.push(module.to_owned());
                continue;
            } else if line == "}" {
                inside = None;
                continue;
            }
            statement += line;
            if !line.ends_with(';') {
                continue;
            }
            let statement = std::mem::take(&mut statement);
            for (other, name) in CRATES[..index].iter().enumerate() {
                for target in behind(&statement, &name.replace('-', "_")) {
                    let known_as = inside.as_deref().unwrap_or(target);
                    names.entry(known_as.to_owned()).or_default().push((other, target.to_owned()));
                }
            }
            for module in &modules {
                for target in behind(&statement, module) {
                    names.entry(target.to_owned()).or_default().push((index, module.clone()));
                }
            }
        }
        Crate { modules, names }
    }
}

pub fn rust_files(path: &Path, files: &mut Vec<PathBuf>) {
    if path.is_dir() {
        fs::read_dir(path).unwrap().for_each(|entry| rust_files(&entry.unwrap().path(), files));
    } else if path.extension().is_some_and(|extension| extension == "rs") {
        files.push(path.to_owned());
    }
}

/// What each module imports.
fn imports(root: &Path, crates: &[Crate]) -> BTreeMap<Module, BTreeSet<Module>> {
    let find = |index: usize, name: &str| -> Vec<Module> {
        let place = |index: usize, name: &str| {
            crates[index].modules.iter().position(|module| module == name).map(|module| (index, module))
        };
        if let Some(module) = place(index, name) {
            return vec![module];
        }
        let names = crates[index].names.get(name);
        let names = names.unwrap_or_else(|| panic!("what is `{name}` of {}?", CRATES[index]));
        let found = names.iter().map(|(other, name)| match place(*other, name) {
            Some(module) => vec![module],
            // A name at the root of the other crate.
            None => crates[*other].names[name].iter().filter_map(|(at, name)| place(*at, name)).collect(),
        });
        found.flatten().collect()
    };
    let mut graph = BTreeMap::new();
    for (index, Crate { modules, .. }) in crates.iter().enumerate() {
        for (module, name) in modules.iter().enumerate() {
            let source = root.join(CRATES[index]).join("src");
            let mut files = Vec::new();
            rust_files(&source.join(name), &mut files);
            files.extend(Some(source.join(format!("{name}.rs"))).filter(|file| file.exists()));
            assert!(!files.is_empty(), "no file of {name} in {}", CRATES[index]);
            let all: &mut BTreeSet<Module> = graph.entry((index, module)).or_default();
            for file in files {
                let text = code(&file);
                all.extend(behind(&text, "crate").into_iter().flat_map(|name| find(index, name)));
                for (other, name) in CRATES[..index].iter().enumerate() {
                    let names = behind(&text, &name.replace('-', "_"));
                    all.extend(names.into_iter().flat_map(|name| find(other, name)));
                }
                let Crate { modules, names } = &crates[SHOWN.min(index)];
                let shown =
                    |name: &&str| modules.iter().any(|module| module == name) || names.contains_key(*name);
                if index > SHOWN {
                    // What only the facade has is of no module.
                    let names = behind(&text, "fsdp").into_iter().filter(shown);
                    all.extend(names.flat_map(|name| find(SHOWN, name)));
                }
            }
            all.remove(&(index, module));
        }
    }
    graph
}

/// Whether `from` imports `to` by way of another module.
fn is_implied(graph: &BTreeMap<Module, BTreeSet<Module>>, from: Module, to: Module) -> bool {
    fn reaches(graph: &BTreeMap<Module, BTreeSet<Module>>, from: Module, to: Module) -> bool {
        from == to || graph[&from].iter().any(|&next| next < from && reaches(graph, next, to))
    }
    graph[&from].iter().any(|&next| next != to && next < from && reaches(graph, next, to))
}

fn drawing(crates: &[Crate], graph: &BTreeMap<Module, BTreeSet<Module>>) -> String {
    let label = |(index, module): Module| crates[index].modules[module].as_str();
    let node = |module: Module| format!("{}_{}", CRATES[module.0].replace('-', "_"), label(module));
    let mut text = String::from(
        "# The modules\n\n\
         Made from the sources by `tests/engine/module_graph.rs`, which fails if a module imports one above it. An arrow says\n\
         that a module imports another; one that follows from others is left out.\n\n```mermaid\ngraph TD\n",
    );
    for (index, name) in CRATES.iter().enumerate().rev() {
        text += &format!("    subgraph {name}\n");
        for module in (0..crates[index].modules.len()).rev() {
            text += &format!("        {}[{}]\n", node((index, module)), label((index, module)));
        }
        text += "    end\n";
    }
    for (&from, all) in graph.iter().rev() {
        for &to in all.iter().rev().filter(|&&to| !is_implied(graph, from, to)) {
            text += &format!("    {} --> {}\n", node(from), node(to));
        }
    }
    text + "```\n"
}

#[test]
fn modules_import_only_from_those_below_them() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let crates: Vec<Crate> = (0..CRATES.len()).map(|index| Crate::read(root, index)).collect();
    let graph = imports(root, &crates);
    let name = |(index, module): Module| format!("{}::{}", CRATES[index], crates[index].modules[module]);
    let edges = graph.iter().flat_map(|(from, all)| all.iter().map(move |to| (*from, *to)));
    let upward: Vec<String> = edges
        .filter(|(from, to)| to > from)
        .map(|(from, to)| format!("{} imports {}", name(from), name(to)))
        .collect();
    assert!(upward.is_empty(), "upward, by the order in which `lib.rs` declares them: {upward:?}");
    let edge = |from: &str, to: &str| {
        let place = |name: &str| crates[SHOWN].modules.iter().position(|module| module == name).unwrap();
        graph[&(SHOWN, place(from))].contains(&(SHOWN, place(to)))
    };
    assert!(edge("checkpoint", "engine") && edge("engine", "memory"), "imports are found");

    let file = root.join("docs/modules.md");
    let drawing = drawing(&crates, &graph);
    if std::env::var_os("FSDP_BLESS").is_some() {
        fs::write(&file, &drawing).unwrap();
    }
    let kept = fs::read_to_string(&file).unwrap_or_default();
    assert!(
        kept == drawing,
        "docs/modules.md is another drawing: FSDP_BLESS=1 in the environment has it written anew"
    );
}

#[test]
fn only_the_folders_of_cuda_ask_for_its_features() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut files = Vec::new();
    let all = CRATES.iter().chain(&[".", "fsdp-cli"]);
    all.for_each(|name| rust_files(&root.join(name).join("src"), &mut files));
    let is_of_cuda = |file: &PathBuf| {
        file.components().any(|part| ["cuda", "nccl"].iter().any(|name| part.as_os_str() == *name))
    };
    let (of_cuda, others): (Vec<_>, Vec<_>) = files.into_iter().partition(is_of_cuda);
    let asks = |file: &PathBuf| {
        let text = code(file);
        ["cuda", "cuda-driver", "cuda-linked", "nccl"]
            .iter()
            .any(|name| text.contains(&format!("feature = \"{name}\"")))
    };
    assert!(of_cuda.iter().any(asks), "the features are found");
    let wrong: Vec<_> = others.iter().filter(|file| asks(file)).collect();
    assert!(
        wrong.is_empty(),
        "what depends on a feature of CUDA belongs into a folder `cuda` or `nccl`: {wrong:?}"
    );
}
