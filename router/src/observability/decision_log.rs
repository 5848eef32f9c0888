//! `--decision-log`: the journal's lines on disk, written by a thread of their own.
//!
//! 1. a decision puts its line into a queue, under the lock that gives it its number. The queue is
//!    bounded in lines and bytes; a full one drops the line and counts it: a request never waits
//!    for a disk, and the gap in the numbers shows;
//! 2. the thread writes, and flushes whenever the queue is empty;
//! 3. a file that has reached --decision-log-max-bytes becomes PATH.1, that one PATH.2, up to
//!    --decision-log-files; each begins with the header of the run. Replay takes them all, oldest
//!    first.

use std::fs::{File, rename};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use prometheus::IntCounterVec;
use router_core::decision_log::{FORMAT, LogHeader, LogLine, LogSink};

use crate::clock::unix_time;

/// Lines that wait to be written: a second of a busy router.
const MAX_LINES: usize = 16_384;
/// The same in bytes; a prompt of 32 000 tokens is 4 KB of hashes.
const MAX_BYTES: usize = 64 << 20;
/// At shutdown the rest is written within this time, or lost.
const LAST_WORDS: Duration = Duration::from_secs(2);

/// Place that --decision-log and the flags beside it name.
#[derive(Debug, Clone)]
pub struct LogLocation {
    pub path: PathBuf,
    pub max_bytes: u64,
    pub max_files: u32,
}

/// The queue's end that policies see.
pub struct LogQueue {
    lines: SyncSender<Message>,
    waiting_bytes: Arc<AtomicUsize>,
    counts: IntCounterVec,
}

enum Message {
    Line(Box<LogLine>),
    /// The router is going down.
    Stop,
}

/// The thread's handle.
pub struct LogWriter {
    lines: SyncSender<Message>,
    thread: JoinHandle<()>,
}

/// Open the first file, start the thread. `counts` is by result: written, dropped (the queue was
/// full), failed (the disk).
pub fn start(
    place: LogLocation,
    flags: Vec<String>,
    counts: IntCounterVec,
) -> Result<(LogQueue, LogWriter), String> {
    let version = env!("CARGO_PKG_VERSION").to_owned();
    let run = unix_time().as_millis() as u64;
    let header = LogHeader {
        decision_log: FORMAT,
        version,
        run,
        file: 0,
        flags,
    };
    let shown = place.path.display().to_string();
    let files = Files::open(place, header).map_err(|err| {
        format!("--decision-log {shown}: {err}; give a file in a folder this user may write to")
    })?;
    let (lines, received) = sync_channel(MAX_LINES);
    let waiting_bytes = Arc::new(AtomicUsize::new(0));
    let waiting = waiting_bytes.clone();
    let counted = counts.clone();
    let thread = std::thread::Builder::new()
        .name("decision-log".into())
        .spawn(move || write_lines(&received, files, &waiting, &counted))
        .map_err(|err| format!("--decision-log: cannot start its thread: {err}"))?;
    let queue = LogQueue {
        lines: lines.clone(),
        waiting_bytes,
        counts,
    };
    Ok((queue, LogWriter { lines, thread }))
}

impl LogSink for LogQueue {
    fn put_line(&self, line: LogLine) {
        let bytes = line.bytes();
        let waiting = self.waiting_bytes.fetch_add(bytes, Ordering::Relaxed);
        let is_sent = waiting + bytes <= MAX_BYTES
            && self.lines.try_send(Message::Line(Box::new(line))).is_ok();
        if !is_sent {
            self.waiting_bytes.fetch_sub(bytes, Ordering::Relaxed);
            self.counts.with_label_values(&["dropped"]).inc();
        }
    }
}

impl LogWriter {
    /// Write what is queued, for at most `LAST_WORDS`.
    pub fn stop(self) {
        let until = Instant::now() + LAST_WORDS;
        // A full queue takes the message a moment later; a thread that is gone never does.
        while let Err(TrySendError::Full(_)) = self.lines.try_send(Message::Stop) {
            if Instant::now() > until {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        while !self.thread.is_finished() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Write lines to the files until the router stops or no policy is left.
fn write_lines(
    lines: &Receiver<Message>,
    mut files: Files,
    waiting_bytes: &AtomicUsize,
    counts: &IntCounterVec,
) {
    /// Longest time without a flush: what is not flushed is lost in a crash.
    const QUIET: Duration = Duration::from_millis(100);
    let path = files.place.path.clone();
    let mut is_failing = false;
    // A failure is reported once, until it works again.
    let mut note = |outcome: io::Result<()>| {
        let was_failing = std::mem::replace(&mut is_failing, outcome.is_err());
        if let Err(err) = outcome
            && !was_failing
        {
            let path = path.display();
            tracing::error!(%path, %err, "cannot write the decision log; decisions go on without it");
        }
    };
    let mut is_dirty = false;
    loop {
        let message = if is_dirty {
            lines.recv_timeout(QUIET)
        } else {
            lines.recv().map_err(|_| RecvTimeoutError::Disconnected)
        };
        match message {
            Ok(Message::Line(line)) => {
                is_dirty = true;
                waiting_bytes.fetch_sub(line.bytes(), Ordering::Relaxed);
                let written = files.write(&line);
                let result = if written.is_ok() { "written" } else { "failed" };
                counts.with_label_values(&[result]).inc();
                note(written);
            }
            Err(RecvTimeoutError::Timeout) => {
                is_dirty = false;
                note(files.out.flush());
            }
            Ok(Message::Stop) | Err(RecvTimeoutError::Disconnected) => {
                return note(files.out.flush());
            }
        }
    }
}

struct Files {
    place: LogLocation,
    header: LogHeader,
    out: BufWriter<File>,
    bytes: u64,
}

impl Files {
    fn open(place: LogLocation, header: LogHeader) -> io::Result<Self> {
        // What an earlier run left is kept, as if it had been full.
        if place.path.metadata().is_ok_and(|old| old.len() > 0) {
            shift(&place.path, place.max_files)?;
        }
        let out = BufWriter::new(File::create(&place.path)?);
        let mut files = Self {
            place,
            header,
            out,
            bytes: 0,
        };
        files.begin()?;
        files.out.flush()?;
        Ok(files)
    }

    fn begin(&mut self) -> io::Result<()> {
        let mut text = serde_json::to_vec(&self.header)?;
        text.push(b'\n');
        self.bytes = text.len() as u64;
        self.out.write_all(&text)
    }

    fn write(&mut self, line: &LogLine) -> io::Result<()> {
        let mut text = serde_json::to_vec(line)?;
        text.push(b'\n');
        if self.bytes + text.len() as u64 > self.place.max_bytes {
            self.out.flush()?;
            shift(&self.place.path, self.place.max_files)?;
            self.out = BufWriter::new(File::create(&self.place.path)?);
            self.header.file += 1;
            self.begin()?;
        }
        self.bytes += text.len() as u64;
        self.out.write_all(&text)
    }
}

/// PATH becomes PATH.1, PATH.1 becomes PATH.2, and so on; `files` in all, the last one is
/// overwritten.
fn shift(path: &Path, files: u32) -> io::Result<()> {
    for number in (1..files).rev() {
        match rename(numbered(path, number - 1), numbered(path, number)) {
            Err(err) if err.kind() != io::ErrorKind::NotFound => return Err(err),
            _ => {}
        }
    }
    Ok(())
}

fn numbered(path: &Path, number: u32) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    if number > 0 {
        name.push(format!(".{number}"));
    }
    name.into()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use prometheus::Opts;
    use router_core::Role;
    use router_core::decision_log::LogEntry;

    use super::*;

    fn folder(name: &str) -> PathBuf {
        let folder = std::env::temp_dir().join(format!("baton-log-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&folder); // of an earlier run with this number
        std::fs::create_dir_all(&folder).unwrap();
        folder
    }

    fn line(n: u64) -> LogLine {
        let role = Role::Regular;
        let now_ms = 5;
        let entry = LogEntry::Evict { role, now_ms };
        LogLine { n, entry }
    }

    fn counts() -> IntCounterVec {
        IntCounterVec::new(Opts::new("lines", "lines"), &["result"]).unwrap()
    }

    #[test]
    fn files_are_shifted_at_the_limit_and_each_begins_with_the_header() {
        let folder = folder("shift");
        let path = folder.join("log");
        let place = || LogLocation {
            path: path.clone(),
            max_bytes: 400,
            max_files: 3,
        };
        let counted = counts();
        let (queue, writer) = start(place(), vec!["--policy".into()], counted.clone()).unwrap();
        (0..40).for_each(|n| queue.put_line(line(n)));
        writer.stop();
        assert_eq!(counted.with_label_values(&["written"]).get(), 40);
        let mut next = 40;
        for number in 0..3 {
            let text = std::fs::read_to_string(numbered(&path, number)).unwrap();
            assert!(text.len() <= 400);
            let mut lines = text.lines();
            let header: LogHeader = serde_json::from_str(lines.next().unwrap()).unwrap();
            assert_eq!(header.flags, ["--policy"]);
            let numbers: Vec<u64> = lines
                .map(|l| serde_json::from_str::<LogLine>(l).unwrap().n)
                .collect();
            assert_eq!(*numbers.last().unwrap() + 1, next);
            assert!(numbers.is_sorted());
            next = numbers[0];
        }
        assert!(!numbered(&path, 3).exists());
        // The next run keeps what this one wrote.
        let before = std::fs::read_to_string(&path).unwrap();
        let (_queue, writer) = start(place(), Vec::new(), counts()).unwrap();
        writer.stop();
        assert_eq!(std::fs::read_to_string(numbered(&path, 1)).unwrap(), before);
        std::fs::remove_dir_all(folder).unwrap();
    }

    #[test]
    fn full_queue_drops_and_counts_and_never_waits() {
        let counted = counts();
        let (lines, _unread) = sync_channel(2);
        let queue = LogQueue {
            lines,
            waiting_bytes: Arc::default(),
            counts: counted.clone(),
        };
        (0..5).for_each(|n| queue.put_line(line(n)));
        assert_eq!(counted.with_label_values(&["dropped"]).get(), 3);
        let two = 2 * line(0).bytes();
        assert_eq!(queue.waiting_bytes.load(Ordering::Relaxed), two);
    }

    #[test]
    fn place_that_cannot_be_written_is_refused_with_its_name() {
        let place = LogLocation {
            path: "/proc/nowhere/log".into(),
            max_bytes: 1 << 20,
            max_files: 2,
        };
        let refusal = start(place, Vec::new(), counts()).err().unwrap();
        assert!(
            refusal.starts_with("--decision-log /proc/nowhere/log: "),
            "{refusal}"
        );
    }
}
