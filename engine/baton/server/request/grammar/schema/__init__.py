"""JSON Schemas, made ready for llguidance: exact numbers, and no parts that no answer can complete.

| module | facts |
|---|---|
| `references` | places of a schema that are schemas, and the references to them |
| `number_regex` | numbers within bounds as regexes, texts of single numbers |
| `exact_numbers` | numbers as the client wrote them, and where a schema has them |
| `empty_parts` | parts that no value satisfies |
| `property_names` | objects that have no name left for a further property |
| `number_search` | whether an answer may have a number |
| `merging` | schemas that hold together as one |
| `number_ranges` | ranges that keywords state, multiples that llguidance computes |
| `schema_writer` | a schema as rules of llguidance's language, for the parts that hold numbers |
"""
