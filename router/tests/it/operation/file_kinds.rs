//! Files that flags name and that are no regular files: a sentence in place of a wait or a guess.

use std::os::unix::fs::symlink;
use std::path::PathBuf;
use std::process::Command;

use crate::support::{refused_start, timed};

/// Folder with a pipe, a directory and a link that leads nowhere.
struct OtherKinds(PathBuf);

impl OtherKinds {
    fn new() -> Self {
        let folder = std::env::temp_dir().join(format!("baton-kinds-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder); // of an earlier process with this number
        std::fs::create_dir_all(folder.join("directory")).unwrap();
        for (model, name) in [
            ("piped", "tokenizer.json"),
            ("linked", "chat_template.jinja"),
        ] {
            std::fs::create_dir_all(folder.join(model)).unwrap();
            let file = folder.join(model).join(name);
            match model {
                "piped" => assert!(
                    Command::new("mkfifo")
                        .arg(&file)
                        .status()
                        .unwrap()
                        .success()
                ),
                _ => symlink("nowhere", &file).unwrap(),
            }
        }
        Self(folder)
    }

    fn path(&self, name: &str) -> String {
        self.0.join(name).display().to_string()
    }
}

impl Drop for OtherKinds {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0); // what is left stands in the temporary folder
    }
}

#[tokio::test]
async fn other_kinds_of_files_end_the_start_with_a_sentence() {
    timed(async {
        let kinds = OtherKinds::new();
        let pipe = kinds.path("piped/tokenizer.json");
        let directory = kinds.path("directory");
        let piped = kinds.path("piped");
        let linked = kinds.path("linked");
        let workers = ["--worker-urls", "http://127.0.0.1:1"];
        for (flags, said) in [
            (vec!["--model-path", &piped], "it is a pipe"),
            (vec!["--tokenizer-path", &piped], "it is a pipe"),
            (vec!["--model-path", &linked], "it is a link to nowhere"),
            (
                vec!["--tls-cert-path", &pipe, "--tls-key-path", &pipe],
                "it is a pipe",
            ),
            (vec!["--ca-cert-paths", &directory], "it is a directory"),
            (vec!["--discovery-file", &pipe], "it is a pipe"),
            (vec!["--decision-log", &directory], "it is a directory"),
            (vec!["--decision-log", &pipe], "it is a pipe"),
        ] {
            let mut all = flags.clone();
            if flags[0] != "--discovery-file" {
                all.extend(workers);
            }
            let text = refused_start(&all).await;
            assert!(text.contains(said), "{flags:?}: {text}");
        }
    })
    .await;
}
