//! Prompts that are cut to a number of tokens (`truncate_prompt_tokens`, `truncation_side`).

use std::ops::Range;

use serde::Deserialize;
use serde_json::value::RawValue;

/// Longest text of a prompt that is cut, where the context has room for less: tokenizing it takes
/// some two seconds [characters].
pub const CUT_TEXT_CHARS: u64 = 4 << 20;

/// The end of a prompt at which tokens are dropped.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TruncationSide {
    #[default]
    Left,
    Right,
}

/// Longest prompt, and the end at which longer ones lose tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PromptCut {
    pub tokens: usize,
    pub side: TruncationSide,
}

impl PromptCut {
    /// The part that stays of `count` tokens.
    pub fn kept(self, count: usize) -> Range<usize> {
        let dropped = count.saturating_sub(self.tokens);
        match self.side {
            TruncationSide::Left => dropped..count,
            TruncationSide::Right => 0..count - dropped,
        }
    }
}

/// Truncation that a body asks for.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub enum PromptTruncation {
    /// They are not cut, or the body says something that an engine refuses.
    #[default]
    Off,
    /// They are cut to what the context of the engine and the limit of the answer leave.
    ToContext,
    To(PromptCut),
}

impl PromptTruncation {
    /// Members of a body: `truncate_prompt_tokens` and `truncation_side`.
    pub fn read(tokens: Option<&RawValue>, side: Option<&RawValue>) -> Self {
        let tokens = tokens.and_then(|json| serde_json::from_str::<i64>(json.get()).ok());
        let side = side.map_or(Ok(None), |json| serde_json::from_str(json.get()));
        match (tokens, side) {
            (Some(-1), Ok(_)) => Self::ToContext,
            (Some(tokens @ 1..), Ok(side)) => Self::To(PromptCut {
                tokens: usize::try_from(tokens).unwrap_or(usize::MAX),
                side: side.unwrap_or_default(),
            }),
            _ => Self::Off,
        }
    }

    /// How prompts are cut whatever engine takes the request.
    pub fn cut(self) -> Option<PromptCut> {
        match self {
            Self::To(cut) => Some(cut),
            Self::Off | Self::ToContext => None,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn members_that_an_engine_refuses_cut_nothing() {
        let read = |tokens: &str, side: &str| {
            let tokens: &RawValue = serde_json::from_str(tokens).unwrap();
            let side: &RawValue = serde_json::from_str(side).unwrap();
            PromptTruncation::read(Some(tokens), Some(side))
        };
        let to = |tokens, side| PromptTruncation::To(PromptCut { tokens, side });
        assert_eq!(read("3", "null"), to(3, TruncationSide::Left));
        assert_eq!(read("3", "\"right\""), to(3, TruncationSide::Right));
        assert_eq!(read("-1", "\"left\""), PromptTruncation::ToContext);
        for (tokens, side) in [
            ("0", "null"),
            ("-2", "null"),
            ("\"3\"", "null"),
            ("3", "3"),
            ("null", "null"),
        ] {
            assert_eq!(read(tokens, side), PromptTruncation::Off, "{tokens} {side}");
        }
        assert_eq!(PromptTruncation::read(None, None), PromptTruncation::Off);
    }

    #[test]
    fn longer_prompts_lose_tokens_at_one_end() {
        for (side, kept) in [(TruncationSide::Left, 2..5), (TruncationSide::Right, 0..3)] {
            let cut = PromptCut { tokens: 3, side };
            assert_eq!(cut.kept(5), kept);
            assert_eq!(cut.kept(3), 0..3);
            assert_eq!(cut.kept(2), 0..2);
        }
    }
}
