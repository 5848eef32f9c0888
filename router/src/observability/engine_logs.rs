//! Log of the native threads of an engine, on standard error, in the shape of its Python lines
//! (baton.server.logs): the lines of `baton router` with the name of the process.

use std::fmt;
use std::str::FromStr;

use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::{Format, Json, JsonFields, Writer};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Filter of the log lines, instead of --log-level.
const FILTER_VARIABLE: &str = "BATON_TRANSFER_LOG";

/// An engine's --log-format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EngineLogFormat {
    Text,
    Json,
}

impl FromStr for EngineLogFormat {
    type Err = String;

    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            other => Err(format!("log format {other:?}: give text or json")),
        }
    }
}

/// Writes log lines of native threads, those of `process` (empty: the front) named. Changes
/// nothing where the program has a log already, that of the router for example.
pub fn start_engine_logs(level: &str, format: EngineLogFormat, process: &str) {
    let filter = EnvFilter::try_from_env(FILTER_VARIABLE)
        .unwrap_or_else(|_| EnvFilter::new(level_filter(level)));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false);
    // An error means that the router's own log is set up already: it stays.
    let _ = match format {
        EngineLogFormat::Text => log.event_format(TextLine::new(process)).try_init(),
        EngineLogFormat::Json => log
            .fmt_fields(JsonFields::new())
            .event_format(JsonLine::new(process))
            .try_init(),
    };
}

/// Other crates' debug lines are left out: connections to a collector would fill the log.
fn level_filter(level: &str) -> &str {
    match level {
        "debug" => "info,kv_transfer=debug,baton_router=debug",
        "warning" => "warn",
        level => level,
    }
}

/// `TIME LEVEL PROCESS: TARGET: MESSAGE FIELDS`, the layout of tracing's text with the process in
/// the place of a span.
struct TextLine {
    prefix: String,
}

impl TextLine {
    fn new(process: &str) -> Self {
        let prefix = match process {
            "" => String::new(),
            name => format!("{name}: "),
        };
        Self { prefix }
    }
}

impl<S, N> FormatEvent<S, N> for TextLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let metadata = event.metadata();
        SystemTime.format_time(&mut writer)?;
        write!(
            writer,
            " {:>5} {}{}: ",
            metadata.level(),
            self.prefix,
            metadata.target()
        )?;
        ctx.format_fields(writer.by_ref(), event)?;
        writeln!(writer)
    }
}

/// The object that `baton router --log-format json` writes, with the process as its last member.
struct JsonLine {
    inner: Format<Json, SystemTime>,
    end: String,
}

impl JsonLine {
    fn new(process: &str) -> Self {
        let end = match process {
            "" => "}".to_owned(),
            name => format!(",\"process\":{}}}", serde_json::Value::from(name)),
        };
        Self {
            inner: tracing_subscriber::fmt::format().json().flatten_event(true),
            end,
        }
    }
}

impl<S, N> FormatEvent<S, N> for JsonLine
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        ctx: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let mut line = String::new();
        self.inner
            .format_event(ctx, Writer::new(&mut line), event)?;
        let object = line.trim_end();
        let members = object.strip_suffix('}').unwrap_or(object);
        writeln!(writer, "{members}{}", self.end)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use parking_lot::Mutex;
    use serde_json::{Value, json};

    use super::*;

    /// Lines written so far.
    #[derive(Clone, Default)]
    struct WrittenLines(Arc<Mutex<Vec<u8>>>);

    impl io::Write for WrittenLines {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    impl WrittenLines {
        fn text(&self) -> String {
            String::from_utf8(self.0.lock().clone()).unwrap()
        }
    }

    /// Line of one warning, in this format.
    fn warning_line(format: EngineLogFormat, process: &str) -> String {
        let lines = WrittenLines::default();
        let writer = lines.clone();
        let log = tracing_subscriber::fmt()
            .with_writer(move || writer.clone())
            .with_ansi(false);
        let warn = || tracing::warn!(target: "kv_transfer::node", rooms = 2, "link lost");
        match format {
            EngineLogFormat::Text => {
                let log = log.event_format(TextLine::new(process)).finish();
                tracing::subscriber::with_default(log, warn);
            }
            EngineLogFormat::Json => {
                let log = log
                    .fmt_fields(JsonFields::new())
                    .event_format(JsonLine::new(process))
                    .finish();
                tracing::subscriber::with_default(log, warn);
            }
        }
        lines.text()
    }

    #[test]
    fn text_line_names_its_process_before_the_target() {
        let line = warning_line(EngineLogFormat::Text, "rank0");
        let (_, after_time) = line.split_once(' ').unwrap();
        let expected = " WARN rank0: kv_transfer::node: link lost rooms=2\n";
        assert_eq!(after_time, expected);
        let front = warning_line(EngineLogFormat::Text, "");
        assert!(front.ends_with("  WARN kv_transfer::node: link lost rooms=2\n"));
    }

    #[test]
    fn json_line_has_its_process_as_last_member() {
        let line = warning_line(EngineLogFormat::Json, "rank \"0\"");
        assert!(
            line.ends_with(",\"process\":\"rank \\\"0\\\"\"}\n"),
            "{line}"
        );
        let event: Value = serde_json::from_str(&line).unwrap();
        assert_eq!(event["message"], json!("link lost"));
        assert_eq!(event["rooms"], json!(2));
        let front: Value = serde_json::from_str(&warning_line(EngineLogFormat::Json, "")).unwrap();
        assert_eq!(front.get("process"), None);
    }

    #[test]
    fn unknown_format_is_refused_with_those_that_exist() {
        let refused = "yaml".parse::<EngineLogFormat>().unwrap_err();
        assert_eq!(refused, "log format \"yaml\": give text or json");
    }
}
