"""The jobs service: submit, watch, stop and configure jobs, with permissions and validation.

Start with `service`.
"""
