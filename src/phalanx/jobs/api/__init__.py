"""Jobs over HTTP: the service's verbs under /api/v1, described by OpenAPI."""
