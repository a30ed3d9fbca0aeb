"""Code and datasets of a job: fixed at submission, copied or mounted where it runs.

Start with `code`.
"""
