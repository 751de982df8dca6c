//! The where-clause that the derive writes.

use proc_macro2::TokenStream;
use quote::quote;

use super::{derive, errors};

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
