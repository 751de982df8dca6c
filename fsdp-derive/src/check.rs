//! All that is wrong with what the user said, beyond a single attribute.

use std::collections::HashMap;

use proc_macro2::Span;
use quote::ToTokens;
use syn::LitStr;

use crate::attr::{FieldAttrs, Tp};
use crate::ctxt::Ctxt;
use crate::model::{Field, Module, Role};
use crate::types;

/// Adds every mistake to `ctxt`, in the order of the fields.
pub fn check(ctxt: &Ctxt, module: &Module) {
    for fields in module.alternatives() {
        let mut names = HashMap::new();
        for field in fields {
            attributes(ctxt, field);
            field_type(ctxt, field);
            if !field.is_state() {
                continue;
            }
            let parts = field.attrs.fused.iter().flat_map(|fused| &fused.value);
            let parts = parts.map(|part| (part.value(), part.span()));
            for (name, span) in [(field.name.clone(), field.name_span())].into_iter().chain(parts) {
                let Some(other) = names.insert(name.clone(), &field.member) else { continue };
                let owner = if *other != field.member {
                    "another field"
                } else if name == field.name {
                    "the field itself"
                } else {
                    "another part"
                };
                ctxt.error(span, format!("duplicate name `{name}`: {owner} has it already"));
            }
        }
    }
}

fn attributes(ctxt: &Ctxt, field: &Field) {
    let attrs = &field.attrs;
    let names = [&attrs.rename, &attrs.tie_with].into_iter().flatten().map(|said| &said.value);
    let parts = attrs.fused.iter().flat_map(|fused| &fused.value);
    names.chain(parts).for_each(|name| qualified_name(ctxt, name));
    match &field.role {
        Role::Skipped => {
            for (word, span) in said(attrs).into_iter().filter(|(word, _)| *word != "skip") {
                ctxt.error(
                    span,
                    format!("`{word}` and `skip` contradict each other: a skipped field has no state"),
                );
            }
        }
        Role::Plain(_) => {
            let ty = field.ty.to_token_stream().to_string().replace(" < ", "<").replace(" >", ">");
            for (word, span) in said(attrs) {
                ctxt.error(
                    span,
                    format!(
                        "`{word}` has no meaning here: `{ty}` is plain data, no part of the model's state"
                    ),
                );
            }
        }
        Role::Buffer => {
            for (word, span) in
                said(attrs).into_iter().filter(|(word, _)| !["buffer", "rename"].contains(word))
            {
                ctxt.error(
                    span,
                    format!("`{word}` and `buffer` contradict each other: a buffer is kept as it is, `{word}` is for parameters"),
                );
            }
        }
        Role::Walked => {
            if let (Some(init), Some(_)) = (&attrs.init, &attrs.tie_with) {
                ctxt.error(
                    init.span,
                    "`init` and `tie_with` contradict each other: a tied parameter starts as its target does",
                );
            }
            if let Some(tie) = attrs.tie_with.as_ref().filter(|tie| tie.value.value() == field.name) {
                ctxt.error(tie.value.span(), format!("`{}` is tied to itself", field.name));
            }
            partition_dim(ctxt, attrs);
            fused(ctxt, attrs);
        }
    }
}

/// A tensor-parallel dim must be one of the declared shape's.
fn partition_dim(ctxt: &Ctxt, attrs: &FieldAttrs) {
    let (Some(tp), Some(shape)) = (&attrs.tp, &attrs.shape) else { return };
    let (spelling, dim) = match tp.value {
        Tp::Column => ("column".to_string(), 0),
        Tp::Row => ("row".to_string(), 1),
        Tp::Dim(dim) => (format!("dim({dim})"), dim),
        Tp::Replicate => return,
    };
    let dims = shape.value.len();
    if dim >= dims {
        let has = match dims {
            0 => "no dims".to_string(),
            1 => "only dim 0".to_string(),
            _ => format!("only dims 0 to {}", dims - 1),
        };
        let message = format!("`tp = {spelling}` cuts dim {dim}, but the declared `shape` has {has}");
        ctxt.error(tp.span, message);
    }
}

/// The parts have their names from `fused` alone, and dim 0 to lie along.
fn fused(ctxt: &Ctxt, attrs: &FieldAttrs) {
    let Some(fused) = &attrs.fused else { return };
    if attrs.rename.is_some() {
        let message = "`fused` and `rename` contradict each other: checkpoints know a fused parameter by the names of \
             its parts";
        ctxt.error(fused.span, message);
    }
    if attrs.tie_with.is_some() {
        let message =
            "`fused` and `tie_with` contradict each other: a tied parameter is saved as its target is";
        ctxt.error(fused.span, message);
    }
    if attrs.shape.as_ref().is_some_and(|shape| shape.value.is_empty()) {
        let message = "`fused` is a concatenation along dim 0, but the declared `shape` has no dims";
        ctxt.error(fused.span, message);
    }
}

/// A field that is left out of the model may be of any type; a parameter or a module may not. Where the
/// attributes are wrong, they may have meant to leave it out.
fn field_type(ctxt: &Ctxt, field: &Field) {
    if matches!(field.role, Role::Walked)
        && !field.attrs.is_flawed
        && let Some(refusal) = types::refusal(&field.ty)
    {
        ctxt.push(refusal);
    }
}

/// Segments joined by dots, none empty, no spaces: what a checkpoint can hold and an error message can quote.
fn qualified_name(ctxt: &Ctxt, literal: &LitStr) {
    let name = literal.value();
    let wrong = if name.is_empty() {
        Some("is empty")
    } else if name.chars().any(char::is_whitespace) {
        Some("contains white space")
    } else if name.chars().any(char::is_control) {
        Some("contains a control character")
    } else if name.starts_with('.') || name.ends_with('.') {
        Some("begins or ends with a dot")
    } else if name.contains("..") {
        Some("has an empty segment")
    } else {
        None
    };
    if let Some(wrong) = wrong {
        ctxt.error(
            literal.span(),
            format!("the name {name:?} {wrong}: expected segments joined by dots, such as \"model.norm\""),
        );
    }
}

/// The words a field was given, with their places.
fn said(attrs: &FieldAttrs) -> Vec<(&'static str, Span)> {
    let words = [
        ("rename", attrs.rename.as_ref().map(|said| said.span)),
        ("skip", attrs.skip.as_ref().map(|said| said.span)),
        ("buffer", attrs.buffer.as_ref().map(|said| said.span)),
        ("frozen", attrs.frozen.as_ref().map(|said| said.span)),
        ("no_decay", attrs.no_decay.as_ref().map(|said| said.span)),
        ("expert", attrs.expert.as_ref().map(|said| said.span)),
        ("init", attrs.init.as_ref().map(|said| said.span)),
        ("dtype", attrs.dtype.as_ref().map(|said| said.span)),
        ("tp", attrs.tp.as_ref().map(|said| said.span)),
        ("tie_with", attrs.tie_with.as_ref().map(|said| said.span)),
        ("shape", attrs.shape.as_ref().map(|said| said.span)),
        ("fused", attrs.fused.as_ref().map(|said| said.span)),
    ];
    words.into_iter().filter_map(|(word, span)| span.map(|span| (word, span))).collect()
}
