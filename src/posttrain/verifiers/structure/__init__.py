"""Verifiers of form: JSON, SQL, grammars, patterns, sections between tags."""
