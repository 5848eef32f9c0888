//! Log of the native threads of an engine, on standard error, in the shape of its Python lines
//! (baton.server.logs).

use std::fmt;
use std::sync::Once;

use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use tracing::{Event, Subscriber};
use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::{Format, Json, JsonFields, Writer};
use tracing_subscriber::fmt::time::{FormatTime, SystemTime};
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields};
use tracing_subscriber::registry::LookupSpan;

/// Filter of the log lines, instead of --log-level.
const FILTER_VARIABLE: &str = "BATON_TRANSFER_LOG";

static START: Once = Once::new();

/// Write log lines of native threads as "text" or "json", those of `process` (empty: the front)
/// named. Later calls, and calls after a default was chosen, change nothing.
#[pyfunction]
fn start_logs(level: &str, log_format: &str, process: &str) -> PyResult<()> {
    let is_json = match log_format {
        "text" => false,
        "json" => true,
        other => {
            return Err(PyValueError::new_err(format!(
                "log format {other:?}: give text or json"
            )));
        }
    };
    START.call_once(|| init(level_filter(level), is_json, process.to_owned()));
    Ok(())
}

/// Text at level info, where no program has called `start_logs`.
pub(crate) fn start_default_logs() {
    START.call_once(|| init("info", false, String::new()));
}

/// Other crates' debug lines are left out: connections to a collector would fill the log.
fn level_filter(level: &str) -> &str {
    match level {
        "debug" => "info,kv_transfer=debug,baton_router=debug",
        "warning" => "warn",
        level => level,
    }
}

fn init(filter: &str, is_json: bool, process: String) {
    let filter =
        EnvFilter::try_from_env(FILTER_VARIABLE).unwrap_or_else(|_| EnvFilter::new(filter));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false);
    // An error means that the router's own log is set up already: it stays.
    let _ = if is_json {
        log.fmt_fields(JsonFields::new())
            .event_format(JsonLine::new(&process))
            .try_init()
    } else {
        log.event_format(TextLine::new(&process)).try_init()
    };
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

pub fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_function(wrap_pyfunction!(start_logs, m)?)
}
