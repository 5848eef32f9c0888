//! Reads answers of models with the parsers of Dynamo and of smg (SGLang's gateway).
//!
//! Standard input has a JSON object per line: the answer, the tools of its request, and the names
//! of each peer's parsers. Standard output has what each peer reads in it, a line for a line. A
//! peer without a parser for the format is left out; one that fails has its message as `error`.
//! `tests/support/goldens/peers/readings.py` writes the one and stores the other.
//!
//! A server of either peer reads the reasoning first, and the calls in what is left of the answer.

use std::collections::BTreeMap;
use std::error::Error;
use std::io::{BufRead, Write, stdin, stdout};

use dynamo_parsers::reasoning::{ReasoningParser as _, ReasoningParserType};
use dynamo_parsers::tool_calling::ToolDefinition;
use dynamo_parsers::tool_calling::parsers::detect_and_parse_tool_call_with_recovery;
use openai_protocol::common::Tool;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

#[derive(Deserialize)]
struct Answer {
    answer: String,
    tools: Vec<AnswerTool>,
    /// The prompt ends within the reasoning.
    begins_inside: bool,
    peers: BTreeMap<String, PeerParsers>,
}

#[derive(Deserialize)]
struct AnswerTool {
    name: String,
    parameters: Value,
}

/// Names of a peer's parsers for the answer's format.
#[derive(Deserialize)]
struct PeerParsers {
    tools: Option<String>,
    reasoning: Option<String>,
}

#[derive(Default, Serialize)]
struct Reading {
    reasoning: String,
    content: String,
    /// Names, and arguments as text.
    calls: Vec<(String, String)>,
}

type ReadResult = Result<Reading, Box<dyn Error>>;

async fn read_with_dynamo(answer: &Answer, parsers: &PeerParsers) -> ReadResult {
    let mut reading = Reading {
        content: answer.answer.clone(),
        ..Reading::default()
    };
    if let Some(name) = &parsers.reasoning {
        let mut parser = ReasoningParserType::get_reasoning_parser_from_name(name);
        parser.set_in_reasoning(answer.begins_inside);
        let parts = parser.detect_and_parse_reasoning(&reading.content, &[]);
        reading.reasoning = parts.reasoning_text;
        reading.content = parts.normal_text;
    }
    if let Some(name) = &parsers.tools {
        let tools: Vec<ToolDefinition> = answer
            .tools
            .iter()
            .map(|tool| ToolDefinition {
                name: tool.name.clone(),
                parameters: Some(tool.parameters.clone()),
                strict: None,
            })
            .collect();
        let (calls, content) =
            detect_and_parse_tool_call_with_recovery(&reading.content, Some(name), Some(&tools))
                .await?;
        reading.content = content.unwrap_or_default();
        reading.calls = calls
            .into_iter()
            .map(|call| (call.function.name, call.function.arguments))
            .collect();
    }
    Ok(reading)
}

async fn read_with_smg(answer: &Answer, parsers: &PeerParsers) -> ReadResult {
    let mut reading = Reading {
        content: answer.answer.clone(),
        ..Reading::default()
    };
    if let Some(name) = &parsers.reasoning {
        let factory = reasoning_parser::ParserFactory::new();
        let parser = factory.registry().create_parser(name);
        let mut parser = parser.ok_or_else(|| format!("no reasoning parser {name}"))?;
        if answer.begins_inside {
            parser.mark_reasoning_started();
        }
        let parts = parser.detect_and_parse_reasoning(&reading.content)?;
        reading.reasoning = parts.reasoning_text;
        reading.content = parts.normal_text;
    }
    if let Some(name) = &parsers.tools {
        let tools: Vec<Tool> = answer
            .tools
            .iter()
            .map(|tool| {
                let function = json!({"name": tool.name, "parameters": tool.parameters});
                serde_json::from_value(json!({"type": "function", "function": function}))
            })
            .collect::<Result<_, _>>()?;
        let factory = tool_parser::ParserFactory::new();
        let parser = factory.registry().create_parser(name);
        let parser = parser.ok_or_else(|| format!("no tool parser {name}"))?;
        let (content, calls) = parser
            .parse_complete_with_tools(&reading.content, &tools)
            .await?;
        reading.content = content;
        reading.calls = calls
            .into_iter()
            .map(|call| (call.function.name, call.function.arguments))
            .collect();
    }
    Ok(reading)
}

async fn read_answer(answer: &Answer) -> Result<BTreeMap<&str, Value>, Box<dyn Error>> {
    let mut readings = BTreeMap::new();
    for (peer, parsers) in &answer.peers {
        let reading = match peer.as_str() {
            "dynamo" => read_with_dynamo(answer, parsers).await,
            "smg" => read_with_smg(answer, parsers).await,
            other => return Err(format!("unknown peer {other}").into()),
        };
        let value = match reading {
            Ok(reading) => serde_json::to_value(reading)?,
            Err(error) => json!({"error": error.to_string()}),
        };
        readings.insert(peer.as_str(), value);
    }
    Ok(readings)
}

fn main() -> Result<(), Box<dyn Error>> {
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    let mut output = stdout().lock();
    for line in stdin().lock().lines() {
        let answer: Answer = serde_json::from_str(&line?)?;
        let readings = runtime.block_on(read_answer(&answer))?;
        writeln!(output, "{}", serde_json::to_string(&readings)?)?;
    }
    Ok(())
}
