"""Description of the HTTP API of engines and router, as an OpenAPI 3.1 document and as a page.

answers        forms of answers
operations     every path with its methods, bodies and answers
document       the OpenAPI document
page           the page of /docs
handlers       both on an engine

`python -m baton.server.http.openapi` writes the files that the router embeds.
"""
