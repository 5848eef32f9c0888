"""HTTP front of an engine, its rank processes, and their start.

| package | holds |
|---|---|
| `http/` | routes, request handling, life cycle, tracer |
| `request/` | requests: schema, validation, placement, tenancy, resume |
| `response/` | answers: generation, OpenAI's and SGLang's formats, streams |
| `text/` | tokenizer, chat template, detokenizer, facts about a model directory |
| `worker/` | the rank process, its client in the front, their messages, its log files |
| `worker/tensor_parallel/` | a group of processes that computes one model |
| `worker/kv_events/` | announcements of cached blocks |
| `observability/` | metrics, spans, load reports, diagnosis |
| `fields` | JSON objects of requests, and what is wrong in them |
| `logs` | log lines: text or JSON |
| `launch/` | `baton engine`: start, drain and end of the processes of one engine |
"""
