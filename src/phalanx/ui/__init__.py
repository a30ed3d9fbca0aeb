"""The console: pages over the jobs' service, made on the server; no build step, nothing fetched from elsewhere."""
