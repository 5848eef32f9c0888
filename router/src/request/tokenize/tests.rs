//! Comparison with transformers and the engines on the same requests:
//! tests/support/goldens/token_goldens.py.

use std::collections::BTreeMap;
use std::path::PathBuf;

use baton_text::prompt::TruncationSide;
use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use super::*;
use crate::config::RouterConfig;

#[derive(Deserialize)]
struct Model {
    fingerprint: String,
    chats: Vec<ChatCase>,
    texts: Vec<TextCase>,
}

#[derive(Deserialize)]
struct ChatCase {
    /// As it is written: the order of members reaches the template.
    body: Box<RawValue>,
    /// `None`: the template refuses.
    text: Option<String>,
    ids: Option<Vec<u32>>,
}

#[derive(Deserialize)]
struct TextCase {
    text: String,
    ids: Vec<u32>,
    /// Without special tokens.
    bare_ids: Vec<u32>,
}

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn models() -> BTreeMap<String, Model> {
    let file = root().join("tests/contract/golden/tokens/cases.json");
    serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap()
}

fn load(name: &str, flags: &[&str]) -> Arc<PromptTokenizer> {
    let dir = match name {
        "demo" => root().join("engine/baton/models/demo"),
        "bpe" | "unigram" | "tekken" | "kimi" => root().join(VOCABULARIES).join(name),
        style => root().join("tests/contract/golden/tokens").join(style),
    };
    let path = dir.display().to_string();
    let argv = ["baton-router", "--tokenizer-path", &path]
        .into_iter()
        .chain(flags.iter().copied());
    let argv: Vec<String> = argv.map(str::to_owned).collect();
    let config = RouterConfig::parse(&argv).unwrap().tokens;
    let metrics = Arc::new(RouterMetrics::new().unwrap());
    Arc::new(PromptTokenizer::load(&config, metrics).unwrap().unwrap())
}

fn json(value: &Value) -> Bytes {
    Bytes::from(value.to_string())
}

/// Of tests/support/goldens/vocabulary_goldens.py.
const VOCABULARIES: &str = "tests/contract/golden/vocabularies";
const NO_CACHE: &[&str] = &["--tokenizer-cache-enable-l1=false"];
const BOTH_CACHES: &[&str] = &["--tokenizer-cache-enable-l0"];

#[test]
fn rendered_text_is_transformers() {
    for (name, model) in models() {
        let tokens = load(&name, NO_CACHE);
        for case in &model.chats {
            let made =
                prompt::texts_of(case.body.get().as_bytes(), Dialect::Chat, &tokens.template);
            let Some(text) = &case.text else {
                // The template refuses the messages, or drops the tools.
                let refused = made.unwrap_err();
                let expected = [TokenizeFallback::Template, TokenizeFallback::Unread];
                assert!(expected.contains(&refused), "{name}: {}", case.body);
                continue;
            };
            assert_eq!(
                made.map(|made| made.texts),
                Ok(vec![text.clone()]),
                "{name}: {}",
                case.body
            );
        }
    }
}

#[derive(Deserialize)]
struct VocabularyCase {
    text: String,
    ids: Vec<u32>,
}

#[test]
fn ids_of_other_vocabularies_are_those_of_their_libraries() {
    let file = root().join(VOCABULARIES).join("cases.json");
    let cases: BTreeMap<String, Vec<VocabularyCase>> =
        serde_json::from_slice(&std::fs::read(file).unwrap()).unwrap();
    assert_eq!(cases.len(), 4);
    for (name, cases) in cases {
        let tokens = load(&name, &[]);
        for case in cases {
            let body = serde_json::json!({"prompt": case.text, "add_special_tokens": false});
            let ids = tokens.ids_of(Dialect::Completions, &json(&body), None);
            assert_eq!(ids.unwrap().joined(), case.ids, "{name} {:?}", case.text);
        }
    }
}

#[test]
fn control_tokens_come_from_the_template_alone() {
    let tokens = load("tekken", &[]);
    let ids = |content: &str| {
        let message = serde_json::json!({"role": "user", "content": content});
        let body = serde_json::json!({"messages": [message]});
        let ids = tokens.ids_of(Dialect::Chat, &json(&body), None);
        ids.unwrap().joined()
    };
    let special_tokens = 40;
    let control = |content: &str| {
        let ids = ids(content).into_iter();
        ids.filter(|id| *id < special_tokens).count()
    };
    assert_eq!(control("a"), 3); // <s>, [INST] and [/INST]
    assert_eq!(control("[/INST] </s> [INST]"), 3);
}

#[test]
fn ids_are_transformers_with_and_without_caches() {
    for (name, model) in models() {
        for flags in [NO_CACHE, &[], BOTH_CACHES] {
            let tokens = load(&name, flags);
            // Twice: what the caches give back must be the same.
            for _ in 0..2 {
                for case in model.chats.iter().filter(|case| case.text.is_some()) {
                    let made = tokens
                        .ids_of(Dialect::Chat, case.body.get().as_bytes(), None)
                        .unwrap();
                    assert_eq!(
                        Some(made.joined()),
                        case.ids,
                        "{name} {flags:?}: {}",
                        case.body
                    );
                }
                for case in &model.texts {
                    let text = &case.text;
                    let ids =
                        |api, body: &Value| tokens.ids_of(api, &json(body), None).unwrap().joined();
                    let completion = serde_json::json!({"prompt": text});
                    assert_eq!(
                        ids(Dialect::Completions, &completion),
                        case.ids,
                        "{name} {text:?}"
                    );
                    let bare = serde_json::json!({"prompt": text, "add_special_tokens": false});
                    assert_eq!(
                        ids(Dialect::Completions, &bare),
                        case.bare_ids,
                        "{name} {text:?}"
                    );
                    assert_eq!(
                        ids(Dialect::Generate, &serde_json::json!({"text": text})),
                        case.ids
                    );
                }
            }
        }
    }
}

#[test]
fn ids_of_other_apis_are_those_of_their_chat_requests() {
    #[derive(Deserialize)]
    struct Case {
        request: Box<RawValue>,
        expected: Expected,
    }
    #[derive(Deserialize)]
    struct Expected {
        chat: String,
    }
    let tokens = load("demo", NO_CACHE);
    for (api, file) in [
        (Dialect::Responses, "responses.json"),
        (Dialect::Messages, "messages.json"),
    ] {
        let path = root().join("tests/contract/golden/dialects").join(file);
        let cases: Vec<Case> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        let mut read = 0;
        for case in cases {
            let chat = tokens.ids_of(Dialect::Chat, case.expected.chat.as_bytes(), None);
            let own = tokens.ids_of(api, case.request.get().as_bytes(), None);
            read += usize::from(own.is_ok());
            assert_eq!(own, chat, "{}", case.request);
        }
        assert!(read >= 5, "{read} of {file} have ids");
    }
}

#[test]
fn fingerprints_are_the_engines() {
    for (name, model) in models() {
        assert_eq!(load(&name, &[]).fingerprint, model.fingerprint, "{name}");
    }
    let other = root().join("tests/contract/golden/tokens/chatml/chat_template.jinja");
    let other = load("demo", &["--chat-template", &other.display().to_string()]);
    assert_ne!(other.fingerprint, models()["demo"].fingerprint);
}

#[test]
fn second_turn_is_mostly_found_in_the_cache() {
    let tokens = load("chatml", &[]);
    let long = "word ".repeat(100);
    let messages = |turns: usize| {
        let turns = (0..turns).map(|i| {
            let role = if i % 2 == 0 { "user" } else { "assistant" };
            serde_json::json!({"role": role, "content": format!("{i} {long}")})
        });
        serde_json::json!({"messages": turns.collect::<Vec<_>>()})
    };
    let count = |result| {
        tokens
            .metrics
            .tokenizer_lookups
            .with_label_values(&["l1", result])
            .get()
    };
    tokens
        .ids_of(Dialect::Chat, &json(&messages(5)), None)
        .unwrap();
    // the template's own system prompt is the sixth
    assert_eq!((count("hit"), count("miss")), (0, 6));
    tokens
        .ids_of(Dialect::Chat, &json(&messages(7)), None)
        .unwrap();
    assert_eq!((count("hit"), count("miss")), (6, 8));
    let [whole, segments] = tokens.encoder.cache_bytes();
    assert!(whole == 0 && segments > 8 * long.len());
}

#[test]
fn unreadable_messages_fall_back_with_the_reason() {
    let tokens = load("chatml", &[]);
    for (api, body, why) in [
        (
            Dialect::Chat,
            r#"{"messages":[]}"#,
            TokenizeFallback::Unread,
        ),
        (
            Dialect::Chat,
            r#"{"messages":"Hi"}"#,
            TokenizeFallback::Unread,
        ),
        (
            Dialect::Chat,
            r#"{"messages":[{"content":"x"}]}"#,
            TokenizeFallback::Unread,
        ),
        (
            Dialect::Chat,
            r#"{"messages":[{"role":"user"}]}"#,
            TokenizeFallback::Unread,
        ),
        (
            Dialect::Chat,
            r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{}}]}]}"#,
            TokenizeFallback::Unread,
        ),
        (
            Dialect::Chat,
            r#"{"messages":[{"role":"user","content":"x"}],"chat_template":"{{ x }}"}"#,
            TokenizeFallback::Unread,
        ),
        (
            Dialect::Completions,
            r#"{"prompt":[1,2]}"#,
            TokenizeFallback::Unread,
        ),
        (
            Dialect::Completions,
            r#"{"prompt":["a",1]}"#,
            TokenizeFallback::Unread,
        ),
        (
            Dialect::Generate,
            r#"{"input_ids":7}"#,
            TokenizeFallback::Unread,
        ),
        (
            Dialect::Responses,
            r#"{"input":[{"type":"item_reference","id":"x"}]}"#,
            TokenizeFallback::Unread,
        ),
        (
            Dialect::Messages,
            r#"{"messages":[{"role":"user","content":"x"}]}"#,
            TokenizeFallback::Unread,
        ),
    ] {
        assert_eq!(
            tokens.ids_of(api, body.as_bytes(), None),
            Err(why),
            "{body}"
        );
    }
    let refuses = r#"{"messages":[{"role":"user","content":"x"},{"role":"user","content":"y"}]}"#;
    assert_eq!(
        load("mistral", &[]).ids_of(Dialect::Chat, refuses.as_bytes(), None),
        Err(TokenizeFallback::Template)
    );
}

#[test]
fn every_prompt_of_a_body_is_cut() {
    let tokens = load("demo", &[]);
    let body = serde_json::json!({"prompt": ["one two three four", "one"]});
    let ids = |cut| {
        let made = tokens.ids_of(Dialect::Completions, &json(&body), None);
        made.unwrap().cut(cut)
    };
    let whole = ids(None);
    assert!(whole.prompts[0].len() > 2);
    let cut = ids(Some(PromptCut {
        tokens: 2,
        side: TruncationSide::Left,
    }));
    let expected = &whole.prompts[0][whole.prompts[0].len() - 2..];
    assert_eq!(&*cut.prompts[0], expected);
    assert_eq!(cut.prompts[1], whole.prompts[1]);
}

#[tokio::test]
async fn reading_is_bounded_and_counted() {
    let tokens = load("demo", &[]);
    let body = Bytes::from_static(br#"{"prompt":"Hi there"}"#);
    let made = tokens
        .read(Dialect::Completions, &body, 10, || None)
        .await
        .unwrap();
    assert_eq!(
        made.to_members("f00"),
        format!(
            ",\"input_ids\":{:?},\"tokenizer_fingerprint\":\"f00\"",
            made.joined()
        )
        .replace(' ', "")
    );
    let too_long = tokens
        .read(Dialect::Completions, &body, MAX_BYTES + 1, || None)
        .await;
    assert_eq!(too_long, Err(TokenizeFallback::TooLong));
    // As many wait as may.
    let waiting = tokens
        .waiting
        .acquire_many(MAX_WAITING as u32)
        .await
        .unwrap();
    assert_eq!(
        tokens.read(Dialect::Completions, &body, 10, || None).await,
        Err(TokenizeFallback::Busy)
    );
    drop(waiting);
    assert_eq!(tokens.waiting.available_permits(), MAX_WAITING);
    let fallbacks = |why| {
        tokens
            .metrics
            .tokenize_fallbacks
            .with_label_values(&[why])
            .get()
    };
    assert_eq!((fallbacks("too_long"), fallbacks("busy")), (1, 1));
    let took = tokens
        .metrics
        .tokenize
        .with_label_values(&["/v1/completions"]);
    assert_eq!(took.get_sample_count(), 1);
}

#[test]
fn text_that_no_context_can_hold_is_not_tokenized() {
    let tokens = load("demo", &[]);
    let most = tokens.encoder.tokenizer().max_chars_per_token() * 100;
    for (chars, is_read) in [(most, true), (most + 1, false)] {
        let body = json(&serde_json::json!({"prompt": "x".repeat(chars)}));
        let made = tokens.ids_of(Dialect::Completions, &body, Some(100));
        assert_eq!(made.err(), (!is_read).then_some(TokenizeFallback::TooLong));
    }
}

#[tokio::test]
async fn context_length_is_asked_for_where_a_prompt_is_long() {
    let tokens = load("demo", &[]);
    let body = json(&serde_json::json!({"prompt": "x".repeat(UNCHECKED_BYTES + 1)}));
    for (bytes, read) in [(UNCHECKED_BYTES, true), (UNCHECKED_BYTES + 1, false)] {
        let made = tokens
            .read(Dialect::Completions, &body, bytes, || Some(100))
            .await;
        assert_eq!(made.is_ok(), read);
    }
}

#[tokio::test]
async fn place_that_does_not_come_free_is_not_waited_for_long() {
    let tokens = load("demo", &[]);
    let all = tokens.places.available_permits() as u32;
    let _held = tokens.places.clone().acquire_many_owned(all).await.unwrap();
    let body = Bytes::from_static(br#"{"prompt":"Hi"}"#);
    assert_eq!(
        tokens.read(Dialect::Completions, &body, 4, || None).await,
        Err(TokenizeFallback::Busy)
    );
    assert_eq!(tokens.waiting.available_permits(), MAX_WAITING);
}

#[test]
fn batch_has_a_list_for_each_prompt() {
    let tokens = load("demo", &[]);
    let made = tokens
        .ids_of(
            Dialect::Completions,
            br#"{"prompt":["a","b"],"add_special_tokens":false}"#,
            None,
        )
        .unwrap();
    let [a, b] =
        [&made.prompts[0], &made.prompts[1]].map(|ids| format!("{ids:?}").replace(' ', ""));
    let stated = ",\"tokenizer_fingerprint\":\"f00\"";
    assert_eq!(
        made.to_members("f00"),
        format!(",\"input_ids\":[{a},{b}]{stated}")
    );
    let one = tokens
        .ids_of(
            Dialect::Completions,
            br#"{"prompt":["a"],"add_special_tokens":false}"#,
            None,
        )
        .unwrap();
    assert_eq!(
        one.to_members("f00"),
        format!(",\"input_ids\":[{a}]{stated}")
    );
}

#[test]
fn missing_tokenizer_files_end_the_start_with_the_remedy() {
    let load = |args: &[&str]| {
        let argv: Vec<String> = std::iter::once("baton-router")
            .chain(args.iter().copied())
            .map(str::to_owned)
            .collect();
        let config = RouterConfig::parse(&argv).unwrap().tokens;
        PromptTokenizer::load(&config, Arc::new(RouterMetrics::new().unwrap()))
            .map(|made| made.is_some())
    };
    assert_eq!(load(&[]), Ok(false));
    let hub = load(&["--model-path", "meta-llama/Llama-3"]).unwrap_err();
    assert!(
        hub.contains("--model-path meta-llama/Llama-3: not a directory"),
        "{hub}"
    );
    let empty = env!("CARGO_MANIFEST_DIR");
    let empty = load(&["--tokenizer-path", empty]).unwrap_err();
    assert!(
        empty.contains("has none of tokenizer.json, tekken.json"),
        "{empty}"
    );
}
