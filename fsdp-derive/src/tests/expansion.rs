//! What the derive writes, token by token.

use proc_macro2::{TokenStream, TokenTree};
use quote::quote;

use super::derive;
use super::errors;

fn assert_expands(input: TokenStream, expected: TokenStream) {
    assert_eq!(derive(input).to_string(), expected.to_string());
}

#[test]
fn named_struct() {
    assert_expands(
        quote! {
            pub struct Mlp {
                #[fsdp(tp = column)]
                gate: Linear,
                #[fsdp(rename = "down_proj", tp = dim(1), dtype = "bf16")]
                down: Linear,
                hidden: usize,
            }
        },
        quote! {
            const _: () = {
                use ::fsdp::__private as __fsdp;
                #[automatically_derived]
                impl __fsdp::FsdpUnit for Mlp {
                    fn walk<'walk>(&'walk self, walker: &mut __fsdp::Walker<'_, 'walk>) {
                        walker.field::<Linear>(
                            &__fsdp::Field {
                                name: "gate",
                                attrs: __fsdp::Attrs {
                                    tp: __fsdp::Some(__fsdp::TpPlacement::Column),
                                    ..__fsdp::Attrs::NONE
                                }
                            },
                            &self.gate
                        );
                        walker.field::<Linear>(
                            &__fsdp::Field {
                                name: "down_proj",
                                attrs: __fsdp::Attrs {
                                    tp: __fsdp::Some(__fsdp::TpPlacement::Dim(1)),
                                    dtype: __fsdp::Some(__fsdp::Dtype::BF16),
                                    ..__fsdp::Attrs::NONE
                                }
                            },
                            &self.down
                        );
                    }
                }
            };
        },
    );
}

#[test]
fn generic_tuple_struct_with_every_kind_of_field() {
    assert_expands(
        quote! {
            struct Mixed<'a, 'walk, T = Leaf, B = u8, const N: usize = { 1 + 1 }>(
                [T; N],
                #[fsdp(buffer, rename = "running_mean")] Tensor,
                #[fsdp(skip)] Option<B>,
                &'a str,
                String,
                PhantomData<&'walk B>,
                #[fsdp(tie_with = "0.0.w", frozen = false, no_decay, expert)] Param,
            )
            where
                B: Copy;
        },
        quote! {
            const _: () = {
                use ::fsdp::__private as __fsdp;
                #[automatically_derived]
                impl<'a, 'walk, T, B, const N: usize> __fsdp::FsdpUnit for Mixed<'a, 'walk, T, B, N>
                where
                    B: Copy,
                    T: __fsdp::FsdpUnit
                {
                    fn walk<'walk_>(&'walk_ self, walker: &mut __fsdp::Walker<'_, 'walk_>) {
                        walker.field::<[T; N]>(
                            &__fsdp::Field { name: "0", attrs: __fsdp::Attrs::NONE },
                            &self.0
                        );
                        walker.buffer(
                            &__fsdp::Field { name: "running_mean", attrs: __fsdp::Attrs::NONE },
                            &self.1
                        );
                        let _: &::std::string::String = &self.4;
                        walker.field::<Param>(
                            &__fsdp::Field {
                                name: "6",
                                attrs: __fsdp::Attrs {
                                    expert: __fsdp::Some(true),
                                    frozen: __fsdp::Some(false),
                                    no_decay: __fsdp::Some(true),
                                    tie_with: __fsdp::Some("0.0.w"),
                                    ..__fsdp::Attrs::NONE
                                }
                            },
                            &self.6
                        );
                    }
                }
            };
        },
    );
}

#[test]
fn enum_of_alternatives() {
    assert_expands(
        quote! {
            #[fsdp(crate = "my::fsdp")]
            enum Ffn {
                Dense { r#in: Linear, scale: f32 },
                Experts(u8, Vec<Linear>),
                Identity,
            }
        },
        quote! {
            const _: () = {
                use my::fsdp::__private as __fsdp;
                #[automatically_derived]
                impl __fsdp::FsdpUnit for Ffn {
                    fn walk<'walk>(&'walk self, walker: &mut __fsdp::Walker<'_, 'walk>) {
                        match self {
                            Self::Dense { r#in: field0, .. } => {
                                walker.field::<Linear>(
                                    &__fsdp::Field { name: "in", attrs: __fsdp::Attrs::NONE },
                                    field0
                                );
                            }
                            Self::Experts { 1: field1, .. } => {
                                walker.field::<Vec<Linear> >(
                                    &__fsdp::Field { name: "1", attrs: __fsdp::Attrs::NONE },
                                    field1
                                );
                            }
                            Self::Identity { .. } => {}
                        }
                    }
                }
            };
        },
    );
}

#[test]
fn nothing_to_walk() {
    let walks_nothing = |ident: TokenStream, body: TokenStream| {
        quote! {
            const _: () = {
                use ::fsdp::__private as __fsdp;
                #[automatically_derived]
                impl __fsdp::FsdpUnit for #ident {
                    fn walk<'walk>(&'walk self, _: &mut __fsdp::Walker<'_, 'walk>) { #body }
                }
            };
        }
    };
    assert_expands(
        quote!(
            struct Unit;
        ),
        walks_nothing(quote!(Unit), quote!()),
    );
    assert_expands(
        quote!(
            struct Settings {
                eps: f64,
                heads: usize,
            }
        ),
        walks_nothing(quote!(Settings), quote!()),
    );
    assert_expands(
        quote!(
            enum Never {}
        ),
        walks_nothing(quote!(Never), quote!(match *self {})),
    );
}

#[test]
fn a_stub_follows_the_errors() {
    let output = derive(quote!(
        struct Both<T>
        where
            T: Copy,
        {
            #[fsdp(froze)]
            inner: T,
        }
    ))
    .to_string();
    let stub = quote! {
        const _: () = {
            use ::fsdp::__private as __fsdp;
            #[automatically_derived]
            impl<T> __fsdp::FsdpUnit for Both<T> where T: Copy, {
                fn walk<'walk>(&'walk self, _: &mut __fsdp::Walker<'_, 'walk>) {}
            }
        };
    };
    assert!(output.starts_with(":: core :: compile_error"), "{output}");
    assert!(output.ends_with(&stub.to_string()), "{output}");
}

fn bounds(input: TokenStream) -> String {
    assert_eq!(errors(input.clone()), [""; 0]);
    let output: syn::ItemConst = syn::parse2(derive(input)).unwrap();
    let syn::Expr::Block(block) = *output.expr else { panic!("a block") };
    let impls = block.block.stmts.iter().find_map(|stmt| match stmt {
        syn::Stmt::Item(syn::Item::Impl(item)) => Some(item.clone()),
        _ => None,
    });
    let clause = impls.unwrap().generics.where_clause;
    clause.map(|clause| quote!(#clause).to_string().replace(" :: ", "::")).unwrap_or_default()
}

#[test]
fn bounds_go_on_the_parameters_that_are_walked() {
    assert_eq!(
        bounds(quote!(
            struct S<T> {
                a: T,
            }
        )),
        "where T : __fsdp::FsdpUnit"
    );
    assert_eq!(
        bounds(quote!(
            struct S<T> {
                a: Vec<Option<T>>,
                b: T,
            }
        )),
        "where T : __fsdp::FsdpUnit"
    );
    assert_eq!(
        bounds(quote!(
            struct S<T> {
                a: Vec<fsdp::Unit<T>>,
            }
        )),
        "where T : __fsdp::FsdpUnit"
    );
    assert_eq!(
        bounds(quote!(
            struct S<A, B> {
                a: (A, BTreeMap<String, B>),
            }
        )),
        "where A : __fsdp::FsdpUnit , B : __fsdp::FsdpUnit"
    );
    assert_eq!(
        bounds(quote!(
            enum E<A> {
                One,
                Two(Box<A>),
            }
        )),
        "where A : __fsdp::FsdpUnit"
    );
    assert_eq!(
        bounds(quote!(
            struct S<T: Family> {
                a: T::Block,
            }
        )),
        "where T::Block : __fsdp::FsdpUnit"
    );
    assert_eq!(
        bounds(quote!(
            struct S<T: Family> {
                a: Vec<<T as Family>::Block>,
            }
        )),
        "where < T as Family >::Block : __fsdp::FsdpUnit"
    );
}

#[test]
fn no_bounds_on_anything_else() {
    assert_eq!(
        bounds(quote!(
            struct S<T> {
                #[fsdp(skip)]
                a: T,
                b: Param,
            }
        )),
        ""
    );
    assert_eq!(
        bounds(quote!(
            struct S<T> {
                a: PhantomData<T>,
            }
        )),
        ""
    );
    assert_eq!(
        bounds(quote!(
            struct S<T> {
                a: Outer<T>,
            }
        )),
        ""
    );
    assert_eq!(
        bounds(quote!(
            struct Node {
                next: Option<Box<Node>>,
            }
        )),
        ""
    );
    assert_eq!(
        bounds(quote!(
            struct Tree<T> {
                #[fsdp(skip)]
                t: T,
                kids: Vec<Tree<T>>,
            }
        )),
        ""
    );
}

#[test]
fn a_declared_bound_replaces_the_inferred_ones() {
    assert_eq!(
        bounds(quote!(
            #[fsdp(bound = "T: Layer, U: Copy")]
            struct S<T, U>
            where
                T: Send,
            {
                a: T,
                b: Outer<U>,
            }
        )),
        "where T : Send , T : Layer , U : Copy"
    );
    assert_eq!(
        bounds(quote!(
            #[fsdp(bound = "")]
            struct S<T: Layer> {
                a: T,
            }
        )),
        ""
    );
}

#[test]
fn crate_path_may_be_tokens() {
    let output = derive(quote!(
        #[fsdp(crate = super::reexport::fsdp)]
        struct S;
    ))
    .to_string();
    assert!(output.contains("use super :: reexport :: fsdp :: __private as __fsdp"), "{output}");
}

/// Every path of an expansion begins with `::`, the crate path the user gave, `__fsdp`, `self`, `Self`, or is
/// the user's own.
#[test]
fn expansions_name_nothing_that_could_be_shadowed() {
    let input = quote! {
        enum E<T> {
            A { #[fsdp(tp = row, frozen, no_decay, expert, dtype = "f16", tie_with = "x")] a: T },
            B(#[fsdp(buffer)] USER, String, Option<Vec<f32>>),
        }
    };
    let allowed = [
        "const",
        "use",
        "impl",
        "for",
        "where",
        "fn",
        "mut",
        "match",
        "let",
        "self",
        "Self",
        "as",
        "true",
        "automatically_derived",
        "fsdp",
        "core",
        "std",
        "walk",
        "walker",
        "name",
        "attrs",
        "tp",
        "frozen",
        "no_decay",
        "expert",
        "dtype",
        "tie_with",
        "E",
        "T",
        "A",
        "a",
        "B",
        "_",
        "field0",
        "field1",
        "field2",
        "f32",
        "__fsdp",
        "buffer",
        "field",
    ];
    let mut before = String::new();
    let mut pending = vec![derive(input).into_iter()];
    let mut foreign = Vec::new();
    while let Some(tokens) = pending.last_mut() {
        match tokens.next() {
            None => drop(pending.pop()),
            Some(TokenTree::Group(group)) => {
                before.clear();
                pending.push(group.stream().into_iter());
            }
            Some(TokenTree::Ident(ident)) => {
                let ident = ident.to_string();
                if !before.ends_with("::") && !allowed.contains(&ident.as_str()) {
                    foreign.push(ident);
                }
                before.clear();
            }
            Some(token) => before.push_str(&token.to_string()),
        }
    }
    assert_eq!(foreign, [""; 0]);
}
