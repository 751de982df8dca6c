//! An expansion names nothing that the user's own names could change.

use std::collections::HashSet;
use std::str::FromStr;

use proc_macro2::{TokenStream, TokenTree};
use syn::LitStr;

use super::generate::valid;
use super::{broken_input, derive};

/// Everything that an expansion may say that is neither the user's nor after `::`.
const OWN: &[&str] = &[
    // Keywords.
    "_",
    "as",
    "const",
    "fn",
    "for",
    "impl",
    "let",
    "match",
    "mut",
    "Self",
    "self",
    "static",
    "true",
    "false",
    "use",
    "where",
    // What it declares.
    "__fsdp",
    "variant",
    "automatically_derived",
    "FIELDS",
    "TREE",
    "walk",
    "__fields",
    "__walker",
];

/// The fields of `Field`, `Attrs` and `Init`, in their literals.
const LABELS: &[&str] = &[
    "name", "attrs", "tree", "tp", "expert", "frozen", "no_decay", "dtype", "init", "tie_with", "shape",
    "fused", "mean", "std", "low", "high",
];

/// Calls `see` with every identifier, between the marks before and after it, and with the words inside strings:
/// those are paths and bounds.
fn identifiers(tokens: TokenStream, see: &mut dyn FnMut(&str, &str, &str)) {
    let mut before = String::new();
    let mut tokens = tokens.into_iter().peekable();
    while let Some(token) = tokens.next() {
        let ident = match token {
            TokenTree::Punct(mark) => {
                before.push(mark.as_char());
                continue;
            }
            TokenTree::Ident(ident) => Some(ident.to_string()),
            TokenTree::Group(group) => {
                identifiers(group.stream(), see);
                None
            }
            TokenTree::Literal(literal) => {
                let string: Option<LitStr> = syn::parse_str(&literal.to_string()).ok();
                let words = string.and_then(|string| TokenStream::from_str(&string.value()).ok());
                identifiers(words.unwrap_or_default(), &mut |_, word, _| see("\"", word, "\""));
                None
            }
        };
        let mut after = String::new();
        while let Some(TokenTree::Punct(mark)) = tokens.peek() {
            after.push(mark.as_char());
            tokens.next();
        }
        if let Some(ident) = ident {
            see(&before, &ident, &after);
        }
        before = after;
    }
}

/// What the expansion of `input` says that is neither its own, nor the user's, nor behind `::`.
fn foreign(input: TokenStream) -> Vec<String> {
    let mut users = HashSet::new();
    identifiers(input.clone(), &mut |_, ident, _| {
        users.insert(ident.to_string());
    });
    let mut foreign = Vec::new();
    identifiers(derive(input), &mut |before, ident, after| {
        let is_binding = ident.strip_prefix("__field").is_some_and(|n| n.parse::<usize>().is_ok());
        let is_lifetime = before.ends_with('\'') && ident.starts_with("walk");
        let is_own = OWN.contains(&ident) || is_binding || is_lifetime;
        let is_label = LABELS.contains(&ident) && after.starts_with(':') && !after.starts_with("::");
        let is_text = before == "\"";
        if !before.ends_with("::") && !is_own && !is_label && !is_text && !users.contains(ident) {
            foreign.push(ident.to_string());
        }
    });
    foreign
}

#[test]
fn expansions_say_nothing_that_could_be_shadowed() {
    for seed in 0..2000 {
        let text = valid(seed, true).text();
        let input = TokenStream::from_str(&text).expect("the text is tokens");
        assert_eq!(foreign(input), [""; 0], "seed {seed}:\n{text}");
    }
    for seed in broken_input::seeds() {
        assert_eq!(foreign(seed.clone()), [""; 0], "{seed}");
    }
}
