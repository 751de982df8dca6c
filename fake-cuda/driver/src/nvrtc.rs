//! NVRTC: "compiles" a program into an image that names the program's kernels, of which tests register what they do.

#![allow(non_snake_case)]

use std::collections::BTreeSet;
use std::ffi::{c_char, c_int};

use crate::abi::{In, Null, Out, Raw, Text};
use crate::state::{Held, State, Tag, lock};

/// `nvrtcResult`.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RtcStatus(c_int);

impl RtcStatus {
    const SUCCESS: RtcStatus = RtcStatus(0);
    const INVALID_INPUT: RtcStatus = RtcStatus(3);
    const INVALID_PROGRAM: RtcStatus = RtcStatus(4);
    const COMPILATION: RtcStatus = RtcStatus(6);
}

impl From<Null> for RtcStatus {
    fn from(_: Null) -> Self {
        RtcStatus::INVALID_INPUT
    }
}

type Answer<T = ()> = Result<T, RtcStatus>;

pub struct Program {
    source: String,
    /// Empty until it is compiled.
    image: String,
    log: String,
}

fn call(body: impl FnOnce(&mut Held) -> Answer) -> RtcStatus {
    body(&mut lock()).err().unwrap_or(RtcStatus::SUCCESS)
}

fn find(held: &mut State, raw: Raw) -> Answer<&mut Program> {
    let index = Tag::Program.index(raw).ok_or(RtcStatus::INVALID_PROGRAM)?;
    held.programs.get_mut(index).and_then(Option::as_mut).ok_or(RtcStatus::INVALID_PROGRAM)
}

/// The identifier that a text begins with, behind white space.
fn identifier(text: &str) -> &str {
    let text = text.trim_start();
    let end = text.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(text.len());
    &text[..end]
}

/// The kernels that a program defines, by themselves or by a macro whose first argument is the name.
fn kernels(source: &str) -> BTreeSet<String> {
    let joined = source.replace("\\\r\n", " ").replace("\\\n", " ");
    let (definitions, rest): (Vec<_>, Vec<_>) =
        joined.lines().partition(|line| line.trim_start().starts_with("#define"));
    let makes_kernels = definitions.iter().filter(|line| line.contains("__global__"));
    let macros = makes_kernels.map(|line| identifier(&line.trim_start()["#define".len()..]));
    let rest = rest.join("\n");
    let mut kernels = BTreeSet::new();
    for name in macros {
        kernels.extend(rest.split(&format!("{name}(")).skip(1).map(|after| identifier(after).to_owned()));
    }
    for after in rest.split("__global__").skip(1) {
        // Its result, and what may stand between that and the name.
        let Some((_, after)) = after.split_once("void") else { continue };
        let after = after.trim_start();
        let bounded = after.strip_prefix("__launch_bounds__").and_then(|after| after.split_once(')'));
        kernels.insert(identifier(bounded.map_or(after, |(_, after)| after)).to_owned());
    }
    kernels.remove("");
    kernels
}

#[unsafe(no_mangle)]
pub extern "C" fn nvrtcVersion(major: Out<c_int>, minor: Out<c_int>) -> RtcStatus {
    major.set_if_wanted(12);
    minor.set_if_wanted(8);
    RtcStatus::SUCCESS
}

#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetErrorString(status: c_int) -> *const c_char {
    let text = match RtcStatus(status) {
        RtcStatus::SUCCESS => c"NVRTC_SUCCESS",
        RtcStatus::INVALID_INPUT => c"NVRTC_ERROR_INVALID_INPUT",
        RtcStatus::INVALID_PROGRAM => c"NVRTC_ERROR_INVALID_PROGRAM",
        RtcStatus::COMPILATION => c"NVRTC_ERROR_COMPILATION",
        _ => c"NVRTC_ERROR unknown",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub extern "C" fn nvrtcCreateProgram(
    program: Out<Raw>,
    source: Text,
    _name: In<u8>,
    _headers: c_int,
    _texts: In<Raw>,
    _names: In<Raw>,
) -> RtcStatus {
    call(|held| {
        let source = source.read()?;
        held.programs.push(Some(Program { source, image: String::new(), log: String::new() }));
        Ok(program.set(Tag::Program.handle(held.programs.len() - 1))?)
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn nvrtcCompileProgram(program: Raw, _count: c_int, _options: In<Raw>) -> RtcStatus {
    call(|held| {
        let program = find(held, program)?;
        let kernels = kernels(&program.source);
        if kernels.is_empty() {
            program.log = "no kernel was found".to_owned();
            return Err(RtcStatus::COMPILATION);
        }
        program.image = kernels.iter().map(|name| format!(".visible .entry {name}()\n")).collect();
        Ok(())
    })
}

/// How many bytes a text takes, and the text: both end with a zero.
fn size(size: &Out<usize>, text: &str) -> Answer {
    Ok(size.set(text.len() + 1)?)
}

fn copy(to: &Out<u8>, text: &str) -> Answer {
    Ok(to.set_all(text.bytes().chain([0]))?)
}

#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetPTXSize(program: Raw, bytes: Out<usize>) -> RtcStatus {
    call(|held| size(&bytes, &find(held, program)?.image))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetPTX(program: Raw, to: Out<u8>) -> RtcStatus {
    call(|held| copy(&to, &find(held, program)?.image))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetProgramLogSize(program: Raw, bytes: Out<usize>) -> RtcStatus {
    call(|held| size(&bytes, &find(held, program)?.log))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvrtcGetProgramLog(program: Raw, to: Out<u8>) -> RtcStatus {
    call(|held| copy(&to, &find(held, program)?.log))
}

#[unsafe(no_mangle)]
pub extern "C" fn nvrtcDestroyProgram(program: In<Raw>) -> RtcStatus {
    call(|held| {
        let raw = program.get(0)?;
        find(held, raw)?;
        if let Some(index) = Tag::Program.index(raw) {
            held.programs[index] = None;
        }
        Ok(())
    })
}
