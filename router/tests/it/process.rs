//! The program itself: exit codes, messages, signals.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};

use crate::support::{Act, Client, End, Mock, TOKEN, eventually, timed};

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
        let mut all = vec![
            "--host",
            "127.0.0.1",
            "--port",
            "0",
            "--policy",
            "round_robin",
        ];
        all.extend(flags);
        let mut child = command(&all).stderr(Stdio::piped()).spawn().unwrap();
        let log = child.stderr.take().unwrap();
        let started = Started(child);
        let mut lines = BufReader::new(log).lines();
        let line = lines
            .find(|line| line.as_ref().is_ok_and(|l| l.contains("listening on")))
            .unwrap()
            .unwrap();
        // The rest of the log is read too, so that the pipe never fills.
        std::thread::spawn(move || lines.for_each(drop));
        let addr = line
            .split("http://")
            .nth(1)
            .unwrap()
            .split(' ')
            .next()
            .unwrap();
        (started, addr.parse().unwrap())
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

#[tokio::test]
async fn a_second_signal_does_not_wait_for_streams() {
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
