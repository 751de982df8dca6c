//! Where the user's crate finds `fsdp`.

use proc_macro_crate::{Error, FoundCrate, crate_name};

/// What a user is told whose manifest does not have the crate.
pub const NOT_FOUND: &str = "this package does not depend on `fsdp`: if it reaches it through another crate, say where it is, \
     as in `#[fsdp(crate = \"that_crate::fsdp\")]`";

/// `::fsdp`, or what the user's manifest renames the dependency to. `None` if it does not have it: a crate that has `fsdp`
/// only through another one's re-export must say so, with `#[fsdp(crate = "..")]`.
pub fn of_the_user() -> Option<syn::Path> {
    let renamed = match crate_name("fsdp") {
        Ok(FoundCrate::Name(name)) => syn::parse_str(&format!("::{name}")).ok(),
        Err(Error::CrateNotFound { .. }) => return None,
        // The crate itself is in its own reach as `::fsdp`. Where there is no manifest to read, that is the likeliest.
        Ok(FoundCrate::Itself) | Err(_) => None,
    };
    Some(renamed.unwrap_or_else(|| syn::parse_quote!(::fsdp)))
}
