"""Text and tokens, configuration tables, code of users, and files: what every other room stands on."""
