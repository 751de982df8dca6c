//! What the derive says is wrong.

use proc_macro2::TokenStream;
use quote::quote;

use super::errors;

/// A struct of one field that has these words.
fn field(words: TokenStream) -> TokenStream {
    quote!(
        struct S {
            #[fsdp(#words)]
            a: P,
        }
    )
}

#[track_caller]
fn assert_error(input: TokenStream, expected: &str) {
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
    assert_error(field(quote!(fuse("a", "b"))), "unknown attribute `fuse`: did you mean `fused`?");
    assert_error(field(quote!(forzen)), "unknown attribute `forzen`: did you mean `frozen`?");
    assert_error(field(quote!(colour = 3)), &format!("unknown attribute `colour`: expected {ALL}"));
    assert_error(field(quote!(a::b)), &format!("unknown attribute `a::b`: expected {ALL}"));
    assert_error(
        quote!(
            #[fsdp(create = "x")]
            struct S;
        ),
        "unknown attribute `create`: did you mean `crate`?",
    );
}

/// However a word is spelled, the message is that of the word.
#[test]
fn near_misses_get_the_words_message() {
    for word in ["unit", "Unit", "UNIT", "units", "Units", "unti"] {
        let tokens: TokenStream = word.parse().unwrap();
        let message = format!(
            "`{word}` is not an attribute: a communication unit is a type, write the field as `Unit<..>`"
        );
        assert_error(field(tokens.clone()), &message);
        assert_error(
            quote!(
                #[fsdp(#tokens)]
                struct S;
            ),
            &message,
        );
    }
    let of_fields = [
        ("Frozen", "frozen"),
        ("FROZEN", "frozen"),
        ("TP", "tp"),
        ("Tp", "tp"),
        ("no-decay", "no_decay"),
        ("nodecay", "no_decay"),
        ("NoDecay", "no_decay"),
        ("no_decays", "no_decay"),
        ("tie-with", "tie_with"),
        ("tieWith", "tie_with"),
        ("dType", "dtype"),
        ("inits", "init"),
        ("Skip", "skip"),
        ("buffers", "buffer"),
        ("experts", "expert"),
        ("shapes", "shape"),
        ("Rename", "rename"),
        ("Fused", "fused"),
    ];
    for (spelled, word) in of_fields {
        let tokens: TokenStream = spelled.parse().unwrap();
        let unknown = format!("unknown attribute `{spelled}`: did you mean `{word}`?");
        assert_error(field(tokens.clone()), &unknown);
        let place = format!("{unknown} It belongs on a field, not on the struct");
        assert_error(
            quote!(
                #[fsdp(#tokens)]
                struct S;
            ),
            &place,
        );
    }
    for (spelled, word) in
        [("Crate", "crate"), ("TPSize", "tp_size"), ("rename-all", "rename_all"), ("Bound", "bound")]
    {
        let tokens: TokenStream = spelled.parse().unwrap();
        let unknown = format!("unknown attribute `{spelled}`: did you mean `{word}`?");
        assert_error(
            quote!(
                #[fsdp(#tokens = "x")]
                struct S;
            ),
            &unknown,
        );
        let place = format!("{unknown} It belongs on the struct, not on a field");
        assert_error(field(quote!(#tokens = "x")), &place);
    }
}

#[test]
fn a_crate_that_does_not_have_fsdp_is_told_what_to_write() {
    let found = |input: TokenStream| crate::derive(input, || None).to_string();
    let output = found(quote!(
        struct S {
            a: P,
        }
    ));
    assert!(output.contains("this package does not depend on `fsdp`"), "{output}");
    assert!(!output.contains("impl"), "{output}");
    // One mistake, one message: this list may have been to say it.
    let output = found(quote!(
        #[fsdp(crate)]
        enum E {
            A(P),
        }
    ));
    assert!(output.contains("`crate` takes the path") && !output.contains("does not depend"), "{output}");
    assert!(
        !found(quote!(
            #[fsdp(crate = "a::b")]
            struct S {
                a: P,
            }
        ))
        .contains("compile_error")
    );
}

const ALL: &str = "`buffer`, `dtype`, `expert`, `frozen`, `fused`, `init`, `no_decay`, `rename`, `shape`, `skip`, \
     `tie_with` or `tp`";

#[test]
fn words_in_the_wrong_place() {
    assert_error(
        quote!(
            #[fsdp(frozen)]
            struct S;
        ),
        "`frozen` belongs on a field, not on the struct",
    );
    assert_error(field(quote!(crate = "x")), "`crate` belongs on the struct, not on a field");
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
        field(quote!(unit)),
        "`unit` is not an attribute: a communication unit is a type, write the field as `Unit<..>`",
    );
}

#[test]
fn duplicates_are_named() {
    let message = |word: &str| format!("duplicate `{word}`: it was said before");
    assert_error(field(quote!(frozen, frozen)), &message("frozen"));
    assert_error(field(quote!(fused("x", "y"), fused("x", "y"))), &message("fused"));
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
        ("init", quote!(init = ones)),
        ("shape", quote!(shape = [1])),
        ("fused", quote!(fused("x", "y"))),
    ] {
        let expected = format!("`{word}` and `skip` contradict each other: a skipped field has no state");
        assert_error(field(quote!(skip, #given)), &expected);
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
                "`{word}` and `buffer` contradict each other: a buffer is kept as it is, `{word}` is for parameters"
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
    assert_error(field(quote!(dtype = "fp16")), &dtype("fp16"));
    assert_error(field(quote!(dtype = "")), &dtype(""));
    let string = "`dtype` takes a string: `dtype = \"bf16\"`";
    assert_error(field(quote!(dtype = bf16)), string);
    assert_error(field(quote!(dtype = 16)), string);
    assert_error(field(quote!(dtype)), string);
    assert_error(field(quote!(dtype =)), string);
    assert_error(field(quote!(dtype("f32"))), string);

    let placements = "expected `tp = column`, `row`, `replicate` or `dim(N)`";
    assert_error(
        field(quote!(tp = colum)),
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
        assert_error(field(quote!(#given)), placements);
    }
    assert_error(field(quote!(skip = true)), "`skip` takes no value: write `skip`");
    assert_error(
        field(quote!(frozen = 1)),
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
fn a_tied_parameter_has_no_initial_value() {
    assert_error(
        field(quote!(tie_with = "b", init = zeros)),
        "`init` and `tie_with` contradict each other: a tied parameter starts as its target does",
    );
}

#[test]
fn a_fused_parameter_has_the_names_of_its_parts_alone() {
    assert_error(
        field(quote!(fused("x", "y"), rename = "b")),
        "`fused` and `rename` contradict each other: checkpoints know a fused parameter by the names of its parts",
    );
    assert_error(
        field(quote!(fused("x", "y"), tie_with = "b")),
        "`fused` and `tie_with` contradict each other: a tied parameter is saved as its target is",
    );
    assert_error(
        field(quote!(fused("x", "y"), shape = [])),
        "`fused` is a concatenation along dim 0, but the declared `shape` has no dims",
    );
    for given in
        [quote!(tp = column, shape = [8, 2]), quote!(frozen, no_decay, expert, dtype = "bf16", init = zeros)]
    {
        assert_eq!(errors(field(quote!(fused("x", "y"), #given))), [""; 0]);
    }
}

#[test]
fn parts_are_two_strings_or_more() {
    for given in [
        quote!(fused),
        quote!(fused = "x"),
        quote!(fused = ["x", "y"]),
        quote!(fused["x", "y"]),
        quote!(fused()),
        quote!(fused(x, y)),
        quote!(fused("x", 1)),
        quote!(fused("x" "y")),
        quote!(fused("x", "y"u8)),
        quote!(fused(b"x", "y")),
    ] {
        assert_error(
            field(given),
            "expected `fused(\"q_proj\", \"k_proj\", \"v_proj\")`: the names of the parts in checkpoints",
        );
    }
    assert_error(
        field(quote!(fused("x"))),
        "`fused` takes at least 2 names: give another name to the whole with `rename`",
    );
    for given in [quote!(fused("x", "y",)), quote!(fused("self_attn.q", r"self_attn.k"))] {
        assert_eq!(errors(field(given)), [""; 0]);
    }
}

#[test]
fn initial_values_are_known_by_name_and_count() {
    let expected =
        "expected `init = zeros`, `ones`, `constant(VALUE)`, `normal(MEAN, STD)` or `uniform(LOW, HIGH)`";
    for (given, message) in [
        (quote!(init), expected.to_string()),
        (quote!(init = "zeros"), expected.to_string()),
        (quote!(init = 0.5), expected.to_string()),
        (
            quote!(init = norml(0.0, 1.0)),
            format!("unknown initial value `norml`: did you mean `normal`?\n{expected}"),
        ),
        (quote!(init = kaiming), format!("unknown initial value `kaiming`\n{expected}")),
        (quote!(init = zeros(1.0)), "`zeros` takes no numbers: write `init = zeros`".to_string()),
        (quote!(init = constant), format!("`constant` takes 1 number, got 0\n{expected}")),
        (quote!(init = normal(1.0)), format!("`normal` takes 2 numbers, got 1\n{expected}")),
        (quote!(init = uniform(0.0, 1.0, 2.0)), format!("`uniform` takes 2 numbers, got 3\n{expected}")),
    ] {
        assert_error(field(quote!(#given)), &message);
    }
}

#[test]
fn a_shape_is_a_list_that_has_the_partition_dim() {
    for given in [quote!(shape), quote!(shape = 3), quote!(shape = (1, 2)), quote!(shape("[1]"))] {
        assert_error(field(quote!(#given)), "expected `shape = [OUT, IN]`");
    }
    for (tp, shape, message) in [
        (quote!(row), quote!([8]), "`tp = row` cuts dim 1, but the declared `shape` has only dim 0"),
        (quote!(column), quote!([]), "`tp = column` cuts dim 0, but the declared `shape` has no dims"),
        (
            quote!(dim(3)),
            quote!([1, 2]),
            "`tp = dim(3)` cuts dim 3, but the declared `shape` has only dims 0 to 1",
        ),
    ] {
        assert_error(field(quote!(shape = #shape, tp = #tp)), message);
    }
}

#[test]
fn words_of_the_struct_have_their_values_checked() {
    let ranks = "`tp_size` takes the number of tensor-parallel ranks: `tp_size = 8`";
    let rule = "`rename_all` takes a string: `rename_all = \"camelCase\"`";
    for (given, message) in [
        (quote!(tp_size), ranks),
        (quote!(tp_size = 0), ranks),
        (quote!(tp_size = "8"), ranks),
        (quote!(tp_size = 2.0), ranks),
        (quote!(rename_all), rule),
        (quote!(rename_all = camelCase), rule),
        (
            quote!(rename_all = "camelcase"),
            "unknown rule `camelcase` of `rename_all`: did you mean `camelCase`?",
        ),
        (
            quote!(rename_all = "Title Case"),
            "unknown rule `Title Case` of `rename_all`: expected `lowercase`, `UPPERCASE`, `PascalCase`, `camelCase`, \
             `snake_case`, `SCREAMING_SNAKE_CASE`, `kebab-case` or `SCREAMING-KEBAB-CASE`",
        ),
    ] {
        assert_error(
            quote!(
                #[fsdp(#given)]
                struct S {
                    a: P,
                }
            ),
            message,
        );
    }
}

#[test]
fn trait_objects_are_refused() {
    let found = errors(quote!(
        struct S {
            a: Vec<Box<dyn Layer + Send>>,
            #[fsdp(skip)]
            b: Box<dyn Layer>,
        }
    ));
    assert_eq!(found.len(), 1);
    assert!(found[0].starts_with("`dyn Layer + Send` hides its parameters from the layout"), "{found:?}");
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
        assert_error(field(quote!(rename = #name)), &expected);
        assert_error(field(quote!(tie_with = #name)), &expected);
        assert_error(field(quote!(fused("x", #name))), &expected);
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
    assert_error(
        quote!(
            struct S {
                #[fsdp(fused("x", "b"))]
                a: P,
                b: P,
            }
        ),
        "duplicate name `b`: another field has it already",
    );
    assert_error(
        quote!(
            struct S {
                #[fsdp(fused("x", "y"))]
                a: P,
                #[fsdp(fused("z", "x"))]
                b: P,
            }
        ),
        "duplicate name `x`: another field has it already",
    );
    assert_error(field(quote!(fused("x", "y", "x"))), "duplicate name `x`: another part has it already");
    assert_error(field(quote!(fused("x", "a"))), "duplicate name `a`: the field itself has it already");
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
    assert_error(
        quote!(
            struct S {
                #[fsdp(frozen)]
                p: PhantomData<T>,
            }
        ),
        "`frozen` has no meaning here: `PhantomData<T>` is plain data, no part of the model's state",
    );
}

#[test]
fn a_mistaken_attribute_is_not_followed_by_doubts_about_the_type() {
    assert_error(
        quote!(
            struct S {
                #[fsdp(bufer)]
                a: Tensor,
            }
        ),
        "unknown attribute `bufer`: did you mean `buffer`?",
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
    assert_eq!(errors(field(quote!("skip"))).len(), 1);
    assert_eq!(errors(field(quote!(frozen no_decay))).len(), 1);
    assert_eq!(errors(field(quote!(,))).len(), 1);
    assert_eq!(errors(field(quote!())), [""; 0]);
    assert_eq!(errors(field(quote!(frozen))), [""; 0]);
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
