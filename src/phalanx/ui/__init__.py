"""The web console: server-rendered pages over the jobs service, without a build step."""
