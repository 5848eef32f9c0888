//! Fixtures: one file per family, with texts and the parts that they are read as.

use serde_json::Value;

use super::feeding::{
    OwnedLexeme, ReadPart, cut_lexemes, cut_once, join_calls, lexemes_of, markers_of, push_text,
    read_parts, sample_tools,
};
use crate::stream::tools::ToolFamily;

#[derive(Debug, serde::Deserialize)]
struct FamilyFixture {
    name: String,
    /// A text in which texts of markers are markers, or a list of such texts and of
    /// `{"typed": text}`, in which they are not.
    text: Value,
    parts: Vec<FixturePart>,
}

#[derive(Debug, Clone, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
enum FixturePart {
    Reasoning(String),
    Content(String),
    /// Name and arguments of a complete call.
    Call(String, String),
    /// Name and arguments of a call that the answer's end cuts off.
    CutCall(String, String),
}

impl FamilyFixture {
    fn lexemes(&self, markers: &[&str]) -> Vec<OwnedLexeme> {
        let pieces = match &self.text {
            Value::Array(pieces) => pieces.clone(),
            text => vec![text.clone()],
        };
        let mut lexemes = Vec::new();
        for piece in &pieces {
            match piece {
                Value::String(text) => lexemes.extend(lexemes_of(text, markers)),
                typed => push_text(&mut lexemes, typed["typed"].as_str().unwrap()),
            }
        }
        lexemes
    }

    fn expected(&self) -> Vec<ReadPart> {
        let parts = self.parts.iter().cloned().map(|part| match part {
            FixturePart::Reasoning(text) => ReadPart::Reasoning(text),
            FixturePart::Content(text) => ReadPart::Content(text),
            FixturePart::Call(name, arguments) => ReadPart::Call { name, arguments },
            FixturePart::CutCall(name, arguments) => ReadPart::CutCall { name, arguments },
        });
        parts.collect()
    }
}

fn check_fixtures(family: ToolFamily, json: &str) {
    let fixtures: Vec<FamilyFixture> = serde_json::from_str(json).unwrap();
    let mut differences = Vec::new();
    for fixture in &fixtures {
        let markers = markers_of(family);
        let whole = fixture.lexemes(markers);
        let mut cuts = vec![whole.clone(), cut_lexemes(&whole, &[1])];
        cuts.extend(cut_once(&whole));
        for lexemes in cuts {
            let parts = join_calls(&read_parts(family, sample_tools(), &lexemes));
            if parts != fixture.expected() {
                differences.push(format!("{}: {parts:?}\n  of {lexemes:?}", fixture.name));
                break;
            }
        }
    }
    assert!(
        differences.is_empty(),
        "{family:?}\n{}",
        differences.join("\n")
    );
}

#[test]
fn qwen3_coder_fixtures_are_read() {
    check_fixtures(
        ToolFamily::Qwen3Coder,
        include_str!("../../tools/fixtures/qwen3_coder.json"),
    );
}

#[test]
fn glm_fixtures_are_read() {
    let fixtures = include_str!("../../tools/fixtures/glm.json");
    check_fixtures(ToolFamily::Glm45, fixtures);
    check_fixtures(ToolFamily::Glm47, fixtures);
}

#[test]
fn deepseek_v32_fixtures_are_read() {
    check_fixtures(
        ToolFamily::DeepseekV32,
        include_str!("../../tools/fixtures/deepseek_v32.json"),
    );
}

#[test]
fn deepseek_v3_fixtures_are_read() {
    check_fixtures(
        ToolFamily::DeepseekV3,
        include_str!("../../tools/fixtures/deepseek_v3.json"),
    );
}

#[test]
fn deepseek_v31_fixtures_are_read() {
    check_fixtures(
        ToolFamily::DeepseekV31,
        include_str!("../../tools/fixtures/deepseek_v31.json"),
    );
}

#[test]
fn kimi_k2_fixtures_are_read() {
    check_fixtures(
        ToolFamily::KimiK2,
        include_str!("../../tools/fixtures/kimi_k2.json"),
    );
}

#[test]
fn mistral_v13_fixtures_are_read() {
    check_fixtures(
        ToolFamily::MistralV13,
        include_str!("../../tools/fixtures/mistral_v13.json"),
    );
}

#[test]
fn pythonic_fixtures_are_read() {
    check_fixtures(
        ToolFamily::Pythonic,
        include_str!("../../tools/fixtures/pythonic.json"),
    );
}

#[test]
fn gpt_oss_fixtures_are_read() {
    check_fixtures(
        ToolFamily::GptOss,
        include_str!("../../tools/fixtures/gpt_oss.json"),
    );
}
