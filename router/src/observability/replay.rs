//! `baton replay LOG…`: a decision log decided again (router-core's `replay`), with other flags if
//! any are given.
//!
//! The flags of the log's header come first, those of the command line after them: of a flag given
//! twice the last counts, so everything that is not given is as it was.

use std::fs::File;
use std::io::{BufRead, BufReader, stdin};

use router_core::decision_log::{FORMAT, LogHeader, LogLine};
use router_core::{DecisionCounts, DecisionReplay, PolicyEvaluation, ReplayReport};
use serde_json::{Value, json};

use crate::config::{ParseStop, RouterConfig};

const USAGE: &str = "usage: baton replay LOG [LOG …] [--json] [--policy NAME] [any flag of `baton router` under Routing]

Decides a log of --decision-log again with the code that decided it, and compares. Without flags every decision must come
out as recorded (exit code 1 if not). With flags it shows what they would have changed, each decision taken in the
situation the fleet was in. Give all files of a run, in any order; '-' is standard input (zcat LOG.gz | baton replay -). --json prints one JSON object.
";

/// A file of a log, its header read.
struct Opened {
    name: String,
    header: LogHeader,
    lines: Box<dyn BufRead>,
}

/// `args` behind the word replay. Returns text for standard output and the exit code, or a
/// complaint.
pub fn run(args: &[String]) -> Result<(String, i32), String> {
    let first_flag = args.iter().position(|arg| arg.starts_with("--"));
    let (files, flags) = args.split_at(first_flag.unwrap_or(args.len()));
    let is_json = flags.iter().any(|flag| flag == "--json");
    let flags: Vec<String> = flags
        .iter()
        .filter(|flag| *flag != "--json")
        .cloned()
        .collect();
    if args.is_empty() {
        return Err(USAGE.trim_end().to_owned());
    }
    if files.is_empty() || flags.iter().any(|flag| flag == "--help") {
        return Ok((USAGE.to_owned(), 0));
    }
    let mut opened = files.iter().map(open).collect::<Result<Vec<_>, _>>()?;
    opened.sort_by_key(|file| (file.header.run, file.header.file));
    let first = opened[0].header.clone();
    if let Some(other) = opened.iter().find(|file| file.header.run != first.run) {
        return Err(format!(
            "{} and {} are of two runs of the router; replay one run at a time",
            opened[0].name, other.name
        ));
    }
    let recorded = configured(&first.flags, &[])?;
    let now = configured(&first.flags, &flags)?;
    let params = now.policy_params();
    let mut replay = DecisionReplay::new(
        |role| recorded.policy_for(role),
        |role| now.policy_for(role),
        &params,
    );
    let mut cut_files = Vec::new();
    for file in &mut opened {
        if read(file, &mut replay)? == FileEnd::Cut {
            cut_files.push(file.name.clone());
        }
    }
    let report = replay.report();
    let code = i32::from(flags.is_empty() && report.missing == 0 && !report.is_same());
    let text = if is_json {
        as_json(report, &first.version, &cut_files).to_string()
    } else {
        as_text(report, &first.version, &cut_files)
    };
    Ok((text, code))
}

fn as_text(report: &ReplayReport, written_by: &str, cut_files: &[String]) -> String {
    let mut text = String::new();
    if written_by != env!("CARGO_PKG_VERSION") {
        text += &format!(
            "written by version {written_by}, decided again by {}: rules may have changed\n",
            env!("CARGO_PKG_VERSION")
        );
    }
    for name in cut_files {
        let name = match name.as_str() {
            "-" => "standard input",
            path => path,
        };
        text += &format!(
            "{name} ends within a line, which is left out: the router was killed, or this is a \
             part of the file\n"
        );
    }
    text + &report.to_string()
}

fn as_json(report: &ReplayReport, written_by: &str, cut_files: &[String]) -> Value {
    let roles = report.roles.iter();
    let roles: serde_json::Map<String, Value> = roles
        .map(|(role, counts)| ((*role).to_owned(), counts_as_json(counts)))
        .collect();
    json!({
        "written_by": written_by,
        "decided_by": env!("CARGO_PKG_VERSION"),
        "lines": report.lines,
        "missing_lines": report.missing,
        "cut_files": cut_files,
        "is_same": report.is_same(),
        "roles": roles,
    })
}

fn counts_as_json(counts: &DecisionCounts) -> Value {
    let evaluation = |side: &PolicyEvaluation| {
        json!({
            "mean_ttft_ms": side.mean_ttft_ms(),
            "cached_prompt_tokens_ratio": side.hit_rate(),
        })
    };
    let reasons = counts.whys.iter();
    let reasons: serde_json::Map<String, Value> = reasons
        .map(|(why, (recorded, again))| {
            let row = json!({"recorded": recorded, "again": again});
            ((*why).to_owned(), row)
        })
        .collect();
    let difference = counts.first_difference.map(|difference| {
        json!({"line": difference.n, "recorded": difference.recorded, "again": difference.again})
    });
    json!({
        "recorded_policy": counts.recorded_policy,
        "policy": counts.policy,
        "same": counts.same,
        "other_worker": counts.other_worker,
        "other_reason": counts.other_reason,
        "first_difference": difference,
        "reasons": reasons,
        "recorded": evaluation(&counts.recorded),
        "again": evaluation(&counts.again),
        "observed": evaluation(&counts.observed),
    })
}

fn configured(recorded: &[String], given: &[String]) -> Result<RouterConfig, String> {
    let name = "baton replay".to_owned();
    let argv: Vec<String> = std::iter::once(&name)
        .chain(recorded)
        .chain(given)
        .cloned()
        .collect();
    RouterConfig::parse(&argv).map_err(|stop| match stop {
        ParseStop::Help(text) | ParseStop::Bad(text) => text,
    })
}

fn open(name: &String) -> Result<Opened, String> {
    let failed = |err: std::io::Error| format!("{name}: {err}");
    let mut lines: Box<dyn BufRead> = match name.as_str() {
        "-" => Box::new(BufReader::new(stdin())),
        path => Box::new(BufReader::new(File::open(path).map_err(failed)?)),
    };
    let mut text = String::new();
    lines.read_line(&mut text).map_err(failed)?;
    let header: LogHeader = serde_json::from_str(&text)
        .map_err(|err| format!("{name}: not a file of --decision-log: {err}"))?;
    match header.decision_log {
        FORMAT => Ok(Opened {
            name: name.clone(),
            header,
            lines,
        }),
        other => Err(format!(
            "{name}: format {other} of the decision log; this program reads format {FORMAT}"
        )),
    }
}

/// End of a file of a log.
#[derive(PartialEq, Eq)]
enum FileEnd {
    /// Behind a whole line.
    Whole,
    /// Within a line.
    Cut,
}

fn read(file: &mut Opened, replay: &mut DecisionReplay) -> Result<FileEnd, String> {
    let name = &file.name;
    let mut text = String::new();
    let mut number = 1u64;
    loop {
        text.clear();
        number += 1;
        if file
            .lines
            .read_line(&mut text)
            .map_err(|err| format!("{name}: {err}"))?
            == 0
        {
            return Ok(FileEnd::Whole);
        }
        if !text.ends_with('\n') {
            return Ok(FileEnd::Cut);
        }
        if text.starts_with("{\"decision_log\"") {
            continue; // files of a run one behind the other on standard input
        }
        let line: LogLine =
            serde_json::from_str(&text).map_err(|err| format!("{name}, line {number}: {err}"))?;
        if !replay.replay_line(&line) {
            let n = line.n;
            return Err(format!(
                "{name}, line {number}: number {n} came before; is a file given twice?"
            ));
        }
    }
}
