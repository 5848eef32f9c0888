//! The program itself: exit codes, messages, signals.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};
use std::sync::mpsc::{Receiver, channel};

use crate::clients::limits::{H2, text};
use crate::support::{Act, Client, End, Mock, TOKEN, TempFile, chat, eventually, timed};

fn command(flags: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_baton-router"));
    command.args(flags).stdin(Stdio::null());
    command
}

fn output(flags: &[&str]) -> Output {
    command(flags).output().unwrap()
}

/// Kills what a failing test leaves behind.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Started {
    /// Start and read the address from the log.
    fn new(flags: &[&str]) -> (Started, std::net::SocketAddr) {
        let (started, addr, _) = Started::with_log(flags);
        (started, addr)
    }

    /// The same, with the lines that follow.
    fn with_log(flags: &[&str]) -> (Started, std::net::SocketAddr, Receiver<String>) {
        let mut all = vec![
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--policy",
            "round_robin",
        ];
        all.extend(flags);
        Self::of(command(&all))
    }

    fn of(mut command: Command) -> (Started, std::net::SocketAddr, Receiver<String>) {
        let mut child = command.stderr(Stdio::piped()).spawn().unwrap();
        let log = child.stderr.take().unwrap();
        let started = Started(child);
        let mut lines = BufReader::new(log).lines();
        let line = lines
            .find(|line| line.as_ref().is_ok_and(|l| l.contains("listening on")))
            .unwrap()
            .unwrap();
        // The rest of the log is read too, so that the pipe never fills.
        let (read, log) = channel();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let _ = read.send(line); // an error: the log is no longer read
            }
        });
        let addr = line
            .split("http://")
            .nth(1)
            .unwrap()
            .split(' ')
            .next()
            .unwrap();
        (started, addr.parse().unwrap(), log)
    }

    fn signal(&self, name: &str) {
        let pid = self.0.id().to_string();
        assert!(
            Command::new("kill")
                .args([name, &pid])
                .status()
                .unwrap()
                .success()
        );
    }

    async fn exit_code(&mut self) -> Option<i32> {
        let status = std::cell::Cell::new(None);
        let child = std::cell::RefCell::new(&mut self.0);
        eventually("it exits", || async {
            status.set(child.borrow_mut().try_wait().unwrap());
            status.get().is_some()
        })
        .await;
        status.get().and_then(|status| status.code())
    }
}

#[test]
fn wrong_flags_exit_with_2_and_say_all_that_is_wrong() {
    let refused = output(&["--enable-igw", "--jwt-issuer", "x"]);
    assert_eq!(refused.status.code(), Some(2));
    let text = String::from_utf8(refused.stderr).unwrap();
    assert!(
        text.contains("--enable-igw is not supported") && text.contains("--jwt-issuer is not"),
        "{text}"
    );
    let unknown = output(&["--no-such-flag"]);
    assert_eq!(unknown.status.code(), Some(2));
    assert_eq!(output(&["--help"]).status.code(), Some(0));
}

#[tokio::test]
async fn sigterm_ends_it_with_0_and_a_taken_port_with_2() {
    timed(async {
        let (mut started, addr) = Started::new(&[]);
        let port = addr.port().to_string();
        let second = output(&["--host", "127.0.0.1", "--port", &port]);
        assert_eq!(second.status.code(), Some(2));
        let text = String::from_utf8(second.stderr).unwrap();
        assert!(text.contains("in use"), "{text}");
        started.signal("-TERM");
        assert_eq!(started.exit_code().await, Some(0));
    })
    .await;
}

/// Many streams of one HTTP/2 connection each need a connection to the worker.
#[tokio::test]
async fn running_out_of_descriptors_blames_no_worker() {
    timed(async {
        let mock = Mock::start(&[Act::Stream(vec![TOKEN], End::Hang)]).await;
        let mut limited = Command::new("sh");
        limited
            .args(["-c", "ulimit -n 64 && exec \"$0\" \"$@\""])
            .arg(env!("CARGO_BIN_EXE_baton-router"))
            .args(["--host", "127.0.0.1", "--port", "0", "--worker-urls"])
            .args([mock.url().as_str(), "--health-check-interval-secs", "1"])
            .stdin(Stdio::null());
        let (_started, addr, _log) = Started::of(limited);
        let stream = tokio::net::TcpStream::connect(addr).await.unwrap();
        let mut client = H2::over(stream).await;
        let mut held = Vec::new();
        let refused = loop {
            let response = client.post(&chat(true)).await;
            if response.status() != 200 {
                break response;
            }
            held.push(response);
            assert!(held.len() < 64, "more streams than descriptors");
        };
        assert_eq!(refused.status(), 503);
        assert!(refused.headers().contains_key("retry-after"));
        assert!(text(refused).await.contains("\"connections_exhausted\""));
        // Probes cannot be sent either; that says nothing about the worker.
        let metrics = "baton_router_health_probes_total{result=\"unsent\",role=\"regular\"}";
        let client = tokio::sync::Mutex::new(client);
        eventually("a probe was not sent", || async {
            client.lock().await.get("/metrics").await.contains(metrics)
        })
        .await;
        let workers = client.lock().await.get("/workers").await;
        let workers: serde_json::Value = serde_json::from_str(&workers).unwrap();
        let worker = &workers["workers"][0];
        assert_eq!(
            (&worker["state"], &worker["circuit"]),
            (&"ready".into(), &"closed".into())
        );
        drop(held);
    })
    .await;
}

#[tokio::test]
async fn request_id_cannot_look_like_fields_of_the_access_line() {
    timed(async {
        let (_started, addr, log) = Started::with_log(&[]);
        let headers = [("x-request-id", "abc status=200 outcome=\"ok\"")];
        let mut client = Client::connect(addr).await;
        let path = "/v1/chat/completions";
        let answer = client.send(http::Method::POST, path, &headers, "{}").await;
        assert_eq!(answer.read().await.status, 503);
        let line =
            tokio::task::spawn_blocking(move || log.iter().find(|line| line.contains("abc")));
        let line = line.await.unwrap().unwrap();
        assert!(
            line.contains(r#"rid="abc status=200 outcome=\"ok\"" route="#),
            "{line}"
        );
    })
    .await;
}

#[tokio::test]
async fn access_line_names_client_key_tenant_and_model() {
    timed(async {
        let mock = Mock::start(&[]).await;
        let url = mock.url();
        let flags = ["--worker-urls", url.as_str(), "--api-key", "k-secret"];
        let (_started, addr, log) = Started::with_log(&flags);
        let key = ("authorization", "Bearer k-secret");
        let mut client = Client::connect(addr).await;
        eventually("it is ready", || async {
            let mut client = Client::connect(addr).await;
            let asking = client.send(http::Method::GET, "/readyz", &[], "").await;
            asking.read().await.status == 200
        })
        .await;
        let path = "/v1/chat/completions";
        let body = |more: &str| format!("{{\"model\": \"acme/m\", \"messages\": []{more}}}");
        let tenant = ("x-tenant-id", "red");
        for (rid, more) in [("by-header", ""), ("by-body", ", \"tenant\": \"blue\"")] {
            let headers = [key, tenant, ("x-request-id", rid)];
            let answer = client
                .send(http::Method::POST, path, &headers, &body(more))
                .await;
            assert_eq!(answer.read().await.status, 200);
        }
        let lines = tokio::task::spawn_blocking(move || {
            let access = log.iter().filter(|line| line.contains("rid=\"by-"));
            access.take(2).collect::<Vec<String>>()
        });
        let lines = lines.await.unwrap();
        for (line, tenant) in lines.iter().zip(["red", "blue"]) {
            assert!(!line.contains("secret"), "{line}");
            let shown =
                format!(r#"client=127.0.0.1 key="api_key" tenant="{tenant}" model="acme/m""#);
            assert!(line.contains(&shown), "{line}");
        }
    })
    .await;
}

#[tokio::test]
async fn second_signal_does_not_wait_for_streams() {
    timed(async {
        let mock = Mock::start(&[Act::Stream(vec![TOKEN], End::Hang)]).await;
        let (mut started, addr) =
            Started::new(&["--worker-urls", &mock.url(), "--shutdown-delay-ms", "0"]);
        eventually("it is ready", || async {
            let mut client = Client::connect(addr).await;
            client
                .send(http::Method::GET, "/readyz", &[], "")
                .await
                .read()
                .await
                .status
                == 200
        })
        .await;
        let mut client = Client::connect(addr).await;
        let mut answering = client.chat(true).await;
        answering.piece().await.unwrap();
        started.signal("-TERM");
        eventually("the listener is closed", || async {
            tokio::net::TcpStream::connect(addr).await.is_err()
        })
        .await;
        assert!(
            started.0.try_wait().unwrap().is_none(),
            "it did not wait for the stream"
        );
        started.signal("-INT");
        assert_eq!(started.exit_code().await, Some(1));
    })
    .await;
}

/// Conversations of six clients, in turn: streams, whole answers and a failing worker.
async fn talk(addr: std::net::SocketAddr) {
    for turn in 1..8usize {
        for who in 0..6 {
            let said = format!("client {who}: {}", "and so on ".repeat(40 * turn));
            let body = serde_json::json!({
                "messages": [{"role": "user", "content": said}], "stream": who % 2 == 0,
            });
            let key = format!("client-{who}");
            let headers = [("x-smg-routing-key", key.as_str())];
            let mut client = Client::connect(addr).await;
            let answer = client
                .send(
                    http::Method::POST,
                    "/v1/chat/completions",
                    &headers,
                    &body.to_string(),
                )
                .await;
            assert_eq!(answer.read().await.status, 200);
        }
    }
}

fn replay(args: &[&str]) -> (String, Option<i32>) {
    let output = output(&[&["replay"], args].concat());
    let text = [output.stdout, output.stderr].concat();
    (String::from_utf8(text).unwrap(), output.status.code())
}

#[tokio::test]
async fn decision_log_is_decided_again_as_it_was() {
    timed(async {
        let usage = serde_json::json!({"usage": {"prompt_tokens": 500, "completion_tokens": 3,
            "prompt_tokens_details": {"cached_tokens": 100}}});
        let mut mocks = Vec::new();
        for load in ["rank=0;queued_tokens=50;started_tokens=0;age_ms=4", "none"] {
            for act in [Act::Answer, Act::Json(usage.clone()), Act::Drop] {
                let act = match act {
                    // One mock only: a request that breaks two connections is not tried any
                    // further.
                    Act::Drop if load == "none" => vec![Act::Drop, Act::Answer],
                    Act::Drop => vec![Act::Answer],
                    act => vec![act],
                };
                mocks.push(Mock::start(&act).await.with_load(load));
            }
        }
        let urls: Vec<String> = mocks.iter().map(Mock::url).collect();
        for (policy, other) in [
            ("cost", "round_robin"),
            ("cache_aware", "cost"),
            ("manual", "power_of_two"),
        ] {
            let log = std::env::temp_dir()
                .join(format!("baton-decisions-{policy}-{}", std::process::id()));
            let (first, path) = (log.with_extension("1"), log.to_str().unwrap());
            for pairs in [false, true] {
                let mut flags = vec![
                    "--policy",
                    policy,
                    "--decision-log",
                    path,
                    "--decision-log-files",
                    "1",
                ];
                flags.extend(["--retry-initial-backoff-ms", "1"]);
                if pairs {
                    flags.push("--pd-disaggregation");
                    for (at, url) in urls.iter().enumerate() {
                        match at % 2 {
                            0 => flags.extend(["--prefill", url, "8998"]),
                            _ => flags.extend(["--decode", url]),
                        }
                    }
                } else {
                    flags.push("--worker-urls");
                    flags.extend(urls.iter().map(String::as_str));
                }
                let (mut router, addr) = Started::new(&flags);
                let ready = http::Method::GET;
                eventually("the workers are ready", || async {
                    let mut client = Client::connect(addr).await;
                    let workers = client
                        .send(ready.clone(), "/workers", &[], "")
                        .await
                        .read()
                        .await
                        .json();
                    let workers = workers["workers"].as_array().unwrap().clone();
                    workers.iter().all(|worker| worker["state"] == "ready")
                })
                .await;
                talk(addr).await;
                router.signal("-TERM");
                assert_eq!(router.exit_code().await, Some(0));

                let text = std::fs::read_to_string(&log).unwrap();
                assert!(
                    !text.contains("and so on") && !text.contains("client"),
                    "prompts stay out"
                );
                let (shown, code) = replay(&[path]);
                assert_eq!(code, Some(0), "{shown}");
                assert!(
                    shown.contains("100.00 %") && !shown.contains("first difference"),
                    "{shown}"
                );
                let decided = text
                    .lines()
                    .filter(|line| line.contains("\"decided\""))
                    .count();
                let role = if pairs { "prefill" } else { "regular" };
                assert!(
                    shown.contains(&format!("{role}: {policy} recorded, {policy} again")),
                    "{shown}"
                );
                assert!(
                    decided >= 42 && shown.contains(&format!(" {decided}  100.00 %")),
                    "{shown}"
                );
                if let Some(folder) = std::env::var_os("RECORD_DECISIONS") {
                    let name =
                        format!("{policy}-{}.jsonl", if pairs { "pairs" } else { "workers" });
                    std::fs::copy(&log, std::path::Path::new(&folder).join(name)).unwrap();
                }
                let (shown, code) = replay(&[path, "--policy", other]);
                assert_eq!(code, Some(0), "{shown}");
                assert!(
                    shown.contains(&format!("{policy} recorded, {other} again")),
                    "{shown}"
                );
                assert!(shown.contains("first difference: line "), "{shown}");
            }
            // A changed decision is found.
            let text = std::fs::read_to_string(&log).unwrap();
            let at = text.rfind("\"choices\":[{\"worker\":").unwrap() + 21;
            let (head, tail) = text.split_at(at);
            let tail = tail.trim_start_matches(|c: char| c.is_ascii_digit());
            std::fs::write(&first, format!("{head}99{tail}")).unwrap();
            let (shown, code) = replay(&[first.to_str().unwrap()]);
            assert_eq!(code, Some(1), "{shown}");
            assert!(shown.contains("worker 99"), "{shown}");
            std::fs::remove_file(&log).unwrap();
            std::fs::remove_file(&first).unwrap();
        }
    })
    .await;
}

/// Logs written once with
/// `RECORD_DECISIONS=tests/golden/decisions cargo test … a_decision_log_is_decided`. A change that
/// only moves or renames code decides all of them again as they were; one that is meant to choose
/// differently records them again.
#[test]
fn recorded_decisions_are_made_again() {
    for policy in ["cost", "cache_aware", "manual"] {
        for kind in ["pairs", "workers"] {
            let path = format!("tests/golden/decisions/{policy}-{kind}.jsonl");
            let (shown, code) = replay(&[&path]);
            assert_eq!(code, Some(0), "{path}: {shown}");
            assert!(
                shown.contains("100.00 %") && !shown.contains("first difference"),
                "{path}: {shown}"
            );
        }
    }
}

#[test]
fn replay_as_json_has_the_numbers_of_the_table() {
    let path = "tests/golden/decisions/cost-pairs.jsonl";
    let (text, code) = replay(&[path, "--json", "--policy", "round_robin"]);
    assert_eq!(code, Some(0), "{text}");
    let found: serde_json::Value = serde_json::from_str(&text).expect("one JSON object");
    let lines = std::fs::read_to_string(path).unwrap().lines().count() - 1;
    assert_eq!(found["lines"], lines);
    assert_eq!(found["cut_files"], serde_json::json!([]));
    let decode = &found["roles"]["decode"];
    assert_eq!(
        (&decode["recorded_policy"], &decode["policy"]),
        (
            &serde_json::json!("cost"),
            &serde_json::json!("round_robin")
        )
    );
    let sum = |names: [&str; 3]| -> u64 { names.iter().map(|n| decode[n].as_u64().unwrap()).sum() };
    let recorded = decode["reasons"].as_object().unwrap().values();
    let recorded: u64 = recorded.map(|row| row["recorded"].as_u64().unwrap()).sum();
    assert_eq!(sum(["same", "other_worker", "other_reason"]), recorded);
}

#[test]
fn log_that_ends_within_a_line_is_named() {
    let whole = std::fs::read_to_string("tests/golden/decisions/cost-workers.jsonl").unwrap();
    let cut = TempFile::new(&whole[..3000]);
    let path = cut.path();
    let (text, code) = replay(&[path]);
    assert_eq!(code, Some(0), "{text}");
    assert!(
        text.starts_with(&format!("{path} ends within a line, which is left out")),
        "{text}"
    );
    let json: serde_json::Value = serde_json::from_str(&replay(&[path, "--json"]).0).unwrap();
    assert_eq!(json["cut_files"], serde_json::json!([path]));
}

#[test]
fn files_that_are_no_decision_log_are_refused_with_a_message() {
    let (text, code) = replay(&["Cargo.toml"]);
    assert_eq!(code, Some(2));
    assert!(
        text.starts_with("baton replay: Cargo.toml: not a file of --decision-log"),
        "{text}"
    );
    let (text, code) = replay(&["/nowhere"]);
    assert!(
        code == Some(2) && text.starts_with("baton replay: /nowhere: "),
        "{text}"
    );
    assert!(replay(&[]).0.contains("usage: baton replay LOG"));
}
