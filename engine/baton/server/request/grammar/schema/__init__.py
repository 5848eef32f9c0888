"""JSON Schemas as grammars whose numbers are exact.

| module | facts |
|---|---|
| `number_regex` | numbers within bounds as regexes, texts of single numbers |
| `exact_numbers` | numbers as the client wrote them, and where a schema has them |
| `number_search` | whether an answer may have a number |
| `merging` | schemas that hold together as one |
| `number_ranges` | ranges that keywords state, multiples that llguidance computes |
| `schema_writer` | a schema as rules of llguidance's language, for the parts that hold numbers |
"""
