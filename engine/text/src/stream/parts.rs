//! Parts of an answer: its reasoning, its content and its tool calls.

/// Part of an answer. The parts of an answer joined are the same however its tokens are grouped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AnswerPart {
    /// Text of the reasoning.
    Reasoning(String),
    /// Text for the client.
    Content(String),
    /// A call of the tool with this name begins. Calls do not overlap.
    CallBegin(String),
    /// JSON text of the arguments of the call that was begun.
    Arguments(String),
    /// The call is complete. A call that the answer's end cuts off has none.
    CallEnd,
}

/// Parts in the order of the answer. Neighbors that are text of the same kind are one part.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AnswerParts(Vec<AnswerPart>);

impl AnswerParts {
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub fn iter(&self) -> std::slice::Iter<'_, AnswerPart> {
        self.0.iter()
    }

    /// Calls that begin here.
    pub fn begun_calls(&self) -> usize {
        let is_begin = |part: &&AnswerPart| matches!(part, AnswerPart::CallBegin(_));
        self.0.iter().filter(is_begin).count()
    }

    pub fn remove_reasoning(&mut self) {
        self.0
            .retain(|part| !matches!(part, AnswerPart::Reasoning(_)));
    }

    pub fn clear(&mut self) {
        self.0.clear();
    }

    pub fn push_reasoning(&mut self, text: &str) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(AnswerPart::Reasoning(before)) => before.push_str(text),
            _ => self.0.push(AnswerPart::Reasoning(text.to_owned())),
        }
    }

    pub fn push_content(&mut self, text: &str) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(AnswerPart::Content(before)) => before.push_str(text),
            _ => self.0.push(AnswerPart::Content(text.to_owned())),
        }
    }

    pub fn push_arguments(&mut self, text: &str) {
        match self.0.last_mut() {
            _ if text.is_empty() => {}
            Some(AnswerPart::Arguments(before)) => before.push_str(text),
            _ => self.0.push(AnswerPart::Arguments(text.to_owned())),
        }
    }

    pub fn begin_call(&mut self, name: &str) {
        self.0.push(AnswerPart::CallBegin(name.to_owned()));
    }

    pub fn end_call(&mut self) {
        self.0.push(AnswerPart::CallEnd);
    }

    pub fn push(&mut self, part: &AnswerPart) {
        match part {
            AnswerPart::Reasoning(text) => self.push_reasoning(text),
            AnswerPart::Content(text) => self.push_content(text),
            AnswerPart::Arguments(text) => self.push_arguments(text),
            AnswerPart::CallBegin(name) => self.begin_call(name),
            AnswerPart::CallEnd => self.end_call(),
        }
    }

    pub fn extend(&mut self, other: &AnswerParts) {
        for part in &other.0 {
            self.push(part);
        }
    }

    /// Text of all parts of the content.
    pub fn content(&self) -> String {
        let texts = self.0.iter().map(|part| match part {
            AnswerPart::Content(text) => text.as_str(),
            _ => "",
        });
        texts.collect()
    }

    /// Text of all parts of the reasoning.
    pub fn reasoning(&self) -> String {
        let texts = self.0.iter().map(|part| match part {
            AnswerPart::Reasoning(text) => text.as_str(),
            _ => "",
        });
        texts.collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbors_of_one_kind_are_one_part() {
        let mut parts = AnswerParts::default();
        parts.push_reasoning("a");
        parts.push_reasoning("");
        parts.push_reasoning("b");
        parts.push_content("c");
        parts.begin_call("f");
        parts.push_arguments("{");
        let mut rest = AnswerParts::default();
        rest.push_arguments("}");
        rest.end_call();
        rest.push_content("d");
        parts.extend(&rest);
        let expected = [
            AnswerPart::Reasoning("ab".to_owned()),
            AnswerPart::Content("c".to_owned()),
            AnswerPart::CallBegin("f".to_owned()),
            AnswerPart::Arguments("{}".to_owned()),
            AnswerPart::CallEnd,
            AnswerPart::Content("d".to_owned()),
        ];
        assert!(parts.iter().eq(&expected));
        assert_eq!(
            (parts.content(), parts.reasoning()),
            ("cd".to_owned(), "ab".to_owned())
        );
    }
}
