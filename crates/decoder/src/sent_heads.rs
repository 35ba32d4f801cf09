//! Key heads where ranks divide each row of tokens and attend with some of the heads each (Ulysses, arXiv:2309.14509).

/// Returns how many key heads are sent, each as often as the ranks need it: the least multiple of `kv_heads` that `ranks` divides and that
/// divides `heads`; `None` if `ranks` does not divide `heads`.
///
/// ```
/// use decoder::sent_key_heads;
///
/// assert_eq!(sent_key_heads(14, 2, 2), Some(2));
/// assert_eq!(sent_key_heads(14, 2, 7), Some(14));
/// assert_eq!(sent_key_heads(12, 4, 6), Some(12));
/// assert_eq!(sent_key_heads(8, 1, 4), Some(4));
/// assert_eq!(sent_key_heads(32, 8, 64), None);
/// ```
pub fn sent_key_heads(heads: u64, kv_heads: u64, ranks: u64) -> Option<u64> {
    let mut multiples = (1..=heads / kv_heads.max(1)).map(|copies| kv_heads * copies);
    multiples.find(|sent| ranks > 0 && sent.is_multiple_of(ranks) && heads.is_multiple_of(*sent))
}
