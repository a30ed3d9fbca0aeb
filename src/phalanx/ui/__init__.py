"""The web console: server-rendered pages over the jobs service, without a build step.

In: requests of a browser. Out: HTML pages of jobs, queue, logs and a form to submit. Start with `console`, then
`pages`.
"""
