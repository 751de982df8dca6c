//! What the derive says is wrong.

use quote::quote;

use super::errors;

#[track_caller]
fn assert_error(input: proc_macro2::TokenStream, expected: &str) {
    assert_eq!(errors(input), [expected]);
}

#[test]
fn unions_are_refused_once() {
    let found = errors(quote!(union U { #[fsdp(nonsense)] a: u32 }));
    assert_eq!(found.len(), 1);
    assert!(found[0].starts_with("a union cannot be sharded"), "{found:?}");
}

#[test]
fn unknown_words_get_the_nearest_or_all_known_ones() {
    assert_error(
        quote!(
            struct S {
                #[fsdp(forzen)]
                a: P,
            }
        ),
        "unknown attribute `forzen`: did you mean `frozen`?",
    );
    assert_error(
        quote!(
            struct S {
                #[fsdp(colour = 3)]
                a: P,
            }
        ),
        "unknown attribute `colour`: expected `buffer`, `dtype`, `expert`, `frozen`, `no_decay`, `rename`, `shape`, \
         `skip`, `tie_with` or `tp`",
    );
    assert_error(
        quote!(
            struct S {
                #[fsdp(a::b)]
                a: P,
            }
        ),
        &format!("unknown attribute `a::b`: expected {ALL}"),
    );
    assert_error(
        quote!(
            #[fsdp(create = "x")]
            struct S;
        ),
        "unknown attribute `create`: did you mean `crate`?",
    );
}

const ALL: &str =
    "`buffer`, `dtype`, `expert`, `frozen`, `no_decay`, `rename`, `shape`, `skip`, `tie_with` or `tp`";

#[test]
fn words_in_the_wrong_place() {
    assert_error(
        quote!(
            #[fsdp(frozen)]
            struct S;
        ),
        "`frozen` belongs on a field, not on the struct",
    );
    assert_error(
        quote!(
            struct S {
                #[fsdp(crate = "x")]
                a: P,
            }
        ),
        "`crate` belongs on the struct, not on a field",
    );
    assert_error(
        quote!(
            enum E {
                #[fsdp(frozen)]
                A(P),
            }
        ),
        "`#[fsdp(..)]` has no meaning on a variant: put it on the variant's fields",
    );
    assert_error(
        quote!(
            struct S {
                #[fsdp(unit)]
                a: P,
            }
        ),
        "`unit` is not an attribute: a communication unit is a type, write the field as `Unit<..>`",
    );
}

#[test]
fn duplicates_are_named() {
    let message = |word: &str| format!("duplicate `{word}`: it was said before");
    assert_error(
        quote!(
            struct S {
                #[fsdp(frozen, frozen)]
                a: P,
            }
        ),
        &message("frozen"),
    );
    assert_error(
        quote!(
            struct S {
                #[fsdp(dtype = "bf16")]
                #[fsdp(dtype = "f32")]
                a: P,
            }
        ),
        &message("dtype"),
    );
    assert_error(
        quote!(
            struct S {
                #[fsdp(skip)]
                #[fsdp(skip)]
                a: P,
            }
        ),
        &message("skip"),
    );
    assert_error(
        quote!(
            #[fsdp(crate = "a", crate = "b")]
            struct S;
        ),
        &message("crate"),
    );
}

#[test]
fn conflicts_name_both_words() {
    for (word, given) in [
        ("rename", quote!(rename = "x")),
        ("buffer", quote!(buffer)),
        ("frozen", quote!(frozen)),
        ("no_decay", quote!(no_decay)),
        ("expert", quote!(expert)),
        ("dtype", quote!(dtype = "f32")),
        ("tp", quote!(tp = row)),
        ("tie_with", quote!(tie_with = "x")),
        ("shape", quote!(shape = [1])),
    ] {
        let expected = format!("`{word}` and `skip` contradict each other: a skipped field has no state");
        assert_error(
            quote!(
                struct S {
                    #[fsdp(skip, #given)]
                    a: P,
                }
            ),
            &expected,
        );
        assert_error(
            quote!(
                struct S {
                    #[fsdp(#given)]
                    #[fsdp(skip)]
                    a: P,
                }
            ),
            &expected,
        );
        if !["rename", "buffer"].contains(&word) {
            let expected = format!(
                "`{word}` and `buffer` contradict each other: a buffer is kept as it is, only parameters can be `{word}`"
            );
            assert_error(
                quote!(
                    struct S {
                        #[fsdp(buffer, #given)]
                        a: Tensor,
                    }
                ),
                &expected,
            );
        }
    }
    assert_eq!(
        errors(quote!(
            struct S {
                #[fsdp(buffer, rename = "x")]
                a: Tensor,
            }
        )),
        [""; 0]
    );
}

#[test]
fn bad_values_show_what_is_allowed() {
    let dtype = |text: &str| format!("unknown dtype `{text}`: expected `f32`, `bf16` or `f16`");
    assert_error(
        quote!(
            struct S {
                #[fsdp(dtype = "fp16")]
                a: P,
            }
        ),
        &dtype("fp16"),
    );
    assert_error(
        quote!(
            struct S {
                #[fsdp(dtype = "")]
                a: P,
            }
        ),
        &dtype(""),
    );
    let string = "`dtype` takes a string: `dtype = \"bf16\"`";
    assert_error(
        quote!(
            struct S {
                #[fsdp(dtype = bf16)]
                a: P,
            }
        ),
        string,
    );
    assert_error(
        quote!(
            struct S {
                #[fsdp(dtype = 16)]
                a: P,
            }
        ),
        string,
    );
    assert_error(
        quote!(
            struct S {
                #[fsdp(dtype)]
                a: P,
            }
        ),
        string,
    );
    assert_error(
        quote!(
            struct S {
                #[fsdp(dtype =)]
                a: P,
            }
        ),
        string,
    );
    assert_error(
        quote!(
            struct S {
                #[fsdp(dtype("f32"))]
                a: P,
            }
        ),
        string,
    );

    let placements = "expected `tp = column`, `row`, `replicate` or `dim(N)`";
    assert_error(
        quote!(
            struct S {
                #[fsdp(tp = colum)]
                a: P,
            }
        ),
        &format!("unknown tensor-parallel placement `colum`: did you mean `column`?\n{placements}"),
    );
    for given in [
        quote!(tp),
        quote!(tp = "row"),
        quote!(tp = dim),
        quote!(tp = dim(x)),
        quote!(tp = dim(-1)),
        quote!(tp = dim(1, 2)),
        quote!(tp = dim[1]),
        quote!(tp = dim(99999999999999999999999)),
    ] {
        assert_error(
            quote!(
                struct S {
                    #[fsdp(#given)]
                    a: P,
                }
            ),
            placements,
        );
    }
    assert_error(
        quote!(
            struct S {
                #[fsdp(skip = true)]
                a: P,
            }
        ),
        "`skip` takes no value: write `skip`",
    );
    assert_error(
        quote!(
            struct S {
                #[fsdp(frozen = 1)]
                a: P,
            }
        ),
        "`frozen` stands alone or is `frozen = true` or `frozen = false`",
    );
    assert_error(
        quote!(
            #[fsdp(crate = "1x")]
            struct S;
        ),
        "`crate` takes the path of the fsdp crate: `crate = \"path::to::fsdp\"`",
    );
    assert_eq!(
        errors(quote!(
            #[fsdp(bound = "T FsdpUnit")]
            struct S<T>(T);
        ))
        .len(),
        1
    );
}

#[test]
fn shape_is_refused_until_it_has_a_meaning() {
    assert_error(
        quote!(
            struct S {
                #[fsdp(shape = [OUT, 2 * IN])]
                a: P,
            }
        ),
        "`shape` is not supported yet: the shape is that of the `Param` at run time",
    );
    assert_error(
        quote!(
            struct S {
                #[fsdp(shape = 3)]
                a: P,
            }
        ),
        "expected `shape = [OUT, IN]`",
    );
}

#[test]
fn names_must_be_segments_joined_by_dots() {
    for (name, wrong) in [
        ("", "is empty"),
        ("a b", "contains white space"),
        ("a\nb", "contains white space"),
        (".a", "begins or ends with a dot"),
        ("a.", "begins or ends with a dot"),
        ("a..b", "has an empty segment"),
    ] {
        let expected =
            format!("the name {name:?} {wrong}: expected segments joined by dots, such as \"model.norm\"");
        assert_error(
            quote!(
                struct S {
                    #[fsdp(rename = #name)]
                    a: P,
                }
            ),
            &expected,
        );
        assert_error(
            quote!(
                struct S {
                    #[fsdp(tie_with = #name)]
                    a: P,
                }
            ),
            &expected,
        );
    }
}

#[test]
fn names_must_differ() {
    assert_error(
        quote!(
            struct S {
                a: P,
                #[fsdp(rename = "a")]
                b: P,
            }
        ),
        "duplicate name `a`: another field has it already",
    );
    assert_error(
        quote!(
            struct S {
                r#type: P,
                #[fsdp(buffer, rename = "type")]
                b: Tensor,
            }
        ),
        "duplicate name `type`: another field has it already",
    );
    assert_error(
        quote!(
            struct S(P, #[fsdp(rename = "0")] P);
        ),
        "duplicate name `0`: another field has it already",
    );
    assert_eq!(
        errors(quote!(
            enum E {
                A { w: P },
                B { w: P },
            }
        )),
        [""; 0]
    );
    assert_eq!(
        errors(quote!(
            struct S {
                #[fsdp(skip)]
                a: P,
                #[fsdp(rename = "a")]
                b: P,
            }
        )),
        [""; 0]
    );
}

#[test]
fn attributes_on_plain_data_are_refused() {
    assert_error(
        quote!(
            struct S {
                #[fsdp(frozen)]
                eps: f64,
            }
        ),
        "`frozen` has no meaning here: `f64` is plain data, no part of the model's state",
    );
}

#[test]
fn malformed_attributes_are_errors() {
    assert_eq!(
        errors(quote!(
            struct S {
                #[fsdp]
                a: P,
            }
        ))
        .len(),
        1
    );
    assert_eq!(
        errors(quote!(
            struct S {
                #[fsdp = "skip"]
                a: P,
            }
        ))
        .len(),
        1
    );
    assert_eq!(
        errors(quote!(
            struct S {
                #[fsdp("skip")]
                a: P,
            }
        ))
        .len(),
        1
    );
    assert_eq!(
        errors(quote!(
            struct S {
                #[fsdp(frozen no_decay)]
                a: P,
            }
        ))
        .len(),
        1
    );
    assert_eq!(
        errors(quote!(
            struct S {
                #[fsdp(,)]
                a: P,
            }
        ))
        .len(),
        1
    );
    assert_eq!(
        errors(quote!(
            struct S {
                #[fsdp()]
                a: P,
            }
        )),
        [""; 0]
    );
    assert_eq!(
        errors(quote!(
            struct S {
                #[fsdp(frozen)]
                a: P,
            }
        )),
        [""; 0]
    );
}

#[test]
fn all_mistakes_of_a_struct_are_reported() {
    let found = errors(quote! {
        #[fsdp(frozen)]
        struct S {
            #[fsdp(froze, dtype = "f8", skpi)]
            a: P,
            #[fsdp(skip, frozen)]
            b: P,
            c: Tensor,
            d: HashMap<String, P>,
            #[fsdp(rename = "a", tp = diagonal)]
            e: P,
        }
    });
    let begin = |message: &String| message.split([':', ' ']).take(2).collect::<Vec<_>>().join(" ");
    assert_eq!(
        found.iter().map(begin).collect::<Vec<_>>(),
        [
            "`frozen` belongs",
            "unknown attribute",
            "unknown dtype",
            "unknown attribute",
            "unknown tensor-parallel",
            "`frozen` and",
            "`Tensor` is",
            "`HashMap` has",
            "duplicate name",
        ]
    );
}

#[test]
fn foreign_attributes_are_left_alone() {
    let input = quote! {
        #[doc = include_str!("x.md")]
        #[doc(alias = "x", hidden)]
        #[repr(C)]
        #[serde(rename = "y", skip)]
        #[other::fsdp(nonsense)]
        struct S {
            #[doc = concat!("a", "b")]
            #[allow(dead_code)]
            #[clap(long, default_value_t = 3)]
            a: P,
        }
    };
    assert_eq!(errors(input), [""; 0]);
}
