//! Answers of gpt-oss with the messages that openai-harmony reads in them
//! (tests/support/goldens/harmony_goldens.py).

use super::feeding::{
    ReadPart, cut_lexemes, join_calls, lexemes_of, markers_of, read_parts, sample_tools,
};
use crate::stream::tools::ToolFamily;

#[derive(Debug, serde::Deserialize)]
struct HarmonyAnswer {
    answer: String,
    messages: Vec<HarmonyMessage>,
}

#[derive(Debug, serde::Deserialize)]
struct HarmonyMessage {
    channel: Option<String>,
    recipient: Option<String>,
    text: String,
}

/// Parts of an answer with these messages. Messages of one kind are lines of one text; white space
/// in front of a call is left out.
fn parts_of(messages: &[HarmonyMessage]) -> Vec<ReadPart> {
    let mut parts = Vec::new();
    let texts_of = |is_reasoning: bool| {
        let of_kind = messages.iter().filter(|message| {
            let is_analysis = message.channel.as_deref() == Some("analysis");
            message.recipient.is_none() && is_analysis == is_reasoning && !message.text.is_empty()
        });
        let texts: Vec<&str> = of_kind.map(|message| message.text.as_str()).collect();
        texts.join("\n")
    };
    let calls: Vec<&HarmonyMessage> = messages
        .iter()
        .filter(|message| message.recipient.is_some())
        .collect();
    let reasoning = texts_of(true);
    if !reasoning.is_empty() {
        parts.push(ReadPart::Reasoning(reasoning));
    }
    let content = texts_of(false);
    let shown = if calls.is_empty() {
        content.as_str()
    } else {
        content.trim_end()
    };
    if !shown.is_empty() {
        parts.push(ReadPart::Content(shown.to_owned()));
    }
    for call in calls {
        let recipient = call.recipient.as_deref().unwrap();
        let name = recipient.strip_prefix("functions.").unwrap().to_owned();
        let arguments = call.text.clone();
        let is_complete = serde_json::from_str::<serde_json::Value>(&arguments).is_ok();
        parts.push(if is_complete {
            ReadPart::Call { name, arguments }
        } else {
            ReadPart::CutCall { name, arguments }
        });
    }
    parts
}

#[test]
fn answers_have_the_messages_that_openai_harmony_reads() {
    let answers: Vec<HarmonyAnswer> =
        serde_json::from_str(include_str!("harmony_answers.json")).unwrap();
    assert!(answers.len() > 80);
    let family = ToolFamily::GptOss;
    for answer in &answers {
        let lexemes = lexemes_of(&answer.answer, markers_of(family));
        for piece_len in [1, 3, usize::MAX] {
            let cut = cut_lexemes(&lexemes, &[piece_len]);
            let parts = join_calls(&read_parts(family, sample_tools(), &cut));
            assert_eq!(parts, parts_of(&answer.messages), "{}", answer.answer);
        }
    }
}
