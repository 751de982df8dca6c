//! Where the user's crate finds `fsdp`.

use proc_macro_crate::{FoundCrate, crate_name};

/// `::fsdp`, or what the user's manifest renames the dependency to. A crate that has `fsdp` only through
/// another one's re-export must say so, with `#[fsdp(crate = "..")]`.
pub fn of_the_user() -> syn::Path {
    let renamed = match crate_name("fsdp") {
        Ok(FoundCrate::Name(name)) => syn::parse_str(&format!("::{name}")).ok(),
        // The crate itself is in its own reach as `::fsdp`.
        Ok(FoundCrate::Itself) | Err(_) => None,
    };
    renamed.unwrap_or_else(|| syn::parse_quote!(::fsdp))
}
