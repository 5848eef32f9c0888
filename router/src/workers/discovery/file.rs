//! Workers listed in a file that others write: JSON or YAML, a list or `{"workers": list}`.
//!
//! The file is read twice a second by its path, so that a replaced file and a ConfigMap's swapped
//! link are seen as well as a written one. A change counts once two readings agree: half a file is
//! not applied. A file that cannot be read or parsed, and an empty list, change nothing.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::time::Duration;

use router_core::Role;
use serde::Deserialize;
use serde_json::Value;
use tokio::time::{MissedTickBehavior, interval};

use super::DiscoveryFeed;
use crate::config::WorkerSpec;
use crate::transport::files::refuse_other_kinds;

/// Pause between two readings; a change takes effect within two.
const POLL: Duration = Duration::from_millis(500);
/// Far above what MAX_WORKERS entries need [bytes].
const MAX_FILE: u64 = 4 << 20;

const NO_WORKERS: &str = "names no worker; list at least one";
const NO_LIST: &str =
    "is no list of workers; give [{\"url\": …, \"role\": …}] or {\"workers\": […]}";

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    url: String,
    /// `worker_type` is its name in POST /workers.
    #[serde(alias = "worker_type")]
    role: Option<Role>,
    /// A number, or 'none'.
    bootstrap_port: Option<Value>,
    topology: Option<String>,
}

/// Read once, refuse what is wrong, then follow the file. An empty list is no mistake at the start.
pub(super) fn start(
    mut feed: DiscoveryFeed,
    path: PathBuf,
    roles: &'static [Role],
) -> Result<(), String> {
    let refused = |why| format!("--discovery-file {}: {why}", path.display());
    let text = read(&path).map_err(refused)?;
    feed.answers.set_to_now();
    match parse(&text, roles).map_err(refused)? {
        workers if workers.is_empty() => feed.failed(NO_WORKERS.to_owned()),
        workers => feed.apply(workers.into()),
    }
    tokio::spawn(follow(feed, path, roles, text));
    Ok(())
}

async fn follow(mut feed: DiscoveryFeed, path: PathBuf, roles: &'static [Role], text: String) {
    let mut ticks = interval(POLL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut taken = Ok(text);
    let mut before = taken.clone();
    loop {
        ticks.tick().await;
        if !feed.recheck() {
            return;
        }
        let reading = path.clone();
        let Ok(now) = tokio::task::spawn_blocking(move || read(&reading)).await else {
            continue; // the runtime ends, or the reading panicked and says so itself
        };
        if now.is_ok() {
            feed.answers.set_to_now();
        }
        let is_settled = now == before;
        before = now.clone();
        if !is_settled || now == taken {
            continue;
        }
        match now.clone().and_then(|text| parse(&text, roles)) {
            Ok(workers) if !workers.is_empty() => feed.apply(workers.into()),
            parsed => {
                let why = parsed.err().unwrap_or_else(|| NO_WORKERS.to_owned());
                feed.failed(format!("{}: {why}", path.display()));
            }
        }
        taken = now;
    }
}

fn read(path: &Path) -> Result<String, String> {
    let mut text = String::new();
    let opened = refuse_other_kinds(path).and_then(|()| File::open(path));
    let read = opened.and_then(|file| file.take(MAX_FILE + 1).read_to_string(&mut text));
    read.map_err(|err| {
        format!("cannot be read: {err}; give a readable JSON or YAML list of workers")
    })?;
    if text.len() as u64 > MAX_FILE {
        return Err(format!(
            "is larger than {MAX_FILE} bytes; list fewer workers"
        ));
    }
    Ok(text)
}

/// All of it or nothing: a list with one mistake is not taken.
fn parse(text: &str, roles: &[Role]) -> Result<Vec<WorkerSpec>, String> {
    if text.trim().is_empty() {
        return Ok(Vec::new());
    }
    // JSON is YAML too.
    let mut value: Value =
        serde_saphyr::from_str(text).map_err(|err| format!("is neither JSON nor YAML: {err}"))?;
    let fields = value.as_object_mut().filter(|fields| fields.len() == 1);
    let workers = fields.and_then(|fields| fields.remove("workers"));
    let problem = if workers.is_some() {
        "'workers' is not a list"
    } else {
        NO_LIST
    };
    let list = match workers.unwrap_or(value) {
        Value::Null => Vec::new(),
        Value::Array(list) => list,
        _ => return Err(problem.to_owned()),
    };
    let mut specs: Vec<WorkerSpec> = Vec::new();
    for (at, value) in list.into_iter().enumerate() {
        let spec = entry(value, roles).map_err(|why| format!("worker {}: {why}", at + 1))?;
        if specs.iter().any(|known| known.url == spec.url) {
            return Err(format!("{} is listed twice; list it once", spec.url));
        }
        specs.push(spec);
    }
    Ok(specs)
}

fn entry(value: Value, roles: &[Role]) -> Result<WorkerSpec, String> {
    let entry: Entry = serde_json::from_value(value)
        .map_err(|err| format!("{err}; expected url, role, bootstrap_port, topology"))?;
    let known = || {
        roles
            .iter()
            .map(|role| role.into_str())
            .collect::<Vec<_>>()
            .join(" or ")
    };
    let role = match (entry.role, roles) {
        (Some(role), _) if roles.contains(&role) => role,
        (None, [only]) => *only,
        (Some(role), _) => {
            return Err(format!(
                "role {role} has no use in this router; give {}",
                known()
            ));
        }
        (None, _) => return Err(format!("has no role; give {}", known())),
    };
    let port = entry.bootstrap_port.map(|port| match port {
        Value::String(word) => word,
        other => other.to_string(),
    });
    Ok(WorkerSpec::new(&entry.url, role, port.as_deref())?.in_topology(entry.topology))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const PD: &[Role] = &[Role::Prefill, Role::Decode];

    fn shown(text: &str, roles: &[Role]) -> Vec<String> {
        let specs = parse(text, roles).unwrap();
        specs
            .iter()
            .map(|s| format!("{} {} {:?}", s.role, s.url, s.bootstrap))
            .collect()
    }

    #[test]
    fn json_and_yaml_say_the_same() {
        let json = r#"[{"url": "http://a:1", "role": "prefill", "bootstrap_port": 8998},
            {"url": "b:2", "worker_type": "prefill", "bootstrap_port": "none"}, {"url": "http://c:3", "role": "decode"}]"#;
        let yaml = "# fleet\nworkers:\n- {url: http://a:1, role: prefill, bootstrap_port: 8998}\n- url: b:2\n  role: prefill\n  \
            bootstrap_port: none\n- url: http://c:3\n  role: decode\n";
        let expected = [
            "prefill http://a:1 Port(8998)",
            "prefill http://b:2 Null",
            "decode http://c:3 FromWorker",
        ];
        assert_eq!(shown(json, PD), expected);
        assert_eq!(shown(yaml, PD), expected);
        assert_eq!(
            shown("- url: a:1", &[Role::Regular]),
            ["regular http://a:1 FromWorker"]
        );
    }

    #[test]
    fn empty_list_is_distinguished_from_nonsense() {
        for text in ["", "  \n", "[]", "workers: []", "workers:", "# none\n"] {
            assert_eq!(parse(text, PD), Ok(Vec::new()), "{text:?}");
        }
        for (text, part) in [
            ("[{", "neither JSON nor YAML"),
            ("hello", "is no list"),
            ("fleet: []", "is no list"),
            ("workers: 3", "'workers' is not a list"),
            ("- role: decode", "worker 1: missing field `url`"),
            ("- url: a:1", "has no role; give prefill or decode"),
            ("- {url: a:1, role: boss}", "unknown variant `boss`"),
            (
                "- {url: a:1, role: regular}",
                "role regular has no use in this router; give prefill or decode",
            ),
            (
                "- {url: a:1, role: decode, port: 3}",
                "unknown field `port`",
            ),
            (
                "- {url: a:1, role: prefill, bootstrap_port: 70000}",
                "bootstrap port '70000' of a:1: give 1 to 65535",
            ),
            ("- {url: 'http://a:1/v1', role: decode}", "has a path"),
            (
                "- {url: a:1, role: decode}\n- {url: 'http://a:1', role: prefill}",
                "http://a:1 is listed twice",
            ),
        ] {
            let why = parse(text, PD).unwrap_err();
            assert!(why.contains(part), "{text}: {why}");
        }
    }
}
