"""Code and datasets of jobs: pinned at submission, fetched and mounted at run time.

Start with `code`.
"""
