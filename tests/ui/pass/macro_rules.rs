//! Structs written by `macro_rules!`, with `$crate` in types and in `crate = ..`, and fragments of every kind.

pub mod reexport {
    pub use ::fsdp;
    pub use ::fsdp::Param;
}

/// A struct by the name.
#[macro_export]
macro_rules! make_module {
    ($name:ident) => {
        #[derive($crate::pass::macro_rules::reexport::fsdp::FsdpUnit)]
        #[fsdp(crate = $crate::pass::macro_rules::reexport::fsdp)]
        pub struct $name {
            pub weight: $crate::pass::macro_rules::reexport::Param,
        }
    };
}

macro_rules! make_from_fragments {
    ($vis:vis $name:ident<$param:ident> { $($(#[$meta:meta])* $field:ident: $ty:ty = $rename:literal),* }) => {
        #[derive(fsdp::FsdpUnit)]
        #[fsdp(crate = "crate::pass::macro_rules::reexport::fsdp")]
        $vis struct $name<$param> {
            $($(#[$meta])* #[fsdp(rename = $rename)] $field: $ty,)*
            hidden: Vec<$param>,
        }
    };
}

make_module!(FromMacro);
make_from_fragments!(pub(crate) Fragments<T> {
    #[fsdp(frozen)] a: fsdp::Param = "x.a",
    b: T = "b",
    c: Option<Box<T>> = "c"
});

fn assert_module<M: fsdp::FsdpUnit>(_: &M) {}

pub(crate) fn main() {
    let leaf = || FromMacro { weight: reexport::Param::new(1) };
    let module = Fragments { a: reexport::Param::new(1), b: leaf(), c: None, hidden: vec![leaf()] };
    assert_module(&module);
    let _ = (&module.a, &module.b.weight, module.c.is_none(), module.hidden.len());
}
