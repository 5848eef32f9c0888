//! Headers between engines and routers, and the names of their parts.
//!
//! Engines write them and read them by the same constants, through the native extension.

/// Makes a module of names, and a list of them for the native extension.
macro_rules! names {
    ($(#[$doc:meta])* $module:ident { $($name:ident = $text:literal),+ $(,)? }) => {
        $(#[$doc])*
        pub mod $module {
            $(pub const $name: &str = $text;)+

            /// Each constant's name with its text.
            pub const ALL: &[(&str, &str)] = &[$((stringify!($name), $text)),+];
        }
    };
}

names! {
    /// Headers that this crate reads or writes; the text layer has those of requests.
    headers {
        LOAD = "x-baton-load",
        STAGES = "x-baton-stages",
        CLIENT = "x-baton-client",
    }
}

names! {
    /// Parts of the header with an engine's load. Routers read some of them.
    load_keys {
        INCARNATION = "inc",
        RANK = "rank",
        REQUESTS = "reqs",
        TOKENS = "tokens",
        AGE_MS = "age_ms",
        RUNNING = "running",
        QUEUED = "queued",
        QUEUED_TOKENS = "queued_tokens",
        STARTED_TOKENS = "started_tokens",
        PAGES_FREE = "pages_free",
        PAGES = "pages",
        FURTHER_PAGES = "further_pages",
        PREFILL_RATE = "prefill_rate",
        DECODE_RATE = "decode_rate",
        PREFILLED = "prefilled",
        GENERATED = "generated",
        DRAFTED = "drafted",
        ACCEPTED = "accepted",
        BANDS = "bands",
    }
}

names! {
    /// Parts of the header with a request's times up to the first token.
    stage_keys {
        QUEUE_US = "queue_us",
        TRANSPORT = "transport",
        PAGES = "pages",
        BYTES = "bytes",
        PULL_US = "pull_us",
    }
}
