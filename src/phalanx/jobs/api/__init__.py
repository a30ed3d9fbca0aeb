"""The jobs API over HTTP (FastAPI, OpenAPI), under /api/v1."""
