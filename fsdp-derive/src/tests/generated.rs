//! The derive on generated items: what is valid is accepted, what is wrong is said, and nothing panics.

use std::str::FromStr;

use proc_macro2::{TokenStream, TokenTree};

use super::generate::{PRELUDE, valid};
use super::mistakes::broken;
use super::{derive, errors};

const ITEMS: u64 = 4000;

fn tokens(text: &str) -> TokenStream {
    TokenStream::from_str(text).unwrap_or_else(|error| panic!("{error}:\n{text}"))
}

/// The names in the entries of `FIELDS`: what follows `name:`.
fn names(tokens: TokenStream, found: &mut Vec<String>) {
    let trees: Vec<TokenTree> = tokens.into_iter().collect();
    for (at, tree) in trees.iter().enumerate() {
        match tree {
            TokenTree::Group(group) => names(group.stream(), found),
            TokenTree::Ident(ident) if ident == "name" => {
                if let Some(TokenTree::Literal(name)) = trees.get(at + 2) {
                    found.push(name.to_string());
                }
            }
            _ => {}
        }
    }
}

#[test]
fn valid_items_are_accepted_and_lose_no_field() {
    for seed in 0..ITEMS {
        let mut item = valid(seed, true);
        let text = item.text();
        assert_eq!(errors(tokens(&text)), [""; 0], "seed {seed}:\n{text}");
        let mut found = Vec::new();
        names(derive(tokens(&text)), &mut found);
        assert_eq!(found.len(), item.states(), "seed {seed}:\n{text}\nhas the names {found:?}");
        assert!(found.iter().all(|name| !name.contains("r#")), "seed {seed}: {found:?}");
    }
}

#[test]
fn every_planted_mistake_is_said() {
    for seed in 0..ITEMS {
        let (mut item, mistakes) = broken(seed);
        let text = item.text();
        let found = errors(tokens(&text));
        assert!(found.len() >= mistakes, "seed {seed}: {mistakes} mistakes, found {found:#?} in\n{text}");
    }
}

#[test]
fn the_prelude_of_generated_items_is_rust() {
    syn::parse_str::<syn::File>(PRELUDE).expect("the prelude is items");
}
