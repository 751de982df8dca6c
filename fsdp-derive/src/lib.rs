//! `#[derive(FsdpUnit)]`: writes the walk over a module's parameters, buffers and nested modules.
//!
//! A derive runs in four steps, one file each: `attr` reads the `#[fsdp(..)]` lists, `model` holds what the
//! user said, `check` finds all that is wrong with it, `expand` writes the impl. `types` is what can be known
//! of a type from its spelling, `bound` the where-clause of the impl, `rename` the case of names, `krate` where
//! the user has the `fsdp` crate, `suggest` the "did you mean", `ctxt` the errors found so far.

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

#[cfg(test)]
mod tests;

/// Makes a struct or an enum a module that can be sharded: implements `fsdp::FsdpUnit`.
///
/// Fields are walked in declaration order and named by themselves: a field `gate` of a field `mlp` is
/// `mlp.gate`, an element of a `Vec` is named by its index, a field of a tuple struct by its position. The
/// fields of an enum's live variant are named as if they were the enum's own; the only field of a tuple variant
/// has no name, its content is the variant's own.
///
/// Each field must be a `Param`, a `Unit<..>`, a module that derives `FsdpUnit`, or `Vec`, `Option`, `Box`,
/// `Arc`, an array, a tuple or a `BTreeMap` of those. Numbers, `bool`, `char`, strings, `PhantomData`, and
/// `Option`, `Vec`, `Box`, arrays and tuples of only those are left out without being asked; anything else
/// that holds no parameters needs `skip`.
///
/// # Attributes of a field
///
/// What is said of a module holds for all that is inside it, unless it is said otherwise further in.
///
/// | Attribute | Meaning |
/// |---|---|
/// | `#[fsdp(rename = "model.norm")]` | Named so in checkpoints; may contain dots |
/// | `#[fsdp(skip)]` | Not a part of the model's state |
/// | `#[fsdp(buffer)]` | A candle `Tensor`, or an `Option`, `Vec` or array of them, that is kept and saved, never trained and never reduced |
/// | `#[fsdp(frozen)]`, `#[fsdp(frozen = false)]` | No gradient, no optimizer state |
/// | `#[fsdp(no_decay)]`, `#[fsdp(no_decay = false)]` | Weight decay is not applied |
/// | `#[fsdp(expert)]`, `#[fsdp(expert = false)]` | Belongs to the expert mesh |
/// | `#[fsdp(dtype = "bf16")]` | Element type: `f32`, `bf16` or `f16` |
/// | `#[fsdp(tp = column)]` | Cut by tensor parallelism: `column`, `row`, `replicate` or `dim(N)` |
/// | `#[fsdp(init = normal(0.0, 0.02))]` | Initial value: `zeros`, `ones`, `constant(VALUE)`, `normal(MEAN, STD)` or `uniform(LOW, HIGH)`, the numbers constants of type `f32` |
/// | `#[fsdp(shape = [OUT, IN])]` | Shape of the `Param`, or of each in a container of them: constants of type `usize` |
/// | `#[fsdp(tie_with = "embed.weight")]` | Shares its storage with that parameter (or that module's parameters) |
///
/// # Attributes of the struct or enum
///
/// | Attribute | Meaning |
/// |---|---|
/// | `#[fsdp(rename_all = "camelCase")]` | Case of the fields' names in checkpoints: serde's rules |
/// | `#[fsdp(tp_size = 8)]` | Declared shapes must be divisible by that many tensor-parallel ranks |
/// | `#[fsdp(crate = "path::to::fsdp")]` | Where the `fsdp` crate is, if the manifest does not say |
/// | `#[fsdp(bound = "T: FsdpUnit")]` | Where-clause of the impl, in place of the inferred one |
///
/// A type parameter gets the bound `FsdpUnit` if a walked field is of that type, or of a container of it. One
/// that is only an argument of another module's type (`inner: Outer<T>`) gets none: declare the bound on the
/// struct, or with `bound`.
#[proc_macro_derive(FsdpUnit, attributes(fsdp))]
pub fn derive_fsdp_unit(input: proc_macro::TokenStream) -> proc_macro::TokenStream {
    derive(input.into(), krate::of_the_user).into()
}

/// The derive on `proc_macro2` tokens, so that tests can call it. `krate` says where the `fsdp` crate is if the
/// input does not: it reads the user's manifest.
fn derive(input: proc_macro2::TokenStream, krate: impl FnOnce() -> syn::Path) -> proc_macro2::TokenStream {
    let input = match syn::parse2::<syn::DeriveInput>(input) {
        Ok(input) => input,
        Err(error) => return error.into_compile_error(),
    };
    let ctxt = ctxt::Ctxt::new();
    let module = model::Module::from_input(&ctxt, &input);
    let krate = module.as_ref().and_then(|module| module.attrs.krate.clone()).unwrap_or_else(krate);
    if let Some(module) = &module {
        check::check(&ctxt, module);
    }
    match (ctxt.check(), &module) {
        (Ok(()), Some(module)) => expand::expand(module, &krate),
        // A mistake must be one message: without an impl, every use of the type would add its own.
        (Err(error), _) => {
            let stub = expand::stub(&input, &krate);
            let error = error.into_compile_error();
            quote::quote!(#error #stub)
        }
        (Ok(()), None) => expand::stub(&input, &krate),
    }
}
