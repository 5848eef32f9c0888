//! Files that flags name, or that a checkpoint consists of: regular files, or links to some.
//!
//! A directory, a socket or a device under the name of a file is refused, with its kind in the
//! sentence. A pipe is refused, too, because reading or writing it would wait for the other end.

use std::fs::FileType;
use std::io;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;

/// Content of a regular file. `NotFound`: nothing of this name is there; a link that leads nowhere
/// is another error.
pub fn read_regular_file(path: &Path) -> io::Result<Vec<u8>> {
    refuse_other_kinds(path)?;
    std::fs::read(path)
}

/// An error where `path` is there and is no regular file.
pub fn refuse_other_kinds(path: &Path) -> io::Result<()> {
    let kind = match path.metadata() {
        Ok(found) => found.file_type(),
        Err(err) if err.kind() == io::ErrorKind::NotFound => {
            let Ok(target) = path.read_link() else {
                return Err(err);
            };
            return Err(io::Error::other(format!(
                "it is a link to {}, which is not there",
                target.display()
            )));
        }
        Err(err) => return Err(err),
    };
    match other_kind(kind) {
        None => Ok(()),
        Some(name) => Err(io::Error::other(format!(
            "it is {name}, not a regular file"
        ))),
    }
}

/// An error where `path` is there and nothing can be written to it as to a file.
pub fn refuse_unwritable_kinds(path: &Path) -> io::Result<()> {
    // What is not there is made, and so is the file that a link names.
    if path.exists() {
        refuse_other_kinds(path)?;
    }
    Ok(())
}

fn other_kind(kind: FileType) -> Option<&'static str> {
    if kind.is_dir() {
        Some("a directory")
    } else if kind.is_fifo() {
        Some("a pipe")
    } else if kind.is_socket() {
        Some("a socket")
    } else if kind.is_char_device() || kind.is_block_device() {
        Some("a device")
    } else {
        None
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;
    use std::process::Command;

    use super::*;

    #[test]
    fn other_kinds_are_named_and_absent_files_are_not_found() {
        let folder = std::env::temp_dir().join(format!("baton-files-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder); // of an earlier process with this number
        std::fs::create_dir_all(folder.join("directory")).unwrap();
        std::fs::write(folder.join("file"), "text").unwrap();
        symlink("file", folder.join("link")).unwrap();
        symlink("nowhere", folder.join("dangling")).unwrap();
        symlink("/dev/zero", folder.join("device")).unwrap();
        let pipe = folder.join("pipe");
        assert!(
            Command::new("mkfifo")
                .arg(&pipe)
                .status()
                .unwrap()
                .success()
        );
        let _listener = UnixListener::bind(folder.join("socket")).unwrap();

        assert_eq!(read_regular_file(&folder.join("link")).unwrap(), b"text");
        let absent = read_regular_file(&folder.join("absent")).unwrap_err();
        assert_eq!(absent.kind(), io::ErrorKind::NotFound);
        for (name, said) in [
            ("directory", "it is a directory, not a regular file"),
            ("pipe", "it is a pipe, not a regular file"),
            ("socket", "it is a socket, not a regular file"),
            ("device", "it is a device, not a regular file"),
            ("dangling", "it is a link to nowhere, which is not there"),
        ] {
            let refused = read_regular_file(&folder.join(name)).unwrap_err();
            assert_eq!(refused.to_string(), said, "{name}");
            assert_ne!(refused.kind(), io::ErrorKind::NotFound, "{name}");
            let is_writable = refuse_unwritable_kinds(&folder.join(name)).is_ok();
            assert_eq!(is_writable, name == "dangling", "{name}");
        }
        for name in ["file", "link", "absent"] {
            refuse_unwritable_kinds(&folder.join(name)).unwrap();
        }
        std::fs::remove_dir_all(folder).unwrap();
    }
}
