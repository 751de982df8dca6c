//! The where-clause of the impl: `FsdpUnit` for the type parameters that are walked, and only for those.
//!
//! Nothing is asked of concrete types: rustc checks them in the body, and a where-clause on them would make
//! recursive modules overflow the trait solver.

use proc_macro2::TokenStream;
use quote::ToTokens;
use syn::{Type, TypePath, WhereClause, WherePredicate, parse_quote};

use crate::model::{Field, Module, Role};
use crate::types;

/// The user's where-clause, and either `bound = ".."` or what the fields need; `fsdp_unit` is the path of the
/// trait.
pub fn where_clause(module: &Module, fsdp_unit: &TokenStream) -> Option<WhereClause> {
    let mut generics = module.generics.clone();
    let predicates = &mut generics.make_where_clause().predicates;
    match &module.attrs.bound {
        Some(bound) => predicates.extend(bound.iter().cloned()),
        None => predicates.extend(inferred(module, fsdp_unit)),
    }
    generics.where_clause.filter(|clause| !clause.predicates.is_empty())
}

fn inferred(module: &Module, fsdp_unit: &TokenStream) -> Vec<WherePredicate> {
    let walked = |field: &&Field| matches!(field.role, Role::Walked);
    let mut seen = Vec::new();
    let mut predicates = Vec::new();
    for field in module.alternatives().into_iter().flatten().filter(walked) {
        // Spelled only where it matters: the compiler takes its time to print tokens.
        let parts =
            types::walked_parts(&field.ty).into_iter().filter(|part| rests_on_parameter(module, part));
        for part in parts {
            let spelling = part.to_token_stream().to_string();
            if !seen.contains(&spelling) {
                seen.push(spelling);
                predicates.push(parse_quote!(#part: #fsdp_unit));
            }
        }
    }
    predicates
}

/// `T`, `T::Assoc` or `<T as Trait>::Assoc` for a type parameter `T`.
fn rests_on_parameter(module: &Module, ty: &Type) -> bool {
    let Type::Path(TypePath { qself, path, .. }) = ty else { return false };
    match qself {
        Some(qself) => rests_on_parameter(module, types::peel(&qself.ty)),
        None => {
            path.leading_colon.is_none()
                && path.segments.first().is_some_and(|first| {
                    first.arguments.is_none()
                        && module.generics.type_params().any(|param| param.ident == first.ident)
                })
        }
    }
}
