//! What the user said: the struct or enum, its fields, and what each field is for.

use proc_macro2::{Span, TokenStream};
use syn::ext::IdentExt;
use syn::spanned::Spanned;
use syn::{DeriveInput, Fields, Generics, Ident, Index, Member, Type};

use crate::attr::{self, FieldAttrs, StructAttrs};
use crate::ctxt::Ctxt;
use crate::rename::RenameRule;
use crate::types;

/// A struct or enum that derives `FsdpUnit`.
pub struct Module {
    pub ident: Ident,
    pub generics: Generics,
    pub attrs: StructAttrs,
    pub body: Body,
    /// The user has settled what is said of its use of something deprecated: see [`is_deprecated`].
    pub deprecated: bool,
}

/// Where the fields are.
pub enum Body {
    Struct(Vec<Field>),
    Enum(Vec<Variant>),
}

/// One of the alternatives of an enum.
pub struct Variant {
    pub ident: Ident,
    pub fields: Vec<Field>,
}

/// A field of a struct or of a variant.
pub struct Field {
    pub member: Member,
    pub ty: Type,
    pub attrs: FieldAttrs,
    pub role: Role,
    /// Its segment of the fully qualified name: as renamed, or as declared without `r#`. Empty for the only
    /// field of a tuple variant, whose content is the variant's own.
    pub name: String,
}

/// What a field is for.
pub enum Role {
    /// Holds parameters: a module, a parameter, or a container of them.
    Walked,
    /// A tensor that is kept and saved.
    Buffer,
    /// `skip`: not a part of the model's state.
    Skipped,
    /// Plain data by its spelling, skipped unasked. If names are part of that spelling, the type they must
    /// stand for: a user's own type of that name is not to be left out in silence.
    Plain(Option<TokenStream>),
}

impl Module {
    /// Reads the whole item; mistakes go to `ctxt`. `None` for what is neither struct nor enum.
    pub fn from_input(ctxt: &Ctxt, input: &DeriveInput) -> Option<Module> {
        let attrs = StructAttrs::read(ctxt, &input.attrs);
        let body = match &input.data {
            syn::Data::Struct(data) => Body::Struct(read_fields(ctxt, &data.fields, attrs.rename_all)),
            syn::Data::Enum(data) => {
                let read = |variant: &syn::Variant| {
                    attr::read_variant(ctxt, &variant.attrs);
                    let mut fields = read_fields(ctxt, &variant.fields, attrs.rename_all);
                    if let (syn::Fields::Unnamed(_), [only]) = (&variant.fields, fields.as_mut_slice())
                        && only.attrs.rename.is_none()
                    {
                        only.name = String::new();
                    }
                    Variant { ident: variant.ident.clone(), fields }
                };
                Body::Enum(data.variants.iter().map(read).collect())
            }
            syn::Data::Union(data) => {
                ctxt.error(
                    data.union_token.span(),
                    "a union cannot be sharded: which of its fields is alive is not known; use a struct or an enum",
                );
                return None;
            }
        };
        let (ident, generics) = (input.ident.clone(), input.generics.clone());
        Some(Module { ident, generics, attrs, body, deprecated: is_deprecated(input) })
    }

    /// The groups of fields that exist together: the struct's, or those of each variant.
    pub fn alternatives(&self) -> Vec<&[Field]> {
        match &self.body {
            Body::Struct(fields) => vec![fields],
            Body::Enum(variants) => variants.iter().map(|variant| variant.fields.as_slice()).collect(),
        }
    }
}

impl Field {
    /// Where an error about its name belongs.
    pub fn name_span(&self) -> Span {
        match (&self.attrs.rename, &self.member) {
            (Some(rename), _) => rename.value.span(),
            (None, Member::Named(ident)) => ident.span(),
            (None, Member::Unnamed(_)) => self.ty.span(),
        }
    }

    /// It has a name in checkpoints.
    pub fn is_state(&self) -> bool {
        matches!(self.role, Role::Walked | Role::Buffer)
    }
}

/// Whether the item or a part of it is deprecated or may use what is: where it is used is the user's to hear of, not what the
/// derive writes. Anything else deprecated that the derive would name is the user's to hear of as well.
pub fn is_deprecated(input: &DeriveInput) -> bool {
    let of_fields = |fields: &Fields| fields.iter().any(|field| settles(&field.attrs));
    let parts = match &input.data {
        syn::Data::Struct(data) => of_fields(&data.fields),
        syn::Data::Enum(data) => {
            data.variants.iter().any(|variant| settles(&variant.attrs) || of_fields(&variant.fields))
        }
        syn::Data::Union(_) => false,
    };
    parts || settles(&input.attrs)
}

/// `#[deprecated]`, or `deprecated` in a list of lints that are not to be raised.
fn settles(attrs: &[syn::Attribute]) -> bool {
    let lists = |attr: &syn::Attribute| {
        let mut found = false;
        let list = attr.parse_nested_meta(|meta| {
            found |= meta.path.is_ident("deprecated");
            Ok(())
        });
        // What comes after the mistake, if there is one, is rustc's.
        list.is_ok() && found
    };
    attrs.iter().any(|attr| {
        let is = |name| attr.path().is_ident(name);
        is("deprecated") || ((is("allow") || is("expect")) && lists(attr))
    })
}

fn read_fields(ctxt: &Ctxt, fields: &Fields, rule: Option<RenameRule>) -> Vec<Field> {
    let read = |(position, field): (usize, &syn::Field)| {
        let attrs = FieldAttrs::read(ctxt, &field.attrs);
        let role = if attrs.skip.is_some() {
            Role::Skipped
        } else if let Some(plain) = types::plain(&field.ty) {
            Role::Plain(plain.named.then_some(plain.meant))
        } else if attrs.buffer.is_some() {
            Role::Buffer
        } else {
            Role::Walked
        };
        let member = match &field.ident {
            Some(ident) => Member::Named(ident.clone()),
            None => Member::Unnamed(Index::from(position)),
        };
        let name = match (&attrs.rename, &member, rule) {
            (Some(rename), _, _) => rename.value.value(),
            (None, Member::Named(ident), Some(rule)) => rule.apply(&ident.unraw().to_string()),
            (None, Member::Named(ident), None) => ident.unraw().to_string(),
            (None, Member::Unnamed(index), _) => index.index.to_string(),
        };
        Field { member, ty: field.ty.clone(), attrs, role, name }
    };
    fields.iter().enumerate().map(read).collect()
}
