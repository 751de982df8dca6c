//! `#[derive(FsdpUnit)]`.

/// Placeholder until the macro is written.
#[proc_macro_derive(FsdpUnit, attributes(fsdp))]
pub fn derive_fsdp_unit(_input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    proc_macro::TokenStream::new()
}
