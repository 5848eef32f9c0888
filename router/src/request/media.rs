//! Images, sound and files inside a prompt: base64, a megabyte of which is a few hundred tokens to
//! a worker.
//!
//! Routing counts each as `MEDIA_BYTES` of text, made from a hash of it, so that equal images still
//! share a prefix.

use std::ops::Range;
use std::sync::LazyLock;

use memchr::memmem::Finder;
use router_core::PromptBlocks;

/// Text that stands for one image [bytes]: 512 tokens at the usual ratio, between the 256 and 1500
/// of today's models.
const MEDIA_BYTES: usize = 2048;
/// Shorter data of a `data:` URL counts as text [bytes].
const MIN_DATA_URL: usize = 1 << 10;
/// Shorter base64 outside of a `data:` URL counts as text [bytes].
const MIN_BASE64: usize = 16 << 10;
/// Base64 of this length has nearly all of its 64 characters; a long word, a number or a genome has
/// not.
const MIN_CHARACTERS: usize = 48;

/// Begins the data of a `data:` URL.
static DATA_MARK: LazyLock<Finder<'static>> = LazyLock::new(|| Finder::new(b";base64,"));

/// `prompt` (JSON) with each image replaced by the text that stands for it; `None`: it has none.
pub fn condensed(prompt: &[u8]) -> Option<Vec<u8>> {
    let spans = spans(prompt);
    if spans.is_empty() {
        return None;
    }
    let mut text = Vec::with_capacity(prompt.len().min(spans.len() * 2 * MEDIA_BYTES));
    let mut from = 0;
    for span in spans {
        text.extend_from_slice(&prompt[from..span.start]);
        let data = &prompt[span.clone()];
        let hash = PromptBlocks::of_text(data, None)
            .prompt_view()
            .hashes
            .last()
            .copied();
        let name = [hash.unwrap_or(0).to_le_bytes(), data.len().to_le_bytes()].concat();
        text.extend(name.iter().cycle().take(MEDIA_BYTES));
        from = span.end;
    }
    text.extend_from_slice(&prompt[from..]);
    Some(text)
}

/// Where the data lies, in order.
fn spans(prompt: &[u8]) -> Vec<Range<usize>> {
    let end_of = |start: usize| {
        let length = prompt[start..].iter().position(|b| !is_base64(*b));
        length.map_or(prompt.len(), |length| start + length)
    };
    let marked = DATA_MARK
        .find_iter(prompt)
        .map(|at| at + DATA_MARK.needle().len());
    let marked = marked.map(|start| start..end_of(start));
    let mut spans: Vec<_> = marked.filter(|span| span.len() >= MIN_DATA_URL).collect();
    // A long run holds one of the places that are looked at.
    let mut at = 0;
    while at < prompt.len() {
        let end = end_of(at);
        let before = prompt[..at].iter().rposition(|b| !is_base64(*b));
        let span = before.map_or(0, |before| before + 1)..end;
        if end > at
            && span.len() >= MIN_BASE64
            && characters(&prompt[span.clone()]) >= MIN_CHARACTERS
        {
            spans.push(span);
        }
        at = end + MIN_BASE64 / 2;
    }
    spans.sort_by_key(|span| span.start);
    spans.dedup_by_key(|span| span.start);
    spans
}

/// Characters of both alphabets, and the backslash of JSON's `\\/`.
fn is_base64(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"+/=-_\\".contains(&byte)
}

fn characters(data: &[u8]) -> usize {
    let mut is_there = [false; 256];
    data.iter().for_each(|b| is_there[usize::from(*b)] = true);
    is_there.iter().filter(|is| **is).count()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn base64(length: usize, seed: usize) -> String {
        const ALPHABET: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
        let letters = (0..length).map(|i| ALPHABET[(i * 7 + i / 64 + seed) % 64] as char);
        letters.collect()
    }

    #[test]
    fn images_have_a_constant_size_and_their_own_hashes() {
        let prompt =
            |data: &str| format!(r#"[{{"url":"data:image/png;base64,{data}"}},"What is it?"]"#);
        let small = prompt(&base64(3_000, 0));
        let large = prompt(&base64(1_000_000, 0));
        let other = condensed(prompt(&base64(3_000, 1)).as_bytes()).unwrap();
        let [small, large] = [small, large].map(|text| condensed(text.as_bytes()).unwrap());
        assert_eq!((small.len(), large.len()), (other.len(), other.len()));
        assert!(small != large && small != other);
        assert!(small.len() < MEDIA_BYTES + 100);
        assert!(small.ends_with(br#""},"What is it?"]"#));
    }

    #[test]
    fn bare_base64_is_found_wherever_it_begins() {
        for before in [0, 1, 8_191, 8_192, 20_000] {
            let text = format!(
                "{}\"{}\" and text",
                "word ".repeat(before / 5),
                base64(MIN_BASE64, 3)
            );
            let spans = spans(text.as_bytes());
            assert_eq!(spans.len(), 1, "{before}");
            assert_eq!(spans[0].len(), MIN_BASE64, "{before}");
        }
    }

    #[test]
    fn text_is_left_alone() {
        for text in [
            String::new(),
            "x".repeat(100_000),
            "ACGT".repeat(100_000),
            "Many words in a row. ".repeat(10_000),
            format!("data:image/png;base64,{}", base64(100, 0)),
            base64(MIN_BASE64 - 1, 0),
        ] {
            assert_eq!(condensed(text.as_bytes()), None, "{}", text.len());
        }
    }
}
