//! Reads the `#[fsdp(..)]` lists. Says what is wrong with a list by itself, and `value` with what a word is given;
//! what contradicts what is for `check`.

use proc_macro2::{Span, TokenTree};
use syn::ext::IdentExt;
use syn::meta::ParseNestedMeta;
use syn::parse::ParseStream;
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::{Attribute, Error, Expr, LitStr, Path, Result, Token, WherePredicate};

use crate::ctxt::Ctxt;
use crate::rename::RenameRule;
use crate::{suggest, value};

const FIELD_WORDS: &[&str] = &[
    "buffer", "dtype", "expert", "frozen", "fused", "init", "no_decay", "rename", "shape", "skip",
    "tie_with", "tp",
];
const STRUCT_WORDS: &[&str] = &["bound", "crate", "rename_all", "tp_size"];

/// What a word was given, and where the word is.
pub struct Said<T> {
    pub span: Span,
    pub value: T,
}

/// `dtype = ".."`.
#[derive(Clone, Copy)]
pub enum Dtype {
    F32,
    BF16,
    F16,
}

/// `tp = ..`.
#[derive(Clone, Copy)]
pub enum Tp {
    Column,
    Row,
    Replicate,
    Dim(usize),
}

/// `init = ..`; the numbers are constant expressions of type `f32`.
pub enum Init {
    Zeros,
    Ones,
    Constant(Expr),
    /// Mean and standard deviation.
    Normal(Expr, Expr),
    /// Lower bound, and upper bound excluded.
    Uniform(Expr, Expr),
}

/// All that a field's attributes say.
#[derive(Default)]
pub struct FieldAttrs {
    pub rename: Option<Said<LitStr>>,
    pub skip: Option<Said<()>>,
    pub buffer: Option<Said<()>>,
    pub frozen: Option<Said<bool>>,
    pub no_decay: Option<Said<bool>>,
    pub expert: Option<Said<bool>>,
    pub dtype: Option<Said<Dtype>>,
    pub init: Option<Said<Init>>,
    pub tp: Option<Said<Tp>>,
    pub tie_with: Option<Said<LitStr>>,
    pub shape: Option<Said<Punctuated<Expr, Token![,]>>>,
    pub fused: Option<Said<Vec<LitStr>>>,
    /// Something else was meant than what is here; a mistake was reported.
    pub is_flawed: bool,
}

/// All that the attributes of the struct or enum itself say.
#[derive(Default)]
pub struct StructAttrs {
    pub krate: Option<Path>,
    pub rename_all: Option<RenameRule>,
    pub tp_size: Option<Said<Expr>>,
    pub bound: Option<Punctuated<WherePredicate, Token![,]>>,
}

impl FieldAttrs {
    /// Reads a field's attributes; mistakes go to `ctxt`.
    pub fn read(ctxt: &Ctxt, attrs: &[Attribute]) -> FieldAttrs {
        let mut said = FieldAttrs::default();
        let is_sound = read_words(ctxt, attrs, FIELD_WORDS, |word, meta| {
            let span = meta.path.span();
            match word {
                "rename" => {
                    said.rename = Some(Said { span, value: value::string(meta, "rename = \"model.norm\"")? })
                }
                "skip" => said.skip = Some(Said { span, value: value::flag(meta)? }),
                "buffer" => said.buffer = Some(Said { span, value: value::flag(meta)? }),
                "frozen" => said.frozen = Some(Said { span, value: value::switch(meta)? }),
                "no_decay" => said.no_decay = Some(Said { span, value: value::switch(meta)? }),
                "expert" => said.expert = Some(Said { span, value: value::switch(meta)? }),
                "dtype" => said.dtype = Some(Said { span, value: value::dtype(meta)? }),
                "init" => said.init = Some(Said { span, value: value::init(meta)? }),
                "fused" => said.fused = Some(Said { span, value: value::fused(meta)? }),
                "tp" => said.tp = Some(Said { span, value: value::tp(meta)? }),
                "tie_with" => {
                    said.tie_with =
                        Some(Said { span, value: value::string(meta, "tie_with = \"embed.weight\"")? });
                }
                _ => said.shape = Some(Said { span, value: value::shape(meta)? }),
            }
            Ok(())
        });
        said.is_flawed = !is_sound;
        said
    }
}

impl StructAttrs {
    /// Reads the attributes of a struct or enum; mistakes go to `ctxt`.
    pub fn read(ctxt: &Ctxt, attrs: &[Attribute]) -> StructAttrs {
        let mut said = StructAttrs::default();
        read_words(ctxt, attrs, STRUCT_WORDS, |word, meta| {
            match word {
                "crate" => said.krate = Some(value::crate_path(meta)?),
                "rename_all" => said.rename_all = Some(value::rename_all(meta)?),
                "tp_size" => {
                    said.tp_size = Some(Said { span: meta.path.span(), value: value::tp_size(meta)? });
                }
                _ => said.bound = Some(value::bound(meta)?),
            }
            Ok(())
        });
        said
    }
}

/// A variant has nothing of its own to say.
pub fn read_variant(ctxt: &Ctxt, attrs: &[Attribute]) {
    for attr in attrs.iter().filter(|attr| attr.path().is_ident("fsdp")) {
        let message = "`#[fsdp(..)]` has no meaning on a variant: put it on the variant's fields";
        ctxt.push(Error::new_spanned(attr, message));
    }
}

/// Hands each word of each `#[fsdp(..)]` to `accept`, once. A mistake does not end the list: what follows the
/// next comma is read as well. Returns whether there was none.
fn read_words(
    ctxt: &Ctxt,
    attrs: &[Attribute],
    known: &'static [&'static str],
    mut accept: impl FnMut(&'static str, &ParseNestedMeta) -> Result<()>,
) -> bool {
    let mut is_sound = true;
    let mut mistaken = |mistake| {
        is_sound = false;
        ctxt.push(mistake);
    };
    let mut seen = Vec::new();
    for attr in attrs.iter().filter(|attr| attr.path().is_ident("fsdp")) {
        let list = attr.parse_nested_meta(|meta| {
            let outcome = match known_word(&meta, known) {
                Ok(word) if seen.contains(&word) => {
                    Err(Error::new(meta.path.span(), format!("duplicate `{word}`: it was said before")))
                }
                Ok(word) => {
                    seen.push(word);
                    accept(word, &meta)
                }
                Err(unknown) => Err(unknown),
            };
            outcome.or_else(|mistake| {
                mistaken(mistake);
                to_next_comma(meta.input)
            })
        });
        if let Err(mistake) = list {
            mistaken(mistake);
        }
    }
    is_sound
}

fn to_next_comma(input: ParseStream<'_>) -> Result<()> {
    while !input.is_empty() && !input.peek(Token![,]) {
        input.parse::<TokenTree>()?;
    }
    Ok(())
}

/// Not an attribute, but what one may be taken for.
const UNIT: &str = "unit";

fn known_word(meta: &ParseNestedMeta, known: &'static [&'static str]) -> Result<&'static str> {
    let path = &meta.path;
    let word = match path.get_ident() {
        Some(ident) => ident.unraw().to_string() + &after_hyphens(meta.input)?,
        None => path.segments.iter().map(|s| s.ident.to_string()).collect::<Vec<_>>().join("::"),
    };
    if let Some(known) = known.iter().find(|known| **known == word) {
        return Ok(known);
    }
    // What may stand here comes first: of several that are as near, the first is meant.
    let words = [known, &[UNIT], FIELD_WORDS, STRUCT_WORDS].concat();
    let message = match suggest::nearest(&word, &words) {
        None => format!("unknown attribute `{word}`: expected {}", suggest::list(known)),
        Some(UNIT) => format!(
            "`{word}` is not an attribute: a communication unit is a type, write the field as `Unit<..>`"
        ),
        Some(near) => {
            let unknown = if near == word {
                format!("`{word}`")
            } else if known.contains(&near) {
                let message = format!("unknown attribute `{word}`: did you mean `{near}`?");
                return Err(Error::new(path.span(), message));
            } else {
                format!("unknown attribute `{word}`: did you mean `{near}`? It")
            };
            let is_of_struct = STRUCT_WORDS.contains(&near);
            let place =
                if is_of_struct { "the struct, not on a field" } else { "a field, not on the struct" };
            format!("{unknown} belongs on {place}")
        }
    };
    Err(Error::new(path.span(), message))
}

/// What follows an identifier in a word that was written with hyphens.
fn after_hyphens(input: ParseStream<'_>) -> Result<String> {
    let mut rest = String::new();
    while input.peek(Token![-]) && input.peek2(syn::Ident::peek_any) {
        input.parse::<Token![-]>()?;
        rest = format!("{rest}-{}", input.call(syn::Ident::parse_any)?);
    }
    Ok(rest)
}
