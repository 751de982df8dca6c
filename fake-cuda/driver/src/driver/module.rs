//! Modules: an image says which kernels it has, tests register what those do.

#![allow(non_snake_case)]

use std::ffi::{c_int, c_uint};

use super::call;
use crate::abi::{Out, Outcome, Raw, Status, Text};
use crate::report::Kind;
use crate::state::{Held, State, Tag};

pub struct Module {
    /// The kernels that the image names; `None` if it is not text.
    entries: Option<Vec<String>>,
    unloaded: bool,
}

pub struct Function {
    pub name: String,
}

pub fn find_function(held: &State, raw: Raw) -> Outcome<usize> {
    Tag::Function.index(raw).filter(|index| *index < held.functions.len()).ok_or(Status::INVALID_HANDLE)
}

fn find(held: &State, raw: Raw) -> Outcome<usize> {
    let index = Tag::Module.index(raw).ok_or(Status::INVALID_HANDLE)?;
    held.modules.get(index).filter(|module| !module.unloaded).map(|_| index).ok_or(Status::INVALID_HANDLE)
}

/// The names behind `.entry` in PTX, which is also how a made-up image says what it has.
fn entries(ptx: &str) -> Vec<String> {
    let after = ptx.split(".entry").skip(1);
    let is_name = |c: char| c.is_alphanumeric() || c == '_' || c == '$';
    let names = after.map(|rest| rest.trim_start().chars().take_while(|c| is_name(*c)).collect::<String>());
    names.filter(|name| !name.is_empty()).collect()
}

fn load(held: &mut Held, module: &Out<Raw>, image: &str) -> Outcome {
    // A cubin begins with the bytes of an ELF file, a fat binary with its own.
    let is_text = !image.starts_with("\u{7f}ELF") && image.is_ascii();
    let entries = is_text.then(|| entries(image));
    if entries.as_ref().is_some_and(|entries| entries.is_empty()) {
        return Err(Status::INVALID_IMAGE);
    }
    held.modules.push(Module { entries, unloaded: false });
    Ok(module.set(Tag::Module.handle(held.modules.len() - 1))?)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleLoadData(module: Out<Raw>, image: Text) -> Status {
    call(|held| {
        let image = image.read()?;
        load(held, &module, &image)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleLoadDataEx(
    module: Out<Raw>,
    image: Text,
    _count: c_uint,
    _options: Raw,
    _values: Raw,
) -> Status {
    cuModuleLoadData(module, image)
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleLoad(module: Out<Raw>, path: Text) -> Status {
    call(|held| {
        let image = std::fs::read(path.read()?).map_err(|_| Status::NOT_FOUND)?;
        load(held, &module, &String::from_utf8_lossy(&image))
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleUnload(module: Raw) -> Status {
    call(|held| {
        let index = find(held, module)?;
        held.modules[index].unloaded = true;
        Ok(())
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuModuleGetFunction(function: Out<Raw>, module: Raw, name: Text) -> Status {
    call(|held| {
        let index = find(held, module)?;
        let name = name.read()?;
        let entries = &held.modules[index].entries;
        if entries.as_ref().is_some_and(|entries| !entries.contains(&name)) {
            return Err(Status::NOT_FOUND);
        }
        if !held.kernels.contains_key(&name) {
            held.reports
                .add(Kind::Unsupported, format!("kernel {name} is looked up, and no test has registered it"));
            return Err(Status::NOT_FOUND);
        }
        held.functions.push(Function { name });
        Ok(function.set(Tag::Function.handle(held.functions.len() - 1))?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncGetAttribute(value: Out<c_int>, attribute: c_int, function: Raw) -> Status {
    const MAX_THREADS_PER_BLOCK: c_int = 0;
    call(|held| {
        find_function(held, function)?;
        Ok(value.set(if attribute == MAX_THREADS_PER_BLOCK { 1024 } else { 0 })?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetAttribute(function: Raw, _attribute: c_int, _value: c_int) -> Status {
    call(|held| find_function(held, function).map(drop))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuFuncSetCacheConfig(function: Raw, _config: c_int) -> Status {
    call(|held| find_function(held, function).map(drop))
}

#[unsafe(no_mangle)]
pub extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessor(
    blocks: Out<c_int>,
    function: Raw,
    block_size: c_int,
    _shared_bytes: usize,
) -> Status {
    call(|held| {
        find_function(held, function)?;
        Ok(blocks.set(2048 / block_size.max(1))?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(
    blocks: Out<c_int>,
    function: Raw,
    block_size: c_int,
    shared_bytes: usize,
    _flags: c_uint,
) -> Status {
    cuOccupancyMaxActiveBlocksPerMultiprocessor(blocks, function, block_size, shared_bytes)
}
