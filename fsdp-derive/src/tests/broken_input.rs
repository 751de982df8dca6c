//! Whatever the tokens, the derive answers with items and does not panic.

use proc_macro2::{Delimiter, Group, Ident, Literal, Punct, Spacing, Span, TokenStream, TokenTree};
use quote::quote;

use super::derive;
use super::generate::Dice;

pub fn seeds() -> Vec<TokenStream> {
    vec![
        quote! {
            #[derive(Debug)]
            #[fsdp(crate = "a::b", bound = "T: Copy, U: Send")]
            pub struct S<'a, T: Copy + 'a = u8, const N: usize = 4> where T: Into<U> {
                #[fsdp(rename = "x.y", frozen, tp = dim(1))] pub a: Vec<Option<[T; N]>>,
                #[fsdp(buffer)] b: Tensor,
                #[fsdp(skip)] c: HashMap<String, &'a str>,
                #[fsdp(dtype = "bf16", no_decay = false, tie_with = "x.y")] r#type: <T as Tr>::Out,
                e: Box<dyn Fn(u8) -> u8 + Send>,
                f: (f32, String),
            }
        },
        quote!(
            struct T<A, B>(
                #[fsdp(expert, shape = [A, 2 * B], fused("x", "y"))] A,
                pub(crate) B,
                PhantomData<fn(A) -> B>,
            );
        ),
        quote! {
            enum E<T> {
                #[fsdp(skip)] A { #[fsdp(tp = column)] a: T },
                B(#[fsdp(tp = row)] Param, u8) ,
                C = 3,
            }
        },
        quote!(union U { #[fsdp(skip)] a: u32, b: f32 }),
        quote!(
            struct Unit;
        ),
    ]
}

fn random_token(dice: &mut Dice) -> TokenTree {
    const WORDS: &[&str] = &[
        "fsdp", "crate", "skip", "buffer", "frozen", "fused", "dtype", "tp", "dim", "self", "Self", "where",
        "struct", "enum", "union", "dyn", "for", "T", "_", "Vec", "Tensor", "f64", "unsafe", "impl", "const",
        "mut",
    ];
    const MARKS: &[char] =
        &[',', '=', '<', '>', ':', ';', '#', '&', '\'', '!', '+', '-', '.', '|', '$', '?', '*'];
    match dice.below(5) {
        0 => TokenTree::Ident(Ident::new(WORDS[dice.below(WORDS.len())], Span::call_site())),
        1 => {
            let spacing = if dice.below(2) == 0 { Spacing::Joint } else { Spacing::Alone };
            TokenTree::Punct(Punct::new(MARKS[dice.below(MARKS.len())], spacing))
        }
        2 => TokenTree::Literal(match dice.below(6) {
            0 => Literal::string(""),
            1 => Literal::string("T: "),
            2 => Literal::string("\u{1F600} .."),
            3 => Literal::f64_suffixed(1.5),
            4 => Literal::byte_string(b"f32"),
            _ => Literal::u128_suffixed(u128::MAX),
        }),
        3 => {
            let list = quote!(#[fsdp(skip, frozen = false, tp = dim(0))]);
            list.into_iter().nth(dice.below(2)).expect("an attribute is two tokens")
        }
        _ => {
            let delimiters = [Delimiter::Brace, Delimiter::Bracket, Delimiter::Parenthesis, Delimiter::None];
            TokenTree::Group(Group::new(delimiters[dice.below(4)], TokenStream::new()))
        }
    }
}

/// One token removed, doubled, replaced, inserted or wrapped, or the rest moved to the front, at any depth.
fn mutate(tokens: TokenStream, dice: &mut Dice) -> TokenStream {
    let mut trees: Vec<TokenTree> = tokens.into_iter().collect();
    if trees.is_empty() {
        return TokenStream::from(random_token(dice));
    }
    let at = dice.below(trees.len());
    if let TokenTree::Group(group) = &trees[at]
        && dice.below(5) != 0
    {
        let inner = mutate(group.stream(), dice);
        trees[at] = TokenTree::Group(Group::new(group.delimiter(), inner));
        return trees.into_iter().collect();
    }
    match dice.below(6) {
        0 => drop(trees.remove(at)),
        1 => trees.insert(at, trees[at].clone()),
        2 => trees[at] = random_token(dice),
        3 => trees.insert(at, random_token(dice)),
        4 => trees.rotate_left(at),
        _ => {
            let group = Group::new(Delimiter::None, TokenStream::from(trees[at].clone()));
            trees[at] = TokenTree::Group(group);
        }
    }
    trees.into_iter().collect()
}

#[test]
fn no_panic_and_always_items() {
    let mut dice = Dice::new(7);
    let mut refused = 0;
    for round in 0..400 {
        for seed in seeds() {
            let mut tokens = seed;
            for _ in 0..=round % 6 {
                tokens = mutate(tokens, &mut dice);
            }
            let shown = tokens.to_string();
            let output = derive(tokens);
            refused += usize::from(output.to_string().contains("compile_error"));
            if let Err(error) = syn::parse2::<syn::File>(output.clone()) {
                panic!("{error} in the output of\n{shown}\n\n{output}");
            }
        }
    }
    assert!(refused > 1000, "most mutations are mistakes, found only {refused}");
}

#[test]
fn arbitrary_tokens_are_errors() {
    let mut dice = Dice::new(11);
    for length in 0..300 {
        let tokens: TokenStream = (0..length % 40).map(|_| random_token(&mut dice)).collect();
        assert!(derive(tokens).to_string().contains("compile_error"));
    }
}
