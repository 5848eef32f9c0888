"""CPU time of an engine's front: per streamed token, per request, per long prompt; and what large bodies do to it.

| module | subject |
|---|---|
| `__main__` | the cells, their arms and the table |
| `answer_arms` | kinds of answers whose cost per token is compared |
| `engines` | engines without a model, of one source tree or two |
| `client` | a process of its own that sends requests and reads answers at little cost |
| `made_tokenizer` | a tokenizer with 150,000 tokens |
"""
