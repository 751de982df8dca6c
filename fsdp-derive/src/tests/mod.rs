//! Tests of the derive as a function of tokens.

mod bounds;
mod broken_input;
mod expansion;
mod generate;
mod generated;
mod hygiene;
mod messages;
mod mistakes;

use proc_macro2::TokenStream;

/// The derive in a crate that has `fsdp` under its own name.
fn derive(input: TokenStream) -> TokenStream {
    crate::derive(input, || Some(syn::parse_quote!(::fsdp)))
}

/// The messages of a derive, in order; empty if it succeeded.
fn errors(input: TokenStream) -> Vec<String> {
    let output: syn::File = syn::parse2(derive(input)).expect("the output is items");
    let message = |item: &syn::Item| match item {
        syn::Item::Macro(item) if item.mac.path.segments.last()?.ident == "compile_error" => {
            Some(item.mac.parse_body::<syn::LitStr>().expect("the message is a string").value())
        }
        _ => None,
    };
    output.items.iter().filter_map(message).collect()
}
