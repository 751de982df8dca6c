//! Reads what a word of an `#[fsdp(..)]` list is given.

use proc_macro2::{Delimiter, TokenStream, TokenTree};
use syn::ext::IdentExt;
use syn::meta::ParseNestedMeta;
use syn::parse::{Parse, ParseStream, Parser};
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::{Error, Expr, Ident, LitBool, LitInt, LitStr, Path, Result, Token, WherePredicate};

use crate::attr::{Dtype, Init, Tp};
use crate::rename::RenameRule;
use crate::suggest;

const DTYPES: &[(&str, Dtype)] = &[("f32", Dtype::F32), ("bf16", Dtype::BF16), ("f16", Dtype::F16)];
const INITS: &[(&str, usize)] = &[("zeros", 0), ("ones", 0), ("constant", 1), ("normal", 2), ("uniform", 2)];

/// A word that stands alone.
pub fn flag(meta: &ParseNestedMeta) -> Result<()> {
    if at_end(meta.input) || meta.input.peek(Ident::peek_any) {
        return Ok(());
    }
    let word = name(meta);
    Err(Error::new(meta.input.span(), format!("`{word}` takes no value: write `{word}`")))
}

/// A word that stands alone or is given `true` or `false`.
pub fn switch(meta: &ParseNestedMeta) -> Result<bool> {
    // A word that follows without a comma is the list's mistake.
    if at_end(meta.input) || meta.input.peek(Ident::peek_any) {
        return Ok(true);
    }
    let word = name(meta);
    let expected = format!("`{word}` stands alone or is `{word} = true` or `{word} = false`");
    value(meta, &expected)?;
    meta.input
        .parse::<LitBool>()
        .map(|given| given.value)
        .map_err(|error| Error::new(error.span(), &expected))
}

pub fn string(meta: &ParseNestedMeta, example: &str) -> Result<LitStr> {
    let expected = format!("`{}` takes a string: `{example}`", name(meta));
    value(meta, &expected)?;
    let given: LitStr = meta.input.parse().map_err(|error| Error::new(error.span(), &expected))?;
    match given.suffix() {
        "" => Ok(given),
        _ => Err(Error::new(given.span(), expected)),
    }
}

pub fn dtype(meta: &ParseNestedMeta) -> Result<Dtype> {
    let given = string(meta, "dtype = \"bf16\"")?;
    let text = given.value();
    DTYPES.iter().find(|(spelling, _)| *spelling == text).map(|(_, dtype)| *dtype).ok_or_else(|| {
        let known: Vec<&str> = DTYPES.iter().map(|(spelling, _)| *spelling).collect();
        Error::new(given.span(), format!("unknown dtype `{text}`: expected {}", suggest::list(&known)))
    })
}

pub fn rename_all(meta: &ParseNestedMeta) -> Result<RenameRule> {
    let given = string(meta, "rename_all = \"camelCase\"")?;
    let text = given.value();
    RenameRule::named(&text).ok_or_else(|| {
        let expected = match suggest::nearest(&text, RenameRule::NAMES) {
            Some(near) => format!("did you mean `{near}`?"),
            None => format!("expected {}", suggest::list(RenameRule::NAMES)),
        };
        Error::new(given.span(), format!("unknown rule `{text}` of `rename_all`: {expected}"))
    })
}

pub fn tp_size(meta: &ParseNestedMeta) -> Result<Expr> {
    let expected = "`tp_size` takes the number of tensor-parallel ranks: `tp_size = 8`";
    value(meta, expected)?;
    let span = meta.input.span();
    let wrong = || Error::new(span, expected);
    match meta.input.parse().map_err(|_| wrong())? {
        Expr::Lit(literal) => match &literal.lit {
            syn::Lit::Int(ranks) if ranks.base10_digits() != "0" => Ok(Expr::Lit(literal)),
            _ => Err(wrong()),
        },
        ranks => Ok(ranks),
    }
}

pub fn init(meta: &ParseNestedMeta) -> Result<Init> {
    let expected =
        "expected `init = zeros`, `ones`, `constant(VALUE)`, `normal(MEAN, STD)` or `uniform(LOW, HIGH)`";
    value(meta, expected)?;
    let span = meta.input.span();
    let wrong = || Error::new(span, expected);
    let name = meta.input.call(Ident::parse_any).map_err(|_| wrong())?.to_string();
    let Some((_, numbers)) = INITS.iter().find(|(known, _)| *known == name) else {
        let known: Vec<&str> = INITS.iter().map(|(known, _)| *known).collect();
        let near = suggest::nearest(&name, &known);
        let near = near.map(|near| format!(": did you mean `{near}`?")).unwrap_or_default();
        return Err(Error::new(span, format!("unknown initial value `{name}`{near}\n{expected}")));
    };
    let given: Vec<Expr> = if meta.input.peek(syn::token::Paren) {
        let list = within(meta.input, Delimiter::Parenthesis)?;
        Punctuated::<Expr, Token![,]>::parse_terminated.parse2(list)?.into_iter().collect()
    } else {
        Vec::new()
    };
    if given.len() != *numbers {
        let message = match numbers {
            0 => format!("`{name}` takes no numbers: write `init = {name}`"),
            1 => format!("`{name}` takes 1 number, got {}\n{expected}", given.len()),
            _ => format!("`{name}` takes {numbers} numbers, got {}\n{expected}", given.len()),
        };
        return Err(Error::new(span, message));
    }
    let mut numbers = given.into_iter();
    let mut next = || numbers.next().ok_or_else(wrong);
    Ok(match name.as_str() {
        "zeros" => Init::Zeros,
        "ones" => Init::Ones,
        "constant" => Init::Constant(next()?),
        "normal" => Init::Normal(next()?, next()?),
        _ => Init::Uniform(next()?, next()?),
    })
}

pub fn tp(meta: &ParseNestedMeta) -> Result<Tp> {
    let expected = "expected `tp = column`, `row`, `replicate` or `dim(N)`";
    value(meta, expected)?;
    let span = meta.input.span();
    let wrong = |_| Error::new(span, expected);
    let placement = meta.input.call(Ident::parse_any).map_err(wrong)?;
    match placement.to_string().as_str() {
        "column" => Ok(Tp::Column),
        "row" => Ok(Tp::Row),
        "replicate" => Ok(Tp::Replicate),
        "dim" => {
            let dim: LitInt =
                within(meta.input, Delimiter::Parenthesis).and_then(syn::parse2).map_err(wrong)?;
            Ok(Tp::Dim(dim.base10_parse().map_err(wrong)?))
        }
        other => {
            let near = suggest::nearest(other, &["column", "row", "replicate", "dim"]);
            let near = near.map(|near| format!(": did you mean `{near}`?")).unwrap_or_default();
            let message = format!("unknown tensor-parallel placement `{other}`{near}\n{expected}");
            Err(Error::new(span, message))
        }
    }
}

pub fn shape(meta: &ParseNestedMeta) -> Result<Punctuated<Expr, Token![,]>> {
    let expected = "expected `shape = [OUT, IN]`";
    value(meta, expected)?;
    let span = meta.input.span();
    let dims = within(meta.input, Delimiter::Bracket).map_err(|_| Error::new(span, expected))?;
    Punctuated::parse_terminated.parse2(dims)
}

pub fn fused(meta: &ParseNestedMeta) -> Result<Vec<LitStr>> {
    let expected =
        "expected `fused(\"q_proj\", \"k_proj\", \"v_proj\")`: the names of the parts in checkpoints";
    if !meta.input.peek(syn::token::Paren) {
        return Err(Error::new(meta.path.span(), expected));
    }
    let list = within(meta.input, Delimiter::Parenthesis)?;
    let names = Punctuated::<LitStr, Token![,]>::parse_terminated.parse2(list);
    let names: Vec<LitStr> = match names {
        Ok(names) => names.into_iter().collect(),
        Err(error) => return Err(Error::new(error.span(), expected)),
    };
    if let Some(name) = names.iter().find(|name| !name.suffix().is_empty()) {
        return Err(Error::new(name.span(), expected));
    }
    match names.as_slice() {
        [] => Err(Error::new(meta.path.span(), expected)),
        [only] => {
            let message = "`fused` takes at least 2 names: give another name to the whole with `rename`";
            Err(Error::new(only.span(), message))
        }
        _ => Ok(names),
    }
}

/// The tokens inside the delimiters that come next. Taken whole, because syn reports what is left inside a
/// group after a mistake as a mistake of its own.
fn within(input: ParseStream<'_>, delimiter: Delimiter) -> Result<TokenStream> {
    match input.parse()? {
        TokenTree::Group(group) if group.delimiter() == delimiter => Ok(group.stream()),
        other => Err(Error::new(other.span(), "unexpected token")),
    }
}

/// `crate = "path"`, or `crate = path` so that `$crate` of a `macro_rules!` can be given.
pub fn crate_path(meta: &ParseNestedMeta) -> Result<Path> {
    let expected = "`crate` takes the path of the fsdp crate: `crate = \"path::to::fsdp\"`";
    value(meta, expected)?;
    if meta.input.peek(LitStr) {
        let given: LitStr = meta.input.parse()?;
        return given.parse_with(Path::parse_mod_style).map_err(|_| Error::new(given.span(), expected));
    }
    let span = meta.input.span();
    meta.input.call(Path::parse_mod_style).map_err(|_| Error::new(span, expected))
}

pub fn bound(meta: &ParseNestedMeta) -> Result<Punctuated<WherePredicate, Token![,]>> {
    let given = string(meta, "bound = \"T: FsdpUnit\"")?;
    given.parse_with(Punctuated::parse_terminated).map_err(|error| {
        let message =
            format!("`bound` takes what may stand after `where`: `bound = \"T: FsdpUnit\"` ({error})");
        Error::new(given.span(), message)
    })
}

/// Moves past the `=` that must follow the word.
fn value(meta: &ParseNestedMeta, expected: &str) -> Result<()> {
    if !meta.input.peek(Token![=]) {
        return Err(Error::new(meta.path.span(), expected));
    }
    let equals = <Token![=]>::parse(meta.input)?;
    if at_end(meta.input) { Err(Error::new(equals.span(), expected)) } else { Ok(()) }
}

fn at_end(input: ParseStream<'_>) -> bool {
    input.is_empty() || input.peek(Token![,])
}

fn name(meta: &ParseNestedMeta) -> String {
    meta.path.get_ident().map(ToString::to_string).unwrap_or_default()
}
