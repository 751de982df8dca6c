//! Writes the impl: data, and calls into `__private`.

use proc_macro2::{Ident, Span, TokenStream, TokenTree};
use quote::{format_ident, quote};
use syn::spanned::Spanned;
use syn::{DeriveInput, Generics, Lifetime, LitStr};

use crate::attr::{Dtype, FieldAttrs, Tp};
use crate::bound;
use crate::model::{Body, Field, Module, Role};

/// The impl of a module in which nothing is wrong.
pub fn expand(module: &Module) -> TokenStream {
    let walker = Ident::new("walker", Span::mixed_site());
    let body = match &module.body {
        Body::Struct(fields) => {
            let statements = fields.iter().filter_map(|field| {
                let member = &field.member;
                walk_field(field, &walker, quote!(&self.#member))
            });
            quote!(#(#statements)*)
        }
        Body::Enum(variants) if variants.is_empty() => quote!(match *self {}),
        Body::Enum(variants) => {
            let arms = variants.iter().map(|variant| {
                let ident = &variant.ident;
                let (bindings, statements) = walk_variant(&variant.fields, &walker);
                quote!(Self::#ident { #(#bindings,)* .. } => { #(#statements)* })
            });
            quote!(match self { #(#arms)* })
        }
    };
    let is_walked = module.alternatives().into_iter().flatten().any(Field::is_state);
    let walker = if is_walked { quote!(#walker) } else { quote!(_) };
    let fsdp_unit = quote!(__fsdp::FsdpUnit);
    let where_clause = bound::where_clause(module, &fsdp_unit);
    implement(&module.ident, &module.generics, &krate(Some(module)), &quote!(#where_clause), &walker, &body)
}

/// The impl that stands in when something is wrong: it walks nothing.
pub fn stub(input: &DeriveInput, module: Option<&Module>) -> TokenStream {
    let (_, _, where_clause) = input.generics.split_for_impl();
    implement(
        &input.ident,
        &input.generics,
        &krate(module),
        &quote!(#where_clause),
        &quote!(_),
        &TokenStream::new(),
    )
}

fn implement(
    ident: &Ident,
    generics: &Generics,
    krate: &TokenStream,
    where_clause: &TokenStream,
    walker: &TokenStream,
    body: &TokenStream,
) -> TokenStream {
    let (impl_generics, type_generics, _) = generics.split_for_impl();
    let walk = fresh_lifetime(generics);
    quote! {
        const _: () = {
            use #krate::__private as __fsdp;
            #[automatically_derived]
            impl #impl_generics __fsdp::FsdpUnit for #ident #type_generics #where_clause {
                fn walk<#walk>(&#walk self, #walker: &mut __fsdp::Walker<'_, #walk>) { #body }
            }
        };
    }
}

fn krate(module: Option<&Module>) -> TokenStream {
    match module.and_then(|module| module.attrs.krate.as_ref()) {
        Some(path) => quote!(#path),
        None => quote!(::fsdp),
    }
}

/// The bindings of a variant's pattern and the statements that walk them.
fn walk_variant(fields: &[Field], walker: &Ident) -> (Vec<TokenStream>, Vec<TokenStream>) {
    let walk = |(position, field): (usize, &Field)| {
        let member = &field.member;
        let binding = format_ident!("field{position}", span = Span::mixed_site());
        let statement = walk_field(field, walker, quote!(#binding))?;
        Some((quote!(#member: #binding), statement))
    };
    fields.iter().enumerate().filter_map(walk).unzip()
}

/// The statement for one field, whose reference is `place`; none for what is skipped.
fn walk_field(field: &Field, walker: &Ident, place: TokenStream) -> Option<TokenStream> {
    let ty = &field.ty;
    let place = at_type(field, place);
    match &field.role {
        // Called with the type as it was written, so that rustc points there if it is no module.
        Role::Walked => {
            let described = describe(field);
            Some(quote!(#walker.field::<#ty>(#described, #place);))
        }
        Role::Buffer => {
            let described = describe(field);
            Some(quote!(#walker.buffer(#described, #place);))
        }
        Role::Skipped | Role::Plain(None) => None,
        Role::Plain(Some(meant)) => Some(quote!(let _: &#meant = #place;)),
    }
}

/// `place`, shown where the field's type is: what rustc says of its value belongs there.
fn at_type(field: &Field, place: TokenStream) -> TokenStream {
    let span = field.ty.span();
    let relocate = |mut token: TokenTree| {
        token.set_span(token.span().located_at(span));
        token
    };
    place.into_iter().map(relocate).collect()
}

fn describe(field: &Field) -> TokenStream {
    let name = LitStr::new(&field.name(), Span::mixed_site());
    let attrs = attributes(&field.attrs);
    quote!(&__fsdp::Field { name: #name, attrs: #attrs })
}

fn attributes(attrs: &FieldAttrs) -> TokenStream {
    let tp = attrs.tp.as_ref().map(|said| match said.value {
        Tp::Column => quote!(tp: __fsdp::Some(__fsdp::TpPlacement::Column)),
        Tp::Row => quote!(tp: __fsdp::Some(__fsdp::TpPlacement::Row)),
        Tp::Replicate => quote!(tp: __fsdp::Some(__fsdp::TpPlacement::Replicate)),
        Tp::Dim(dim) => {
            let dim = proc_macro2::Literal::usize_unsuffixed(dim);
            quote!(tp: __fsdp::Some(__fsdp::TpPlacement::Dim(#dim)))
        }
    });
    let switch = |name: &str, value: bool| {
        let name = Ident::new(name, Span::mixed_site());
        quote!(#name: __fsdp::Some(#value))
    };
    let expert = attrs.expert.as_ref().map(|said| switch("expert", said.value));
    let frozen = attrs.frozen.as_ref().map(|said| switch("frozen", said.value));
    let no_decay = attrs.no_decay.as_ref().map(|said| switch("no_decay", said.value));
    let dtype = attrs.dtype.as_ref().map(|said| {
        let dtype = match said.value {
            Dtype::F32 => quote!(F32),
            Dtype::BF16 => quote!(BF16),
            Dtype::F16 => quote!(F16),
        };
        quote!(dtype: __fsdp::Some(__fsdp::Dtype::#dtype))
    });
    let tie_with = attrs.tie_with.as_ref().map(|said| {
        let target = LitStr::new(&said.value.value(), Span::mixed_site());
        quote!(tie_with: __fsdp::Some(#target))
    });
    let all = [tp, expert, frozen, no_decay, dtype, tie_with];
    if all.iter().all(Option::is_none) {
        return quote!(__fsdp::Attrs::NONE);
    }
    // An update that updates nothing is a lint.
    let rest = all.iter().any(Option::is_none).then(|| quote!(..__fsdp::Attrs::NONE));
    let said = all.iter().flatten();
    quote!(__fsdp::Attrs { #(#said,)* #rest })
}

/// A lifetime that is not one of the user's.
fn fresh_lifetime(generics: &Generics) -> Lifetime {
    let mut name = "'walk".to_string();
    while generics.lifetimes().any(|param| param.lifetime.to_string() == name) {
        name.push('_');
    }
    Lifetime::new(&name, Span::mixed_site())
}
