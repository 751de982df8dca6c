//! Writes the impl: data, and calls into `__private`.

use proc_macro2::{Ident, Span, TokenStream, TokenTree};
use quote::{ToTokens, format_ident, quote};
use syn::ext::IdentExt;
use syn::spanned::Spanned;
use syn::{DeriveInput, Generics, Lifetime, LitStr, Path};

use crate::attr::{Dtype, FieldAttrs, Init, Tp};
use crate::bound;
use crate::model::{self, Body, Field, Module, Role, Variant};

/// The impl of a module in which nothing is wrong.
pub fn expand(module: &Module, krate: &Path) -> TokenStream {
    // Hygiene does not part a binding from the user's constants and tuple structs: the prefix does.
    let walker = Ident::new("__walker", Span::mixed_site());
    let mut fields = Fields { module, written: Vec::new(), cut: Vec::new() };
    let (tree, body) = match &module.body {
        Body::Struct(members) => {
            let statements: Vec<_> = members
                .iter()
                .filter_map(|field| {
                    let member = &field.member;
                    fields.walk(field, &walker, quote!(&self.#member))
                })
                .collect();
            let tree = fields.written.is_empty().then(|| quote!(EMPTY));
            (tree, quote!(#(#statements)*))
        }
        Body::Enum(variants) if variants.is_empty() => (Some(quote!(EMPTY)), quote!(match *self {})),
        Body::Enum(variants) => {
            let arms = variants.iter().map(|variant| {
                let ident = &variant.ident;
                let name = format!("{}::{}", module.ident.unraw(), ident.unraw());
                let name = LitStr::new(&name, Span::mixed_site());
                let (bindings, statements) = fields.walk_variant(variant, &walker);
                quote!(Self::#ident { #(#bindings,)* .. } => { #walker.variant(#name); #(#statements)* })
            });
            let arms = arms.collect::<Vec<_>>();
            (Some(quote!(ENUM)), quote!(match self { #(#arms)* }))
        }
    };
    let body = match fields.written.len() {
        0 => body,
        // Not `Self::FIELDS`: the user may have a constant of that name.
        _ => quote!(let __fields = <Self as __fsdp::FsdpUnit>::FIELDS; #body),
    };
    let written = &fields.written;
    let described =
        (!written.is_empty()).then(|| quote!(const FIELDS: &'static [__fsdp::Field] = &[#(#written,)*];));
    // A struct's tree is that of its fields: the trait says so.
    let tree = tree.map(|tree| quote!(const TREE: __fsdp::Tree = __fsdp::Tree::#tree;));
    let (check_here, check_in_walk) = tp_size(module, &fields.cut);
    Impl {
        ident: &module.ident,
        generics: &module.generics,
        krate,
        where_clause: bound::where_clause(module, &quote!(__fsdp::FsdpUnit)).to_token_stream(),
        constants: quote!(#described #tree),
        walker: if fields.use_walker() { quote!(#walker) } else { quote!(_) },
        body: quote!(#check_in_walk #body),
        beside: check_here,
        deprecated: module.deprecated,
    }
    .write()
}

/// The impl that stands in when something is wrong: it walks nothing.
pub fn stub(input: &DeriveInput, krate: &Path) -> TokenStream {
    Impl {
        ident: &input.ident,
        generics: &input.generics,
        krate,
        where_clause: input.generics.where_clause.to_token_stream(),
        constants: quote!(
            const TREE: __fsdp::Tree = __fsdp::Tree::EMPTY;
        ),
        walker: quote!(_),
        body: TokenStream::new(),
        beside: TokenStream::new(),
        deprecated: model::is_deprecated(input),
    }
    .write()
}

struct Impl<'m> {
    ident: &'m Ident,
    generics: &'m Generics,
    krate: &'m Path,
    where_clause: TokenStream,
    constants: TokenStream,
    walker: TokenStream,
    body: TokenStream,
    beside: TokenStream,
    deprecated: bool,
}

impl Impl<'_> {
    fn write(self) -> TokenStream {
        let Impl { ident, generics, krate, where_clause, constants, walker, body, beside, deprecated } = self;
        let (impl_generics, type_generics, _) = generics.split_for_impl();
        let walk = fresh_lifetime(generics);
        // Not always: where the lint is forbidden, to allow it is an error.
        let allow = deprecated.then(|| quote!(#[allow(deprecated)]));
        quote! {
            #allow
            const _: () = {
                use #krate::__private as __fsdp;
                #[automatically_derived]
                impl #impl_generics __fsdp::FsdpUnit for #ident #type_generics #where_clause {
                    #constants
                    fn walk<#walk>(&#walk self, #walker: &mut __fsdp::Walker<'_, #walk>) { #body }
                }
                #beside
            };
        }
    }
}

/// The checks of the declared shapes against `tp_size`: beside the impl, or, where they depend on type parameters, in
/// the walk. `cut` are the fields with a shape and a placement of their own: each is checked where its placement is
/// said, and what is inside of other fields where `tp_size` is.
fn tp_size(module: &Module, cut: &[(usize, Span)]) -> (TokenStream, TokenStream) {
    let Some(tp_size) = &module.attrs.tp_size else { return Default::default() };
    let (ident, ranks) = (&module.ident, &tp_size.value);
    let generics = &module.generics;
    let in_walk = generics.type_params().next().is_some() || generics.const_params().next().is_some();
    let lifetimes = generics.lifetimes().map(|_| quote!('_));
    let ty = if in_walk { quote!(Self) } else { quote!(#ident<#(#lifetimes),*>) };
    let inside = located(tp_size.span, quote!(__fsdp::check_tp_size::<#ty>(#ranks)));
    let own = cut.iter().map(|&(index, span)| {
        let index = proc_macro2::Literal::usize_unsuffixed(index);
        located(span, quote!(__fsdp::check_tp_field::<#ty>(#index, #ranks)))
    });
    let checks = own.chain([inside]);
    if in_walk {
        (TokenStream::new(), quote!(#(const { #checks };)*))
    } else {
        (quote!(#(const _: () = #checks;)*), TokenStream::new())
    }
}

/// The tokens, shown at `span`.
fn located(span: Span, tokens: TokenStream) -> TokenStream {
    let relocate = |mut token: TokenTree| {
        token.set_span(token.span().located_at(span));
        token
    };
    tokens.into_iter().map(relocate).collect()
}

/// The entries of `FIELDS`, written as the statements that refer to them are.
struct Fields<'m> {
    module: &'m Module,
    written: Vec<TokenStream>,
    /// Those with a shape and a placement, which is said there.
    cut: Vec<(usize, Span)>,
}

impl Fields<'_> {
    /// The bindings of a variant's pattern and the statements that walk them.
    fn walk_variant(&mut self, variant: &Variant, walker: &Ident) -> (Vec<TokenStream>, Vec<TokenStream>) {
        let walk = |(position, field): (usize, &Field)| {
            let member = &field.member;
            let binding = format_ident!("__field{position}", span = Span::mixed_site());
            let statement = self.walk(field, walker, quote!(#binding))?;
            Some((quote!(#member: #binding), statement))
        };
        variant.fields.iter().enumerate().filter_map(walk).unzip()
    }

    /// The statement for one field, whose reference is `place`; none for what is skipped.
    fn walk(&mut self, field: &Field, walker: &Ident, place: TokenStream) -> Option<TokenStream> {
        let place = at_type(field, place);
        // Called with the type as it was written, so that rustc points there if it is no module. The constant
        // names the same trait of the same type, so that rustc says it once.
        let (of_type, tree) = match &field.role {
            Role::Walked => {
                let ty = &field.ty;
                let bound = if field.attrs.shape.is_some() { quote!(Shaped) } else { quote!(FsdpUnit) };
                let of_type = quote!(<#ty as __fsdp::#bound>);
                (of_type.clone(), quote!(&#of_type::TREE))
            }
            Role::Buffer => {
                let ty = &field.ty;
                (quote!(<#ty as __fsdp::Buffer>), quote!(&__fsdp::Tree::EMPTY))
            }
            Role::Skipped | Role::Plain(None) => return None,
            Role::Plain(Some(meant)) => return Some(quote!(let _: &#meant = #place;)),
        };
        // A variant's content is not followed: a recursive enum has no end.
        let is_enum = matches!(self.module.body, Body::Enum(_));
        let tree = if is_enum { quote!(&__fsdp::Tree::ENUM) } else { tree };
        let index = proc_macro2::Literal::usize_unsuffixed(self.written.len());
        let name = LitStr::new(&field.name, Span::mixed_site());
        let attrs = attributes(&field.attrs);
        if let (Some(tp), Some(_)) = (&field.attrs.tp, &field.attrs.shape) {
            self.cut.push((self.written.len(), tp.span));
        }
        self.written.push(quote!(__fsdp::Field { name: #name, attrs: #attrs, tree: #tree }));
        Some(quote!(#of_type::visit(#place, &__fields[#index], #walker);))
    }

    /// Some statement names the walker.
    fn use_walker(&self) -> bool {
        match &self.module.body {
            Body::Struct(_) => !self.written.is_empty(),
            Body::Enum(variants) => !variants.is_empty(),
        }
    }
}

/// `place`, shown where the field's type is: what rustc says of its value belongs there.
fn at_type(field: &Field, place: TokenStream) -> TokenStream {
    located(field.ty.span(), place)
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
    let init = attrs.init.as_ref().map(|said| {
        let init = match &said.value {
            Init::Zeros => quote!(Zeros),
            Init::Ones => quote!(Ones),
            Init::Constant(value) => quote!(Constant(#value)),
            Init::Normal(mean, std) => quote!(Normal { mean: #mean, std: #std }),
            Init::Uniform(low, high) => quote!(Uniform { low: #low, high: #high }),
        };
        quote!(init: __fsdp::Some(__fsdp::Init::#init))
    });
    let shape = attrs.shape.as_ref().map(|said| {
        let dims = &said.value;
        quote!(shape: __fsdp::Some(&[#dims]))
    });
    let fused = attrs.fused.as_ref().map(|said| {
        let names = said.value.iter().map(|name| LitStr::new(&name.value(), Span::mixed_site()));
        quote!(fused: __fsdp::Some(&[#(#names),*]))
    });
    let all = [tp, expert, frozen, no_decay, dtype, init, tie_with, shape, fused];
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
