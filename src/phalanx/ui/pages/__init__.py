"""Pages of the web console, one module each: what an address shows and what its forms do.

A request comes in with its `ConsoleSession`; a page asks `session.jobs` and renders a template. No page has rules of
its own about who may do what: the jobs service has them. Read `job_list` first, then `job_page`.
"""
