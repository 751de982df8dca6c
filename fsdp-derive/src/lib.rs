//! `#[derive(FsdpUnit)]`: writes the walk over a module's parameters, buffers and nested modules.
//!
//! A derive runs in four steps, one file each: `attr` reads the `#[fsdp(..)]` lists, `model` holds what the
//! user said, `check` finds all that is wrong with it, `expand` writes the impl. `value` is what the words of a
//! list are given, `types` what can be known of a type from its spelling, `bound` the where-clause of the impl,
//! `rename` the case of names, `krate` where the user has the `fsdp` crate, `suggest` the "did you mean", `ctxt`
//! the errors found so far.

mod attr;
mod bound;
mod check;
mod ctxt;
mod expand;
mod krate;
mod model;
mod rename;
mod suggest;
mod types;
mod value;

#[cfg(test)]
mod tests;

// The examples need the crate that depends on this one: it runs them.
#[cfg_attr(not(doctest), doc = include_str!("../attributes.md"))]
#[proc_macro_derive(FsdpUnit, attributes(fsdp))]
pub fn derive_fsdp_unit(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    derive(input.into(), krate::of_the_user).into()
}

/// The derive on `proc_macro2` tokens, so that tests can call it. `krate` says where the `fsdp` crate is, if it is, if the
/// input does not: it reads the user's manifest.
fn derive(
    input: proc_macro2::TokenStream,
    krate: impl FnOnce() -> Option<syn::Path>,
) -> proc_macro2::TokenStream {
    let input = match syn::parse2::<syn::DeriveInput>(input) {
        Ok(input) => input,
        Err(error) => return error.into_compile_error(),
    };
    let ctxt = ctxt::Ctxt::new();
    let module = model::Module::from_input(&ctxt, &input);
    let krate = module.as_ref().and_then(|module| module.attrs.krate.clone()).or_else(krate);
    if let Some(module) = &module {
        check::check(&ctxt, module);
    }
    // It may be what a mistaken list was to say.
    if krate.is_none() && ctxt.is_empty() {
        ctxt.error(proc_macro2::Span::call_site(), krate::NOT_FOUND);
    }
    match (ctxt.check(), &module, &krate) {
        (Ok(()), Some(module), Some(krate)) => expand::expand(module, krate),
        // A mistake must be one message: without an impl, every use of the type would add its own.
        (Err(error), _, krate) => {
            let stub = krate.as_ref().map(|krate| expand::stub(&input, krate));
            let error = error.into_compile_error();
            quote::quote!(#error #stub)
        }
        (Ok(()), None, Some(krate)) => expand::stub(&input, krate),
        (Ok(()), _, None) => unreachable!("a crate that was not found is a mistake"),
    }
}
