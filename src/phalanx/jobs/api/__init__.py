"""The jobs API over HTTP (FastAPI, OpenAPI), under /api/v1.

In: HTTP requests with a bearer token. Out: calls of the jobs service, JSON, streams of logs. Start with `app`, then
`verbs`.
"""
