"""stub"""
from __future__ import annotations
def render(results, facts):
    return ""
