"""Verifiers of form: JSON, SQL, grammars, regular expressions, sections between tags."""
