//! What the derive writes, as a user sees it with `cargo expand`. After a change of the expansion:
//! `INSTA_UPDATE=always cargo test -p fsdp-derive`, then read the diff of `snapshots/`.

use proc_macro2::TokenStream;
use quote::quote;

use super::derive;

/// The input and its expansion, as rustfmt would write them, against the snapshot `name`.
fn assert_expansion(name: &str, input: TokenStream) {
    let shown = |tokens| prettyplease::unparse(&syn::parse2(tokens).expect("items"));
    let golden = format!("{}\n// expands to\n\n{}", shown(input.clone()), shown(derive(input)));
    let mut settings = insta::Settings::clone_current();
    settings.set_omit_expression(true);
    settings.set_prepend_module_to_snapshot(false);
    settings.bind(|| insta::assert_snapshot!(name, golden));
}

#[test]
fn struct_with_attributes() {
    assert_expansion(
        "struct_with_attributes",
        quote! {
            #[fsdp(rename_all = "camelCase")]
            pub struct Mlp {
                #[fsdp(tp = column)]
                gate_proj: Linear,
                #[fsdp(rename = "down_proj", tp = dim(1), dtype = "bf16")]
                down: Linear,
                #[fsdp(init = normal(0.0, 0.02), frozen, no_decay = false)]
                scale: Param,
                hidden: usize,
            }
        },
    );
}

#[test]
fn generic_tuple_struct_with_every_kind_of_field() {
    assert_expansion(
        "generic_tuple_struct_with_every_kind_of_field",
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
    );
}

#[test]
fn enum_of_alternatives() {
    assert_expansion(
        "enum_of_alternatives",
        quote! {
            #[fsdp(crate = "my::fsdp")]
            enum Ffn {
                Dense { r#in: Linear, scale: f32 },
                Experts(u8, Vec<Linear>),
                Shared(Linear),
                Identity,
            }
        },
    );
}

#[test]
fn constant_shapes() {
    assert_expansion(
        "constant_shapes",
        quote! {
            #[fsdp(tp_size = RANKS)]
            pub struct Linear<const IN: usize, const OUT: usize> {
                #[fsdp(shape = [OUT, IN], init = uniform(-BOUND, BOUND), tp = column)]
                weight: Param,
                #[fsdp(shape = [3 * OUT], init = zeros)]
                bias: Option<Param>,
            }
        },
    );
}

#[test]
fn fused_parameters() {
    assert_expansion(
        "fused_parameters",
        quote! {
            pub struct Layer {
                #[fsdp(fused("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), tp = column)]
                qkv: Linear,
                #[fsdp(shape = [2 * HIDDEN, HIDDEN], fused("gate", "up"))]
                gate_up: Param,
            }
        },
    );
}

#[test]
fn nothing_to_walk() {
    let empty = quote! {
        struct Unit;
    };
    assert_expansion("no_fields", empty);
    let plain = quote! {
        struct Settings {
            eps: f64,
            heads: usize,
        }
    };
    assert_expansion("only_plain_data", plain);
    let never = quote! {
        enum Never {}
    };
    assert_expansion("no_variants", never);
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
                const TREE: __fsdp::Tree = __fsdp::Tree::EMPTY;
                fn walk<'walk>(&'walk self, _: &mut __fsdp::Walker<'_, 'walk>) {}
            }
        };
    };
    assert!(output.starts_with(":: core :: compile_error"), "{output}");
    assert!(output.ends_with(&stub.to_string()), "{output}");
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
