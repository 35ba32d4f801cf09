//! Exact integer arithmetic: every count is a `u64` (bytes, elements) or a `u128` (FLOPs), and a result that does
//! not fit is an error that names the quantity, never a wrapped number.

use crate::Error;

/// Returns the product of `factors` as `u64`.
pub(crate) fn product(what: &'static str, factors: &[u64]) -> Result<u64, Error> {
    factors
        .iter()
        .try_fold(1u64, |total, &factor| total.checked_mul(factor))
        .ok_or_else(|| overflow(what, 64, factors, " × "))
}

/// Returns the product of `factors` as `u128`.
pub(crate) fn wide_product(what: &'static str, factors: &[u64]) -> Result<u128, Error> {
    factors
        .iter()
        .try_fold(1u128, |total, &factor| total.checked_mul(u128::from(factor)))
        .ok_or_else(|| overflow(what, 128, factors, " × "))
}

/// Returns the sum of `terms` as `u64`.
pub(crate) fn sum(what: &'static str, terms: impl IntoIterator<Item = u64>) -> Result<u64, Error> {
    let terms: Vec<u64> = terms.into_iter().collect();
    terms
        .iter()
        .try_fold(0u64, |total, &term| total.checked_add(term))
        .ok_or_else(|| overflow(what, 64, &terms, " + "))
}

/// Returns the sum of `terms` as `u128`.
pub(crate) fn wide_sum(what: &'static str, terms: impl IntoIterator<Item = u128>) -> Result<u128, Error> {
    let terms: Vec<u128> = terms.into_iter().collect();
    terms
        .iter()
        .try_fold(0u128, |total, &term| total.checked_add(term))
        .ok_or_else(|| overflow(what, 128, &terms, " + "))
}

/// Returns `value`, or an error if it is zero.
pub(crate) fn positive(what: &'static str, value: u64) -> Result<u64, Error> {
    if value == 0 { Err(Error::Zero { what }) } else { Ok(value) }
}

pub(crate) fn overflow<T: ToString>(what: &'static str, bits: u32, terms: &[T], sign: &str) -> Error {
    const SHOWN: usize = 6;
    let mut text = terms.iter().take(SHOWN).map(T::to_string).collect::<Vec<_>>().join(sign);
    if terms.len() > SHOWN {
        text += &format!("{sign}…");
    }
    Error::Overflow { what, bits, terms: text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overflow_is_an_error_with_its_terms() {
        assert_eq!(product("bytes", &[1 << 32, 1 << 31]).unwrap(), 1 << 63);
        assert_eq!(
            product("bytes", &[1 << 32, 1 << 32]).unwrap_err().to_string(),
            "bytes: 4294967296 × 4294967296 does not fit in 64 bits; give smaller sizes"
        );
        assert_eq!(wide_product("FLOPs", &[u64::MAX, u64::MAX]).unwrap(), u128::from(u64::MAX).pow(2));
        assert!(wide_product("FLOPs", &[u64::MAX, u64::MAX, 2]).is_err());
        assert_eq!(sum("bytes", [1, 2, 3]).unwrap(), 6);
        assert!(sum("bytes", [u64::MAX, 1]).is_err());
        assert!(wide_sum("FLOPs", [u128::MAX, 1]).is_err());
    }
}
