//! Golden requests and answers: tests/contract/golden/dialects.
//!
//! A case is a client's request and a scripted answer of the model; the file adds the chat request,
//! the stream and the whole answer. With `UPDATE_GOLDEN=1` these are rewritten.

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::*;
use crate::dialect::translate::{TranslatedRequest, messages, responses};
use crate::refusal::TextRefusal;

#[derive(Serialize, Deserialize)]
struct GoldenCase {
    name: String,
    request: Box<RawValue>,
    steps: Vec<Vec<ScriptedPart>>,
    finish: ScriptedFinish,
    matched_stop: Option<String>,
    /// Error that ends the stream in place of the answer's end.
    error: Option<Box<RawValue>>,
    #[serde(default)]
    expected: ExpectedAnswer,
}

#[derive(Serialize, Deserialize, Default, PartialEq, Debug)]
struct ExpectedAnswer {
    /// The chat request, as it is written: the order of members reaches the template.
    chat: String,
    ignored: Vec<String>,
    /// Lines of the stream.
    stream: Vec<String>,
    /// None: the answer ends with an error.
    whole: Option<String>,
}

#[derive(Serialize, Deserialize, Clone)]
#[serde(rename_all = "snake_case")]
enum ScriptedPart {
    Reasoning(String),
    Content(String),
    Call(String),
    Arguments(String),
    End,
}

#[derive(Serialize, Deserialize, Clone, Copy)]
#[serde(rename_all = "snake_case")]
enum ScriptedFinish {
    Stop,
    Length,
    ToolCalls,
}

impl GoldenCase {
    fn script(&self) -> Script {
        let read = |part: &ScriptedPart| match part.clone() {
            ScriptedPart::Reasoning(text) => AnswerPart::Reasoning(text),
            ScriptedPart::Content(text) => AnswerPart::Content(text),
            ScriptedPart::Call(name) => AnswerPart::CallBegin(name),
            ScriptedPart::Arguments(text) => AnswerPart::Arguments(text),
            ScriptedPart::End => AnswerPart::CallEnd,
        };
        let steps = self.steps.iter();
        Script {
            steps: steps.map(|step| step.iter().map(read).collect()).collect(),
            finish: match self.finish {
                ScriptedFinish::Stop => FinishReason::Stop,
                ScriptedFinish::Length => FinishReason::Length,
                ScriptedFinish::ToolCalls => FinishReason::ToolCalls,
            },
            matched_stop: self.matched_stop.clone(),
        }
    }

    fn answer(&self, dialect: Dialect, translated: TranslatedRequest) -> ExpectedAnswer {
        let script = self.script();
        let facts = translated.facts;
        let mut streamed = ScriptedAnswer::new(dialect, facts.clone());
        let (stream, whole) = match &self.error {
            None => {
                let whole = ScriptedAnswer::new(dialect, facts).whole(&script);
                (streamed.stream(&script), Some(whole))
            }
            Some(error) => {
                let mut stream = String::new();
                for step in &script.steps {
                    stream += &streamed.write(step);
                }
                let mut end = Vec::new();
                streamed
                    .writer
                    .write_failure(error.get().as_bytes(), &mut end);
                (stream + &String::from_utf8(end).unwrap(), None)
            }
        };
        ExpectedAnswer {
            chat: translated.chat,
            ignored: translated.ignored,
            stream: stream.lines().map(str::to_owned).collect(),
            whole,
        }
    }
}

fn check(
    dialect: Dialect,
    file: &str,
    to_chat: fn(&str) -> Result<TranslatedRequest, TextRefusal>,
) {
    let root = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let path = root.join("tests/contract/golden/dialects").join(file);
    let mut cases: Vec<GoldenCase> =
        serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let writes = std::env::var_os("UPDATE_GOLDEN").is_some();
    for case in &mut cases {
        let translated = to_chat(case.request.get()).unwrap();
        let answer = case.answer(dialect, translated);
        if writes {
            case.expected = answer;
        } else {
            assert_eq!(answer, case.expected, "{}", case.name);
        }
    }
    if writes {
        let mut text = serde_json::to_string_pretty(&cases).unwrap();
        text.push('\n');
        std::fs::write(path, text).unwrap();
    }
}

#[test]
fn responses_are_golden() {
    check(Dialect::Responses, "responses.json", responses::to_chat);
}

#[test]
fn messages_are_golden() {
    check(Dialect::Messages, "messages.json", messages::to_chat);
}
