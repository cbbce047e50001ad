//! Statements of several rows. Their texts depend on the number of rows only, and that is a power of two, so that a few
//! prepared statements serve groups of every size.

/// Cuts items into portions of a power of two, at most `max` (one itself), the larger ones first.
pub(super) fn portions<T>(items: &[T], max: usize) -> impl Iterator<Item = &[T]> {
    let mut left = items;
    std::iter::from_fn(move || {
        let size = 1 << left.len().min(max).checked_ilog2()?;
        let (portion, rest) = left.split_at(size);
        left = rest;
        Some(portion)
    })
}

/// Placeholders of so many rows of so many columns: `(?, ?), (?, ?)`.
pub(super) fn rows(rows: usize, columns: usize) -> String {
    let row = format!("({})", ["?"].repeat(columns).join(", "));
    vec![row.as_str(); rows].join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn portions_are_all_items_in_order_in_powers_of_two() {
        for len in 0..200_usize {
            let items: Vec<_> = (0..len).collect();
            let cut: Vec<&[usize]> = portions(&items, 32).collect();
            assert_eq!(cut.concat(), items);
            assert!(cut.iter().all(|portion| portion.len().is_power_of_two() && portion.len() <= 32));
            assert!(cut.len() <= len / 32 + 5, "{len}");
        }
    }

    #[test]
    fn rows_have_a_placeholder_for_each_column() {
        assert_eq!(rows(2, 3), "(?, ?, ?), (?, ?, ?)");
    }
}
