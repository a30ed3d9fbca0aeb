"""Elastic membership: which ranks belong to a running job, and how they are started, judged and told."""

from __future__ import annotations
