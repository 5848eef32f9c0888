"""Description of the HTTP API of engines and router, as an OpenAPI 3.1 document and as a page.

document       the OpenAPI document, made of the table of routes
page           the page of /docs

`python -m baton.server.http.openapi` writes the files that the router embeds.
"""
