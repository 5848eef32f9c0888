//! The end of a Python argument in a growing text.

/// Place in an expression.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum ExpressionPlace {
    #[default]
    Code,
    /// Behind one or two quotes that may become the quotes of a long string.
    Opening { quote: char, count: usize },
    Quoted {
        quote: char,
        is_long: bool,
        /// Quotes of a long string's end that were read.
        closing: usize,
        is_escaped: bool,
    },
}

/// Finds the comma or the parenthesis that ends an argument. Brackets and commas in strings are
/// data; nothing else is checked.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExpressionScanner {
    place: ExpressionPlace,
    depth: usize,
}

impl ExpressionScanner {
    /// True inside a string.
    pub fn is_in_string(&self) -> bool {
        matches!(
            self.place,
            ExpressionPlace::Quoted { .. } | ExpressionPlace::Opening { count: 1, .. }
        )
    }

    /// Reads more text of the argument. Returns the place of the `,` or `)` that ends it, `None` if
    /// it does not end in this text.
    pub fn find_end(&mut self, text: &str) -> Option<usize> {
        text.char_indices()
            .find(|&(_, character)| self.read_char(character))
            .map(|(index, _)| index)
    }

    /// Returns true if this character ends the argument.
    fn read_char(&mut self, character: char) -> bool {
        match self.place {
            ExpressionPlace::Code => self.read_code(character),
            ExpressionPlace::Opening { quote, count } => self.read_opening(quote, count, character),
            ExpressionPlace::Quoted { .. } => {
                self.read_quoted(character);
                false
            }
        }
    }

    fn read_code(&mut self, character: char) -> bool {
        match character {
            ',' | ')' if self.depth == 0 => return true,
            '(' | '[' | '{' => self.depth += 1,
            ')' | ']' | '}' => self.depth = self.depth.saturating_sub(1),
            '\'' | '"' => {
                self.place = ExpressionPlace::Opening {
                    quote: character,
                    count: 1,
                };
            }
            _ => {}
        }
        false
    }

    fn read_opening(&mut self, quote: char, count: usize, character: char) -> bool {
        let is_quote = character == quote;
        if is_quote && count == 1 {
            self.place = ExpressionPlace::Opening { quote, count: 2 };
            return false;
        }
        let is_empty_string = count == 2 && !is_quote;
        if is_empty_string {
            self.place = ExpressionPlace::Code;
            return self.read_code(character);
        }
        self.place = ExpressionPlace::Quoted {
            quote,
            is_long: is_quote,
            closing: 0,
            is_escaped: false,
        };
        if !is_quote {
            self.read_quoted(character);
        }
        false
    }

    fn read_quoted(&mut self, character: char) {
        let ExpressionPlace::Quoted {
            quote,
            is_long,
            closing,
            is_escaped,
        } = &mut self.place
        else {
            return;
        };
        if *is_escaped {
            *is_escaped = false;
            return;
        }
        if character == *quote {
            *closing += 1;
        } else {
            *closing = 0;
            *is_escaped = character == '\\';
        }
        let quotes_needed = if *is_long { 3 } else { 1 };
        if *closing == quotes_needed {
            self.place = ExpressionPlace::Code;
        }
    }
}
