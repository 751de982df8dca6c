//! What can be known of a type from its spelling alone.
//!
//! Macros see names, not types, so each answer is chosen to be safe when the name is the user's own: a bound
//! too many, a type check in the expansion, or an error that a longer path avoids. Never a parameter left
//! out.

use proc_macro2::TokenStream;
use quote::{ToTokens, quote};
use syn::{GenericArgument, Path, PathArguments, PathSegment, Type};

const PRIMITIVES: &[&str] = &[
    "bool", "char", "f32", "f64", "i8", "i16", "i32", "i64", "i128", "isize", "u8", "u16", "u32", "u64",
    "u128", "usize",
];

/// Crates whose types are known by name.
const KNOWN_CRATES: &[&str] = &["std", "core", "alloc", "candle_core", "candle", "parking_lot", "hashbrown"];

/// A type that holds no parameters.
pub struct Plain {
    /// The type that the spelling stands for unless a name in it is the user's own.
    pub meant: TokenStream,
    /// Names that the user might have redefined are part of the spelling.
    pub named: bool,
}

/// Numbers, `bool`, `char`, strings, `PhantomData`, and `Option`, `Vec`, `Box`, arrays and tuples of only
/// those.
pub fn plain(ty: &Type) -> Option<Plain> {
    match peel(ty) {
        Type::Reference(reference) if reference.mutability.is_none() => match peel(&reference.elem) {
            Type::Path(elem) if elem.path.is_ident("str") => {
                Some(Plain { meant: ty.to_token_stream(), named: false })
            }
            _ => None,
        },
        Type::Array(array) => {
            let (Plain { meant, named }, len) = (plain(&array.elem)?, &array.len);
            Some(Plain { meant: quote!([#meant; #len]), named })
        }
        Type::Tuple(tuple) if !tuple.elems.is_empty() => {
            let elems: Vec<Plain> = tuple.elems.iter().map(plain).collect::<Option<_>>()?;
            let named = elems.iter().any(|elem| elem.named);
            let meant = elems.into_iter().map(|elem| elem.meant);
            Some(Plain { meant: quote!((#(#meant,)*)), named })
        }
        Type::Path(path) if path.qself.is_none() => plain_path(&path.path),
        _ => None,
    }
}

fn plain_path(path: &Path) -> Option<Plain> {
    let last = known(path)?;
    let name = last.ident.to_string();
    let name = name.as_str();
    if last.arguments.is_none() {
        return match name {
            "String" => Some(Plain { meant: quote!(::std::string::String), named: true }),
            _ if PRIMITIVES.contains(&name) => Some(Plain { meant: path.to_token_stream(), named: false }),
            _ => None,
        };
    }
    let args = type_arguments(last);
    let [arg] = args.as_slice() else { return None };
    if name == "PhantomData" {
        return Some(Plain { meant: path.to_token_stream(), named: false });
    }
    if !["Option", "Vec", "Box"].contains(&name) {
        return None;
    }
    let meant = plain(arg)?.meant;
    let std = match name {
        "Option" => quote!(::core::option::Option),
        "Vec" => quote!(::std::vec::Vec),
        _ => quote!(::std::boxed::Box),
    };
    Some(Plain { meant: quote!(#std<#meant>), named: true })
}

/// The types whose walk is part of the walk of `ty`: the elements of a container, or `ty` itself.
pub fn walked_parts(ty: &Type) -> Vec<&Type> {
    match peel(ty) {
        Type::Array(array) => walked_parts(&array.elem),
        Type::Slice(slice) => walked_parts(&slice.elem),
        Type::Tuple(tuple) => tuple.elems.iter().flat_map(walked_parts).collect(),
        Type::Path(path) if path.qself.is_none() => {
            let Some(last) = path.path.segments.last() else { return Vec::new() };
            let args = type_arguments(last);
            match (last.ident.to_string().as_str(), args.as_slice()) {
                ("Vec" | "Option" | "Box" | "Arc" | "Unit", [elem]) => walked_parts(elem),
                ("BTreeMap", [_, value]) => walked_parts(value),
                _ => vec![peel(ty)],
            }
        }
        other => vec![other],
    }
}

/// Why a part of a walked type cannot hold parameters.
pub fn refusal(ty: &Type) -> Option<syn::Error> {
    let may_be_buffer = in_buffer_containers(ty);
    walked_parts(ty).into_iter().find_map(|part| {
        if let Type::TraitObject(object) = part {
            let message = format!(
                "`{}` hides its parameters from the layout: make the alternatives variants of an enum that derives \
                 `FsdpUnit`; or, if it holds no parameters, mark it `#[fsdp(skip)]`",
                object.to_token_stream()
            );
            return Some(syn::Error::new_spanned(object, message));
        }
        if let Type::Reference(reference) = part {
            let message = "a model owns its parameters: hold the module itself, or an `Arc` of it; or, if it holds \
                 no parameters, mark it `#[fsdp(skip)]`";
            return Some(syn::Error::new_spanned(reference, message));
        }
        let Type::Path(path) = part else { return None };
        let name = known(&path.path)?.ident.to_string();
        let reason = match name.as_str() {
            "Tensor" | "Var" if may_be_buffer => {
                "is neither sharded nor trained: make it a `Param`; or, if it is state that is not trained, mark it \
                 `#[fsdp(buffer)]`; or leave it out with `#[fsdp(skip)]`"
            }
            "Tensor" | "Var" => {
                "is neither sharded nor trained: make it a `Param`, or leave the field out with `#[fsdp(skip)]`"
            }
            "HashMap" => {
                "has no stable order, so ranks would disagree on the layout: use a `BTreeMap`; or, if it holds no \
                 parameters, mark it `#[fsdp(skip)]`"
            }
            "HashSet" => {
                "has no stable order, so ranks would disagree on the layout: use a `Vec`; or, if it holds no \
                 parameters, mark it `#[fsdp(skip)]`"
            }
            "Rc" => "cannot be sent to a rank's thread: use `Arc` or `Box`; or, if it holds no parameters, mark it `#[fsdp(skip)]`",
            "Mutex" | "RwLock" | "RefCell" | "OnceCell" | "OnceLock" => {
                "may change behind a shared reference, and parameters must stay where the layout found them: hold the \
                 module itself; or, if it holds no parameters, mark it `#[fsdp(skip)]`"
            }
            _ => return None,
        };
        Some(syn::Error::new_spanned(part, format!("`{name}` {reason}")))
    })
}

/// Nothing around the innermost type but what a buffer may be in: `Option`, `Vec`, arrays.
fn in_buffer_containers(ty: &Type) -> bool {
    match peel(ty) {
        Type::Array(array) => in_buffer_containers(&array.elem),
        Type::Path(path) => {
            let Some(last) = path.path.segments.last() else { return false };
            match (last.ident.to_string().as_str(), type_arguments(last).as_slice()) {
                ("Option" | "Vec", [elem]) => in_buffer_containers(elem),
                (_, []) => true,
                _ => false,
            }
        }
        _ => false,
    }
}

/// The type beneath parentheses and the invisible groups of `macro_rules!`.
pub fn peel(mut ty: &Type) -> &Type {
    loop {
        ty = match ty {
            Type::Group(group) => &group.elem,
            Type::Paren(paren) => &paren.elem,
            _ => return ty,
        };
    }
}

/// The last segment, if the path is a single name or begins with a crate whose types are known. `self::Mutex`
/// and `crate::nn::Tensor` are the user's own.
fn known(path: &Path) -> Option<&PathSegment> {
    let first = path.segments.first()?;
    let is_known = path.segments.len() == 1 || KNOWN_CRATES.iter().any(|krate| first.ident == krate);
    if is_known { path.segments.last() } else { None }
}

fn type_arguments(segment: &PathSegment) -> Vec<&Type> {
    let PathArguments::AngleBracketed(args) = &segment.arguments else { return Vec::new() };
    let types = args.args.iter().filter_map(|arg| match arg {
        GenericArgument::Type(ty) => Some(ty),
        _ => None,
    });
    types.collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use syn::parse_quote;

    fn meant(ty: Type) -> Option<(String, bool)> {
        plain(&ty).map(|plain| (plain.meant.to_string().replace(' ', ""), plain.named))
    }

    #[test]
    fn plain_data_is_known_by_its_spelling() {
        let unnamed = |text: &str| Some((text.to_string(), false));
        let named = |text: &str| Some((text.to_string(), true));
        assert_eq!(meant(parse_quote!(f64)), unnamed("f64"));
        assert_eq!(meant(parse_quote!((usize))), unnamed("usize"));
        assert_eq!(meant(parse_quote!(&'static str)), unnamed("&'staticstr"));
        assert_eq!(meant(parse_quote!([f32; 2])), unnamed("[f32;2]"));
        assert_eq!(meant(parse_quote!((f32, bool))), unnamed("(f32,bool,)"));
        assert_eq!(meant(parse_quote!(String)), named("::std::string::String"));
        assert_eq!(meant(parse_quote!(std::string::String)), named("::std::string::String"));
        assert_eq!(meant(parse_quote!(Option<usize>)), named("::core::option::Option<usize>"));
        assert_eq!(
            meant(parse_quote!(Vec<(String, u8)>)),
            named("::std::vec::Vec<(::std::string::String,u8,)>")
        );
        assert_eq!(meant(parse_quote!(PhantomData<fn() -> T>)), unnamed("PhantomData<fn()->T>"));
    }

    #[test]
    fn what_may_hold_parameters_is_not_plain() {
        let types: [Type; 12] = [
            parse_quote!(Param),
            parse_quote!(Vec<Param>),
            parse_quote!((usize, Param)),
            parse_quote!(Option<T>),
            parse_quote!(self::String),
            parse_quote!(crate::f64),
            parse_quote!(f64<u8>),
            parse_quote!(&'static Param),
            parse_quote!(&'a mut str),
            parse_quote!(()),
            parse_quote!(Vec<u8, Global>),
            parse_quote!(<u8 as Tr>::Out),
        ];
        for ty in types {
            assert!(plain(&ty).is_none(), "{}", quote!(#ty));
        }
    }

    #[test]
    fn containers_are_looked_into() {
        let parts = |ty: Type| {
            let parts: Vec<String> = walked_parts(&ty).iter().map(|part| quote!(#part).to_string()).collect();
            parts.join("|")
        };
        assert_eq!(parts(parse_quote!(T)), "T");
        assert_eq!(parts(parse_quote!(Vec<Option<Box<T>>>)), "T");
        assert_eq!(parts(parse_quote!(std::vec::Vec<fsdp::Unit<T>>)), "T");
        assert_eq!(parts(parse_quote!(std::collections::BTreeMap<K, [(A, B); 3]>)), "A|B");
        assert_eq!(parts(parse_quote!(Outer<T>)), "Outer < T >");
    }

    #[test]
    fn refusals_spare_the_users_own_types() {
        let reason = |ty: Type| refusal(&ty).map(|error| error.to_string());
        assert!(reason(parse_quote!(Tensor)).unwrap().contains("#[fsdp(buffer)]"));
        assert!(reason(parse_quote!(Vec<candle_core::Tensor>)).unwrap().contains("#[fsdp(buffer)]"));
        assert!(!reason(parse_quote!(Vec<Box<Tensor>>)).unwrap().contains("#[fsdp(buffer)]"));
        assert!(reason(parse_quote!(HashMap<String, L>)).unwrap().contains("BTreeMap"));
        assert!(reason(parse_quote!(Option<std::rc::Rc<L>>)).unwrap().contains("#[fsdp(skip)]"));
        assert!(reason(parse_quote!(Mutex<L>)).unwrap().contains("#[fsdp(skip)]"));
        assert!(reason(parse_quote!(Vec<&'a L>)).unwrap().contains("owns its parameters"));
        assert_eq!(reason(parse_quote!(crate::nn::Tensor)), None);
        assert_eq!(reason(parse_quote!(self::Mutex<L>)), None);
        assert_eq!(reason(parse_quote!(Outer<Tensor>)), None);
    }
}
