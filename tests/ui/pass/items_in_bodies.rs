//! Structs in function bodies, closures, const blocks and nested modules with restricted visibility.

pub(crate) fn main() {
    use fsdp::{FsdpUnit, Param};

    #[derive(FsdpUnit)]
    struct Leaf {
        weight: Param,
    }
    #[derive(FsdpUnit)]
    struct Root {
        a: Leaf,
        b: Vec<Leaf>,
    }

    fn inner() {
        #[derive(fsdp::FsdpUnit)]
        struct Leaf {
            other: fsdp::Param,
        }
        let leaf = Leaf { other: fsdp::Param::new(1) };
        let _ = leaf.other;
    }

    mod nested {
        pub mod deep {
            #[derive(fsdp::FsdpUnit)]
            pub(in super::super) struct Leaf {
                pub(super) weight: fsdp::Param,
            }
            impl Leaf {
                pub fn new() -> Self {
                    let leaf = Leaf { weight: fsdp::Param::new(1) };
                    let _ = &leaf.weight;
                    leaf
                }
            }
        }
    }

    const _: () = {
        #[derive(fsdp::FsdpUnit)]
        pub struct InConst {
            pub weight: fsdp::Param,
        }
    };

    inner();
    let root = Root { a: Leaf { weight: Param::new(1) }, b: vec![] };
    let _ = (root.a.weight, root.b.len(), nested::deep::Leaf::new());
    let closure = || {
        #[derive(FsdpUnit)]
        struct InClosure {
            weight: Param,
        }
        let module = InClosure { weight: Param::new(1) };
        let _ = module.weight;
    };
    closure();
}
