//! Summarises a checkpoint, as tables and as JSON.

use std::fmt;

use fsdp::checkpoint::{Checkpoint, CheckpointError, Checkpoints, Index, MODEL, Section, StoredTensor};
use serde_json::{Map, Value, json};

use super::facts::{dims, flatten, printable, ranks_text, shown, ties, variants};
use crate::trainer::quantity;
use crate::trainer::table::{Align, Table};

use Align::{Left, Right};

/// The checkpoints of a directory, as a table.
#[derive(Debug)]
pub struct Listing {
    rows: Vec<(String, Result<Index, CheckpointError>)>,
    unfinished: Vec<String>,
}

/// The checkpoints of a directory, oldest first, those whose index is damaged among them, and unfinished saves.
///
/// # Errors
/// If the directory cannot be read.
pub fn list(store: &Checkpoints) -> crate::Result<Listing> {
    let name = |path: &std::path::Path| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let entries = store.list()?;
    let rows = entries.iter().map(|entry| (name(&entry.path), Index::read(&entry.path))).collect();
    let unfinished = store.unfinished()?.iter().map(|path| name(path)).collect();
    Ok(Listing { rows, unfinished })
}

impl fmt::Display for Listing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut table = Table::new([
            ("checkpoint", Left),
            ("step", Right),
            ("ranks", Right),
            ("bytes", Right),
            ("", Left),
        ]);
        for (name, index) in &self.rows {
            match index {
                Ok(index) => {
                    let (step, ranks) = (quantity::count(index.step), index.written_by.ranks.to_string());
                    table.row([printable(name), step, ranks, quantity::bytes(index.bytes()), String::new()])
                }
                Err(error) => {
                    let none = || "-".to_owned();
                    table.row([printable(name), none(), none(), none(), error.to_string()])
                }
            };
        }
        write!(f, "{table}")?;
        self.unfinished.iter().try_for_each(|name| {
            writeln!(
                f,
                "{}: not complete: being saved or removed, or left by a program that was killed",
                printable(name)
            )
        })
    }
}

impl Listing {
    /// There are neither checkpoints nor unfinished saves.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty() && self.unfinished.is_empty()
    }

    /// The list as JSON. `checkpoints` has name, step, ranks and bytes of each, or its error; `unfinished` has names.
    pub fn json(&self) -> Map<String, Value> {
        let rows = self.rows.iter().map(|(name, index)| match index {
            Ok(index) => {
                let ranks = index.written_by.ranks;
                json!({"name": name, "step": index.step, "ranks": ranks, "bytes": index.bytes()})
            }
            Err(error) => json!({"name": name, "error": error.to_string()}),
        });
        let mut listing = Map::new();
        listing.insert("checkpoints".into(), rows.collect());
        listing.insert("unfinished".into(), json!(self.unfinished));
        listing
    }
}

/// Elements and bytes of a section.
fn totals(section: &Section) -> (u64, u64) {
    let add = |(elements, bytes): (u64, u64), tensor: &StoredTensor| {
        (elements.saturating_add(tensor.numel() as u64), bytes.saturating_add(tensor.bytes() as u64))
    };
    section.values().fold((0, 0), add)
}

/// A checkpoint for a person: who wrote it, its values, which variants the model's enums are and what is tied, a table of its
/// sections, and tables of the tensors in `sections` (if there are none, in `model`).
///
/// # Errors
/// If it has no such section.
pub fn summary(checkpoint: &Checkpoint, sections: &[String]) -> crate::Result<String> {
    let index = checkpoint.index();
    let chosen: Vec<&str> = match sections {
        [] if index.tensors.contains_key(MODEL) => vec![MODEL],
        sections => sections.iter().map(String::as_str).collect(),
    };
    let mut text = format!("{}\n{}\n", checkpoint.path().display(), facts(index));
    if !index.values.is_empty() {
        let mut table = Table::new([("value.member", Left), ("", Left)]);
        for (name, value) in flatten(&index.values) {
            table.row([printable(&name), shown(&value)]);
        }
        text.push_str(&format!("{table}\n"));
    }
    if let Some(model) = &index.model {
        for (title, described) in [("variant of", variants(model)), ("tie of", ties(model))] {
            if !described.is_empty() {
                let mut table = Table::new([(title, Left), ("", Left)]);
                for (name, text) in described {
                    table.row([name, text].map(printable));
                }
                text.push_str(&format!("{table}\n"));
            }
        }
    }
    text.push_str(&sections_table(index).to_string());
    for section in chosen {
        text.push_str(&format!("\n{}", tensors_table(index, section, checkpoint.section(section)?)));
    }
    Ok(text)
}

/// Who wrote it, when and how, in lines.
fn facts(index: &Index) -> String {
    let writer = &index.written_by;
    let ranks = ranks_text(writer.ranks);
    let facts = [
        ("step", quantity::count(index.step)),
        ("seed", index.seed.to_string()),
        ("written by", format!("{ranks}, {}, strategy {}", writer.mesh, writer.strategy)),
        ("precision", writer.precision.clone()),
        ("alignment", writer.alignment.to_lowercase()),
        ("library", format!("fsdp {}, format {}", writer.library, index.version())),
        ("files", files(index)),
    ];
    facts.iter().map(|(name, fact)| format!("{name:10}  {}\n", printable(fact))).collect()
}

fn sections_table(index: &Index) -> Table<4> {
    let mut table =
        Table::new([("section", Left), ("tensors", Right), ("elements", Right), ("bytes", Right)]);
    let row = |name: &str, [tensors, elements, bytes]: [u64; 3]| {
        [printable(name), quantity::count(tensors), quantity::count(elements), quantity::bytes(bytes)]
    };
    let mut all = [0u64; 3];
    for (name, section) in &index.tensors {
        let (elements, bytes) = totals(section);
        let counts = [section.len() as u64, elements, bytes];
        table.row(row(name, counts));
        all.iter_mut().zip(counts).for_each(|(all, count)| *all = all.saturating_add(count));
    }
    table.rule().row(row("total", all));
    table
}

fn files(index: &Index) -> String {
    let sizes = index.files.iter().map(|file| file.bytes);
    match (sizes.clone().min(), sizes.max()) {
        (Some(smallest), Some(largest)) if index.files.len() > 1 => {
            let [all, smallest, largest] = [index.bytes(), smallest, largest].map(quantity::bytes);
            format!("{}, {all}, {smallest} to {largest} each", index.files.len())
        }
        _ => format!("{}, {}", index.files.len(), quantity::bytes(index.bytes())),
    }
}

fn tensors_table(index: &Index, name: &str, section: &Section) -> Table<7> {
    let title = format!("tensor of {}", printable(name));
    let mut table = Table::new([
        (title.as_str(), Left),
        ("dtype", Left),
        ("shape", Left),
        ("elements", Right),
        ("bytes", Right),
        ("parts", Right),
        ("ranks", Left),
    ]);
    for (name, tensor) in section {
        table.row([
            printable(name),
            tensor.dtype.to_string(),
            dims(&tensor.shape),
            quantity::count(tensor.numel() as u64),
            quantity::bytes(tensor.bytes() as u64),
            tensor.parts.len().to_string(),
            ranks(index, tensor),
        ]);
    }
    table
}

/// The ranks that wrote a tensor: `0-3, 6`. The names of their files, should they be other ones.
fn ranks(index: &Index, tensor: &StoredTensor) -> String {
    let names = files_of(index, tensor);
    let rank = |name: &&str| name.strip_prefix("rank-")?.strip_suffix(".safetensors")?.parse::<usize>().ok();
    let Some(ranks) = names.iter().map(rank).collect::<Option<Vec<_>>>() else {
        return printable(&names.join(", "));
    };
    let runs = ranks.chunk_by(|rank, next| rank.checked_add(1) == Some(*next));
    let run = |run: &[usize]| match run {
        [first, .., last] => format!("{first}-{last}"),
        _ => run.iter().map(usize::to_string).collect(),
    };
    printable(&runs.map(run).collect::<Vec<_>>().join(", "))
}

/// The files that a tensor is in, sorted.
fn files_of<'a>(index: &'a Index, tensor: &StoredTensor) -> Vec<&'a str> {
    let mut names: Vec<&str> = tensor.parts.iter().map(|part| index.files[part.file].name.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    names
}

/// Summarises a checkpoint as JSON: everything but the places of elements in files. `tensors` are those of `sections`, or of all
/// sections if none are given.
///
/// # Errors
/// If it has no such section.
pub fn summary_json(checkpoint: &Checkpoint, sections: &[String]) -> crate::Result<Map<String, Value>> {
    let index = checkpoint.index();
    let all: Vec<&String> = index.tensors.keys().collect();
    let chosen = if sections.is_empty() { all } else { sections.iter().collect() };
    let mut tensors = Vec::new();
    for section in chosen {
        for (name, tensor) in checkpoint.section(section)? {
            tensors.push(json!({
                "section": section,
                "name": name,
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "elements": tensor.numel(),
                "bytes": tensor.bytes(),
                "parts": tensor.parts.len(),
                "files": files_of(index, tensor),
            }));
        }
    }
    let sections = index.tensors.iter().map(|(name, section)| {
        let (elements, bytes) = totals(section);
        json!({"name": name, "tensors": section.len(), "elements": elements, "bytes": bytes})
    });
    let files = index.files.iter().map(|file| json!({"name": file.name, "bytes": file.bytes}));
    let facts = json!({
        "path": checkpoint.path().display().to_string(),
        "format_version": index.version(),
        "step": index.step,
        "seed": index.seed,
        "written_by": index.written_by,
        "values": index.values,
        "model": index.model,
        "bytes": index.bytes(),
        "files": files.collect::<Vec<_>>(),
        "sections": sections.collect::<Vec<_>>(),
        "tensors": tensors,
    });
    let Value::Object(facts) = facts else { unreachable!("it is written as an object") };
    Ok(facts)
}
