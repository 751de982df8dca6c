//! "Did you mean": the known word nearest to an unknown one.

/// The word of `known` that is at most two edits away from `word`, if no more than half of its letters differ; the first of
/// several. Case, and how words are joined, do not count.
pub fn nearest<'k>(word: &str, known: &[&'k str]) -> Option<&'k str> {
    let word = letters(word);
    known
        .iter()
        .map(|candidate| (letters(candidate), *candidate))
        .map(|(letters, candidate)| {
            (strsim::osa_distance(&word, &letters), letters.len().min(word.len()), candidate)
        })
        .filter(|(edits, len, _)| *edits <= 2 && edits * 2 <= *len)
        .min_by_key(|(edits, _, _)| *edits)
        .map(|(_, _, candidate)| candidate)
}

fn letters(word: &str) -> String {
    word.chars().filter(|c| !matches!(c, '_' | '-')).collect::<String>().to_lowercase()
}

/// `` `a`, `b` or `c` ``.
pub fn list(words: &[&str]) -> String {
    let quoted: Vec<String> = words.iter().map(|word| format!("`{word}`")).collect();
    match quoted.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} or {last}", rest.join(", ")),
        Some((last, _)) => last.clone(),
        None => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_misses_are_found_and_far_ones_are_not() {
        let known = ["buffer", "dtype", "frozen", "no_decay", "skip", "tp"];
        assert_eq!(nearest("freeze", &known), None);
        assert_eq!(nearest("froze", &known), Some("frozen"));
        // Neighbours that are swapped are one edit.
        assert_eq!(nearest("forzen", &known), Some("frozen"));
        assert_eq!(nearest("pt", &known), Some("tp"));
        assert_eq!(nearest("Skip", &known), Some("skip"));
        assert_eq!(nearest("nodecay", &known), Some("no_decay"));
        assert_eq!(nearest("NO-DECAY", &known), Some("no_decay"));
        assert_eq!(nearest("TP", &known), Some("tp"));
        assert_eq!(nearest("__", &["tp"]), None);
        assert_eq!(nearest("tpp", &known), Some("tp"));
        assert_eq!(nearest("x", &known), None);
        assert_eq!(nearest("up", &known), Some("tp"));
        assert_eq!(nearest("", &known), None);
    }

    #[test]
    fn lists() {
        assert_eq!(list(&["a"]), "`a`");
        assert_eq!(list(&["a", "b", "c"]), "`a`, `b` or `c`");
    }
}
