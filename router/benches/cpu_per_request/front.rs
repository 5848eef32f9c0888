//! Fronts measured: our router as it is installed, our native program, a peer's router (the wheels
//! that tests/clients/setup.sh installs), or nginx.

use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// `baton router` of the checkout's environment: the extension module of the wheel.
    Baton,
    /// The program `baton-router` that cargo built for this bench.
    NativeProgram,
    SglangRouter,
    Smg,
    Nginx,
}

impl Kind {
    pub const ALL: [Kind; 5] = [
        Kind::Baton,
        Kind::NativeProgram,
        Kind::SglangRouter,
        Kind::Smg,
        Kind::Nginx,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Kind::Baton => "baton",
            Kind::NativeProgram => "baton-router",
            Kind::SglangRouter => "sglang-router",
            Kind::Smg => "smg",
            Kind::Nginx => "nginx",
        }
    }

    pub fn policies(self) -> &'static [&'static str] {
        match self {
            Kind::Baton | Kind::NativeProgram => &["round_robin", "cache_aware", "cost"],
            Kind::SglangRouter | Kind::Smg => &["round_robin", "cache_aware"],
            Kind::Nginx => &["round_robin"],
        }
    }

    /// Why it cannot be measured here, as a sentence.
    pub fn missing(self) -> Option<String> {
        match self {
            Kind::NativeProgram => None,
            Kind::Baton => {
                let command = baton_command();
                (!command.exists()).then(|| {
                    format!(
                        "{} does not exist; run NATIVE_PROFILE=dist make setup, or set BATON to \
                         the command of an installed wheel",
                        command.display()
                    )
                })
            }
            Kind::Nginx => {
                let found = Command::new("nginx")
                    .arg("-v")
                    .stderr(Stdio::null())
                    .status();
                found.err().map(|err| {
                    format!(
                        "nginx cannot be started ({err}); install it, or leave it out of --fronts"
                    )
                })
            }
            Kind::SglangRouter | Kind::Smg => {
                let python = self.python();
                (!python.exists()).then(|| {
                    format!("{} is not installed; run tests/clients/setup.sh, or leave {} out of --fronts", python.display(), self.name())
                })
            }
        }
    }

    fn python(self) -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../.venv-peers")
            .join(self.name())
            .join("bin/python")
    }
}

/// A process, ended when dropped.
pub struct Front {
    child: Child,
    pub addr: SocketAddr,
    /// nginx's configuration.
    _folder: Option<Folder>,
}

impl Drop for Front {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Front {
    /// Even workers prefill and odd ones decode with `pairs`.
    pub fn start(kind: Kind, policy: &str, pairs: bool, workers: &[SocketAddr]) -> Front {
        let port = free_port();
        let mut folder = None;
        let mut command = match kind {
            Kind::Baton => {
                let mut command = Command::new(baton_command());
                command.arg("router");
                command
            }
            Kind::NativeProgram => Command::new(env!("CARGO_BIN_EXE_baton-router")),
            Kind::Nginx => {
                let made = Folder::with_config(port, workers);
                let mut command = Command::new("nginx");
                command
                    .arg("-p")
                    .arg(&made.0)
                    .arg("-c")
                    .arg(made.0.join("nginx.conf"));
                folder = Some(made);
                command
            }
            Kind::SglangRouter | Kind::Smg => {
                let module = if kind == Kind::Smg {
                    "smg.launch_router"
                } else {
                    "sglang_router.launch_router"
                };
                let mut command = Command::new(kind.python());
                command.args(["-m", module, "--prometheus-port", &free_port().to_string()]);
                command
            }
        };
        if kind != Kind::Nginx {
            command.args([
                "--host",
                "127.0.0.1",
                "--port",
                &port.to_string(),
                "--log-level",
                "warn",
                "--policy",
                policy,
            ]);
            if pairs {
                command.arg("--pd-disaggregation");
                for (i, addr) in workers.iter().enumerate() {
                    let url = format!("http://{addr}");
                    if i % 2 == 0 {
                        command.args(["--prefill", &url, "8998"]);
                    } else {
                        command.args(["--decode", &url]);
                    }
                }
            } else {
                command.arg("--worker-urls");
                command.args(workers.iter().map(|addr| format!("http://{addr}")));
            }
        }
        let child = command
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("it was found");
        Front {
            child,
            addr: SocketAddr::from(([127, 0, 0, 1], port)),
            _folder: folder,
        }
    }

    /// CPU time of its threads so far [µs]; those that have ended are not in it.
    pub fn cpu_us(&self) -> f64 {
        let tasks = format!("/proc/{}/task", self.child.id());
        let mut nanos = 0.0;
        for task in std::fs::read_dir(tasks).expect("it lives").flatten() {
            if let Ok(text) = std::fs::read_to_string(task.path().join("schedstat")) {
                nanos += text
                    .split(' ')
                    .next()
                    .and_then(|n| n.parse::<f64>().ok())
                    .unwrap_or(0.0);
            }
        }
        nanos / 1e3
    }

    /// Memory in use [MiB].
    pub fn rss_mib(&self) -> f64 {
        let text =
            std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).expect("it lives");
        let line = text.lines().find(|line| line.starts_with("VmRSS:"));
        let kib = line
            .and_then(|line| line.split_whitespace().nth(1))
            .and_then(|n| n.parse::<f64>().ok());
        kib.unwrap_or(0.0) / 1024.0
    }

    pub fn has_ended(&mut self) -> bool {
        self.child.try_wait().ok().flatten().is_some()
    }
}

/// The installed command `baton`: that of the checkout, or the one in the environment variable
/// BATON.
fn baton_command() -> PathBuf {
    match std::env::var_os("BATON") {
        Some(command) => command.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../.venv/bin/baton"),
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.local_addr().expect("an address").port()
}

/// A directory under the temporary one, removed when dropped.
struct Folder(PathBuf);

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

impl Folder {
    /// One process; kept-alive connections to the workers; bodies in memory; answers passed on as
    /// they come.
    fn with_config(port: u16, workers: &[SocketAddr]) -> Folder {
        let path =
            std::env::temp_dir().join(format!("baton-bench-nginx-{}-{port}", std::process::id()));
        std::fs::create_dir_all(&path).expect("a folder");
        let servers: String = workers
            .iter()
            .map(|addr| format!("    server {addr};\n"))
            .collect();
        let config = format!(
            "daemon off;\nmaster_process off;\npid nginx.pid;\nerror_log error.log;\n\
             events {{ worker_connections 4096; }}\n\
             http {{\n  access_log off;\n  client_body_temp_path body;\n  proxy_temp_path proxy;\n  fastcgi_temp_path fastcgi;\n  \
             uwsgi_temp_path uwsgi;\n  scgi_temp_path scgi;\n  client_max_body_size 64m;\n  client_body_buffer_size 1m;\n  \
             keepalive_requests 1000000;\n  upstream workers {{\n{servers}    keepalive 64;\n    keepalive_requests 1000000;\n  }}\n  \
             server {{\n    listen 127.0.0.1:{port};\n    location / {{\n      proxy_pass http://workers;\n      \
             proxy_http_version 1.1;\n      proxy_set_header Connection \"\";\n      proxy_buffering off;\n    }}\n  }}\n}}\n"
        );
        std::fs::write(path.join("nginx.conf"), config).expect("a file");
        Folder(path)
    }
}
