//! Checked products of sizes from files and options.

use std::fmt;

/// The product of named sizes, of which there may be at most so many.
///
/// # Errors
/// There are more: the factors are named.
pub(crate) fn product(
    what: &'static str,
    factors: &[(&'static str, usize)],
    most: usize,
) -> Result<usize, TooMany> {
    let product = factors.iter().try_fold(1usize, |product, &(_, size)| product.checked_mul(size));
    product.filter(|&product| product <= most).ok_or_else(|| TooMany {
        what,
        factors: factors.to_vec(),
        most,
    })
}

/// Sizes whose product is too large.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TooMany {
    /// What there are too many of.
    pub what: &'static str,
    /// What they are the product of, with names.
    pub factors: Vec<(&'static str, usize)>,
    /// As many as there may be.
    pub most: usize,
}

impl std::error::Error for TooMany {}

impl fmt::Display for TooMany {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "too many {}:", self.what)?;
        for (at, (name, size)) in self.factors.iter().enumerate() {
            write!(f, "{} {name} {size}", if at > 0 { " x" } else { "" })?;
        }
        write!(f, ", expected at most {}", self.most)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_product_is_counted_or_its_factors_are_named() {
        assert_eq!(product("tokens", &[("rows", 6), ("length", 7)], 42), Ok(42));
        let message = |rows| product("tokens", &[("rows", rows), ("length", 7)], 42).unwrap_err().to_string();
        assert_eq!(message(7), "too many tokens: rows 7 x length 7, expected at most 42");
        let expected = format!("too many tokens: rows {} x length 7, expected at most 42", usize::MAX);
        assert_eq!(message(usize::MAX), expected);
    }
}
