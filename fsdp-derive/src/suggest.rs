//! "Did you mean": the known word nearest to an unknown one.

/// The word of `known` that is at most two edits away from `word`, if no more than half of its letters differ; the first of
/// several. Case, and how words are joined, do not count.
pub fn nearest<'k>(word: &str, known: &[&'k str]) -> Option<&'k str> {
    let word = letters(word);
    known
        .iter()
        .map(|candidate| (letters(candidate), *candidate))
        .map(|(letters, candidate)| (distance(&word, &letters), letters.len().min(word.len()), candidate))
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

/// Insertions, deletions, replacements and swaps of neighbours that turn `a` into `b`.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut rows: Vec<Vec<usize>> = vec![(0..=b.len()).collect()];
    for i in 1..=a.len() {
        let mut row = vec![i];
        for j in 1..=b.len() {
            let replaced = rows[i - 1][j - 1] + usize::from(a[i - 1] != b[j - 1]);
            let mut best = replaced.min(rows[i - 1][j] + 1).min(row[j - 1] + 1);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                best = best.min(rows[i - 2][j - 2] + 1);
            }
            row.push(best);
        }
        rows.push(row);
    }
    rows[a.len()][b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        assert_eq!(distance("", ""), 0);
        assert_eq!(distance("skip", "skip"), 0);
        assert_eq!(distance("", "skip"), 4);
        assert_eq!(distance("froze", "frozen"), 1);
        assert_eq!(distance("forzen", "frozen"), 1);
        assert_eq!(distance("dtpye", "dtype"), 1);
        assert_eq!(distance("kitten", "sitting"), 3);
    }

    #[test]
    fn near_misses_are_found_and_far_ones_are_not() {
        let known = ["buffer", "dtype", "frozen", "no_decay", "skip", "tp"];
        assert_eq!(nearest("freeze", &known), None);
        assert_eq!(nearest("froze", &known), Some("frozen"));
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
