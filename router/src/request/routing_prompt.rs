//! Prompts as policies compare them: the beginning of their text, or hashes of their text or token
//! ids.

use std::borrow::Cow;

use baton_text::dialect::body::BodyIndex;
use router_core::{PromptBlocks, TextScope, cache_namespace};

use crate::request::media;

/// Longest beginning of a prompt that policies compare as text: a million tokens at the usual
/// ratio. They compare it on the event loop's thread, under the lock of their role [bytes].
const MAX_ROUTING_TEXT: usize = 4 << 20;

/// The beginning of the prompt's JSON, at most `MAX_ROUTING_TEXT` of it, behind a character that
/// stands for what else it belongs to. Cost: a copy, if there is such.
pub fn routing_text<'a>(scan: &BodyIndex, body: &'a [u8]) -> Cow<'a, str> {
    let prompt = beginning(scan.prompt(body), MAX_ROUTING_TEXT);
    match scope_of(scan, body).marker() {
        Some(marker) => Cow::Owned(format!("{marker}{prompt}")),
        None => Cow::Borrowed(prompt),
    }
}

/// Hashes of the prompt's text, in which images and the like have a constant size (media.rs). Cost:
/// one pass over it.
pub fn text_blocks(scan: &BodyIndex, body: &[u8]) -> PromptBlocks {
    let prompt = scan.prompt(body);
    let scope = scope_of(scan, body);
    match media::condensed(prompt) {
        Some(text) => PromptBlocks::of_text_in(scope, &text, None).with_media(),
        None => PromptBlocks::of_text_in(scope, prompt, None),
    }
}

/// Hashes of the prompt's token ids, in the namespace of the cache that it may share.
pub fn token_blocks(scan: &BodyIndex, ids: &[u32], block_size: usize) -> PromptBlocks {
    let salt = scan.cache_salt.as_deref().unwrap_or_default();
    let key = scan.extra_key.as_deref().unwrap_or_default();
    router_core::token_blocks(ids, block_size, &cache_namespace(salt, key))
}

fn scope_of(scan: &BodyIndex, body: &[u8]) -> TextScope {
    let parts = scan.scope_parts(body);
    parts.fold(TextScope::NONE, |scope, (name, json)| {
        scope.with_part(name, json)
    })
}

/// At most `most` bytes of a text, cut between two characters.
fn beginning(text: &[u8], most: usize) -> &str {
    let cut = &text[..text.len().min(most)];
    match std::str::from_utf8(cut) {
        Ok(text) => text,
        Err(err) => std::str::from_utf8(&cut[..err.valid_up_to()]).unwrap_or_default(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use baton_text::dialect::Dialect;

    use super::*;

    #[test]
    fn prompts_with_another_salt_share_no_block() {
        let blocks = |body: &str| {
            let scan = BodyIndex::of(body.as_bytes(), Dialect::Chat).unwrap();
            token_blocks(&scan, &[1, 2, 3, 4], 2)
        };
        let bare = blocks("{}");
        assert_eq!(bare, blocks(r#"{"cache_salt":null,"extra_key":7}"#));
        let salted = blocks(r#"{"cache_salt":"a"}"#);
        assert_eq!(salted, blocks(r#"{"cache_salt":"\u0061"}"#));
        for other in [
            &bare,
            &blocks(r#"{"extra_key":"a"}"#),
            &blocks(r#"{"cache_salt":"b"}"#),
        ] {
            assert_ne!(
                salted.prompt_view().hashes[0],
                other.prompt_view().hashes[0]
            );
        }
    }

    #[test]
    fn routing_text_is_the_raw_prompt() {
        let body = r#"{"messages":[{"role":"user","content":"hé\n"}],"stream":true}"#;
        let scan = BodyIndex::of(body.as_bytes(), Dialect::Chat).unwrap();
        assert!(scan.stream);
        assert_eq!(
            routing_text(&scan, body.as_bytes()),
            r#"[{"role":"user","content":"hé\n"}]"#
        );
    }

    #[test]
    fn routing_text_of_a_long_prompt_is_its_beginning_in_whole_characters() {
        let body = format!("{{\"prompt\":\"{}\"}}", "é".repeat(MAX_ROUTING_TEXT));
        let scan = BodyIndex::of(body.as_bytes(), Dialect::Completions).unwrap();
        let text = routing_text(&scan, body.as_bytes());
        // The quotation mark, then characters of two bytes.
        assert_eq!(text.len(), MAX_ROUTING_TEXT - 1);
        assert!(text.starts_with("\"é") && text.ends_with('é'));
    }

    #[test]
    fn members_that_change_the_kv_keep_equal_texts_apart() {
        let first = |members: &str| {
            let text = "x".repeat(600);
            let body = format!("{{\"messages\":[{{\"content\":\"{text}\"}}]{members}}}");
            let scan = BodyIndex::of(body.as_bytes(), Dialect::Chat).unwrap();
            let hash = text_blocks(&scan, body.as_bytes()).prompt_view().hashes[0];
            (hash, routing_text(&scan, body.as_bytes()).chars().next())
        };
        let plain = first("");
        assert_eq!(plain.1, Some('['));
        let mut all = vec![plain];
        for members in [
            r#","model":"a""#,
            r#","model":"b""#,
            r#","cache_salt":"a""#,
            r#","extra_key":"a""#,
            r#","tools":[{"type":"function"}]"#,
            r#","chat_template_kwargs":{"enable_thinking":false}"#,
            r#","model":"a","lora_path":"b""#,
        ] {
            let (hash, marker) = first(members);
            let is_new = all.iter().all(|known| known.0 != hash && known.1 != marker);
            assert!(is_new, "{members}");
            all.push((hash, marker));
        }
        assert_eq!(first(r#","temperature":1,"cache_salt":null"#), plain);
        assert_eq!(
            first(r#","cache_salt":"b","model":"a""#),
            first(r#","model":"a","cache_salt":"b""#)
        );
    }

    #[test]
    fn body_without_a_prompt_has_no_blocks() {
        let scan = BodyIndex::of(b"{}", Dialect::Chat).unwrap();
        assert_eq!(text_blocks(&scan, b"{}").prompt_view().units, 0);
    }
}
