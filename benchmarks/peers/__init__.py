"""Calls of peers: their names and arguments only, none of their code."""
