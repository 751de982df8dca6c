//! The errors found so far, so that all mistakes of a struct are reported together.

use std::cell::RefCell;
use std::fmt::Display;

use proc_macro2::Span;

/// Collects errors. Must be asked with [`Ctxt::check`] before it is dropped, or it panics: an error that
/// nobody reads would be a wrong program that compiles.
pub struct Ctxt {
    errors: RefCell<Option<Vec<syn::Error>>>,
}

impl Ctxt {
    pub fn new() -> Self {
        Ctxt { errors: RefCell::new(Some(Vec::new())) }
    }

    /// Adds `message` at `span`.
    pub fn error(&self, span: Span, message: impl Display) {
        self.push(syn::Error::new(span, message));
    }

    /// Adds an error made elsewhere.
    pub fn push(&self, error: syn::Error) {
        if let Some(errors) = self.errors.borrow_mut().as_mut() {
            errors.push(error);
        }
    }

    /// There is no error so far.
    pub fn is_empty(&self) -> bool {
        self.errors.borrow().as_ref().is_none_or(Vec::is_empty)
    }

    /// All errors as one, in the order they were found.
    pub fn check(self) -> syn::Result<()> {
        let errors = self.errors.borrow_mut().take().unwrap_or_default();
        let combined = errors.into_iter().reduce(|mut all, next| {
            all.combine(next);
            all
        });
        combined.map_or(Ok(()), Err)
    }
}

impl Drop for Ctxt {
    fn drop(&mut self) {
        if !std::thread::panicking() && self.errors.borrow().is_some() {
            panic!("errors of a derive were not looked at");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_are_combined_in_order() {
        let ctxt = Ctxt::new();
        ctxt.error(Span::call_site(), "one");
        ctxt.error(Span::call_site(), "two");
        let messages: Vec<String> = ctxt.check().unwrap_err().into_iter().map(|e| e.to_string()).collect();
        assert_eq!(messages, ["one", "two"]);
    }

    #[test]
    fn no_error_is_ok() {
        assert!(Ctxt::new().check().is_ok());
    }

    #[test]
    #[should_panic(expected = "not looked at")]
    fn dropped_unread_panics() {
        drop(Ctxt::new());
    }
}
