"""Code and datasets of jobs: pinned at submission, fetched and mounted at run time.

In: addresses of code and datasets from a job's spec. Out: at submission a commit or digest of each; on a node files,
fetched once and mounted. Start with `code`.
"""
