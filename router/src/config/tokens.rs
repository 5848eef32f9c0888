//! Flags of the router's tokenizer.

use clap::{ArgAction, Args};

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Tokenizer")]
pub struct TokenizerFlags {
    /// The model's directory: with its tokenizer and chat template prompts are counted and
    /// matched in tokens, as the engines do; without, in characters
    #[arg(long, value_name = "DIR")]
    pub model_path: Option<String>,
    /// Directory of the tokenizer, if it is another [default: --model-path]
    #[arg(long, value_name = "DIR")]
    pub tokenizer_path: Option<String>,
    /// File with the Jinja chat template, if the engines have it from a file [default: the
    /// tokenizer's]
    #[arg(long, value_name = "FILE")]
    pub chat_template: Option<String>,
    /// Send the token ids beside the body to Baton's engines with the same tokenizer and template,
    /// which then do not tokenize again
    #[arg(long)]
    pub forward_input_ids: bool,
    /// Tokens in a block, the unit in which prompts given as token ids, or tokenized here, are
    /// matched (smg: 16)
    #[arg(long, default_value_t = 64, value_name = "TOKENS")]
    pub block_size: usize,
    /// Cache the ids of whole texts: useful where equal prompts are repeated
    #[arg(long, default_value_t = false, default_missing_value = "true", num_args = 0..=1)]
    #[arg(require_equals = true, action = ArgAction::Set, value_name = "BOOL")]
    pub tokenizer_cache_enable_l0: bool,
    /// Most texts in that cache
    #[arg(long, default_value_t = 10_000, value_name = "N")]
    pub tokenizer_cache_l0_max_entries: usize,
    /// Most memory of that cache [bytes]
    #[arg(long, default_value_t = 52_428_800, value_name = "BYTES")]
    pub tokenizer_cache_l0_max_memory: usize,
    /// Remember the ids of text between special tokens (system prompts, earlier turns); =false: do
    /// not (SGLang's router: off)
    #[arg(long, default_value_t = true, default_missing_value = "true", num_args = 0..=1)]
    #[arg(require_equals = true, action = ArgAction::Set, value_name = "BOOL")]
    pub tokenizer_cache_enable_l1: bool,
    /// Most memory of that cache [bytes]
    #[arg(long, default_value_t = 52_428_800, value_name = "BYTES")]
    pub tokenizer_cache_l1_max_memory: usize,
}

/// Longer blocks match next to nothing.
const MAX_BLOCK_SIZE: usize = 4096;

impl TokenizerFlags {
    /// True if the flags name a tokenizer.
    pub fn is_named(&self) -> bool {
        self.model_path.is_some() || self.tokenizer_path.is_some()
    }

    pub fn validate(&self, errors: &mut Vec<String>) {
        let size = self.block_size;
        if !(1..=MAX_BLOCK_SIZE).contains(&size) {
            errors.push(format!(
                "--block-size {size}: give 1 to {MAX_BLOCK_SIZE} tokens, best a multiple of the \
                 workers' --page-size"
            ));
        }
        let needs = [
            ("--chat-template", self.chat_template.is_some()),
            ("--forward-input-ids", self.forward_input_ids),
            (
                "--tokenizer-cache-enable-l0",
                self.tokenizer_cache_enable_l0,
            ),
        ];
        for (flag, _) in needs.iter().filter(|(_, given)| *given && !self.is_named()) {
            errors.push(format!(
                "{flag} needs a tokenizer; give --model-path or --tokenizer-path"
            ));
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::config::{ParseStop, RouterConfig};

    fn parse(args: &str) -> Result<RouterConfig, ParseStop> {
        let argv = std::iter::once("baton-router").chain(args.split_whitespace());
        RouterConfig::parse(&argv.map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn cache_switches_are_flags_and_take_a_value() {
        let tokens =
            parse("--model-path m --tokenizer-cache-enable-l0 --tokenizer-cache-enable-l1=false");
        let tokens = tokens.unwrap().tokens;
        assert!(tokens.tokenizer_cache_enable_l0 && !tokens.tokenizer_cache_enable_l1);
        // As launch scripts of SGLang's router write them.
        let tokens =
            parse("--tokenizer-cache-enable-l1 --tokenizer-cache-l1-max-memory 9 --port 1")
                .unwrap();
        assert!(
            tokens.tokens.tokenizer_cache_enable_l1 && !tokens.tokens.tokenizer_cache_enable_l0
        );
    }

    #[test]
    fn what_needs_a_tokenizer_says_so() {
        for flag in [
            "--chat-template x",
            "--forward-input-ids",
            "--tokenizer-cache-enable-l0",
        ] {
            match parse(flag) {
                Err(ParseStop::Bad(text)) => assert!(text.contains("give --model-path"), "{text}"),
                other => panic!("{flag}: {other:?}"),
            }
            parse(&format!("{flag} --tokenizer-path t")).unwrap();
        }
        assert!(
            matches!(parse("--block-size 0"), Err(ParseStop::Bad(text)) if text.contains("--block-size 0"))
        );
    }
}
